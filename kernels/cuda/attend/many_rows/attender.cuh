// A warpgroup of many_rows.cu attends its rows of a work item: the states of segments, spans and the row (section 6 of docs/arithmetic.md).
#pragma once
#include "attend/many_rows/floats.cuh"
#include "attend/many_rows/integers.cuh"

template <bool IS_INTEGER> struct TilesOf {
    using Type = IntegerTiles;
};
template <> struct TilesOf<false> {
    using Type = FloatTiles;
};

struct Attender : TilesOf<INTEGER>::Type {
    __device__ __forceinline__ void write_partial(const Part& part, int partial) const {
        WorkItem item = part.item();
        u64 at = (item.index(p) * p.max_partials + partial) * ROWS;
        int count = item.rows(p);
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            int row = first_row + lane / 4 + 8 * h;
            if (row >= count) continue;
            if (lane % 4 == 0) __stcg(p.partial_max_sum + at + row, make_float2(m[h], l[h]));
            float* to = p.partial_o + (at + row) * HEAD_DIM + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) __stcg((float2*)(to + 8 * j), make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]));
        }
    }
    __device__ __forceinline__ void write_rows(const Part& part) const {
#pragma unroll 1
        for (int h = 0; h < THREAD_ROWS; h++) {
            Epilogue epilogue = Epilogue::at(p, part.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0);
            float x[HEAD_DIM / 8][2];
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * j + e] : o[4 * j + 2 + e]);
            if constexpr (V_ROTATED) rotate_back<4>(x, lane % 4);
            store_quad_row(epilogue.out, p.dtype, x, lane);
        }
    }

    // Maxima and sums of what the workspace has of rows.
    struct RowState {
        float m[2], l[2];
    };
    __device__ __forceinline__ void merge_row(RowState& row) {
        merge_behind(row.m, row.l, [&](int i) { return __ldcg(row_state + i * 128); });
    }
    __device__ __forceinline__ void keep_row(RowState& row) const {
        store_state([&](int i, const float4& x) { __stcg(row_state + i * 128, x); });
#pragma unroll
        for (int h = 0; h < THREAD_ROWS; h++) {
            row.m[h] = m[h];
            row.l[h] = l[h];
        }
    }
    // Attends spans of a work item, whose rows are loaded: all of them, and writes the rows; or a part, and writes partials, which is when it returns true.
    __device__ __forceinline__ bool attend(const Part& part) {
        RowState row;
        int first_span = WHOLE_ITEMS ? 0 : part.first, last = part.end - 1;
#pragma unroll 1
        for (int span_index = first_span; span_index <= last; span_index++) {
            int index = span_index << part.span_shift;
            attend_span(part, index, min(part.num_tiles, index + (1 << part.span_shift)));
            if (first_span > 0) {
                write_partial(part, span_index);
                continue;
            }
            if (span_index > 0) merge_row(row);
            if (span_index < last) keep_row(row);
        }
        if (WHOLE_ITEMS || part.is_all()) {
            write_rows(part);
            return false;
        }
        if (first_span == 0) write_partial(part, last);
        return true;
    }
};
