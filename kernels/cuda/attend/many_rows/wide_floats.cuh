// Tiles of many_rows.cu in floats, of wide rows: floats.cuh where the state of 64 rows of all of V's dims does not fit into the registers of a warpgroup.
//
// Both warpgroups of a team have the same 64 rows. Each multiplies the queries with all of K, weighs, and multiplies the weights with its own half of V's dims. They exchange
// nothing but queries, so that one weighs while the other multiplies.
#pragma once
#include "attend/many_rows/floats.cuh"

namespace attn {

template <bool UNPACKS> struct PartsOf {
    using Type = Ring;
};
template <> struct PartsOf<true> {
    using Type = UnpackedRing;
};

struct WideFloatTiles : FloatTiles {
    using Parts = PartsOf<Config::UNPACKS>::Type;  // the ring that products read, and a place in it
    static constexpr int PART_PANELS = Keys::PANELS / Config::K_PARTS;  // of 16 dims

    METHOD int thread_row(int h) const { return first_row + lane / 4 + 8 * h; }
    METHOD u32 row_place(int row) const { return state + row * 4; }

    // Each warpgroup loads half of the rows, which both read.
    METHOD void load_rows(const WorkRange& range) {
        find_rows(range, query_block(p, range.b));
        if (Config::WARPGROUPS == 2) has_low = are_in_two_parts();  // else many_rows.cu has found it
        team_barrier();  // products with the last queries are done
        const int row = thread_row(warpgroup);
        const QueryRow from = unscaled_row(range, warpgroup);
        const float lift = float_rows().store_row(from, queries + row * 16);
        if (lane % 4 == 0) sts32(row_place(row), float_bits(lift));
        fence_async();
        team_barrier();
#pragma unroll
        for (int h = 0; h < 2; h++) set_lift(range, h, bits_float(lds32(row_place(thread_row(h)))));
    }

    METHOD void release(const Parts& stage) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(stage.empty());
    }
    // Waits for a stage that the other warpgroup reads, and passes it on.
    METHOD void pass(const Parts& stage) const {
        stage.wait();
        release(stage);
    }
    // K of a part, and the warpgroup's dims of V.
    DEVICE u64 keys_at(u32 at) { return IN_ROWS ? swizzled_matrices<SWIZZLE>(at, 16) : matrices(at, TILE * 16); }
    DEVICE u64 values_of(u32 at) {
        return IN_ROWS ? swizzled_matrices<SWIZZLE>(at, TILE * SWIZZLE) : BY_DIMS ? matrices(at, 128, TILE * 16) : matrices(at, Config::PART_DIMS * 16);
    }
    // Products of the queries with a tile's K, whose stages come next.
    template <bool HAS_LOW> METHOD void multiply_keys(const WorkRange& range, float (&s)[SUMS_OF_TILE]) {
        const u64 q = matrices(same_for_all(queries), 64 * 16);
        u64 keys[Config::K_PARTS];
        Parts next = sides();
#pragma unroll
        for (int part = 0; part < Config::K_PARTS; part++) {
            const u64 k = keys_at(same_for_all(next.wait()));
            if (HAS_LOW) keys[part] = k;
            next.advance();
            products_begin();
#pragma unroll
            for (int i = 0; i < PART_PANELS; i++) {
                const int panel = part * PART_PANELS + i;
                FloatProducts<IS_BF16, false>::multiply_shared(s, matrices_behind(q, panel * 2 * 64 * 16), matrices_behind(k, dims_at(i)), panel > 0);
            }
        }
        products_commit();
        if constexpr (HAS_LOW)
            multiply_low(
                range, [&](int panel) { return matrices_behind(panel < PART_PANELS ? keys[0] : keys[Config::K_PARTS - 1], dims_at(panel % PART_PANELS)); }, s);
    }
    // Products of the weights with the warpgroup's dims of V, which begin at `at`: by panels of eight dims, in rows, or by panels of eight tokens.
    METHOD void multiply_values(u32 at, const Weights& weights) {
        constexpr int TOKENS = IN_ROWS ? 16 * SWIZZLE : BY_DIMS ? 16 * 16 : 2 * Config::PART_DIMS * 16;  // bytes from 16 tokens to the next ones
        const u64 v = values_of(at);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE / 16; i++) FloatProducts<IS_BF16, BY_DIMS>::multiply(o, weights[i], matrices_behind(v, i * TOKENS), true);
        products_commit();
    }
    // As of floats that are not wide, in the warpgroup's dims. Where these are K's, too, scores of such tokens are hidden. Rows of a sequence's last token fill up its tile, and
    // V's tokens that are turned into f16 are cleared by that.
    METHOD void clear_missing(u32 at, int tokens) const {
        if constexpr (IN_ROWS || !BY_DIMS) return;
        if (tokens >= TILE) return;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < Config::PART_DIMS / 8 * TILE; i += 128)
            if (i % TILE >= tokens) sts128(at + i * 16, {0.0f, 0.0f, 0.0f, 0.0f});
        fence_async();
        barrier_of<128>(WARPGROUP_BARRIER + warpgroup);
    }

    METHOD void release_keys() {
#pragma unroll
        for (int part = 0; !LATENTS && part < Config::K_PARTS; part++) {
            release(sides());
            sides().advance();
        }
    }
    // Calls take(where the warpgroup's dims of V begin) for the tile whose V comes next, and releases its stages.
    template <class Take> METHOD void take_values(const WorkRange& range, int index, Take take) {
        Parts own = sides(), other = own;
        if (!LATENTS) {
            own.advance(warpgroup);
            other.advance(1 - warpgroup);
        }
        const u32 at = same_for_all(own.wait()) + (LATENTS ? warpgroup * (Config::PART_DIMS / 8 * TILE * 16) : 0);
        clear_missing(at, range.kv_len - index * TILE);
        take(at);
        release(own);
        if (!LATENTS) pass(other);
#pragma unroll
        for (int i = 0; i < larger(Config::V_STAGES, 1); i++) sides().advance();
    }
    // Adds the tiles from `index` to `end`, which come next. Products with V are waited for before those with the next K begin: the other warpgroup multiplies meanwhile, and
    // the tile's stages are free sooner.
    template <bool HAS_LOW> METHOD void add_tiles(const WorkRange& range, int index, int end) {
        Weights weights;
#pragma unroll 1
        for (; index < end; index++) {
            Scores s;
            multiply_keys<HAS_LOW>(range, s);
            products_wait<0>();
            products_landed(s);
            release_keys();
            float alpha[2];
            weigh(s, index, alpha);
            rescale(alpha);
            round_weights(s, weights);
            take_values(range, index, [&](u32 at) {
                multiply_values(at, weights);
                products_wait<0>();
                products_landed(o);
            });
        }
    }
    // Waits for the stages of tiles and passes them on.
    METHOD void pass_tiles(const WorkRange& range, int index, int end) {
#pragma unroll 1
        for (; index < end; index++) {
#pragma unroll
            for (int part = 0; !LATENTS && part < Config::K_PARTS; part++) {
                pass(sides());
                sides().advance();
            }
            take_values(range, index, [](u32) {});
        }
    }
    // A span's state: as of floats that are not wide.
    METHOD void attend_span(const WorkRange& range, int index, int end) {
        clear();
        if (!multiplies()) return pass_tiles(range, index, end);
        Config::TWO_PARTS&& has_low ? add_tiles<Config::TWO_PARTS>(range, index, end) : add_tiles<false>(range, index, end);
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = quad_sum(l[h]);
        make_exponents_whole();
    }
};

}  // namespace attn
