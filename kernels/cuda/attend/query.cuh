// Sections 2 and 3 of docs/arithmetic.md: a warp's query rows as the right operand of K·Q.
//
// Eight rows are the columns of an MMA: row lane/4 of a row group is column lane/4. A sum's two columns in a lane, 2·(lane%4) and the next,
// are the rows whose scores, weights and outputs the lane has; `of_columns` brings it what the rows' own lanes have computed.
#pragma once
#include "common/dtype.cuh"
#include "common/divmod.cuh"
#include "attend/rotation.cuh"
#include "attend/split_kv/work.cuh"

struct Query {
    // Per panel of 16 dims, of row lane/4. Integers: dims 4·(lane%4) + {0, 1, 2, 3}. Floats, as the sum of two parts: the first part of two
    // pairs of dims, then the second part; pairs start at 4·(lane%4) + {0, 2}, or of 16-bit K at 2·(lane%4) + {0, 8}.
    u32 word[ROW_GROUPS][PANELS][INTEGER ? 1 : 4];
    float scale[ROW_GROUPS][2];  // the step of the lane's columns
    // Σ over the dims of a group of K, where its codes or shifts need it.
    int sum[ROW_GROUPS][K_GROUPS][2];
    float float_sum[ROW_GROUPS][K_GROUPS][2];
};

constexpr int LENGTH = PANELS / K_GROUPS;  // panels of a quantization group of K

// A row of Q and the factor that turns it into q' of section 3. Rows that only pad the MMA load the work item's first row and have factor
// 0: without a branch, all loads of a row are in flight together.
struct QueryRow {
    const u8* row;
    float factor;
    int dtype;

    // Elements dim to dim + 3 of q' (dim a multiple of four). NARROW: the row is 16-bit; the caller branches once per row.
    template <bool NARROW> __device__ __forceinline__ void four(int dim, float (&x)[4]) const {
        if (NARROW) {
            uint2 v = *(const uint2*)(row + dim * 2);
            set(widen_pair(v.x, dtype), widen_pair(v.y, dtype), x);
        } else {
            float4 v = *(const float4*)(row + dim * 4);
            set(make_float2(v.x, v.y), make_float2(v.z, v.w), x);
        }
    }
    // Elements dim, dim + 1, dim + 8, dim + 9 of q' (dim even).
    template <bool NARROW> __device__ __forceinline__ void pairs(int dim, float (&x)[4]) const { set(pair<NARROW>(dim), pair<NARROW>(dim + 8), x); }
    template <bool NARROW> __device__ __forceinline__ float2 pair(int dim) const {
        return NARROW ? widen_pair(*(const u32*)(row + dim * 2), dtype) : *(const float2*)(row + dim * 4);
    }
    __device__ __forceinline__ void set(float2 a, float2 b, float (&x)[4]) const {
        x[0] = a.x * factor;
        x[1] = a.y * factor;
        x[2] = b.x * factor;
        x[3] = b.y * factor;
    }
};
// Row number `row` of the work item's row block.
template <class Work> DEVICE QueryRow query_row(const DecodeParams& p, const Work& work, int kv_head, int row) {
    int r = work.row_block * ROWS + row;
    QueryBlock queries = query_block(p, work.b);
    bool real = r < p.heads_per_kv * queries.tokens;
    r = real ? r : 0;
    int i = (u32)r / p.heads_per_kv_divmod, head = (kv_head - i) * p.heads_per_kv + r;
    float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[kv_head] : 1.0f);
    return {row_at(p.q, (u64)(queries.first + i) * p.num_q_heads + head, HEAD_DIM, p.dtype), real ? factor : 0.0f, p.dtype};
}

// Splits two floats into 16-bit floats with x ≈ hi + lo, and packs both hi and both lo.
template <bool IS_BF16> DEVICE void split_pair(float x, float y, u32& hi, u32& lo) {
    if constexpr (IS_BF16) {
        hi = bf16_pair(x, y);
        lo = bf16_pair(x - bits_float(hi << 16), y - bits_float(hi & 0xffff0000));
    } else {
        hi = f16_pair(x, y);
        lo = f16_pair(x - half_float(hi & 0xffff), y - half_float(hi >> 16));
    }
}

// A bool as a type, so that a generic lambda can take it at compile time.
template <bool IS> struct Is {
    static constexpr bool value = IS;
};

// Over the four lanes that share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
// Brings a number of row lane/4 to the lanes of its columns.
DEVICE void of_columns(float x, int lane, float (&columns)[2]) {
#pragma unroll
    for (int e = 0; e < 2; e++) columns[e] = __shfl_sync(~0u, x, 4 * (2 * (lane % 4) + e));
}

// Loads this lane's elements of N rows: all of them, before one is used.
template <int N> DEVICE void load_elements(const QueryRow (&rows)[N], int lane, float (&x)[N][PANELS][4]) {
    auto load = [&](auto narrow) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                if (code_bits(K_SCHEME) == 16) rows[n].template pairs<decltype(narrow)::value>(panel * 16 + 2 * (lane % 4), x[n][panel]);
                else rows[n].template four<decltype(narrow)::value>(panel * 16 + 4 * (lane % 4), x[n][panel]);
            }
    };
    if (rows[0].dtype == Dtype::F32) load(Is<false>());
    else load(Is<true>());
}
// Rotates a row where K is; returns its largest magnitude.
DEVICE float rotate_row(float (&x)[PANELS][4], int lane) {
    if constexpr (K_ROTATED) rotate_back<4>(x, lane % 4);
    float largest[4] = {};
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest[i] = fmaxf(largest[i], fabsf(x[panel][i]));
    return quad_max(fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3])));
}
DEVICE float load_row(const QueryRow& row, int lane, float (&x)[PANELS][4]) {
    const QueryRow rows[1] = {row};
    float elements[1][PANELS][4];
    load_elements(rows, lane, elements);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[panel][i] = elements[0][panel][i];
    return rotate_row(x, lane);
}

// Section 3: a row in 8 bits, its step, and the sums of its groups.
DEVICE void quantize(Query& q, int g, const float (&x)[PANELS][4], float largest, int lane) {
    bool counts = largest >= 0x1p-60f;
    float inverse = counts ? 127.0f * rcp(largest) : 0.0f;
    of_columns(counts ? largest * bits_float(0x3C010204) : 0.0f, lane, q.scale[g]);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = float_bits(x[panel][i] * inverse + MAGIC);
        q.word[g][panel][0] = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
    }
    if constexpr (K_SHIFTS || K_HALF_STEPS) {
        constexpr u32 ONES = 0x01010101u;
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            Sums c = {};
#pragma unroll
            for (int p = group * LENGTH; p < (group + 1) * LENGTH; p++) c = mma_s8_k16(c, ONES, ONES, q.word[g][p][0]);
            q.sum[g][group][0] = c.x[0];
            q.sum[g][group][1] = c.x[1];
        }
    }
}

// Floats: a row as the sum of two parts of K's own precision (f16 for fp8 and integers). It is scaled to below 2^14 first, which f16 holds.
DEVICE void quantize_float(Query& q, int g, const float (&x)[PANELS][4], float largest, int lane) {
    int e = largest == 0.0f ? 0 : min(max(13 - exponent(largest), -70), 60);
    float up = exp2i(e), sums[K_GROUPS] = {};
    of_columns(exp2i(-e), lane, q.scale[g]);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float a = x[panel][2 * i] * up, b = x[panel][2 * i + 1] * up;
            split_pair<K_SCHEME == BF16>(a, b, q.word[g][panel][i], q.word[g][panel][(2 + i) % (INTEGER ? 1 : 4)]);
            sums[panel / LENGTH] += a + b;
        }
    if constexpr (K_SHIFTS)
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) of_columns(quad_sum(sums[group]), lane, q.float_sum[g][group]);
}
