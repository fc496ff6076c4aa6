// low_latency.cu: split-KV decode attention by teams of four warps (sm_90a), for few or short sequences, where latency binds, and for
// 16-bit formats in waves.
//
// Grid      (CTAs of a work item, KV heads * row blocks, sequences); CTAs of 1 or 2 teams, a team is 4 warps and a producer warp.
// Split     the host fixes the number of teams of a work item; a team attends its next partials: tiles, segments or spans.
// Tile      four warps share each tile, by tokens for the scores and by dims for the values: 0.6 µs instead of the 2.5 of one warp. A
//           warp keeps a quarter of the dims in registers. This costs instructions and two barriers per tile: with more work in flight
//           split_kv.cu is faster, except for 16-bit formats, which need few instructions per byte.
// Merge     none where a work item has one team, in waves where there are more work items than run at once (VIA: NO_MERGE);
//           in a cluster's shared memory (VIA_CLUSTER, partials_cluster.cuh), the fastest way where all clusters run at once;
//           in global memory (VIA_GLOBAL, -DATTN_MERGE_GLOBAL, partials_nonzero.cuh): 1 to 2 µs more, for any number of CTAs.
// Reads     q; pages or strided rows; page table, lengths.
// Writes    out, lse; VIA_GLOBAL: partials in the workspace, which is zero between launches.
// Numerics  docs/arithmetic.md, the same bits as split_kv.cu.
// Shared    low_latency/shared_memory.cuh.
// Host      kernels/src/cuda: select.rs (configuration), split.rs (launch, MergeVia), cost.rs, smem.rs.
#include "attend/low_latency/partials_cluster.cuh"
#include "attend/low_latency/partials_nonzero.cuh"
#include "attend/pipeline.cuh"
#include "attend/tile/attend_tile.cuh"

namespace attn {

static_assert(V_DIM % 64 == 0 && (Values::GROUPS == 1 || Values::GROUPS == 2 || Values::GROUPS % Config::TILE_WARPS == 0),
              "a warp's dims are of one group, or of whole ones");

// ---- the split ----

enum MergeVia { NO_MERGE, VIA_CLUSTER, VIA_GLOBAL };

// The work item of a CTA: a sequence, a KV head, a row block.
struct Work {
    int b, kv_head, row_block;
    int kv_len;  // is waited for where it is needed
    int num_tiles;
};

// The team's index in the work item and in its CTA, and the sequence's length.
struct Start {
    int index, team, kv_len;
};

// The part of a work item that one team attends.
struct Split {
    int shift;             // log2 of a partial's tiles
    int all;               // partials of the work item
    int first, end;        // partials of this team

    METHOD Level level() const { return shift == 0 ? TILE_VALUES : shift == SEGMENT_SHIFT ? SEGMENT_STATES : SPAN_STATES; }
    // Partials of each team.
    DEVICE int each_of(const DecodeParams& p, int partials) {
        u32 second = blockDim.x / Config::TEAM_THREADS - 1;  // team of the CTA
        return ceil_div(partials + second >> second, p.ctas_divmod);
    }
    // Called once the sequence's length is known; loads that do not need it are issued before.
    METHOD void enter(const DecodeParams& p, Work& work, const Start& start) {
        work.num_tiles = (start.kv_len + TILE - 1) / TILE;
        *this = of(p, work.num_tiles, start.index);
    }
    DEVICE Split of(const DecodeParams& p, int num_tiles, int team) {
        Split x;
        int teams = gridDim.x * (blockDim.x / Config::TEAM_THREADS);
        int segments = runs_of(num_tiles, SEGMENT_SHIFT);
        bool by_tiles = num_tiles <= (Config::MERGES_GLOBALLY ? min(p.max_partials, teams) : 2 * teams);
        // Also by a plan for longer sequences, whose partials are spans, where teams then have fewer tiles and the workspace has the places.
        bool short_of_plan = segments <= min(p.max_partials, (SPAN - 1) * teams);
        bool by_segments = Config::MERGES_GLOBALLY ? p.partial_per_segment || short_of_plan
                                                   : segments <= (teams == MOST_TEAMS ? cluster_partials(MOST_TEAMS) : TEAM_PARTIALS * teams);
        x.shift = teams == 1 ? SPAN_SHIFT : by_tiles ? 0 : by_segments ? SEGMENT_SHIFT : SPAN_SHIFT;
        x.all = runs_of(num_tiles, x.shift);
        int each = each_of(p, x.all);
        x.first = min(x.all, team * each);
        x.end = min(x.all, x.first + each);
        return x;
    }
};

// Where a team's copies come from: one work item.
struct ItemSource {
    int b, length, head;

    METHOD int sequence() const { return b; }
    METHOD int first_residual_tile(const DecodeParams& p) const { return first_residual_tile_of(p, p.q_len, length); }
    METHOD int kv_len() const { return length; }
    METHOD int kv_head() const { return head; }
    METHOD bool has_first() const { return true; }
};

// The page that a team will most likely start with, before the sequence's length is known. Where partials are merged through global
// memory a work item mostly has the largest number of them; with a cluster the sequence is short.
DEVICE int likely_page(const DecodeParams& p, int team) {
    if (!Config::MERGES_GLOBALLY) return 0;
    int tile = team * Split::each_of(p, p.max_partials) << (p.partial_per_segment ? SEGMENT_SHIFT : SPAN_SHIFT);
    return tile * PageTable::ENTRIES / PageTable::TILES;
}

// The producer warp waits here until the team has loaded its first queries.
DEVICE void signal_q_loaded(int team) { barrier_of<Config::TEAM_THREADS>(1 + Config::MAX_TEAMS + team); }

// The producer warp copies the team's tiles into the ring. Stages after the first tile are filled once the queries are loaded: queries
// behind more copies would arrive later.
DEVICE void produce(const DecodeParams& p, Work& work, Split& split, const Ring& ring, const Start& start, int lane, const RowMaps* maps) {
    TileCopier<ItemSource> copier;
    copier.ring = ring;
    copier.lane = lane;
    copier.step = 1;
    copier.stage_of_tile = 0;
    copier.maps = maps;
    copier.source = {work.b, 0, work.kv_head};
    copier.begin(p, work.b, work.kv_head, first_residual_tile_of(p, p.q_len, start.kv_len));
    u32 likely = copier.prefetch_pages(p, likely_page(p, start.index));
    split.enter(p, work, start);
    copier.source.length = work.kv_len;
    copier.appended = first_appended_tile(p, work.kv_len);
    copier.tile = split.first << split.shift;
    int end = min(work.num_tiles, split.end << split.shift);
    if (copier.tile < end) {
        copier.prefetch_residuals(p, end);
        copier.load_page_indices(p, likely, likely_page(p, start.index));
        while (!copier.copy_next(p)) {}
    }
    signal_q_loaded(start.team);
#pragma unroll 1
    while (copier.tile < end)
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}

// ---- the tiles ----

// One of the four warps that attend a team's tiles.
struct Warp {
    const DecodeParams& p;
    Work& work;
    Split& split;
    Ring ring;
    Team team;
    u32 shared;  // of the team
    ItemRows item;

    // Recomputed after the tiles, where registers are short.
    METHOD int row_block() const { return opaque(blockIdx.y) - work.kv_head * p.row_blocks; }

    METHOD void load_queries(const Start& start) {
        // The first team's partials begin with the first tile.
        load_query(p, work, work.kv_head, 0, team.lane, start.index == 0, item.q, [&] { signal_q_loaded(start.team); });
    }
    METHOD void enter(const Start& start) {
        split.enter(p, work, start);
        item.rows = seen_rows(p, work, work.kv_head, 0, team.lane);
    }
    // Folds a tile into the segment's state.
    METHOD void tile(int index, State& state) {
        bool residuals = has_residuals(index, first_residual_tile_of(p, p.q_len, work.kv_len), true);
        attend_tile(p, {index, work.b, work.kv_head, work.kv_len, residuals, WINDOW && index == 0}, item, ring, team, *this, state);
    }
    // Stages stay until both products are done.
    METHOD Ring keys_are_read(const Ring& next, bool) const { return next; }
    METHOD void values_are_read(bool residuals) {
#pragma unroll 1
        for (int i = stages_of_keys(residuals) + stages_of_values(residuals); i > 0; i--) ring.release(team.lane);
    }

    // O of a partial, or of the work item so far, is kept in shared memory, where each lane has its own elements; (max, sum) in registers.
    METHOD u32 kept_at(int place, int row, int dim) const {
        return shared + SharedMemory::STATE + ((place * Config::ROWS + row) * Config::STATE_STRIDE + dim) * 4;
    }
    METHOD u32 kept_at(int place, int g, int j, int n) const {
        return kept_at(place, g * 8 + 2 * (team.lane % 4) + n % 2, team.dim() + 16 * j + dim_of(n / 2, team.lane));
    }
    // Merges a state that follows into the one that is kept.
    METHOD void keep(int place, bool first, float2 (&ml)[ROW_GROUPS][2], const State& state) const {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            Factors w[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float2 x = make_float2(state.m[g][e], state.l[g][e]);
                if (first) ml[g][e] = x;
                else w[e] = merge_sums(ml[g][e].x, ml[g][e].y, x, false);
            }
#pragma unroll
            for (int j = 0; j < Team::DIMS / 16; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 at = kept_at(place, g, j, n);
                    float o = state.o[g][j][n];
                    if (!first) o = bits_float(lds32(at)) * w[n % 2].alpha + o * w[n % 2].beta;
                    sts32(at, float_bits(o));
                }
        }
    }
    // take(row of the work item, dim, four elements from there on) of the warp's dims of a partial, each lane some of all warp's.
    template <class Take> METHOD void each_kept(int rows, Take take) const {
        constexpr int VECTORS = Team::DIMS / 4;                 // of a row, in this warp
        constexpr int UNROLL = ROW_GROUPS == 1 ? 16 : 1;  // with two row groups there are no registers for more
        __syncwarp();
#pragma unroll UNROLL
        for (int i = 0; i < Config::ROWS * VECTORS / 32; i++) {
            int vector = i * 32 + team.lane, row = vector / VECTORS, dim = team.dim() + vector % VECTORS * 4;
            if (row < rows) take(row, dim, lds128(kept_at(0, row, dim)));
        }
        __syncwarp();  // before the place is another state's
    }
    // Attends a partial's tiles, one segment after the other.
    METHOD void attend(int partial, int place, float2 (&ml)[ROW_GROUPS][2]) {
        int index = partial << split.shift, end = min(work.num_tiles, partial + 1 << split.shift);
        bool first = true;
        do {
            State segment;
            segment.clear();
            int until = min(end, index + (1 << SEGMENT_SHIFT));
#pragma unroll 1
            for (; index < until; index++) tile(index, segment);
            keep(place, first, ml, segment);
            first = false;
        } while (index < end);
    }
    // Publishes a partial to the teams of the cluster that merge it.
    METHOD void send(int partial, const float2 (&ml)[ROW_GROUPS][2]) const {
        MergeJobs jobs = MergeJobs::of(p, row_block(), split.all);
        u32 base = shared - team.index * SharedMemory::BYTES;
        each_kept(jobs.rows, [&](int row, int dim, float4 x) {
            Sent to = jobs.at(base, row, dim);
            peer_send(to.states + (partial * jobs.width() + to.dim) * 4, x, to.barrier);
        });
        if (team.lane < 4)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 2; e++)
#pragma unroll
                    for (int first = 0; first < Team::DIMS; first += 32) {
                        // Of each job whose first dim is the warp's: its dims may begin within a job.
                        int row = g * 8 + 2 * team.lane + e, dim = (team.dim() + 31 & ~31) + first;
                        if (row >= jobs.rows || dim >= team.dim() + Team::DIMS || dim % jobs.width() != 0) continue;
                        Sent to = jobs.at(base, row, dim);
                        peer_send(to.states + jobs.states_bytes() + partial * 8, ml[g][e], to.barrier);
                    }
    }
    // Merges what the cluster has sent to this team.
    METHOD void receive(const WorkItem& item) const {
        MergeJobs jobs = MergeJobs::of(p, row_block(), split.all);
        int count = jobs.of_team(blockIdx.x, team.index);
        u32 all_sent = shared + SharedMemory::ALL_RECEIVED;
        if (count == 0) return;
        if (team.warp == 0 && team.lane == 0) barrier_expect(all_sent, count * jobs.sent_bytes());
        barrier_wait(all_sent, 0);
        merge_jobs(p, item, jobs, split.level(), blockIdx.x, team, shared + SharedMemory::RECEIVED);
    }
    // Publishes a partial in global memory, where merging teams wait for it.
    METHOD void publish(int partial, const float2 (&ml)[ROW_GROUPS][2]) const {
        WorkItem item = {work.b, work.kv_head, row_block(), 0};
        u64 first = (item.index(p) * p.max_partials + partial) * Config::ROWS;
        int rows = item.rows(p);
        if (team.warp == 0 && team.lane < 4)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int row = g * 8 + 2 * team.lane + e;
                    if (row < rows) __stcg(p.partial_max_sum + first + row, encode_nonzero(ml[g][e].x, ml[g][e].y));
                }
        each_kept(rows, [&](int row, int dim, float4 x) {
            float2 a = encode_nonzero(x.x, x.y), b = encode_nonzero(x.z, x.w);
            __stcg((float4*)(p.partial_o + (first + row) * V_DIM + dim), make_float4(a.x, a.y, b.x, b.y));
        });
    }
    // Merges partials from global memory. The team's split is computed again: registers are short.
    METHOD void merge_global() const {
        Split mine = Split::of(p, opaque(work.num_tiles), blockIdx.x);
        WorkItem item = {work.b, work.kv_head, row_block(), mine.all, mine.level()};
        u32 slices = slices_to_merge(p, item, mine.first, mine.end);
        if (slices == 0) return;
        merge_arrived(p, item, {team.exchange, 1 + team.index}, {1, slices});
        team.barrier();
        clear_max_sums(p, item, slices);
    }
    // Merges a span into those before it, where the team has the work item alone.
    METHOD void append(float2 (&ml)[ROW_GROUPS][2], const float2 (&span_ml)[ROW_GROUPS][2]) const {
        State span;
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                span.m[g][e] = span_ml[g][e].x;
                span.l[g][e] = span_ml[g][e].y;
            }
#pragma unroll
            for (int j = 0; j < Team::DIMS / 16; j++)
#pragma unroll
                for (int n = 0; n < 4; n++) span.o[g][j][n] = bits_float(lds32(kept_at(1, g, j, n)));
        }
        keep(0, false, ml, span);
    }
    // Writes the result where the team has the work item alone: half a warp has a row, which the team's warps have kept together.
    METHOD void write(const WorkItem& item, const float2 (&ml)[ROW_GROUPS][2]) const {
        if (team.warp == 0 && team.lane < 4)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 2; e++) sts64(team.exchange + (g * 8 + 2 * team.lane + e) * 8, ml[g][e].x, ml[g][e].y);
        team.barrier();
#pragma unroll 1
        for (int row = 2 * team.warp + team.lane / 16; row < Config::ROWS; row += 2 * Config::TILE_WARPS) {
            Epilogue epilogue = Epilogue::at(p, item, row);
            uint2 of_row = lds64(team.exchange + row * 8);
            epilogue.begin(bits_float(of_row.x), bits_float(of_row.y), team.lane % 16 == 0);
            epilogue.write_state<16>(kept_at(0, row, 0), team.lane % 16);
        }
    }
    // Attends the team's partials one after the other, and passes them on.
    template <MergeVia VIA> METHOD void run() {
        float2 all_ml[ROW_GROUPS][2];
#pragma unroll 1
        for (int partial = split.first; partial < split.end; partial++) {
            float2 ml[ROW_GROUPS][2];
            attend(partial, VIA == NO_MERGE && partial > 0, ml);
            if constexpr (VIA == VIA_CLUSTER) {
                send(partial, ml);
            } else if constexpr (VIA == VIA_GLOBAL) {
                publish(partial, ml);
            } else if (partial > 0) {
                append(all_ml, ml);
            } else {
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) all_ml[g][0] = ml[g][0], all_ml[g][1] = ml[g][1];
            }
        }
        WorkItem item = {work.b, work.kv_head, row_block(), split.all};
        if constexpr (VIA == VIA_CLUSTER) receive(item);
        else if constexpr (VIA == VIA_GLOBAL) merge_global();
        else if (split.first < split.end) write(item, all_ml);
    }
};

extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::CTAS) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, Stage::ALIGN);
    int warp = warp_id() % (Config::TILE_WARPS + 1), lane = lane_id(), team = warp_id() / (Config::TEAM_THREADS / 32);
    u32 base = shared_address(shared), mine = base + team * SharedMemory::BYTES;
    int thread = threadIdx.x % Config::TEAM_THREADS;
    bool in_cluster = !Config::MERGES_GLOBALLY && gridDim.x * blockDim.x > Config::TEAM_THREADS;
    if (thread < Config::STAGES) {
        Ring::init(mine + SharedMemory::BARRIERS, thread);
    } else if (thread == Config::STAGES) {
        barrier_init(mine + SharedMemory::ALL_RECEIVED, 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (in_cluster) cluster_arrive();  // from now on others may send
    if (threadIdx.x == Config::TEAM_THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    // The launch ahead may still run: nothing that it writes has been read so far.
    after_dependencies(p);
    if (in_cluster) cluster_wait();
    Start start = {(int)(blockIdx.x * (blockDim.x / Config::TEAM_THREADS)) + team, team, load_now(p.kv_lens + blockIdx.z)};
    Work work;
    work.b = blockIdx.z;
    work.kv_len = start.kv_len;
    work.kv_head = blockIdx.y / p.row_blocks_divmod;
    work.row_block = blockIdx.y - work.kv_head * p.row_blocks;
    Split split;
    Ring ring = {mine, mine + SharedMemory::BARRIERS, 0, 0};
    if (warp == Config::TILE_WARPS) {
        const RowMaps* rows = ATTN_ROW_MAPS_OR_NULL;
        produce(p, work, split, ring, start, lane, rows);
    } else {
        Warp self = {p, work, split, ring, {mine + SharedMemory::EXCHANGE, warp, lane, team}, mine};
        self.load_queries(start);
        self.enter(start);
        if constexpr (Config::MERGES_GLOBALLY) self.run<VIA_GLOBAL>();
        else if (in_cluster) self.run<VIA_CLUSTER>();
        else self.run<NO_MERGE>();
    }
}

}  // namespace attn
