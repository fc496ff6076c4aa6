// v_params.wgsl: V's parameters of the lane's token; past the end they are 0. Included by tile.wgsl.
#if V_SCALED
#for g in 0..VG
var v_$(g) = v_param(v_word_$(g), lane);
#if INTEGER && V == GROUPS
v_$(g).y = v_$(g).y + 8.0 * v_$(g).x;
#end
v_$(g) = select(vec2<f32>(0.0), v_$(g), token < kv_len);
#if INTEGER
post_max($(GROUPS_AT + g * OF_GROUP)u, bitcast<u32>(v_$(g).x));
#if V == GROUPS
post_max($(GROUPS_AT + g * OF_GROUP + 1)u, bitcast<u32>(abs(v_$(g).y)));
#end
#end
#end
#end
