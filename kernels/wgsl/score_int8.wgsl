// score_int8.wgsl: int8 codes against both planes of q. Included by tile.wgsl.
#let UPG = K == G32 ? 2 : UNITS
for (var g = 0u; g < $(UNITS / UPG)u; g++) {
#for r in 0..R
    var acc_$(r)_0 = 0;
    var acc_$(r)_1 = 0;
#end
    for (var u = g * $(UPG)u; u < (g + 1u) * $(UPG)u; u += $(UPG % QU == 0 ? QU : 1)u) {
#for i in 0..(UPG % QU == 0 ? QU : 1)
        let k_$(i)_0 = k_bytes(k_place_0, u + $(i)u);
        let k_$(i)_1 = k_bytes(k_place_1, u + $(i)u);
#end
#for i in 0..(UPG % QU == 0 ? QU : 1)
#for r in 0..R
        {
            let at = ((team * $(SET * R)u + $(r)u) * $(UNITS)u + u + $(i)u) * 2u;
            let hi = planes[at];
            let lo = planes[at + 1u];
            acc_$(r)_0 = dot16(lo, k_$(i)_0, acc_$(r)_0 + (dot16(hi, k_$(i)_0, 0) << 7u));
            acc_$(r)_1 = dot16(lo, k_$(i)_1, acc_$(r)_1 + (dot16(hi, k_$(i)_1, 0) << 7u));
        }
#end
#end
    }
#for j in 0..2
#if K == TENSOR
#for r in 0..R
    s_$(r)_$(j) = f32(acc_$(r)_$(j));
#end
#else
    {
#if K == CHANNEL
        let scale = k_scale_open(k_place_$(j));
#else
        let scale = k_scale(k_place_$(j), g);
#end
#for r in 0..R
#if K == G32
        let term_$(r) = product(f32(acc_$(r)_$(j)), scale);
        s_$(r)_$(j) = select(s_$(r)_$(j) + term_$(r), term_$(r), g == 0u);
#else
        s_$(r)_$(j) = f32(acc_$(r)_$(j)) * scale;
#end
#end
    }
#end
#end
}
#for r in 0..R
#for j in 0..2
s_$(r)_$(j) = s_$(r)_$(j) * row_unit[team * $(SET * R)u + $(r)u];
#end
#end
