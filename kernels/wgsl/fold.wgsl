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
    shift_term[$(g * R)u + lane] = (f32(posted_sum($(2 * R + g * (2 + 3 * R) + 2 + R)u + lane)) * 256.0 + f32(posted_sum($(2 * R + g * (2 + 3 * R) + 2 + 2 * R)u + lane))) * exp2i(-14 - h_$(g));
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
// Weights as bytes: of each plane 16 tokens in slot order, a word from two lanes.
for (var task = lane; task < num_weights; task += 32u) {
    let row = task >> 2u;
#if VG == 1
    let source = row * $(RS)u + (task & 3u) * 8u;
#else
    let source = select($(R * (RS - 32))u + row * 32u, row * $(RS)u, row < $(R)u) + (task & 3u) * 8u;
#end
#for c in 0..4
    let even_$(c) = scratch[source + $(2 * c)u];
    let odd_$(c) = scratch[source + $(2 * c + 1)u];
    let hi_$(c) = ((even_$(c) >> 8u) & 0x00FF00FFu) | (odd_$(c) & 0xFF00FF00u);
    let lo_$(c) = (even_$(c) & 0x00FF00FFu) | ((odd_$(c) << 8u) & 0xFF00FF00u);
#end
    weights[2u * task] = vec4<u32>(hi_0, hi_1, hi_2, hi_3);
    weights[2u * task + 1u] = vec4<u32>(lo_0, lo_1, lo_2, lo_3);
}
#end
workgroupBarrier();

#for C in 0..CH
#if INTEGER
{
#if !V_AHEAD || C > 0
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
// Registers cannot be indexed: the rows' states pass by, and after as many steps as rows each is back at its place.
for (var r0 = 0u; r0 < all_rows; r0 += $(RU)u) {
#for r in 0..RU
#for i in 0..DPL
    var new_$(r)_$(i) = o_$(r)_$(C * DPL + i);
#end
#end
    if r0 < num_rows {
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
        let total = bitcast<i32>(((hi_$(n)_$(i) << 8u) + lo_$(n)_$(i)) >> $(V_BITS == 4 && i % 2 == 1 ? 4 : 0)u) - $(V_BITS == 8 ? 128 : 8) * sum;
#if V == GROUPS
        let value = f32(total) * unit_$(i) + shift_term[group_$(i) * $(R)u + r_$(n)];
#else
        let value = f32(total) * unit_$(i);
#end
        new_$(n)_$(i) = ftz(new_$(n)_$(i) * alpha_$(n)) + value * beta_$(n);
    }
#end
    }
#end
    }
#for r in 0..R
#for i in 0..DPL
#if r + RU < R
    o_$(r)_$(C * DPL + i) = o_$(r + RU)_$(C * DPL + i);
#else
    o_$(r)_$(C * DPL + i) = new_$(r + RU - R)_$(i);
#end
#end
#end
}
}
#else
{
#include "value_float.wgsl"
}
#end
#end
