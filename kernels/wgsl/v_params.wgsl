// v_params.wgsl: V's parameters of the lane's two tokens. Included by tile.wgsl and matrix_tile.wgsl.
// V's parameters; past the end they are 0.
#if V_SCALED
#for g in 0..VG
#for j in 0..2
var v_$(g)_$(j) = v_param(v_word_$(g)_$(j), lane);
#if INTEGER && V == GROUPS
v_$(g)_$(j).y = v_$(g)_$(j).y + 8.0 * v_$(g)_$(j).x;
#end
v_$(g)_$(j) = select(vec2<f32>(0.0), v_$(g)_$(j), token_$(j) < kv_len);
#end
#if INTEGER
#if SG == 32
let v_top_$(g) = lanes_max(max(bitcast<u32>(v_$(g)_0.x), bitcast<u32>(v_$(g)_1.x)));
#if V == GROUPS
let v_far_$(g) = lanes_max(max(bitcast<u32>(abs(v_$(g)_0.y)), bitcast<u32>(abs(v_$(g)_1.y))));
#end
#else
post_max(sg_lane, $(2 * R + g * (2 + 3 * R))u, max(bitcast<u32>(v_$(g)_0.x), bitcast<u32>(v_$(g)_1.x)));
#if V == GROUPS
post_max(sg_lane, $(2 * R + g * (2 + 3 * R) + 1)u, max(bitcast<u32>(abs(v_$(g)_0.y)), bitcast<u32>(abs(v_$(g)_1.y))));
#end
#end
#end
#end
#end

