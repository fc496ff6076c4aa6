// The split of many_rows.cu: which spans of which work items a team attends. Every warp of a team attends the same ones.
//
// Where there are enough work items (WHOLE_ITEMS), teams take whole ones, the next each time (ItemQueueScheduler). Those of a KV head come one after the other,
// so that the teams that attend them at the same time find its tiles in L2; a sequence's last query blocks, the longest ones, come first. Else each team has a
// run of spans (SpanRangeScheduler).
#pragma once
#include "attend/many_rows/shared_memory.cuh"
#include "attend/merge.cuh"
#include "common/scan.cuh"

namespace attn {

// Work items of floats that have so many spans at most are not cut in prompts, where others of the sequence's query blocks are work enough: merging takes as long as a few tiles.
constexpr int FEW_SPANS = 4, PROMPT_TOKENS = 128;

// What a team attends of a work item: tiles, and the partials that these are. In integers each span is one, on every grid; in floats the tiles of a team are.
struct WorkRange {
    int b, kv_head, row_block, sequence, kv_len, num_tiles, first_residual_tile;
    int first_tile, end_tile;
    int first, end, num_partials;

    // All tiles of a query block, which sees so many tokens, and a head (`heads`).
    DEVICE WorkRange of(const DecodeParams& p, int b, int head, int kv_len) {
        QueryBlock queries = query_block(p, b);
        WorkRange range;
        range.b = b;
        range.kv_head = Config::IS_WIDE ? head / p.row_blocks : head;
        range.row_block = Config::IS_WIDE ? head - range.kv_head * p.row_blocks : 0;
        range.sequence = queries.sequence;
        range.kv_len = kv_len;
        range.num_tiles = (kv_len + TILE - 1) / TILE;
        range.first_residual_tile = first_residual_tile_of(p, queries.tokens, kv_len);
        range.first_tile = 0;
        range.end_tile = range.num_tiles;
        range.first = 0;
        range.end = range.num_partials = INTEGER ? runs_of(range.num_tiles, SPAN_SHIFT) : 1;
        return range;
    }
    METHOD bool is_all() const { return first == 0 && end == num_partials; }
    METHOD bool has_residuals(int tile) const { return attn::has_residuals(tile, first_residual_tile, true); }
    METHOD WorkItem item() const { return {b, kv_head, row_block, num_partials}; }
};

// Which row of a work item is the first one of a warp of a warpgroup. Teams whose rows are few have them in warps of different places: a place is a scheduler's.
DEVICE int first_row_of(int warpgroup, int warp) {
    if (Config::IS_WIDE) return warp * 16;
    const int team = warpgroup / Config::TEAM_WARPGROUPS, of_team = warpgroup % Config::TEAM_WARPGROUPS;
    return of_team * Config::WARPGROUP_ROWS + (warp + 4 - 2 * team) % 4 * (Config::WARPGROUP_ROWS / 4);
}

// What work items of a query block differ by: KV heads, and row blocks of each, of which rows that are not wide have one.
DEVICE int heads(const DecodeParams& p) { return Config::IS_WIDE ? p.num_kv_heads * p.row_blocks : p.num_kv_heads; }

// A CTA's threads each have some query blocks, one behind the other, and call of(b) for those that have tokens: what these come to, and from which sum of all
// blocks before to which.
struct BlockSums {
    int first;
    u32 from, mine, total;
};
template <class Of> DEVICE BlockSums sum_blocks(const DecodeParams& p, u32* sums, Of of) {
    int chunk = (p.batch + Config::THREADS - 1) / Config::THREADS;
    int begin = min(p.batch, (int)threadIdx.x * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop && has_tokens(p, b); b++) mine += of(b);
    RunningSum sum = cta_running_sum<Config::THREADS / 32>(mine, sums);
    return {begin, sum.before, mine, sum.total};
}

// Gives a team a range of all spans, in the order of query blocks, their KV heads and spans.
struct SpanRangeScheduler {
    u32 start, end, item, cost;  // the run, the spans of all work items before this one, and its own
    u32 team, each, rest;  // of all; spans of a team, and of how many one more
    int b, head, kv_len;

    DEVICE u32 cost_of(int kv_len) { return runs_of((kv_len + TILE - 1) / TILE, SPAN_SHIFT); }
    METHOD void enter(const DecodeParams& p, int block) {
        b = block;
        head = 0;
        kv_len = kv_len_of(p, b);
        cost = cost_of(kv_len);
    }
    // Finds the ranges of the CTA's teams, which are visible after the next barrier. All threads of the CTA.
    DEVICE u32 find(const DecodeParams& p, u8* memory, u32* sums) {
        SpanRangeScheduler* schedulers = (SpanRangeScheduler*)memory;
        BlockSums spans = sum_blocks(p, sums, [&](int b) { return SpanRangeScheduler::cost_of(kv_len_of(p, b)) * heads(p); });
        u32 teams = gridDim.x * Config::TEAMS, each = spans.total / teams, rest = spans.total - each * teams;
#pragma unroll
        for (int team = 0; team < Config::TEAMS; team++) {
            u32 i = blockIdx.x * Config::TEAMS + team, start = each * i + min(i, rest), end = start + each + (i < rest);
            if (start == end && threadIdx.x == 0) schedulers[team].b = p.batch;
            if (start == end || start < spans.from || start >= spans.from + spans.mine) continue;
            SpanRangeScheduler scheduler = {start, end, spans.from, 0, i, each, rest};
            scheduler.enter(p, spans.first);
            while (start >= scheduler.item + scheduler.cost * heads(p)) {
                scheduler.item += scheduler.cost * heads(p);
                scheduler.enter(p, scheduler.b + 1);
            }
            scheduler.head = (start - scheduler.item) / scheduler.cost;
            scheduler.item += scheduler.head * scheduler.cost;
            schedulers[team] = scheduler;
        }
        return 0;
    }
    DEVICE SpanRangeScheduler of_team(u8* memory, int team, u32) { return ((SpanRangeScheduler*)memory)[team]; }
    // The team that has a span.
    METHOD u32 team_of(u32 span) const {
        u32 of_longer = (each + 1) * rest;
        return span < of_longer ? span / (each + 1) : rest + (span - of_longer) / each;
    }
    // Clips the current work item's spans to this team's range, and advances to the next work item; false if none of them are in the range.
    METHOD bool cut(const DecodeParams& p, WorkRange& range) {
        bool is_whole = !INTEGER && cost <= FEW_SPANS && query_block(p, range.b).behind >= PROMPT_TOKENS;  // that of the team in whose run it begins
        int from = item >= start ? 0 : is_whole ? cost : start - item, to = is_whole ? cost : min(cost, end - item);
        bool takes = from < to;
        range.first_tile = from << SPAN_SHIFT;
        range.end_tile = min(range.num_tiles, to << SPAN_SHIFT);
        if constexpr (INTEGER) {
            range.first = from;
            range.end = to;
        } else {
            u32 first_team = team_of(item);
            range.first = team - first_team;
            range.end = range.first + 1;
            range.num_partials = is_whole ? 1 : team_of(item + cost - 1) - first_team + 1;
        }
        item += cost;
        if (++head == heads(p) && ++b < p.batch) enter(p, b);
        else if (head == heads(p)) head = 0;
        return takes;
    }
    // The next range; false if there is none.
    METHOD bool next(const DecodeParams& p, WorkRange& range, int) {
#pragma unroll 1
        while (b < p.batch && item < end) {
            range = WorkRange::of(p, b, head, kv_len);
            if (cut(p, range)) return true;
        }
        return false;
    }
    // Whether `next` returns at once.
    DEVICE bool is_known() { return true; }
};
static_assert(sizeof(SpanRangeScheduler) <= SCHEDULER_BYTES, "many_rows/shared_memory.cuh");

// Gives a team whole work items: the first by the team's number, each further one by a counter of the launch in the workspace. One thread
// reserves an item when the team begins with the one before, and publishes it to all warps of the team in a slot of shared memory.
struct ItemQueueScheduler {
    // Warps; one that copies and unpacks reads twice.
    static constexpr int READERS =
        (Config::UNPACKS ? Config::UNPACKERS + !Config::WIDENS_PAGES : 1 + Config::TURNERS) + (Config::LOADS_AHEAD ? 1 : 4) * Config::TEAM_WARPGROUPS;

    u32 slots;  // shared address: u64 full[QUEUE_SLOTS], empty[QUEUE_SLOTS]; u32 items[QUEUE_SLOTS]
    u32 blocks;  // query blocks that have tokens
    int slot;  // of the next item
    u32 phase;

    // Prepares the queues of the CTA's teams, which are usable behind the next barrier; the query blocks that have tokens. All threads of the CTA.
    DEVICE u32 find(const DecodeParams& p, u8* memory, u32* sums) {
        if (threadIdx.x < Config::TEAMS * QUEUE_SLOTS) {
            u32 slots = shared_address(memory) + threadIdx.x / QUEUE_SLOTS * SCHEDULER_BYTES, slot = threadIdx.x % QUEUE_SLOTS;
            barrier_init(slots + slot * 8, 1);
            barrier_init(slots + (QUEUE_SLOTS + slot) * 8, READERS * ARRIVALS);
            barrier_init_fence();
        }
        return sum_blocks(p, sums, [](int) { return 1u; }).total;
    }
    DEVICE ItemQueueScheduler of_team(u8* memory, int team, u32 blocks) { return {shared_address(memory) + team * SCHEDULER_BYTES, blocks, 0, 0}; }
    METHOD u32 items(const DecodeParams& p) const { return blocks * heads(p); }
    METHOD u32 full() const { return slots + slot * 8; }
    METHOD u32 empty() const { return slots + (QUEUE_SLOTS + slot) * 8; }
    METHOD u32 at() const { return slots + QUEUE_SLOTS * 16 + slot * 4; }
    // The same in all lanes, which may test it at different times.
    METHOD bool is_known() const { return __any_sync(~0u, barrier_test(full(), phase)); }
    // The next work item, whole; false if there is none.
    METHOD bool next(const DecodeParams& p, WorkRange& range, int lane) {
        barrier_wait(full(), phase);
        u32 item = lds32(at());
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(empty());
        if (++slot == QUEUE_SLOTS) {
            slot = 0;
            phase ^= 1;
        }
        if (item >= items(p)) return false;
        u32 head = item / blocks, b = blocks - 1 - (item - head * blocks);
        range = WorkRange::of(p, b, head, kv_len_of(p, b));
        return true;
    }
    // One thread: the item behind those that are reserved. There is one reservation for each item that is taken, so that the last one leaves the count as it was.
    METHOD u32 reserve(const DecodeParams& p) const {
        u32 before = (u32)count_relaxed(p.counters, 1);
        if (before == items(p) - 1) *(volatile u64*)p.counters = 0;
        return gridDim.x * Config::TEAMS + before;
    }
    METHOD void publish(u32 item) const {
        barrier_wait(empty(), phase ^ 1);
        sts32(at(), item);
        barrier_arrive(full());
    }
};

// Which of the two the instance has.
template <bool IS_QUEUE> struct SchedulerOf {
    using Type = SpanRangeScheduler;
};
template <> struct SchedulerOf<true> {
    using Type = ItemQueueScheduler;
};
using Scheduler = SchedulerOf<Config::WHOLE_ITEMS>::Type;

}  // namespace attn
