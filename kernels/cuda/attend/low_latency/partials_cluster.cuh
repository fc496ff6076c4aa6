// Partials within a cluster (low_latency.cu): a team sends each of its partials to the shared memory of the teams that merge it
// (st.async), and a merging team waits on a barrier that counts the received bytes. No team waits for another to read.
#pragma once
#include "attend/low_latency/shared_memory.cuh"
#include "attend/merge_warp.cuh"

namespace attn {

// Destination of a state: addresses of the job's states and barrier, and the dim within the job.
struct Sent {
    u32 states, barrier;
    int dim;
};

// The merge of a work item as jobs: a job is a row, or 32 dims of a row, of all partials. Its states lie side by side, with (max, sum)
// behind them. Jobs are assigned to CTAs and to their teams in turn.
struct MergeJobs {
    u32 ctas, shift;  // of the cluster; its log2
    u32 second;       // whether CTAs have a second team
    int partials, rows;
    bool is_row;       // whether a job is a row: where it is rotated, by all of a team's warps, and where jobs of 32 dims would be more than warps

    DEVICE MergeJobs of(const DecodeParams& p, int row_block, int partials) {
        u32 second = blockDim.x / Config::TEAM_THREADS - 1;
        int rows = min(Config::ROWS, p.heads_per_kv * p.q_len - row_block * Config::ROWS);
        bool is_row = Values::IS_ROTATED || rows * (V_DIM / 32) > (int)(gridDim.x << second) * Config::TILE_WARPS;
        return {gridDim.x, (u32)__ffs(gridDim.x) - 1, second, partials, rows, is_row};
    }
    METHOD int width() const { return is_row ? V_DIM : 32; }
    METHOD int runs() const { return is_row ? 1 : V_DIM / 32; }
    METHOD int count() const { return rows * runs(); }
    METHOD u32 states_bytes() const { return partials * width() * 4; }
    METHOD u32 sent_bytes() const { return states_bytes() + partials * 8; }
    METHOD u32 stride() const { return sent_bytes() + 15 & ~15u; }
    // CTA and team of a job, and its index among the team's jobs.
    METHOD u32 rank(u32 job) const { return job & ctas - 1; }
    METHOD u32 team(u32 job) const { return job >> shift & second; }
    METHOD u32 index(u32 job) const { return job >> shift >> second; }
    METHOD u32 job(u32 rank, u32 team, u32 index) const { return (index << second | team) << shift | rank; }
    METHOD int of_team(u32 rank, u32 team) const {
        int before = (int)(team << shift | rank);
        return count() <= before ? 0 : (count() - before - 1 >> shift + second) + 1;
    }
    // Where a row's dim goes; `base`: of the CTA's shared memory.
    METHOD Sent at(u32 base, int row, int dim) const {
        u32 job = row * runs() + (is_row ? 0 : dim / 32), of_team = base + team(job) * SharedMemory::BYTES;
        return {peer_address(of_team + SharedMemory::RECEIVED + index(job) * stride(), rank(job)),
                peer_address(of_team + SharedMemory::ALL_RECEIVED, rank(job)), dim % width()};
    }
};

// Merges a team's jobs, which lie at `sent`, and writes their results.
template <int LEVEL, int COLUMNS>
DEVICE void merge_jobs(const DecodeParams& p, const WorkItem& item, const MergeJobs& jobs, u32 rank, const Team& team, u32 sent) {
#pragma unroll 1
    for (int i = team.warp; i < jobs.of_team(rank, team.index); i += Config::TILE_WARPS) {
        u32 job = jobs.job(rank, team.index, i), at = sent + i * jobs.stride();
        int row = job / (V_DIM / 32 / COLUMNS), dim = job % (V_DIM / 32 / COLUMNS) * 32 + lane_id();
        MergedRow<COLUMNS> x = merge_sent<LEVEL, COLUMNS, COLUMNS * 32, 32>(at, at + jobs.states_bytes(), jobs.partials);
        Epilogue epilogue = Epilogue::at(p, item, row);
        epilogue.begin(x.m, x.l, dim == 0);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) epilogue.write(dim + k * 32, x.o[k]);
    }
}
// The same of rotated rows: the team's warps merge the dims of each row side by side, in the place of the row's first partial, whose dims the same
// lanes have read; then each turns the whole row back and writes its dims.
template <int LEVEL> DEVICE void merge_rotated_jobs(const DecodeParams& p, const WorkItem& item, const MergeJobs& jobs, u32 rank, const Team& team, u32 sent) {
    constexpr int COLUMNS = V_DIM / 32, EACH = (COLUMNS + Config::TILE_WARPS - 1) / Config::TILE_WARPS;
#pragma unroll 1
    for (int i = 0; i < jobs.of_team(rank, team.index); i++) {
        u32 at = sent + i * jobs.stride(), row = at + team.lane * 4;
        MergedRow<EACH> x = merge_sent<LEVEL, EACH, V_DIM, 32 * Config::TILE_WARPS>(at + team.warp * 128, at + jobs.states_bytes(), jobs.partials);
        Epilogue epilogue = Epilogue::at(p, item, jobs.job(rank, team.index, i));
        epilogue.begin(x.m, x.l, team.warp == 0 && team.lane == 0);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (team.warp + k * Config::TILE_WARPS < COLUMNS) sts32(row + (team.warp + k * Config::TILE_WARPS) * 128, float_bits(epilogue.of(x.o[k])));
        team.barrier();
        epilogue.write_rotated(row, team.warp, Config::TILE_WARPS, team.lane);
    }
}
template <int LEVEL> DEVICE void merge_jobs_of(const DecodeParams& p, const WorkItem& item, const MergeJobs& jobs, u32 rank, const Team& team, u32 sent) {
    if constexpr (Values::IS_ROTATED) merge_rotated_jobs<LEVEL>(p, item, jobs, rank, team, sent);
    else if (jobs.is_row) merge_jobs<LEVEL, V_DIM / 32>(p, item, jobs, rank, team, sent);
    else merge_jobs<LEVEL, 1>(p, item, jobs, rank, team, sent);
}
DEVICE void merge_jobs(const DecodeParams& p, const WorkItem& item, const MergeJobs& jobs, Level level, u32 rank, const Team& team, u32 sent) {
    if (level == TILE_VALUES) merge_jobs_of<TILE_VALUES>(p, item, jobs, rank, team, sent);
    else if (level == SEGMENT_STATES) merge_jobs_of<SEGMENT_STATES>(p, item, jobs, rank, team, sent);
    else merge_jobs_of<SPAN_STATES>(p, item, jobs, rank, team, sent);
}

}  // namespace attn
