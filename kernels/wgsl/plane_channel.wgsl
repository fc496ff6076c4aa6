// plane_channel.wgsl: q' folded with the scales of a sealed page's channels, as planes, and the term of its shifts.
// An open page holds int8 codes with a scale per token: its channels count as scale 1, shift 0. Included by tile.wgsl.
#for n in 0..((UNITS * 4 + T - 1) / T)
if lane + $(T * n)u < $(UNITS * 4)u {
    var scale = vec4<f32>(1.0);
    var shift = vec4<f32>(0.0);
    if !open {
        let pairs = channel_raw_$(n);
        scale = vec4<f32>(f16_value(pairs.x & 0xFFFFu), f16_value(pairs.y & 0xFFFFu), f16_value(pairs.z & 0xFFFFu), f16_value(pairs.w & 0xFFFFu));
        shift = vec4<f32>(f16_value(pairs.x >> 16u), f16_value(pairs.y >> 16u), f16_value(pairs.z >> 16u), f16_value(pairs.w >> 16u)) + 8.0 * scale;
    }
    let to = (lane & 3u) * $(UNITS)u + ((lane + $(T * n)u) >> 2u);
    channel_scale[to] = scale;
    channel_shift[to] = shift;
}
#end
if tile + 1u < tile_end && (tile + 1u) / $(PS / 64)u != kv_len / $(PS)u {
#include "load_channels.wgsl"
}
workgroupBarrier();
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    var bound = 0.0;
    var far = vec4<f32>(0.0);
#for w in 0..4
    bound = max(bound, largest_of(abs(query_$(n)[$(w)])) * largest_of(channel_scale[$(w * UNITS)u + unit_$(n)]));
    far = max(far, abs(channel_shift[$(w * UNITS)u + unit_$(n)]));
#end
    post_max($(BOUND)u + row_$(n), bitcast<u32>(bound));
    if row_$(n) == 0u {
        post_max($(FAR)u, bitcast<u32>(largest_of(far)));
    }
}
#end
workgroupBarrier();
#for n in 0..PAIRS
if pair_$(n) < num_pairs {
    let e = plane_exponent(bitcast<f32>(posted($(BOUND)u + row_$(n))));
    let a = bitcast<f32>(posted($(QUERY_TOP)u + row_$(n)));
    let b = bitcast<f32>(posted($(FAR)u));
    let j = select(clamp(20 - exponent(a) - exponent(b), -100, 100), 0, a == 0.0 || b == 0.0);
    let unit_j = exp2i(j);
    var x = query_$(n);
    var y = vec4<i32>(0);
#for w in 0..4
    x[$(w)] = query_$(n)[$(w)] * channel_scale[$(w * UNITS)u + unit_$(n)];
    y += rhe4((query_$(n)[$(w)] * channel_shift[$(w * UNITS)u + unit_$(n)]) * unit_j);
#end
    post_sum($(QUERY_SUM)u + row_$(n), store_plane(pair_$(n) * 2u, x, exp2i(e)));
    post_sum($(SHIFT_SUM)u + row_$(n), (y.x + y.y) + (y.z + y.w));
    if unit_$(n) == 0u {
        row_unit[row_$(n)] = exp2i(-e);
        row_shift[row_$(n)] = exp2i(-j);
    }
}
#end
workgroupBarrier();
