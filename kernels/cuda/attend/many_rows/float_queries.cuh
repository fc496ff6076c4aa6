// Query rows of floats in many_rows.cu: as one 16-bit float or the first of two, multiplied by a power of two, in shared memory.
#pragma once
#include "attend/many_rows/warpgroup.cuh"

namespace attn {

struct FloatQueries : Warpgroup {
    static constexpr bool IS_BF16 = Keys::SCHEME == BF16;
    float up[2];  // powers of two that queries are multiplied by
    bool has_low;  // whether they have second parts (`are_in_two_parts`), which are the same for the whole launch

    // A row of the thread's, as it is: scores are scaled.
    METHOD QueryRow unscaled_row(const WorkRange& range, int h) const {
        QueryRow row = query_row(p, range, range.kv_head, first_row + lane / 4 + 8 * h);
        row.factor = row.factor > 0.0f ? 1.0f : 0.0f;
        return row;
    }
    // The power of two that lifts a row with this largest magnitude to below 2^14, which f16 holds, and what its scores are multiplied by.
    METHOD void lift_row(const WorkRange& range, float largest, float& up, float& scale) const {
        int e = largest == 0.0f ? 0 : min(13 - exponent(largest), 126);
        up = exp2i(e);
        float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[range.kv_head] : 1.0f);
        scale = fmaxf(factor * exp2i(-e / 2) * exp2i(e / 2 - e), 0x1p-126f);
    }
    // Whether queries have second parts.
    METHOD bool are_in_two_parts() const { return Config::TWO_PARTS && !p.rounds_queries && (p.dtype == Dtype::F32 || (IS_BF16 && p.dtype == Dtype::F16)); }
    // A row of queries by four lanes: chunks of eight elements, every fourth of which is a lane's.
    static constexpr int ROW_CHUNKS = K_DIM / 8, CHUNKS = (ROW_CHUNKS + 3) / 4;
    struct Chunk {
        float x[8];

        METHOD float largest() const {
            float found = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) found = fmaxf(found, fabsf(x[i]));
            return found;
        }
        METHOD void store(u32 to, float up) const {
            u32 words[4], rest;
#pragma unroll
            for (int i = 0; i < 4; i++) split_pair<IS_BF16>(x[2 * i] * up, x[2 * i + 1] * up, words[i], rest);
            sts128(to, {bits_float(words[0]), bits_float(words[1]), bits_float(words[2]), bits_float(words[3])});
        }
    };
    METHOD bool has_chunk(int i) const { return ROW_CHUNKS % 4 == 0 || 4 * i + lane % 4 < ROW_CHUNKS; }
    // Leaves a row's first parts in shared memory, all of whose loads are under way together; gives the power of two that it was multiplied by, and the scale of its scores.
    // Of 16-bit queries registers hold all; others are loaded twice.
    template <bool NARROW> METHOD float2 store_row_of(const WorkRange& range, const QueryRow& from, u32 to) const {
        const u8* mine = from.row + lane % 4 * (NARROW ? 16 : 32);
        uint4 words[NARROW ? CHUNKS : 1];
        if (NARROW)
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (has_chunk(i)) words[i % (NARROW ? CHUNKS : 1)] = *(const uint4*)(mine + i * 64);
        auto chunk = [&](int i) {
            Chunk c;
            if constexpr (NARROW) {
                const u32 of[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float2 pair = widen_pair(of[n], from.dtype);
                    c.x[2 * n] = pair.x * from.factor;
                    c.x[2 * n + 1] = pair.y * from.factor;
                }
            } else {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float4 four = *(const float4*)(mine + i * 128 + n * 16);
                    const float of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int e = 0; e < 4; e++) c.x[4 * n + e] = of[e] * from.factor;
                }
            }
            return c;
        };
        constexpr int UNROLL = NARROW ? CHUNKS : 2;
        float largest = 0.0f;
#pragma unroll UNROLL
        for (int i = 0; i < CHUNKS; i++)
            if (has_chunk(i)) largest = fmaxf(largest, chunk(i).largest());
        float up, scale;
        lift_row(range, quad_max(largest), up, scale);
#pragma unroll UNROLL
        for (int i = 0; i < CHUNKS; i++)
            if (has_chunk(i)) chunk(i).store(to + (4 * i + lane % 4) * 64 * 16, up);
        return make_float2(up, scale);
    }
    METHOD float2 store_row(const WorkRange& range, const QueryRow& from, u32 to) const {
        return from.dtype == Dtype::F32 ? store_row_of<false>(range, from, to) : store_row_of<true>(range, from, to);
    }
};

}  // namespace attn
