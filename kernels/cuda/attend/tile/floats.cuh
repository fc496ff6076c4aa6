// The float arithmetic on tensor cores: formats of which K or V is f16, bf16 or fp8.
//
// Everything enters the products as 16-bit floats, exactly: K and V in bf16 as bf16, all else as f16. Queries and weights are sums of two such
// floats. Scores and weights lie in the lanes as in score.cuh and value.cuh; the softmax and the state are the same.
#pragma once
#include "attend/tile/rows.cuh"
#include "attend/tile/value.cuh"

namespace attn {

// Four codes of 8 bits, or nibbles in their bytes, to two pairs: of half steps 32u - 240, which residuals complete by 2r - 15.
template <int SCHEME> DEVICE void code_pairs(u32 x, u32& low, u32& high) {
    if constexpr (SCHEME == FP8) {
        e4m3_pairs(x, low, high);
    } else if constexpr (code_bits(SCHEME) == 8) {
        byte_pairs<128>(x ^ 0x80808080, low, high);
    } else if constexpr (SCHEME == INT4) {
        byte_pairs<8>(x, low, high);
    } else {
        byte_pairs<0>(x, low, high);
        low = f16_fma(low, 0x50005000, 0xdb80db80);
        high = f16_fma(high, 0x50005000, 0xdb80db80);
    }
}
DEVICE void residual_pairs(u32 x, u32& low, u32& high) {
    byte_pairs<0>(x, low, high);
    low = f16_fma(low, 0x40004000, 0xcb80cb80);
    high = f16_fma(high, 0x40004000, 0xcb80cb80);
}
// The left operand of 16 elements of each row from a register of each half of the rows; nibbles stand as `split_nibbles` leaves them.
template <class Convert> DEVICE void operand(const u32 (&x)[2], bool are_nibbles, Convert convert, u32 (&a)[4]) {
    convert(x[0], a[0], a[2]);
    convert(are_nibbles ? x[1] >> 4 : x[1], a[1], a[3]);
}

template <bool IS_BF16> DEVICE FloatSums multiply_floats(const FloatSums& c, const u32 (&a)[4], u32 b0, u32 b1) {
    return IS_BF16 ? mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1) : mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// 16 tokens of K: a[panel] is the left operand of 16 dims.
DEVICE void load_float_keys(const Codes& k, int t, int lane, u32 (&a)[Keys::PANELS][4]) {
    if constexpr (Keys::BITS == 16) {
        int row = in_block(t) + lane % 16;
        u32 block = k.at + block_of(t) * k.stride;
#pragma unroll
        for (int panel = 0; panel < Keys::PANELS; panel++) {
            if (PAGE == 0) ldmatrix_x4(a[panel], chunk_at<Stage::K_SWIZZLE>(k.at, 2 * panel, lane / 16, row));
            else ldmatrix_x4(a[panel], block + ((2 * panel + lane / 16) * Stage::BLOCK + row) * 16);
        }
    } else {
        u32 x[Keys::PANELS][2];
        if constexpr (Keys::HAS_NIBBLES) load_keys4(k, t, lane, x);
        else load_keys8(k, t, lane, x);
#pragma unroll
        for (int panel = 0; panel < Keys::PANELS; panel++)
            operand(x[panel], Keys::HAS_NIBBLES, [](u32 x, u32& low, u32& high) { code_pairs<Keys::SCHEME>(x, low, high); }, a[panel]);
    }
}

DEVICE FloatSums dot_float_keys(const u32 (&a)[Keys::PANELS][4], const u32 (&q)[Keys::PANELS][INTEGER ? 1 : 4], int first, int last) {
    FloatSums sums[2] = {};  // two, because MMAs into the same accumulator are a dependent chain
#pragma unroll
    for (int p = first; p < last; p++)
#pragma unroll
        for (int part = 0; part < 2; part++) sums[part] = multiply_floats<Keys::SCHEME == BF16>(sums[part], a[p], q[p][2 * part], q[p][2 * part + 1]);
#pragma unroll
    for (int n = 0; n < 4; n++) sums[0].x[n] += sums[1].x[n];
    return sums[0];
}

// Scores; see `scores`.
template <class Params, class Team, class Fine>
DEVICE void float_scores(const StagedTile& at, const Params& params, const Query& q, const Team& team, Fine is_fine, float (&s)[ROW_GROUPS][Team::SCORES]) {
#pragma unroll
    for (int i = 0; i < Team::TOKENS / 16; i++) {
        u32 a[Keys::PANELS][4], residuals[Keys::PANELS][4];
        int t = team.token() + 16 * i;
        load_float_keys(at.k, t, team.lane, a);
        if (Keys::WINDOW && at.residuals) {
            u32 x[Keys::PANELS][2];
            load_keys4(at.k_residuals, t, team.lane, x);
#pragma unroll
            for (int panel = 0; panel < Keys::PANELS; panel++) operand(x[panel], true, residual_pairs, residuals[panel]);
        }
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++) {
            TokenParams k = {{1.0f, 1.0f}};
            if constexpr (Keys::HAS_PARAMS) k = read_keys(params, group, t + team.lane / 4);
            if (Keys::HAS_HALF_STEPS)
#pragma unroll
                for (int h = 0; h < 2; h++) k.scale[h] = k.scale[h] * RESIDUAL_STEP;
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) {
                int first = first_panel(group), last = first_panel(group + 1);
                FloatSums c = dot_float_keys(a, q.word[g], first, last), r = {};
                if (Keys::WINDOW && at.residuals) r = dot_float_keys(residuals, q.word[g], first, last);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float term = (Keys::WINDOW && at.residuals && is_fine(g, n % 2) ? c.x[n] + r.x[n] : c.x[n]) * k.scale[n / 2];
                    if (Keys::HAS_SHIFTS) term = term + q.float_sum[g][group][n % 2] * k.shift[n / 2];
                    float& to = s[g][4 * i + n];
                    to = group == 0 ? term : to + term;
                    if (group == Keys::GROUPS - 1) to = to * q.scale[g][n % 2];
                }
            }
        }
    }
}

// A row group's weights in a group of V as right operands: [panel of 16 tokens], the first part of tokens 2·(lane%4) and + 8, then the second.
struct FloatWeights {
    u32 panel[4][4];
    float step[2], shift[2];
};

DEVICE void weigh_floats(const float (&p)[WEIGHTS], const ValueParams& v, int lane, FloatWeights& w) {
    float x[WEIGHTS], up[2] = {1.0f, 1.0f};
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++) x[n] = p[n];
    w.step[0] = w.step[1] = 1.0f;
    if constexpr (Values::HAS_PARAMS) {  // products with scales may leave the range of f16
        float largest[2];
        scale_weights(x, v, lane, largest);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int down = max(exponent(largest[e]), -100);
            up[e] = exp2i(-down);
            w.step[e] = exp2i(down);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 parts[2];
            split_pair<Values::SCHEME == BF16>(x[4 * i + 2 * h] * up[0], x[4 * i + 2 * h + 1] * up[1], parts[0], parts[1]);
#pragma unroll
            for (int part = 0; part < 2; part++) w.panel[i][2 * part + h] = transposed(parts[part]);
        }
    if constexpr (Values::HAS_SHIFTS) shift_sum(p, v, lane, w.shift);
}

// 16 dims of V, the warp's j-th: a[panel] is the left operand of 16 tokens.
template <bool IS_FULL> DEVICE void load_float_values(const Codes& v, int j, int tokens, int lane, u32 (&a)[4][4]) {
    if constexpr (Values::BITS == 16) {
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            int t = 16 * panel + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;  // of the dims
            if (PAGE == 0) ldmatrix_x4_trans(a[panel], chunk_at<Stage::V_SWIZZLE>(v.at, 2 * j, half, t));
            else ldmatrix_x4_trans(a[panel], v.at + block_of(t) * v.stride + ((2 * j + half) * Stage::BLOCK + in_block(t)) * 16);
        }
    } else {
        u32 x[4][2];
        load_values(v, j, lane, x);
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
            operand(x[panel], Values::HAS_NIBBLES, [](u32 x, u32& low, u32& high) { code_pairs<Values::SCHEME>(x, low, high); }, a[panel]);
    }
    if (!Values::IS_INTEGER && !IS_FULL)
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
#pragma unroll
            for (int n = 0; n < 4; n++) a[panel][n] = cached(a[panel][n], 16 * panel + n / 2 * 8 + 2 * (lane % 4), tokens);
}

DEVICE FloatSums dot_float_values(const u32 (&a)[4][4], const u32 (&w)[4][4]) {
    FloatSums sums[2] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int part = 0; part < 2; part++) sums[part] = multiply_floats<Values::SCHEME == BF16>(sums[part], a[i], w[i][2 * part], w[i][2 * part + 1]);
#pragma unroll
    for (int n = 0; n < 4; n++) sums[0].x[n] += sums[1].x[n];
    return sums[0];
}

// A warp's dims of a group of V: folds them into O. IS_FULL: all rows see all of the tile's tokens.
template <bool IS_FULL, class Team, class Fine>
DEVICE void fold_float_group(const StagedTile& at, int n, int tokens, const FloatWeights (&w)[ROW_GROUPS], const Rescale& r, const Team& team, Fine is_fine,
                             StateOf<Team>& state) {
    constexpr int BLOCKS_OF_GROUP = Team::DIMS / 16 / Team::GROUPS;
    bool has_residuals = Values::WINDOW && at.residuals;
#pragma unroll
    for (int j = n * BLOCKS_OF_GROUP; j < (n + 1) * BLOCKS_OF_GROUP; j++) {
        u32 a[4][4], residuals[4][4];
        load_float_values<IS_FULL>(at.v, team.dim() / 16 + j, tokens, team.lane, a);
        if (has_residuals) {
            u32 x[4][2];
            load_values4(at.v_residuals, team.dim() / 16 + j, team.lane, x);
#pragma unroll
            for (int panel = 0; panel < 4; panel++) operand(x[panel], true, residual_pairs, residuals[panel]);
        }
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            FloatSums c = dot_float_values(a, w[g].panel), more = {};
            if (has_residuals) more = dot_float_values(residuals, w[g].panel);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int e = i % 2;
                float sum = has_residuals && is_fine(g, e) ? c.x[i] + more.x[i] : c.x[i], value = sum * w[g].step[e];
                if (Values::HAS_SHIFTS) value = value + w[g].shift[e];
                state.o[g][j][i] = fmaf(value, r.beta[g][e], state.o[g][j][i]);
            }
        }
    }
}

// Folds a tile's values into the state; see `fold_values`.
template <class Params, class WeightsOf, class Team, class Fine>
DEVICE void fold_float_values(const StagedTile& at, const Params& params, bool full, int tokens, WeightsOf weights, const Rescale& r, const Team& team,
                              Fine is_fine, StateOf<Team>& state) {
    rescale(state, r);
    add_weights(state, weights, r, team.lane);
#pragma unroll
    for (int n = 0; n < Team::GROUPS; n++) {
        ValueParams v = ValueParams::read(params, team.group() + n, full, team.lane);
        FloatWeights w[ROW_GROUPS];
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            float p[WEIGHTS];
            weights(g, p);
            weigh_floats(p, v, team.lane, w[g]);
        }
        // Decided once: a branch in each block would keep the compiler from loading the next ahead.
        if (Values::IS_INTEGER || full) fold_float_group<true>(at, n, tokens, w, r, team, is_fine, state);
        else fold_float_group<false>(at, n, tokens, w, r, team, is_fine, state);
    }
}

// A tile's scores and values in the arithmetic of the format.
template <class Params, class Team, class Fine>
DEVICE void tile_scores(const StagedTile& at, const Params& params, const Query& q, const Team& team, Fine is_fine, float (&s)[ROW_GROUPS][Team::SCORES]) {
    if constexpr (INTEGER) scores(at, params, q, team, is_fine, s);
    else float_scores(at, params, q, team, is_fine, s);
}
template <class Params, class WeightsOf, class Team, class Fine>
DEVICE void tile_values(const StagedTile& at, const Params& params, bool full, int tokens, WeightsOf weights, const Rescale& r, const Team& team, Fine is_fine,
                        StateOf<Team>& state) {
    if constexpr (INTEGER) fold_values(at, params, full, weights, r, team, is_fine, state);
    else fold_float_values(at, params, full, tokens, weights, r, team, is_fine, state);
}

}  // namespace attn
