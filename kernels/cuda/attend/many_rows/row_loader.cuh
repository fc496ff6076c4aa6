// Producers of many_rows.cu that load query rows ahead, a warp for each warpgroup that attends: that takes as long as several tiles.
#pragma once
#include "attend/many_rows/float_rows.cuh"
#include "attend/many_rows/loaded_rows.cuh"
#include "attend/many_rows/producer.cuh"

namespace attn {

// A warp that loads the rows of a warpgroup of a team.
template <class Items> struct RowLoader {
    FloatRows of;
    Items scheduler;
    RowBuffers buffers;
    int warpgroup;  // that attends the rows

    METHOD void load(const WorkRange& range) const {
        LoadedRows& loaded = buffers.rows();
        if (of.lane == 0) {
            loaded.range = range;
            loaded.queries = query_block(of.p, range.b);
        }
        if (warpgroup % Config::TEAM_WARPGROUPS == 0) prefetch_queries(of.p, range, of.lane);
#pragma unroll 1
        for (int first = 0; first < 64; first += 8) {
            const int place = first + of.lane / 4, index = first_row_of(warpgroup, first / 16) + place % 16;
            const float lift = of.store_row(of.row(range, index), buffers.at() + place * 16);
            if (of.lane % 4 == 0) loaded.lifts[place] = lift;
        }
        fence_async();
    }
    // Loads the rows of all work items that the team takes. The first of its loaders reserves them, each when the warpgroup begins with the one before it.
    METHOD void load_all() {
        const bool reserves = warpgroup % Config::TEAM_WARPGROUPS == 0 && of.lane == 0;
        const u32 first_item = blockIdx.x * Config::TEAMS + warpgroup / Config::TEAM_WARPGROUPS;
        WorkRange range;
        bool is_first = true, is_some;
#pragma unroll 1
        do {
            barrier_wait(buffers.empty(), buffers.phase ^ 1);
            if (reserves) scheduler.publish(is_first ? first_item : scheduler.reserve(of.p));
            __syncwarp();
            is_first = false;
            is_some = scheduler.next(of.p, range, of.lane);
            if (of.lane == 0) buffers.rows().is_end = !is_some;
            if (is_some) load(range);
            buffers.pass_on(buffers.full(), of.lane);
        } while (is_some);
    }
};

// Such a warp's part of a launch; of a producer that has no rows to load, nothing.
template <class Items> DEVICE void load_rows_ahead(const DecodeParams& p, const Items& scheduler, u8* shared, int team, int producer, int lane) {
    const int warpgroup = team * Config::TEAM_WARPGROUPS + producer - 1;
    if constexpr (Config::LOADS_AHEAD)
        if (producer <= Config::TEAM_WARPGROUPS) RowLoader<Items>{{p, lane}, scheduler, RowBuffers::of_warpgroup(shared, warpgroup), warpgroup}.load_all();
}

}  // namespace attn
