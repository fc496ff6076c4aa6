// Shared memory of a CTA of many_rows.cu, as split_kv_smem.cuh.
#pragma once
#include "config.cuh"

constexpr int WALK_BYTES = 64;

struct SharedMemory {
    enum : int {
        STAGES_AT = 0,                                                              // u8 [TEAMS][STAGES][STAGE_BYTES]
        BYTES_AT = STAGES_AT + TEAMS * STAGES * STAGE_BYTES,                        // u8 [TEAMS][BYTE_STAGES][BYTE_STAGE]: codes of 4 bits as bytes
        QUERIES = BYTES_AT + TEAMS * BYTE_STAGES * BYTE_STAGE,                      // s8 [WARPGROUPS][PANELS][64 rows][16 dims]
        STATES = QUERIES + WARPGROUPS * 64 * HEAD_DIM,                              // float4 [WARPGROUPS][HEAD_DIM / 8][128 threads]: O of a span
        THRESHOLDS = STATES + WARPGROUPS * 64 * HEAD_DIM * 4,                       // float [TILE]
        BARRIERS = THRESHOLDS + TILE * 4,                                           // u64 [TEAMS][2][STAGES], then [TEAMS][2][BYTE_STAGES]: full, empty
        SUMS = BARRIERS + TEAMS * (STAGES + BYTE_STAGES) * 16,                      // u32 [THREADS / 32]
        ARRIVALS_AT = SUMS + 64,                                                    // Arrival [TEAMS]
        NOWHERE = ARRIVALS_AT + 16 * TEAMS,
        WALKS = NOWHERE + 16,                                                       // Walk [TEAMS]
        BYTES = WALKS + TEAMS * WALK_BYTES
    };
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = THREADS;
