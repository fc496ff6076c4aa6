// The split of the work among CTAs of split_kv.cu: work units in the order [query block][KV head][unit][row block], partitioned on the
// device from kv_lens, so that a captured graph serves growing sequences.
//
// A CTA's split is a run of whole partials: spans; segments, if there is little work; or work items by fours (KV heads of a sequence), if
// they are many and short. A work unit is what the teams attend between two merges, up to four spans: a team then has a span, a segment
// of one, tiles of a segment, or a work item. The longer a team works alone, the less is merged.
//
// Where all work items have the same number of partials, splits are equal numbers of them. Else partials have a cost: their tiles and the
// merge at the end of a unit. Counting tiles alone gives the CTA with the most short sequences twice the mean time.
#pragma once
#include "attend/query_blocks.cuh"
#include "attend/split_kv/shared_memory.cuh"
#include "common/scan.cuh"

namespace attn {

enum PartialKind : u8 { SEGMENTS, SPANS, ITEMS };
// log2 of a partial's tiles; an item is one span at most.
DEVICE int partial_shift_of(PartialKind partials) { return partials == SEGMENTS ? SEGMENT_SHIFT : SPAN_SHIFT; }
enum TeamGranularity { A_TILE, A_SEGMENT, A_SPAN, AN_ITEM };

// How work is measured; the same in all CTAs.
struct Measure {
    PartialKind partials_are;
    bool is_even;  // all partials have the same cost
};

// KV heads of a sequence, or groups of four where a team has a work item.
DEVICE int heads_of(const DecodeParams& p, PartialKind partials) {
    return partials == ITEMS ? (p.num_kv_heads + Config::TEAMS - 1) / Config::TEAMS : p.num_kv_heads;
}

// One sequence's partials, for one KV head and row block.
struct Sequence {
    int kv_len, num_tiles, num_partials;
    u32 partial_cost, item_cost;        // of a full one; of all, of which the last has what is left

    DEVICE Sequence of(const Measure& measure, int kv_len) {
        Sequence s;
        s.kv_len = kv_len;
        s.num_tiles = (s.kv_len + TILE - 1) / TILE;
        int shift = partial_shift_of(measure.partials_are);
        s.num_partials = runs_of(s.num_tiles, shift);
        s.partial_cost = measure.is_even ? 1 : cost(1 << shift, 1 << shift - SEGMENT_SHIFT);
        s.item_cost = measure.is_even ? s.num_partials : cost_of_item(s.num_tiles, runs_of(s.num_tiles, SEGMENT_SHIFT));
        return s;
    }
    // Cost in half tiles. A merge takes two tiles of each team and comes once for four spans; a work item's first query and its last units,
    // which are seldom full, take sixteen more.
    DEVICE u32 cost(int tiles, int segments) { return 2 * tiles + segments; }
    DEVICE u32 cost_of_item(int tiles, int segments) { return cost(max(1, tiles), segments) + 32; }
};

struct Work : Sequence {
    int b, heads, partial, row_block;  // the current unit; `b`: its query block, `heads`: see kv_head
    int sequence, first_residual_tile;
    u32 offset;                     // cost of all units before this one
    u8 partials_here;                  // partials of this unit
    bool has_first;                    // whether the sequence's first tile is here, and in no shard ahead
    Measure measure;

    METHOD void enter(const DecodeParams& p, int block, int kv_len) {
        b = block;
        heads = partial = row_block = 0;
        QueryBlock queries = query_block(p, b);
        sequence = queries.sequence;
        first_residual_tile = first_residual_tile_of(p, queries, kv_len);
        if (Config::LEAVES_SPANS) has_first = attn::has_first_tile(p, sequence);
        (Sequence&)* this = Sequence::of(measure, kv_len);
    }
    METHOD bool has_first_tile() const { return !Config::LEAVES_SPANS || has_first; }
    METHOD bool has_items() const { return measure.partials_are == ITEMS; }
    METHOD int kv_head(int team) const { return has_items() ? heads * Config::TEAMS + team : heads; }
    METHOD TeamGranularity takes() const { return measure.partials_are == SEGMENTS ? A_TILE : has_items() ? AN_ITEM : partials_here == 1 ? A_SEGMENT : A_SPAN; }
    // Sizes the unit: up to four partials, within the CTA's split, which ends at `end`. With fewer than all teams' some would wait longer
    // for a span than all do for their segments. Where lengths are alike three are better: all CTAs are late then, and one merge less counts
    // for more. Row blocks alternate with each partial.
    METHOD void size(const DecodeParams& p, u32 end) {
        int left = 1;
        if (measure.partials_are == SPANS && p.row_blocks == 1)
#pragma unroll
            for (int i = 1; i < Config::TEAMS; i++) left += partial + i < num_partials && offset + i * partial_cost < end;
        partials_here = left >= (measure.is_even ? Config::TEAMS - 1 : Config::TEAMS) ? left : 1;
    }
    METHOD void next(const DecodeParams& p) {
        offset += partial + partials_here < num_partials ? partials_here * partial_cost : item_cost - partial * partial_cost;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if ((partial += partials_here) < num_partials) return;
        partial = 0;
        if (++heads < heads_of(p, measure.partials_are)) return;
        if (++b < p.batch) enter(p, b, kv_len_of(p, b));
    }
    // This team's tiles of the unit: first, first + step, … below end.
    METHOD void team_tiles(const DecodeParams& p, int team, int& first, int& end) const {
        TeamGranularity take = takes();
        int shift = partial_shift_of(measure.partials_are), from = partial << shift, each = take == A_TILE ? 0 : take == A_SEGMENT ? SEGMENT_SHIFT : SPAN_SHIFT;
        first = take == AN_ITEM ? 0 : from + (team << each);
        end = min(num_tiles, take == A_TILE ? from + (1 << shift) : first + (1 << each));
        if (take == AN_ITEM ? kv_head(team) >= p.num_kv_heads : take == A_SPAN && team >= partials_here) end = first;
    }
    METHOD int step() const { return measure.partials_are == SEGMENTS ? Config::TEAMS : 1; }

    // Moves to the first partial at or after `start` of a sequence that begins at `begin`, in cost over all sequences.
    METHOD void seek(const DecodeParams& p, int block, int kv_len, u32 begin, u32 start) {
        enter(p, block, kv_len);
        u32 per_head = item_cost * p.row_blocks, per_partial = partial_cost * p.row_blocks;
        heads = (start - begin) / per_head;
        offset = begin + heads * per_head;
        partial = min((int)((start - offset) / per_partial), num_partials - 1);
        offset += partial * per_partial;
        partials_here = 1;
        while (offset < start) next(p);
    }
};

// A position in a CTA's split; in shared memory, because registers are short.
struct Cursor {
    Work work;
    u32 end;        // cost at the end of the split
    bool is_fresh;  // another work item or row block than the unit before

    METHOD bool is_valid(const DecodeParams& p) const { return work.offset < end && work.b < p.batch; }
    METHOD void next(const DecodeParams& p) {
        work.next(p);
        work.size(p, end);
        is_fresh = work.partial == 0 || p.row_blocks > 1;
    }
};
static_assert(sizeof(Cursor) <= CURSOR_BYTES, "split_kv/shared_memory.cuh reserves as many bytes");

// Sums over sequences, for one KV head and row block.
struct Counts {
    u32 items, segments, spans, cost;
    int longest, shortest;  // tiles

    METHOD void add(int tiles) {
        u32 n = runs_of(tiles, SEGMENT_SHIFT);
        items++;
        segments += n;
        spans += (n + SPAN - 1) / SPAN;
        cost += Sequence::cost_of_item(tiles, n);
        longest = max(longest, tiles);
        shortest = min(shortest, tiles);
    }
    // The sums of all warps from each one's; `before`: of those before this one. `sums` holds six numbers per warp.
    METHOD Counts of_all_warps(u32* sums, int warp, Counts& before) const {
        u32* of_warp = sums + 6 * warp;
        of_warp[0] = segments;
        of_warp[1] = spans;
        of_warp[2] = cost;
        of_warp[3] = longest;
        of_warp[4] = shortest;
        of_warp[5] = items;
        __syncthreads();
        Counts all = {0, 0, 0, 0, 0, 0x7fffffff};
#pragma unroll
        for (int w = 0; w < Config::THREADS / 32; w++) {
            of_warp = sums + 6 * w;
            if (w == warp) before = all;
            all.items += of_warp[5];
            all.segments += of_warp[0];
            all.spans += of_warp[1];
            all.cost += of_warp[2];
            all.longest = max(all.longest, (int)of_warp[3]);
            all.shortest = min(all.shortest, (int)of_warp[4]);
        }
        return all;
    }
    // A work item of one span may be a team's own, if that takes no more rounds of tiles than sharing it. Its end takes as long as a tile; a
    // shared unit, with a query and a merge at both ends, takes two more.
    METHOD Measure measure(const DecodeParams& p) const {
        u32 blocks = p.num_kv_heads * p.row_blocks;
        // Partials are segments where spans are too few for all CTAs, and the workspace has places for as many.
        bool few = !Config::LEAVES_SPANS && runs_of(longest, SEGMENT_SHIFT) <= p.max_partials && 3 * spans * blocks < gridDim.x;
        Measure m = {few ? SEGMENTS : SPANS, false};
        if (!Config::LEAVES_SPANS && longest <= 1 << SPAN_SHIFT) {
            u32 by_item = ceil_div(items * heads_of(p, ITEMS) * p.row_blocks, p.ctas_divmod) * (longest + 1);
            u32 shared = few ? ceil_div(segments * blocks, p.ctas_divmod) * 2 : ceil_div(spans * blocks, p.ctas_divmod) * (min(longest, 4) + 2);
            if (by_item <= shared) m.partials_are = ITEMS;
        }
        int shift = partial_shift_of(m.partials_are);
        int least = min(shortest, longest);  // of no item there is no shortest
        m.is_even = runs_of(longest, shift) == runs_of(least, shift) && 4 * max(1, least) >= 3 * longest;
        return m;
    }
    METHOD u32 of(const Measure& m) const { return !m.is_even ? cost : m.partials_are == SEGMENTS ? segments : m.partials_are == SPANS ? spans : items; }
};

// This CTA's split, from `start` to `end`. All CTAs run at once, and CTA i, i + SMs, … share an SM.
//
// Of even partials, every CTA gets the same number: splits then end more often where work items do, and fewer partials are exchanged.
// If that gives one SM more than its part, partials are distributed over SMs instead.
DEVICE void partition(const DecodeParams& p, bool is_even, u32 total, u32& start, u32& end) {
    u32 ctas = gridDim.x, i = blockIdx.x, each = ceil_div(total, p.ctas_divmod), rounds = 1;
#pragma unroll
    for (int n = 1; n < Config::CTAS; n++) rounds += total > each * n * p.sms_divmod.divisor;
    if (is_even && (Config::CTAS == 1 || each * rounds <= ceil_div(total, p.sms_divmod))) {
        start = min(total, each * i);
        end = min(total, start + each);
        return;
    }
    if (is_even) {
        u32 round = i / p.sms_divmod;
        i = (i - round * p.sms_divmod.divisor) * Config::CTAS + round;
    }
    each = total / p.ctas_divmod;
    u32 rest = total - each * ctas;
    start = each * i + rest * i / p.ctas_divmod;
    end = each * (i + 1) + rest * (i + 1) / p.ctas_divmod;
}

// Finds the first unit of this CTA's split, which is visible in `found` behind the next barrier. Up to 32 sequences each warp computes it
// alone, with more all warps together.
DEVICE Cursor find_work(const DecodeParams& p, Cursor* found, u32* sums) {
    bool alone = p.batch <= 32;
    int lane = threadIdx.x % 32, warp = warp_id(), thread = alone ? lane : threadIdx.x;
    int chunk = alone ? 1 : (p.batch + Config::THREADS - 1) / Config::THREADS, begin = min(p.batch, thread * chunk), stop = min(p.batch, begin + chunk);
    Counts mine = {0, 0, 0, 0, 0, 0x7fffffff};
    int kv_len = 0;
    for (int b = begin; b < stop && has_tokens(p, b); b++) {
        kv_len = kv_len_of(p, b);
        mine.add((kv_len + TILE - 1) / TILE);
    }
    Counts all = {warp_sum(mine.items), warp_sum(mine.segments), warp_sum(mine.spans), warp_sum(mine.cost), warp_max(mine.longest), warp_min(mine.shortest)},
           before = {};
    if (!alone) all = all.of_all_warps(sums, warp, before);
    Cursor cursor;
    Work& work = cursor.work;
    work.measure = all.measure(p);
    u32 up_to = mine.of(work.measure), blocks = heads_of(p, work.measure.partials_are) * p.row_blocks;
    if (p.batch > 1) up_to = running_sum(up_to, lane);
    u32 until = (before.of(work.measure) + up_to) * blocks, from = until - mine.of(work.measure) * blocks, total = all.of(work.measure) * blocks;
    u32 start, end;
    partition(p, work.measure.is_even, total, start, end);
    bool is_here = start >= from && start < until;
    cursor.end = end;
    cursor.is_fresh = true;
    if (alone) {
        int owner = __ffs(__ballot_sync(~0u, is_here)) - 1;
        begin = __shfl_sync(~0u, begin, owner);
        kv_len = __shfl_sync(~0u, kv_len, owner);
        from = __shfl_sync(~0u, from, owner);
        is_here = owner >= 0;
    }
    if (is_here) {
        int b = begin;
        if (!alone)
            for (u32 w; start >= from + (w = Sequence::of(work.measure, kv_len = kv_len_of(p, b)).item_cost * blocks); b++) from += w;
        work.seek(p, b, kv_len, from, start);
        work.size(p, end);
    }
    if (start == total) {
        work.b = p.batch;
        work.offset = cursor.end = total;
    }
    if (alone ? threadIdx.x == 0 : is_here || start == total && threadIdx.x == 0) *found = cursor;
    if (alone) return cursor;
    __syncthreads();
    return *found;
}

}  // namespace attn
