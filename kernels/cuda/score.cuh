// Section 3 of docs/arithmetic.md: the scores of each query row against the 64 tokens of a tile (Q·K on tensor cores).
#pragma once
#include "query.cuh"
#include "team.cuh"

// Loads eight tokens of K as right operands: b[panel] has bytes 4·(lane%4) + {0..3} of token lane/4 in a panel of 16 bytes.
template <int N> DEVICE void load_k8(u32 stage, int rows, int row0, int lane, u32 (&b)[N], int first, int last) {
    auto at = [&](int panel, int matrix) {
        if constexpr (PAGE == 0) return chunk_at<K_SWIZZLE>(stage, panel, matrix, row0 + lane % 8);
        return stage + ((panel + matrix - first) * rows + row0 + lane % 8) * 16;
    };
#pragma unroll
    for (int panel = first; panel < last; panel += 4) {
        int matrix = lane / 8;
        if (last - panel >= 4) {
            u32 x[4];
            ldmatrix_x4(x, at(panel, matrix));
#pragma unroll
            for (int i = 0; i < 4; i++) b[panel + i] = x[i];
        } else if (last - panel >= 2) {
            u32 x[2];
            ldmatrix_x2(x, at(panel, matrix % 2));
            b[panel] = x[0];
            b[panel + 1] = x[1];
            if (last - panel == 3) {
                u32 y[1];
                ldmatrix_x1(y, at(panel + 2, 0));
                b[panel + 2] = y[0];
            }
        } else {
            u32 y[1];
            ldmatrix_x1(y, at(panel, 0));
            b[panel] = y[0];
        }
    }
}

// 4-bit codes are multiplied without unpacking: one accumulator sums the whole bytes, a second one the bytes masked here, which are 16
// times the high nibbles. The difference is the low nibbles' sum, and the scale absorbs the factor 16. This takes half the instructions
// of unpacking.
DEVICE u32 high_nibbles(u32 x) { return x & 0xf0f0f0f0; }

// Dot products of both query planes with b over the panels [first, last); SIGNED says whether b's bytes are signed.
template <bool SIGNED> DEVICE Sums dot_panels(const u32 (&plane)[PANELS][K_FLOAT ? 4 : 2], const u32 (&b)[PANELS], int first, int last,
                                              bool pairs, Sums before = {}) {
    Sums sums[2] = {before, {}};  // two, because MMAs into the same accumulator are a dependent chain
#pragma unroll
    for (int p = first; p < last; p += 2) {
        Sums& c = sums[SHARES_TILES ? p / 2 % 2 : 0];
        const u32(&x)[K_FLOAT ? 4 : 2] = plane[p], (&y)[K_FLOAT ? 4 : 2] = plane[(p + 1) % PANELS];
        if (pairs && p + 1 < last) {
            c = SIGNED ? mma_s8_k32(c, x[0], x[1], y[0], y[1], b[p], b[p + 1]) : mma_s8u8_k32(c, x[0], x[1], y[0], y[1], b[p], b[p + 1]);
        } else {
            c = SIGNED ? mma_s8_k16(c, x[0], x[1], b[p]) : mma_s8u8_k16(c, x[0], x[1], b[p]);
            if (p + 1 < last) c = SIGNED ? mma_s8_k16(c, y[0], y[1], b[p + 1]) : mma_s8u8_k16(c, y[0], y[1], b[p + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0].x[i] += sums[1].x[i];
    return sums[0];
}

// S of the i-th of this lane's two tokens, from the sums of both planes.
DEVICE int plane_sum(const Sums& c, int i) { return c.x[i] * 256 + c.x[i + 2]; }

// Reads K's parameters of the tokens t, t + 1 (t even) from a stage: `scales` gives their scales, `pairs` gives for int4 {factor of S,
// factor of `Query::centre`} of each. The latter is -(shift + 8·scale) / 8, because centre = -8·Σ q15.
// Tokens beyond the sequence get zeros, whatever bytes lie there. rows(at, group, t) reads the scales of a strided cache.
template <class Rows> struct StoredK {
    u32 stage;
    int tokens;
    Rows rows;

    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ u32 at(int group, int t, int bytes) const {
        return stage + block_of(t) * K_STRIDE + K_CODES + (group * BLOCK + in_block(t)) * bytes;
    }
    __device__ __forceinline__ uint2 scales(int group, int t) const {
        u32 x = PAGE == 0 ? rows(stage + K_CODES, group, t) : lds32(at(group, t, 2));
        return {t < tokens ? float_bits(half_float(x & 0xffff)) : 0, t + 1 < tokens ? float_bits(half_float(x >> 16)) : 0};
    }
    __device__ __forceinline__ float4 pairs(int group, int t) const {
        uint2 x = lds64(at(group, t, 4));
        bool in0 = t < tokens, in1 = t + 1 < tokens;
        float s0 = half_float(x.x & 0xffff), s1 = half_float(x.y & 0xffff), down = t & 8 ? 0.0625f : 1.0f;
        return {in0 ? s0 * down : 0.0f, in0 ? fmaf(-0.125f, half_float(x.x >> 16), -s0) : 0.0f,
                in1 ? s1 * down : 0.0f, in1 ? fmaf(-0.125f, half_float(x.y >> 16), -s1) : 0.0f};
    }
};
// The `Rows` of caches in pages, which have no strided scales.
struct NoRows {
    __device__ __forceinline__ u32 operator()(u32, int, int) const { return 0; }
};
// K's parameters that `prepare_k` has converted into `scratch` for the whole warp; the same interface as StoredK.
struct PreparedK {
    u32 scratch;

    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ uint2 scales(int group, int t) const { return lds64(scratch + (group * TILE + t) * 4); }
    __device__ __forceinline__ float4 pairs(int group, int t) const { return lds128(scratch + (group * TILE + t) * 8); }
};

// Converts a tile's K parameters for `PreparedK`; one warp, two tokens per lane.
template <class Rows> DEVICE void prepare_k(const StoredK<Rows>& stored, u32 scratch, int lane) {
    if constexpr (K_SCHEME == INT8_TOKEN || K_SCHEME == INT8_GROUP || K_SCHEME == INT4_GROUPS) {
        int t = 2 * lane;
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            if constexpr (K_SCHEME == INT4_GROUPS) {
                sts128(scratch + (group * TILE + t) * 8, stored.pairs(group, t));
            } else {
                uint2 x = stored.scales(group, t);
                sts64(scratch + (group * TILE + t) * 4, bits_float(x.x), bits_float(x.y));
            }
        }
        __syncwarp();
    }
}

// PreparedK of a warp that converts the parameters itself, while its first products are in flight.
template <class Rows> struct PreparesK : PreparedK {
    StoredK<Rows> stored;
    int lane;

    __device__ __forceinline__ void prepare() const { prepare_k(stored, scratch, lane); }
};

// Scores of float K, not yet multiplied by 2^-e; s is ordered as in `scores8`.
DEVICE void float_scores(u32 stage, const Query& q, const Team& team, float (&s)[ROW_GROUPS][SCORES]) {
    constexpr int MATRICES = HEAD_DIM * code_bits(K_SCHEME) / 128;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        u32 raw[MATRICES], b[PANELS][2];
        int t = team.token() + 8 * j;
        load_k8(stage + block_of(t) * K_STRIDE, BLOCK, in_block(t), team.lane, raw, 0, MATRICES);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            if constexpr (K_SCHEME == FP8) {
                e4m3_pairs(raw[panel], b[panel][0], b[panel][1]);
            } else {
                b[panel][0] = raw[2 * panel % MATRICES];
                b[panel][1] = raw[(2 * panel + 1) % MATRICES];
            }
        }
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            FloatSums sums[2] = {};  // two, because MMAs into the same accumulator are a dependent chain
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                FloatSums& c = sums[panel % 2];
                const u32* a = q.plane[g][panel];
                if constexpr (K_SCHEME == BF16) c = mma_bf16(c, a[0], a[1], a[2 % (K_FLOAT ? 4 : 2)], a[3 % (K_FLOAT ? 4 : 2)], b[panel][0], b[panel][1]);
                else c = mma_f16(c, a[0], a[1], a[2 % (K_FLOAT ? 4 : 2)], a[3 % (K_FLOAT ? 4 : 2)], b[panel][0], b[panel][1]);
            }
            s[g][2 * j] = (sums[0].x[0] + sums[1].x[0]) + (sums[0].x[2] + sums[1].x[2]);
            s[g][2 * j + 1] = (sums[0].x[1] + sums[1].x[1]) + (sums[0].x[3] + sums[1].x[3]);
        }
    }
}

// Scores of 8-bit K, not yet multiplied by 2^-e, in the order of the accumulators: s[g][2j + i] is the warp's token 8j + 2·(lane%4) + i.
template <class Params> DEVICE void scores8(u32 stage, const Params& params, const Query& q, const Team& team, float (&s)[ROW_GROUPS][SCORES]) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        u32 b[PANELS];
        int t = team.token() + 8 * j;
        load_k8(stage + block_of(t) * K_STRIDE, BLOCK, in_block(t), team.lane, b, 0, PANELS);
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int group = 0; group < K_GROUPS; group++) {
                Sums c = dot_panels<true>(q.plane[g], b, group * LENGTH, (group + 1) * LENGTH, PAIRS);
                if (j + g + group == 0) params.prepare();
                float s0 = (float)plane_sum(c, 0), s1 = (float)plane_sum(c, 1);
                if constexpr (K_SCHEME != INT8_TENSOR) {
                    uint2 k = params.scales(group, t + 2 * (team.lane % 4));
                    s0 = s0 * bits_float(k.x);
                    s1 = s1 * bits_float(k.y);
                }
                s[g][2 * j] = group == 0 ? s0 : s[g][2 * j] + s0;
                s[g][2 * j + 1] = group == 0 ? s1 : s[g][2 * j + 1] + s1;
            }
    }
}

// The same for int4, sixteen tokens at a time. Shifts per token are added here, those of a sealed Int4 Channel page in channel.cuh.
template <class Params> DEVICE void scores4(u32 stage, const Params& params, const Query& q, const Team& team, float (&s)[ROW_GROUPS][SCORES]) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
        u32 whole[PANELS], high[PANELS];
        int t = team.token() + 8 * j;
        load_k8(stage + block_of(t) * K_STRIDE, BLOCK / 2, in_block(t) / 2, team.lane, whole, 0, PANELS);
#pragma unroll
        for (int i = 0; i < PANELS; i++) high[i] = high_nibbles(whole[i]);
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int group = 0; group < K_GROUPS; group++) {
                Sums w = dot_panels<false>(q.plane[g], whole, group * LENGTH, (group + 1) * LENGTH, PAIRS);
                Sums h = dot_panels<false>(q.plane[g], high, group * LENGTH, (group + 1) * LENGTH, PAIRS);
                if (j + g + group == 0) params.prepare();
                int h0 = plane_sum(h, 0), h1 = plane_sum(h, 1), centre = q.centre[g][group];
                float x[4] = {(float)(plane_sum(w, 0) - h0 + centre), (float)(plane_sum(w, 1) - h1 + centre),
                              (float)(h0 + 16 * centre), (float)(h1 + 16 * centre)};
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    float& s0 = s[g][2 * j + i];
                    float& s1 = s[g][2 * j + i + 1];
                    if constexpr (K_PER_CHANNEL) {
                        s0 = x[i];
                        s1 = x[i + 1];
                    } else {
                        float4 k = params.pairs(group, t + 4 * i + 2 * (team.lane % 4));
                        float a0 = x[i] * k.x, a1 = x[i + 1] * k.z, b0 = (float)centre * k.y, b1 = (float)centre * k.w;
                        s0 = (group == 0 ? a0 : s0 + a0) + b0;
                        s1 = (group == 0 ? a1 : s1 + a1) + b1;
                    }
                }
            }
    }
}

// Scores of integer K.
template <class Params> DEVICE void scores(u32 stage, const Params& params, const Query& q, const Team& team, float (&s)[ROW_GROUPS][SCORES]) {
    if constexpr (K_INT4) scores4(stage, params, q, team, s);
    else scores8(stage, params, q, team, s);
}
