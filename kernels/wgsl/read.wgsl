// read.wgsl: reads a buffer and does nothing else: the ceiling that decode is compared with.
@group(0) @binding(0) var<storage, read> data: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(256)
fn read_all(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let count = arrayLength(&data);
    let stride = workgroups.x * 256u;
    var sum = vec4<u32>(0u);
    for (var i = workgroup.x * 256u + tid; i < count; i += 8u * stride) {
#for n in 0..8
        let v_$(n) = data[min(i + $(n)u * stride, count - 1u)];
#end
#for n in 0..8
        sum ^= v_$(n);
#end
    }
    // Never true for the bench's data; it keeps the compiler from dropping the reads.
    if (sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9E3779B9u {
        sums[0] = tid;
    }
}
