// Shared memory of a CTA of split_kv.cu: where each part begins, in bytes. smem.rs computes the same size; a test compares the two.
//
// These are offsets and not members of a struct: parts may be empty in low_latency/shared_memory.cuh, and NVRTC has neither empty arrays nor offsetof.
#pragma once
#include "attend/stage.cuh"

namespace attn {

constexpr int CURSOR_BYTES = 64;

struct SharedMemory {
    // Rows that are turned back lie in a place of their own, or, where that would not fit, in the states' once these are merged: 3 % slower for one
    // sequence of 32768 tokens and 128 dims in int4, since its merge comes later.
    static constexpr bool ROTATES_IN_STATES = V_DIM > 256;
    // clang-format off: a table
    enum : int {
        STAGES_AT = 0,                                                                              // u8 [TEAMS][STAGES][Stage::BYTES]
        STATES = STAGES_AT + Config::TEAMS * Config::STAGES * Stage::BYTES,                         // float [TEAMS][ROWS][STATE_STRIDE]: O for the merge
        MAX_SUMS = STATES + Config::TEAMS * Config::ROWS * Config::STATE_STRIDE * 4,                // float2 [TEAMS][ROWS]
        KEPT = MAX_SUMS + Config::TEAMS * Config::ROWS * 8,                                         // float [ROWS][V_DIM]: the work item's first units, merged
        KEPT_MAX_SUMS = KEPT + Config::ROWS * V_DIM * 4,                                         // float2 [ROWS]
        OWN_ROW = KEPT_MAX_SUMS + Config::ROWS * 8,                                                 // float [V_DIM, to a multiple of 32], or none
        ROTATED_ROW = ROTATES_IN_STATES ? STATES : OWN_ROW,                                         // see Mergers
        BARRIERS = OWN_ROW + (Values::IS_ROTATED && !ROTATES_IN_STATES ? (V_DIM + 31) / 32 * 128 : 0),  // u64 [TEAMS][2][STAGES]: full, empty
        MERGE_STATE = BARRIERS + Config::TEAMS * Config::STAGES * 16,                               // MergeState, in 64 bytes
        CURSORS = MERGE_STATE + 64,                                                                 // Cursor [2 + TEAMS]: this unit, the next one, each producer's
        BYTES = CURSORS + (2 + Config::TEAMS) * CURSOR_BYTES
    };
    // clang-format on
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = Config::THREADS;

}  // namespace attn
