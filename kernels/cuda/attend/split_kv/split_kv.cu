// split_kv.cu: split-KV decode attention over a quantized cache, on tensor cores; the kernel of most problems.
//
// Grid      persistent, (SMs * CTAs per SM); 4 teams of ROW_WARPS warps. All query rows of a KV head read the cache once.
// Split     each CTA finds its part of the work items on the device (split_kv/work.cuh). A team attends a span, a segment of one, tiles of a
//           segment, or a short work item of its own, whichever leaves all teams enough to do.
// Pipeline  each team has a ring of stages; the team's first warp is its producer (pipeline.cuh). Teams run independently.
// Merge     the states of the four teams are merged in shared memory once per work unit (split_kv/merge_teams.cuh), those of several CTAs
//           through the workspace (partials_counted.cuh).
// Reads     q; pages or strided rows; page table, lengths.
// Writes    out, lse; partials and arrival counts in the workspace.
// Numerics  docs/arithmetic.md. The order of every rounding is the same on every grid.
// Shared    split_kv/shared_memory.cuh.
// Host      kernels/src/cuda: select.rs (configuration), split.rs (launch), smem.rs; attn-cuda/src/native/launch_plan.rs.
#include "attend/split_kv/merge_teams.cuh"
#include "attend/split_kv/producer.cuh"
#include "attend/tile/attend_tile.cuh"

namespace attn {

struct Warp {
    const DecodeParams& p;
    Producer& producer;
    Ring& ring;
    Team team;
    int lane, warp_row;
    bool is_producer;

    METHOD void done_with_stages(int count) {
#pragma unroll 1
        for (; count > 0; count--) {
            ring.release(lane);
            if (is_producer) producer.issue(p);
        }
    }
    METHOD Ring keys_are_read(const Ring&, bool residuals) {
        if (!Stage::HOLDS_BOTH) done_with_stages(stages_of_keys(residuals));
        return ring;
    }
    METHOD void values_are_read(bool residuals) { done_with_stages(Stage::HOLDS_BOTH ? stages_of_keys(residuals) : stages_of_values(residuals)); }
    METHOD void tile(const Work& work, int index, const ItemRows& item, State& state) {
        bool residuals = has_residuals(index, work.first_residual_tile, work.has_first_tile());
        TileOf tile = {index, work.sequence, work.kv_head(producer.source.team), work.kv_len, residuals, WINDOW && index == 0 && work.has_first_tile()};
        attend_tile(p, tile, item, ring, team, *this, state);
    }

    // The rows and queries of a work item. A team without a work item repeats the last one. `loaded` as for load_query.
    template <class Loaded> METHOD void enter(const Work& work, ItemRows& item, Loaded loaded) {
        int kv_head = min(work.kv_head(producer.source.team), p.num_kv_heads - 1), first, end;
        item.rows = seen_rows(p, work, kv_head, warp_row, lane);
        // Units to come of the same rows lie behind this one.
        work.team_tiles(p, producer.source.team, first, end);
        load_query(p, work, kv_head, warp_row, lane, first == 0, item.q, loaded);
    }

    // The team's tiles of a work unit. Each segment's state goes to the team's place for the merge.
    METHOD void take(const Work& work, const ItemRows& item, Merge& merge) {
        int index, end, step = opaque(work.step()), segment_tiles = work.takes() >= A_SPAN ? 1 << SEGMENT_SHIFT : 1 << 30;
        work.team_tiles(p, producer.source.team, index, end);
        bool first = true;
#pragma unroll 1
        do {
            State state;
            state.clear();
            int until = opaque(end - index > segment_tiles ? index + segment_tiles : end);
#pragma unroll 1
            for (; index < until; index += step) tile(work, index, item, state);
            merge.segment(state, first, producer.source.team, warp_row, lane);
            first = false;
            merge.count(p);
        } while (index < end);
    }
};

extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::CTAS) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, Stage::ALIGN);
    int warp = warp_id(), lane = lane_id(), team = warp / Config::ROW_WARPS;
    u32 base = shared_address(shared);
    u32 barriers = base + SharedMemory::BARRIERS + team * Config::STAGES * 16;
    if (threadIdx.x < Config::TEAMS * Config::STAGES)
        Ring::init(base + SharedMemory::BARRIERS + threadIdx.x / Config::STAGES * Config::STAGES * 16, threadIdx.x % Config::STAGES);
    __syncthreads();
    if (threadIdx.x == Config::THREADS - 1) touch_params(p, base + SharedMemory::KEPT);
    // The launch ahead may still run: nothing that it writes has been read so far.
    after_dependencies(p);
    const RowMaps* rows = ATTN_ROW_MAPS_OR_NULL;
    Merge merge;
    merge.start(shared);
    Cursor* cursors = (Cursor*)(shared + SharedMemory::CURSORS);
    Cursor first = find_work(p, cursors, (u32*)(shared + SharedMemory::STATES));
    Ring ring = {base + team * Config::STAGES * Stage::BYTES, barriers, 0, 0};
    bool is_producer = Config::ROW_WARPS == 1 || warp % Config::ROW_WARPS == 0;
    Producer producer;
    producer.source = {cursors + 2 + team, team};
    producer.ring = ring;
    producer.lane = lane;
    producer.maps = rows;
    if (is_producer) {
        producer.start(p, first);
        producer.issue(p);
    }
    __syncthreads();  // cursors[0] and the MergeState are visible
    // The other stages are filled after the first queries are loaded: queries behind as many copies arrive 1.5 µs later.
    int ahead = 1;
    Warp self = {p, producer, ring, {0, 0, lane}, lane, warp % Config::ROW_WARPS * 8 * ROW_GROUPS, is_producer};
    ItemRows item;
#pragma unroll 1
    for (int n = 0; cursors[n].is_valid(p); n ^= 1) {
        const Cursor& here = cursors[n];
        const Work& work = here.work;
        if (threadIdx.x == 0) {
            Cursor next = here;
            next.next(p);
            cursors[n ^ 1] = next;
        }
        auto fill = [&] {
#pragma unroll 1
            for (; ahead < Config::STAGES; ahead++)
                if (is_producer) self.producer.issue(p);
        };
        // The first unit is one, too.
        if (here.is_fresh) self.enter(work, item, fill);
        self.take(work, item, merge);
        if (work.has_items()) merge.item(p, work, team, self.warp_row, lane);
        else merge.unit(p, here, cursors[n ^ 1]);
    }
    merge.finish(p);
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}

}  // namespace attn
