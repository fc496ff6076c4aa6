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

// The partials of some rows of a work item, which a warp merges at once. Each of the rows has a group of lanes, which find the factors of as many of its partials; every lane
// merges its vectors of all of the rows.
struct ItemPartials {
    static constexpr int VECTORS = (ROW_VECTORS + 31) / 32;         // of a row, in a lane
    static constexpr int AT_ONCE = 16;                              // that a lane loads together
    const float4* states;
    const float2* sums;
    int first, end;  // `first` covers those before it
    int row;         // of the lane's group

    // Of the rows: where partials are few, loads of several rows wait together. Warps that multiply for themselves lack the registers.
    static constexpr bool IS_ONE_ROW = VECTORS > 1 || !ATTN_BULK;
    METHOD int log2_rows() const { return IS_ONE_ROW || end - first > 16 ? 0 : end - first > 4 ? 1 : 2; }
};
// Merges R rows. Few instructions: they arrive slowly where they run seldom.
template <int R> DEVICE void merge_rows_of(const ItemPartials& partials, Epilogue& epilogue) {
    constexpr int N = ItemPartials::VECTORS, LANES = 32 / R, AT_ONCE = ItemPartials::AT_ONCE / (R * (N < 3 ? N : 4));
    static_assert(LANES % AT_ONCE == 0, "a batch has the factors of one look");
    const float4 ZERO = {};
    const int lane = lane_id();
    float m = MINUS_INFINITY, l = 0.0f;
    float2 mine;
    Factors w;
    float4 o[R][N];
    int vectors[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        vectors[r] = __shfl_sync(~0u, partials.row, r * LANES) * ROW_VECTORS;
#pragma unroll
        for (int k = 0; k < N; k++) o[r][k] = ZERO;
    }
#pragma unroll 1
    for (int base = partials.first; base < partials.end; base += AT_ONCE) {
        const int count = min(AT_ONCE, partials.end - base), place = (base - partials.first) % LANES;
        float4 x[AT_ONCE][R][N];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float4* of_partial = partials.states + (u64)(base + min(i, count - 1)) * (Config::ROWS * ROW_VECTORS);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int k = 0; k < N; k++) x[i][r][k] = __ldcg(of_partial + vectors[r] + min(lane + k * 32, ROW_VECTORS - 1));
        }
        if (place == 0) {
            const int partial = base + lane % LANES;
            mine = partial < partials.end ? __ldcg(partials.sums + (u64)partial * Config::ROWS + partials.row) : make_float2(MINUS_INFINITY, 0.0f);
            float top;
            w = running_factors(mine.x, top, 1, LANES, m);
            m = __shfl_sync(~0u, top, lane | LANES - 1);
        }
        __syncwarp();  // ptxas would move loads to where they are needed
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            // Beyond the last partial a side is empty: it changes nothing. Of many, four are merged without a branch.
            if (i % (AT_ONCE > 4 ? 4 : 1) == 0 && i >= count) break;
            const int of_group = (R == 1 ? 0 : lane / LANES * LANES) + place + i;
            merge(l, __shfl_sync(~0u, mine.y, of_group), factors_at(w, of_group), false);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const Factors here = factors_at(w, r * LANES + place + i);
#pragma unroll
                for (int k = 0; k < N; k++) merge(o[r][k], i < count ? x[i][r][k] : ZERO, here, false);
            }
        }
    }
    epilogue.begin(m, l, lane % LANES == 0);
#pragma unroll
    for (int r = 0; r < R; r++) epilogue.of_lane(r * LANES).write_vectors<32>(o[r], lane);
}
// `epilogue`: that of the row of the lane's group. Not inlined: it is long and rare. Arguments by value: references would be reloaded from global memory.
static __device__ __noinline__ void merge_item_rows(ItemPartials partials, Epilogue epilogue) {
    switch (partials.log2_rows()) {
    case 2: return merge_rows_of<(ItemPartials::IS_ONE_ROW ? 1 : 4)>(partials, epilogue);
    case 1: return merge_rows_of<(ItemPartials::IS_ONE_ROW ? 1 : 2)>(partials, epilogue);
    default: merge_rows_of<1>(partials, epilogue);
    }
}

struct SharedItemMerge {
    const DecodeParams& p;
    Arrival* arrival;  // in shared memory
    int barrier;

    METHOD void team_barrier() const { barrier_of<Config::MERGE_THREADS>(barrier); }
    METHOD bool is_first_thread() const { return Config::merge_thread() == 0; }

    // The n-th of some slices.
    DEVICE int nth_slice(u32 slices, int n) {
#pragma unroll 1
        for (; n > 0; n--) slices &= slices - 1;
        return __ffs(slices) - 1;
    }
    // Merges these slices of an item whose partials have all arrived.
    METHOD void merge_rows(const WorkItem& item, int first, u32 slices) const {
        constexpr int WARPS = Config::MERGE_THREADS / 32;
        const u64 partial = item.index(p) * p.max_partials * Config::ROWS;
        ItemPartials partials = {(const float4*)p.partial_o + partial * ROW_VECTORS, p.partial_max_sum + partial, first, item.num_partials, 0};
        const int shift = partials.log2_rows(), rows = item.rows(p), end = __popc(slices) * SLICE_ROWS, group = (int)lane_id() >> 5 - shift;
#pragma unroll 1
        for (int n = Config::merge_thread() / 32; n < end; n += WARPS << shift) {
            const int mine = n + group * WARPS, row = nth_slice(slices, min(mine, end - 1) / SLICE_ROWS) * SLICE_ROWS + mine % SLICE_ROWS;
            Epilogue epilogue = {};
            partials.row = 0;
            if (mine < end && row < rows) {
                epilogue = Epilogue::at(p, item, row);
                partials.row = row;
            }
            if (__any_sync(~0u, epilogue.out != nullptr)) merge_item_rows(partials, epilogue);
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
            u64* at = p.counters + item.index(p);
            const int covered = Config::LEAVES_EACH_SPAN || range.first > 0 ? 0 : range.end - 1;  // partials that the last one of the team's covers
            u64 add = ArrivalCount::of(range.end - range.first, covered, mine), before = count_release(at, add);
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
