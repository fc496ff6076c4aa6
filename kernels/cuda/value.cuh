// Sections 4 and 5: weights of a tile's tokens, the second product, and the fold into the segment's state.
#pragma once
#include "score.cuh"

struct State {
    float m[G], l[G];           // of row lane/4
    float o[G][D / 8][2];       // dims 8j + 2·(lane%4) + {0, 1}

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int g = 0; g < G; g++) {
            m[g] = MINUS_INFINITY;
            l[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < D / 8; j++) o[g][j][0] = o[g][j][1] = 0.0f;
        }
    }
};

// What a tile does to a state: both sides' powers of two.
struct Rescale {
    float alpha[G], beta[G];
};

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE int quad_sum(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// p14 of two tokens each, where V has shifts.
struct Pairs {
    u32 p14[G][V_INT4 ? 8 : 1];
};

// Scores to weights p in place; m and l of the state move on, O waits for its tile. A token that is not seen gets 2^-63 or less,
// which is 0 in every integer that is made of it.
template <class Seen> DEVICE void soften(float (&s)[G][16], const float (&scale)[G], bool full, Seen seen, State& state, Rescale& r,
                                         Pairs& pairs) {
#pragma unroll
    for (int g = 0; g < G; g++) {
        if (!full) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (!seen(g, i)) s[g][i] = MINUS_INFINITY;
        }
        float top[4];
#pragma unroll
        for (int i = 0; i < 4; i++) top[i] = fmaxf(fmaxf(s[g][i], s[g][i + 4]), fmaxf(s[g][i + 8], s[g][i + 12]));
        float m = ceilf(quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]))) * scale[g]);
        bool some = full || m > MINUS_INFINITY;
        float from = some ? m : 0.0f;
        u32 l = 0, bits[2];
        float down = -0.015625f * scale[g], offset = 0.015625f * from;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float p;
            if constexpr (INTEGER) p = exp2w(fma_saturate(s[g][i], down, offset));
            else p = exp2f_law(fmaxf(fmaf(s[g][i], scale[g], -from), -125.0f));
            s[g][i] = p;
            bits[i % 2] = float_bits(p + WEIGHT_BASE);
            l += bits[i % 2];
            if (V_INT4 && i % 2 == 1) pairs.p14[g][i / 2 % (V_INT4 ? 8 : 1)] = __byte_perm(bits[0], bits[1], 0x6521);
        }
        l = quad_sum((int)l) - TILE * WEIGHT_BASE_BITS;
        if (INTEGER) m = m - 1.0f;
        float top_m = some ? fmaxf(state.m[g], m) : state.m[g];
        r.alpha[g] = some ? pow2(top_m - state.m[g]) : 1.0f;
        r.beta[g] = some ? pow2(top_m - m) : -0.0f;  // adds a zero that changes not even a zero's sign
        state.l[g] = fmaf((float)(int)l, exp2i(-22) * r.beta[g], state.l[g] * r.alpha[g]);
        state.m[g] = top_m;
    }
}

// Converts a tile's V parameters once for the warp: scale·2^f, f chosen by the largest; shifts as 16-bit integers, pairs of
// tokens as {hi, hi, lo, lo}.
struct VScales {
    float down[V_GROUPS];        // 2^-f
    float shift_down[V_GROUPS];  // 2^(-14-h)
};

template <class Rows> DEVICE void prepare_v(u32 stage, u32 scratch, int tokens, int lane, Rows row_scales, VScales& v) {
    int t = 2 * lane;
    bool in0 = t < tokens, in1 = t + 1 < tokens;
    if constexpr (V_SCHEME == INT8_TENSOR) {
        sts64(scratch + t * 4, in0 ? 16384.0f : 0.0f, in1 ? 16384.0f : 0.0f);
        v.down[0] = exp2i(-14);
    } else {
        u32 block = stage + t / BLOCK * V_STRIDE + V_CODES;
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++) {
            float s0, s1, h0 = 0.0f, h1 = 0.0f;
            if constexpr (V_INT4) {
                uint2 x = lds64(block + (group * BLOCK + t % BLOCK) * 4);
                s0 = in0 ? half_float(x.x & 0xffff) : 0.0f;
                s1 = in1 ? half_float(x.y & 0xffff) : 0.0f;
                h0 = in0 ? fmaf(8.0f, s0, half_float(x.x >> 16)) : 0.0f;
                h1 = in1 ? fmaf(8.0f, s1, half_float(x.y >> 16)) : 0.0f;
            } else {
                u32 x = PAGE == 0 ? row_scales(stage + V_CODES, group) : lds32(block + (group * BLOCK + t % BLOCK) * 2);
                s0 = in0 ? half_float(x & 0xffff) : 0.0f;
                s1 = in1 ? half_float(x >> 16) : 0.0f;
            }
            float largest = bits_float(warp_max(float_bits(fmaxf(s0, s1))));
            int f = largest == 0.0f ? 0 : 14 - exponent(largest);
            v.down[group] = exp2i(-f);
            sts64(scratch + (group * TILE + t) * 4, s0 * exp2i(f), s1 * exp2i(f));
            if constexpr (V_INT4) {
                largest = bits_float(warp_max(float_bits(fmaxf(fabsf(h0), fabsf(h1)))));
                int h = largest == 0.0f ? 0 : 14 - exponent(largest);
                v.shift_down[group] = exp2i(-14 - h);
                u32 x0 = float_bits(fmaf(h0, exp2i(h), MAGIC)), x1 = float_bits(fmaf(h1, exp2i(h), MAGIC));
                sts32(scratch + V_GROUPS * TILE * 4 + (group * TILE / 2 + lane) * 4, __byte_perm(x0, x1, 0x4051));
            }
        }
    }
    __syncwarp();
}

// b[panel]: 16 tokens of V, transposed, of 8 dims: bytes 4·(lane%4) + {0..3} in slot order, dim lane/4.
DEVICE void load_v8(u32 stage, int j, int lane, u32 (&b)[4], int rows = D) {
    constexpr int IN_BLOCK = BLOCK / 16;
    int panel = lane / 8;
    ldmatrix_x4(b, stage + panel / IN_BLOCK * V_STRIDE + (panel % IN_BLOCK * rows + 8 * j + lane % 8) * 16);
}
// The same of 16 dims whose rows lie along the dims: b[0] has the even dims, b[1] the odd ones.
DEVICE void load_v_rows(u32 stage, int j, int lane, u32 (&b)[2][4]) {
    u32 x[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
        ldmatrix_x4_trans(x[half], piece_at<V_SWIZZLE>(stage, j / 2, 0, 32 * half + lane));
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
        u32 low = x[panel / 2][2 * panel % 4], high = x[panel / 2][2 * panel % 4 + 1];
        b[0][panel] = __byte_perm(low, high, 0x6420);
        b[1][panel] = __byte_perm(low, high, 0x7531);
    }
}

// The weights of one row group as left operand: two planes of 8 bits, hi above, lo below.
struct Weights {
    u32 plane[4][2];  // per 16 tokens
    Sums centre;      // int4: -128·Σhi (twice), -128·Σlo (twice), where the high nibbles' accumulators start
    int low;          // int4: -136·Σ w16
    float shift;      // int4: Σ p·shift
};

DEVICE void weigh(const float (&p)[16], const u32 (&p14)[V_INT4 ? 8 : 1], u32 scratch, int group, const VScales& v, int lane, Weights& w) {
    int c = lane % 4;
#pragma unroll
    for (int panel = 0; panel < 4; panel++) {
        u32 x[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint2 scale = lds64(scratch + (group * TILE + 16 * panel + 8 * h + 2 * c) * 4);
            const float* q = &p[4 * panel + 2 * h];
            x[2 * h] = float_bits(q[0] * bits_float(scale.x) + 8388608.0f);
            x[2 * h + 1] = float_bits(q[1] * bits_float(scale.y) + 8388608.0f);
        }
        u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
        w.plane[panel][0] = __byte_perm(a, b, 0x7632);
        w.plane[panel][1] = __byte_perm(a, b, 0x5410);
    }
    if constexpr (V_INT4) {
        Sums k = {};
        k = mma_u8s8_k32(k, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], 0x80808080u, 0x80808080u);
        k = mma_u8s8_k32(k, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], 0x80808080u, 0x80808080u);
        w.centre = k;
        w.low = (k.x[0] * 256 + k.x[2]) / 16 * 17;
        int hi = 0, lo = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 shifts = lds32(scratch + V_GROUPS * TILE * 4 + (group * TILE / 2 + 4 * i + c) * 4);
            hi = dot2_s8_low(p14[i], shifts, hi);
            lo = dot2_u8_high(p14[i], shifts, lo);
        }
        w.shift = fmaf((float)quad_sum(hi), 256.0f, (float)quad_sum(lo)) * v.shift_down[group];
    }
}

// O of dims 8j.. of one row group: the tile's integers, scaled, folded into the state.
DEVICE void fold8(State& state, int g, int j, const u32 (&b)[4], const Weights& w, float down, const Rescale& r) {
    Sums c = {};
    c = mma_u8s8_k32(c, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], b[0], b[1]);
    c = mma_u8s8_k32(c, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], b[2], b[3]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        state.o[g][j][i] = fmaf((float)(c.x[i] * 256 + c.x[i + 2]), down * r.beta[g], state.o[g][j][i]);
}
// The same of dims 8j.. and 8(j + 1).. in the low and high nibbles of the same bytes.
DEVICE void fold4(State& state, int g, int j, const u32 (&whole)[4], const u32 (&high)[4], const Weights& w, float down, const Rescale& r) {
    Sums c = {}, h = w.centre;
    c = mma_u8_k32(c, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], whole[0], whole[1]);
    c = mma_u8_k32(c, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], whole[2], whole[3]);
    h = mma_u8_k32(h, w.plane[0][0], w.plane[0][1], w.plane[1][0], w.plane[1][1], high[0], high[1]);
    h = mma_u8_k32(h, w.plane[2][0], w.plane[2][1], w.plane[3][0], w.plane[3][1], high[2], high[3]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int of_high = h.x[i] * 256 + h.x[i + 2], of_low = c.x[i] * 256 + c.x[i + 2] - of_high + w.low;
        state.o[g][j][i] = fmaf(fmaf((float)of_low, down, w.shift), r.beta[g], state.o[g][j][i]);
        state.o[g][j + 1][i] = fmaf(fmaf((float)of_high, down * 0.0625f, w.shift), r.beta[g], state.o[g][j + 1][i]);
    }
}

// The state moves to the new maximum before the tile is added.
DEVICE void rescale(State& state, const Rescale& r) {
    bool moved = false;
#pragma unroll
    for (int g = 0; g < G; g++) moved |= r.alpha[g] != 1.0f;
    if (!__any_sync(~0u, moved)) return;
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) state.o[g][j][i] = state.o[g][j][i] * r.alpha[g];
}

// The tile's values, whose parameters are converted, folded into the state.
DEVICE void fold_prepared(u32 stage, u32 scratch, const VScales& v, const float (&p)[G][16], const Pairs& pairs, const Rescale& r, int lane,
                          State& state) {
    rescale(state, r);
#pragma unroll
    for (int group = 0; group < V_GROUPS; group++) {
        Weights w[G];
#pragma unroll
        for (int g = 0; g < G; g++) weigh(p[g], pairs.p14[g], scratch, group, v, lane, w[g]);
        constexpr int TILES = D / 8 / V_GROUPS;
#pragma unroll
        for (int j = group * TILES; j < (group + 1) * TILES; j += 2) {
            u32 b[2][4];
            if constexpr (V_INT4) {
                load_v8(stage, j / 2, lane, b[0], D / 2);
#pragma unroll
                for (int i = 0; i < 4; i++) b[1][i] = high_nibbles(b[0][i]);
#pragma unroll
                for (int g = 0; g < G; g++) fold4(state, g, j, b[0], b[1], w[g], v.down[group], r);
                continue;
            }
            if constexpr (V_ROWS) {
                load_v_rows(stage, j, lane, b);
            } else {
                load_v8(stage, j, lane, b[0]);
                load_v8(stage, j + 1, lane, b[1]);
            }
#pragma unroll
            for (int g = 0; g < G; g++) {
                fold8(state, g, j, b[0], w[g], v.down[group], r);
                fold8(state, g, j + 1, b[1], w[g], v.down[group], r);
            }
        }
    }
}

template <class Rows> DEVICE void fold_values(u32 stage, u32 scratch, int tokens, const float (&p)[G][16], const Pairs& pairs, const Rescale& r,
                                              int lane, Rows row_scales, State& state) {
    VScales v;
    prepare_v(stage, scratch, tokens, lane, row_scales, v);
    fold_prepared(stage, scratch, v, p, pairs, r, lane, state);
}

// ---- Float V: weights as two planes of V's precision (f16 for fp8) ----

// Zeroes the tokens t, t + 1 of a pair that lie beyond the sequence: 0·NaN is not 0.
DEVICE u32 cached(u32 pair, int t, int tokens) { return t + 1 < tokens ? pair : t < tokens ? pair & 0xffff : 0; }

// Two n-tiles of 8 dims: b[tile][16-token panel][pair].
DEVICE void load_float_v(u32 stage, int j, int tokens, int lane, u32 (&b)[2][4][2]) {
    if constexpr (V_SCHEME == FP8) {
        u32 x[2][4];
        if constexpr (V_ROWS) {
            load_v_rows(stage, j, lane, x);
        } else {
            load_v8(stage, j, lane, x[0]);
            load_v8(stage, j + 1, lane, x[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int panel = 0; panel < 4; panel++) e4m3_pairs(x[i][panel], b[i][panel][0], b[i][panel][1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 x[4];
                int t = 32 * half + lane;
                if (PAGE == 0) ldmatrix_x4_trans(x, piece_at<V_SWIZZLE>(stage, j + i, 0, t));
                else ldmatrix_x4_trans(x, stage + t / BLOCK * V_STRIDE + ((j + i) * BLOCK + t % BLOCK) * 16);
#pragma unroll
                for (int k = 0; k < 4; k++) b[i][2 * half + k / 2][k % 2] = x[k];
            }
    }
    if (tokens < TILE) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int panel = 0; panel < 4; panel++)
#pragma unroll
                for (int k = 0; k < 2; k++) b[i][panel][k] = cached(b[i][panel][k], 16 * panel + 8 * k + 2 * (lane % 4), tokens);
    }
}

DEVICE void fold_float_values(u32 stage, int tokens, const float (&p)[G][16], const Rescale& r, int lane, State& state) {
    rescale(state, r);
    u32 w[G][4][4];
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                split_pair<V_SCHEME == BF16>(p[g][4 * panel + 2 * k], p[g][4 * panel + 2 * k + 1], w[g][panel][2 * k], w[g][panel][2 * k + 1]);
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        u32 b[2][4][2];
        load_float_v(stage, j, tokens, lane, b);
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                FloatSums c = {};
#pragma unroll
                for (int panel = 0; panel < 4; panel++) {
                    const u32* a = w[g][panel];
                    if constexpr (V_SCHEME == BF16) c = mma_bf16(c, a[0], a[1], a[2], a[3], b[i][panel][0], b[i][panel][1]);
                    else c = mma_f16(c, a[0], a[1], a[2], a[3], b[i][panel][0], b[i][panel][1]);
                }
#pragma unroll
                for (int k = 0; k < 2; k++) state.o[g][j + i][k] = fmaf(c.x[k] + c.x[k + 2], r.beta[g], state.o[g][j + i][k]);
            }
    }
}
