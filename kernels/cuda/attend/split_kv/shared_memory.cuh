// Shared memory of a CTA of split_kv.cu: where each part begins, in bytes. smem.rs computes the same size; a test compares the two.
//
// These are offsets and not members of a struct: parts may be empty in low_latency/shared_memory.cuh, and NVRTC has neither empty arrays nor offsetof.
#pragma once
#include "attend/config.cuh"

struct SharedMemory {
    enum : int {
        STAGES_AT = 0,                                                       // u8 [TEAMS][STAGES][STAGE_BYTES]
        STATES = STAGES_AT + TEAMS * STAGES * STAGE_BYTES,                   // float [TEAMS][ROWS][STATE_STRIDE]: O for the merge
        MAX_SUMS = STATES + TEAMS * ROWS * STATE_STRIDE * 4,                 // float2 [TEAMS][ROWS]
        KEPT = MAX_SUMS + TEAMS * ROWS * 8,                                  // float [ROWS][HEAD_DIM]: the work item's first units, merged
        KEPT_MAX_SUMS = KEPT + ROWS * HEAD_DIM * 4,                          // float2 [ROWS]
        ROTATED_ROW = KEPT_MAX_SUMS + ROWS * 8,                              // float [HEAD_DIM, to a multiple of 32]: see Mergers
        BARRIERS = ROTATED_ROW + (V_ROTATED ? (HEAD_DIM + 31) / 32 * 128 : 0),   // u64 [TEAMS][2][STAGES]: full, empty
        MERGE_STATE = BARRIERS + TEAMS * STAGES * 16,                        // MergeState, in 64 bytes
        CURSORS = MERGE_STATE + 64,                                          // Cursor [2 + TEAMS]: this unit, the next one, each producer's
        BYTES = CURSORS + (2 + TEAMS) * CURSOR_BYTES
    };
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = THREADS;
