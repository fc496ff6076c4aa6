// Who does what: units of work in the order [sequence][KV head][unit][row block], cut between CTAs by tiles.
//
// A unit is four spans, of which each team takes one; or, when there is too little work for that, a span, whose segments they
// take, or a segment, whose tiles they take. The longer a team works alone, the less is joined. Everything follows from kv_lens on the device, so that a captured graph serves growing sequences.
#pragma once
#include "config.cuh"
#include "params.h"

enum TeamTakes { A_TILE, A_SEGMENT, A_SPAN };

struct Work {
    int b, kv_head, unit, row_block;  // where we are
    int kv_len, num_tiles, segment_tiles, unit_tiles, num_units;  // of sequence b
    u32 offset;                       // tiles before this unit, over everything
    int takes;                        // TeamTakes, the same for all

    __device__ __forceinline__ void enter(const DecodeParams& p, int sequence) {
        b = sequence;
        kv_head = unit = row_block = 0;
        if (b >= p.batch) return;
        kv_len = p.kv_lens[b];
        num_tiles = (kv_len + TILE - 1) / TILE;
        segment_tiles = segment_tiles_of(num_tiles);
        unit_tiles = segment_tiles << 2 * takes;
        num_units = num_tiles == 0 ? 1 : (num_tiles + unit_tiles - 1) / unit_tiles;  // an empty sequence still gets its zeros
    }
    __device__ __forceinline__ int tiles_here() const {
        return max(1, min(unit_tiles, num_tiles - unit * unit_tiles));
    }
    __device__ __forceinline__ void next(const DecodeParams& p) {
        offset += tiles_here();
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++unit < num_units) return;
        unit = 0;
        if (++kv_head < p.num_kv_heads) return;
        enter(p, b + 1);
    }
    // This team's tiles of the unit: first, first + step, … below end.
    __device__ __forceinline__ void share(int team, int& first, int& end) const {
        if (takes == A_TILE) {
            first = unit * unit_tiles + team;
            end = min(num_tiles, (unit + 1) * unit_tiles);
        } else {
            int each = unit_tiles / TEAMS;
            first = unit * unit_tiles + team * each;
            end = min(num_tiles, first + each);
        }
    }
    __device__ __forceinline__ int step() const { return takes == A_TILE ? TEAMS : 1; }
    // Slots for what is handed over: a span each, or a unit.
    __device__ __forceinline__ int unit_slots() const { return takes == A_SPAN ? TEAMS : 1; }
    __device__ __forceinline__ int num_slots() const {
        int tiles = unit_tiles / unit_slots();
        return max(1, (num_tiles + tiles - 1) / tiles);
    }
    // The open page's K is elsewhere (Int4 Channel).
    __device__ __forceinline__ bool is_tail(int tile) const {
        return CHANNEL && (tile * TILE / SAFE_PAGE + 1) * PAGE > kv_len;
    }

    // The first unit at or after `tile` of sequence `sequence`, which starts at tile `begin`, over everything.
    __device__ __forceinline__ void seek(const DecodeParams& p, int sequence, u32 begin, u32 tile) {
        enter(p, sequence);
        u32 per_head = (u32)max(1, num_tiles) * p.row_blocks, per_unit = unit_tiles * p.row_blocks;
        kv_head = (tile - begin) / per_head;
        offset = begin + kv_head * per_head;
        unit = min((int)((tile - offset) / per_unit), num_units - 1);
        offset += unit * per_unit;
        while (offset < tile) next(p);
    }
};

// A place in a CTA's share, in shared memory: registers are short.
struct Cursor {
    Work work;
    u32 end;        // of the share
    bool is_fresh;  // not of the same item and row block as the unit before

    __device__ __forceinline__ bool is_valid(const DecodeParams& p) const { return work.offset < end && work.b < p.batch; }
    __device__ __forceinline__ void next(const DecodeParams& p) {
        work.next(p);
        is_fresh = work.unit == 0 || p.row_blocks > 1;
    }
};

// Tiles times row blocks and heads of one sequence.
DEVICE u32 weight(const DecodeParams& p, int b) {
    return (u32)max(1, (p.kv_lens[b] + TILE - 1) / TILE) * p.num_kv_heads * p.row_blocks;
}

// Units of each length, over everything.
struct Counts {
    u32 segments, spans, quads;

    __device__ __forceinline__ void add(u32 tiles) {
        u32 each = segment_tiles_of(tiles), n = max(1, (tiles + each - 1) / each);
        segments += n;
        spans += n = (n + SPAN - 1) / SPAN;
        quads += (n + TEAMS - 1) / TEAMS;
    }
    // Four teams with a span each must find nearly as much to do as with a segment each.
    __device__ __forceinline__ TeamTakes team_takes(const DecodeParams& p) const {
        u32 ctas = gridDim.x, by_span = (spans + ctas - 1) / ctas, by_quad = (quads + ctas - 1) / ctas * TEAMS;
        return p.tile_split ? A_TILE : by_quad <= by_span + by_span / 8 ? A_SPAN : A_SEGMENT;
    }
    __device__ __forceinline__ u32 units(TeamTakes takes) const { return takes == A_TILE ? segments : takes == A_SEGMENT ? spans : quads; }
};

// This CTA's share of `total` tiles in so many units. CTAs are as many as fit, and CTA i, i + SMs, … run on one SM.
//
// Shares are whole numbers of the mean unit. Equal ones come first: where all sequences are alike, they end where items do more
// often, and less is handed over. But if they leave an SM with more than its part, units are dealt to SMs instead.
DEVICE void cut(u32 total, u32 units, u32& start, u32& end) {
    u32 ctas = gridDim.x, sms = ctas / ATTN_CTAS, each = (units + ctas - 1) / ctas, mean = (total + units - 1) / units;
    u32 busy = (units + each - 1) / each, most = each * ((busy + sms - 1) / sms), i = blockIdx.x;
    if (ATTN_CTAS == 1 || most <= (units + sms - 1) / sms) {
        start = each * i;
        end = start + each;
    } else {
        i = i % sms * ATTN_CTAS + i / sms;
        each = units / ctas;
        u32 rest = units % ctas;
        start = each * i + rest * i / ctas;
        end = each * (i + 1) + rest * (i + 1) / ctas;
    }
    start = min(total, start * mean);
    end = min(total, end * mean);
}

// Finds the first unit of this CTA's share of everything, in equal bytes; `sums` holds four numbers per warp.
DEVICE void take_share(const DecodeParams& p, Cursor& cursor, u32* sums) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int chunk = (p.batch + THREADS - 1) / THREADS, begin = min(p.batch, thread * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    Counts counts = {};
    for (int b = begin; b < stop; b++) {
        mine += weight(p, b);
        counts.add((p.kv_lens[b] + TILE - 1) / TILE);
    }
    counts = {warp_sum(counts.segments), warp_sum(counts.spans), warp_sum(counts.quads)};
    u32 up_to = mine;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, up_to, i);
        if (lane >= i) up_to += other;
    }
    if (lane == 31) {
        sums[4 * warp] = up_to;
        sums[4 * warp + 1] = counts.segments;
        sums[4 * warp + 2] = counts.spans;
        sums[4 * warp + 3] = counts.quads;
    }
    __syncthreads();
    u32 total = 0, before = 0;
    counts = {};
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        u32 x = sums[4 * w];
        if (w < warp) before += x;
        total += x;
        counts.segments += sums[4 * w + 1];
        counts.spans += sums[4 * w + 2];
        counts.quads += sums[4 * w + 3];
    }
    u32 blocks = p.num_kv_heads * p.row_blocks;
    counts = {counts.segments * blocks, counts.spans * blocks, counts.quads * blocks};
    u32 start, end, from = before + up_to - mine;
    TeamTakes takes = counts.team_takes(p);
    cut(total, counts.units(takes), start, end);
    if (start >= from && start < from + mine) {
        int b = begin;
        for (u32 w; start >= from + (w = weight(p, b)); b++) from += w;
        Work work;
        work.takes = takes;
        work.seek(p, b, from, start);
        cursor.work = work;
        cursor.end = end;
        cursor.is_fresh = true;
    }
    if (start == total && thread == 0) {
        cursor.work.b = p.batch;
        cursor.work.offset = cursor.end = total;
    }
    __syncthreads();
}

// A row of Q, and the factor that makes it q' of section 2. Rows that only fill up the tile are the item's first one times 0:
// without a branch, all of a row's loads are in flight together.
struct QueryRow {
    const float* q;
    float factor;
};
DEVICE QueryRow query_row(const DecodeParams& p, const Work& work, int row) {
    int r = work.row_block * ROWS + row;
    bool real = r < p.heads_per_kv * p.q_len;
    r = real ? r : 0;
    int i = r / p.heads_per_kv, head = work.kv_head * p.heads_per_kv + r % p.heads_per_kv;
    float factor = p.log2_scale * (p.k_tensor_scales ? p.k_tensor_scales[work.kv_head] : 1.0f);
    return {p.q + (((u64)work.b * p.q_len + i) * p.num_q_heads + head) * D, real ? factor : 0.0f};
}

// Brings an item's queries into L1 while the item before is at work. For one warp.
DEVICE void touch_query(const DecodeParams& p, const Work& work, int lane) {
    constexpr int LINES = D * 4 / 128;
    for (int i = lane; i < ROWS * LINES; i += 32) touch(query_row(p, work, i / LINES).q + i % LINES * 32);
}
