// fold.wgsl: the tile's value, folded into the segment's state (docs/arithmetic.md, sections 4 and 5). Included by decode_split.wgsl behind tile.wgsl.
workgroupBarrier();
// Here nobody posts: slots are cleared as they are read.
if lane < $(R)u {
    let highest = from_order_key(posted($(TOP)u + lane));
#if INTEGER
    let top_here = select(highest - 1.0, NONE, highest == NONE);
#else
    let top_here = highest;
#end
    let sum_here = posted_sum($(SUM)u + lane);
    clear($(TOP)u + lane);
    clear($(SUM)u + lane);
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
#if K == CHANNEL
    clear($(BOUND)u + lane);
    clear($(QUERY_SUM)u + lane);
    clear($(SHIFT_SUM)u + lane);
#end
#for g in 0..VG
#let OF_ROW = GROUPS_AT + g * OF_GROUP + 2
    weight_sum[$(g * R)u + lane] = posted_sum($(OF_ROW)u + lane);
    clear($(OF_ROW)u + lane);
#if V == GROUPS
    shift_term[$(g * R)u + lane] = (f32(posted_sum($(OF_ROW + R)u + lane)) * 256.0 + f32(posted_sum($(OF_ROW + 2 * R)u + lane))) * exp2i(-14 - h_$(g));
    clear($(OF_ROW + R)u + lane);
    clear($(OF_ROW + 2 * R)u + lane);
#end
#end
#end
}
#if INTEGER
if lane == 0u {
#if K == CHANNEL
    clear($(FAR)u);
#end
#for g in 0..VG
    clear($(GROUPS_AT + g * OF_GROUP)u);
    clear($(GROUPS_AT + g * OF_GROUP + 1)u);
#if VG > 1
    value_unit[$(g)] = exp2i(-f_$(g));
#end
#end
}
// Weights as bytes: of each plane 16 tokens in slot order, four to a word.
for (var task = lane; task < num_weights; task += $(T)u) {
    let row = task >> 3u;            // of a group
#if VG == 1
    let source = row * $(RS)u + ((task >> 1u) & 3u) * 17u;
    let down = (~task & 1u) * 8u;
#else
    let group = row / $(R)u;
    let source = ((group >> 1u) * $(R)u + row % $(R)u) * $(RS)u + ((task >> 1u) & 3u) * 17u;
    let down = (~task & 1u) * 8u + (group & 1u) * 16u;
#end
#for c in 0..4
    let word_$(c) = ((scratch[source + $(2 * c)u] >> down) & 255u) | (((scratch[source + $(2 * c + 1)u] >> down) & 255u) << 8u)
        | (((scratch[source + $(2 * c + 8)u] >> down) & 255u) << 16u) | ((scratch[source + $(2 * c + 9)u] >> down) << 24u);
#end
    weights[task] = vec4<u32>(word_0, word_1, word_2, word_3);
}
#end
workgroupBarrier();

// Lanes that have a dim.
#let DIM_LANES = VIEW && V_BITS == 8 ? D / 4 : V_ROWS
#for C in 0..CH
#if INTEGER
#if DIM_LANES < T
if lane < $(DIM_LANES)u {
#else
{
#end
#if !V_FIRST
#include "load_v.wgsl"
#end
#for n in 0..4
#for i in 0..DPL
#if V_BITS == 8
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i) ^ vec4<u32>(0x80808080u);
#elif i % 2 == 0
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i / 2) & vec4<u32>(0x0F0F0F0Fu);
#else
// 16 times as large.
let v_$(n)_$(i) = v_raw_$(C)_$(n)_$(i / 2) & vec4<u32>(0xF0F0F0F0u);
#end
#end
#end
#for i in 0..DPL
#if VG == 1
let group_$(i) = 0u;
let unit_$(i) = exp2i(-f_0);
#else
let group_$(i) = min(dim_of(lane, $(C * DPL + i)u), $(D - 1)u) / $(GD)u;
let unit_$(i) = value_unit[group_$(i)];
#end
#end
#for b in 0..(R / RU)
if $(b * RU)u < num_rows {
#for r in (b * RU)..(b * RU + RU)
#for i in 0..DPL
    var hi_$(r)_$(i) = 0u;
    var lo_$(r)_$(i) = 0u;
#end
#for t in 0..4
    {
#if VG == 1
        let hi = weights[$(r * 8 + 2 * t)];
        let lo = weights[$(r * 8 + 2 * t + 1)];
#end
#for i in 0..DPL
#if VG == 1
        hi_$(r)_$(i) = dot16u(hi, v_$(t)_$(i), hi_$(r)_$(i));
        lo_$(r)_$(i) = dot16u(lo, v_$(t)_$(i), lo_$(r)_$(i));
#else
        hi_$(r)_$(i) = dot16u(weights[(group_$(i) * $(R)u + $(r)u) * 8u + $(2 * t)u], v_$(t)_$(i), hi_$(r)_$(i));
        lo_$(r)_$(i) = dot16u(weights[(group_$(i) * $(R)u + $(r)u) * 8u + $(2 * t + 1)u], v_$(t)_$(i), lo_$(r)_$(i));
#end
#end
    }
#end
#end
#for r in (b * RU)..(b * RU + RU)
    if fold_beta[$(r)] >= 0.0 {
#for i in 0..DPL
        {
            let sum = weight_sum[group_$(i) * $(R)u + $(r)u];
            let total = bitcast<i32>(((hi_$(r)_$(i) << 8u) + lo_$(r)_$(i)) >> $(V_BITS == 4 && i % 2 == 1 ? 4 : 0)u) - $(V_BITS == 8 ? 128 : 8) * sum;
#if V == GROUPS
            let value = f32(total) * unit_$(i) + shift_term[group_$(i) * $(R)u + $(r)u];
#else
            let value = f32(total) * unit_$(i);
#end
            o_$(r)_$(C * DPL + i) = ftz(o_$(r)_$(C * DPL + i) * fold_alpha[$(r)]) + value * fold_beta[$(r)];
        }
#end
    }
#end
}
#end
}
#else
{
#include "value_float.wgsl"
}
#end
#end
