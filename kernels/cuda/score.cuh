// Section 4 of docs/arithmetic.md: the scores of each query row against the 64 tokens of a tile (K·Q on tensor cores).
//
// A lane has the scores of tokens 16i + lane/4 and that + 8, of the rows of its two columns: s[g][4i + 2h + e] is token 16i + 8h + lane/4 of
// column e, the order of the accumulators.
#pragma once
#include "codes.cuh"

// Whether the largest sum of a group stays below 2^22: it then counts on from MAGIC_BITS, and is converted by one subtraction, or by none
// where it is multiplied by a number that leaves MAGIC exact.
constexpr int K_LARGEST = HEAD_DIM / K_GROUPS * 127 * (K_HALF_STEPS ? 255 : 128);
constexpr bool K_COUNTS_ON = K_LARGEST <= 1 << 22;
constexpr int K_START = K_COUNTS_ON ? (int)MAGIC_BITS : 0;

// Sums of K's codes times the query's over the panels [first, last).
DEVICE Sums dot_keys(const u32 (&x)[PANELS][2], const u32 (&q)[PANELS][INTEGER ? 1 : 4], int first, int last, const Sums& start) {
    Sums sums[2] = {start, {}};  // two, because MMAs into the same accumulator are a dependent chain
#pragma unroll
    for (int p = first; p < last; p += 2) {
        Sums& c = sums[SHARES_TILES ? (p - first) / 2 % 2 : 0];
        const u32(&y)[2] = x[(p + 1) % PANELS];
        u32 next = q[(p + 1) % PANELS][0];
        if (p + 1 < last) c = K_INT4 ? mma_u8s8_k32(c, x[p][0], x[p][1], y[0], y[1], q[p][0], next) : mma_s8_k32(c, x[p][0], x[p][1], y[0], y[1], q[p][0], next);
        else c = K_INT4 ? mma_u8s8_k16(c, x[p][0], x[p][1], q[p][0]) : mma_s8_k16(c, x[p][0], x[p][1], q[p][0]);
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
        if constexpr (K_SHIFTS) {
            float2 x = params.scale_shift(group, t + 8 * h);
            k.scale[h] = x.x;
            k.shift[h] = x.y;
        } else if constexpr (K_SCHEME != INT8_TENSOR) {
            k.scale[h] = params.scale(group, t + 8 * h);
        }
    }
    return k;
}

// What the scale of a lane's first or second token is multiplied by, since sums of high nibbles are 16 times as large.
template <bool WITH_RESIDUALS> DEVICE float sum_scale(const TokenParams& k, int h) {
    if (K_HALF_STEPS) return k.scale[h] * (RESIDUAL_STEP * (WITH_RESIDUALS ? 1.0f : half_steps_factor(h == 1)));
    return K_SHIFTS && h == 1 ? k.scale[1] * 0.0625f : k.scale[h];
}
// A group's term of a score from its sum.
template <bool WITH_RESIDUALS> DEVICE float key_term(int sum, int h, float q_sum, const TokenParams& k) {
    if constexpr (K_SCHEME == INT8_TENSOR) {
        return counted(sum);
    } else {
        float scale = sum_scale<WITH_RESIDUALS>(k, h);
        float term = K_COUNTS_ON ? fmaf(bits_float(sum), scale, -MAGIC * scale) : (float)sum * scale;
        return K_SHIFTS ? term + q_sum * k.shift[h] : term;
    }
}

// Sums of a block of 16 tokens, by groups and row groups.
struct KeySums {
    Sums of[K_GROUPS][ROW_GROUPS];

    template <class Take> __device__ __forceinline__ void each(Take take) {
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) take(group, g, of[group][g]);
    }
};

// Sums of integers from token t on, which is the warp's or a multiple of 16 further; of rows that read K fine with its residuals.
template <bool WITH_RESIDUALS, class Fine> DEVICE void key_sums(const Stages& at, int t, const Query& q, const Team& team, Fine is_fine, KeySums& sums) {
    u32 x[PANELS][2];
    if constexpr (K_INT4) load_keys4(at.k, t, team.lane, x);
    else load_keys8(at.k, t, team.lane, x);
    sums.each([&](int group, int g, Sums& c) {
        const int(&sum)[2] = q.sum[g][group];
        Sums start = {K_START, K_START, K_START, K_START};
        if (K_SHIFTS) start = {K_START - 8 * sum[0], K_START - 8 * sum[1], K_START - 128 * sum[0], K_START - 128 * sum[1]};
        if (K_HALF_STEPS) start = {0, 0, K_START - 120 * sum[0], K_START - 120 * sum[1]};
        if (WITH_RESIDUALS) start = {};
        c = dot_keys(x, q.word[g], group * LENGTH, (group + 1) * LENGTH, start);
        if (K_HALF_STEPS)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (WITH_RESIDUALS) c.x[n] = c.x[n] * (n < 2 ? 32 : 2) + (K_START - 240 * sum[n % 2]);
                else if (n < 2) c.x[n] = c.x[n] * 2 + (K_START - 15 * sum[n]);
            }
    });
    if constexpr (WITH_RESIDUALS) {
        load_keys4(at.k_residuals, t, team.lane, x);
        sums.each([&](int group, int g, Sums& c) {
            Sums r = dot_keys(x, q.word[g], group * LENGTH, (group + 1) * LENGTH, {});
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (is_fine(g, n % 2)) c.x[n] += (n < 2 ? 2 * r.x[n] : r.x[n] >> 3) - 15 * q.sum[g][group][n % 2];
        });
    }
}

// Scores of integers; `is_fine(g, e)` says which rows read K with its residuals. Tokens that do not exist have any score.
template <bool WITH_RESIDUALS, class Params, class Fine> DEVICE void scores(const Stages& at, const Params& params, const Query& q, const Team& team, Fine is_fine, float (&s)[ROW_GROUPS][SCORES]) {
#pragma unroll
    for (int i = 0; i < TOKENS / 16; i++) {
        int t = team.token() + 16 * i;
        KeySums sums;
        key_sums<WITH_RESIDUALS>(at, t, q, team, is_fine, sums);
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            TokenParams k = read_keys(params, group, t + team.lane / 4);
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float term = key_term<WITH_RESIDUALS>(sums.of[group][g].x[n], n / 2, (float)q.sum[g][group][n % 2], k);
                    float& to = s[g][4 * i + n];
                    to = group == 0 ? term : to + term;
                    if (group == K_GROUPS - 1) to = to * q.scale[g][n % 2];
                }
        }
    }
}
