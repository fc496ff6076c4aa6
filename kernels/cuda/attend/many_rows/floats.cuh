// Tiles of many_rows.cu in floats: formats of f16, bf16 or fp8, and what dequantize.cu made f16 of (docs/arithmetic.md, section 11). The arithmetic does not
// define their bits on a GPU; tests/src/check.rs bounds their error.
//
// Products are of 16-bit floats, in bf16 for bf16 and in f16 for all else, and sums are f32. A query is one such float where it came as one, or where K was
// rounder than it, else the sum of two. A weight is one, relative to a maximum of the row that is raised seldom, so that products add up in the state. Codes are f16 by then.
// Products with V of a tile are under way while the next one is weighed; the other warpgroups' products, too.
#pragma once
#include "attend/many_rows/float_queries.cuh"

namespace attn {

struct FloatTiles : FloatQueries {
    // A row's maximum is raised where scores are above it by more than MOST_ABOVE, in powers of two, so that what was summed is seldom multiplied. Weights of f16 are as large as
    // its range allows then, 2^15, so that small ones keep their bits.
    static constexpr int MOST_ABOVE = 8, LIFT = IS_BF16 ? 0 : 15 - MOST_ABOVE;
    static constexpr bool IN_ROWS = PAGE == 0 && !Config::UNPACKS;  // products read rows as the copy engine puts them into a stage
    static constexpr int SWIZZLE = IN_ROWS ? Stage::K_SWIZZLE : 128;
    static constexpr bool BY_DIMS = !Config::UNPACKS || Stage::V_TOKEN_MAJOR;  // V lies by panels of eight dims, or in rows of them, else by panels of eight tokens
    static constexpr int SIDES = 2;  // stages of a tile in the ring: K and V
    // Products read the first parts of queries from shared memory, or from registers, where codes are turned.
    static constexpr int HIGH_PANELS = Config::QUERIES_IN_REGISTERS ? Keys::PANELS : 1;
    u32 high[HIGH_PANELS][4];  // as left operands of 16 dims
    // The second parts of queries: in registers, or, of many dims or rows, found again for each tile.
    static constexpr bool KEEPS_LOW = K_DIM <= 128 && Config::WARPGROUPS == 2;
    static constexpr int LOW_PANELS = KEEPS_LOW ? Keys::PANELS : Config::WARPGROUPS > 2 ? 1 : K_DIM <= 192 ? 4 : 2;
    using Scores = float[SUMS_OF_TILE];
    using Weights = u32[TILE / 16][4];  // as left operands of 16 tokens
    using Low = u32[LOW_PANELS][4];  // second parts of queries, as left operands of 16 dims

    // Calls take(panel, i, h, first, second) for the pairs of a thread's queries, in two parts.
    template <class Take> METHOD void each_query_pair(const WorkRange& range, Take take) {
        QueryRow row[2];
#pragma unroll
        for (int h = 0; h < 2; h++) row[h] = unscaled_row(range, h);
        float elements[2][Keys::PANELS][4];
        load_elements(row, lane, elements);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float (&x)[Keys::PANELS][4] = elements[h];
            set_lift(range, h, FloatRows::lift_of(rotate_row(x, lane).of_part[0]));
#pragma unroll
            for (int panel = 0; panel < Keys::PANELS; panel++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 first, second;
                    split_pair<IS_BF16>(x[panel][2 * i] * up[h], x[panel][2 * i + 1] * up[h], first, second);
                    take(panel, i, h, first, second);
                }
        }
    }
    METHOD void load_rows(const WorkRange& range) {
        find_rows(range, query_block(p, range.b));
        if (Config::WARPGROUPS == 2) has_low = are_in_two_parts();  // else many_rows.cu has found it
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);  // products with the last queries are done
        if constexpr (Config::UNPACKS) {
            // In the order of dims in which codes are turned.
            const u32 to = queries + (16 * warp + lane / 4) * 16 + 4 * (lane % 4);
            each_query_pair(range, [&](int panel, int i, int h, u32 first, u32) {
                if (Config::QUERIES_IN_REGISTERS) high[panel % HIGH_PANELS][2 * i + h] = first;
                else sts32(to + (2 * panel + i) * 64 * 16 + h * 128, first);
            });
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) set_lift(range, h, float_rows().store_row(unscaled_row(range, h), queries + (16 * warp + lane / 4 + 8 * h) * 16));
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // Where the warpgroup reads: stages of this ring, a step's at a time.
    METHOD auto& sides() {
        if constexpr (Config::UNPACKS) return unpacked;
        else return ring;
    }
    // K (side 0) or V (side 1) of the tile that a ring is at.
    template <class Ring> METHOD void wait_side(const Ring& ring, int side) const { barrier_wait(ring.full(side), ring.phase); }
    template <class Ring> METHOD void release_side(const Ring& ring, int side) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(ring.empty(side));
    }
    // Where K's 16 dims from 16i on begin in a side.
    DEVICE constexpr int dims_at(int i) { return IN_ROWS ? i * 32 / SWIZZLE * TILE * SWIZZLE + i * 32 % SWIZZLE : i * 2 * TILE * 16; }
    // The second parts of some panels.
    METHOD void find_low(const WorkRange& range, int first, Low& low) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            QueryRow row = unscaled_row(range, h);
#pragma unroll
            for (int n = 0; n < LOW_PANELS; n++) {
                float x[4];
                if (row.dtype == Dtype::F32) row.template pairs<false>((first + n) * 16 + 2 * (lane % 4), x);
                else row.template pairs<true>((first + n) * 16 + 2 * (lane % 4), x);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 of_first;
                    split_pair<IS_BF16>(x[2 * i] * up[h], x[2 * i + 1] * up[h], of_first, low[n][2 * i + h]);
                }
            }
        }
    }
    DEVICE u64 keys_at(u32 keys) { return IN_ROWS ? swizzled_matrices<SWIZZLE>(keys, 16) : matrices(keys, TILE * 16); }
    // Adds their products to those of the first parts, which are under way; keys(panel): where K's 16 dims of a panel begin.
    template <class KeysAt> METHOD void multiply_low(const WorkRange& range, KeysAt keys, Scores& s) const {
#pragma unroll 1
        for (int first = 0; first < Keys::PANELS; first += LOW_PANELS) {
            products_wait<0>();  // with the registers of `low`, too
            products_landed(s);
            Low low;
            find_low(range, first, low);
            products_begin();
#pragma unroll
            for (int n = 0; n < LOW_PANELS; n++) FloatProducts<IS_BF16, false>::multiply(s, low[n], keys(first + n), true);
            products_commit();
        }
    }
    // `queries`, `keys`: where the first parts of queries and the tile's K are.
    template <bool HAS_LOW> METHOD void multiply_keys(u32 queries, u32 keys, const Low& low, Scores& s) const {
        using Product = FloatProducts<IS_BF16, false>;
        const u64 a = matrices(queries, 64 * 16), b = keys_at(keys);
        products_begin();
#pragma unroll
        for (int i = 0; i < Keys::PANELS; i++)
            if constexpr (Config::QUERIES_IN_REGISTERS) Product::multiply(s, high[i], matrices_behind(b, dims_at(i)), i > 0);
            else Product::multiply_shared(s, matrices_behind(a, i * 2 * 64 * 16), matrices_behind(b, dims_at(i)), i > 0);
        if (HAS_LOW && KEEPS_LOW)
#pragma unroll
            for (int i = 0; i < Keys::PANELS; i++) Product::multiply(s, low[i % LOW_PANELS], matrices_behind(b, dims_at(i)), true);
        products_commit();
    }
    // `values`: where the tile's V is.
    METHOD void multiply_values(u32 values, const Weights& weights) {
        const u64 b = IN_ROWS ? swizzled_matrices<SWIZZLE>(values, TILE * SWIZZLE) : BY_DIMS ? matrices(values, 128, TILE * 16) : matrices(values, K_DIM * 16);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE / 16; i++)
            FloatProducts<IS_BF16, BY_DIMS>::multiply(o, weights[i], matrices_behind(b, i * 16 * (IN_ROWS ? SWIZZLE : BY_DIMS ? 16 : 2 * K_DIM)), true);
        products_commit();
    }
    // Zeros in place of V's tokens that do not exist: their bytes may be a NaN, and 0·NaN is not 0. `tokens`: those that do, from the tile's first on. Of rows, the last one
    // fills up its tile.
    METHOD void clear_missing(u32 values, int tokens) const {
        if (IN_ROWS || tokens >= TILE) return;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < V_DIM / 8 * TILE; i += 128)
            if (i % TILE >= tokens) sts128(values + i * 16, {0.0f, 0.0f, 0.0f, 0.0f});
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // Gives the row's maximum a new value, and the factor of what was summed before.
    METHOD float raise_maximum(int h, float now) {
        const float alpha = approximate_exp2(m[h] - (now > MINUS_INFINITY ? now : 0.0f));
        m[h] = now;
        return alpha;
    }
    // Makes maxima powers of two with whole exponents, as merges of spans expect them.
    METHOD void make_exponents_whole() {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = raise_maximum(h, ceilf(m[h]));
            l[h] = l[h] * factor[h];
        }
        rescale(factor);
    }
    // The rows' maxima; gives what scores are multiplied by and `base`, which they then lose, and the factors of what was summed before.
    METHOD void find_maxima(Scores& s, int index, float (&scale)[2], float (&base)[2], float (&alpha)[2]) {
        scale[0] = rows.scale[0];
        scale[1] = rows.scale[1];
        if (HAS_SCORE_MODS) {
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++) s[i] = s[i] * scale[i / 2 % 2];
            modify_scores(s, index);
            scale[0] = scale[1] = 1.0f;
        }
        if (!rows.see_all(index * TILE)) each_hidden(index, [&](int i) { s[i] = MINUS_INFINITY; });
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float largest = quad_max(thread_max(s, h)) * scale[h] - LIFT, now = largest > m[h] + MOST_ABOVE ? largest : m[h];
            base[h] = now > MINUS_INFINITY ? now : 0.0f;
            alpha[h] = raise_maximum(h, now);
        }
    }
    // Multiplies what was summed before.
    METHOD void rescale(const float (&alpha)[2]) {
        if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f))
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * alpha[i / 2 % 2];
    }
    // Makes scores weights, and sums them; gives the factors of what was summed before.
    METHOD void weigh(Scores& s, int index, float (&alpha)[2]) {
        float scale[2], base[2], sum[2][2] = {};
        find_maxima(s, index, scale, base, alpha);
#pragma unroll
        for (int i = 0; i < SUMS_OF_TILE; i++) {
            const int h = i / 2 % 2;
            s[i] = approximate_exp2(fmaf(s[i], scale[h], -base[h]));
            sum[h][i % 2] = sum[h][i % 2] + s[i];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = fmaf(l[h], alpha[h], sum[h][0] + sum[h][1]);
    }
    // Weights as operands.
    METHOD void round_weights(const Scores& s, Weights& weights) const {
#pragma unroll
        for (int i = 0; i < TILE / 16; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int at = 8 * i + 2 * n;
                weights[i][n] = IS_BF16 ? bf16_pair(s[at], s[at + 1]) : f16_pair(s[at], s[at + 1]);
            }
    }

    // Whether products with the K of the next tile are under way while a tile is weighed, which takes registers for two tiles' scores.
    template <bool HAS_LOW> static constexpr bool KEYS_AHEAD = !HAS_LOW && !Config::UNPACKS && K_DIM <= 128 && Config::TEAM_WARPGROUPS == 2;

    template <class Ring> METHOD void wait_values(const Ring& values, const WorkRange& range, int index) const {
        wait_side(values, 1);
        if (!Config::UNPACKS) clear_missing(values.at(1), range.kv_len - index * TILE);
    }
    // Products with a tile's V are done.
    template <class Ring> METHOD void release_values(Ring& values) {
        products_landed(o);
        release_side(values, 1);
        values.advance(SIDES);
    }
    // Where a warpgroup reads: the stages of the next K, and of the V whose weights come next.
    template <class Ring> struct Place {
        Ring keys, values;
    };
    // Both are tested at once, as a test takes longer than its issue.
    template <bool OF_KEYS, bool OF_VALUES, class Place> METHOD void wait_stages(const Place& at) const {
        bool are_there = true;
        if (OF_KEYS) are_there &= barrier_test(at.keys.full(), at.keys.phase);
        if (OF_VALUES) are_there &= barrier_test(at.values.full(1), at.values.phase);
        if (__builtin_expect(are_there, 1)) return;
        if (OF_KEYS) wait_side(at.keys, 0);
        if (OF_VALUES) wait_side(at.values, 1);
    }
    // Weighs the tile `index`, whose scores are s, while products with the V of the tile before it and with the K of the next one are under way; leaves weights.
    // No branch of a warp's own is among them: the compiler would wait for each product.
    template <bool IS_FIRST, bool IS_LAST, class Place> METHOD void add_tile(int index, Place& at, Scores& s, Scores& next, Weights& weights) {
        float alpha[2];
        if (!IS_LAST) at.keys.advance(SIDES);
        const u32 q = same_for_all(queries), k = same_for_all(at.keys.at()), v = same_for_all(at.values.at(1));
        wait_stages<!IS_LAST, !IS_FIRST>(at);
        if (!IS_LAST) multiply_keys<false>(q, k, {}, next);
        if (!IS_FIRST) multiply_values(v, weights);
        weigh(s, index, alpha);
        begin_behind(l[0] + l[1]);
        products_wait<0>();
        if (!IS_LAST) {
            products_landed(next);
            release_side(at.keys, 0);
        }
        if (!IS_FIRST) {
            release_values(at.values);
            rescale(alpha);
        }
        round_weights(s, weights);
    }
    // Adds tiles, with the K of each next one ahead; leaves the weights of the last one.
    template <class Place> METHOD void add_keys_ahead(int index, int end, Place& at, Weights& weights) {
        Scores a, b;
        wait_side(at.keys, 0);
        multiply_keys<false>(same_for_all(queries), same_for_all(at.keys.at()), {}, a);
        products_wait<0>();
        products_landed(a);
        release_side(at.keys, 0);
        if (index + 1 == end) return add_tile<true, true>(index, at, a, b, weights);
        add_tile<true, false>(index, at, a, b, weights);
#pragma unroll 1
        for (index++; index + 2 < end; index += 2) {
            add_tile<false, false>(index, at, b, a, weights);
            add_tile<false, false>(index + 1, at, a, b, weights);
        }
        if (index + 1 < end) {
            add_tile<false, false>(index, at, b, a, weights);
#pragma unroll
            for (int i = 0; i < SUMS_OF_TILE; i++) b[i] = a[i];
            index++;
        }
        add_tile<false, true>(index, at, b, a, weights);
    }
    // Scores of the tile that `at` is at: products are under way, unless there are second parts of many dims.
    template <bool HAS_LOW> METHOD void begin_keys(const WorkRange& range, u32 q, u32 keys, const Low& low, Scores& s) const {
        multiply_keys<HAS_LOW>(q, keys, low, s);
        if (HAS_LOW && !KEEPS_LOW) multiply_low(range, [&](int panel) { return matrices_behind(keys_at(keys), dims_at(panel)); }, s);
    }
    template <bool HAS_LOW> METHOD void keep_low(const WorkRange& range, Low& low) {
        if (HAS_LOW && KEEPS_LOW) each_query_pair(range, [&](int panel, int i, int h, u32, u32 second) { low[panel % LOW_PANELS][2 * i + h] = second; });
    }
    // The same with room for one tile's scores: products with the V of the tile before are under way while a tile is weighed.
    template <bool HAS_LOW, class Place> METHOD void add_one_by_one(const WorkRange& range, int index, int end, Place& at, Weights& weights) {
        Low low;
        keep_low<HAS_LOW>(range, low);
        Scores s;
        float alpha[2];
        const auto weigh_keys = [&] {
            products_landed(s);
            release_side(at.keys, 0);
            weigh(s, index, alpha);
        };
        wait_side(at.keys, 0);
        begin_keys<HAS_LOW>(range, same_for_all(queries), same_for_all(at.keys.at()), low, s);
        products_wait<0>();
        weigh_keys();
        round_weights(s, weights);
#pragma unroll 1
        for (index++; index < end; index++) {
            at.keys.advance(SIDES);
            const u32 q = same_for_all(queries), k = same_for_all(at.keys.at()), v = same_for_all(at.values.at(1));
            wait_stages<true, true>(at);
            begin_keys<HAS_LOW>(range, q, k, low, s);
            multiply_values(v, weights);
            products_wait<1>();
            weigh_keys();
            begin_behind(l[0] + l[1]);
            products_wait<0>();
            release_values(at.values);
            rescale(alpha);
            round_weights(s, weights);
        }
    }
    // The same where products are done when they are issued; the last tile's V is left, too.
    template <bool HAS_LOW, class Place> METHOD void add_in_order(const WorkRange& range, int index, int end, Place& at, Weights& weights) {
        Low low;
        keep_low<HAS_LOW>(range, low);
#pragma unroll 1
        while (true) {
            Scores s;
            float alpha[2];
            wait_side(at.keys, 0);
            begin_keys<HAS_LOW>(range, queries, at.keys.at(), low, s);
            release_side(at.keys, 0);
            weigh(s, index, alpha);
            rescale(alpha);
            round_weights(s, weights);
            if (++index == end) return;
            wait_side(at.values, 1);
            multiply_values(at.values.at(1), weights);
            release_values(at.values);
            at.keys.advance(SIDES);
        }
    }
    template <bool HAS_LOW> METHOD void add_tiles(const WorkRange& range, int index, int end) {
        Weights weights;
        auto ring = sides();
        Place<decltype(ring)> at = {ring, ring};
        index = same_for_all(index);  // what all lanes agree on must be known to the compiler
        end = same_for_all(end);
        if constexpr (!ATTN_BULK) add_in_order<HAS_LOW>(range, index, end, at, weights);
        else if constexpr (KEYS_AHEAD<HAS_LOW>) add_keys_ahead(index, end, at, weights);
        else add_one_by_one<HAS_LOW>(range, index, end, at, weights);
        wait_values(at.values, range, end - 1);  // only the last tile has tokens that do not exist
        multiply_values(same_for_all(at.values.at(1)), weights);
        products_wait<0>();
        release_values(at.values);
        sides() = at.values;
    }
    // Waits for stages and passes them on.
    METHOD void pass_tiles(const WorkRange& range, int index, int end) {
        auto& ring = sides();
#pragma unroll 1
        for (; index < end; index++) {
            wait_side(ring, 0);
            release_side(ring, 0);
            wait_values(ring, range, index);
            release_side(ring, 1);
            ring.advance(SIDES);
        }
    }
    // A span's state. Its tiles are one run, as a merge takes longer than a tile.
    METHOD void attend_span(const WorkRange& range, int index, int end) {
        clear();
        if (!multiplies()) return pass_tiles(range, index, end);
        if (index < end)
            Config::TWO_PARTS&& has_low ? add_tiles<Config::TWO_PARTS>(range, index, end) : add_tiles<false>(range, index, end);  // a sequence may have no tokens
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = quad_sum(l[h]);  // sums were those of a thread's own tokens
        make_exponents_whole();
    }
};

}  // namespace attn
