// k_params.wgsl: K's parameters of the lane's two tokens. Included by tile.wgsl and matrix_tile.wgsl.
#if K == CHANNEL
var open_scale_0 = 0.0;
var open_scale_1 = 0.0;
if open {
    open_scale_0 = k_scale_open(k_place_0);
    open_scale_1 = k_scale_open(k_place_1);
}
#elif K == TOKEN || K == G32
#for g in 0..KG
#for j in 0..2
let k_scale_$(g)_$(j) = f16_value((k_word_$(g)_$(j) >> ((lane & 1u) * 16u)) & 0xFFFFu);
#end
#end
#elif K == GROUPS
#for g in 0..KG
#for j in 0..2
var k_param_$(g)_$(j) = vec2<f32>(f16_value(k_word_$(g)_$(j) & 0xFFFFu), f16_value(k_word_$(g)_$(j) >> 16u));
k_param_$(g)_$(j).y = k_param_$(g)_$(j).y + 8.0 * k_param_$(g)_$(j).x;
#end
#end
#end
