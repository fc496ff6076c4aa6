// Tiles of many_rows.cu in integers, of wide rows: sections 3 to 6 of docs/arithmetic.md where a warpgroup's registers do not hold the states of 64 rows.
//
// A tile's weights depend on no other tile. So a team goes through a span twice: first its warpgroups take turns with the tiles, multiply queries with keys and leave the
// weights of all 64 rows in shared memory (SpanMemory); then each multiplies them with its share of V's dims, part after part, and folds and merges the part's states in
// registers, so that K and V are read once. Between the two each thread finds the factors of a row's folds in one segment.
#pragma once
#include "attend/many_rows/weights.cuh"

namespace attn {

static_assert(!INTEGER || !Config::IS_WIDE || GROUP_PANELS % 2 == 0, "a product is of one group");
static_assert(!INTEGER || !Config::IS_WIDE || (Keys::BITS == 8 && Values::BITS == 8 && Keys::PANELS % (2 * Config::K_PARTS) == 0), "select.rs");
static_assert(!INTEGER || !Config::IS_WIDE || Config::MERGE_THREADS == SPAN * 64, "a thread has a segment of a row: find_factors");

struct WideTiles : IntegerRows {
    // Of shared memory: of SpanMemory, and what lies there for a tile's row.
    METHOD u32 span_memory(int at) const { return state + at; }
    // Numbers of a segment's tiles lie side by side.
    METHOD u32 row_place(int of, int tile, int row) const { return span_memory(of) + ((tile >> SEGMENT_SHIFT) * 64 + row) * 16 + tile % 4 * 4; }
    METHOD u32 weights_place(int tile) const { return span_memory(SpanMemory::WEIGHTS) + tile * (TILE * 64); }
    METHOD int thread_row(int h) const { return first_row + lane / 4 + 8 * h; }

    // Addresses in shared memory are found again: the compiler would find those of all phases at once, and keep them in registers that it lacks for the states.
    METHOD void forget_addresses() {
        state = opaque(state);
        lane = opaque(lane);
    }

    // Each warpgroup loads half of the rows, whose queries and numbers all of them read.
    METHOD void load_rows(const WorkRange& range) {
        find_rows(range, query_block(p, range.b));
        team_barrier();  // products with the last queries are done
        const int row = thread_row(warpgroup);
        const QueryRow from[1] = {query_row(p, range, range.kv_head, row)};
        float elements[1][Keys::PANELS][4];
        load_elements(from, lane, elements);
        const u16* centres = find_centres(p, centre_row(p, range.b, range.kv_len), range.kv_head);
        if constexpr (HAS_CENTRES) prefetch_centres(centres, lane);
        RowParams mine = store_query(elements[0], centres, row * 16 + 4 * (lane % 4));
        const u32 params = span_memory(SpanMemory::SEGMENTS), ratios = params + 64 * 16;
        if (lane % 4 == 0) {
            sts128(params + row * 16, {mine.scale, mine.base[0], mine.base[1], bits_float(mine.sum)});
            if (QUERY_PARTS > 1) sts32(ratios + row * 4, float_bits(mine.ratio));
        }
        fence_async();
        team_barrier();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float4 of_row = lds128(params + thread_row(h) * 16);
            rows.scale[h] = of_row.x;
            rows.base[0][h] = of_row.y;
            rows.base[1][h] = of_row.z;
            rows.sum[h] = float_bits(of_row.w);
            rows.ratio[h] = QUERY_PARTS > 1 ? bits_float(lds32(ratios + thread_row(h) * 4)) : 0.0f;
        }
    }

    // ---- weights ----

    // Begins the products of the rows with the tile whose stages come next.
    METHOD void multiply_keys(KeySums& sums) const {
        constexpr int STEPS = Keys::PANELS / 2 / Config::K_PARTS;
        u64 q = matrices(queries, 64 * 16);
        Ring next = ring;
#pragma unroll
        for (int part = 0; part < Config::K_PARTS; part++) {
            u64 k = matrices(same_for_all(next.wait()), TILE * 16);
            next.advance();
            products_begin();
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const int panel = (part * STEPS + i) * 2, group = panel / GROUP_PANELS;
                Products<true>::multiply_shared(sums[group], matrices_behind(q, panel * 64 * 16), matrices_behind(k, i * 2 * TILE * 16), panel > first_panel(group));
            }
        }
        products_commit();
    }
    // Whether products with a warpgroup's next tile begin before it weighs the present one. Latents leave a ring of three tiles: a wait for the next one takes longer than
    // its products.
    static constexpr bool KEYS_AHEAD = !LATENTS;
    // Leaves the weights of a tile, the tile-th of the span.
    template <bool IS_LAST> METHOD void weigh(int index, int tile, int tiles, KeySums& sums) {
        if (!KEYS_AHEAD) multiply_keys(sums);
        products_wait<0>();
        if (Config::K_PARTS > 1) release_stages(ring, Config::K_PARTS - 1, lane);
        const u32 params = ring.at() + Stage::K_PART;
        KeyParams k;
        read_keys(params, k);
        prepare_weights(index, LATENTS ? params : params + Keys::params(TILE));
        release_stages(ring, 1, lane);
        float s[SUMS_OF_TILE];
        find_scores(sums, index, k, s);
        if (KEYS_AHEAD) {
            if (!IS_LAST || tile + 1 < tiles) pass_keys();
            if (!IS_LAST) multiply_keys(sums);
        }
        if (has_rows) {
            Weighed w;
            weigh_tile(s, index, 0, w);
            const u32 to = weights_place(tile) + thread_row(0) * 16 + 4 * (lane % 4);
#pragma unroll
            for (int i = 0; i < 8; i++) sts32(to + i / 2 * (64 * 16) + i % 2 * (8 * 16), w.a[i / 4][i % 4]);
            leave_numbers(tile, w);
        } else {
            leave_numbers(tile, {{}, {MINUS_INFINITY, MINUS_INFINITY}});
        }
        if (!KEYS_AHEAD && tile + 1 < tiles) pass_keys();
    }
    METHOD void leave_numbers(int tile, const Weighed& w) const {
        if (lane % 4 != 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sts32(row_place(SpanMemory::EXPONENTS, tile, thread_row(h)), float_bits(w.exponent[h]));
            sts32(row_place(SpanMemory::STEPS, tile, thread_row(h)), float_bits(w.step[h]));
            sts32(row_place(SpanMemory::SUMS, tile, thread_row(h)), float_bits(w.total[h]));
        }
    }
    // Waits for the stages of a tile that another warpgroup weighs, and passes them on.
    METHOD void pass_keys() {
#pragma unroll
        for (int part = 0; part < Config::K_PARTS; part++) {
            ring.wait();
            release_stages(ring, 1, lane);
        }
    }
    // The weights of a span, by warpgroups in turn: one multiplies while the other weighs.
    METHOD void weigh_span(int index, int tiles) {
        forget_addresses();
        if (warpgroup > 0 && tiles > 0) pass_keys();
        if (warpgroup >= tiles) return;
        KeySums sums;
        if (KEYS_AHEAD) multiply_keys(sums);
        int tile = warpgroup;
#pragma unroll 1
        for (; tile + (KEYS_AHEAD ? Config::WARPGROUPS : 0) < tiles; tile += Config::WARPGROUPS) weigh<!KEYS_AHEAD>(index + tile, tile, tiles, sums);
        if (KEYS_AHEAD) weigh<true>(index + tile, tile, tiles, sums);
        fence_async();  // products see the weights
    }
    // Folds the exponents and sums of a segment's tiles: a segment of a row to a thread.
    METHOD void find_factors(int tiles) const {
        const int thread = warpgroup * 128 + warp * 32 + lane, row = thread % 64, segment = thread / 64;
        float m = MINUS_INFINITY, l = 0.0f;
        bool rescales = false;
        for (int tile = segment << SEGMENT_SHIFT; tile < min(tiles, segment + 1 << SEGMENT_SHIFT); tile++) {
            const u32 exponent = row_place(SpanMemory::EXPONENTS, tile, row), step = row_place(SpanMemory::STEPS, tile, row);
            Factors f = fold_factors(m, bits_float(lds32(exponent)));
            l = fmaf(bits_float(lds32(row_place(SpanMemory::SUMS, tile, row))), f.beta, l * f.alpha);
            rescales |= f.alpha != 1.0f;
            sts32(exponent, float_bits(f.alpha));
            sts32(step, float_bits(bits_float(lds32(step)) * f.beta));
        }
        sts64(span_memory(SpanMemory::SEGMENTS) + (segment * 64 + row) * 8, m, l);
        rescales = __any_sync(~0u, rescales);
        if (lane == 0) sts32(row_place(SpanMemory::SUMS, segment << SEGMENT_SHIFT, row), rescales);
    }
    // Whether some row's state is rescaled within a segment: the same for all warps of the team, which multiply together.
    METHOD bool rescales(int first) const { return (lds32(row_place(SpanMemory::SUMS, first, 0)) | lds32(row_place(SpanMemory::SUMS, first, 32))) != 0; }

    // ---- values ----

    // Products of a tile with a part of V's dims come in pieces of a thread's elements: one is folded while the next is under way.
    static constexpr int PIECES = ELEMENTS >= 48 ? 2 : 1, PIECE = ELEMENTS / PIECES;
    // The left operand of products with the weights of a tile.
    METHOD u64 weights_of(int tile) { return matrices(same_for_all(weights_place(tile)), 64 * 16); }
    // The right operand of those with what lies at `at`: by tokens, or as `Turner` leaves latents.
    static constexpr int ALONG = LATENTS ? 128 : V_DIM / Config::V_PARTS * 16, ACROSS = LATENTS ? 512 : 128;  // bytes from 16 tokens, and from eight dims, to the next ones
    METHOD u64 values_of(u32 at) { return matrices(same_for_all(at) + warpgroup * Config::PART_DIMS / 8 * ACROSS, ALONG, ACROSS); }
    // Begins the products of a piece.
    METHOD void multiply_piece(u64 weights, u64 v, int piece, int (&values)[PIECE]) const {
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; i++)
            Products<true>::multiply_shared_unsigned(values, matrices_behind(weights, i * 2 * 64 * 16),
                                                     matrices_behind(v, i * 2 * ALONG + piece * PIECE / 4 * ACROSS), i > 0);
        products_commit();
    }
    METHOD float row_number(int of, int tile, int h) const { return bits_float(lds32(row_place(of, tile, thread_row(h)))); }
    METHOD void fold_piece(int piece, const float (&unit)[2], const int (&values)[PIECE]) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) o[piece * PIECE + i] = fmaf((float)values[i], unit[i / 2 % 2], o[piece * PIECE + i]);
    }
    // Folds the four tiles of a segment: a piece while the products of the next one are under way.
    METHOD void fold_segment(int first) {
        constexpr int COUNT = PIECES << SEGMENT_SHIFT;
        // Stages of latents are released before the next one is waited for: its turn is what takes longest.
        constexpr bool RELEASES_FIRST = LATENTS && PIECES > 1;
        const u64 weights = weights_of(first);
        Ring next = ring;
        u64 v = 0;
        int values[2][PIECE];
        auto begin = [&](int n) {
            if (n % PIECES == 0) {
                v = values_of(next.wait());
                next.advance();
            }
            multiply_piece(matrices_behind(weights, n / PIECES * (TILE * 64)), v, n % PIECES, values[n % 2]);
        };
        float unit[2];
        begin(0);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const bool is_last = n % PIECES == PIECES - 1, has_next = n + 1 < COUNT;
            if (n % PIECES == 0)
#pragma unroll
                for (int h = 0; h < 2; h++) unit[h] = row_number(SpanMemory::STEPS, first + n / PIECES, h);
            if (RELEASES_FIRST && is_last) {
                products_wait<0>();
                release_stages(ring, 1, lane);
            }
            if (has_next) begin(n + 1);
            if (has_next) products_wait<1>();
            else products_wait<0>();
            if (!RELEASES_FIRST && is_last) release_stages(ring, 1, lane);
            fold_piece(n % PIECES, unit, values[n % 2]);
        }
    }
    // The same of a segment that ends with the sequence, or whose state is rescaled on the way, which is rare: a tile at a time.
    METHOD void fold_tiles(int first, int end) {
#pragma unroll 1
        for (int tile = first; tile < end; tile++) {
            const u64 weights = weights_of(tile), v = values_of(ring.wait());
            float unit[2], alpha[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unit[h] = row_number(SpanMemory::STEPS, tile, h);
                alpha[h] = row_number(SpanMemory::EXPONENTS, tile, h);
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                int values[PIECE];
                multiply_piece(weights, v, piece, values);
                products_wait<0>();
#pragma unroll
                for (int i = 0; i < PIECE; i++) o[piece * PIECE + i] = o[piece * PIECE + i] * alpha[i / 2 % 2];
                fold_piece(piece, unit, values);
            }
            release_stages(ring, 1, lane);
        }
    }
    // The span's state of a part of V's dims: tiles fold into segments, whose states merge. Warps without rows do as the others.
    METHOD void attend_part(int tiles) {
        forget_addresses();
        float span_o[ELEMENTS], span_m[2] = {MINUS_INFINITY, MINUS_INFINITY}, span_l[2] = {};
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) span_o[i] = 0.0f;
#pragma unroll 1
        for (int first = 0; first < tiles; first += 1 << SEGMENT_SHIFT) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) o[i] = 0.0f;
            const bool are_four = first + (1 << SEGMENT_SHIFT) <= tiles;
            if (are_four && !rescales(first)) fold_segment(first);
            else fold_tiles(first, min(tiles, first + (1 << SEGMENT_SHIFT)));
            Factors w[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 of_row = lds64(span_memory(SpanMemory::SEGMENTS) + ((first >> SEGMENT_SHIFT) * 64 + thread_row(h)) * 8);
                w[h] = merge_sums(span_m[h], span_l[h], make_float2(bits_float(of_row.x), bits_float(of_row.y)), false);
            }
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) merge(span_o[i], o[i], w[i / 2 % 2], false);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            m[h] = span_m[h];
            l[h] = span_l[h];
        }
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) o[i] = span_o[i];
    }
    // Calls leave(part) with a span's state of each part of V's dims.
    template <class Leave> METHOD void attend_span(int index, int end, Leave leave) {
        const int tiles = end - index;
        weigh_span(index, tiles);
        team_barrier();
        find_factors(tiles);
        team_barrier();
#pragma unroll 1
        for (int part = 0; part < Config::V_PARTS; part++) {
            attend_part(tiles);
            leave(part);
        }
        team_barrier();  // the next span's weights take the place of these
    }
};

}  // namespace attn
