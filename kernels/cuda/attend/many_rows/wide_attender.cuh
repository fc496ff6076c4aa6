// The warpgroups of a team of many_rows.cu attend wide rows, which they share: the states of rows, and their results (sections 6 and 7 of docs/arithmetic.md).
#pragma once
#include "attend/many_rows/wide_integers.cuh"

namespace attn {

struct WideAttender : WideTiles {
    // Where rows are brought together, behind the states of the team's warpgroups in the workspace: the dims of a row that is turned back lie in all of them.
    METHOD float* gathered_rows() const { return p.partial_o + p.row_states_at + (2 * blockIdx.x + 1) * (64 * V_DIM); }
    METHOD void gather_rows(int part) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = thread_row(h);
            if (warpgroup == 0 && lane % 4 == 0) sts64(span_memory(SpanMemory::ROWS) + row * 8, m[h], l[h]);
            float* to = gathered_rows() + row * V_DIM + first_dim(part) + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < ELEMENTS / 4; j++) __stcg((float2*)(to + 8 * j), make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]));
        }
    }
    // A row by each warp of the team.
    METHOD void write_gathered(const WorkRange& range) const {
        constexpr int N = (ROW_VECTORS + 31) / 32;
        int count = range.item().rows(p);
#pragma unroll 1
        for (int row = warpgroup * 4 + warp; row < count; row += 4 * Config::WARPGROUPS) {
            const float4* from = (const float4*)(gathered_rows() + row * V_DIM);
            float4 o[N];
#pragma unroll
            for (int k = 0; k < N; k++) o[k] = __ldcg(from + min(lane + k * 32, ROW_VECTORS - 1));
            uint2 sums = lds64(span_memory(SpanMemory::ROWS) + row * 8);
            Epilogue epilogue = Epilogue::at(p, range.item(), row);
            epilogue.begin(bits_float(sums.x), bits_float(sums.y), lane == 0);
            epilogue.write_vectors<32>(o, lane);
        }
    }
    // Attends spans of a work item, whose rows are loaded. Of whole work items writes the rows and returns false; else leaves every span's state as a partial and
    // returns true: the loads of a merge at the end wait together, those of one for each span would wait alone.
    METHOD bool attend(const WorkRange& range) {
        RowState row = {};
        const int first_span = Config::WHOLE_ITEMS ? 0 : range.first, last = range.end - 1;
#pragma unroll 1
        for (int span_index = first_span; span_index <= last; span_index++) {
            const int index = span_index << SPAN_SHIFT;
            const RowState before = row;
            attend_span(index, min(range.num_tiles, index + (1 << SPAN_SHIFT)), [&](int part) {
                if (!Config::WHOLE_ITEMS) return write_partial(range, span_index, part);
                row = before;
                if (span_index > 0) merge_row(row, part);
                if (span_index < last) keep_row(row, part);
                else gather_rows(part);
            });
        }
        if (Config::WHOLE_ITEMS) write_gathered(range);  // behind the barrier that ends a span
        return !Config::WHOLE_ITEMS;
    }
};

}  // namespace attn
