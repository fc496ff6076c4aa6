// A warpgroup of many_rows.cu attends rows of its own in a work item: the states of segments, spans and the row (section 6 of docs/arithmetic.md).
#pragma once
#include "attend/many_rows/integers.cuh"
#include "attend/many_rows/paired_floats.cuh"

namespace attn {

template <bool IS_INTEGER, bool IS_WIDE, bool HAS_PAIRS> struct TilesOf {
    using Type = IntegerTiles;
};
template <> struct TilesOf<false, false, false> {
    using Type = FloatTiles;
};
template <> struct TilesOf<false, true, false> {
    using Type = WideFloatTiles;
};
template <> struct TilesOf<false, true, true> {
    using Type = PairedFloatTiles;
};

struct RowAttender : TilesOf<INTEGER, Config::IS_WIDE, Config::HAS_PAIRS>::Type {
    // Tiles that are summed in a state of their own: a span, or, of floats, so many that merging them takes little, and so few that sums stay exact enough.
    static constexpr int RUN_SHIFT = INTEGER ? SPAN_SHIFT : 6;
    static constexpr bool MERGES_ROWS = Config::WHOLE_ITEMS || !Config::LEAVES_EACH_SPAN;
    static constexpr int AT_ONCE = Config::IS_WIDE || ELEMENTS > 64 ? 4 : ELEMENTS / 4;  // pairs of a row that are written at once: registers bind where the state is large

    METHOD void write_rows(const WorkRange& range) const {
#pragma unroll 1
        for (int h = 0; h < THREAD_ROWS; h++) {
            Epilogue epilogue = Epilogue::at(p, range.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0 && (!Config::IS_WIDE || warpgroup == 0));
            if (Config::IS_WIDE && epilogue.out) epilogue.out += first_dim(0) * element_bytes(p.dtype);
#pragma unroll
            for (int first = 0; first < ELEMENTS / 4; first += AT_ONCE) {
                float x[AT_ONCE][2];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * (first + j) + e] : o[4 * (first + j) + 2 + e]);
                if constexpr (Values::IS_ROTATED) rotate_back<Values, 4>(x, lane % 4);
                store_quad_row(epilogue.out ? epilogue.out + first * 8 * element_bytes(p.dtype) : nullptr, p.dtype, x, lane);
            }
        }
    }

    // Attends tiles of a work item, whose rows are loaded. Writes the rows and returns false if these are all of its tiles, and need no merge at the end; else leaves partials
    // and returns true.
    METHOD bool attend(const WorkRange& range) {
        RowState row;
        const int first_tile = Config::WHOLE_ITEMS ? 0 : range.first_tile, runs = runs_of(range.end_tile - first_tile, RUN_SHIFT);
        const bool leaves_each = INTEGER && !Config::WHOLE_ITEMS && (Config::LEAVES_EACH_SPAN ? range.num_partials > 1 : range.first > 0);
#pragma unroll 1
        for (int run = 0; run < runs; run++) {
            int index = first_tile + (run << RUN_SHIFT);
            attend_span(range, index, min(range.end_tile, index + (1 << RUN_SHIFT)));
            if (leaves_each) {
                write_partial(range, range.first + run);
                continue;
            }
            if (MERGES_ROWS && run > 0) merge_row(row);
            if (MERGES_ROWS && run + 1 < runs) keep_row(row);
        }
        if constexpr (Config::LOADS_AHEAD) release_rows();
        if (Config::WHOLE_ITEMS || (!leaves_each && range.is_all())) {
            write_rows(range);
            return false;
        }
        if (!leaves_each) write_partial(range, range.end - 1);
        return true;
    }
};

}  // namespace attn
