// The split of many_rows.cu: which spans of which work items a team attends. Every warp of a team goes the same way.
//
// Where there are enough work items (WHOLE_ITEMS), teams take whole ones, the next each time (Queue). Those of a KV head come one after the other,
// so that the teams that attend them at the same time find its tiles in L2; a sequence's last query blocks, the longest ones, come first. Else each team has a
// run of spans (Walk).
#pragma once
#include "attend/many_rows/shared_memory.cuh"
#include "attend/merge.cuh"

// Spans of floats are longer in prompts, where others of the sequence's query blocks are work enough: filling the pipeline anew and merging take longer
// than a tile. By the block's place in its sequence alone, as its bits follow from its spans.
constexpr int LONG_SPAN_SHIFT = SPAN_SHIFT + 2, PROMPT_TOKENS = 128;
DEVICE int span_shift_of(const QueryBlock& block) { return !INTEGER && block.behind >= PROMPT_TOKENS ? LONG_SPAN_SHIFT : SPAN_SHIFT; }

// A team's part of a work item: spans from `first` to `end`.
struct Part {
    int b, kv_head, row_block, sequence, kv_len, num_tiles, span_shift, num_spans, first_residual_tile, first, end;

    // All spans of a query block, which sees so many tokens, and a KV head.
    DEVICE Part of(const DecodeParams& p, int b, int kv_head, int kv_len) {
        QueryBlock queries = query_block(p, b);
        Part part;
        part.b = b;
        part.kv_head = kv_head;
        part.row_block = 0;
        part.sequence = queries.sequence;
        part.kv_len = kv_len;
        part.num_tiles = (kv_len + TILE - 1) / TILE;
        part.span_shift = span_shift_of(queries);
        part.num_spans = runs_of(part.num_tiles, part.span_shift);
        part.first_residual_tile = first_residual_tile_of(p, queries.tokens, kv_len);
        part.first = 0;
        part.end = part.num_spans;
        return part;
    }
    __device__ __forceinline__ bool is_all() const { return first == 0 && end == num_spans; }
    __device__ __forceinline__ int first_tile() const { return first << span_shift; }
    __device__ __forceinline__ int end_tile() const { return min(num_tiles, end << span_shift); }
    __device__ __forceinline__ WorkItem item() const { return {b, kv_head, row_block, num_spans}; }
};

// A CTA's threads each have some query blocks, one behind the other, and call of(b) for those that have tokens: what these come to, and from which sum of all
// blocks before to which.
struct BlockSums {
    int first;
    u32 from, mine, total;
};
template <class Of> DEVICE BlockSums sum_blocks(const DecodeParams& p, u32* sums, Of of) {
    int lane = threadIdx.x % 32, warp = warp_id(), chunk = (p.batch + THREADS - 1) / THREADS;
    int begin = min(p.batch, (int)threadIdx.x * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop && has_tokens(p, b); b++) mine += of(b);
    u32 up_to = mine;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, up_to, i);
        if (lane >= i) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    u32 total = 0, from = up_to - mine;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        u32 of_warp = sums[w];
        if (w < warp) from += of_warp;
        total += of_warp;
    }
    return {begin, from, mine, total};
}

// A team's run of spans, in the order of query blocks, their KV heads and spans.
struct Walk {
    u32 start, end, item, cost;  // the run, the spans of all work items before this one, and its own
    int b, kv_head, kv_len;

    DEVICE u32 cost_of(int kv_len) { return runs_of((kv_len + TILE - 1) / TILE, SPAN_SHIFT); }
    __device__ __forceinline__ void enter(const DecodeParams& p, int block) {
        b = block;
        kv_head = 0;
        kv_len = kv_len_of(p, b);
        cost = cost_of(kv_len);
    }
    // Finds the walks of the CTA's teams, which are visible behind the next barrier. All threads of the CTA.
    DEVICE u32 find(const DecodeParams& p, u8* ways, u32* sums) {
        Walk* walks = (Walk*)ways;
        BlockSums spans = sum_blocks(p, sums, [&](int b) { return Walk::cost_of(kv_len_of(p, b)) * p.num_kv_heads; });
        u32 teams = gridDim.x * TEAMS, each = spans.total / teams, rest = spans.total - each * teams;
#pragma unroll
        for (int team = 0; team < TEAMS; team++) {
            u32 i = blockIdx.x * TEAMS + team, start = each * i + min(i, rest), end = start + each + (i < rest);
            if (start == end && threadIdx.x == 0) walks[team].b = p.batch;
            if (start == end || start < spans.from || start >= spans.from + spans.mine) continue;
            Walk walk = {start, end, spans.from};
            walk.enter(p, spans.first);
            while (start >= walk.item + walk.cost * p.num_kv_heads) {
                walk.item += walk.cost * p.num_kv_heads;
                walk.enter(p, walk.b + 1);
            }
            walk.kv_head = (start - walk.item) / walk.cost;
            walk.item += walk.kv_head * walk.cost;
            walks[team] = walk;
        }
        return 0;
    }
    DEVICE Walk of_team(u8* ways, int team, u32) { return ((Walk*)ways)[team]; }
    // Clips the current work item's spans to this team's range and advances to the next work item; false at the end of the range.
    __device__ __forceinline__ bool cut(const DecodeParams& p, Part& part) {
        // Long spans are the team's in whose run they begin.
        int longer = part.span_shift - SPAN_SHIFT;
        part.first = item >= start ? 0 : runs_of(start - item, longer);
        part.end = min(part.num_spans, runs_of(end - item, longer));
        bool takes = item + cost > start && part.first < part.end;
        item += cost;
        if (++kv_head == p.num_kv_heads && ++b < p.batch) enter(p, b);
        else if (kv_head == p.num_kv_heads) kv_head = 0;
        return takes;
    }
    // The next part, if there is one.
    __device__ __forceinline__ bool next(const DecodeParams& p, Part& part, int) {
#pragma unroll 1
        while (b < p.batch && item < end) {
            part = Part::of(p, b, kv_head, kv_len);
            if (cut(p, part)) return true;
        }
        return false;
    }
    // Whether `next` returns at once.
    DEVICE bool is_known() { return true; }
};
static_assert(sizeof(Walk) <= WAY_BYTES, "many_rows/shared_memory.cuh");

// The whole work items that a team takes: the first by its number, each further one by a count of the launch's in the workspace. One thread of those that attend
// reserves an item when the team begins with the one before, and publishes it to all warps of the team in a slot of shared memory.
struct Queue {
    static constexpr int READERS = (UNPACKS ? UNPACKERS + 1 : 1) + 4 * ROW_WARPS;  // warps; the one that copies and unpacks reads twice

    u32 slots;   // shared address: u64 full[QUEUE_SLOTS], empty[QUEUE_SLOTS]; u32 items[QUEUE_SLOTS]
    u32 blocks;  // query blocks that have tokens
    int slot;    // of the next item
    u32 phase;

    // Prepares the queues of the CTA's teams, which are usable behind the next barrier; the query blocks that have tokens. All threads of the CTA.
    DEVICE u32 find(const DecodeParams& p, u8* ways, u32* sums) {
        if (threadIdx.x < TEAMS * QUEUE_SLOTS) {
            u32 slots = shared_address(ways) + threadIdx.x / QUEUE_SLOTS * WAY_BYTES, slot = threadIdx.x % QUEUE_SLOTS;
            barrier_init(slots + slot * 8, 1);
            barrier_init(slots + (QUEUE_SLOTS + slot) * 8, READERS * ARRIVALS);
            barrier_init_fence();
        }
        return sum_blocks(p, sums, [](int) { return 1u; }).total;
    }
    DEVICE Queue of_team(u8* ways, int team, u32 blocks) { return {shared_address(ways) + team * WAY_BYTES, blocks, 0, 0}; }
    __device__ __forceinline__ u32 items(const DecodeParams& p) const { return blocks * p.num_kv_heads; }
    __device__ __forceinline__ u32 full() const { return slots + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return slots + (QUEUE_SLOTS + slot) * 8; }
    __device__ __forceinline__ u32 at() const { return slots + QUEUE_SLOTS * 16 + slot * 4; }
    // The same in all lanes, which may test it at different times.
    __device__ __forceinline__ bool is_known() const { return __any_sync(~0u, barrier_test(full(), phase)); }
    // The next part, which is a whole item, if there is one.
    __device__ __forceinline__ bool next(const DecodeParams& p, Part& part, int lane) {
        barrier_wait(full(), phase);
        u32 item = lds32(at());
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(empty());
        if (++slot == QUEUE_SLOTS) {
            slot = 0;
            phase ^= 1;
        }
        if (item >= items(p)) return false;
        u32 kv_head = item / blocks, b = blocks - 1 - (item - kv_head * blocks);
        part = Part::of(p, b, kv_head, kv_len_of(p, b));
        return true;
    }
    // One thread: the item behind those that are reserved. There is one reservation for each item that is taken, so that the last one leaves the count as it was.
    __device__ __forceinline__ u32 reserve(const DecodeParams& p) const {
        u32 before = count_relaxed(p.counters, 1);
        if (before == items(p) - 1) *(volatile u32*)p.counters = 0;
        return gridDim.x * TEAMS + before;
    }
    __device__ __forceinline__ void publish(u32 item) const {
        barrier_wait(empty(), phase ^ 1);
        sts32(at(), item);
        barrier_arrive(full());
    }
};

// A warp's way through the team's parts.
template <bool IS_QUEUE> struct WayOf {
    using Type = Walk;
};
template <> struct WayOf<true> {
    using Type = Queue;
};
using Way = WayOf<WHOLE_ITEMS>::Type;

