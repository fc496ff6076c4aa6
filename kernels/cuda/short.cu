// Split-KV decode attention by teams of four warps (sm_90): of few items and of short ones, where latency binds, and of wide formats in
// waves. An item is what one KV head of one sequence has to do.
//
// What decode.cu does, but for three things. No share has to be found: the host gives each item so many teams, and a team takes the
// item's next slots, tiles, segments or spans. Four warps share each tile, by tokens for the scores, by dims for the values: a tile takes
// 0.6 µs instead of the 2.5 that a warp needs alone, and states stay in registers, a quarter of the dims in each warp. And a fifth warp
// feeds them. All of that costs instructions, and a team waits at two barriers per tile: with more to do, decode.cu is faster, but for
// wide formats, whose instructions are few for each byte.
//
// Where a team's states go:
// - to the result, where the team has the item for itself. Also of more items than run at once, if their lengths are alike and the
//   format is wide: a team that ends makes room for the next, and nothing is ever joined (bf16 reads at 97 % so, at 95 in decode.cu).
// - to others of the cluster, which join them (cluster.cuh): the fastest way, for as many CTAs as clusters can have all at once.
// - to global memory, where others look for them (hand_over.cuh; a kernel of its own, ATTN_HAND_OVER): 1 to 2 µs more, for any number
//   of CTAs. 32 items would take 32 clusters of four SMs, of which 30 fit an H200; one item takes all SMs this way.
#include "channel.cuh"
#include "cluster.cuh"
#include "hand_over.cuh"

static_assert(WR == 1 && D % 64 == 0 && (V_GROUPS == 1 || V_GROUPS == 2 || V_GROUPS % TW == 0), "a warp's dims are of one group, or of whole ones");

// Of each of a CTA's teams.
extern "C" __device__ const int attn_shared_bytes = TEAM_BYTES;
extern "C" __device__ const int attn_threads = TEAM_THREADS;

// ---- who does what ----

enum Go { TO_THE_RESULT, TO_THE_CLUSTER, TO_MEMORY };

// Which of the item's teams this is, which of its CTA's, and the sequence's length.
struct Start {
    int index, team, kv_len;
};

// A team's slots of the item.
struct Slots {
    int shift;             // log2 of a slot's tiles
    int all;               // of the item
    int first, end;        // of this team

    __device__ __forceinline__ Level level(const Sequence& s) const {
        return shift == 0 ? TILE_VALUES : shift == s.segment_shift ? SEGMENT_STATES : SPAN_STATES;
    }
    // A team's part of so many.
    DEVICE int each_of(const DecodeParams& p, int slots) {
        u32 second = blockDim.x / TEAM_THREADS - 1;  // team of the CTA
        return ceil_div(slots + second >> second, p.by_ctas);
    }
    // With the sequence's length, which whatever needs no length does not wait for.
    __device__ __forceinline__ void enter(const DecodeParams& p, Work& work, const Start& start) {
        work.measure = {SPANS, true};
        (Sequence&)work = Sequence::of(work.measure, start.kv_len);
        *this = of(p, work, start.index);
    }
    DEVICE Slots of(const DecodeParams& p, const Sequence& s, int team) {
        Slots x;
        int teams = gridDim.x * (blockDim.x / TEAM_THREADS);
        int segments = runs_of(s.num_tiles, s.segment_shift);
        bool tiles = s.num_tiles <= 2 * teams && s.segment_shift == 2;
        bool by_segments = HANDS_OVER ? p.tile_split : segments <= TEAM_SLOTS * teams;
        x.shift = teams == 1 ? s.segment_shift + 2 : tiles && !HANDS_OVER ? 0 : by_segments ? s.segment_shift : s.segment_shift + 2;
        x.all = runs_of(s.num_tiles, x.shift);
        int each = each_of(p, x.all);
        x.first = min(x.all, team * each);
        x.end = min(x.all, x.first + each);
        return x;
    }
};

// The page that a team will most likely start with, before it knows the sequence's length: where a launch hands over, its slots are most
// often as many as they can be; of a cluster, the sequence is short.
DEVICE int likely_page(const DecodeParams& p, int team) {
    return HANDS_OVER ? (team * Slots::each_of(p, p.max_slots) << (p.tile_split ? 2 : 4)) * BLOCKS / TILES_OF_PAGE : 0;
}

struct OfItem {
    int sequence, length, head;

    __device__ __forceinline__ int b() const { return sequence; }
    __device__ __forceinline__ int kv_len() const { return length; }
    __device__ __forceinline__ int kv_head() const { return head; }
};

// The barrier of a team and the warp that feeds it.
DEVICE void first_queries_are_there(int team) { barrier_of<TEAM_THREADS>(1 + MAX_TEAMS + team); }

// One warp copies the tiles of the team's slots into the ring. What follows the first tile waits for the first queries: behind more
// copies, they would take longer.
DEVICE void feed(const DecodeParams& p, Work& work, Slots& slots, const Ring& ring, const Start& start, int lane, const RowMaps* maps) {
    Copies<OfItem> copies;
    copies.ring = ring;
    copies.lane = lane;
    copies.step = 1;
    copies.part = 0;
    copies.maps = maps;
    copies.begin(p, work.b, work.heads);
    u32 likely = copies.look_at(p, likely_page(p, start.index));
    slots.enter(p, work, start);
    copies.place = {work.b, work.kv_len, work.heads};
    copies.open = first_open_tile(work.kv_len);
    copies.appended = first_appended_tile(p, work.kv_len);
    copies.tile = slots.first << slots.shift;
    int end = min(work.num_tiles, slots.end << slots.shift);
    if (copies.tile < end) {
        copies.look_up(likely, likely_page(p, start.index));
        while (!copies.copy_next(p)) {
        }
    }
    first_queries_are_there(start.team);
#pragma unroll 1
    while (copies.tile < end)
        if (copies.copy_next(p) && copies.known == 32) copies.look_up();
    wait_for_dependencies();  // whoever waits for this launch relies on the ones before it, too
}

// ---- the tiles ----

// Scales of someone else's rows, where a stage has them.
struct RowScales {
    const u16* scales;
    const long long* strides;
    int b, kv_head, t0;

    __device__ __forceinline__ u32 operator()(u32 at, int group, int t) const { return scale_pair(at, scales, strides, b, kv_head, t0, t, group); }
};

// Whether there are registers for V's parameters while scores are under way.
constexpr bool READS_AHEAD = G * V_GROUPS <= 2;

// A team's run of tiles.
struct Warp {
    const DecodeParams& p;
    Work& work;
    Slots& slots;
    Ring ring;
    Team team;
    u32 query, scratch;
    u32 shared;  // of the team
    ItemRows item;

    // After the tiles, for which registers are short.
    __device__ __forceinline__ int row_block() const { return not_before(blockIdx.y) - work.heads * p.row_blocks; }

    __device__ __forceinline__ void load_queries() {
        if constexpr (CHANNEL) {
            store_query(p, work, work.heads, query, 0, ROWS / 8, team.warp * 32 + team.lane, WORKERS);
            team.barrier();
            measure_queries(query, 0, team.lane, item.exponent_q);
        } else {
            load_query(p, work, work.heads, 0, team.lane, item.q);
        }
    }
    __device__ __forceinline__ void enter(const Start& start) {
        slots.enter(p, work, start);
        item.rows = visible(p, work, work.heads, 0, team.lane);
    }
    __device__ __forceinline__ void done_with_stage() { ring.release(team.lane); }

    // A tile, folded into the segment's state. What can be known before a barrier is.
    __device__ __forceinline__ void tile(int index, State& state) {
        const Rows& rows = item.rows;
        int t0 = index * TILE, tokens = min(TILE, work.kv_len - t0);
        float s[G][SCORES], scale[G];
        StoredV<RowScales> v = {0, tokens, {p.v_scales, p.v_scale_strides, work.b, work.heads, t0}};
        OwnV own;
        auto look_at_values = [&](bool ahead) {
            if constexpr (!V_FLOAT) {
                if (ahead == READS_AHEAD) v.measure(team.lane);
                if (ahead && READS_AHEAD) own.read(v, team);
            }
        };
        if constexpr (CHANNEL) {
            auto done = [&] { done_with_stage(); };
            v.stage = is_open(index, work.kv_len) ? tail_scores(ring, query, 0, tokens, team, s, done)
                                                  : channel_scores(ring, query, scratch, 0, item.exponent_q, team, s, done);
            if (!WHOLE) v.stage = ring.wait();
            look_at_values(true);
        } else {
            StoredK<RowScales> k = {ring.wait(), tokens, {p.k_scales, p.k_scale_strides, work.b, work.heads, t0}};
            v.stage = WHOLE ? k.stage + K_PART : ring.wait_next();
            look_at_values(true);
            if constexpr (K_FLOAT) float_scores(k.stage, item.q, team, s);
            else scores(k.stage, k, item.q, team, s);
        }
#pragma unroll
        for (int g = 0; g < G; g++) scale[g] = CHANNEL ? 1.0f : item.q.scale[g];
        int first = t0 + team.token() + 2 * (team.lane % 4);
        if constexpr (MASKS) bend(p, rows, first, s, scale);
        bool full = true;
#pragma unroll
        for (int g = 0; g < G; g++) full &= rows.start[g] <= t0 && t0 + TILE <= rows.end[g];
        full = __all_sync(~0u, full);
        float tops[G];
        highest(s, scale, full, [&](int g, int i) {
            int t = first + 8 * (i / 2) + i % 2;
            return t >= rows.start[g] && t < rows.end[g];
        }, tops);
        team.tell_largest(tops);
        team.barrier();
        look_at_values(false);
        team.hear_largest(tops);
        Rescale r;
        Pairs pairs;
        soften(s, scale, full, tops, state.m, r, pairs);
        if constexpr (V_FLOAT) tell_float_weights(s, r, team);
        else if constexpr (READS_AHEAD) tell_weights(s, pairs, r, own, team);
        else tell_weights(s, pairs, r, v, team);
        team.barrier();
        if constexpr (V_FLOAT) fold_told_floats(v.stage, tokens, r, team, state);
        else fold_told(v.stage, v.v, r, team, state);
        if (!WHOLE && !CHANNEL) done_with_stage();  // with K
        done_with_stage();
    }

    // O of a slot, or of the item so far, waits in a place, where a lane has its own elements; (m, l) in registers.
    __device__ __forceinline__ u32 kept_at(int place, int g, int dim) const {
        return shared + AT_PLACES + ((place * ROWS + g * 8 + team.lane / 4) * STATE_STRIDE + team.dim() + dim) * 4;
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
    // Joins what follows to what is kept there.
    __device__ __forceinline__ void keep(int place, bool first, float2 (&ml)[G], const State& state) const {
#pragma unroll
        for (int g = 0; g < G; g++) {
            Weight w;
            float2 x = make_float2(state.m[g], state.l[g]);
            if (first) ml[g] = x;
            else w = join_weight(ml[g].x, ml[g].y, x, false);
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
    // A slot's tiles: its segments, one after the other.
    __device__ __forceinline__ void attend(int slot, int place, float2 (&ml)[G]) {
        int index = slot << slots.shift, end = min(work.num_tiles, slot + 1 << slots.shift);
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
    // A slot to those of the cluster who will join it.
    __device__ __forceinline__ void send(int slot, const float2 (&ml)[G]) const {
        Tasks tasks = Tasks::of(p, row_block(), slots.all);
        constexpr int VECTORS = DIMS / 4;        // of a row, in this warp
        constexpr int UNROLL = G == 1 ? 16 : 1;  // with two row groups there are no registers for more
        u32 base = shared - team.index * TEAM_BYTES;
        __syncwarp();
#pragma unroll UNROLL
        for (int i = 0; i < ROWS * VECTORS / 32; i++) {
            int vector = i * 32 + team.lane, row = vector / VECTORS, dim = team.dim() + vector % VECTORS * 4;
            if (row >= tasks.rows) continue;
            Sent to = tasks.at(base, row, dim);
            peer_send(to.states + (slot * tasks.width() + to.dim) * 4, lds128(shared + AT_PLACES + (row * STATE_STRIDE + dim) * 4), to.barrier);
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int first = 0; first < DIMS; first += 8) {
                int row = g * 8 + team.lane / 4, dim = team.dim() + first;
                if (team.lane % 4 != 0 || row >= tasks.rows || dim % tasks.width() != 0) continue;
                Sent to = tasks.at(base, row, dim);
                peer_send(to.states + tasks.states_bytes() + slot * 8, ml[g], to.barrier);
            }
        }
        __syncwarp();  // before the place is another state's
    }
    // What the others send to this team, joined.
    __device__ __forceinline__ void receive(const Item& item) const {
        Tasks tasks = Tasks::of(p, row_block(), slots.all);
        int count = tasks.of_team(blockIdx.x, team.index);
        u32 all_sent = shared + AT_ALL_SENT;
        if (count == 0) return;
        if (team.warp == 0 && team.lane == 0) barrier_expect(all_sent, count * tasks.sent_bytes());
        barrier_wait(all_sent, 0);
        join_tasks(p, item, tasks, slots.level(work), blockIdx.x, team.index, shared + AT_SENT, team.warp);
    }
    // A slot to global memory, where whoever joins it looks.
    __device__ __forceinline__ void hand_over(int slot, const float2 (&ml)[G]) const {
        Item item = {work.b, work.heads, row_block(), 0};
#pragma unroll
        for (int g = 0; g < G; g++) {
            int of_item = g * 8 + not_before(team.lane) / 4;  // see `row_block`
            u64 row = (item.index(p) * p.max_slots + slot) * ROWS + of_item;
            if (of_item >= item.rows(p)) continue;
            if (team.warp == 0 && team.lane % 4 == 0) __stcg(p.state_ml + row, told(ml[g].x, ml[g].y));
            each_kept(0, g, [&](int dim, float x, float y) { __stcg((float2*)(p.states + row * D + dim), told(x, y)); });
        }
    }
    // For which registers are short, too: the team's slots are found anew.
    __device__ __forceinline__ void join_handed() const {
        Sequence sequence = work;
        sequence.num_tiles = not_before(sequence.num_tiles);
        Slots mine = Slots::of(p, sequence, blockIdx.x);
        Item item = {work.b, work.heads, row_block(), mine.all};
        u32 parts = handed_parts(p, item, mine.first, mine.end);
        if (parts == 0) return;
        join_answered(p, item, {1, parts});
        team.barrier();
        clear_mls(p, item, parts);
    }
    // A span to those before it, of an item that the team has for itself.
    __device__ __forceinline__ void append(float2 (&ml)[G], const float2 (&span_ml)[G]) const {
        State span;
#pragma unroll
        for (int g = 0; g < G; g++) {
            span.m[g] = span_ml[g].x;
            span.l[g] = span_ml[g].y;
#pragma unroll
            for (int j = 0; j < DIMS / 8; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) span.o[g][j][i] = bits_float(lds32(kept_at(1, g, State::dim_of(j, i, team.lane))));
        }
        keep(0, false, ml, span);
    }
    __device__ __forceinline__ void write(const Item& item, const float2 (&ml)[G]) const {
#pragma unroll
        for (int g = 0; g < G; g++) {
            Finish finish = Finish::at(p, item, g * 8 + team.lane / 4);
            finish.finish(ml[g].x, ml[g].y, team.warp == 0 && team.lane % 4 == 0);
            each_kept(0, g, [&](int dim, float x, float y) { finish.write_pair(dim / 2, x, y); });
        }
    }
    // The team's slots, one after the other, and where they go.
    template <Go GO> __device__ __forceinline__ void run() {
        float2 all_ml[G];
#pragma unroll 1
        for (int slot = slots.first; slot < slots.end; slot++) {
            float2 ml[G];
            attend(slot, GO == TO_THE_RESULT && slot > 0, ml);
            if constexpr (GO == TO_THE_CLUSTER) {
                send(slot, ml);
            } else if constexpr (GO == TO_MEMORY) {
                hand_over(slot, ml);
            } else if (slot > 0) {
                append(all_ml, ml);
            } else {
#pragma unroll
                for (int g = 0; g < G; g++) all_ml[g] = ml[g];
            }
        }
        Item item = {work.b, work.heads, row_block(), slots.all};
        if constexpr (GO == TO_THE_CLUSTER) receive(item);
        else if constexpr (GO == TO_MEMORY) join_handed();
        else if (slots.first < slots.end) write(item, all_ml);
    }
};

// Grid: (CTAs of an item, KV heads · row blocks, sequences); CTAs of one or two teams.
extern "C" __global__ void __launch_bounds__(THREADS, ATTN_CTAS) attn_decode(const __grid_constant__ DecodeParams p ATTN_ROW_MAPS) {
    SHARED_MEMORY(shared, STAGE_ALIGN);
    int warp = threadIdx.x / 32 % (TW + 1), lane = lane_id(), team = threadIdx.x / TEAM_THREADS;
    u32 base = shared_address(shared), mine = base + team * TEAM_BYTES;
    int thread = threadIdx.x % TEAM_THREADS;
    bool in_cluster = !HANDS_OVER && gridDim.x * blockDim.x > TEAM_THREADS;
    if (thread < STAGES) {
        Ring::init(mine + AT_BARRIERS, thread);
    } else if (thread == STAGES) {
        barrier_init(mine + AT_ALL_SENT, 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (in_cluster) cluster_arrive();  // what others send may come from now on
    if (threadIdx.x == TEAM_THREADS - 1) touch_params(p, base + AT_NOWHERE);
    // Whatever comes before in the stream may still be running: nothing of it has been read so far.
    after_dependencies(p);
    if (in_cluster) cluster_wait();
    Start start = {(int)(blockIdx.x * (blockDim.x / TEAM_THREADS)) + team, team, load_now(p.kv_lens + blockIdx.z)};
    Work work;
    work.b = blockIdx.z;
    work.heads = blockIdx.y / p.by_row_blocks;
    work.row_block = blockIdx.y - work.heads * p.row_blocks;
    Slots slots;
    Ring ring = {mine, mine + AT_BARRIERS, 0, 0};
    if (warp == TW) {
        const RowMaps* rows = nullptr;
#if ATTN_PAGE == 0
        rows = &maps;
#endif
        feed(p, work, slots, ring, start, lane, rows);
    } else {
        Warp self = {p, work, slots, ring, {mine + AT_EXCHANGE, warp, lane, team}, mine + AT_QUERY, mine + AT_SCRATCH + warp * SCRATCH_BYTES, mine};
        self.load_queries();
        self.enter(start);
        first_queries_are_there(team);
        if constexpr (HANDS_OVER) self.run<TO_MEMORY>();
        else if (in_cluster) self.run<TO_THE_CLUSTER>();
        else self.run<TO_THE_RESULT>();
    }
}
