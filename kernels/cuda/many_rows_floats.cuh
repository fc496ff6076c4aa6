// Tiles of many_rows.cu in floats: formats of f16, bf16 or fp8, and integers where FAST (docs/arithmetic.md, section 11). The arithmetic does not define their
// bits on a GPU; tests/src/check.rs bounds their error.
//
// Products are of 16-bit floats, in bf16 for bf16 and in f16 for all else, and sums are f32. A query is one such float where it came as one, else the sum
// of two. A weight is one, relative to the row's running maximum, so that products add up in the state. Codes are f16 by then.
#pragma once
#include "many_rows_state.cuh"

struct FloatTiles : Warpgroup {
    static constexpr bool IS_BF16 = K_SCHEME == BF16;
    static constexpr int LIFT = IS_BF16 ? 0 : 14;  // weights of f16 are as large as its range allows: small ones then keep their bits
    u32 high[PANELS][4];  // the first part of the queries, as left operands of 16 dims; the second is in shared memory
    bool has_low;

    __device__ __forceinline__ void load_rows(const Part& part) {
        find_rows(part);
        has_low = !FAST && (p.dtype == Dtype::F32 || (IS_BF16 && p.dtype == Dtype::F16));
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);  // products with the last queries are done
        float factor = F16_UNIT * p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[part.kv_head] : 1.0f);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            QueryRow row = query_row(p, part, part.kv_head, first_row + lane / 4 + 8 * h);
            row.factor = row.factor > 0.0f ? 1.0f : 0.0f;
            float x[PANELS][4], largest = load_row(row, lane, x);
            // By a power of two, to below 2^14, which f16 holds.
            int e = largest == 0.0f ? 0 : min(13 - exponent(largest), 126);
            float up = exp2i(e);
            rows.scale[h] = fmaxf(factor * exp2i(-e / 2) * exp2i(e / 2 - e), 0x1p-126f);
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 low;
                    split_pair<IS_BF16>(x[panel][2 * i] * up, x[panel][2 * i + 1] * up, high[panel][2 * i + h], low);
                    if (!FAST) sts32(queries + ((2 * panel + i) * 64 + 16 * warp + 8 * h + lane / 4) * 16 + 4 * (lane % 4), low);
                }
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }
    // A shared address is the same for all lanes, which the compiler does not see: it would find descriptions of matrices in every lane.
    DEVICE u32 same_for_all(u32 at) { return __shfl_sync(~0u, at, 0); }
    __device__ __forceinline__ u32 wait_side() { return same_for_all(UNPACKS ? unpacked.wait_full() : ring.wait()); }
    // Of the side behind the one that is read.
    __device__ __forceinline__ u32 wait_next_side() const {
        if constexpr (UNPACKS) {
            UnpackedRing next = unpacked;
            next.advance();
            return same_for_all(next.wait_full());
        } else {
            Ring next = ring;
            next.advance();
            return same_for_all(next.wait());
        }
    }
    __device__ __forceinline__ void release_side() {
        if constexpr (UNPACKS) unpacked.release(lane);
        else release_stages(ring, 1, lane);
    }

    template <bool HAS_LOW> __device__ __forceinline__ void multiply_keys(u32 keys, float (&s)[SUMS_OF_TILE]) const {
        using Product = FloatProducts<IS_BF16, false>;
        products_begin();
#pragma unroll
        for (int i = 0; i < PANELS; i++) Product::multiply(s, high[i], matrices(keys + i * 2 * TILE * 16, TILE * 16), i > 0);
        if (HAS_LOW)
#pragma unroll
            for (int i = 0; i < PANELS; i++) Product::multiply_shared(s, matrices(queries + i * 2 * 64 * 16, 64 * 16), matrices(keys + i * 2 * TILE * 16, TILE * 16), true);
        products_commit();
    }
    __device__ __forceinline__ void multiply_values(const Part& part, int index, const u32 (&a)[4][4]) {
        u32 values = wait_side();
        int tokens = part.kv_len - index * TILE;
        if (!UNPACKS && tokens < TILE) clear_values(values, tokens);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Pages have V by panels of eight dims, with tokens along them; unpacked codes by panels of eight tokens.
            u64 b = UNPACKS ? matrices(values + i * 2 * HEAD_DIM * 16, HEAD_DIM * 16) : matrices(values + i * 16 * 16, 128, TILE * 16);
            FloatProducts<IS_BF16, !UNPACKS>::multiply(o, a[i], b, true);
        }
        products_commit();
    }
    // Zeros in place of V's tokens that do not exist: their bytes may be a NaN, and 0·NaN is not 0.
    __device__ __forceinline__ void clear_values(u32 values, int tokens) const {
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < HEAD_DIM / 8 * TILE; i += 128)
            if (i % TILE >= tokens) sts128(values + i * 16, {0.0f, 0.0f, 0.0f, 0.0f});
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // Replaces scores by weights; updates the maxima, and gives the factors of what was summed before.
    __device__ __forceinline__ void weigh(float (&s)[SUMS_OF_TILE], int index, float (&alpha)[2]) {
        float scale[2] = {rows.scale[0], rows.scale[1]};
        if (HAS_SCORE_MODS) {
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++) s[i] = s[i] * scale[i / 2 % 2];
            modify_scores(s, index);
            scale[0] = scale[1] = 1.0f;
        }
        if (!rows.see_all(index * TILE)) each_hidden(index, [&](int i) { s[i] = MINUS_INFINITY; });
        float base[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float now = fmaxf(m[h], ceilf(row_max(s, h) * scale[h]) - LIFT);
            alpha[h] = pow2(now - m[h]);
            m[h] = now;
            base[h] = now > MINUS_INFINITY ? now : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) s[i] = approximate_exp2(fmaf(s[i], scale[i / 2 % 2], -base[i / 2 % 2]));
    }
    // Weights as pairs, which are left operands of 16 tokens, and their sums.
    __device__ __forceinline__ void pack(const float (&s)[SUMS_OF_TILE], const float (&alpha)[2], u32 (&a)[4][4]) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int at = 8 * i + 4 * (n / 2) + 2 * (n % 2), h = n % 2;
                if constexpr (IS_BF16) {
                    u32 pair = bf16_pair(s[at], s[at + 1]);
                    a[i][n] = pair;
                    // What is multiplied is what is summed: rounding to 8 bits then leaves a lone weight's value as it is.
                    sum[h] = sum[h] + (bits_float(pair << 16) + bits_float(pair & 0xffff0000));
                } else {
                    a[i][n] = f16_pair(s[at], s[at + 1]);
                    sum[h] = sum[h] + (s[at] + s[at + 1]);
                }
            }
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = fmaf(l[h], alpha[h], sum[h]);
    }

    // Adds tiles, one at least, to the state. Weights of a tile are found while the products of the one before with V are under way.
    // No branch of a warp's own is among them: the compiler would wait for each product.
    template <bool HAS_LOW> __device__ __forceinline__ void add_tiles(const Part& part, int index, int end) {
        float s[SUMS_OF_TILE], alpha[2] = {1.0f, 1.0f};
        u32 a[4][4];
        multiply_keys<HAS_LOW>(wait_side(), s);
        products_wait<0>();
        products_landed(s);
        release_side();
        weigh(s, index, alpha);
        pack(s, alpha, a);
#pragma unroll 1
        while (++index < end) {
            multiply_keys<HAS_LOW>(wait_next_side(), s);
            multiply_values(part, index - 1, a);
            products_wait<1>();
            products_landed(s);
            weigh(s, index, alpha);
            products_wait<0>();
            products_landed(o);
            release_side();
            release_side();
            if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f))
#pragma unroll
                for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * alpha[i / 2 % 2];
            pack(s, alpha, a);
        }
        multiply_values(part, index - 1, a);
        products_wait<0>();
        products_landed(o);
        release_side();
    }
    // A span's state. Its tiles are one run, as a merge takes longer than a tile.
    __device__ __forceinline__ void attend_span(const Part& part, int index, int end) {
        clear();
        if (index < end) has_low ? add_tiles<!FAST>(part, index, end) : add_tiles<false>(part, index, end);
        // Sums were those of a thread's own tokens.
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = quad_sum(l[h]);
        if (F16_UNIT != 1.0f)
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * F16_UNIT;
    }
};
