// States on their way within a cluster (short.cu): a team sends each of its slots, as soon as it has it, to the shared memory of whoever
// will join it, and is done; who joins waits for the bytes alone. (Before, all threads of a cluster waited for each other, read each
// other's memory, and waited again before they left: 0.7 µs more.)
#pragma once
#include "merge.cuh"

constexpr int TEAM_SLOTS = 4;  // of the item, for each of its teams, at most

// Room for a team's tasks: of as many slots as all teams can have, 32 dims and (m, l) each. Teams are a power of two that divides the
// tasks of ROWS rows, so that tasks of fewer rows never leave one of them more.
constexpr int SENT_BYTES = TEAM_SLOTS * ROWS * (D / 32) * (32 * 4 + 8);

// A team's memory. A state of its own waits in a place; a second one, of an item that it has alone, lies where others' would.
constexpr int PLACE_BYTES = ROWS * STATE_STRIDE * 4;
constexpr int AT_EXCHANGE = STAGES * STAGE_BYTES, AT_PLACES = AT_EXCHANGE + EXCHANGE_BYTES, AT_SENT = AT_PLACES + PLACE_BYTES;
constexpr int AT_QUERY = AT_SENT + (HANDS_OVER ? 0 : SENT_BYTES), AT_SCRATCH = AT_QUERY + QUERY_BYTES;
constexpr int AT_BARRIERS = AT_SCRATCH + (CHANNEL ? TW * SCRATCH_BYTES : 0), AT_ALL_SENT = AT_BARRIERS + STAGES * 16;
constexpr int AT_NOWHERE = AT_ALL_SENT + 8, TEAM_BYTES = (AT_NOWHERE + 8 + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
static_assert(PLACE_BYTES <= SENT_BYTES, "a second place");

// Where a task's states go, its barrier, and the dim among its own.
struct Sent {
    u32 states, barrier;
    int dim;
};

// What the cluster's warps join: a task is a row, or 32 dims of one, of all slots. Its states lie side by side, (m, l) behind them.
// Tasks are dealt to CTAs and to their teams, one after the other.
struct Tasks {
    u32 ctas, shift;  // of the cluster; its log2
    u32 second;       // whether CTAs have a second team
    int slots, rows;
    bool whole;       // whether a task is a row: where tasks of 32 dims would be more than warps

    DEVICE Tasks of(const DecodeParams& p, int row_block, int slots) {
        u32 second = blockDim.x / TEAM_THREADS - 1;
        int rows = min(ROWS, p.heads_per_kv * p.q_len - row_block * ROWS);
        return {gridDim.x, (u32)__ffs(gridDim.x) - 1, second, slots, rows, rows * (D / 32) > (int)(gridDim.x << second) * TW};
    }
    __device__ __forceinline__ int width() const { return whole ? D : 32; }
    __device__ __forceinline__ int runs() const { return whole ? 1 : D / 32; }
    __device__ __forceinline__ int count() const { return rows * runs(); }
    __device__ __forceinline__ u32 states_bytes() const { return slots * width() * 4; }
    __device__ __forceinline__ u32 sent_bytes() const { return states_bytes() + slots * 8; }
    __device__ __forceinline__ u32 stride() const { return sent_bytes() + 15 & ~15u; }
    // Whose it is, and where it lies among the team's.
    __device__ __forceinline__ u32 rank(u32 task) const { return task & ctas - 1; }
    __device__ __forceinline__ u32 team(u32 task) const { return task >> shift & second; }
    __device__ __forceinline__ u32 index(u32 task) const { return task >> shift >> second; }
    __device__ __forceinline__ u32 task(u32 rank, u32 team, u32 index) const { return (index << second | team) << shift | rank; }
    __device__ __forceinline__ int of_team(u32 rank, u32 team) const {
        int before = (int)(team << shift | rank);
        return count() <= before ? 0 : (count() - before - 1 >> shift + second) + 1;
    }
    // Where a row's dim goes; `base`: of the CTA's shared memory.
    __device__ __forceinline__ Sent at(u32 base, int row, int dim) const {
        u32 task = row * runs() + (whole ? 0 : dim / 32), of_team = base + team(task) * TEAM_BYTES;
        return {peer_address(of_team + AT_SENT + index(task) * stride(), rank(task)), peer_address(of_team + AT_ALL_SENT, rank(task)), dim % width()};
    }
};

// The largest of this lane and those 1, 2, … count - 1 strides before it, in runs of so many.
DEVICE float running_max(float x, int stride, int count) {
#pragma unroll
    for (int i = 1; i < count; i *= 2) {
        float other = __shfl_up_sync(~0u, x, i * stride);
        if ((int)lane_id() / stride % count >= i) x = fmaxf(x, other);
    }
    return x;
}
// Of runs of lanes, what joining this lane's run to those before it in a run of `count` does; `top`: the running maximum, `m` of nothing.
DEVICE Weight running_weight(float x, float& top, int stride, int count, float m) {
    top = fmaxf(running_max(x, stride, count), m);
    float before = __shfl_up_sync(~0u, top, stride);
    if ((int)lane_id() / stride % count == 0) before = m;
    return weight_of(before, x, top);
}

// Of a row, PIECES dims to a lane, 32 apart.
template <int PIECES> struct Joined {
    float m, l, o[PIECES];

    __device__ __forceinline__ void add(const Joined& b, const Weight& w, bool is_fold) {
        join(l, b.l, w, is_fold);
#pragma unroll
        for (int k = 0; k < PIECES; k++) join(o[k], b.o[k], w, is_fold);
    }
};
DEVICE Weight weight_at(const Weight& w, int lane) { return {__shfl_sync(~0u, w.alpha, lane), __shfl_sync(~0u, w.beta, lane)}; }

enum Level { TILE_VALUES, SEGMENT_STATES, SPAN_STATES };

// A task's slots, all of them, by one warp: a lane finds the weights of a slot, and joins its dims. Tiles fold into segments, segments
// merge into spans, spans into the sequence's state.
template <int LEVEL, int PIECES> DEVICE Joined<PIECES> join_sent(u32 states, u32 mls, int slots) {
    constexpr int BATCH = LEVEL == TILE_VALUES ? 16 : 8, SEGMENT = LEVEL == TILE_VALUES ? SPAN : 1, RUN = LEVEL == SPAN_STATES ? 1 : SEGMENT * SPAN;
    static_assert(BATCH % RUN == 0, "a batch has whole spans");
    int lane = lane_id();
    Joined<PIECES> all = {MINUS_INFINITY};
#pragma unroll 1
    for (int base = 0; base < slots; base += 32) {
        uint2 ml = lds64(mls + min(base + lane, slots - 1) * 8);
        bool is_slot = base + lane < slots;
        float m = is_slot ? bits_float(ml.x) : MINUS_INFINITY, l = is_slot ? bits_float(ml.y) : 0.0f, top = m;
        Weight of_tile, of_segment, of_span;
        if (LEVEL == TILE_VALUES) {
            of_tile = running_weight(m, top, 1, SEGMENT, MINUS_INFINITY);
            top = __shfl_sync(~0u, top, lane | SEGMENT - 1);
        }
        if (LEVEL <= SEGMENT_STATES) {
            of_segment = running_weight(top, top, SEGMENT, SPAN, MINUS_INFINITY);
            top = __shfl_sync(~0u, top, lane | RUN - 1);
        }
        of_span = running_weight(top, top, RUN, 32 / RUN, all.m);
        all.m = __shfl_sync(~0u, top, 31);
#pragma unroll 1
        for (int u = 0; u < min(32, slots - base); u += BATCH) {
            Joined<PIECES> segment, span;
            u32 from = states + ((base + u) * PIECES * 32 + lane) * 4;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                // Beyond the last slot a side is empty: it changes nothing.
                Joined<PIECES> here = {0.0f, __shfl_sync(~0u, l, u + i)};
                bool some = base + u + i < slots;
#pragma unroll
                for (int k = 0; k < PIECES; k++) here.o[k] = some ? bits_float(lds32(from + (i * PIECES + k) * 128)) : 0.0f;
                if (LEVEL == TILE_VALUES) {
                    if (i % SEGMENT == 0) segment = {};
                    segment.add(here, weight_at(of_tile, u + i), true);
                    if (i % SEGMENT != SEGMENT - 1) continue;
                    here = segment;
                }
                if (LEVEL <= SEGMENT_STATES) {
                    if (i % RUN < SEGMENT) span = {};
                    span.add(here, weight_at(of_segment, u + i), false);
                    if (i % RUN != RUN - 1) continue;
                    here = span;
                }
                all.add(here, weight_at(of_span, u + i), false);
            }
        }
    }
    return all;
}

// The result of a team's tasks, which lie at `sent`, by its warps.
template <int LEVEL, int PIECES> DEVICE void join_tasks(const DecodeParams& p, const Item& item, const Tasks& tasks, u32 rank, u32 team, u32 sent, int warp) {
#pragma unroll 1
    for (int i = warp; i < tasks.of_team(rank, team); i += TW) {
        u32 task = tasks.task(rank, team, i), at = sent + i * tasks.stride();
        int row = task / (D / 32 / PIECES), dim = task % (D / 32 / PIECES) * 32 + lane_id();
        Joined<PIECES> x = join_sent<LEVEL, PIECES>(at, at + tasks.states_bytes(), tasks.slots);
        Finish finish = Finish::at(p, item, row);
        finish.finish(x.m, x.l, dim == 0);
#pragma unroll
        for (int k = 0; k < PIECES; k++) finish.write(dim + k * 32, x.o[k]);
    }
}
DEVICE void join_tasks(const DecodeParams& p, const Item& item, const Tasks& tasks, Level level, u32 rank, u32 team, u32 sent, int warp) {
    if (level == TILE_VALUES && tasks.whole) join_tasks<TILE_VALUES, D / 32>(p, item, tasks, rank, team, sent, warp);
    else if (level == TILE_VALUES) join_tasks<TILE_VALUES, 1>(p, item, tasks, rank, team, sent, warp);
    else if (level == SEGMENT_STATES && tasks.whole) join_tasks<SEGMENT_STATES, D / 32>(p, item, tasks, rank, team, sent, warp);
    else if (level == SEGMENT_STATES) join_tasks<SEGMENT_STATES, 1>(p, item, tasks, rank, team, sent, warp);
    else if (tasks.whole) join_tasks<SPAN_STATES, D / 32>(p, item, tasks, rank, team, sent, warp);
    else join_tasks<SPAN_STATES, 1>(p, item, tasks, rank, team, sent, warp);
}
