// k_params.wgsl: K's parameters of the lane's token. Included by tile.wgsl.
#if K == CHANNEL
// A sealed page's codes are biased, an open one's have a scale of their own.
let code_zero = select(8, 0, open);
var open_scale = 1.0;
if open {
    open_scale = k_scale_open(place);
}
#elif K == TOKEN || K == G32
#for g in 0..KG
let k_scale_$(g) = f16_value((k_word_$(g) >> ((lane & 1u) * 16u)) & 0xFFFFu);
#end
#elif K == GROUPS
#for g in 0..KG
var k_param_$(g) = vec2<f32>(f16_value(k_word_$(g) & 0xFFFFu), f16_value(k_word_$(g) >> 16u));
k_param_$(g).y = k_param_$(g).y + 8.0 * k_param_$(g).x;
#end
#end
