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
// Shared    low_latency_smem.cuh.
// Host      kernels/src/cuda: select.rs (configuration), split.rs (launch, MergeVia), cost.rs, smem.rs.
#include "channel.cuh"
#include "partials_cluster.cuh"
#include "partials_nonzero.cuh"

static_assert(ROW_WARPS == 1 && HEAD_DIM % 64 == 0 && (V_GROUPS == 1 || V_GROUPS == 2 || V_GROUPS % TILE_WARPS == 0), "a warp's dims are of one group, or of whole ones");

// ---- the split ----

enum MergeVia { NO_MERGE, VIA_CLUSTER, VIA_GLOBAL };

// The team's index in the work item and in its CTA, and the sequence's length.
struct Start {
    int index, team, kv_len;
};

// The part of a work item that one team attends.
struct Split {
    int shift;             // log2 of a partial's tiles
    int all;               // partials of the work item
    int first, end;        // partials of this team

    __device__ __forceinline__ Level level(const Sequence& s) const {
        return shift == 0 ? TILE_VALUES : shift == s.segment_shift ? SEGMENT_STATES : SPAN_STATES;
    }
    // Partials of each team.
    DEVICE int each_of(const DecodeParams& p, int partials) {
        u32 second = blockDim.x / TEAM_THREADS - 1;  // team of the CTA
        return ceil_div(partials + second >> second, p.ctas_divmod);
    }
    // Called once the sequence's length is known; loads that do not need it are issued before.
    __device__ __forceinline__ void enter(const DecodeParams& p, Work& work, const Start& start) {
        work.measure = {SPANS, true};
        (Sequence&)work = Sequence::of(work.measure, start.kv_len);
        *this = of(p, work, start.index);
    }
    DEVICE Split of(const DecodeParams& p, const Sequence& s, int team) {
        Split x;
        int teams = gridDim.x * (blockDim.x / TEAM_THREADS);
        int segments = runs_of(s.num_tiles, s.segment_shift);
        bool tiles = s.num_tiles <= 2 * teams && s.segment_shift == 2;
        bool by_segments = MERGES_GLOBALLY ? p.partial_per_segment : segments <= TEAM_PARTIALS * teams;
        x.shift = teams == 1 ? s.segment_shift + 2 : tiles && !MERGES_GLOBALLY ? 0 : by_segments ? s.segment_shift : s.segment_shift + 2;
        x.all = runs_of(s.num_tiles, x.shift);
        int each = each_of(p, x.all);
        x.first = min(x.all, team * each);
        x.end = min(x.all, x.first + each);
        return x;
    }
};

// The page that a team will most likely start with, before the sequence's length is known. Where partials are merged through global
// memory a work item mostly has the largest number of them; with a cluster the sequence is short.
DEVICE int likely_page(const DecodeParams& p, int team) {
    return MERGES_GLOBALLY ? (team * Split::each_of(p, p.max_partials) << (p.partial_per_segment ? 2 : 4)) * BLOCKS / TILES_OF_PAGE : 0;
}

struct ItemSource {
    int sequence, length, head;

    __device__ __forceinline__ int b() const { return sequence; }
    __device__ __forceinline__ int kv_len() const { return length; }
    __device__ __forceinline__ int kv_head() const { return head; }
};

// The producer warp waits here until the team has loaded its first queries.
DEVICE void signal_q_loaded(int team) { barrier_of<TEAM_THREADS>(1 + MAX_TEAMS + team); }

// The producer warp copies the team's tiles into the ring. Stages after the first tile are filled once the queries are loaded: queries
// behind more copies would arrive later.
DEVICE void produce(const DecodeParams& p, Work& work, Split& split, const Ring& ring, const Start& start, int lane, const RowMaps* maps) {
    TileCopier<ItemSource> copier;
    copier.ring = ring;
    copier.lane = lane;
    copier.step = 1;
    copier.stage_of_tile = 0;
    copier.maps = maps;
    copier.begin(p, work.b, work.heads);
    u32 likely = copier.prefetch_pages(p, likely_page(p, start.index));
    split.enter(p, work, start);
    copier.source = {work.b, work.kv_len, work.heads};
    copier.open = first_open_tile(work.kv_len);
    copier.appended = first_appended_tile(p, work.kv_len);
    copier.tile = split.first << split.shift;
    int end = min(work.num_tiles, split.end << split.shift);
    if (copier.tile < end) {
        copier.load_page_indices(likely, likely_page(p, start.index));
        while (!copier.copy_next(p)) {
        }
    }
    signal_q_loaded(start.team);
#pragma unroll 1
    while (copier.tile < end)
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices();
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}

// ---- the tiles ----

// Scales of strided rows.
struct RowScales {
    const u16* scales;
    const long long* strides;
    int b, kv_head, t0;

    __device__ __forceinline__ u32 operator()(u32 at, int group, int t) const { return scale_pair(at, scales, strides, b, kv_head, t0, t, group); }
};

// Whether there are registers for V's parameters while scores are under way.
constexpr bool READS_AHEAD = ROW_GROUPS * V_GROUPS <= 2;

// One of the four warps that attend a team's tiles.
struct Warp {
    const DecodeParams& p;
    Work& work;
    Split& split;
    Ring ring;
    Team team;
    u32 query, scratch;
    u32 shared;  // of the team
    ItemRows item;

    // Recomputed after the tiles, where registers are short.
    __device__ __forceinline__ int row_block() const { return opaque(blockIdx.y) - work.heads * p.row_blocks; }

    __device__ __forceinline__ void load_queries() {
        if constexpr (K_PER_CHANNEL) {
            store_query(p, work, work.heads, query, 0, ROWS / 8, team.warp * 32 + team.lane, WORKERS);
            team.barrier();
            measure_queries(query, 0, team.lane, item.exponent_q);
        } else {
            load_query(p, work, work.heads, 0, team.lane, item.q);
        }
    }
    __device__ __forceinline__ void enter(const Start& start) {
        split.enter(p, work, start);
        item.rows = visible(p, work, work.heads, 0, team.lane);
    }
    __device__ __forceinline__ void done_with_stage() { ring.release(team.lane); }

    // Folds a tile into the segment's state. Whatever needs no exchange is computed before the barriers.
    __device__ __forceinline__ void tile(int index, State& state) {
        const Rows& rows = item.rows;
        int t0 = index * TILE, tokens = min(TILE, work.kv_len - t0);
        float s[ROW_GROUPS][SCORES], scale[ROW_GROUPS];
        StoredV<RowScales> v = {0, tokens, {p.v_scales, p.v_scale_strides, work.b, work.heads, t0}};
        OwnV own;
        auto prepare_values = [&](bool ahead) {
            if constexpr (!V_FLOAT) {
                if (ahead == READS_AHEAD) v.measure(team.lane);
                if (ahead && READS_AHEAD) own.read(v, team);
            }
        };
        if constexpr (K_PER_CHANNEL) {
            auto done = [&] { done_with_stage(); };
            v.stage = is_open(index, work.kv_len) ? tail_scores(ring, query, 0, tokens, team, s, done)
                                                  : channel_scores(ring, query, scratch, 0, item.exponent_q, team, s, done);
            if (!KV_ONE_STAGE) v.stage = ring.wait();
            prepare_values(true);
        } else {
            StoredK<RowScales> k = {ring.wait(), tokens, {p.k_scales, p.k_scale_strides, work.b, work.heads, t0}};
            v.stage = KV_ONE_STAGE ? k.stage + K_BYTES_OF_BLOCK : ring.wait_next();
            prepare_values(true);
            if constexpr (K_FLOAT) float_scores(k.stage, item.q, team, s);
            else scores(k.stage, k, item.q, team, s);
        }
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) scale[g] = K_PER_CHANNEL ? 1.0f : item.q.scale[g];
        int first = t0 + team.token() + 2 * (team.lane % 4);
        if constexpr (HAS_SCORE_MODS) apply_score_mods(p, rows, first, s, scale);
        bool full = true;
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) full &= rows.start[g] <= t0 && t0 + TILE <= rows.end[g];
        full = __all_sync(~0u, full);
        float tops[ROW_GROUPS];
        row_max(s, scale, full, [&](int g, int i) {
            int t = first + 8 * (i / 2) + i % 2;
            return t >= rows.start[g] && t < rows.end[g];
        }, tops);
        team.publish_largest(tops);
        team.barrier();
        prepare_values(false);
        team.gather_largest(tops);
        Rescale r;
        Pairs pairs;
        softmax_tile(s, scale, full, tops, state.m, r, pairs);
        if constexpr (V_FLOAT) publish_float_weights(s, r, team);
        else if constexpr (READS_AHEAD) publish_weights(s, pairs, r, own, team);
        else publish_weights(s, pairs, r, v, team);
        team.barrier();
        if constexpr (V_FLOAT) fold_gathered_floats(v.stage, tokens, r, team, state);
        else fold_gathered(v.stage, v.v, r, team, state);
        if (!KV_ONE_STAGE && !K_PER_CHANNEL) done_with_stage();  // with K
        done_with_stage();
    }

    // O of a partial, or of the work item so far, is kept in shared memory, where each lane has its own elements; (max, sum) in registers.
    __device__ __forceinline__ u32 kept_at(int place, int g, int dim) const {
        return shared + SharedMemory::STATE + ((place * ROWS + g * 8 + team.lane / 4) * STATE_STRIDE + team.dim() + dim) * 4;
    }
    // take(dim of the row, x, y) of the lane's pairs.
    template <class Take> __device__ __forceinline__ void each_kept(int place, int g, Take take) const {
#pragma unroll
        for (int j = 0; j < DIMS / 8; j++) {
            int dim = State::pair_of(j, team.lane);
            uint2 x = lds64(kept_at(place, g, dim));
            take(team.dim() + dim, bits_float(x.x), bits_float(x.y));
        }
    }
    // Merges a state that follows into the one that is kept.
    __device__ __forceinline__ void keep(int place, bool first, float2 (&ml)[ROW_GROUPS], const State& state) const {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            MergeScale w;
            float2 x = make_float2(state.m[g], state.l[g]);
            if (first) ml[g] = x;
            else w = merge_scale(ml[g].x, ml[g].y, x, false);
            state.each_pair(g, team.lane, [&](int dim, float x, float y) {
                u32 at = kept_at(place, g, dim);
                if (!first) {
                    uint2 before = lds64(at);
                    x = bits_float(before.x) * w.alpha + x * w.beta;
                    y = bits_float(before.y) * w.alpha + y * w.beta;
                }
                sts64(at, x, y);
            });
        }
    }
    // Attends a partial's tiles, one segment after the other.
    __device__ __forceinline__ void attend(int partial, int place, float2 (&ml)[ROW_GROUPS]) {
        int index = partial << split.shift, end = min(work.num_tiles, partial + 1 << split.shift);
        bool first = true;
        do {
            State segment;
            segment.clear();
            int until = min(end, index + (1 << work.segment_shift));
#pragma unroll 1
            for (; index < until; index++) tile(index, segment);
            keep(place, first, ml, segment);
            first = false;
        } while (index < end);
    }
    // Publishes a partial to the teams of the cluster that merge it.
    __device__ __forceinline__ void send(int partial, const float2 (&ml)[ROW_GROUPS]) const {
        MergeJobs jobs = MergeJobs::of(p, row_block(), split.all);
        constexpr int VECTORS = DIMS / 4;        // of a row, in this warp
        constexpr int UNROLL = ROW_GROUPS == 1 ? 16 : 1;  // with two row groups there are no registers for more
        u32 base = shared - team.index * SharedMemory::BYTES;
        __syncwarp();
#pragma unroll UNROLL
        for (int i = 0; i < ROWS * VECTORS / 32; i++) {
            int vector = i * 32 + team.lane, row = vector / VECTORS, dim = team.dim() + vector % VECTORS * 4;
            if (row >= jobs.rows) continue;
            Sent to = jobs.at(base, row, dim);
            peer_send(to.states + (partial * jobs.width() + to.dim) * 4, lds128(shared + SharedMemory::STATE + (row * STATE_STRIDE + dim) * 4), to.barrier);
        }
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
            for (int first = 0; first < DIMS; first += 8) {
                int row = g * 8 + team.lane / 4, dim = team.dim() + first;
                if (team.lane % 4 != 0 || row >= jobs.rows || dim % jobs.width() != 0) continue;
                Sent to = jobs.at(base, row, dim);
                peer_send(to.states + jobs.states_bytes() + partial * 8, ml[g], to.barrier);
            }
        }
        __syncwarp();  // before the place is another state's
    }
    // Merges what the cluster has sent to this team.
    __device__ __forceinline__ void receive(const WorkItem& item) const {
        MergeJobs jobs = MergeJobs::of(p, row_block(), split.all);
        int count = jobs.of_team(blockIdx.x, team.index);
        u32 all_sent = shared + SharedMemory::ALL_RECEIVED;
        if (count == 0) return;
        if (team.warp == 0 && team.lane == 0) barrier_expect(all_sent, count * jobs.sent_bytes());
        barrier_wait(all_sent, 0);
        merge_jobs(p, item, jobs, split.level(work), blockIdx.x, team.index, shared + SharedMemory::RECEIVED, team.warp);
    }
    // Publishes a partial in global memory, where merging teams wait for it.
    __device__ __forceinline__ void publish(int partial, const float2 (&ml)[ROW_GROUPS]) const {
        WorkItem item = {work.b, work.heads, row_block(), 0};
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            int of_item = g * 8 + opaque(team.lane) / 4;  // see `row_block`
            u64 row = (item.index(p) * p.max_partials + partial) * ROWS + of_item;
            if (of_item >= item.rows(p)) continue;
            if (team.warp == 0 && team.lane % 4 == 0) __stcg(p.partial_max_sum + row, encode_nonzero(ml[g].x, ml[g].y));
            each_kept(0, g, [&](int dim, float x, float y) { __stcg((float2*)(p.partial_o + row * HEAD_DIM + dim), encode_nonzero(x, y)); });
        }
    }
    // Merges partials from global memory. The team's split is computed again: registers are short.
    __device__ __forceinline__ void merge_global() const {
        Sequence sequence = work;
        sequence.num_tiles = opaque(sequence.num_tiles);
        Split mine = Split::of(p, sequence, blockIdx.x);
        WorkItem item = {work.b, work.heads, row_block(), mine.all};
        u32 slices = slices_to_merge(p, item, mine.first, mine.end);
        if (slices == 0) return;
        merge_arrived(p, item, {1, slices});
        team.barrier();
        clear_max_sums(p, item, slices);
    }
    // Merges a span into those before it, where the team has the work item alone.
    __device__ __forceinline__ void append(float2 (&ml)[ROW_GROUPS], const float2 (&span_ml)[ROW_GROUPS]) const {
        State span;
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            span.m[g] = span_ml[g].x;
            span.l[g] = span_ml[g].y;
#pragma unroll
            for (int j = 0; j < DIMS / 8; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) span.o[g][j][i] = bits_float(lds32(kept_at(1, g, State::dim_of(j, i, team.lane))));
        }
        keep(0, false, ml, span);
    }
    __device__ __forceinline__ void write(const WorkItem& item, const float2 (&ml)[ROW_GROUPS]) const {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            Epilogue epilogue = Epilogue::at(p, item, g * 8 + team.lane / 4);
            epilogue.begin(ml[g].x, ml[g].y, team.warp == 0 && team.lane % 4 == 0);
            each_kept(0, g, [&](int dim, float x, float y) { epilogue.write_pair(dim / 2, x, y); });
        }
    }
    // Attends the team's partials one after the other, and passes them on.
    template <MergeVia VIA> __device__ __forceinline__ void run() {
        float2 all_ml[ROW_GROUPS];
#pragma unroll 1
        for (int partial = split.first; partial < split.end; partial++) {
            float2 ml[ROW_GROUPS];
            attend(partial, VIA == NO_MERGE && partial > 0, ml);
            if constexpr (VIA == VIA_CLUSTER) {
                send(partial, ml);
            } else if constexpr (VIA == VIA_GLOBAL) {
                publish(partial, ml);
            } else if (partial > 0) {
                append(all_ml, ml);
            } else {
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) all_ml[g] = ml[g];
            }
        }
        WorkItem item = {work.b, work.heads, row_block(), split.all};
        if constexpr (VIA == VIA_CLUSTER) receive(item);
        else if constexpr (VIA == VIA_GLOBAL) merge_global();
        else if (split.first < split.end) write(item, all_ml);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, ATTN_CTAS) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, STAGE_ALIGN);
    int warp = threadIdx.x / 32 % (TILE_WARPS + 1), lane = lane_id(), team = threadIdx.x / TEAM_THREADS;
    u32 base = shared_address(shared), mine = base + team * SharedMemory::BYTES;
    int thread = threadIdx.x % TEAM_THREADS;
    bool in_cluster = !MERGES_GLOBALLY && gridDim.x * blockDim.x > TEAM_THREADS;
    if (thread < STAGES) {
        Ring::init(mine + SharedMemory::BARRIERS, thread);
    } else if (thread == STAGES) {
        barrier_init(mine + SharedMemory::ALL_RECEIVED, 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (in_cluster) cluster_arrive();  // from now on others may send
    if (threadIdx.x == TEAM_THREADS - 1) touch_params(p, base + SharedMemory::NOWHERE);
    // The launch ahead may still run: nothing that it writes has been read so far.
    after_dependencies(p);
    if (in_cluster) cluster_wait();
    Start start = {(int)(blockIdx.x * (blockDim.x / TEAM_THREADS)) + team, team, load_now(p.kv_lens + blockIdx.z)};
    Work work;
    work.b = blockIdx.z;
    work.heads = blockIdx.y / p.row_blocks_divmod;
    work.row_block = blockIdx.y - work.heads * p.row_blocks;
    Split split;
    Ring ring = {mine, mine + SharedMemory::BARRIERS, 0, 0};
    if (warp == TILE_WARPS) {
        const RowMaps* rows = nullptr;
#if ATTN_PAGE == 0
        rows = &maps;
#endif
        produce(p, work, split, ring, start, lane, rows);
    } else {
        Warp self = {p, work, split, ring, {mine + SharedMemory::EXCHANGE, warp, lane, team}, mine + SharedMemory::QUERY, mine + SharedMemory::SCRATCH + warp * SCRATCH_BYTES, mine};
        self.load_queries();
        self.enter(start);
        signal_q_loaded(team);
        if constexpr (MERGES_GLOBALLY) self.run<VIA_GLOBAL>();
        else if (in_cluster) self.run<VIA_CLUSTER>();
        else self.run<NO_MERGE>();
    }
}
