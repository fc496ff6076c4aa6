// value_scale.wgsl: powers of two for V's scales and shifts in this tile, and both scaled. Included by tile.wgsl.
#for g in 0..VG
#if V_SCALED
let v_top_$(g) = posted($(GROUPS_AT + g * OF_GROUP)u);
let f_$(g) = select(14 - exponent(bitcast<f32>(v_top_$(g))), 0, v_top_$(g) == 0u);
let scale_$(g) = v_$(g).x * exp2i(f_$(g));
#else
// A per-tensor scale stays outside: v_scale = 1, so f = 14; unwritten tokens weigh 0 as none sees them.
let f_$(g) = 14;
#end
#if V == GROUPS
let h_$(g) = shift_exponent(bitcast<f32>(posted($(GROUPS_AT + g * OF_GROUP + 1)u)));
let shift_$(g) = rhe(v_$(g).y * exp2i(h_$(g)));
#end
#end
