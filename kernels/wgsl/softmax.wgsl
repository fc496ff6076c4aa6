// softmax.wgsl: the weights of a tile (docs/arithmetic.md, section 4). A lane has the weights of its token, one for each row.

// The powers of two for V's scales and shifts in this tile, and the scaled parameters of the lane's token.
#def scale_v_params(): v_* -> f_*, h_*, scale_*, shift_*
#for g in 0..VG
#if V_SCALED
let v_top_$(g) = posted($(GROUPS_AT + g * OF_GROUP)u);
let f_$(g) = select(14 - exponent(bitcast<f32>(v_top_$(g))), 0, v_top_$(g) == 0u);
let scale_$(g) = v_$(g).x * exp2i(f_$(g));
#else
// A per-tensor scale is applied in the epilogue, so v_scale = 1 and f = 14; no row sees unwritten tokens, so they have weight 0.
let f_$(g) = 14;
#end
#if V == GROUPS
let h_$(g) = shift_exponent(bitcast<f32>(posted($(GROUPS_AT + g * OF_GROUP + 1)u)));
let shift_$(g) = rhe(v_$(g).y * exp2i(h_$(g)));
#end
#end
#end

// The weight of row r, in f32 and in units of 2^-22.
#def softmax_row(r): score_* -> p, units
let row_max = from_order_key(posted($(ROW_MAX + r)u));
#if INTEGER
let p = select(0.0, exp2w(min(row_max - score_$(r), 64.0)), score_$(r) > NONE);
#else
let p = select(0.0, exp2f(max(score_$(r) - row_max, -125.0)), score_$(r) > NONE);
#end
let units = weight_units(p);
#end

// The weight times the scale of V's group g, and the two terms of the group's shifts.
#def weigh_group(g): p, units, scale_*, shift_* -> w, z_hi, z_lo
#if V_SCALED
let w = rhe(product(p, scale_$(g)));
#else
let w = rhe(p * 16384.0);
#end
#if V == GROUPS
let p14 = (units + 128) >> 8u;
let z_hi = p14 * (shift_$(g) >> 8u);
let z_lo = p14 * (shift_$(g) & 255);
#end
#end

// The weights of all rows, in workgroup memory, and their sums in the slots of reduce.wgsl.
#def softmax_tile(): num_rows, lane, token, kv_len, scratch_at, score_*, v_* -> f_*, h_*
workgroupBarrier();
#if INTEGER
#use scale_v_params()
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
    {
#use softmax_row(r)
    post_sum($(ROW_SUM + r)u, units);
#if INTEGER
    var word = 0u;
#for g in 0..VG
    {
#use weigh_group(g)
#if g % 2 == 0
        word = u32(w);
#else
        word |= u32(w) << 16u;
#end
#if g % 2 == 1 || g == VG - 1
        scratch[$((g / 2 * R + r) * RS)u + scratch_at] = word;
#end
        post_sum($(GROUPS_AT + g * OF_GROUP + 2 + r)u, w);
#if V == GROUPS
        post_sum($(GROUPS_AT + g * OF_GROUP + 2 + R + r)u, z_hi);
        post_sum($(GROUPS_AT + g * OF_GROUP + 2 + 2 * R + r)u, z_lo);
#end
    }
#end
#else
    values_p[$(r * 64)u + slot_of(lane)] = p;
#end
    }
#end
}
#end
#if !INTEGER
#for g in 0..VG
#if V_SCALED
values_param[$(64 * g)u + slot_of(lane)] = v_$(g);
#else
values_param[$(64 * g)u + slot_of(lane)] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token < kv_len);
#end
#end
#end
#end
