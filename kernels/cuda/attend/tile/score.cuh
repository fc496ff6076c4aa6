// Section 4 of docs/arithmetic.md: the scores of each query row against the 64 tokens of a tile (K·Q on tensor cores), without the row's step.
//
// A lane has the scores of tokens 16i + lane/4 and that + 8, of the rows of its two columns: s[g][4i + 2h + e] is token 16i + 8h + lane/4 of
// column e, the order of the accumulators.
#pragma once
#include "attend/tile/codes.cuh"
#include "attend/tile/query.cuh"
#include "attend/tile/team.cuh"

namespace attn {

// Whether the largest sum of a group stays below 2^22: it then counts on from MAGIC_BITS, and is converted by one subtraction, or by none
// where it is multiplied by a number that leaves MAGIC exact.
constexpr int K_LARGEST = Keys::GROUP_DIMS * 127 * (Keys::HAS_HALF_STEPS ? 255 : 128);
constexpr bool K_COUNTS_ON = K_LARGEST <= 1 << 22;
constexpr int K_START = K_COUNTS_ON ? (int)MAGIC_BITS : 0;

// Sums of K's codes times the query's over the panels [first, last).
template <bool SHARES_TILES>
DEVICE Sums dot_keys(const u32 (&x)[Keys::PANELS][2], const u32 (&q)[Keys::PANELS][INTEGER ? 1 : 4], int first, int last, const Sums& start) {
    Sums sums[2] = {start, {}};  // two, because MMAs into the same accumulator are a dependent chain
#pragma unroll
    for (int p = first; p < last; p += 2) {
        Sums& c = sums[SHARES_TILES ? (p - first) / 2 % 2 : 0];
        const u32(&y)[2] = x[(p + 1) % Keys::PANELS];
        u32 next = q[(p + 1) % Keys::PANELS][0];
        if (p + 1 < last)
            c = Keys::HAS_NIBBLES ? mma_u8s8_k32(c, x[p][0], x[p][1], y[0], y[1], q[p][0], next) : mma_s8_k32(c, x[p][0], x[p][1], y[0], y[1], q[p][0], next);
        else c = Keys::HAS_NIBBLES ? mma_u8s8_k16(c, x[p][0], x[p][1], q[p][0]) : mma_s8_k16(c, x[p][0], x[p][1], q[p][0]);
    }
    if (SHARES_TILES)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[0].x[i] += sums[1].x[i];
    return sums[0];
}

// A side's parameters of the two tokens of a lane in a block of 16.
struct TokenParams {
    float scale[2], shift[2];
};
template <class Params> DEVICE TokenParams read_keys(const Params& params, int group, int t) {
    TokenParams k = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if constexpr (Keys::HAS_SHIFTS) {
            float2 x = params.scale_shift(group, t + 8 * h);
            k.scale[h] = x.x;
            k.shift[h] = x.y;
        } else if constexpr (Keys::SCHEME != INT8_TENSOR) {
            k.scale[h] = params.scale(group, t + 8 * h);
        }
    }
    return k;
}

// A group's term of a score from its sum. `unit`: of sums of half steps.
DEVICE float key_term(int sum, int h, float unit, float q_sum, const TokenParams& k) {
    if constexpr (Keys::SCHEME == INT8_TENSOR) {
        return K_COUNTS_ON ? counted(sum) : (float)sum;
    } else {
        float scale = Keys::HAS_SHIFTS && h == 1 ? k.scale[1] * 0.0625f : k.scale[h];  // sums of high nibbles are 16 times as large
        if (Keys::HAS_HALF_STEPS) scale = k.scale[h] * unit;
        float term = K_COUNTS_ON ? fmaf(bits_float(sum), scale, -MAGIC * scale) : (float)sum * scale;
        return Keys::HAS_SHIFTS ? term + q_sum * k.shift[h] : term;
    }
}

// Sums of a block of 16 tokens, by groups and row groups.
struct KeySums {
    Sums of[Keys::GROUPS][ROW_GROUPS];

    template <class Take> METHOD void each(Take take) {
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) take(group, g, of[group][g]);
    }
};

// Sums of integers from token t on, which is the warp's or a multiple of 16 further.
template <class Team> DEVICE void key_sums(const StagedTile& at, int t, const Query& q, const Team& team, KeySums& sums) {
    u32 x[Keys::PANELS][2];
    if constexpr (Keys::HAS_NIBBLES) load_keys4(at.k, t, team.lane, x);
    else load_keys8(at.k, t, team.lane, x);
    sums.each([&](int group, int g, Sums& c) {
        const int (&sum)[2] = q.sum[g][group];
        Sums start = {K_START, K_START, K_START, K_START};
        if (Keys::HAS_SHIFTS) start = {K_START - 8 * sum[0], K_START - 8 * sum[1], K_START - 128 * sum[0], K_START - 128 * sum[1]};
        if (Keys::HAS_HALF_STEPS) start = {0, 0, K_START - 120 * sum[0], K_START - 120 * sum[1]};
        c = dot_keys<Team::SHARES_TILES>(x, q.word[g], first_panel(group), first_panel(group + 1), start);
        if (Keys::HAS_HALF_STEPS)
#pragma unroll
            for (int n = 0; n < 2; n++) c.x[n] = c.x[n] * 2 + (K_START - 15 * sum[n]);
    });
}
// The same with residuals, for rows that read K fine.
template <class Team, class Fine> DEVICE void add_key_residuals(const StagedTile& at, int t, const Query& q, const Team& team, Fine is_fine, KeySums& sums) {
    u32 x[Keys::PANELS][2];
    load_keys4(at.k_residuals, t, team.lane, x);
    sums.each([&](int group, int g, Sums& c) {
        Sums r = dot_keys<Team::SHARES_TILES>(x, q.word[g], first_panel(group), first_panel(group + 1), {});
#pragma unroll
        for (int n = 0; n < 4; n++) c.x[n] = with_residuals(c.x[n], K_START, n >= 2, is_fine(g, n % 2), r.x[n], q.sum[g][group][n % 2]);
    });
}

// Scores of integers; `is_fine(g, e)` says which rows read K with its residuals. Tokens that do not exist have any score.
template <class Params, class Team, class Fine>
DEVICE void scores(const StagedTile& at, const Params& params, const Query& q, const Team& team, Fine is_fine, float (&s)[ROW_GROUPS][Team::SCORES]) {
    KeySums sums[Team::TOKENS / 16];
#pragma unroll
    for (int i = 0; i < Team::TOKENS / 16; i++) key_sums(at, team.token() + 16 * i, q, team, sums[i]);
    // One branch behind all products: parted by branches, they would wait for each other.
    if (Keys::WINDOW && at.residuals)
#pragma unroll
        for (int i = 0; i < Team::TOKENS / 16; i++) add_key_residuals(at, team.token() + 16 * i, q, team, is_fine, sums[i]);
    float unit[2] = {};
    if (Keys::HAS_HALF_STEPS)
#pragma unroll
        for (int h = 0; h < 2; h++) unit[h] = RESIDUAL_STEP * half_steps_unit(Keys::WINDOW && at.residuals, h == 1);
#pragma unroll
    for (int i = 0; i < Team::TOKENS / 16; i++)
#pragma unroll
        for (int group = 0; group < Keys::GROUPS; group++) {
            TokenParams k = read_keys(params, group, team.token() + 16 * i + team.lane / 4);
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float term = key_term(sums[i].of[group][g].x[n], n / 2, unit[n / 2], (float)q.sum[g][group][n % 2], k);
                    if (QUERY_PARTS > 1 && group > 0) term = term * q.ratio[g][n % 2];
                    float& to = s[g][4 * i + n];
                    to = group == 0 ? term : to + term;
                }
        }
}

}  // namespace attn
