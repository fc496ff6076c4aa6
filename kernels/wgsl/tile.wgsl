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
let v_top_$(g) = subgroupMax(max(bitcast<u32>(v_$(g)_0.x), bitcast<u32>(v_$(g)_1.x)));
#if V == GROUPS
let v_far_$(g) = subgroupMax(max(bitcast<u32>(abs(v_$(g)_0.y)), bitcast<u32>(abs(v_$(g)_1.y))));
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

#if INTEGER
#if K == CHANNEL
#include "plane_channel.wgsl"
#end
#for u in 0..UNITS
#for j in 0..2
#if K_BITS == 8 && MATRIX
let k_$(u)_$(j) = k_raw_$(u)_$(j) ^ vec4<u32>(0x80808080u);
#elif K_BITS == 8
let k_$(u)_$(j) = k_raw_$(u)_$(j);
#elif j == 0
var k_$(u)_0 = k_raw_$(u)_0 & vec4<u32>(0x0F0F0F0Fu);
#elif MATRIX
var k_$(u)_1 = (k_raw_$(u)_0 >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu);
#else
// Centred on 0 and 16 times as large.
var k_$(u)_1 = (k_raw_$(u)_0 & vec4<u32>(0xF0F0F0F0u)) ^ vec4<u32>(0x80808080u);
#end
#end
#end
#if K == CHANNEL
var open_scale_0 = 0.0;
var open_scale_1 = 0.0;
if open {
#for u in 0..UNITS
#for j in 0..2
    k_$(u)_$(j) = k_bytes(k_place_$(j), $(u)u) ^ vec4<u32>($(MATRIX ? 2155905152 : 0)u);
#end
#end
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
#if MATRIX
#if K == CHANNEL
#include "matrix_query.wgsl"
#end
#include "matrix_scores.wgsl"
#end
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
    // Soft cap, ALiBi, masks; the maximum of ceilings.
#for j in 0..2
#if SOFTCAP
    s_$(n)_$(j) = softcap(s_$(n)_$(j), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
    {
        let position = i32(kv_len) - i32(params.q_len) + i32((row0 + r_$(n)) / params.heads_per_kv);
        s_$(n)_$(j) = s_$(n)_$(j) + product(row_slope[r_$(n)], f32(i32(token_$(j)) - position));
    }
#end
#end
#for j in 0..2
    let seen_$(n)_$(j) = i32(token_$(j)) >= row_first[r_$(n)] && i32(token_$(j)) < row_end[r_$(n)];
#end
    let key_$(n) = max(select(0u, order_key(ceil(s_$(n)_0)), seen_$(n)_0), select(0u, order_key(ceil(s_$(n)_1)), seen_$(n)_1));
#if SG == 32
    let top_$(n) = subgroupMax(key_$(n));
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
    // Weights.
#if INTEGER
    let highest = from_order_key(top_$(n));
    let tile_top = select(highest - 1.0, NONE, top_$(n) == 0u);
#else
    let tile_top = select(from_order_key(top_$(n)), NONE, top_$(n) == 0u);
#end
#for j in 0..2
#if INTEGER
    let p_$(j) = select(0.0, exp2w(min(highest - s_$(n)_$(j), 64.0)), seen_$(n)_$(j));
#else
    let p_$(j) = select(0.0, exp2f(max(s_$(n)_$(j) - tile_top, -125.0)), seen_$(n)_$(j));
#end
#end
    let units_0 = weight_units(p_0);
    let units_1 = weight_units(p_1);
    let sum = units_0 + units_1;
#if SG == 32
    let own = lane == r_$(n);
    my_top = select(my_top, tile_top, own);
    my_sum = select(my_sum, subgroupAdd(sum), own);
#else
    post_sum(sg_lane, $(R)u + r_$(n), sum);
    if lane == 0u {
        tile_m[r_$(n)] = tile_top;
    }
#end
#if INTEGER
#for g in 0..VG
    {
#if V_SCALED
        let w_0 = rhe(product(p_0, scale_$(g)_0));
        let w_1 = rhe(product(p_1, scale_$(g)_1));
#else
        let w_0 = rhe(p_0 * 16384.0);
        let w_1 = rhe(p_1 * 16384.0);
#end
        scratch[$(g == 0 ? 0 : R * RS + (g - 1) * R * 32)u + r_$(n) * $(g == 0 ? RS : 32)u + lane] = u32(w_0) | (u32(w_1) << 16u);
#if V == GROUPS
        let p14_0 = (units_0 + 128) >> 8u;
        let p14_1 = (units_1 + 128) >> 8u;
        let z_hi = p14_0 * (shift_$(g)_0 >> 8u) + p14_1 * (shift_$(g)_1 >> 8u);
        let z_lo = p14_0 * (shift_$(g)_0 & 255) + p14_1 * (shift_$(g)_1 & 255);
#end
#if SG == 32
        my_weight_$(g) = select(my_weight_$(g), subgroupAdd(w_0 + w_1), own);
#if V == GROUPS
        my_shift_$(g) = select(my_shift_$(g), (f32(subgroupAdd(z_hi)) * 256.0 + f32(subgroupAdd(z_lo))) * exp2i(-14 - h_$(g)), own);
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
