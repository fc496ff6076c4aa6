// plane.wgsl: a row as 15-bit integers in two planes of bytes, q15 = 128 hi + lo (docs/arithmetic.md, section 2).

// Stores 16 dims at `at` (hi) and `at + 1` (lo); returns the sum of q15.
fn store_plane(at: u32, x: array<vec4<f32>, 4>, scale: f32) -> i32 {
#for w in 0..4
    let q$(w) = rhe4(x[$(w)] * scale);
#end
    planes[at] = vec4<u32>(pack4xI8(q0 >> vec4<u32>(7u)), pack4xI8(q1 >> vec4<u32>(7u)), pack4xI8(q2 >> vec4<u32>(7u)), pack4xI8(q3 >> vec4<u32>(7u)));
    planes[at + 1u] = vec4<u32>(pack4xI8(q0 & vec4<i32>(127)), pack4xI8(q1 & vec4<i32>(127)), pack4xI8(q2 & vec4<i32>(127)), pack4xI8(q3 & vec4<i32>(127)));
    let sum = (q0 + q1) + (q2 + q3);
    return (sum.x + sum.y) + (sum.z + sum.w);
}
