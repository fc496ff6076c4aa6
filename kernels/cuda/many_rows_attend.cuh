// A warpgroup of many_rows.cu attends 64 rows of a work item: the states of segments, spans and the row (section 6 of docs/arithmetic.md).
#pragma once
#include "many_rows_floats.cuh"
#include "many_rows_integers.cuh"

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
        for (int h = 0; h < 2; h++) {
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
        for (int h = 0; h < 2; h++) {
            Epilogue epilogue = Epilogue::at(p, part.item(), first_row + lane / 4 + 8 * h);
            epilogue.begin(h == 0 ? m[0] : m[1], h == 0 ? l[0] : l[1], lane % 4 == 0);
            float x[HEAD_DIM / 8][2];
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) x[j][e] = epilogue.of(h == 0 ? o[4 * j + e] : o[4 * j + 2 + e]);
            if constexpr (V_ROTATED) rotate_back<4>(x, lane % 4);
            if (epilogue.out)
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 8; j++) store_pair(epilogue.out, epilogue.dtype, 8 * j + 2 * (lane % 4), x[j][0], x[j][1]);
        }
    }

    // Attends the team's spans of a work item, whose rows are loaded; true if others have the rest, and partials are written.
    __device__ __forceinline__ bool attend(const Part& part) {
        float row_m[2], row_l[2];
        int first_span = part.first, last = part.end - 1;
#pragma unroll 1
        for (int span_index = first_span; span_index <= last; span_index++) {
            int index = span_index << part.span_shift;
            attend_span(part, index, min(part.num_tiles, index + (1 << part.span_shift)));
            if (first_span > 0) {
                write_partial(part, span_index);
                continue;
            }
            if (span_index > 0) merge_behind(row_m, row_l, [&](int i) { return __ldcg(row_state + i * 128); });
            if (span_index == last) break;
            store_state([&](int i, const float4& x) { __stcg(row_state + i * 128, x); });
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row_m[h] = m[h];
                row_l[h] = l[h];
            }
        }
        if (part.is_all()) {
            write_rows(part);
            return false;
        }
        if (first_span == 0) write_partial(part, last);
        return true;
    }
};
