// Section 2 of docs/arithmetic.md: a warp's query rows as the left operand of Q·K.
//
// A row is two planes of signed bytes, q15 = 256·hi + lo. The planes of 8 rows fill the 16 rows of an MMA (hi in rows 0 to 7, lo in rows 8
// to 15), so one thread gets both halves of a score.
#pragma once
#include "config.cuh"
#include "dtype.cuh"
#include "divmod.cuh"

struct Query {
    // Per panel of 16 dims. Integer K: hi, lo of row lane/4, dims 4·(lane%4) + {0, 1, 2, 3}. Float K: hi, lo of the pair of dims that
    // starts at 2·(lane%4), then hi, lo of the pair 8 dims further on.
    u32 plane[ROW_GROUPS][PANELS][K_FLOAT ? 4 : 2];
    float scale[ROW_GROUPS];               // 2^-e of row lane/4
    int centre[ROW_GROUPS][K_GROUPS];      // int4: -8·Σ q15, which centres the codes
};

// Panels of a quantization group of K, and whether one m16n8k32 MMA may take two of them.
constexpr int LENGTH = PANELS / K_GROUPS;
constexpr bool PAIRS = LENGTH % 2 == 0 || K_GROUPS == 1;

// A row of Q and the factor that turns it into q' of section 2. Rows that only pad the MMA load the work item's first row and have factor
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
    bool real = r < p.heads_per_kv * p.q_len;
    r = real ? r : 0;
    int i = (u32)r / p.heads_per_kv_divmod, head = (kv_head - i) * p.heads_per_kv + r;
    float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[kv_head] : 1.0f);
    return {row_at(p.q, ((u64)work.b * p.q_len + i) * p.num_q_heads + head, HEAD_DIM, p.dtype), real ? factor : 0.0f, p.dtype};
}

// Every sealed Int4 Channel page needs query planes of its own, so q' stays in shared memory. Rows are stored by eights, in the order in
// which the lanes of a warp read them: `query_word` is the address of four dims (word lane%4 of a panel) of row lane/4. Behind all rows'
// words, `query_largest` is the address of the largest magnitudes of such words, four panels together.
DEVICE u32 query_word(u32 query, int eight, int panel, int lane) { return query + ((eight * PANELS + panel) * 32 + lane) * 16; }
DEVICE u32 query_largest(u32 query, int eight, int four, int lane) { return query + ROWS * HEAD_DIM * 4 + ((eight * FOURS + four) * 32 + lane) * 16; }

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

// Added when q15 is rounded: the high byte of q15 + 128 is hi, and its low byte is lo with the top bit inverted.
constexpr int SPLIT = 128;
// The planes of four rounded elements, each q15 + SPLIT in its low 16 bits.
DEVICE void split_planes(u32 x0, u32 x1, u32 x2, u32 x3, u32& hi, u32& lo) {
    u32 a = __byte_perm(x0, x1, 0x5410), b = __byte_perm(x2, x3, 0x5410);
    lo = __byte_perm(a, b, 0x6420) ^ 0x80808080;
    hi = __byte_perm(a, b, 0x7531);
}
// Computes `centre` of each group, -8·Σ q15, from the planes by MMAs with ones.
DEVICE void centre_codes(Query& q, int g) {
    if constexpr (K_INT4) {
        constexpr u32 ONES = 0x01010101u;
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            Sums c = {};
#pragma unroll
            for (int p = group * LENGTH; p < (group + 1) * LENGTH; p += PAIRS ? 2 : 1) {
                const u32(&x)[K_FLOAT ? 4 : 2] = q.plane[g][p], (&y)[K_FLOAT ? 4 : 2] = q.plane[g][(p + 1) % PANELS];
                if (PAIRS && p + 1 < (group + 1) * LENGTH) c = mma_s8_k32(c, x[0], x[1], y[0], y[1], ONES, ONES);
                else c = mma_s8_k16(c, x[0], x[1], ONES);
            }
            q.centre[g][group] = -2048 * c.x[0] - 8 * c.x[2];
        }
    }
}

// A bool as a type, so that a generic lambda can take it at compile time.
template <bool IS> struct Is {
    static constexpr bool value = IS;
};

// The maximum over the four lanes that share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Loads this lane's elements of a row with load(panel, to); returns the largest magnitude of the whole row.
template <class Load> DEVICE float load_row(Load load, float (&x)[PANELS][4]) {
    float amax[4] = {};
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        load(panel, x[panel]);
#pragma unroll
        for (int i = 0; i < 4; i++) amax[i] = fmaxf(amax[i], fabsf(x[panel][i]));
    }
    return quad_max(fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3])));
}

// The same from a row of Q.
DEVICE float load_row(const QueryRow& row, int lane, float (&x)[PANELS][4]) {
    auto load = [&](auto narrow) {
        return load_row([&](int panel, float (&to)[4]) {
            if (code_bits(K_SCHEME) == 16) row.pairs<decltype(narrow)::value>(panel * 16 + 2 * (lane % 4), to);
            else row.four<decltype(narrow)::value>(panel * 16 + 4 * (lane % 4), to);
        }, x);
    };
    return row.dtype == Dtype::F32 ? load(Is<false>()) : load(Is<true>());
}

// Section 2's `plane(x, largest)` of a row: its planes, 2^-e and centre.
DEVICE void quantize(Query& q, int g, const float (&x)[PANELS][4], float largest) {
    int e = plane_exponent(largest);
    float up = exp2i(e);
    q.scale[g] = exp2i(-e);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = float_bits(fmaf(x[panel][i], up, MAGIC + SPLIT));
        split_planes(r[0], r[1], r[2], r[3], q.plane[g][panel][0], q.plane[g][panel][1]);
    }
    centre_codes(q, g);
}

// Float K: a row as the sum of two planes of K's own precision (f16 for fp8). It is scaled to below 2^14 first, which f16 holds.
DEVICE void quantize_float(Query& q, int g, const float (&x)[PANELS][4], float largest) {
    int e = largest == 0.0f ? 0 : min(max(13 - exponent(largest), -70), 60);
    float up = exp2i(e);
    q.scale[g] = exp2i(-e);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            split_pair<K_SCHEME == BF16>(x[panel][2 * i] * up, x[panel][2 * i + 1] * up, q.plane[g][panel][2 * i], q.plane[g][panel][2 * i + 1]);
}
