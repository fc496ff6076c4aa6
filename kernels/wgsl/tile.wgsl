// tile.wgsl: one team's tile, from codes to weights and then, group after group of V, to the tile's value (docs/arithmetic.md, sections 3 and 4).
// Included by decode_split.wgsl; lane `lane` has tokens `lane` and `lane + 32` of the tile.

let token_0 = tile * 64u + lane;
let token_1 = token_0 + 32u;
#if K == CHANNEL
let k_page = min(tile * 64u, last) / $(PS)u;
let open = k_page == kv_len / $(PS)u;
let k_run = run_of(select(tables[pages_at + k_page], tail_page, open), head);
let k_place_0 = Place(k_run.buffer, k_run.at, min(token_0, last) % $(PS)u);
let k_place_1 = Place(k_run.buffer, k_run.at, min(token_1, last) % $(PS)u);
#else
let open = false;
let k_place_0 = place_of(pages_at, head, min(token_0, last));
let k_place_1 = place_of(pages_at, head, min(token_1, last));
#end
#if V_SCALED
#if K == CHANNEL
let v_place_0 = place_of(pages_at, head, min(token_0, last));
let v_place_1 = place_of(pages_at, head, min(token_1, last));
#else
let v_place_0 = k_place_0;
let v_place_1 = k_place_1;
#end
#end

#if INTEGER && K == CHANNEL
#include "plane_channel.wgsl"
#end

// Scores.
#for r in 0..R
#for j in 0..2
var s_$(r)_$(j) = 0.0;
#end
#end
#if INTEGER
#let SET = K == CHANNEL ? 1 : 0
#if K_BITS == 8
#include "score_int8.wgsl"
#elif K == CHANNEL
if open {
#include "score_int8.wgsl"
} else {
#include "score_int4.wgsl"
}
#else
#include "score_int4.wgsl"
#end
#else
for (var u = 0u; u < $(UNITS)u; u++) {
#for j in 0..2
    let k_$(j) = k_values(k_place_$(j), open, u);
#for w in 0..4
    let k_$(j)_$(w) = k_$(j)[$(w)];
#end
#end
#for r in 0..R
#for w in 0..4
    let q_$(r)_$(w) = queries[($(r * UNITS)u + u) * 4u + $(w)u];
#end
#for j in 0..2
    s_$(r)_$(j) += (dot(q_$(r)_0, k_$(j)_0) + dot(q_$(r)_1, k_$(j)_1)) + (dot(q_$(r)_2, k_$(j)_2) + dot(q_$(r)_3, k_$(j)_3));
#end
#end
}
#end

// Soft cap, ALiBi, masks; the maximum of ceilings.
#for r in 0..R
var key_$(r) = 0u;
#for j in 0..2
#if SOFTCAP
s_$(r)_$(j) = softcap(s_$(r)_$(j), params.softcap_inner, params.softcap_outer);
#end
#if ALIBI
{
    let position = i32(kv_len) - i32(params.q_len) + i32((row0 + $(r)u) / params.heads_per_kv);
    s_$(r)_$(j) = s_$(r)_$(j) + product(row_slope[$(r)], f32(i32(token_$(j)) - position));
}
#end
let seen_$(r)_$(j) = i32(token_$(j)) >= row_first[$(r)] && i32(token_$(j)) < row_end[$(r)];
key_$(r) = max(key_$(r), select(0u, order_key(ceil(s_$(r)_$(j))), seen_$(r)_$(j)));
#end
#end
#if SG == 32
#for r in 0..R
key_$(r) = subgroupMax(key_$(r));
#end
#else
let slot = team * $(SLOTS)u;
#for r in 0..R
post_max(sg_lane, slot + $(r)u, key_$(r));
#end
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
post_max(sg_lane, slot + $(2 * R + g * (2 + 3 * R))u, max(bitcast<u32>(v_$(g)_0.x), bitcast<u32>(v_$(g)_1.x)));
#if V == GROUPS
post_max(sg_lane, slot + $(2 * R + g * (2 + 3 * R) + 1)u, max(bitcast<u32>(abs(v_$(g)_0.y)), bitcast<u32>(abs(v_$(g)_1.y))));
#end
#end
#end
#end
#end

#if SG != 32
workgroupBarrier();
#for r in 0..R
key_$(r) = posted(slot + $(r)u);
#end
#end

// Weights.
#for r in 0..R
let m_$(r) = select(from_order_key(key_$(r)), NONE, key_$(r) == 0u);
#for j in 0..2
#if INTEGER
let p_$(r)_$(j) = select(0.0, exp2w(max(s_$(r)_$(j) - m_$(r), -125.0)), seen_$(r)_$(j));
#else
let p_$(r)_$(j) = select(0.0, exp2f(max(s_$(r)_$(j) - m_$(r), -125.0)), seen_$(r)_$(j));
#end
#end
{
    let sum = (bitcast<i32>(p_$(r)_0 + 2.0) - 0x40000000) + (bitcast<i32>(p_$(r)_1 + 2.0) - 0x40000000);
#if SG == 32
    let all = subgroupAdd(sum);
    if lane == 0u {
        tile_m[team * $(R)u + $(r)u] = m_$(r);
        tile_l[team * $(R)u + $(r)u] = all;
    }
#else
    post_sum(sg_lane, slot + $(R + r)u, sum);
    if lane == 0u {
        tile_m[team * $(R)u + $(r)u] = m_$(r);
    }
#end
}
#end
