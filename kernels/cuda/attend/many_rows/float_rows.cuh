// Query rows of floats in many_rows.cu: as one 16-bit float or the first of two, multiplied by a power of two, in shared memory.
#pragma once
#include "attend/many_rows/work.cuh"
#include "attend/query_rows.cuh"

namespace attn {

struct FloatRows {
    static constexpr bool IS_BF16 = Keys::SCHEME == BF16;
    const DecodeParams& p;
    int lane;

    // A row of a work item as it is: scores are scaled. One that only pads products is the first row again.
    METHOD QueryRow row(const WorkRange& range, int index) const {
        QueryRow row = query_row(p, range, range.kv_head, index);
        row.factor = 1.0f;
        return row;
    }
    // Rows in bf16 stay as they are between these magnitudes, where products with K have range enough.
    static constexpr float LEAST_AS_IS = 0x1p-20f, MOST_LIFTED = 0x1p14f;
    // The power of two that lifts a row with this largest magnitude to below 2^14, which f16 holds.
    DEVICE float lift_of(float largest) { return exp2i(largest == 0.0f ? 0 : min(13 - exponent(largest), 126)); }
    // What the scores of a row are multiplied by that was lifted so.
    METHOD float scale_of(const WorkRange& range, float lift) const {
        const int e = exponent(lift);
        const float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[range.kv_head] : 1.0f);
        return fmaxf(factor * exp2i(-e / 2) * exp2i(e / 2 - e), 0x1p-126f);
    }
    // A row of queries by four lanes: chunks of eight elements, every fourth of which is a lane's.
    static constexpr int ROW_CHUNKS = K_DIM / 8, CHUNKS = (ROW_CHUNKS + 3) / 4;

    METHOD bool has_chunk(int i) const { return ROW_CHUNKS % 4 == 0 || 4 * i + lane % 4 < ROW_CHUNKS; }
    METHOD u32 place(u32 row, int i) const { return row + (4 * i + lane % 4) * 64 * 16; }
    METHOD void store(u32 to, const float (&x)[8], float lift) const {
        u32 words[4], rest;
#pragma unroll
        for (int i = 0; i < 4; i++) split_pair<IS_BF16>(x[2 * i] * lift, x[2 * i + 1] * lift, words[i], rest);
        sts128(to, {bits_float(words[0]), bits_float(words[1]), bits_float(words[2]), bits_float(words[3])});
    }
    // A row in f32, loaded twice, a few chunks at once.
    METHOD float store_wide(const QueryRow& from, u32 to) const {
        const float4* mine = (const float4*)from.row + lane % 4 * 2;
        const auto chunk = [&](int i, float (&x)[8]) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 four = mine[i * 8 + n];
                x[4 * n] = four.x;
                x[4 * n + 1] = four.y;
                x[4 * n + 2] = four.z;
                x[4 * n + 3] = four.w;
            }
        };
        float largest = 0.0f;
#pragma unroll 2
        for (int i = 0; i < CHUNKS; i++) {
            if (!has_chunk(i)) continue;
            float x[8];
            chunk(i, x);
#pragma unroll
            for (int n = 0; n < 8; n++) largest = fmaxf(largest, fabsf(x[n]));
        }
        const float lift = lift_of(quad_max(largest));
#pragma unroll 2
        for (int i = 0; i < CHUNKS; i++) {
            if (!has_chunk(i)) continue;
            float x[8];
            chunk(i, x);
            store(place(to, i), x, lift);
        }
        return lift;
    }
    // A row in 16 bits, all of whose loads are under way together. Nearly all are as products read them.
    METHOD float store_narrow(const QueryRow& from, u32 to) const {
        uint4 words[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) words[i] = has_chunk(i) ? *(const uint4*)(from.row + (4 * i + lane % 4) * 16) : uint4{};
        // Magnitudes of 16 bits are in the order of their bits. Of the second elements of pairs, the first ones are bits that count no more.
        u32 first = 0, second = 0;
        const auto count = [&](u32 pair) {
            first = max(first, pair << 17);
            second = max(second, pair << 1);
        };
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) count(words[i].x), count(words[i].y), count(words[i].z), count(words[i].w);
        const float largest = quad_max(widen(max(first, second) >> 17, from.dtype));
        const bool is_alike =
            from.dtype == (IS_BF16 ? Dtype::BF16 : Dtype::F16) && (!IS_BF16 || largest == 0.0f || (largest >= LEAST_AS_IS && largest < MOST_LIFTED));
        if (__all_sync(~0u, is_alike)) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (has_chunk(i)) sts128(place(to, i), {bits_float(words[i].x), bits_float(words[i].y), bits_float(words[i].z), bits_float(words[i].w)});
            return 1.0f;
        }
        const float lift = lift_of(largest);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const float2 pairs[4] = {widen_pair(words[i].x, from.dtype), widen_pair(words[i].y, from.dtype), widen_pair(words[i].z, from.dtype),
                                     widen_pair(words[i].w, from.dtype)};
            const float x[8] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y, pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
            if (has_chunk(i)) store(place(to, i), x, lift);
        }
        return lift;
    }
    // Leaves a row's first parts in shared memory; gives the power of two that it was multiplied by.
    METHOD float store_row(const QueryRow& from, u32 to) const { return from.dtype == Dtype::F32 ? store_wide(from, to) : store_narrow(from, to); }
};

}  // namespace attn
