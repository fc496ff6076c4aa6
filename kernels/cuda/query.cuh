// A warp's query rows as the left operand of the first product: two planes of 7 bits, q15 = 128·hi + lo, of 8 rows fill the 16
// rows of one MMA tile (hi above, lo below), so that both halves of a score come out in one thread.
#pragma once
#include "config.cuh"

struct Query {
    // Per 16 dims. Integer K: hi, lo of row lane/4, dims 4·(lane%4) + {0, 1, 2, 3}. Float K: hi, lo of a pair of dims, hi, lo of
    // another (see pair_dims).
    u32 plane[G][PANELS][K_FLOAT ? 4 : 2];
    float scale[G];               // 2^-e of row lane/4
    int sum[G][K_GROUPS];         // int4: Σ q15
};

// Two floats as pairs of 16-bit floats: hi + lo.
template <bool IS_BF16> DEVICE void split_pair(float x, float y, u32& hi, u32& lo) {
    if constexpr (IS_BF16) {
        hi = bf16_pair(x, y);
        lo = bf16_pair(x - bits_float(hi << 16), y - bits_float(hi & 0xffff0000));
    } else {
        hi = f16_pair(x, y);
        lo = f16_pair(x - half_float(hi & 0xffff), y - half_float(hi >> 16));
    }
}

// Four rounded elements (low 16 bits of MAGIC_BITS + q15) to their planes.
DEVICE void split_planes(u32 x0, u32 x1, u32 x2, u32 x3, u32& hi, u32& lo) {
    u32 a = __byte_perm(x0, x1, 0x5410), b = __byte_perm(x2, x3, 0x5410);
    lo = __byte_perm(a, b, 0x6420) & 0x7f7f7f7f;
    hi = __byte_perm(a << 1, b << 1, 0x7531);
}

// This lane's elements of a row, which load(panel, i) gives; returns the largest magnitude of the whole row.
template <class Load> DEVICE float load_row(Load load, float (&x)[PANELS][4]) {
    float amax = 0.0f;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        load(panel, x[panel]);
#pragma unroll
        for (int i = 0; i < 4; i++) amax = fmaxf(amax, fabsf(x[panel][i]));
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    return fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
}

// Section 2's `plane` of rows whose elements load(panel, i) gives.
template <class Load> DEVICE void quantize(Query& q, int g, Load load) {
    float x[PANELS][4], amax = load_row(load, x);
    int e = amax == 0.0f ? 0 : min(max(13 - exponent(amax * bits_float(0x3F800200)), -70), 60);
    float up = exp2i(e);
    q.scale[g] = exp2i(-e);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = float_bits(fmaf(x[panel][i], up, MAGIC));
        split_planes(r[0], r[1], r[2], r[3], q.plane[g][panel][0], q.plane[g][panel][1]);
    }
    if constexpr (K_INT4) {
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            Sums c = {};
#pragma unroll
            for (int panel = group * PANELS / K_GROUPS; panel < (group + 1) * PANELS / K_GROUPS; panel++)
                c = mma_s8_k16(c, q.plane[g][panel][0], q.plane[g][panel][1], 0x01010101u);
            q.sum[g][group] = c.x[0] * 128 + c.x[2];
        }
    }
}

// Float K: a row as the sum of two planes of K's own precision (f16 for fp8), brought near 2^14 first so that f16 holds it.
template <class Load> DEVICE void quantize_float(Query& q, int g, Load load) {
    float x[PANELS][4], amax = load_row(load, x);
    int e = amax == 0.0f ? 0 : min(max(13 - exponent(amax), -70), 60);
    float up = exp2i(e);
    q.scale[g] = exp2i(-e);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            split_pair<K_SCHEME == BF16>(x[panel][2 * i] * up, x[panel][2 * i + 1] * up, q.plane[g][panel][2 * i], q.plane[g][panel][2 * i + 1]);
}
