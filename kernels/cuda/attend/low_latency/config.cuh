// What an instance of low_latency.cu is compiled for: four warps of a team share its tiles, and one is the producer.
#pragma once
#include "attend/kernel_defaults.cuh"

namespace attn {

static_assert(ATTN_ROW_WARPS == 1, "warps of a team have the same rows: select.rs");

struct LowLatencyConfig : KernelDefaults {
    static constexpr int ROW_GROUPS = ATTN_ROW_GROUPS;  // row groups of 8 query rows of a team
    static constexpr int TILE_WARPS = 4;                // of a team: a warp has its own tokens and, for the values, its own dims
    static constexpr int ROWS = 8 * ROW_GROUPS;         // query rows of a CTA
    static constexpr int WORKERS = 32 * TILE_WARPS;     // threads of a team but for its producer
    static constexpr int TEAM_THREADS = WORKERS + 32;
    static constexpr int MAX_TEAMS = 2;  // of a CTA; a launch may have one
    static constexpr int THREADS = MAX_TEAMS * TEAM_THREADS;
    static constexpr int MERGE_THREADS = WORKERS;  // threads that merge a work item's partials
    static constexpr int READERS = TILE_WARPS;     // warps that read a stage
    static constexpr bool COPIER_READS = false;
#ifdef ATTN_MERGE_GLOBAL
    static constexpr bool MERGES_GLOBALLY = true;
#endif

    // Index of this thread among those that merge together: teams merge separately.
    static METHOD int merge_thread() { return threadIdx.x % TEAM_THREADS; }
};

}  // namespace attn
