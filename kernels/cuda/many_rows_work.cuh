// The split of many_rows.cu: which spans of which work items a team attends. Every warp of a team goes the same way.
#pragma once
#include "many_rows_smem.cuh"
#include "merge.cuh"

// Spans of floats are longer in prompts, where others of the sequence's query blocks are work enough: filling the pipeline anew and merging take longer
// than a tile. By the block's place in its sequence alone, as its bits follow from its spans.
constexpr int LONG_SPAN_SHIFT = SPAN_SHIFT + 2, PROMPT_TOKENS = 128;
DEVICE int span_shift_of(const QueryBlock& block) { return !INTEGER && block.behind >= PROMPT_TOKENS ? LONG_SPAN_SHIFT : SPAN_SHIFT; }

// What a work item costs apart from its tiles, in tiles: finding it, loading queries, writing rows. About 8 µs on an H100, from prompts of 1024 and 8192 tokens.
constexpr int ITEM_COST = INTEGER ? 4 : UNPACKS ? 6 : 9;

// A team's part of a work item: spans from `first` to `end`.
struct Part {
    int b, kv_head, row_block, sequence, kv_len, num_tiles, span_shift, num_spans, first_residual_tile, first, end;

    __device__ __forceinline__ bool is_all() const { return first == 0 && end == num_spans; }
    __device__ __forceinline__ int first_tile() const { return first << span_shift; }
    __device__ __forceinline__ int end_tile() const { return min(num_tiles, end << span_shift); }
    __device__ __forceinline__ WorkItem item() const { return {b, kv_head, row_block, num_spans}; }
};

// A team's way through its work items. Their costs are spans, or where each team has whole items, tiles and a bit.
struct Walk {
    u32 start, end, item, cost;  // the team's part of all costs, the cost of all items before this one, and its own
    int b, kv_head, kv_len;

    DEVICE bool has_whole_items(const DecodeParams& p) { return p.max_partials == 0; }
    DEVICE u32 cost_of(const DecodeParams& p, int kv_len) {
        int tiles = (kv_len + TILE - 1) / TILE;
        return has_whole_items(p) ? tiles + ITEM_COST : runs_of(tiles, SPAN_SHIFT);
    }
    __device__ __forceinline__ void enter(const DecodeParams& p, int block) {
        b = block;
        kv_head = 0;
        kv_len = kv_len_of(p, b);
        cost = cost_of(p, kv_len);
    }
    // The team's next part, if there is one.
    __device__ __forceinline__ bool next(const DecodeParams& p, Part& part) {
#pragma unroll 1
        while (b < p.batch && item < end) {
            bool whole = has_whole_items(p), takes = whole ? item >= start : item + cost > start;
            QueryBlock queries = query_block(p, b);
            part.b = b;
            part.kv_head = kv_head;
            part.row_block = 0;
            part.sequence = queries.sequence;
            part.kv_len = kv_len;
            part.num_tiles = (kv_len + TILE - 1) / TILE;
            part.span_shift = span_shift_of(queries);
            part.num_spans = runs_of(part.num_tiles, part.span_shift);
            part.first_residual_tile = first_residual_tile_of(p, queries.tokens, kv_len);
            // Long spans are the team's in whose part they begin.
            int longer = part.span_shift - SPAN_SHIFT;
            part.first = whole || item >= start ? 0 : runs_of(start - item, longer);
            part.end = whole ? part.num_spans : min(part.num_spans, runs_of(end - item, longer));
            takes &= part.first < part.end;
            item += cost;
            if (++kv_head == p.num_kv_heads && ++b < p.batch) enter(p, b);
            else if (kv_head == p.num_kv_heads) kv_head = 0;
            if (takes) return true;
        }
        return false;
    }
};
static_assert(sizeof(Walk) <= WALK_BYTES, "many_rows_smem.cuh");

// The ways of the CTA's teams, which are visible behind the next barrier. All threads of the CTA.
DEVICE void find_work(const DecodeParams& p, Walk* walks, u32* sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk = (p.batch + THREADS - 1) / THREADS;
    int begin = min(p.batch, (int)threadIdx.x * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop && has_tokens(p, b); b++) mine += Walk::cost_of(p, kv_len_of(p, b));
    mine *= p.num_kv_heads;
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
    u32 teams = gridDim.x * TEAMS, each = total / teams, rest = total - each * teams;
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
        u32 i = blockIdx.x * TEAMS + team, start = each * i + min(i, rest), end = start + each + (i < rest);
        if (start == end && threadIdx.x == 0) walks[team].b = p.batch;
        if (start == end || start < from || start >= from + mine) continue;
        Walk walk = {start, end, from};
        walk.enter(p, begin);
        while (start >= walk.item + walk.cost * p.num_kv_heads) {
            walk.item += walk.cost * p.num_kv_heads;
            walk.enter(p, walk.b + 1);
        }
        walk.kv_head = (start - walk.item) / walk.cost;
        walk.item += walk.kv_head * walk.cost;
        walks[team] = walk;
    }
}
