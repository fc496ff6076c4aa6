// The merge of work items that several teams of many_rows.cu share, through the workspace: teams claim slices of rows when they count their
// partials, and merge them when all have arrived (partials_counted.cuh).
#pragma once
#include "attend/many_rows/work.cuh"
#include "attend/partials_counted.cuh"

namespace attn {

// The work items whose partials the team has counted and whose slices it has still to merge: at most its first and its last.
struct MergeClaims {
    WorkItem item[2];
    u32 slices[2];
    int count;
};

struct SharedItemMerge {
    const DecodeParams& p;
    Arrival* arrival;  // in shared memory
    int barrier;

    METHOD void team_barrier() const { barrier_of<Config::MERGE_THREADS>(barrier); }
    METHOD bool is_first_thread() const { return Config::merge_thread() == 0; }

    // A wide row, by a warp. Each lane finds the factors of a partial. Few instructions: they arrive slowly where they run seldom.
    METHOD void merge_wide_row(const WorkItem& item, int first, int row) const {
        constexpr int N = (ROW_VECTORS + 31) / 32;
        const int lane = lane_id();
        const u64 partial = item.index(p) * p.max_partials;
        const float2* sums = p.partial_max_sum + partial * Config::ROWS + row;
        const float4* states = (const float4*)(p.partial_o + (partial * Config::ROWS + row) * V_DIM);
        float m = MINUS_INFINITY, l = 0.0f;
        float4 o[N];
#pragma unroll
        for (int k = 0; k < N; k++) o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int base = first; base < item.num_partials; base += 32) {
            const float2 mine = base + lane < item.num_partials ? __ldcg(sums + (u64)(base + lane) * Config::ROWS) : make_float2(MINUS_INFINITY, 0.0f);
            float top;
            const Factors w = running_factors(mine.x, top, 1, 32, m);
            const int count = min(32, item.num_partials - base);
#pragma unroll 4
            for (int i = 0; i < count; i++) {
                const Factors here = factors_at(w, i);
                merge(l, __shfl_sync(~0u, mine.y, i), here, false);
                const float4* state = states + (u64)(base + i) * (Config::ROWS * ROW_VECTORS);
#pragma unroll
                for (int k = 0; k < N; k++) merge(o[k], __ldcg(state + min(lane + k * 32, ROW_VECTORS - 1)), here, false);
            }
            m = __shfl_sync(~0u, top, 31);
        }
        Epilogue epilogue = Epilogue::at(p, item, row);
        epilogue.begin(m, l, lane == 0);
        epilogue.write_vectors<32>(o, lane);
    }
    // Merges these slices of an item whose partials have all arrived, a row by each warp.
    METHOD void merge_rows(const WorkItem& item, int first, u32 slices) const {
        int rows = item.rows(p);
#pragma unroll 1
        for (int row = Config::merge_thread() / 32; row < rows; row += Config::MERGE_THREADS / 32) {
            if (!(slices >> row / SLICE_ROWS & 1)) continue;
            if constexpr (Config::IS_WIDE) merge_wide_row(item, first, row);
            else merge_row<float4, 32>(p, item, first, row, 0, 0, ROW_VECTORS);
        }
    }
    // The first thread's outcome, for all threads of the team.
    METHOD Arrival of_team(const Arrival& found) const {
        if (is_first_thread()) *arrival = found;
        team_barrier();
        Arrival all = *arrival;
        team_barrier();
        return all;
    }
    // Counts partials from `from` to `end`, and claims slices to merge.
    METHOD void count(const WorkRange& range, MergeClaims& claims) const {
        WorkItem item = range.item();
        team_barrier();  // the partials are written
        u32 mine = slices_for(p, item, range.first, range.end);
        Arrival found = {0, 0};
        if (is_first_thread()) {
            u32* at = p.counters + item.index(p);
            const int covered = Config::LEAVES_EACH_SPAN || range.first > 0 ? 0 : range.end - 1;  // partials that the last one of the team's covers
            u32 add = ArrivalCount::of(range.end - range.first, covered, mine), before = count_release(at, add);
            if (ArrivalCount{before + add}.partials() == (u32)item.num_partials) found = on_arrival(p, item, before, add);
        }
        found = of_team(found);
        if (found.last) {
            merge_rows(item, found.last - 1, found.slices == ALL_SLICES ? slices_of(p, item) : found.slices);
        } else if (mine) {
            claims.item[claims.count] = item;
            claims.slices[claims.count++] = mine;
        }
    }
    // Waits for the items of the claims, and merges.
    METHOD void finish(const MergeClaims& claims) const {
#pragma unroll 1
        for (int i = 0; i < claims.count; i++) {
            const WorkItem& item = claims.item[i];
            Arrival found = {0, 0};
            if (is_first_thread()) found = {wait_for_partials(p.counters + item.index(p), claims.slices[i], item.num_partials), claims.slices[i]};
            found = of_team(found);
            if (found.last) merge_rows(item, found.last - 1, found.slices);
        }
    }
};

}  // namespace attn
