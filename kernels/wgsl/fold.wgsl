// fold.wgsl: the tile's value, folded into the segment's state (docs/arithmetic.md, sections 4 and 5). Included by decode_split.wgsl behind tile.wgsl.
#if K_AHEAD
if tile + 1u < tile_end {
    load_at = tile + 1u;
#include "load.wgsl"
}
#end
workgroupBarrier();
if lane < $(R)u {
#if SG == 32
    let top_here = my_top;
    let sum_here = my_sum;
#else
    let top_here = tile_m[lane];
    let sum_here = posted_sum($(R)u + lane);
#end
    if top_here == NONE {
        fold_beta[lane] = -1.0;
    } else {
        let top = max(m, top_here);
        let alpha = pow2(top - m);
        let beta = pow2(top - top_here);
        l = l * alpha + (f32(sum_here) * exp2i(-22)) * beta;
        m = top;
        fold_alpha[lane] = alpha;
        fold_beta[lane] = beta;
    }
#if INTEGER
#for g in 0..VG
#if SG == 32
    weight_sum[$(g * R)u + lane] = my_weight_$(g);
#if V == GROUPS
    shift_term[$(g * R)u + lane] = my_shift_$(g);
#end
#else
    weight_sum[$(g * R)u + lane] = posted_sum($(2 * R + g * (2 + 3 * R) + 2)u + lane);
#if V == GROUPS
    shift_term[$(g * R)u + lane] = (f32(posted_sum($(2 * R + g * (2 + 3 * R) + 2 + R)u + lane)) * 256.0 + f32(posted_sum($(2 * R + g * (2 + 3 * R) + 2 + 2 * R)u + lane))) * exp2i(-15 - h_$(g));
#end
#end
#end
#end
}
#if INTEGER
#if VG > 1
if lane == 0u {
#for g in 0..VG
    value_unit[$(g)] = exp2i(-f_$(g));
#end
}
#end
// Weights as bytes: a word has the four tokens of one word of V's slot order.
for (var task = lane; task < num_weights; task += 32u) {
    let row = task >> 3u;
    let half = (task >> 2u) & 1u;
    let c = task & 3u;
    let source = row * 32u + half * 16u + 2u * c;
    let a = vec4<u32>(raw[source], raw[source + 1u], raw[source + 8u], raw[source + 9u]);
    let near = (a & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let near_hi = ((a >> vec4<u32>(8u)) & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let far = ((a >> vec4<u32>(16u)) & vec4<u32>(0xFFu)) << vec4<u32>(0u, 8u, 16u, 24u);
    let far_hi = (a >> vec4<u32>(24u)) << vec4<u32>(0u, 8u, 16u, 24u);
    let to = row * 32u + half * 8u + c;
    words[to] = near_hi.x | near_hi.y | near_hi.z | near_hi.w;
    words[to + 4u] = near.x | near.y | near.z | near.w;
    words[to + 16u] = far_hi.x | far_hi.y | far_hi.z | far_hi.w;
    words[to + 20u] = far.x | far.y | far.z | far.w;
}
workgroupBarrier();
for (var at = lane; at < num_weights; at += 32u) {
    weights[at] = vec4<u32>(words[4u * at], words[4u * at + 1u], words[4u * at + 2u], words[4u * at + 3u]);
}
#end
workgroupBarrier();

#for C in 0..CH
#if INTEGER
{
#if !V_AHEAD || C > 0
#include "load_v.wgsl"
#end
#for n in 0..V_LOADS
#for i in 0..DPL
#if V_BITS == 8
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i) ^ vec4<u32>(0x80808080u);
#else
let v_$(2 * n)_$(i) = v_raw_$(C)_$(n)_$(i) & vec4<u32>(0x0F0F0F0Fu);
let v_$(2 * n + 1)_$(i) = (v_raw_$(C)_$(n)_$(i) >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu);
#end
#end
#end
#for i in 0..DPL
#if VG == 1
let group_$(i) = 0u;
let unit_$(i) = exp2i(-f_0);
#else
let group_$(i) = min(lane + $((C * DPL + i) * 32)u, $(D - 1)u) / $(GD)u;
let unit_$(i) = value_unit[group_$(i)];
#end
#end
for (var r0 = 0u; r0 < num_rows; r0 += $(RU)u) {
#for n in 0..RU
    let r_$(n) = r0 + $(n)u;
#for i in 0..DPL
    var hi_$(n)_$(i) = 0u;
    var lo_$(n)_$(i) = 0u;
#end
#for t in 0..4
    {
#if VG == 1
        let hi = weights[r_$(n) * 8u + $(2 * t)u];
        let lo = weights[r_$(n) * 8u + $(2 * t + 1)u];
#end
#for i in 0..DPL
#if VG == 1
        hi_$(n)_$(i) = dot16u(hi, v_$(t)_$(i), hi_$(n)_$(i));
        lo_$(n)_$(i) = dot16u(lo, v_$(t)_$(i), lo_$(n)_$(i));
#else
        hi_$(n)_$(i) = dot16u(weights[(group_$(i) * $(R)u + r_$(n)) * 8u + $(2 * t)u], v_$(t)_$(i), hi_$(n)_$(i));
        lo_$(n)_$(i) = dot16u(weights[(group_$(i) * $(R)u + r_$(n)) * 8u + $(2 * t + 1)u], v_$(t)_$(i), lo_$(n)_$(i));
#end
#end
    }
#end
#end
#for n in 0..RU
    let alpha_$(n) = fold_alpha[r_$(n)];
    let beta_$(n) = fold_beta[r_$(n)];
    if beta_$(n) >= 0.0 {
#for i in 0..DPL
    {
        let sum = weight_sum[group_$(i) * $(R)u + r_$(n)];
#if V == GROUPS
        let value = f32(bitcast<i32>((hi_$(n)_$(i) << 8u) + lo_$(n)_$(i)) - $(V_BITS == 8 ? 128 : 8) * sum) * unit_$(i) + shift_term[group_$(i) * $(R)u + r_$(n)];
#else
        let value = f32(bitcast<i32>((hi_$(n)_$(i) << 8u) + lo_$(n)_$(i)) - $(V_BITS == 8 ? 128 : 8) * sum) * unit_$(i);
#end
        let at = (r_$(n) * $(CH * DPL)u + $(C * DPL + i)u) * 32u + lane;
        segment_o[at] = ftz(segment_o[at] * alpha_$(n)) + value * beta_$(n);
    }
#end
    }
#end
}
}
#else
{
#include "value_float.wgsl"
}
#end
#end
