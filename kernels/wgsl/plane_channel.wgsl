// plane_channel.wgsl: q' folded with the scales of a sealed page's channels, as planes, and the term of its shifts.
// An open page holds int8 codes with a scale per token: its channels count as scale 1, shift 0. Included by tile.wgsl.
workgroupBarrier();
#for n in 0..((UNITS * 4 + T - 1) / T)
if tid + $(T * n)u < $(UNITS * 4)u {
    var scale = vec4<f32>(1.0);
    var shift = vec4<f32>(0.0);
    if !open {
        let pairs = channel_raw_$(n);
        scale = vec4<f32>(f16_value(pairs.x & 0xFFFFu), f16_value(pairs.y & 0xFFFFu), f16_value(pairs.z & 0xFFFFu), f16_value(pairs.w & 0xFFFFu));
        shift = vec4<f32>(f16_value(pairs.x >> 16u), f16_value(pairs.y >> 16u), f16_value(pairs.z >> 16u), f16_value(pairs.w >> 16u)) + 8.0 * scale;
    }
    channel_scale[tid + $(T * n)u] = scale;
    channel_shift[tid + $(T * n)u] = shift;
}
#end
workgroupBarrier();
for (var pair = tid; pair < num_pairs; pair += $(T)u) {
    let u = pair % $(UNITS)u;
    // From q again: keeping q' would cost half as much workgroup memory as all the rest.
    let row = query_unit(sequence, head, row0 + pair / $(UNITS)u, u);
    var bound = 0.0;
    var far = vec4<f32>(0.0);
#for w in 0..4
    bound = max(bound, largest_of(abs(row[$(w)])) * largest_of(channel_scale[u * 4u + $(w)u]));
    far = max(far, abs(channel_shift[u * 4u + $(w)u]));
#end
    unit_max[pair] = bound;
    if pair < $(UNITS)u {
        unit_shift[pair] = largest_of(far);
    }
}
workgroupBarrier();
for (var pair = tid; pair < num_pairs; pair += $(T)u) {
    let r = pair / $(UNITS)u;
    let u = pair % $(UNITS)u;
    var a = 0.0;
    var b = 0.0;
#for i in 0..UNITS
    a = max(a, unit_max[r * $(UNITS)u + $(i)u]);
    b = max(b, unit_shift[$(i)]);
#end
    let e = plane_exponent(a);
    let j = select(clamp(20 - exponent(row_amax[r]) - exponent(b), -100, 100), 0, row_amax[r] == 0.0 || b == 0.0);
    let unit_j = exp2i(j);
    var x = query_unit(sequence, head, row0 + r, u);
    var y = vec4<i32>(0);
#for w in 0..4
    {
        let q4 = x[$(w)];
        x[$(w)] = q4 * channel_scale[u * 4u + $(w)u];
        y += rhe4((q4 * channel_shift[u * 4u + $(w)u]) * unit_j);
    }
#end
    let sum = store_plane(pair * 2u, x, exp2i(e));
    unit_sum[pair] = vec2<i32>(sum, (y.x + y.y) + (y.z + y.w));
    if u == 0u {
        row_unit[r] = exp2i(-e);
        row_shift[r] = exp2i(-j);
    }
}
workgroupBarrier();
if tid < $(R)u {
    var sum = vec2<i32>(0);
    for (var i = 0u; i < $(UNITS)u; i++) {
        sum += unit_sum[tid * $(UNITS)u + i];
    }
    row_sum[tid] = sum.x;
    row_shift[tid] = f32(sum.y) * row_shift[tid];
}
workgroupBarrier();
