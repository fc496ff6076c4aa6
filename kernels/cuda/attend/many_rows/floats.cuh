// Tiles of many_rows.cu in floats: formats of f16, bf16 or fp8, and what dequantize.cu made f16 of (docs/arithmetic.md, section 11). The arithmetic does not
// define their bits on a GPU; tests/src/check.rs bounds their error.
//
// Products are of 16-bit floats, in bf16 for bf16 and in f16 for all else, and sums are f32. A query is one such float where it came as one, or where K was
// rounder than it, else the sum of two. A weight is one, relative to the row's running maximum, so that products add up in the state. Codes are f16 by then.
#pragma once
#include "attend/many_rows/float_queries.cuh"

namespace attn {

struct FloatTiles : FloatQueries {
    static constexpr int LIFT = IS_BF16 ? 0 : 14;  // weights of f16 are as large as its range allows: small ones then keep their bits
    static constexpr bool IN_ROWS = PAGE == 0 && !Config::UNPACKS;           // products read rows as the copy engine puts them into a stage
    static constexpr int SWIZZLE = IN_ROWS ? Stage::K_SWIZZLE : 128;
    static constexpr bool BY_DIMS = !Config::UNPACKS || Stage::V_TOKEN_MAJOR;  // V lies by panels of eight dims, or in rows of them, else by panels of eight tokens
    static constexpr int STEP = Config::FLOAT_STEP, SIDES = 2 * STEP;  // tiles of a step, and their stages in the ring: K and V of tile after tile
    // Products read the first parts of queries from shared memory, which leaves registers for a second tile; or from registers, where codes are turned.
    static constexpr int HIGH_PANELS = Config::QUERIES_IN_REGISTERS ? Keys::PANELS : 1;
    u32 high[HIGH_PANELS][4];  // as left operands of 16 dims
    bool has_low;
    // The second parts of queries: in registers, or, of many dims, found again for each tile.
    static constexpr bool KEEPS_LOW = K_DIM <= 128;
    static constexpr int LOW_PANELS = KEEPS_LOW ? Keys::PANELS : K_DIM <= 192 ? 4 : 2;
    template <int TILES> using Scores = float[TILES][SUMS_OF_TILE];
    template <int TILES> using Weights = u32[TILES * 4][4];  // as left operands of 16 tokens
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
            lift_row(range, rotate_row(x, lane).of_part[0], up[h], rows.scale[h]);
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
        find_rows(range);
        has_low = are_in_two_parts();
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
            for (int h = 0; h < 2; h++) {
                const float2 of_row = store_row(range, unscaled_row(range, h), queries + (16 * warp + lane / 4 + 8 * h) * 16);
                up[h] = of_row.x;
                rows.scale[h] = of_row.y;
            }
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // Where the warpgroup reads: stages of this ring, a step's at a time.
    METHOD auto& sides() {
        if constexpr (Config::UNPACKS) return unpacked;
        else return ring;
    }
    // Waits for K or V of TILES tiles, the first of which is the side-th of the step. Barriers are tested
    // together, as a test takes longer than its issue.
    template <int TILES, class Ring> METHOD void wait_sides(const Ring& ring, int side) const {
        bool are_there = true;
#pragma unroll
        for (int t = 0; t < TILES; t++) are_there &= barrier_test(ring.full(side + 2 * t), ring.phase);
        if (are_there) return;
#pragma unroll
        for (int t = 0; t < TILES; t++) barrier_wait(ring.full(side + 2 * t), ring.phase);
    }
    template <int TILES, class Ring> METHOD void release_sides(const Ring& ring, int side) const {
        __syncwarp();
        if (lane < ARRIVALS)
#pragma unroll
            for (int t = 0; t < TILES; t++) barrier_arrive(ring.empty(side + 2 * t));
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
    // Adds their products to those of the first parts, which are under way; keys(panel): where K's 16 dims of a panel begin.
    template <class KeysAt> METHOD void multiply_low(const WorkRange& range, KeysAt keys, float (&s)[SUMS_OF_TILE]) const {
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
    // `keys`: where the first tile's K is.
    template <bool HAS_LOW, int TILES> METHOD void multiply_keys(const WorkRange& range, u32 keys, const Low& low, Scores<TILES>& s) const {
        using Product = FloatProducts<IS_BF16, false>;
        u64 a = matrices(same_for_all(queries), 64 * 16), b = IN_ROWS ? swizzled_matrices<SWIZZLE>(keys, 16) : matrices(keys, TILE * 16);
        products_begin();
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < Keys::PANELS; i++) {
                u64 of_tile = matrices_behind(b, t * 2 * SIDE_BYTES + dims_at(i));
                if constexpr (Config::QUERIES_IN_REGISTERS) Product::multiply(s[t], high[i], of_tile, i > 0);
                else Product::multiply_shared(s[t], matrices_behind(a, i * 2 * 64 * 16), of_tile, i > 0);
            }
        if (HAS_LOW && KEEPS_LOW)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < Keys::PANELS; i++) Product::multiply(s[t], low[i % LOW_PANELS], matrices_behind(b, t * 2 * SIDE_BYTES + dims_at(i)), true);
        products_commit();
        if (HAS_LOW && !KEEPS_LOW) multiply_low(range, [&](int panel) { return matrices_behind(b, dims_at(panel)); }, s[0]);
    }
    // `values`: where the first tile's V is.
    template <int TILES> METHOD void multiply_values(u32 values, const Weights<TILES>& weights) {
        u64 b = IN_ROWS ? swizzled_matrices<SWIZZLE>(values, TILE * SWIZZLE) : BY_DIMS ? matrices(values, 128, TILE * 16) : matrices(values, K_DIM * 16);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
            FloatProducts<IS_BF16, BY_DIMS>::multiply(o, weights[i],
                                                      matrices_behind(b, i / 4 * 2 * SIDE_BYTES + i % 4 * 16 *
                                                                                                      (IN_ROWS   ? SWIZZLE
                                                                                                       : BY_DIMS ? 16
                                                                                                                 : 2 * K_DIM)),
                                                      true);
        products_commit();
    }
    // Zeros in place of V's tokens that do not exist: their bytes may be a NaN, and 0·NaN is not 0. `tokens`: those that do, from the first tile's first on.
    // Of rows, the last one fills up its tile, so that only whole tiles are missing.
    template <int TILES> METHOD void clear_missing(u32 values, int tokens) const {
        if (IN_ROWS) tokens = (tokens + TILE - 1) / TILE * TILE;
        if (tokens >= TILES * TILE) return;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < TILES * V_DIM / 8 * TILE; i += 128) {
            int t = i / (V_DIM / 8 * TILE);
            if (t * TILE + i % TILE >= tokens) sts128(values + i * 16 + t * (2 * SIDE_BYTES - TILE * V_DIM * 2), {0.0f, 0.0f, 0.0f, 0.0f});
        }
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    // The rows' maxima; gives what scores are multiplied by and `base`, which they then lose, and the factors of what was summed before.
    template <int TILES> METHOD void find_maxima(Scores<TILES>& s, int index, float (&scale)[2], float (&base)[2], float (&alpha)[2]) {
        scale[0] = rows.scale[0];
        scale[1] = rows.scale[1];
        if (HAS_SCORE_MODS) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int i = 0; i < SUMS_OF_TILE; i++) s[t][i] = s[t][i] * scale[i / 2 % 2];
                modify_scores(s[t], index + t);
            }
            scale[0] = scale[1] = 1.0f;
        }
        if (!rows.see_all(index * TILE, TILES * TILE))
#pragma unroll
            for (int t = 0; t < TILES; t++) each_hidden(index + t, [&](int i) { s[t][i] = MINUS_INFINITY; });
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = thread_max(s[0], h);
#pragma unroll
            for (int t = 1; t < TILES; t++) largest = fmaxf(largest, thread_max(s[t], h));
            float now = fmaxf(m[h], ceilf(quad_max(largest) * scale[h]) - LIFT);
            alpha[h] = pow2(m[h] - now);
            m[h] = now;
            base[h] = now > MINUS_INFINITY ? now : 0.0f;
        }
    }
    // A pair of weights in 16 bits; adds them to their row's sum.
    DEVICE u32 weight_pair(float x, float y, float& sum) {
        if constexpr (IS_BF16) {
            // What is multiplied is what is summed: rounding to 8 bits then leaves a lone weight's value as it is.
            u32 pair = bf16_pair(x, y);
            sum = sum + (bits_float(pair << 16) + bits_float(pair & 0xffff0000));
            return pair;
        } else {
            sum = sum + (x + y);
            return f16_pair(x, y);
        }
    }
    // Multiplies what was summed before.
    METHOD void rescale(const float (&alpha)[2]) {
        if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f))
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = o[i] * alpha[i / 2 % 2];
    }
    // Weights of a step, and their sums. Calls take(what `rescale` needs) before.
    template <int TILES, class Take> METHOD void weigh(Scores<TILES>& s, int index, Weights<TILES>& weights, Take take) {
        float scale[2], base[2], alpha[2], sum[2] = {0.0f, 0.0f};
        find_maxima<TILES>(s, index, scale, base, alpha);
        take(alpha);
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int at = 8 * (i % 4) + 4 * (n / 2) + 2 * (n % 2), h = n % 2;
                auto weight = [&](float x) { return approximate_exp2(fmaf(x, scale[h], -base[h])); };
                weights[i][n] = weight_pair(weight(s[i / 4][at]), weight(s[i / 4][at + 1]), sum[h]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = fmaf(l[h], alpha[h], sum[h]);
    }

    // The two warpgroups of a team take turns with products, so that one weighs while the other multiplies. The first has the first turn.
    static constexpr bool TAKES_TURNS = ATTN_BULK && Config::TEAM_WARPGROUPS > 1 && !Config::IS_WIDE && ARRIVALS == 1;
    METHOD void take_turn() const {
        if (TAKES_TURNS) barrier_of<256>(TURN_BARRIER + warpgroup);
    }
    METHOD void pass_turn() const {
        if (TAKES_TURNS) barrier_arrive_of<256>(TURN_BARRIER + 1 - warpgroup);
    }
    METHOD void start() const {
        if (warpgroup == 1) pass_turn();
    }
    METHOD void finish() const {
        if (warpgroup == 0) take_turn();
    }

    // Adds TILES tiles of a step, from its tile `first` on. Products with their V are under way behind it, and `held` is that V's stage; before it,
    // that of the last such products, or -1.
    template <bool HAS_LOW, int TILES> METHOD void add_tiles(const WorkRange& range, int index, int first, const Low& low, Weights<TILES>& weights, int& held) {
        auto& ring = sides();
        Scores<TILES> s;
        int side = 2 * first;
        u32 at = same_for_all(ring.at(side));
        wait_sides<TILES>(ring, side);
        multiply_keys<HAS_LOW, TILES>(range, at, low, s);
        products_wait<0>();
        pass_turn();
        products_landed(o);
#pragma unroll
        for (int t = 0; t < TILES; t++) products_landed(s[t]);
        if (held >= 0) release_sides<TILES>(ring, held - ring.stage);
        release_sides<TILES>(ring, side);
        if (ATTN_BULK) held = ring.stage + side + 1;
        weigh<TILES>(s, index + first, weights, [&](const float (&alpha)[2]) { rescale(alpha); });
        wait_sides<TILES>(ring, side + 1);
        // The second warpgroup's turn comes behind the first one's, which has cleared the same stages.
        if (!Config::UNPACKS && (!TAKES_TURNS || warpgroup == 0)) clear_missing<TILES>(at + SIDE_BYTES, range.kv_len - (index + first) * TILE);
        take_turn();
        multiply_values<TILES>(at + SIDE_BYTES, weights);
        if (!ATTN_BULK) release_sides<TILES>(ring, side + 1);  // these products have been waited for
    }
    // Adds tiles a step at a time, or one, with two parts of queries, for lack of registers. Tiles behind the last are hidden. Products with V are under way
    // with those of the next K, while the other warpgroup weighs. No branch of a warp's own is among them: the compiler would wait for each product.
    template <bool HAS_LOW> METHOD void add_steps(const WorkRange& range, int index, int end) {
        constexpr int TILES = HAS_LOW ? 1 : STEP;
        Low low;
        if (HAS_LOW && KEEPS_LOW) each_query_pair(range, [&](int panel, int i, int h, u32, u32 second) { low[panel % LOW_PANELS][2 * i + h] = second; });
        Weights<TILES> weights;
        int held = -1;
        take_turn();
#pragma unroll 1
        for (; index < end; index += STEP) {
#pragma unroll
            for (int first = 0; first < STEP; first += TILES) add_tiles<HAS_LOW, TILES>(range, index, first, low, weights, held);
            sides().advance(SIDES);
        }
        products_wait<0>();
        pass_turn();
        products_landed(o);
        if (held >= 0) release_sides<TILES>(sides(), held - sides().stage);
    }
    // Waits for stages and passes them on.
    METHOD void pass_steps(const WorkRange& range, int index, int end) {
        auto& ring = sides();
#pragma unroll 1
        for (; index < end; index += STEP) {
            wait_sides<STEP>(ring, 0);
            release_sides<STEP>(ring, 0);
            wait_sides<STEP>(ring, 1);
            if (!Config::UNPACKS) clear_missing<STEP>(ring.at(1), range.kv_len - index * TILE);
            release_sides<STEP>(ring, 1);
            ring.advance(SIDES);
        }
    }
    // A span's state. Its tiles are one run, as a merge takes longer than a tile.
    METHOD void attend_span(const WorkRange& range, int index, int end) {
        clear();
        if (!multiplies()) return pass_steps(range, index, end);
        has_low ? add_steps<Config::TWO_PARTS>(range, index, end) : add_steps<false>(range, index, end);
        // Sums were those of a thread's own tokens.
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = quad_sum(l[h]);
    }
};

}  // namespace attn
