// Shared memory of a CTA of many_rows.cu, as split_kv/shared_memory.cuh.
#pragma once
#include "attend/config.cuh"

constexpr int QUEUE_SLOTS = 4, WAY_BYTES = QUEUE_SLOTS * 20;
constexpr int QUERY_BYTES = 64 * HEAD_DIM * (INTEGER ? 1 : QUERIES_IN_REGISTERS ? 0 : 2);  // of a warpgroup

struct SharedMemory {
    enum : int {
        STAGES_AT = 0,                                                              // u8 [TEAMS][STAGES][STAGE_BYTES]
        UNPACKED_AT = STAGES_AT + TEAMS * STAGES * STAGE_BYTES,                     // u8 [TEAMS][UNPACKED_STAGES][UNPACKED_STAGE]
        QUERIES = UNPACKED_AT + TEAMS * UNPACKED_STAGES * UNPACKED_STAGE,           // [WARPGROUPS][panels of 16 bytes][64 rows]: s8, or the first parts of floats
        STATES = QUERIES + WARPGROUPS * QUERY_BYTES,                                // of integers: float4 [WARPGROUPS][HEAD_DIM / 8][128 threads]: O of a span
        THRESHOLDS = STATES + (INTEGER ? WARPGROUPS * 64 * HEAD_DIM * 4 : 0),       // of integers: float [TILE]
        BARRIERS = THRESHOLDS + (INTEGER ? TILE * 4 : 0),                           // u64 [TEAMS][2][STAGES], then [TEAMS][2][UNPACKED_STAGES]: full, empty
        SUMS = BARRIERS + TEAMS * (STAGES + UNPACKED_STAGES) * 16,                  // u32 [THREADS / 32]
        ARRIVALS_AT = SUMS + 64,                                                    // Arrival [TEAMS]
        NOWHERE = ARRIVALS_AT + 16 * TEAMS,
        WAYS = NOWHERE + 16,                                                        // Walk [TEAMS], or of each Queue its barriers, then items
        BYTES = WAYS + TEAMS * WAY_BYTES
    };
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = THREADS;
