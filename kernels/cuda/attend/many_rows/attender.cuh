// A warpgroup of many_rows.cu attends its rows of a work item: the states of segments, spans and the row (section 6 of docs/arithmetic.md).
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

struct Attender : TilesOf<INTEGER>::Type {
    METHOD void write_partial(const WorkRange& range, int partial) const {
        WorkItem item = range.item();
        u64 at = (item.index(p) * p.max_partials + partial) * Config::ROWS;
        int count = item.rows(p);
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            int row = first_row + lane / 4 + 8 * h;
            if (row >= count) continue;
            if (lane % 4 == 0) __stcg(p.partial_max_sum + at + row, make_float2(m[h], l[h]));
            float* to = p.partial_o + (at + row) * V_DIM + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < V_DIM / 8; j++) __stcg((float2*)(to + 8 * j), make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]));
        }
    }
    METHOD void write_rows(const WorkRange& range) const {
#pragma unroll 1
        for (int h = 0; h < THREAD_ROWS; h++) {
            Epilogue epilogue = Epilogue::at(p, range.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0);
            float x[V_DIM / 8][2];
#pragma unroll
            for (int j = 0; j < V_DIM / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * j + e] : o[4 * j + 2 + e]);
            if constexpr (Values::IS_ROTATED) rotate_back<Values, 4>(x, lane % 4);
            store_quad_row(epilogue.out, p.dtype, x, lane);
        }
    }

    // Maxima and sums of what the workspace has of rows.
    struct RowState {
        float m[2], l[2];
    };
    METHOD void merge_row(RowState& row) {
        merge_behind(row.m, row.l, [&](int i) { return __ldcg(row_state + i * 128); });
    }
    METHOD void keep_row(RowState& row) const {
        store_state([&](int i, const float4& x) { __stcg(row_state + i * 128, x); });
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            row.m[h] = m[h];
            row.l[h] = l[h];
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
