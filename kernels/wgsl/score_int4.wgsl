// score_int4.wgsl: int4 codes, centred by the sum of q15, against both planes of q. Included by tile.wgsl.
#let UPG = K == CHANNEL ? UNITS : UNITS / KG
for (var g = 0u; g < $(UNITS / UPG)u; g++) {
#for r in 0..R
    var acc_$(r)_0 = 0;
    var acc_$(r)_1 = 0;
#end
#if UPG % 2 == 0
    for (var u = g * $(UPG)u; u < (g + 1u) * $(UPG)u; u += $(UPG % (2 * QU) == 0 ? 2 * QU : 2)u) {
#for i in 0..(UPG % (2 * QU) == 0 ? QU : 1)
#for j in 0..2
        let panel_$(i)_$(j) = load_vec(k_place_$(j).buffer, k_place_$(j).at + ((u >> 1u) + $(i)u) * $(PS)u + k_place_$(j).token);
#end
#end
#for i in 0..(UPG % (2 * QU) == 0 ? QU : 1)
#for n in 0..2
        {
#for j in 0..2
            let k_$(j) = (panel_$(i)_$(j) >> vec4<u32>($(4 * n)u)) & vec4<u32>(0x0F0F0F0Fu);
#end
#for r in 0..R
            {
                let at = ((team * $(SET * R)u + $(r)u) * $(UNITS)u + u + $(2 * i + n)u) * 2u;
                let hi = planes[at];
                let lo = planes[at + 1u];
                acc_$(r)_0 = dot16(lo, k_0, acc_$(r)_0 + (dot16(hi, k_0, 0) << 7u));
                acc_$(r)_1 = dot16(lo, k_1, acc_$(r)_1 + (dot16(hi, k_1, 0) << 7u));
            }
#end
        }
#end
#end
    }
#else
    for (var u = g * $(UPG)u; u < (g + 1u) * $(UPG)u; u++) {
        let k_0 = k_nibbles(k_place_0, u);
        let k_1 = k_nibbles(k_place_1, u);
#for r in 0..R
        {
            let at = ((team * $(SET * R)u + $(r)u) * $(UNITS)u + u) * 2u;
            let hi = planes[at];
            let lo = planes[at + 1u];
            acc_$(r)_0 = dot16(lo, k_0, acc_$(r)_0 + (dot16(hi, k_0, 0) << 7u));
            acc_$(r)_1 = dot16(lo, k_1, acc_$(r)_1 + (dot16(hi, k_1, 0) << 7u));
        }
#end
    }
#end
#if K == GROUPS
#for j in 0..2
    {
        let param = k_param(k_place_$(j), g);
        let shift = param.y + 8.0 * param.x;
#for r in 0..R
        {
            let sum = group_sum[$(r * KG)u + g];
            let term = product(f32(acc_$(r)_$(j) - 8 * sum), param.x);
            s_$(r)_$(j) = select(s_$(r)_$(j) + term, term, g == 0u);
            s_$(r)_$(j) = s_$(r)_$(j) + product(f32(sum), shift);
        }
#end
    }
#end
#else
#for r in 0..R
#for j in 0..2
    s_$(r)_$(j) = f32(acc_$(r)_$(j) - 8 * row_sum[team * $(R)u + $(r)u]);
#end
#end
#end
}
#for r in 0..R
#for j in 0..2
#if K == CHANNEL
s_$(r)_$(j) = s_$(r)_$(j) * row_unit[team * $(R)u + $(r)u] + row_shift[team * $(R)u + $(r)u];
#else
s_$(r)_$(j) = s_$(r)_$(j) * row_unit[$(r)];
#end
#end
#end
