// Tiles of many_rows.cu in 16-bit floats, of latents: wide_floats.cuh where K has 64 dims that V lacks, in place of which a tile's weights lie.
//
// Both warpgroups of a team have the same 64 rows, and each its own half of V's dims. They take tiles in turns: one multiplies the queries with a tile's K and leaves
// weights and maxima for both, so that no product is found twice. Then both multiply the weights with V. Tiles add up in their order, in both states alike.
#pragma once
#include "attend/many_rows/wide_floats.cuh"

namespace attn {

struct PairedFloatTiles : WideFloatTiles {
    static_assert(!Config::HAS_PAIRS || Config::STAGES >= 2, "select.rs: else one warpgroup would wait for the other's tile");

    static_assert(!Config::HAS_PAIRS || STATE_BYTES >= 2 * 64 * 4, "maxima of both warpgroups");

    // Behind V's dims of a tile: its weights, as left operands are read from shared memory.
    static constexpr int WEIGHTS = V_DIM * TILE * 2;
    // The largest scores of a row by the last tile that this warpgroup has weighed.
    METHOD u32 maxima_place(int of, int h) const { return state + (of * 64 + thread_row(h)) * 4; }
    METHOD void own_barrier() const { barrier_of<128>(WARPGROUP_BARRIER + warpgroup); }

    // Begins products of the weights in a stage with the warpgroup's dims of V there. What was summed before is rescaled: its products are waited for.
    METHOD void multiply_values(const WorkRange& range, const Parts& stage, int index, const float (&alpha)[2]) {
        rescale(alpha);
        const u32 at = same_for_all(stage.at()), dims = at + warpgroup * (Config::PART_DIMS / 8 * TILE * 16);
        clear_missing(dims, range.kv_len - index * TILE);
        const u64 a = matrices(at + WEIGHTS, 64 * 16), v = values_of(dims);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE / 16; i++)
            FloatProducts<IS_BF16, true>::multiply_shared(o, matrices_behind(a, i * 2 * 64 * 16), matrices_behind(v, i * 16 * 16), true);
        products_commit();
    }
    METHOD void await_values(const Parts& stage) {
        products_wait<0>();
        products_landed(o);
        release(stage);
    }

    // Leaves the weights of a tile with these scores and the rows' maxima, for both warpgroups.
    METHOD void leave_weights(const Parts& stage, int index, Scores& s, float (&alpha)[2]) {
        Weights weights;
        weigh(s, index, alpha);
        round_weights(s, weights);
        own_barrier();  // products with all of K are done
        const u32 to = stage.at() + WEIGHTS + thread_row(0) * 16 + 4 * (lane % 4);
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) sts32(to + i / 2 * (64 * 16) + i % 2 * (8 * 16), weights[i / 4][i % 4]);
        if (lane % 4 == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) sts32(maxima_place(warpgroup, h), float_bits(m[h]));
        fence_async();
        own_barrier();
        barrier_arrive_of<256>(WEIGHTS_BARRIER + warpgroup);
    }
    // Waits for the weights of a tile of the other warpgroup's, and adds its products with V.
    METHOD void take_other(const WorkRange& range, const Parts& stage, int index) {
        barrier_of<256>(WEIGHTS_BARRIER + 1 - warpgroup);
        stage.wait();  // at once: the other warpgroup has read it
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            alpha[h] = raise_maximum(h, bits_float(lds32(maxima_place(1 - warpgroup, h))));
            l[h] = l[h] * alpha[h];
        }
        multiply_values(range, stage, index, alpha);
    }
    // The first warpgroup's tile comes first: V of the other's is multiplied when that is weighed.
    template <bool HAS_LOW> METHOD void add_own(const WorkRange& range, int index) {
        Scores s;
        float alpha[2];
        multiply_keys<HAS_LOW>(range, s);
        products_wait<0>();
        products_landed(s);
        leave_weights(sides(), index, s, alpha);
        multiply_values(range, sides(), index, alpha);
    }
    template <bool HAS_LOW> METHOD void lead(const WorkRange& range, int index, int end) {
        Parts& stage = sides();
#pragma unroll 1
        for (; index + 1 < end; index += 2) {
            add_own<HAS_LOW>(range, index);
            Parts other = stage;
            other.advance();
            await_values(stage);
            take_other(range, other, index + 1);
            await_values(other);
            stage.advance();
            stage.advance();
        }
        if (index == end) return;
        add_own<HAS_LOW>(range, index);
        await_values(stage);
        stage.advance();
    }
    // The second one's products with K are under way while the first one weighs, and those with V of the first one's tile while it weighs itself.
    template <bool HAS_LOW> METHOD void follow(const WorkRange& range, int index, int end) {
        Parts& stage = sides();
#pragma unroll 1
        for (; index + 1 < end; index += 2) {
            const Parts other = stage;
            Scores s;
            float alpha[2];
            stage.advance();
            multiply_keys<HAS_LOW>(range, s);
            take_other(range, other, index);
            products_wait<1>();
            products_landed(s);
            leave_weights(stage, index + 1, s, alpha);
            await_values(other);
            multiply_values(range, stage, index + 1, alpha);
            await_values(stage);
            stage.advance();
        }
        if (index == end) return;
        take_other(range, stage, index);
        await_values(stage);
        stage.advance();
    }
    template <bool HAS_LOW> METHOD void add_tiles(const WorkRange& range, int index, int end) {
        warpgroup == 0 ? lead<HAS_LOW>(range, index, end) : follow<HAS_LOW>(range, index, end);
    }
    // A span's state: as of floats that are not wide. Each warpgroup has summed the weights of its tiles.
    METHOD void attend_span(const WorkRange& range, int index, int end) {
        clear();
        Config::TWO_PARTS&& has_low ? add_tiles<Config::TWO_PARTS>(range, index, end) : add_tiles<false>(range, index, end);
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = quad_sum(l[h]);
        team_barrier();  // maxima are read
        if (lane % 4 == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) sts32(maxima_place(warpgroup, h), float_bits(l[h]));
        team_barrier();
#pragma unroll
        for (int h = 0; h < 2; h++) l[h] = bits_float(lds32(maxima_place(0, h))) + bits_float(lds32(maxima_place(1, h)));
        make_exponents_whole();
        team_barrier();  // the next span's maxima take the place of these
    }
};

}  // namespace attn
