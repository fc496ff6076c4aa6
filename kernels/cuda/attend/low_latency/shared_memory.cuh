// Shared memory of a team of low_latency.cu: where each part begins, in bytes. smem.rs computes the same size; a test compares the two.
//
// Offsets and not members of a struct, for the reason that split_kv/shared_memory.cuh gives.
#pragma once
#include "attend/stage.cuh"
#include "attend/tile/team.cuh"

namespace attn {

constexpr int TEAM_PARTIALS = 4;                                                                    // of the work item, for each of its teams, at most

// Room for the partials of a team's merge jobs: of as many partials as all teams can have, 32 dims and (max, sum) each. Teams are a power
// of two that divides the jobs of ROWS rows, so jobs of fewer rows never leave one of them more.
constexpr int RECEIVED_BYTES = TEAM_PARTIALS * Config::ROWS * (V_DIM / 32) * (32 * 4 + 8);
constexpr int STATE_BYTES = Config::ROWS * Config::STATE_STRIDE * 4;
static_assert(STATE_BYTES <= RECEIVED_BYTES, "a work item's second state waits where a cluster's partials would");

struct SharedMemory {
    enum : int {
        STAGES_AT = 0,                                                                              // u8 [STAGES][Stage::BYTES]
        EXCHANGE = STAGES_AT + Config::STAGES * Stage::BYTES,                                       // u8 [EXCHANGE_BYTES], see team.cuh
        STATE = EXCHANGE + Team::EXCHANGE_BYTES,                                                    // float [ROWS][STATE_STRIDE]: O of the partial at hand
        RECEIVED = STATE + STATE_BYTES,                                                             // partials from the cluster, see MergeJobs
        BARRIERS = RECEIVED + (Config::MERGES_GLOBALLY ? 0 : RECEIVED_BYTES),                       // u64 [2][STAGES]: full, empty
        ALL_RECEIVED = BARRIERS + Config::STAGES * 16,                                              // u64: the barrier that counts received bytes
        NOWHERE = ALL_RECEIVED + 8,                                                                 // u64, written by touch_params
        BYTES = (NOWHERE + 8 + Stage::ALIGN - 1) / Stage::ALIGN * Stage::ALIGN
    };
};

// Of each of a CTA's teams.
extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = Config::TEAM_THREADS;

}  // namespace attn
