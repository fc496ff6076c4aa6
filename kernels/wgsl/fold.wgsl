// fold.wgsl: the tile's value, folded into the segment's state (docs/arithmetic.md, sections 4 and 5). Included by decode_split.wgsl behind tile.wgsl.
#if INTEGER && K_AHEAD
if tile + 1u < tile_end {
    load_k_at = tile + 1u;
#if K == CHANNEL
    if (tile + 1u) / $(PS / 64)u != kv_len / $(PS)u {
#include "load_k.wgsl"
    }
#else
#include "load_k.wgsl"
#end
}
#end
workgroupBarrier();
if lane < $(R)u {
    let top_here = tile_m[lane];
#if SG == 32
    let sum_here = tile_l[lane];
#else
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
}
#if INTEGER
// Weights as bytes: a word has the four tokens of one word of V's slot order.
for (var task = lane; task < $(VG * R * 8)u; task += 32u) {
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
for (var at = lane; at < $(VG * R * 8)u; at += 32u) {
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
#else
let group_$(i) = min(lane + $((C * DPL + i) * 32)u, $(D - 1)u) / $(GD)u;
#end
let unit_$(i) = value_unit[odd * $(VG)u + group_$(i)];
#end
for (var r = 0u; r < $(R)u; r++) {
    let alpha = fold_alpha[r];
    let beta = fold_beta[r];
    if beta < 0.0 {
        continue;
    }
#for i in 0..DPL
    var hi_$(i) = 0u;
    var lo_$(i) = 0u;
#end
#for n in 0..4
    {
#if VG == 1
        let hi = weights[r * 8u + $(2 * n)u];
        let lo = weights[r * 8u + $(2 * n + 1)u];
#end
#for i in 0..DPL
#if VG == 1
        hi_$(i) = dot16u(hi, v_$(n)_$(i), hi_$(i));
        lo_$(i) = dot16u(lo, v_$(n)_$(i), lo_$(i));
#else
        hi_$(i) = dot16u(weights[(group_$(i) * $(R)u + r) * 8u + $(2 * n)u], v_$(n)_$(i), hi_$(i));
        lo_$(i) = dot16u(weights[(group_$(i) * $(R)u + r) * 8u + $(2 * n + 1)u], v_$(n)_$(i), lo_$(i));
#end
#end
    }
#end
#for i in 0..DPL
    {
#if SG == 32
        let sum = weight_sum[(odd * $(VG)u + group_$(i)) * $(R)u + r];
#else
        let posts = $(2 * R + 2)u + group_$(i) * $(2 + 3 * R)u + r;
        let sum = posted_sum(posts);
#end
        let value = f32(bitcast<i32>((hi_$(i) << 8u) + lo_$(i)) - $(V_BITS == 8 ? 128 : 8) * sum) * unit_$(i);
#if V == GROUPS
#if SG == 32
        let z = shift_term[(odd * $(VG)u + group_$(i)) * $(R)u + r];
#else
        let far = posted($(2 * R + 1)u + group_$(i) * $(2 + 3 * R)u);
        let h = select(14 - exponent(bitcast<f32>(far)), 0, far == 0u);
        let z = (f32(posted_sum(posts + $(R)u)) * 256.0 + f32(posted_sum(posts + $(2 * R)u))) * exp2i(-15 - h);
#end
        let value_all = value + z;
#else
        let value_all = value;
#end
        let at = (r * $(CH * DPL)u + $(C * DPL + i)u) * 32u + lane;
        segment_o[at] = ftz(segment_o[at] * alpha) + value_all * beta;
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
