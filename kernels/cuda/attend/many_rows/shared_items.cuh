// Parts of a work item that several teams of many_rows.cu attend meet in the workspace: teams claim slices of rows when they count their
// partials, and merge them when all have arrived (partials_counted.cuh).
#pragma once
#include "attend/many_rows/work.cuh"
#include "attend/partials_counted.cuh"

// The team's parts that are counted, and whose slices it has still to merge: at most the first and the last.
struct Claims {
    WorkItem item[2];
    u32 slices[2];
    int count;
};

struct Meeting {
    const DecodeParams& p;
    Arrival* arrival;  // in shared memory
    int barrier;

    __device__ __forceinline__ void team_barrier() const { barrier_of<MERGE_THREADS>(barrier); }
    __device__ __forceinline__ bool is_first_thread() const { return merge_thread() == 0; }

    // Merges these slices of an item whose partials have all arrived, a row by each warp.
    __device__ __forceinline__ void merge_rows(const WorkItem& item, int first, u32 slices) const {
        int rows = item.rows(p);
#pragma unroll 1
        for (int row = merge_thread() / 32; row < rows; row += MERGE_THREADS / 32)
            if (slices >> row / SLICE_ROWS & 1) merge_row<float4, 32>(p, item, first, row, 0, 0, ROW_VECTORS);
    }
    // What a thread found for all.
    __device__ __forceinline__ Arrival of_team(const Arrival& found) const {
        if (is_first_thread()) *arrival = found;
        team_barrier();
        Arrival all = *arrival;
        team_barrier();
        return all;
    }
    // Counts partials from `from` to `end`, and claims slices to merge.
    __device__ __forceinline__ void count(const Part& part, Claims& claims) const {
        WorkItem item = part.item();
        team_barrier();  // the partials are written
        u32 mine = slices_for(p, item, part.first, part.end);
        Arrival found = {0, 0};
        if (is_first_thread()) {
            u32* at = p.counters + item.index(p);
            u32 add = ArrivalCount::of(part.end - part.first, part.first == 0 ? part.end - 1 : 0, mine), before = count_release(at, add);
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
    __device__ __forceinline__ void finish(const Claims& claims) const {
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
