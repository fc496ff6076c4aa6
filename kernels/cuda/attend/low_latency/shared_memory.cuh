// Shared memory of a team of low_latency.cu: where each part begins, in bytes. smem.rs computes the same size; a test compares the two.
//
// Offsets and not members of a struct, for the reason that split_kv/shared_memory.cuh gives.
#pragma once
#include "attend/stage.cuh"
#include "attend/tile/team.cuh"

namespace attn {

constexpr int TEAM_PARTIALS = 4;                                                                    // of the work item, for each of its teams, at most

// Room for the partials of a team's merge jobs: 32 dims and (max, sum) each.
constexpr int RECEIVED_BYTES = TEAM_PARTIALS * Config::ROWS * (V_DIM / 32) * (32 * 4 + 8);
// Partials that there is room for where so many teams share jobs of so many dims (partials_cluster.cuh); each job begins at a multiple of 16 bytes.
constexpr int received_partials(int jobs, int dims, int teams) { return (RECEIVED_BYTES / ((jobs + teams - 1) / teams) & ~15) / (dims * 4 + 8); }
// Partials of a work item that so many teams of a cluster can have; `cluster_partials` of smem.rs.
constexpr int cluster_partials(int teams) {
    constexpr int RUNS = Config::ROWS * (V_DIM / 32);
    const bool may_be_rows = Values::IS_ROTATED || RUNS > teams * Config::TILE_WARPS;
    const int by_rows = may_be_rows ? received_partials(Config::ROWS, V_DIM, teams) : TEAM_PARTIALS * teams;
    const int by_runs = Values::IS_ROTATED ? by_rows : received_partials(smaller(RUNS, teams * Config::TILE_WARPS), 32, teams);
    return smaller(TEAM_PARTIALS * teams, smaller(by_rows, by_runs));
}
constexpr int MOST_TEAMS = 16;
static_assert(Config::MERGES_GLOBALLY ||
                  (cluster_partials(2) == TEAM_PARTIALS * 2 && cluster_partials(4) == TEAM_PARTIALS * 4 && cluster_partials(8) == TEAM_PARTIALS * 8),
              "low_latency.cu takes it for granted");
static_assert(Config::MERGES_GLOBALLY || cluster_partials(MOST_TEAMS) >= 2 * MOST_TEAMS, "partials may be tiles");
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
