// Tiles of many_rows.cu in integers, of rows that a warpgroup has alone: sections 3 to 6 of docs/arithmetic.md.
#pragma once
#include "attend/many_rows/weights.cuh"

namespace attn {

struct IntegerTiles : IntegerRows {
    METHOD void load_rows(const WorkRange& range) {
        find_rows(range, query_block(p, range.b));
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);  // products with the last queries are done
        QueryRow from[THREAD_ROWS];
        float elements[THREAD_ROWS][Keys::PANELS][4];
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) from[h] = query_row(p, range, range.kv_head, first_row + lane / 4 + 8 * h);
        load_elements(from, lane, elements);
        const u16* centres = find_centres(p, centre_row(p, range.b, range.kv_len), range.kv_head);
        if constexpr (HAS_CENTRES) prefetch_centres(centres, lane);
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            RowParams row = store_query(elements[h], centres, (16 * warp + 8 * h + lane / 4) * 16 + 4 * (lane % 4));
            rows.scale[h] = row.scale;
            rows.sum[h] = row.sum;
            rows.base[0][h] = row.base[0];
            rows.base[1][h] = row.base[1];
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // ---- a tile ----

    // Where a side's codes of a tile lie in bytes, its parameters, and its residuals, if it has some.
    struct Place {
        u32 codes, params, residuals;
    };
    // Voted, so that the compiler knows it to be the warp's as a whole: behind a branch of a thread's own, products would wait for each other.
    METHOD bool has_residuals(const WorkRange& range, int index) const { return WINDOW && __any_sync(~0u, range.has_residuals(index)); }
    METHOD static Place wait_unpacked(UnpackedRing next, bool residuals) {
        u32 at = next.wait();
        next.advance();
        return {at, at + Config::UNPACKED_PARAMS, residuals ? next.wait() : 0};
    }
    METHOD Place wait_keys_or_values(bool is_k, bool residuals) {
        if constexpr (Config::UNPACKS) {
            return wait_unpacked(unpacked, residuals);
        } else if (is_k) {
            u32 at = ring.wait();
            return {at, at + Stage::K_CODES, 0};
        } else {
            u32 at = ring.wait();
            if (Stage::HOLDS_BOTH) at += Stage::K_BLOCK_BYTES;
            return {at, at + Stage::V_CODES, 0};
        }
    }
    METHOD void release_keys_or_values(bool is_k, bool residuals) {
        if constexpr (Config::UNPACKS) {
            unpacked.release(lane);
            if (residuals) unpacked.release(lane);
        } else if (!Stage::HOLDS_BOTH || !is_k) {
            release_stages(ring, 1, lane);
        }
    }
    // Left operands of products with residuals that are found ahead of all products: nothing else may be among those of a warpgroup.
    template <int STEPS> static constexpr int FINE_AT_ONCE = ATTN_BULK ? STEPS : 1;
    template <bool FINE> METHOD void multiply_keys(const Place& at, int index, int (&sums)[SUMS_OF_TILE]) const {
        constexpr int STEPS = Keys::PANELS / 2;
        u64 q = matrices(queries, 64 * 16), k = matrices(at.codes, TILE * 16);
        // The queries of rows that read K with residuals.
        u32 fine[FINE_AT_ONCE<STEPS>][4];
        auto find_fine = [&](int i, u32(&a)[4]) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 word = lds32(queries + ((2 * i + n / 2) * 64 + 16 * warp + 8 * (n % 2) + lane / 4) * 16 + 4 * (lane % 4));
                a[n] = n % 2 < THREAD_ROWS && is_fine(n % 2, index, Keys::WINDOW) ? word : 0;
            }
        };
        if (ATTN_BULK && FINE && Keys::WINDOW)
#pragma unroll
            for (int i = 0; i < STEPS; i++) find_fine(i, fine[i]);
        products_begin();
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            Products<!Keys::HAS_SHIFTS>::multiply_shared(sums, matrices_behind(q, i * 2 * 64 * 16), matrices_behind(k, i * 2 * TILE * 16), i > 0);
        if (FINE && Keys::WINDOW)
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                if (!ATTN_BULK) find_fine(i, fine[0]);
                Products<false>::multiply_signed(sums, fine[i % FINE_AT_ONCE<STEPS>], matrices(at.residuals + i * 2 * TILE * 16, TILE * 16), true);
            }
        products_commit();
    }
    // Dims of a thread whose products are found at once: all, or few where warps multiply for themselves, which leaves registers for O.
    static constexpr int AT_ONCE = ATTN_BULK ? ELEMENTS : 16;
    static constexpr u32 BYTES_OF_ELEMENT = 32;  // two dims of 16 tokens
    template <bool FINE> METHOD void multiply_values(const Place& at, int index, const Weighed& w, int first, int (&values)[AT_ONCE]) const {
        u64 v = matrices(at.codes, K_DIM * 16);
        // The weights of rows that read V with residuals.
        u32 fine[FINE_AT_ONCE<2>][4];
        auto find_fine = [&](int i, u32(&a)[4]) {
#pragma unroll
            for (int n = 0; n < 4; n++) a[n] = n % 2 < THREAD_ROWS && is_fine(n % 2, index, Values::WINDOW) ? w.a[i][n] : 0;
        };
        if (ATTN_BULK && FINE && Values::WINDOW)
#pragma unroll
            for (int i = 0; i < 2; i++) find_fine(i, fine[i]);
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; i++)
            Products<!Values::HAS_SHIFTS>::multiply_unsigned(values, w.a[i], matrices_behind(v, i * 2 * K_DIM * 16 + first * BYTES_OF_ELEMENT), i > 0);
        if (FINE && Values::WINDOW)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (!ATTN_BULK) find_fine(i, fine[0]);
                Products<false>::multiply_unsigned(values, fine[i % FINE_AT_ONCE<2>],
                                                   matrices(at.residuals + i * 2 * K_DIM * 16 + first * BYTES_OF_ELEMENT, K_DIM * 16), true);
            }
        products_commit();
    }
    template <bool FINE> METHOD void fold(const int (&values)[AT_ONCE], int first, int index, const Weighed& w) {
        float unit[2], of_residuals[2] = {};
        int bias[2] = {};
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            unit[h] = Values::HAS_SHIFTS ? w.step[h] : w.step[h] * w.beta[h];
            if (Values::HAS_HALF_STEPS) unit[h] = unit[h] * 2.0f;
            const int sum = Values::HAS_SHIFTS || FINE ? weight_sum(w, h) : 0;
            if (Values::HAS_SHIFTS) bias[h] = -8 * sum;
            if (FINE && is_fine(h, index, Values::WINDOW)) of_residuals[h] = RESIDUAL_BASE * (float)sum;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (!is_of_row(i)) continue;
            int h = i / 2 % 2;
            float sum = (float)(Values::HAS_SHIFTS ? values[i] + bias[h] : values[i]);
            if (FINE) sum = sum + of_residuals[h];
            float& x = o[first + i];
            if (Values::HAS_SHIFTS) x = fmaf(fmaf(sum, unit[h], w.shift[h]), w.beta[h], x);
            else x = fmaf(sum, unit[h], x);
        }
    }

    // Folds a tile's exponents and sums into the segment's state.
    METHOD void enter_tile(Weighed& w) {
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            Factors f = fold_factors(m[h], w.exponent[h]);
            w.alpha[h] = f.alpha;
            w.beta[h] = f.beta;
            l[h] = fmaf(w.total[h], f.beta, l[h] * f.alpha);
        }
    }
    // Whether the warp attends: where work items are whole, few warps have no rows, and without a branch instructions are ordered across it.
    // Voted where there are tiles of two kinds: their products would wait for each other behind a branch of a thread's own.
    METHOD bool attends() const { return (ATTN_BULK && Config::WHOLE_ITEMS) || (WINDOW ? __any_sync(~0u, has_rows) : has_rows); }
    // Whether V's stage is waited for, and its parameters prepared, while products with K are under way.
    static constexpr bool WAITS_FOR_BOTH = ATTN_BULK && !Config::UNPACKS;
    METHOD Place wait_values_behind_keys(bool key_residuals, bool value_residuals) const {
        if constexpr (Config::UNPACKS) {
            UnpackedRing next = unpacked;
            next.advance();
            if (key_residuals) next.advance();
            return wait_unpacked(next, value_residuals);
        } else {
            Ring next = ring;
            if (!Stage::HOLDS_BOTH) next.advance();
            u32 at = next.wait();
            if (Stage::HOLDS_BOTH) at += Stage::K_BLOCK_BYTES;
            return {at, at + Stage::V_CODES, 0};
        }
    }
    // Folds a tile into the segment's state. FINE: some row reads it with residuals.
    template <bool FINE> METHOD void tile(int index) {
        Place at = wait_keys_or_values(true, FINE && Keys::WINDOW);
        KeySums sums;
        multiply_keys<FINE>(at, index, sums[0]);
        KeyParams k;
        read_keys(at.params, k);  // while products run
        if (WAITS_FOR_BOTH) {
            at = wait_values_behind_keys(FINE && Keys::WINDOW, FINE && Values::WINDOW);
            if (attends()) prepare_weights(index, at.params);
        }
        products_wait<0>();
        float s[SUMS_OF_TILE];
        find_scores<FINE && Keys::WINDOW>(sums, index, k, s);
        release_keys_or_values(true, FINE && Keys::WINDOW);
        if (!WAITS_FOR_BOTH) at = wait_keys_or_values(false, FINE && Values::WINDOW);
        Weighed w = {};
        w.alpha[0] = w.alpha[1] = 1.0f;
        if (attends()) {
            if (!WAITS_FOR_BOTH) prepare_weights(index, at.params);
            weigh_tile<FINE && Values::WINDOW>(s, index, at.params, w);
            enter_tile(w);
        }
#pragma unroll
        for (int first = 0; first < ELEMENTS; first += AT_ONCE) {
            int values[AT_ONCE];
            multiply_values<FINE>(at, index, w, first, values);
            if (first == 0 && __any_sync(~0u, w.alpha[0] != 1.0f || w.alpha[1] != 1.0f))
#pragma unroll
                for (int i = 0; i < ELEMENTS; i++)
                    if (is_of_row(i)) o[i] = o[i] * w.alpha[i / 2 % 2];
            products_wait<0>();
            if (first + AT_ONCE == ELEMENTS) release_keys_or_values(false, FINE && Values::WINDOW);
            if (attends()) fold<FINE && Values::WINDOW>(values, first, index, w);
        }
    }

    // Waits for a tile's stages and passes them on.
    METHOD void pass_tile(const WorkRange& range, int index) {
        const bool residuals = has_residuals(range, index);
        wait_keys_or_values(true, Keys::WINDOW && residuals);
        release_keys_or_values(true, Keys::WINDOW && residuals);
        wait_keys_or_values(false, Values::WINDOW && residuals);
        release_keys_or_values(false, Values::WINDOW && residuals);
    }
    // A span's state: those of its segments merge in shared memory.
    METHOD void attend_span(const WorkRange& range, int index, int end) {
        if (!multiplies()) {
            clear();
#pragma unroll 1
            for (; index < end; index++) pass_tile(range, index);
            return;
        }
        float span_m[2], span_l[2];
        bool has_span = false;
#pragma unroll 1
        while (true) {
            clear();
            int until = min(end, index + (1 << SEGMENT_SHIFT));
#pragma unroll 1
            while (true) {
                // A loop of their own for what most tiles are: it is short.
                const int end_of_most = WINDOW ? same_for_all(index == 0 ? 0 : min(until, range.first_residual_tile)) : until;
#pragma unroll 1
                for (; index < end_of_most; index++) tile<false>(index);
                if (!WINDOW || index >= until) break;
                tile<true>(index++);
            }
            if (has_span) merge_behind<1>(span_m, span_l, [&](int i) { return lds128(state + i * 2048); });
            if (index >= end) return;
            has_span = true;
            store_state([&](int i, const float4& x) { sts128(state + i * 2048, x); });
#pragma unroll
            for (int h = 0; h < THREAD_ROWS; h++) {
                span_m[h] = m[h];
                span_l[h] = l[h];
            }
        }
    }
};

}  // namespace attn
