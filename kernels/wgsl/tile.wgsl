// tile.wgsl: one tile, from codes to weights (docs/arithmetic.md, sections 3 and 4). Included by decode_split.wgsl;
// the lane has tokens `mine` and `mine + 8` of the tile, which share the bytes of 4-bit K and whose weights are one word's halves.
let token_0 = tile * 64u + mine;
let token_1 = token_0 + 8u;
#if K == CHANNEL
let open = tile / $(PS / 64)u == kv_len / $(PS)u;
#else
let open = false;
#end
let k_place_0 = k_place(pages_at, tail_page, head, kv_len, tile, mine);
let k_place_1 = k_place(pages_at, tail_page, head, kv_len, tile, mine + 8u);
#if PS >= 64 && !VIEW
let v_tile = run_of(tables[pages_at + tile / $(PS / 64)u], head);
#end
#if SG != 32
workgroupBarrier();
clear_reduced(lane);
workgroupBarrier();
#end

#if !K_AHEAD
load_at = tile;
#include "load.wgsl"
#end
#if INTEGER && V_AHEAD
#let C = 0
#include "load_v.wgsl"
#end

#include "v_params.wgsl"
#if INTEGER
#if K == CHANNEL
#include "plane_channel.wgsl"
#end
#for u in 0..UNITS
#for j in 0..2
#if K_BITS == 8
let k_$(u)_$(j) = k_raw_$(u)_$(j);
#elif j == 0
var k_$(u)_0 = k_raw_$(u)_0 & vec4<u32>(0x0F0F0F0Fu);
#else
// Centred on 0 and 16 times as large.
var k_$(u)_1 = (k_raw_$(u)_0 & vec4<u32>(0xF0F0F0F0u)) ^ vec4<u32>(0x80808080u);
#end
#end
#end
#if K == CHANNEL
if open {
#for u in 0..UNITS
#for j in 0..2
    k_$(u)_$(j) = k_bytes(k_place_$(j), $(u)u);
#end
#end
}
#end
#include "k_params.wgsl"
#else
#include "score_float.wgsl"
#end

#if INTEGER && SG == 32
#include "value_scale.wgsl"
// Of row `lane`: kept by its lane as the rows pass.
var my_top = NONE;
var my_sum = 0;
#for g in 0..VG
var my_weight_$(g) = 0;
#if V == GROUPS
var my_shift_$(g) = 0.0;
#end
#end
#elif SG == 32
var my_top = NONE;
var my_sum = 0;
#end
// The number of rows is not a constant: unrolled, the loops would not fit the instruction cache.
for (var r0 = 0u; r0 < num_rows; r0 += $(RU)u) {
#for n in 0..RU
let r_$(n) = r0 + $(n)u;
#if INTEGER
#include "score_integer.wgsl"
#else
    var s_$(n)_0 = bitcast<f32>(scratch[r_$(n) * 64u + lane]);
    var s_$(n)_1 = bitcast<f32>(scratch[r_$(n) * 64u + 32u + lane]);
#end
#end
#for n in 0..RU
#include "row_mask.wgsl"
#if SG == 32
    let top_$(n) = lanes_max(key_$(n));
#else
    scratch[r_$(n) * 64u + lane] = bitcast<u32>(s_$(n)_0);
    scratch[r_$(n) * 64u + 32u + lane] = bitcast<u32>(s_$(n)_1);
    post_max(sg_lane, r_$(n), key_$(n));
#end
#end
#if SG != 32
}
workgroupBarrier();
#if INTEGER
#include "value_scale.wgsl"
#end
for (var r0 = 0u; r0 < num_rows; r0 += $(RU)u) {
#for n in 0..RU
    let r_$(n) = r0 + $(n)u;
    let s_$(n)_0 = bitcast<f32>(scratch[r_$(n) * 64u + lane]);
    let s_$(n)_1 = bitcast<f32>(scratch[r_$(n) * 64u + 32u + lane]);
#for j in 0..2
    let seen_$(n)_$(j) = i32(token_$(j)) >= row_first[r_$(n)] && i32(token_$(j)) < row_end[r_$(n)];
#end
    let top_$(n) = posted(r_$(n));
#end
#end
#for n in 0..RU
    {
#include "row_weights.wgsl"
#if SG == 32
    let own = lane == r_$(n);
    my_top = select(my_top, tile_top, own);
    my_sum = select(my_sum, lanes_sum(sum), own);
#else
    post_sum(sg_lane, $(R)u + r_$(n), sum);
    if lane == 0u {
        tile_m[r_$(n)] = tile_top;
    }
#end
#if INTEGER
#for g in 0..VG
    {
#include "row_products.wgsl"
        scratch[$(g == 0 ? 0 : R * RS + (g - 1) * R * 32)u + r_$(n) * $(g == 0 ? RS : 32)u + lane] = u32(w_0) | (u32(w_1) << 16u);
#if SG == 32
        my_weight_$(g) = select(my_weight_$(g), lanes_sum(w_0 + w_1), own);
#if V == GROUPS
        my_shift_$(g) = select(my_shift_$(g), (f32(lanes_sum(z_hi)) * 256.0 + f32(lanes_sum(z_lo))) * exp2i(-14 - h_$(g)), own);
#end
#else
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2)u + r_$(n), w_0 + w_1);
#if V == GROUPS
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2 + R)u + r_$(n), z_hi);
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2 + 2 * R)u + r_$(n), z_lo);
#end
#end
    }
#end
#else
    values_p[r_$(n) * 64u + slot_of(mine)] = p_0;
    values_p[r_$(n) * 64u + slot_of(mine + 8u)] = p_1;
#end
    }
#end
}
#if !INTEGER
#for g in 0..VG
#if V_SCALED
values_param[$(64 * g)u + slot_of(mine)] = v_$(g)_0;
values_param[$(64 * g)u + slot_of(mine + 8u)] = v_$(g)_1;
#else
values_param[$(64 * g)u + slot_of(mine)] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_0 < kv_len);
values_param[$(64 * g)u + slot_of(mine + 8u)] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_1 < kv_len);
#end
#end
#end
