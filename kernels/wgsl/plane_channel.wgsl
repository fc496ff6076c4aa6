// plane_channel.wgsl: q' folded with the scales of a sealed page's channels, as planes of this team, and the term of its shifts.
// An open page holds int8 codes with a scale per token: its channels count as scale 1, shift 0. Included by tile.wgsl.
for (var pair = lane; pair < $(R * UNITS)u; pair += 32u) {
    let r = pair / $(UNITS)u;
    let u = pair % $(UNITS)u;
    var x = query_unit(sequence, head, row0 + r, u);
    var far = 0.0;
    if !open {
#for i in 0..4
#for n in 0..4
        let c_$(i)_$(n) = k_channel(k_place_0, u * 16u + $(4 * i + n)u);
#end
        let scale_$(i) = vec4<f32>(c_$(i)_0.x, c_$(i)_1.x, c_$(i)_2.x, c_$(i)_3.x);
        let shift_$(i) = abs(vec4<f32>(c_$(i)_0.y, c_$(i)_1.y, c_$(i)_2.y, c_$(i)_3.y) + 8.0 * scale_$(i));
        x[$(i)] = x[$(i)] * scale_$(i);
        far = max(far, max(max(shift_$(i).x, shift_$(i).y), max(shift_$(i).z, shift_$(i).w)));
#end
    }
    unit_max[team * $(R * UNITS)u + pair] = largest(x);
    if r == 0u {
        unit_shift[team * $(UNITS)u + u] = far;
    }
}
workgroupBarrier();
for (var pair = lane; pair < $(R * UNITS)u; pair += 32u) {
    let r = pair / $(UNITS)u;
    let u = pair % $(UNITS)u;
    var a = 0.0;
    var b = 0.0;
    for (var i = 0u; i < $(UNITS)u; i++) {
        a = max(a, unit_max[(team * $(R)u + r) * $(UNITS)u + i]);
        b = max(b, unit_shift[team * $(UNITS)u + i]);
    }
    let e = plane_exponent(a);
    let j = select(clamp(20 - exponent(row_amax[r]) - exponent(b), -100, 100), 0, row_amax[r] == 0.0 || b == 0.0);
    let unit_j = exp2i(j);
    var x = query_unit(sequence, head, row0 + r, u);
    var y = 0;
    if !open {
#for i in 0..4
#for n in 0..4
        let c_$(i)_$(n) = k_channel(k_place_0, u * 16u + $(4 * i + n)u);
#end
        let scale_$(i) = vec4<f32>(c_$(i)_0.x, c_$(i)_1.x, c_$(i)_2.x, c_$(i)_3.x);
        let shift_$(i) = vec4<f32>(c_$(i)_0.y, c_$(i)_1.y, c_$(i)_2.y, c_$(i)_3.y) + 8.0 * scale_$(i);
        let y_$(i) = rhe4((x[$(i)] * shift_$(i)) * unit_j);
        y += (y_$(i).x + y_$(i).y) + (y_$(i).z + y_$(i).w);
        x[$(i)] = x[$(i)] * scale_$(i);
#end
    }
    let sum = store_plane((team * $(R * UNITS)u + pair) * 2u, x, exp2i(e));
    unit_sum[team * $(R * UNITS)u + pair] = vec2<i32>(sum, y);
    if u == 0u {
        row_unit[team * $(R)u + r] = exp2i(-e);
        row_shift[team * $(R)u + r] = exp2i(-j);
    }
}
workgroupBarrier();
if lane < $(R)u {
    var sum = vec2<i32>(0);
    for (var i = 0u; i < $(UNITS)u; i++) {
        sum += unit_sum[(team * $(R)u + lane) * $(UNITS)u + i];
    }
    row_sum[team * $(R)u + lane] = sum.x;
    row_shift[team * $(R)u + lane] = f32(sum.y) * row_shift[team * $(R)u + lane];
}
workgroupBarrier();
