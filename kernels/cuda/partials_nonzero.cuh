// States on their way in global memory (low_latency.cu, ATTN_MERGE_GLOBAL): a team stores each of its partials, as soon as it has it, where
// whoever merges it spins. Nothing is counted, and no store waits for another: a word that is not zero is there. A zero is encode_nonzero as the
// smallest number instead, which arithmetic that flushes takes for the zero it was; who has read a word puts the zero back. (A count that
// all add to, spins at it, and loads behind those came one after the other: 1 µs more of 10.)
//
// Who merges waits for all CTAs of the item, who does not for nobody. CTAs start in the order of their indices, so a launch ends wherever
// one more than SLICES of them can run at once.
#pragma once
#include "partials_counted.cuh"

DEVICE float encode_nonzero(float x) { return bits_float(max(float_bits(x), 1u)); }
DEVICE float2 encode_nonzero(float x, float y) { return make_float2(encode_nonzero(x), encode_nonzero(y)); }

// What the team with partials from `from` to `end` merges: of many partials, some of the slices; of few, the last team all.
DEVICE u32 slices_to_merge(const DecodeParams& p, const WorkItem& item, int from, int end) {
    return item.num_partials >= SHARED_PARTIALS ? slices_for(p, item, from, end) : end == item.num_partials && from < end ? ALL_SLICES : 0;
}
// Behind a barrier that its rows' (m, l) have been read.
DEVICE void clear_max_sums(const DecodeParams& p, const WorkItem& item, u32 slices) {
    int rows = item.rows(p);
    float2* ml = p.partial_max_sum + item.index(p) * p.max_partials * ROWS;
    for (int i = merge_thread(); i < item.num_partials * ROWS; i += MERGE_THREADS) {
        int row = i % ROWS;
        if (row < rows && slices >> row / SLICE_ROWS & 1) __stcg(ml + i, make_float2(0.0f, 0.0f));
    }
}
