// States on their way between CTAs: an item's slots in global memory, who joins them, and their count (decode.cu; teams of short.cu
// need none, hand_over.cuh).
#pragma once
#include "merge.cuh"

// Of those who join together; the others of a team have warps of their own.
DEVICE int joiner() {
#ifdef ATTN_SHORT
    return threadIdx.x % TEAM_THREADS;
#else
    return threadIdx.x;
#endif
}

// Slots of an item whose states a row's threads join: from `first` (it covers those before) to `end`.
struct RowSlots {
    float* states;  // of the row
    float2* ml;     // null: the row only fills up the block, and is not handed over
    int first, end;
};

// Slots of short.cu are zero until they are there.
DEVICE bool is_there(float2 x) { return float_bits(x.x) != 0 && float_bits(x.y) != 0; }
DEVICE bool is_there(float x) { return float_bits(x) != 0; }
DEVICE bool is_there(const float4& x) { return is_there(make_float2(x.x, x.y)) && is_there(make_float2(x.z, x.w)); }
constexpr int FEW = 4;  // missing slots whose states are looked at; while there are more, (m, l) alone: others still read the cache

// A row's threads, LANES, find the weights of LANES slots side by side, while the first states are on their way; then each joins its
// own vectors of dims, float4, or one float2 or float, from `from` to `to`, in order, and writes the result. Slots are spans, or segments
// that make spans first. Called, not inlined: it is long and rare. By value: what a reference points to would come from global memory.
// This is the last thing that a launch waits for, one warp's latencies in a row: a batch of states is on its way at once, and four
// slots at a time are joined without a branch. (Refilling what has been joined made the compiler wait for each load at once.)
template <class Vector, int LANES, bool SEGMENTS>
static __device__ __noinline__ void join_slots(RowSlots slots, Finish finish, int from, int to) {
    constexpr int WIDTH = sizeof(Vector) / 4, VECTORS = WIDTH < 4 ? 1 : (D / WIDTH + LANES - 1) / LANES;
    constexpr int CHUNK = VECTORS < 4 ? VECTORS : 4, BATCH = WIDTH < (HANDS_OVER ? 2 : 4) ? LANES : LANES / 2;
    constexpr int RUN = SEGMENTS ? SPAN : LANES;
    const Vector ZERO = {};
    int lane = threadIdx.x % LANES;
    const float2 NO_SLOT = make_float2(MINUS_INFINITY, 0.0f);
    auto load_ml = [&](int slot) { return slot < slots.end ? __ldcg(slots.ml + (u64)slot * ROWS) : NO_SLOT; };
#pragma unroll 1
    for (int at = from + lane; at < from + VECTORS * LANES; at += CHUNK * LANES) {
        float m = MINUS_INFINITY, l = 0.0f;
        Vector o[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) o[k] = ZERO;
#pragma unroll 1
        for (int base = slots.first; base < slots.end; base += LANES) {
            bool awaits = HANDS_OVER && slots.ml, awaits_ml = awaits && base + lane < slots.end;
            float2 mine = awaits_ml ? make_float2(0.0f, 0.0f) : HANDS_OVER ? NO_SLOT : load_ml(base + lane);
            float top = mine.x;  // the running maximum over the span's segments, or over all spans
            Weight w;
#pragma unroll
            for (int u0 = 0; u0 < LANES; u0 += BATCH) {
                int count = slots.end - base - u0;
                if (count <= 0) break;
                Vector x[BATCH][CHUNK];
                auto each = [&](auto take) {
#pragma unroll
                    for (int i = 0; i < BATCH; i++) {
                        Vector* of_slot = (Vector*)(slots.states + (u64)min(base + u0 + i, slots.end - 1) * (ROWS * D));
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) take(i, k, of_slot + min(at + k * LANES, to - 1));
                    }
                };
                if constexpr (HANDS_OVER) {
                    // The first look and the next ones are the same instructions: those that a launch needs once arrive slowly.
                    each([&](int i, int k, Vector*) { x[i][k] = ZERO; });
#pragma unroll 1
                    for (bool few = true;;) {
                        if (awaits_ml && !is_there(mine)) mine = look_at(slots.ml + (u64)(base + lane) * ROWS);
                        if (few) each([&](int i, int k, Vector* p) { if (awaits && !is_there(x[i][k])) x[i][k] = look_at(p); });
                        u32 missing = __ballot_sync(~0u, awaits_ml && !is_there(mine));
                        bool all = missing == 0;
                        each([&](int i, int k, Vector*) { all &= is_there(x[i][k]); });
                        if (__all_sync(~0u, all || !awaits)) break;
                        few = __popc(missing) <= FEW * (32 / LANES);
                        look_again();
                    }
                    each([&](int, int, Vector* p) { if (awaits) __stcg(p, ZERO); });
                } else {
                    each([&](int i, int k, Vector* p) { x[i][k] = __ldcg(p); });
                }
                if (u0 == 0) {
                    if (HANDS_OVER) top = mine.x;
#pragma unroll
                    for (int i = 1; i < RUN; i *= 2) {
                        float other = __shfl_up_sync(~0u, top, i, LANES);
                        if (lane % RUN >= i) top = fmaxf(top, other);
                    }
                    if (!SEGMENTS) top = fmaxf(top, m);
                    float before = __shfl_up_sync(~0u, top, 1, LANES);
                    if (lane % RUN == 0) before = SEGMENTS ? MINUS_INFINITY : m;
                    // Beyond the last slot a side is empty: it changes nothing.
                    w = weight_of(before, mine.x, top);
                }
#pragma unroll
                for (int u4 = 0; u4 < BATCH; u4 += SPAN) {
                    float sum = SEGMENTS ? 0.0f : l;
                    Vector joined[CHUNK];
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) joined[k] = SEGMENTS ? ZERO : o[k];
#pragma unroll
                    for (int i = u4; i < u4 + SPAN; i++) {
                        Weight here = {__shfl_sync(~0u, w.alpha, u0 + i, LANES), __shfl_sync(~0u, w.beta, u0 + i, LANES)};
                        sum = sum * here.alpha + __shfl_sync(~0u, mine.y, u0 + i, LANES) * here.beta;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) join(joined[k], i < count ? x[i][k] : ZERO, here, false);
                    }
                    Weight here = {0.0f, 1.0f};
                    if (SEGMENTS) here = join_weight(m, l, make_float2(__shfl_sync(~0u, top, u0 + u4 + SPAN - 1, LANES), sum), false);
                    else l = sum;
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        if (SEGMENTS) join(o[k], joined[k], here, false);
                        else o[k] = joined[k];
                    }
                }
            }
            if (!SEGMENTS) m = __shfl_sync(~0u, top, LANES - 1, LANES);
        }
        finish.finish(m, l, at == 0);
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (at + k * LANES < to) finish.write(at + k * LANES, o[k]);
    }
}

template <class Vector, int LANES> DEVICE void join_row(const DecodeParams& p, const Item& item, int first, int row, int from, int to) {
    u64 slot = item.index(p) * p.max_slots;
    float2* ml = HANDS_OVER && row >= item.rows(p) ? nullptr : p.state_ml + slot * ROWS + row;
    RowSlots slots = {p.states + (slot * ROWS + row) * D, ml, first, item.num_slots};
    Finish finish = Finish::at(p, item, row);
    if (p.tile_split) join_slots<Vector, LANES, true>(slots, finish, from, to);
    else join_slots<Vector, LANES, false>(slots, finish, from, to);
}

// All of an item's slots by one CTA, or team.
DEVICE void join_units(const DecodeParams& p, const Item& item, int first) {
    constexpr int LANES = JOINERS / ROWS;
    join_row<float4, LANES>(p, item, first, joiner() / LANES, 0, ROW_VECTORS);
}

// ---- many slots: shared out ----

// One CTA would read them all at what its loads in flight allow, 50 GB/s, while the others have gone: half of a launch of one
// sequence. So a CTA whose share ends with one of many slots says with its count that it will join some rows, waits until the count is
// complete, and does; who completes the count joins what nobody said. Nobody waits for ever: who has waited for long takes back what it
// said, and leaves it to the others. So it does not matter whether all CTAs run at once.

constexpr int SHARED_SLOTS = 12;  // from how many slots on
constexpr int PARTS = 8, PART_ROWS = ROWS / PARTS;
constexpr u32 COUNT = 0xfff, ALL_PARTS = ~0u;
constexpr int FIRST_SHIFT = 12, PARTS_SHIFT = 24;
#ifndef ATTN_PATIENCE  // looks at the count before a CTA takes back what it said
#define ATTN_PATIENCE 100
#endif

// The item's count: slots; the first slot, from whoever has the item's first units; parts that somebody will join. It stays once it is
// complete, until all of those have left.
struct Count {
    u32 bits;
    DEVICE u32 of(u32 slots, u32 first, u32 parts) { return slots | first << FIRST_SHIFT | parts << PARTS_SHIFT; }
    __device__ __forceinline__ u32 slots() const { return bits & COUNT; }
    __device__ __forceinline__ u32 first() const { return bits >> FIRST_SHIFT & 0xfff; }
    __device__ __forceinline__ u32 parts() const { return bits >> PARTS_SHIFT; }
};

// The parts that have rows.
DEVICE u32 parts_of(const DecodeParams& p, const Item& item) {
    return (1 << (item.rows(p) + PART_ROWS - 1) / PART_ROWS) - 1;
}
// Those for whoever has slots from `from` to `end`.
DEVICE u32 parts_for(const DecodeParams& p, const Item& item, int from, int end) {
    if (item.num_slots < SHARED_SLOTS) return 0;
    u32 parts = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int slot = part * item.num_slots / PARTS;
        parts |= slot >= from && slot < end ? 1 << part : 0;
    }
    return parts & parts_of(p, item);
}

// What one thread learns when it counts slots of an item.
struct Answer {
    u32 last;   // 0, or 1 + the first slot of the item, all of whose slots are there
    u32 parts;  // of them, what this CTA joins
};

// Who said it would join `parts` has seen that the count is complete; the last of them clears it.
DEVICE void leave(u32* count, u32 parts) {
    Count before = {count_release(count, 0 - Count::of(0, 0, parts))};
    if (before.parts() == parts) *count = 0;
}
// One thread waits for the first slot, plus 1, of slots that are all there; 0: `parts` are left to the others. Whoever completes the
// count sees what it says then, and what it says can be taken back no more.
static __device__ __noinline__ u32 await_slots(u32* count, u32 parts, u32 num_slots) {
    // Acquiring looks are slow ones, and should be: relaxed ones, of 30 CTAs, held the counts themselves up by 1 to 3 µs.
    Count now;
    for (int look = 0; now.bits = load_acquire(count), now.slots() < num_slots; look++)
        if (look >= ATTN_PATIENCE && replace(count, now.bits, now.bits - Count::of(0, 0, parts))) return 0;
    leave(count, parts);
    return 1 + now.first();
}
// The count went up by `add` from `before`.
DEVICE Answer answer_of(const DecodeParams& p, const Item& item, u32 before, u32 add) {
    u32* at = p.counters + item.index(p);
    u32 num_slots = item.num_slots, mine = Count{add}.parts(), others = Count{before}.parts();
    Count now = {before + add};
    if (now.slots() < num_slots) return {mine ? await_slots(at, mine, num_slots) : 0, mine};
    if (!others) *at = 0;
    else if (mine) leave(at, mine);
    return {1 + now.first(), others ? parts_of(p, item) & ~others : ALL_PARTS};
}

DEVICE void join_parts(const DecodeParams& p, const Item& item, int first, u32 parts) {
    // A lane has two dims where one would be more than a piece for each warp: one after the other took 2 µs more of 28.
    constexpr bool PAIRS = PART_ROWS * (D / 32) > JOINERS / 32 && D % 64 == 0;
    constexpr int WIDTH = PAIRS ? 2 : 1, PIECES = (D / WIDTH + 31) / 32;  // of a row
#pragma unroll 1
    for (; parts; parts &= parts - 1) {
        int row = (__ffs(parts) - 1) * PART_ROWS;
#pragma unroll 1
        for (int i = joiner() / 32; i < PART_ROWS * PIECES; i += JOINERS / 32) {
            int of_row = row + i / PIECES, from = i % PIECES * 32;
            if constexpr (PAIRS) join_row<float2, 32>(p, item, first, of_row, from, D / WIDTH);
            else join_row<float, 32>(p, item, first, of_row, from, D / WIDTH);
        }
    }
}

// What an answer asks of all joiners.
DEVICE void join_answered(const DecodeParams& p, const Item& item, const Answer& answer) {
    if (answer.parts == ALL_PARTS) join_units(p, item, answer.last - 1);
    else join_parts(p, item, answer.last - 1, answer.parts);
}
