// score_float.wgsl: scores in f32 of dequantized K. Included by tile.wgsl.
for (var u = 0u; u < $(UNITS)u; u++) {
    let k = k_values(place, open, u);
#for w in 0..4
    let k_$(w) = k[$(w)];
#end
#for r in 0..R
#for w in 0..4
    let q_$(r)_$(w) = queries[($(r * UNITS)u + u) * 4u + $(w)u];
#end
    s_$(r) += (dot(q_$(r)_0, k_0) + dot(q_$(r)_1, k_1)) + (dot(q_$(r)_2, k_2) + dot(q_$(r)_3, k_3));
#end
}
