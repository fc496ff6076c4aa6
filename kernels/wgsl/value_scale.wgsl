// value_scale.wgsl: powers of two for V's scales and shifts in this tile, and both scaled. Included by tile.wgsl.
#for g in 0..VG
#if V_SCALED
#if SG != 32
let v_top_$(g) = posted($(2 * R + g * (2 + 3 * R))u);
#end
let f_$(g) = select(14 - exponent(bitcast<f32>(v_top_$(g))), 0, v_top_$(g) == 0u);
let scale_$(g)_0 = v_$(g)_0.x * exp2i(f_$(g));
let scale_$(g)_1 = v_$(g)_1.x * exp2i(f_$(g));
#else
// A per-tensor scale stays outside: v_scale = 1, so f = 14; unwritten tokens weigh 0 as none sees them.
let f_$(g) = 14;
#end
#if V == GROUPS
#if SG != 32
let v_far_$(g) = posted($(2 * R + g * (2 + 3 * R) + 1)u);
#end
let h_$(g) = shift_exponent(bitcast<f32>(v_far_$(g)));
let shift_$(g)_0 = rhe(v_$(g)_0.y * exp2i(h_$(g)));
let shift_$(g)_1 = rhe(v_$(g)_1.y * exp2i(h_$(g)));
#end
#end
