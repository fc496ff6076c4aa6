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

    // Merges these slices of an item whose partials have all arrived, a row by each warp.
    METHOD void merge_rows(const WorkItem& item, int first, u32 slices) const {
        int rows = item.rows(p);
#pragma unroll 1
        for (int row = Config::merge_thread() / 32; row < rows; row += Config::MERGE_THREADS / 32)
            if (slices >> row / SLICE_ROWS & 1) merge_row<float4, 32>(p, item, first, row, 0, 0, ROW_VECTORS);
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
            u32 add = ArrivalCount::of(range.end - range.first, range.first == 0 ? range.end - 1 : 0, mine), before = count_release(at, add);
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
