// A warpgroup of many_rows.cu attends rows of its own in a work item: the states of segments, spans and the row (section 6 of docs/arithmetic.md).
#pragma once
#include "attend/many_rows/floats.cuh"
#include "attend/many_rows/integers.cuh"

namespace attn {

template <bool IS_INTEGER> struct TilesOf {
    using Type = IntegerTiles;
};
template <> struct TilesOf<false> {
    using Type = FloatTiles;
};

struct RowAttender : TilesOf<INTEGER>::Type {
    METHOD void write_rows(const WorkRange& range) const {
#pragma unroll 1
        for (int h = 0; h < THREAD_ROWS; h++) {
            Epilogue epilogue = Epilogue::at(p, range.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0);
            float x[ELEMENTS / 4][2];
#pragma unroll
            for (int j = 0; j < ELEMENTS / 4; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * j + e] : o[4 * j + 2 + e]);
            if constexpr (Values::IS_ROTATED) rotate_back<Values, 4>(x, lane % 4);
            store_quad_row(epilogue.out, p.dtype, x, lane);
        }
    }

    // Attends spans of a work item, whose rows are loaded. If these are all of its spans, writes the rows and returns false; else writes partials and returns true.
    METHOD bool attend(const WorkRange& range) {
        RowState row;
        int first_span = Config::WHOLE_ITEMS ? 0 : range.first, last = range.end - 1;
#pragma unroll 1
        for (int span_index = first_span; span_index <= last; span_index++) {
            int index = span_index << range.span_shift;
            attend_span(range, index, min(range.num_tiles, index + (1 << range.span_shift)));
            if (first_span > 0) {
                write_partial(range, span_index);
                continue;
            }
            if (span_index > 0) merge_row(row);
            if (span_index < last) keep_row(row);
        }
        if (Config::WHOLE_ITEMS || range.is_all()) {
            write_rows(range);
            return false;
        }
        if (first_span == 0) write_partial(range, last);
        return true;
    }
};

}  // namespace attn
