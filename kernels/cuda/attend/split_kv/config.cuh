// What an instance of split_kv.cu is compiled for.
#pragma once
#include "attend/kernel_defaults.cuh"

namespace attn {

struct SplitKvConfig : KernelDefaults {
    static constexpr int ROW_GROUPS = ATTN_ROW_GROUPS;  // row groups of 8 query rows of a warp
    static constexpr int ROW_WARPS = ATTN_ROW_WARPS;    // warps of a team: they share a ring of stages and have their own rows
    static constexpr int TEAMS = SPAN;                  // a team has a segment of the span, or a tile of the segment
    static constexpr int ROWS = 8 * ROW_GROUPS * ROW_WARPS;  // query rows of a CTA
    static constexpr int THREADS = 32 * ROW_WARPS * TEAMS;
    static constexpr int MERGE_THREADS = THREADS;  // threads that merge a work item's partials
    static constexpr int READERS = ROW_WARPS;      // warps that read a stage
    static constexpr bool COPIER_READS = READERS == 1;  // the warp that copies is the one that reads
#ifdef ATTN_SPANS
    static constexpr bool LEAVES_SPANS = true;
#endif

    // Index of this thread among those that merge together.
    static METHOD int merge_thread() { return threadIdx.x; }
};

}  // namespace attn
