// tile.wgsl: one tile, from codes to weights (docs/arithmetic.md, sections 3 and 4), of token `lane` of it. Included by decode_split.wgsl.
let token = tile * 64u + lane;
#if K == CHANNEL
let open = tile / $(PS / 64)u == kv_len / $(PS)u;
#else
let open = false;
#end
#if PAGED
let pages = page_ahead;
page_ahead = tables[pages_at + (tile + 1u) / $(PS / 64)u];
let v_tile = run_of(pages, head);
#else
let pages = pages_at;
#end
let place = k_place(pages, tail_page, head, kv_len, tile, lane);

#include "load.wgsl"
#if V_FIRST
#let C = 0
#include "load_v.wgsl"
#end
#include "v_params.wgsl"
#for r in 0..R
var s_$(r) = 0.0;
#end
#if INTEGER
#if K == CHANNEL
#include "plane_channel.wgsl"
#end
#include "k_params.wgsl"
#else
#include "score_float.wgsl"
#end

// Rows are spelled out, RU at a time: a loop would keep what a lane knows of them in memory and registers that it moves.
#if INTEGER
#for r in 0..R
#for g in 0..SGROUPS
var dot_$(r)_$(g) = 0;
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
#include "score_integer.wgsl"
#end
}
#end
#if HALVES
workgroupBarrier();
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#if INTEGER
#for r in (b * RU)..(b * RU + RU)
#if HALVES
    dot_$(r)_0 += bitcast<i32>(scratch[$(r * RS)u + scratch_at]);
#end
#include "score_scale.wgsl"
#end
#end
#for r in (b * RU)..(b * RU + RU)
#include "row_mask.wgsl"
    post_max($(TOP + r)u, order_key(ceil(s_$(r))));
#end
}
#end
workgroupBarrier();
#if INTEGER
#include "value_scale.wgsl"
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
    {
#include "row_weights.wgsl"
    post_sum($(SUM + r)u, units);
#if INTEGER
    var word = 0u;
#for g in 0..VG
    {
#include "row_products.wgsl"
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
