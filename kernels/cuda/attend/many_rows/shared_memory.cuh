// Shared memory of a CTA of many_rows.cu, as split_kv/shared_memory.cuh.
#pragma once
#include "attend/stage.cuh"

namespace attn {

constexpr int QUEUE_SLOTS = 4, SCHEDULER_BYTES = QUEUE_SLOTS * 20;
constexpr int QUERY_BYTES = 64 * K_DIM * (INTEGER ? 1 : Config::QUERIES_IN_REGISTERS ? 0 : 2);   // of a warpgroup

struct SharedMemory {
    // clang-format off: a table
    enum : int {
        STAGES_AT = 0,                                                                              // u8 [TEAMS][STAGES][Stage::BYTES]
        UNPACKED_AT = STAGES_AT + Config::TEAMS * Config::STAGES * Stage::BYTES,                    // u8 [TEAMS][UNPACKED_STAGES][UNPACKED_BYTES]
        QUERIES = UNPACKED_AT + Config::TEAMS * Config::UNPACKED_STAGES * Config::UNPACKED_BYTES,   // [WARPGROUPS][panels of 16 bytes][64 rows]: s8, or the first parts of floats
        STATES = QUERIES + Config::WARPGROUPS * QUERY_BYTES,                                        // of integers: float4 [WARPGROUPS][K_DIM / 8][128 threads]: O of a span
        THRESHOLDS = STATES + (INTEGER ? Config::WARPGROUPS * 64 * K_DIM * 4 : 0),               // of integers: float [TILE]
        SCALES = THRESHOLDS + (INTEGER ? TILE * 4 : 0),                                             // of integers that are not unpacked: float [WARPGROUPS][4 warps][TILE]
        BARRIERS = SCALES + (INTEGER && !Config::UNPACKS ? Config::WARPGROUPS * 4 * TILE * 4 : 0),  // u64 [TEAMS][2][STAGES], then [TEAMS][2][UNPACKED_STAGES]: full, empty
        SUMS = BARRIERS + Config::TEAMS * (Config::STAGES + Config::UNPACKED_STAGES) * 16,          // u32 [THREADS / 32]
        ARRIVALS_AT = SUMS + 64,                                                                    // Arrival [TEAMS]
        NOWHERE = ARRIVALS_AT + 16 * Config::TEAMS,
        SCHEDULERS = NOWHERE + 16,                                                                  // SpanRangeScheduler [TEAMS], or of each ItemQueueScheduler its barriers, then items
        BYTES = SCHEDULERS + Config::TEAMS * SCHEDULER_BYTES
    };
    // clang-format on
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = Config::THREADS;

}  // namespace attn
