// Partials in global memory without a count (low_latency.cu, ATTN_MERGE_GLOBAL). Arrival is signalled by the data: the workspace is zero
// between launches, and a nonzero word has arrived. Zeros are stored as the smallest subnormal, which arithmetic flushes. The reader
// resets each word. A count of arrivals, which every team increments, is 1 µs of 10 slower (H200, one sequence of 8192 tokens).
//
// Merging CTAs wait for all CTAs of the work item; the others never wait. CTAs start in the order of their indices, so a launch ends
// wherever one more than SLICES of them run at once.
#pragma once
#include "attend/partials_counted.cuh"

namespace attn {

DEVICE float encode_nonzero(float x) { return bits_float(max(float_bits(x), 1u)); }
DEVICE float2 encode_nonzero(float x, float y) { return make_float2(encode_nonzero(x), encode_nonzero(y)); }

// The slices that the team with partials from `from` to `end` merges: of many partials, or of tiles, some slices, of few the last team all.
DEVICE u32 slices_to_merge(const DecodeParams& p, const WorkItem& item, int from, int end) {
    bool are_shared = item.num_partials >= Config::SHARED_PARTIALS || item.level == TILE_VALUES;
    return are_shared ? slices_for(p, item, from, end) : end == item.num_partials && from < end ? ALL_SLICES : 0;
}
// Called behind a barrier, once (max, sum) of these rows have been read.
DEVICE void clear_max_sums(const DecodeParams& p, const WorkItem& item, u32 slices) {
    int rows = item.rows(p);
    float2* ml = p.partial_max_sum + item.index(p) * p.max_partials * Config::ROWS;
    for (int i = Config::merge_thread(); i < item.num_partials * Config::ROWS; i += Config::MERGE_THREADS) {
        int row = i % Config::ROWS;
        if (row < rows && slices >> row / SLICE_ROWS & 1) __stcg(ml + i, make_float2(0.0f, 0.0f));
    }
}

}  // namespace attn
