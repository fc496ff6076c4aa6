// The first product: 64 scores of each row against a tile's K.
#pragma once
#include "query.cuh"

// Eight tokens of K as right operand: b[panel] holds the 4 bytes lane%4 of token lane/4 in a panel of 16 bytes.
template <int N> DEVICE void load_k8(u32 stage, int rows, int row0, int lane, u32 (&b)[N], int first, int last) {
#pragma unroll
    for (int panel = first; panel < last; panel += 4) {
        int matrix = lane / 8;
        u32 at = stage + ((panel - first + matrix) * rows + row0 + lane % 8) * 16;
        if (last - panel >= 4) {
            u32 x[4];
            ldmatrix_x4(x, at);
#pragma unroll
            for (int i = 0; i < 4; i++) b[panel + i] = x[i];
        } else if (last - panel >= 2) {
            u32 x[2];
            ldmatrix_x2(x, stage + ((panel - first + matrix % 2) * rows + row0 + lane % 8) * 16);
            b[panel] = x[0];
            b[panel + 1] = x[1];
            if (last - panel == 3) {
                u32 y[1];
                ldmatrix_x1(y, stage + ((panel - first + 2) * rows + row0 + lane % 8) * 16);
                b[panel + 2] = y[0];
            }
        } else {
            u32 y[1];
            ldmatrix_x1(y, stage + ((panel - first) * rows + row0 + lane % 8) * 16);
            b[panel] = y[0];
        }
    }
}

DEVICE void unpack4(u32 x, u32& low, u32& high) {
    low = x & 0x0f0f0f0f;
    high = x >> 4 & 0x0f0f0f0f;
}

DEVICE void load_k4(u32 stage, int rows, int row0, int lane, u32 (&b)[PANELS]) {
    constexpr int WHOLE = D / 32;
#pragma unroll
    for (int i = 0; i < WHOLE; i += 4) {
        int matrix = lane / 8;
        if (WHOLE - i >= 4) {
            u32 x[4];
            ldmatrix_x4(x, stage + ((i + matrix) * rows + row0 + lane % 8) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) unpack4(x[j], b[2 * (i + j)], b[2 * (i + j) + 1]);
        } else {
            u32 x[2];
            ldmatrix_x2(x, stage + ((i + matrix % 2) * rows + row0 + lane % 8) * 16);
            unpack4(x[0], b[2 * i], b[2 * i + 1]);
            unpack4(x[1], b[2 * i + 2], b[2 * i + 3]);
            if (WHOLE - i == 3) {
                u32 y[1];
                ldmatrix_x1(y, stage + ((i + 2) * rows + row0 + lane % 8) * 16);
                unpack4(y[0], b[2 * i + 4], b[2 * i + 5]);
            }
        }
    }
    if constexpr (D == 80) {
        u32 x = lds16(stage + WHOLE * rows * 16 + (row0 + lane / 4) * 8 + lane % 4 * 2);
        b[4] = (x & 0x0f0f) | (x >> 4 & 0x0f0f) << 16;
    }
}

// c + planes of panels [first, last) · b.
DEVICE Sums dot_panels(Sums c, const u32 (&plane)[PANELS][K_FLOAT ? 4 : 2], const u32 (&b)[PANELS], int first, int last, bool pairs) {
#pragma unroll
    for (int p = first; p < last; p += 2) {
        if (pairs && p + 1 < last) {
            c = mma_s8_k32(c, plane[p][0], plane[p][1], plane[p + 1][0], plane[p + 1][1], b[p], b[p + 1]);
        } else {
            c = mma_s8_k16(c, plane[p][0], plane[p][1], b[p]);
            if (p + 1 < last) c = mma_s8_k16(c, plane[p + 1][0], plane[p + 1][1], b[p + 1]);
        }
    }
    return c;
}

// S of this lane's two tokens from the two planes' sums.
DEVICE float plane_sum(const Sums& c, int i) { return (float)(c.x[i] * 128 + c.x[i + 2]); }

// Converts a tile's K parameters once for the warp: [group][token] scale, or {scale, centred shift}; tokens beyond the
// sequence get zeros, whatever bytes lie there. row_scales(group) reads two tokens' scales of a strided cache.
template <class Rows> DEVICE void prepare_k(u32 stage, u32 scratch, int tokens, int lane, Rows row_scales) {
    if constexpr (K_SCHEME == INT8_TOKEN || K_SCHEME == INT8_GROUP || K_SCHEME == INT4_GROUPS) {
        int t = 2 * lane;
        u32 block = stage + t / BLOCK * K_PART + K_CODES;
        bool in0 = t < tokens, in1 = t + 1 < tokens;
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            if constexpr (K_SCHEME == INT4_GROUPS) {
                uint2 x = lds64(block + (group * BLOCK + t % BLOCK) * 4);
                float s0 = half_float(x.x & 0xffff), s1 = half_float(x.y & 0xffff);
                float4 y = {in0 ? s0 : 0.0f, in0 ? fmaf(8.0f, s0, half_float(x.x >> 16)) : 0.0f,
                            in1 ? s1 : 0.0f, in1 ? fmaf(8.0f, s1, half_float(x.y >> 16)) : 0.0f};
                sts128(scratch + (group * TILE + t) * 8, y);
            } else {
                u32 x = PAGE == 0 ? row_scales(group) : lds32(block + (group * BLOCK + t % BLOCK) * 2);
                sts64(scratch + (group * TILE + t) * 4, in0 ? half_float(x & 0xffff) : 0.0f, in1 ? half_float(x >> 16) : 0.0f);
            }
        }
        __syncwarp();
    }
}

// Float K: scores before 2^-e, in the same order.
DEVICE void float_scores(u32 stage, const Query& q, int lane, float (&s)[G][16]) {
    constexpr int MATRICES = D * code_bits(K_SCHEME) / 128;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 raw[MATRICES], b[PANELS][2];
        load_k8(stage + 8 * j / BLOCK * K_PART, BLOCK, 8 * j % BLOCK, lane, raw, 0, MATRICES);
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
        for (int g = 0; g < G; g++) {
            FloatSums c = {};
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                const u32* a = q.plane[g][panel];
                if constexpr (K_SCHEME == BF16) c = mma_bf16(c, a[0], a[1], a[2 % (K_FLOAT ? 4 : 2)], a[3 % (K_FLOAT ? 4 : 2)], b[panel][0], b[panel][1]);
                else c = mma_f16(c, a[0], a[1], a[2 % (K_FLOAT ? 4 : 2)], a[3 % (K_FLOAT ? 4 : 2)], b[panel][0], b[panel][1]);
            }
            s[g][2 * j] = c.x[0] + c.x[2];
            s[g][2 * j + 1] = c.x[1] + c.x[3];
        }
    }
}

// Scores before 2^-e (rows of int8 and int4 groups) in the order of the accumulators: s[2j + i] is token 8j + 2·(lane%4) + i.
DEVICE void scores(u32 stage, u32 scratch, const Query& q, int lane, float (&s)[G][16]) {
    int c2 = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 b[PANELS];
        u32 block = stage + 8 * j / BLOCK * K_PART;
        if constexpr (K_INT4) load_k4(block, BLOCK, 8 * j % BLOCK, lane, b);
        else load_k8(block, BLOCK, 8 * j % BLOCK, lane, b, 0, PANELS);
#pragma unroll
        for (int g = 0; g < G; g++) {
            float a0 = 0.0f, a1 = 0.0f;
#pragma unroll
            for (int group = 0; group < K_GROUPS; group++) {
                constexpr int LENGTH = PANELS / K_GROUPS;
                Sums c = {};
                if constexpr (K_INT4) c = q.centre[g][group];
                c = dot_panels(c, q.plane[g], b, group * LENGTH, (group + 1) * LENGTH, LENGTH % 2 == 0 || K_GROUPS == 1);
                float s0 = plane_sum(c, 0), s1 = plane_sum(c, 1);
                if constexpr (K_SCHEME == INT8_TOKEN || K_SCHEME == INT8_GROUP) {
                    uint2 k = lds64(scratch + (group * TILE + 8 * j + c2) * 4);
                    s0 = s0 * bits_float(k.x);
                    s1 = s1 * bits_float(k.y);
                } else if constexpr (K_SCHEME == INT4_GROUPS) {
                    float4 k = lds128(scratch + (group * TILE + 8 * j + c2) * 8);
                    s0 = s0 * k.x;
                    s1 = s1 * k.z;
                    a0 = group == 0 ? s0 : a0 + s0;
                    a1 = group == 0 ? s1 : a1 + s1;
                    s0 = q.sum[g][group] * k.y;
                    s1 = q.sum[g][group] * k.w;
                    a0 = a0 + s0;
                    a1 = a1 + s1;
                    continue;
                }
                a0 = group == 0 ? s0 : a0 + s0;
                a1 = group == 0 ? s1 : a1 + s1;
            }
            s[g][2 * j] = a0;
            s[g][2 * j + 1] = a1;
        }
    }
}

// ---- Int4 Channel: scale and shift belong to the page's channels, so each page has its own planes of the query ----

// The page's {scale}[D] and {centred shift}[D] to scratch; returns the largest |shift|.
DEVICE float prepare_channels(u32 params, u32 scratch, int lane) {
    u32 largest = 0;
#pragma unroll
    for (int d = 2 * lane; d < D; d += 64) {
        uint2 x = lds64(params + d * 4);
        float s0 = half_float(x.x & 0xffff), s1 = half_float(x.y & 0xffff);
        float h0 = fmaf(8.0f, s0, half_float(x.x >> 16)), h1 = fmaf(8.0f, s1, half_float(x.y >> 16));
        sts64(scratch + d * 4, s0, s1);
        sts64(scratch + (D + d) * 4, h0, h1);
        largest = max(largest, max(float_bits(fabsf(h0)), float_bits(fabsf(h1))));
    }
    __syncwarp();
    return bits_float(warp_max(largest));
}

DEVICE float4 query_at(u32 query, int row, int panel, int c) {
    u32 at = query + (row * QUERY_STRIDE) * 4;
    if (D == 80 && panel == 4) {
        uint2 x = lds64(at + (64 + 2 * c) * 4), y = lds64(at + (72 + 2 * c) * 4);
        return {bits_float(x.x), bits_float(x.y), bits_float(y.x), bits_float(y.y)};
    }
    return lds128(at + (panel * 16 + 4 * c) * 4);
}
DEVICE float4 channel_at(u32 scratch, int panel, int c) { return query_at(scratch, 0, panel, c); }

// Planes of fl(q'·scale) and the shifts' term Y of this page; `offset` is f32(Y)·2^-j.
DEVICE void channel_query(Query& q, int g, u32 query, int row, u32 scratch, float largest_q, float largest_shift, int lane,
                          float& offset) {
    int c = lane % 4;
    int j = largest_q == 0.0f || largest_shift == 0.0f
                ? 0 : min(max(20 - exponent(largest_q) - exponent(largest_shift), -100), 100);
    float up = exp2i(j);
    u32 y = 0;
    quantize(q, g, [&](int panel, float (&x)[4]) {
        float4 v = query_at(query, row, panel, c), k = channel_at(scratch, panel, c), h = channel_at(scratch + D * 4, panel, c);
        y += float_bits(fmaf(v.x * h.x, up, MAGIC)) + float_bits(fmaf(v.y * h.y, up, MAGIC));
        y += float_bits(fmaf(v.z * h.z, up, MAGIC)) + float_bits(fmaf(v.w * h.w, up, MAGIC));
        x[0] = v.x * k.x;
        x[1] = v.y * k.y;
        x[2] = v.z * k.z;
        x[3] = v.w * k.w;
    });
    y -= (u32)(PANELS * 4) * MAGIC_BITS;
    y += __shfl_xor_sync(~0u, y, 1);
    y += __shfl_xor_sync(~0u, y, 2);
    offset = (float)(int)y * exp2i(-j);
}
