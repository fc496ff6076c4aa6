// Section 5 of docs/arithmetic.md: softmax weights of a tile, their bytes, P·V, and the fold into the segment's state.
#pragma once
#include "attend/stage.cuh"
#include "attend/tile/codes.cuh"
#include "attend/tile/score.cuh"
#include "attend/tile/team.cuh"
#include "common/arithmetic.cuh"

namespace attn {

template <class Team> struct StateOf {
    float m[ROW_GROUPS][2], l[ROW_GROUPS][2];  // of the lane's columns
    float o[ROW_GROUPS][Team::DIMS / 16][4];   // [2h + e]: of column e, dim 16j + `dim_of`(h)

    METHOD void clear() {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            m[g][0] = m[g][1] = MINUS_INFINITY;
            l[g][0] = l[g][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < Team::DIMS / 16; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) o[g][j][n] = 0.0f;
        }
    }
};
typedef StateOf<Team> State;

// The token of a lane's n-th score or weight, from its first on.
DEVICE int token_of(int n) { return 16 * (n / 4) + 8 * (n / 2 % 2); }

// Reduces two columns over the eight lanes that share them: each lane first takes over one of the two.
template <class T, class Combine> DEVICE void reduce_columns(T (&x)[2], int lane, Combine combine) {
    bool second = lane & 4;
    T mine = second ? x[1] : x[0], other = second ? x[0] : x[1];
    mine = combine(mine, __shfl_xor_sync(~0u, other, 4));
    mine = combine(mine, __shfl_xor_sync(~0u, mine, 8));
    mine = combine(mine, __shfl_xor_sync(~0u, mine, 16));
    other = __shfl_xor_sync(~0u, mine, 4);
    x[0] = second ? other : mine;
    x[1] = second ? mine : other;
}
DEVICE void column_max(float (&x)[2], int lane) {
    reduce_columns(x, lane, [](float a, float b) { return fmaxf(a, b); });
}
DEVICE void column_sum(u32 (&x)[2], int lane) {
    reduce_columns(x, lane, [](u32 a, u32 b) { return a + b; });
}
DEVICE void column_sum(float (&x)[2], int lane) {
    reduce_columns(x, lane, [](float a, float b) { return a + b; });
}

// Folding a tile into a state multiplies the state by alpha and the tile's value by beta, both powers of two.
struct Rescale {
    float alpha[ROW_GROUPS][2], beta[ROW_GROUPS][2];
};

// Sets `tops` to the largest scores of each row, over the warp's tokens.
template <int SCORES> DEVICE void row_max(const float (&s)[ROW_GROUPS][SCORES], int lane, float (&tops)[ROW_GROUPS][2]) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float top[4] = {s[g][0], s[g][1], s[g][2], s[g][3]};
#pragma unroll
        for (int n = 4; n < SCORES; n++) top[n % 4] = fmaxf(top[n % 4], s[g][n]);
        tops[g][0] = fmaxf(top[0], top[2]);
        tops[g][1] = fmaxf(top[1], top[3]);
        column_max(tops[g], lane);
    }
}

// What the scores of a tile count from, by row group and column.
struct Exponents {
    float base[ROW_GROUPS][2];  // integers: what is taken off a score's point of the grid; floats: off a score
    float tile[ROW_GROUPS][2];  // the tile's exponent; -inf where the row sees nothing of it
    float step[ROW_GROUPS][2];  // integers: what scores are multiplied by on the way to the grid
    float grid[ROW_GROUPS][2];  // integers: and what is added to them
};
// Scores beyond the grid's range, of rows whose bit in `far` (2g + e) is set, become differences from their largest, rounded up.
template <int SCORES> DEVICE void approach(float (&s)[ROW_GROUPS][SCORES], const float (&tops)[ROW_GROUPS][2], u32 far, Exponents& x) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (!(far >> (2 * g + e) & 1)) continue;
            const float of_centre = x.grid[g][e] - SCORE_BASE;
            float top = ceilf(tops[g][e] * x.step[g][e] + of_centre);
#pragma unroll
            for (int n = e; n < SCORES; n += 2) s[g][n] = fmaxf((s[g][n] * x.step[g][e] + of_centre) - top, -65536.0f);
            x.base[g][e] = SCORE_BASE + WEIGHT_SHIFT;
            x.tile[g][e] = top + WEIGHT_SHIFT;
            x.step[g][e] = 1.0f;
            x.grid[g][e] = SCORE_BASE;
        }
}
// The exponents of a tile by its largest scores; `are_whole`: these are multiplied by `steps` already, and count from SCORE_BASE. Integers: scores of far rows
// change.
template <int SCORES>
DEVICE Exponents find_exponents(const float (&tops)[ROW_GROUPS][2], const float (&steps)[ROW_GROUPS][2], const ScoreBases& bases, bool are_whole,
                                float (&s)[ROW_GROUPS][SCORES]) {
    Exponents x = {};
    u32 far = 0;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if constexpr (INTEGER) {
                x.step[g][e] = are_whole ? 1.0f : steps[g][e];
                x.grid[g][e] = are_whole ? SCORE_BASE : bases.of[g][e];
                float top = fmaf(tops[g][e], x.step[g][e], x.grid[g][e]), ceil = grid_ceil(top);
                bool some = tops[g][e] > MINUS_INFINITY;
                if (some && !is_near(top)) far |= 1u << (2 * g + e);
                x.base[g][e] = ceil + WEIGHT_SHIFT;
                x.tile[g][e] = some ? ceil - SCORE_BASE + WEIGHT_SHIFT : MINUS_INFINITY;
            } else {
                x.base[g][e] = x.tile[g][e] = ceilf(tops[g][e]);
            }
        }
    if (INTEGER && __any_sync(~0u, far != 0)) approach(s, tops, far, x);
    return x;
}

// The scores of a tile that have no weight, a bit each; in one place, since a predicate of each would take more registers than all else.
struct Hidden {
    u32 scores[ROW_GROUPS];
};

// Replaces scores by weights p. `full`: none is hidden.
template <int SCORES> DEVICE void weigh_scores(float (&s)[ROW_GROUPS][SCORES], bool full, const Hidden& hidden, const Exponents& x) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            const int e = n % 2;
            if constexpr (INTEGER) s[g][n] = exp2_of_point(fmaf(s[g][n], x.step[g][e], x.grid[g][e]) - x.base[g][e]);
            else s[g][n] = exp2f_full(fmaxf(s[g][n] - x.base[g][e], -125.0f));
        }
    if (SCORES == WEIGHTS && full) return;  // four scores cost less than a branch
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < SCORES; n++)
            if (hidden.scores[g] & 1u << n) s[g][n] = 0.0f;
}

// Folds a tile's exponents into the state's.
template <class Team> DEVICE Rescale enter_tile(StateOf<Team>& state, const Exponents& x) {
    Rescale r;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            Factors f = fold_factors(state.m[g][e], x.tile[g][e]);
            r.alpha[g][e] = f.alpha;
            r.beta[g][e] = f.beta;
        }
    return r;
}
// The sums of a row group's weights over the tile: integers as f16, exact in any order; floats in units of 2^-22.
DEVICE void sum_weights(const float (&p)[WEIGHTS], int lane, float (&l)[2]) {
    if constexpr (INTEGER) {
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < WEIGHTS; n += 2) {
            u32 pair = f16_pair(p[n], p[n + 1]);
            l[0] += half_float(pair & 0xffff);
            l[1] += half_float(pair >> 16);
        }
        column_sum(l, lane);
    } else {
        u32 units[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < WEIGHTS; n++) units[n % 2] += float_bits(p[n] + WEIGHT_BASE) - WEIGHT_BASE_BITS;
        column_sum(units, lane);
#pragma unroll
        for (int e = 0; e < 2; e++) l[e] = (float)(int)units[e] * exp2i(-22);
    }
}
// Adds a tile's weights to the running sums; weights(g, p) gives those of a row group.
template <class Team, class WeightsOf> DEVICE void add_weights(StateOf<Team>& state, WeightsOf weights, const Rescale& r, int lane) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float p[WEIGHTS], l[2];
        weights(g, p);
        sum_weights(p, lane, l);
#pragma unroll
        for (int e = 0; e < 2; e++) state.l[g][e] = fmaf(l[e], r.beta[g][e], state.l[g][e] * r.alpha[g][e]);
    }
}
// Rescales O to a tile's exponent where the state takes it over, before the tile is added.
template <class Team> DEVICE void rescale(StateOf<Team>& state, const Rescale& r) {
    bool moved = false;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) moved |= r.alpha[g][0] != 1.0f || r.alpha[g][1] != 1.0f;
    if (!Team::SHARES_TILES && !__any_sync(~0u, moved)) return;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int j = 0; j < Team::DIMS / 16; j++)
#pragma unroll
            for (int n = 0; n < 4; n++) state.o[g][j][n] = state.o[g][j][n] * r.alpha[g][n % 2];
}

// V's parameters of a group, of the lane's tokens: [2i + h] is token 16i + 8h + lane/4.
struct ValueParams {
    float scale[WEIGHTS / 2], shift[WEIGHTS / 2];

    DEVICE float on_grid(float scale) { return INTEGER ? grid_scale(scale) : scale; }
    // The four lanes that have the same tokens put two of the scales on the grid each.
    template <class Params> METHOD void read_grid_scales(const Params& params, int group, bool exist, int lane) {
        float own[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            own[e] = grid_scale(params.scale(group, 8 * (2 * (lane % 4) + e) + lane / 4)) * (Values::HAS_HALF_STEPS ? RESIDUAL_STEP : 1.0f);
            if (!exist) own[e] = finite_scale(own[e]);
        }
#pragma unroll
        for (int i = 0; i < WEIGHTS / 2; i++) scale[i] = __shfl_sync(~0u, own[i % 2], (lane & ~3) + i / 2);
    }
    // `exist`: whether all tokens do.
    template <class Params> DEVICE ValueParams read(const Params& params, int group, bool exist, int lane) {
        ValueParams v = {};
        if constexpr (INTEGER && Values::HAS_PARAMS && !Values::HAS_SHIFTS) {
            v.read_grid_scales(params, group, exist, lane);
            return v;
        }
#pragma unroll
        for (int i = 0; i < WEIGHTS / 2; i++) {
            int t = 8 * i + lane / 4;
            if constexpr (Values::HAS_SHIFTS) {
                float2 x = params.scale_shift(group, t);
                v.scale[i] = on_grid(x.x);
                v.shift[i] = x.y;
            } else if constexpr (Values::HAS_PARAMS) {
                v.scale[i] = params.scale(group, t) * (Values::HAS_HALF_STEPS ? RESIDUAL_STEP : 1.0f);
            } else {
                v.scale[i] = 1.0f;
            }
        }
        if (Values::HAS_PARAMS && !exist)
#pragma unroll
            for (int i = 0; i < WEIGHTS / 2; i++) {
                v.scale[i] = finite_scale(v.scale[i]);
                if (Values::HAS_SHIFTS) v.shift[i] = finite(v.shift[i]);
            }
        return v;
    }
};

// `z` of plain int4: a lane's tokens have one remainder by 8, and the lanes' sums meet in the order of section 5.
DEVICE void shift_sum(const float (&p)[WEIGHTS], const ValueParams& v, int lane, float (&z)[2]) {
    z[0] = z[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++) z[n % 2] = z[n % 2] + (INTEGER ? half_float(float_half(p[n])) : p[n]) * v.shift[n / 2];
    column_sum(z, lane);
}

// The largest of the products of weights and scales, which take the weights' place.
DEVICE void scale_weights(float (&x)[WEIGHTS], const ValueParams& v, int lane, float (&largest)[2]) {
    largest[0] = largest[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++) {
        if (Values::HAS_PARAMS) x[n] = x[n] * v.scale[n / 2];
        largest[n % 2] = fmaxf(largest[n % 2], x[n]);
    }
    column_max(largest, lane);
}

// A row group's weights in a group of V, as right operand: column lane/4, bytes 4·(lane%4) + {0..3} of a panel of 16 tokens in slot order.
struct Weights {
    u32 panel[4];
    float step[2];    // κ of the lane's columns
    int sum[2];       // W, where V's codes need it
    float shift[2];   // z
};

// `thresholds`: those of the lane's tokens.
DEVICE void weigh(const float (&p)[WEIGHTS], const ValueParams& v, const float (&thresholds)[WEIGHTS / 2], const bool (&is_fine)[2], int lane, Weights& w) {
    float x[WEIGHTS], largest[2];
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++) x[n] = p[n];
    scale_weights(x, v, lane, largest);
    WeightStep step[2] = {weight_step(largest[0], is_fine[0]), weight_step(largest[1], is_fine[1])};
#pragma unroll
    for (int e = 0; e < 2; e++) w.step[e] = step[e].step;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float b[4];
#pragma unroll
        for (int n = 0; n < 4; n++) b[n] = fmaf(x[4 * i + n], step[n % 2].inverse, thresholds[2 * i + n / 2]);
        // Halves {t, t + 8} of two columns become halves of tokens 2c, 2c + 1 of one column, and these take their slots.
        u32 columns = weight_bytes(b[0], b[2], b[1], b[3]);
        w.panel[i] = __byte_perm(transposed(columns), 0, 0x3120);
    }
    if constexpr (Values::HAS_NIBBLES) {
        constexpr u32 ONES = 0x01010101u;
        Sums c = {};
        c = mma_u8_k32(c, ONES, ONES, ONES, ONES, w.panel[0], w.panel[1]);
        c = mma_u8_k32(c, ONES, ONES, ONES, ONES, w.panel[2], w.panel[3]);
        w.sum[0] = c.x[0];
        w.sum[1] = c.x[1];
    }
    if constexpr (Values::HAS_SHIFTS) shift_sum(p, v, lane, w.shift);
}

DEVICE Sums dot_values(const u32 (&x)[4][2], const u32 (&w)[4], Sums c) {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
        c = Values::HAS_NIBBLES ? mma_u8_k32(c, x[i][0], x[i][1], x[i + 1][0], x[i + 1][1], w[i], w[i + 1])
                                : mma_s8u8_k32(c, x[i][0], x[i][1], x[i + 1][0], x[i + 1][1], w[i], w[i + 1]);
    return c;
}

// Sums of 16 dims, the warp's j-th, of all row groups. They count on from MAGIC_BITS, since they stay below 2^22.
template <class Team> DEVICE void value_sums(const StagedTile& at, int j, const Weights (&w)[ROW_GROUPS], const Team& team, Sums (&sums)[ROW_GROUPS]) {
    constexpr int START = MAGIC_BITS;
    u32 x[4][2];
    load_values(at.v, team.dim() / 16 + j, team.lane, x);
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        const int (&sum)[2] = w[g].sum;
        Sums start = {START, START, START, START}, &c = sums[g];
        if (Values::HAS_SHIFTS) start = {START - 8 * sum[0], START - 8 * sum[1], START - 128 * sum[0], START - 128 * sum[1]};
        if (Values::HAS_HALF_STEPS) start = {0, 0, START - 120 * sum[0], START - 120 * sum[1]};
        c = dot_values(x, w[g].panel, start);
        if (Values::HAS_HALF_STEPS)
#pragma unroll
            for (int n = 0; n < 2; n++) c.x[n] = c.x[n] * 2 + (START - 15 * sum[n]);
    }
}
// The same with residuals, for rows that read V fine.
template <class Team>
DEVICE void add_value_residuals(const StagedTile& at, int j, const Weights (&w)[ROW_GROUPS], const bool (&is_fine)[ROW_GROUPS][2], const Team& team,
                                Sums (&sums)[ROW_GROUPS]) {
    u32 x[4][2];
    load_values4(at.v_residuals, team.dim() / 16 + j, team.lane, x);
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        Sums r = dot_values(x, w[g].panel, {});
#pragma unroll
        for (int n = 0; n < 4; n++) sums[g].x[n] = with_residuals(sums[g].x[n], MAGIC_BITS, n >= 2, is_fine[g][n % 2], r.x[n], w[g].sum[n % 2]);
    }
}

// The factors of a group's sums, by [half of the lane's dims][column].
struct ValueUnits {
    float of[2][2];

    DEVICE ValueUnits find(const Weights& w, bool residuals, const float (&beta)[2]) {
        ValueUnits units;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (Values::HAS_SHIFTS) units.of[h][e] = h == 1 ? w.step[e] * 0.0625f : w.step[e];  // sums of high nibbles are 16 times as large
                else units.of[h][e] = w.step[e] * beta[e];
                if (Values::HAS_HALF_STEPS) units.of[h][e] = units.of[h][e] * half_steps_unit(residuals, h == 1);
            }
        return units;
    }
};
// Folds sums into O.
DEVICE void fold16(float (&o)[4], const Sums& c, const ValueUnits& units, const Weights& w, const float (&beta)[2]) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int e = n % 2;
        if constexpr (Values::HAS_SHIFTS) o[n] = fmaf(fmaf(counted(c.x[n]), units.of[n / 2][e], w.shift[e]), beta[e], o[n]);
        else o[n] = fmaf(counted(c.x[n]), units.of[n / 2][e], o[n]);
    }
}

// Folds a tile's values into the state. `full`: all rows see all of its tokens; `is_fine(g, e)` says which rows read V with its residuals.
template <class Params, class WeightsOf, class Team, class Fine>
DEVICE void fold_values(const StagedTile& at, const Params& params, bool full, WeightsOf weights, const Rescale& r, const Team& team, Fine is_fine,
                        StateOf<Team>& state) {
    rescale(state, r);
    add_weights(state, weights, r, team.lane);  // here, where its shuffles overlap with those of the maxima
    bool residuals = Values::WINDOW && at.residuals;
    float thresholds[WEIGHTS / 2];
#pragma unroll
    for (int i = 0; i < WEIGHTS / 2; i++) thresholds[i] = threshold(8 * i + team.lane / 4);
    auto fold = [&](bool exist) {
#pragma unroll
        for (int n = 0; n < Team::GROUPS; n++) {
            ValueParams v = ValueParams::read(params, team.group() + n, exist, team.lane);
            Weights w[ROW_GROUPS];
            ValueUnits units[ROW_GROUPS];
            bool fine[ROW_GROUPS][2];
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
                for (int e = 0; e < 2; e++) fine[g][e] = Values::WINDOW && is_fine(g, e);
                float p[WEIGHTS];
                weights(g, p);
                weigh(p, v, thresholds, fine[g], team.lane, w[g]);
                units[g] = ValueUnits::find(w[g], residuals, r.beta[g]);
            }
            constexpr int BLOCKS_OF_GROUP = Team::DIMS / 16 / Team::GROUPS;
            Sums sums[BLOCKS_OF_GROUP][ROW_GROUPS];
#pragma unroll
            for (int j = 0; j < BLOCKS_OF_GROUP; j++) value_sums(at, n * BLOCKS_OF_GROUP + j, w, team, sums[j]);
            if (residuals)  // one branch, as in `scores`
#pragma unroll
                for (int j = 0; j < BLOCKS_OF_GROUP; j++) add_value_residuals(at, n * BLOCKS_OF_GROUP + j, w, fine, team, sums[j]);
#pragma unroll
            for (int j = 0; j < BLOCKS_OF_GROUP; j++)
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) fold16(state.o[g][n * BLOCKS_OF_GROUP + j], sums[j][g], units[g], w[g], r.beta[g]);
        }
    };
    // One group's scales are always made finite: a branch would part the chains of sums and maxima. Of several groups that is too much.
    if (Team::GROUPS > 1 && full) fold(true);
    else fold(false);
}

}  // namespace attn
