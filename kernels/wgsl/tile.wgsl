// tile.wgsl: one tile, from codes to weights (docs/arithmetic.md, sections 3 and 4). Included by decode_split.wgsl;
// lane `lane` has tokens `lane` and `lane + 32` of the tile.
let token_0 = tile * 64u + lane;
let token_1 = token_0 + 32u;
let odd = tile & 1u;
#if K == CHANNEL
let open = tile / $(PS / 64)u == kv_len / $(PS)u;
#else
let open = false;
#end
let k_place_0 = k_place(pages_at, tail_page, head, kv_len, tile, lane);
let k_place_1 = k_place(pages_at, tail_page, head, kv_len, tile, lane + 32u);
#if V_SCALED
#if K == CHANNEL
let v_place_0 = place_of(pages_at, head, min(token_0, last));
let v_place_1 = place_of(pages_at, head, min(token_1, last));
#else
let v_place_0 = k_place_0;
let v_place_1 = k_place_1;
#end
#end
#if PS >= 64
let v_tile = run_of(tables[pages_at + tile / $(PS / 64)u], head);
#end
#if SG != 32
workgroupBarrier();
clear_reduced(lane);
workgroupBarrier();
#end

#if INTEGER && !K_AHEAD
load_k_at = tile;
#if K == CHANNEL
if !open {
#include "load_k.wgsl"
}
#else
#include "load_k.wgsl"
#end
#end
#if INTEGER && V_AHEAD
#let C = 0
#include "load_v.wgsl"
#end

// V's parameters; past the end they are 0.
#if V_SCALED
#for g in 0..VG
#for j in 0..2
var v_$(g)_$(j) = v_param(v_place_$(j), $(g)u);
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
#if K_BITS == 8
let k_$(u)_$(j) = k_raw_$(u)_$(j);
#elif D % 32 != 0 && u + 1 == UNITS
var k_$(u)_$(j) = k_raw_$(u / 2)_$(j);
#else
var k_$(u)_$(j) = (k_raw_$(u / 2)_$(j) >> vec4<u32>($(4 * (u % 2))u)) & vec4<u32>(0x0F0F0F0Fu);
#end
#end
#end
#if K == CHANNEL
var open_scale_0 = 0.0;
var open_scale_1 = 0.0;
if open {
#for u in 0..UNITS
#for j in 0..2
    k_$(u)_$(j) = k_bytes(k_place_$(j), $(u)u);
#end
#end
    open_scale_0 = k_scale_open(k_place_0);
    open_scale_1 = k_scale_open(k_place_1);
}
#elif K == TOKEN || K == G32
#for g in 0..KG
let k_scale_$(g)_0 = k_scale(k_place_0, $(g)u);
let k_scale_$(g)_1 = k_scale(k_place_1, $(g)u);
#end
#elif K == GROUPS
#for g in 0..KG
#for j in 0..2
var k_param_$(g)_$(j) = k_param(k_place_$(j), $(g)u);
k_param_$(g)_$(j).y = k_param_$(g)_$(j).y + 8.0 * k_param_$(g)_$(j).x;
#end
#end
#end
#else
#include "score_float.wgsl"
#end

for (var r = 0u; r < $(R)u; r++) {
#if INTEGER
#include "score_integer.wgsl"
#else
    var s_0 = scores[r * 64u + lane];
    var s_1 = scores[r * 64u + 32u + lane];
#end
    // Soft cap, ALiBi, masks; the maximum of ceilings.
#for j in 0..2
#if SOFTCAP
    s_$(j) = softcap(s_$(j), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
    {
        let position = i32(kv_len) - i32(params.q_len) + i32((row0 + r) / params.heads_per_kv);
        s_$(j) = s_$(j) + product(row_slope[r], f32(i32(token_$(j)) - position));
    }
#end
#end
#for j in 0..2
    let seen_$(j) = i32(token_$(j)) >= row_first[r] && i32(token_$(j)) < row_end[r];
#end
    let key = max(select(0u, order_key(ceil(s_0)), seen_0), select(0u, order_key(ceil(s_1)), seen_1));
#if SG == 32
    let top = subgroupMax(key);
#else
    scores[r * 64u + lane] = s_0;
    scores[r * 64u + 32u + lane] = s_1;
    post_max(sg_lane, r, key);
}
workgroupBarrier();
#end
#if SG != 32
for (var r = 0u; r < $(R)u; r++) {
    let s_0 = scores[r * 64u + lane];
    let s_1 = scores[r * 64u + 32u + lane];
#for j in 0..2
    let seen_$(j) = i32(token_$(j)) >= row_first[r] && i32(token_$(j)) < row_end[r];
#end
    let top = posted(r);
#end
    // Weights.
    let tile_top = select(from_order_key(top), NONE, top == 0u);
#for j in 0..2
#if INTEGER
    let p_$(j) = select(0.0, exp2w(max(s_$(j) - tile_top, -125.0)), seen_$(j));
#else
    let p_$(j) = select(0.0, exp2f(max(s_$(j) - tile_top, -125.0)), seen_$(j));
#end
#end
    let sum = (bitcast<i32>(p_0 + 2.0) - 0x40000000) + (bitcast<i32>(p_1 + 2.0) - 0x40000000);
#if SG == 32
    let sum_all = subgroupAdd(sum);
    if lane == 0u {
        tile_m[r] = tile_top;
        tile_l[r] = sum_all;
    }
#else
    post_sum(sg_lane, $(R)u + r, sum);
    if lane == 0u {
        tile_m[r] = tile_top;
    }
#end
#if INTEGER
#for g in 0..VG
    {
#if V_SCALED
#if SG != 32
        let v_top_$(g) = posted($(2 * R + g * (2 + 3 * R))u);
#end
        let f = select(15 - exponent(bitcast<f32>(v_top_$(g))), 0, v_top_$(g) == 0u);
        let w_0 = rhe(product(p_0, v_$(g)_0.x * exp2i(f)));
        let w_1 = rhe(product(p_1, v_$(g)_1.x * exp2i(f)));
#else
        // A per-tensor scale stays outside: v_scale = 1, so f = 15; unwritten tokens weigh 0 as none sees them.
        let f = 15;
        let w_0 = rhe(p_0 * 32768.0);
        let w_1 = rhe(p_1 * 32768.0);
#end
        raw[($(g * R)u + r) * 32u + lane] = u32(w_0) | (u32(w_1) << 16u);
#if V == GROUPS
#if SG != 32
        let v_far_$(g) = posted($(2 * R + g * (2 + 3 * R) + 1)u);
#end
        let h = select(14 - exponent(bitcast<f32>(v_far_$(g))), 0, v_far_$(g) == 0u);
        let shift_0 = rhe(v_$(g)_0.y * exp2i(h));
        let shift_1 = rhe(v_$(g)_1.y * exp2i(h));
        let p15_0 = bitcast<i32>(p_0 + 256.0) - 0x43800000;
        let p15_1 = bitcast<i32>(p_1 + 256.0) - 0x43800000;
        let z_hi = p15_0 * (shift_0 >> 8u) + p15_1 * (shift_1 >> 8u);
        let z_lo = p15_0 * (shift_0 & 255) + p15_1 * (shift_1 & 255);
#end
#if SG == 32
        let weight_all = subgroupAdd(w_0 + w_1);
#if V == GROUPS
        let z = (f32(subgroupAdd(z_hi)) * 256.0 + f32(subgroupAdd(z_lo))) * exp2i(-15 - h);
#end
        if lane == 0u {
            weight_sum[(odd * $(VG)u + $(g)u) * $(R)u + r] = weight_all;
            value_unit[odd * $(VG)u + $(g)u] = exp2i(-f);
#if V == GROUPS
            shift_term[(odd * $(VG)u + $(g)u) * $(R)u + r] = z;
#end
        }
#else
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2)u + r, w_0 + w_1);
#if V == GROUPS
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2 + R)u + r, z_hi);
        post_sum(sg_lane, $(2 * R + g * (2 + 3 * R) + 2 + 2 * R)u + r, z_lo);
#end
        if lane == 0u {
            value_unit[odd * $(VG)u + $(g)u] = exp2i(-f);
        }
#end
    }
#end
#else
    values_p[r * 64u + slot_of(lane)] = p_0;
    values_p[r * 64u + 32u + slot_of(lane)] = p_1;
#end
}
#if !INTEGER
#for g in 0..VG
#if V_SCALED
values_param[$(64 * g)u + slot_of(lane)] = v_$(g)_0;
values_param[$(64 * g + 32)u + slot_of(lane)] = v_$(g)_1;
#else
values_param[$(64 * g)u + slot_of(lane)] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_0 < kv_len);
values_param[$(64 * g + 32)u + slot_of(lane)] = select(vec2<f32>(0.0), vec2<f32>(1.0, 0.0), token_1 < kv_len);
#end
#end
#end
