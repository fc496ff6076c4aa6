// value_float.wgsl: chunk $(C) of the tile's value in f32. Included by fold.wgsl.
#for i in 0..DPL
let dim_$(i) = min(dim_of(lane, $(C * DPL + i)u), $(D - 1)u);
#for r in 0..R
var value_$(r)_$(i) = 0.0;
#end
#end
for (var quad = 0u; quad < 16u; quad++) {
    // Tokens of a slot quad: 2c, 2c + 1, 2c + 8, 2c + 9 of 16.
    let first = tile * 64u + (quad >> 2u) * 16u + 2u * (quad & 3u);
#if VG == 1
    let scale = vec4<f32>(values_param[quad * 4u].x, values_param[quad * 4u + 1u].x, values_param[quad * 4u + 2u].x, values_param[quad * 4u + 3u].x);
    let shift = vec4<f32>(values_param[quad * 4u].y, values_param[quad * 4u + 1u].y, values_param[quad * 4u + 2u].y, values_param[quad * 4u + 3u].y);
#end
#if V_BITS == 16 || VIEW
    let place_0 = place_of(pages_at, head, min(first, last));
    let place_1 = place_of(pages_at, head, min(first + 1u, last));
    let place_2 = place_of(pages_at, head, min(first + 8u, last));
    let place_3 = place_of(pages_at, head, min(first + 9u, last));
#else
    let place = place_of(pages_at, head, min(first, last));
#end
#for i in 0..DPL
    var v_$(i) = vec4<f32>(0.0);
    {
#if VG > 1
        let at = (dim_$(i) / $(GD)u) * 64u + quad * 4u;
        let scale = vec4<f32>(values_param[at].x, values_param[at + 1u].x, values_param[at + 2u].x, values_param[at + 3u].x);
        let shift = vec4<f32>(values_param[at].y, values_param[at + 1u].y, values_param[at + 2u].y, values_param[at + 3u].y);
#end
#if V_BITS == 16
        let code = vec4<f32>(v_element(place_0, dim_$(i)), v_element(place_1, dim_$(i)), v_element(place_2, dim_$(i)), v_element(place_3, dim_$(i)));
        v_$(i) = select(code, vec4<f32>(0.0), scale == vec4<f32>(0.0));
#else
#if VIEW
        let word = v_byte(place_0, dim_$(i)) | (v_byte(place_1, dim_$(i)) << 8u) | (v_byte(place_2, dim_$(i)) << 16u) | (v_byte(place_3, dim_$(i)) << 24u);
#else
        let word = v_panel(place, dim_$(i))[quad & 3u];
#end
#if V == FP8
        v_$(i) = select(fp8_values(word), vec4<f32>(0.0), scale == vec4<f32>(0.0));
#elif V_BITS == 8
        v_$(i) = int8_values(word) * scale;
#else
        v_$(i) = int8_values((word >> (((dim_$(i) >> 3u) & 1u) * 4u)) & 0x0F0F0F0Fu) * scale + shift;
#end
#end
    }
#end
#for r in 0..R
    {
        let at = $(r * 64)u + quad * 4u;
        let p = vec4<f32>(values_p[at], values_p[at + 1u], values_p[at + 2u], values_p[at + 3u]);
#for i in 0..DPL
        value_$(r)_$(i) += dot(p, v_$(i));
#end
    }
#end
}
#for r in 0..R
if fold_beta[$(r)] >= 0.0 {
#for i in 0..DPL
    {
        o_$(r)_$(C * DPL + i) = ftz(o_$(r)_$(C * DPL + i) * fold_alpha[$(r)]) + value_$(r)_$(i) * fold_beta[$(r)];
    }
#end
}
#end
