// query_unit.wgsl: the query as the kernels read it. Included by decode_split.wgsl.

// q' of 16 dims of one row.
fn query_unit(sequence: u32, head: u32, row: u32, unit: u32) -> array<vec4<f32>, 4> {
    let heads = params.heads_per_kv;
    let rows = heads * params.q_len;
    let safe = min(row, rows - 1u);
    let i = safe / heads;
    let h = head * heads + (safe - i * heads);
    let at = ((sequence * params.q_len + i) * params.num_q_heads + h) * $(D / 4)u + unit * 4u;
    let c = params.log2_scale * bitcast<f32>(tables[params.scales_at + 2u * head]);
#if INTEGER && K == CHANNEL
    return array<vec4<f32>, 4>(round_13(q[at] * c), round_13(q[at + 1u] * c), round_13(q[at + 2u] * c), round_13(q[at + 3u] * c));
#else
    return array<vec4<f32>, 4>(q[at] * c, q[at + 1u] * c, q[at + 2u] * c, q[at + 3u] * c);
#end
}

fn largest_of(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn largest(x: array<vec4<f32>, 4>) -> f32 {
    return largest_of(max(max(abs(x[0]), abs(x[1])), max(abs(x[2]), abs(x[3]))));
}
