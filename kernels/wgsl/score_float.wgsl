// score_float.wgsl: scores in f32 of dequantized K. Included by tile.wgsl.
{
#for r in 0..R
    var s_$(r)_0 = 0.0;
    var s_$(r)_1 = 0.0;
#end
    for (var u = 0u; u < $(UNITS)u; u++) {
#for j in 0..2
        let k_$(j) = k_values(k_place_$(j), open, u);
#for w in 0..4
        let k_$(j)_$(w) = k_$(j)[$(w)];
#end
#end
#for r in 0..R
#for w in 0..4
        let q_$(r)_$(w) = queries[($(r * UNITS)u + u) * 4u + $(w)u];
#end
#for j in 0..2
        s_$(r)_$(j) += (dot(q_$(r)_0, k_$(j)_0) + dot(q_$(r)_1, k_$(j)_1)) + (dot(q_$(r)_2, k_$(j)_2) + dot(q_$(r)_3, k_$(j)_3));
#end
#end
    }
#for r in 0..R
    scratch[$(r * 64)u + lane] = bitcast<u32>(s_$(r)_0);
    scratch[$(r * 64 + 32)u + lane] = bitcast<u32>(s_$(r)_1);
#end
}
