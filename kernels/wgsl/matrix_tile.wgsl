// matrix_tile.wgsl: one tile, from codes to the state (docs/arithmetic.md, sections 3 to 5). Included by matrix_split.wgsl.
// For scores and weights a lane has tokens `mine` and `mine + 8` of the tile, whatever its subgroup.
let token_0 = tile * 64u + mine;
let token_1 = token_0 + 8u;
#if K == CHANNEL
let open = tile / $(PS / 64)u == kv_len / $(PS)u;
let k_place_0 = k_place(pages_at, tail_page, head, kv_len, tile, mine);
let k_place_1 = k_place(pages_at, tail_page, head, kv_len, tile, mine + 8u);
#else
let open = false;
#end
#for j in 0..BLOCKS
let block_$(j) = min(part + $(4 * j)u, $(UNITS - 1)u);
#if V_BITS == 8
#for h in 0..2
let v_raw_$(j)_$(h) = v_codes(pages_at, head, tile, last, $(2 * h)u + (lane >> 4u), block_$(j) * 16u + (lane & 15u)) ^ vec4<u32>(0x80808080u);
#end
#else
let v_raw_$(j)_0 = v_codes(pages_at, head, tile, last, lane >> 3u, block_$(j) * 8u + (lane & 7u));
#end
#end
#include "v_params.wgsl"
#include "k_params.wgsl"
#if K == CHANNEL
#include "plane_channel.wgsl"
#include "matrix_query.wgsl"
#end

// Scores of the subgroup's 16 tokens.
#if PLAIN
var score: Matrix;
#else
var score: coop_mat16x16<f32, C>;
#end
#for p in 0..PHASES
#if p > 0 || K == CHANNEL
workgroupBarrier();
#end
#include "matrix_stage_k.wgsl"
workgroupBarrier();
#let UEND = PU * (p + 1) < UNITS ? PU * (p + 1) : UNITS
#if PLAIN
score = add_scores($(PU * p)u, $(UEND - PU * p)u, score);
#else
#for u in (PU * p)..UEND
{
    let codes = coopLoad<coop_mat16x16<f16, B>>(&stage[part * $(16 * S_STRIDE)u + $(4 * (u - PU * p))u], $(S_STRIDE)u);
    score = coopMultiplyAdd(query_$(u), codes, score);
}
#end
#end
#end
#if PLAIN
store_sums(score);
#else
coopStoreT(score, &sums[part * $(SUMS)u], 20u);
#end
if tile + 1u < tile_end {
    load_at = tile + 1u;
#include "matrix_load.wgsl"
}
workgroupBarrier();
#let p = 0
#let j = 0
#include "matrix_stage_v.wgsl"

// Weights of two rows.
#include "value_scale.wgsl"
#for n in 0..2
let r_$(n) = 2u * part + $(n)u;
#include "score_integer.wgsl"
#include "row_mask.wgsl"
let top_$(n) = lanes_max(key_$(n));
#end
#for n in 0..2
{
#include "row_weights.wgsl"
#let g = 0
#include "row_products.wgsl"
    // Of four tokens in slot order an even lane has the high bytes, its neighbour the low ones.
    let word = u32(w_0) | (u32(w_1) << 16u);
    let other = lanes_swap(word);
    let to = r_$(n) * $(W_STRIDE)u + (lane >> 1u);
    if (lane & 1u) == 0u {
        weights[to] = bytes_of(((word >> 8u) & 0x00FF00FFu) | (other & 0xFF00FF00u));
    } else {
        weights[to + $(8 * W_STRIDE)u] = bytes_of((other & 0x00FF00FFu) | ((word << 8u) & 0xFF00FF00u));
    }
    let tile_sum = lanes_sum(sum);
    let tile_weight = lanes_sum(w_0 + w_1);
#if V == GROUPS
    let tile_shift = (f32(lanes_sum(z_hi)) * 256.0 + f32(lanes_sum(z_lo))) * exp2i(-14 - h_0);
#end
    var alpha = 1.0;
    var beta = -1.0;
    if tile_top != NONE {
        let top = max(m_$(n), tile_top);
        alpha = pow2(top - m_$(n));
        beta = pow2(top - tile_top);
        l_$(n) = l_$(n) * alpha + (f32(tile_sum) * exp2i(-22)) * beta;
        m_$(n) = top;
    }
    if lane == 0u {
        fold_alpha[r_$(n)] = alpha;
        fold_beta[r_$(n)] = beta;
        weight_sum[r_$(n)] = tile_weight;
#if V == GROUPS
        shift_term[r_$(n)] = tile_shift;
#end
    }
}
#end
workgroupBarrier();

// Values of the subgroup's blocks of 16 dims, folded at once.
#if !PLAIN
#for t in 0..4
let weights_$(t) = coopLoadT<coop_mat16x16<f16, A>>(&weights[$(4 * t)], $(W_STRIDE)u);
#end
#end
let unit = exp2i(-f_0);
#for j in 0..BLOCKS
#if PLAIN
var value_$(j): Matrix;
#else
var value_$(j): coop_mat16x16<f32, C>;
#end
#for p in 0..(4 / PU)
#if p > 0
workgroupBarrier();
#end
#if p > 0 || j > 0
#include "matrix_stage_v.wgsl"
workgroupBarrier();
#end
#if PLAIN
value_$(j) = add_values($(PU * p)u, $(PU)u, value_$(j));
#else
#for t in (PU * p)..(PU * (p + 1))
{
    let codes = coopLoad<coop_mat16x16<f16, B>>(&stage[part * $(16 * S_STRIDE)u + $(4 * (t - PU * p))u], $(S_STRIDE)u);
    value_$(j) = coopMultiplyAdd(weights_$(t), codes, value_$(j));
}
#end
#end
#end
#if PLAIN
store_sums(value_$(j));
#else
coopStoreT(value_$(j), &sums[part * $(SUMS)u], 20u);
#end
workgroupBarrier();
#for k in 0..4
{
    let r = 4u * (lane >> 4u) + $(k)u;
    let beta = fold_beta[r];
    let at = part * $(SUMS)u + r * 20u + (lane & 15u);
    let total = (value_sum(sums[at]) << 8u) + value_sum(sums[at + 160u]) - $(V_BITS == 8 ? 128 : 8) * weight_sum[r];
#if V == GROUPS
    let value = f32(total) * unit + shift_term[r];
#else
    let value = f32(total) * unit;
#end
    // Rows side by side: branches around each took 90 of 1050 us.
    o_$(j)_$(k) = select(ftz(o_$(j)_$(k) * fold_alpha[r]) + value * beta, o_$(j)_$(k), beta < 0.0);
}
#end
#end
