// Many query rows: segments merge into spans, spans into an item's state, in the law's order.
//
// A thread keeps its own elements of a state (row lane/4 of its warp, dims 8j + 2·(lane%4) + {0, 1}), so a span's state waits in
// shared memory, and that of an item's first spans in a slot of global memory, without a barrier. What crosses a CTA's border goes through slots of global memory and is counted; when an item's count is
// complete, each of its CTAs joins a part of its columns. A CTA waits for others only when all its own units are counted, and not for
// ever, because others may not be resident: who gives up says so in the count, and whoever completes it then joins all columns.
#pragma once
#include "value.cuh"
#include "wide_work.cuh"

constexpr int WORKERS = ROWS * 4;                // threads with rows
constexpr int ROW_VECTORS = D / 4;               // float4s of a row
constexpr int STATE_BYTES = WORKERS * (D / 8 + 1) * 8;

// All threads with rows; the feeding warps go their own way.
DEVICE void workers_barrier() { barrier_of<WORKERS>(); }

struct Weight {
    float alpha, beta;
};

// An empty side has O = +0 and takes part with weight -0: what it adds changes nothing, not even a zero's sign.
DEVICE Weight join_weight(float& m, float& l, float2 b) {
    float top = fmaxf(m, b.x);
    bool empty = m == MINUS_INFINITY, b_empty = b.x == MINUS_INFINITY;
    Weight w = {empty ? (b_empty ? 0.0f : -0.0f) : pow2(top - m), b_empty ? -0.0f : pow2(top - b.x)};
    m = top;
    l = l * w.alpha + b.y * w.beta;
    return w;
}
DEVICE void join(float4& a, const float4& b, const Weight& w) {
    a = {a.x * w.alpha + b.x * w.beta, a.y * w.alpha + b.y * w.beta, a.z * w.alpha + b.z * w.beta, a.w * w.alpha + b.w * w.beta};
}

// A state of one thread in shared memory.
DEVICE void keep_state(u32 at, const State& state) {
#pragma unroll
    for (int j = 0; j < D / 8; j++) sts64(at + j * WORKERS * 8, state.o[0][j][0], state.o[0][j][1]);
    sts64(at + D / 8 * WORKERS * 8, state.m[0], state.l[0]);
}
// state = merge(what is kept, state)
DEVICE void merge_kept(u32 at, State& state) {
    uint2 ml = lds64(at + D / 8 * WORKERS * 8);
    float m = bits_float(ml.x), l = bits_float(ml.y);
    Weight w = join_weight(m, l, make_float2(state.m[0], state.l[0]));
    state.m[0] = m;
    state.l[0] = l;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        uint2 a = lds64(at + j * WORKERS * 8);
        state.o[0][j][0] = bits_float(a.x) * w.alpha + state.o[0][j][0] * w.beta;
        state.o[0][j][1] = bits_float(a.y) * w.alpha + state.o[0][j][1] * w.beta;
    }
}

// One (sequence, KV head, row block).
struct Item {
    int b, kv_head, row_block, num_units;

    __device__ __forceinline__ u64 index(const DecodeParams& p) const {
        return ((u64)b * p.num_kv_heads + kv_head) * p.row_blocks + row_block;
    }
    __device__ __forceinline__ int rows(const DecodeParams& p) const { return min(ROWS, p.heads_per_kv * p.q_len - row_block * ROWS); }
    // The row's place in Q, out and lse.
    __device__ __forceinline__ u64 row(const DecodeParams& p, int row) const {
        int r = row_block * ROWS + row, i = r / p.heads_per_kv, head = kv_head * p.heads_per_kv + r % p.heads_per_kv;
        return ((u64)b * p.q_len + i) * p.num_q_heads + head;
    }
};

// Section 6 of a row: factors of its O; its log-sum-exp is written by the thread that is `first` in it.
struct Finish {
    u8* out;
    float scale, tensor;
    int dtype;

    DEVICE Finish of(const DecodeParams& p, const Item& item, int row, float m, float l, bool first) {
        u64 at = item.row(p, row);
        bool some = m > MINUS_INFINITY;
        if (first && p.lse) p.lse[at] = some ? log_sum(m, l) : MINUS_INFINITY;
        float tensor = p.v_tensor_scales ? p.v_tensor_scales[item.kv_head] : 1.0f;
        return {row_at(p.out, at, D, p.dtype), some ? rcp(l) : 1.0f, tensor, p.dtype};
    }
    __device__ __forceinline__ float of(float o) const { return o * scale * tensor; }
};

// An item's count: units that are there, the first slot (it covers the units before it), units whose CTAs have seen the end.
constexpr u32 COUNT_MASK = 0x3ff;
DEVICE u32 first_slot(u32 count) { return count >> 10 & 0x3ff; }
DEVICE u32 counted(u32 units, u32 slot) { return units | slot << 10; }
DEVICE u32 exits(u32 count) { return count >> 20; }

// Columns (float4s of rows) [begin, end) of an item from its slots, by all workers; `shared` has room for STATE_BYTES.
static __device__ __noinline__ void join_columns(const DecodeParams& p, Item item, int slot, int begin, int end, int thread, u8* shared) {
    constexpr int ROOM = STATE_BYTES / 24;
    int units = item.num_units - slot, quads = (units + 3) / 4, spans = p.tile_split ? quads : units;
    float4* span_o = (float4*)shared;
    float2* span_ml = (float2*)(shared + ROOM * 16);
    int most = min(min(ROOM / spans, WORKERS), end - begin);
    u64 first = item.index(p) * p.max_slots + slot;
    for (int at = begin; at < end; at += most) {
        int columns = min(most, end - at);
        for (int i = thread; i < quads * columns; i += WORKERS) {
            int quad = i / columns, column = i % columns, row = (at + column) / ROW_VECTORS, vector = (at + column) % ROW_VECTORS;
            float4 x[4];
            float2 ml[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u64 of_row = (first + min(quad * 4 + k, units - 1)) * ROWS + row;
                x[k] = __ldcg((const float4*)p.states + of_row * ROW_VECTORS + vector);
                ml[k] = __ldcg(p.state_ml + of_row);
            }
            if (p.tile_split) {
#pragma unroll
                for (int k = 1; k < 4; k++)
                    if (quad * 4 + k < units) join(x[0], x[k], join_weight(ml[0].x, ml[0].y, ml[k]));
                span_o[i] = x[0];
                span_ml[i] = ml[0];
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (quad * 4 + k >= units) break;
                    span_o[(quad * 4 + k) * columns + column] = x[k];
                    span_ml[(quad * 4 + k) * columns + column] = ml[k];
                }
            }
        }
        workers_barrier();
        if (thread < columns) {
            int column = thread, row = (at + column) / ROW_VECTORS, vector = (at + column) % ROW_VECTORS;
            float4 o = span_o[column];
            float2 ml = span_ml[column];
#pragma unroll 4
            for (int s = 1; s < spans; s++) join(o, span_o[s * columns + column], join_weight(ml.x, ml.y, span_ml[s * columns + column]));
            Finish finish = Finish::of(p, item, row, ml.x, ml.y, vector == 0);
            store_four(finish.out, finish.dtype, 4 * vector, {finish.of(o.x), finish.of(o.y), finish.of(o.z), finish.of(o.w)});
        }
        workers_barrier();
    }
}

// An item that other CTAs have units of, too.
struct Pending {
    Item item;
    int before, units;  // counted before this CTA's, and this CTA's
    int all;            // whether this CTA completed the count and another one had given up
};
struct Books {
    Pending pending[2];  // where this CTA's run begins and where it ends
    u32 count;
};
// About a millisecond of looking at a count.
#ifndef ATTN_PATIENCE  // tests have less
#define ATTN_PATIENCE 2000
#endif
constexpr int PATIENCE = ATTN_PATIENCE;

// What a warp needs once per unit; in shared memory, because registers are short.
struct Place {
    Work work;    // the unit
    u32 end;      // where the CTA's run ends
    int covered;  // units of the item, from its first on, that are joined in the last one's slot
    int stored;   // units of the item that went to slots of their own
    int pending;
};

struct Join {
    u8* states;   // room for a state of all workers
    Books* books;
    Place& place;
    int thread, lane;  // among the workers, and in the warp

    __device__ __forceinline__ Item item() const {
        const Work& work = place.work;
        return {work.b, work.kv_head, work.row_block, work.num_units};
    }
    __device__ __forceinline__ u32 own() const { return shared_address(states) + thread * 8; }
    __device__ __forceinline__ int row() const { return thread / 4; }
    // This row's place in the slot of a unit.
    __device__ __forceinline__ u64 slot(const DecodeParams& p, int unit) const {
        return (item().index(p) * p.max_slots + unit) * ROWS + row();
    }
    __device__ __forceinline__ void store(const DecodeParams& p, const State& state, int unit) {
        u64 at = slot(p, unit);
        if (lane % 4 == 0) __stcg(p.state_ml + at, make_float2(state.m[0], state.l[0]));
        float2* to = (float2*)(p.states + at * D) + lane % 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++) __stcg(to + 4 * j, make_float2(state.o[0][j][0], state.o[0][j][1]));
    }
    // state = merge(what this row has in a slot, state)
    __device__ __forceinline__ void merge_stored(const DecodeParams& p, State& state, int unit) {
        u64 at = slot(p, unit);
        float2 ml = __ldcg(p.state_ml + at);
        const float2* from = (const float2*)(p.states + at * D) + lane % 4;
        Weight w = join_weight(ml.x, ml.y, make_float2(state.m[0], state.l[0]));
        state.m[0] = ml.x;
        state.l[0] = ml.y;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float2 a = __ldcg(from + 4 * j);
            state.o[0][j][0] = a.x * w.alpha + state.o[0][j][0] * w.beta;
            state.o[0][j][1] = a.y * w.alpha + state.o[0][j][1] * w.beta;
        }
    }
    __device__ __forceinline__ void finish(const DecodeParams& p, const State& state) {
        Finish finish = Finish::of(p, item(), row(), state.m[0], state.l[0], lane % 4 == 0);
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            store_pair(finish.out, finish.dtype, 8 * j + 2 * (lane % 4), finish.of(state.o[0][j][0]), finish.of(state.o[0][j][1]));
    }
    // Each segment that another one of the unit follows.
    __device__ __forceinline__ void segment(State& state, bool is_first) {
        u32 at = own();
        if (!is_first) merge_kept(at, state);
        keep_state(at, state);
    }
    __device__ __forceinline__ void unit(const DecodeParams& p, State& state, bool is_first) {
        int unit = place.work.unit, units = place.work.num_units, covered = place.covered, stored = place.stored;
        bool keeps = unit == 0 ? units == 1 || !p.tile_split : covered > 0, ends = unit == units - 1;
        __syncwarp();  // what other lanes stored of this row at the unit before is read
        if (row() < item().rows(p)) {
            if (!is_first) merge_kept(own(), state);
            if (keeps && unit > 0) merge_stored(p, state, unit - 1);
            if (keeps && ends) finish(p, state);
            else store(p, state, unit);
        }
        covered = keeps && !ends ? unit + 1 : 0;
        stored += !keeps;
        __syncwarp();
        if (lane == 0) {
            place.covered = covered;
            place.stored = stored;
        }
        __syncwarp();
        if (ends && stored > 0) leave(p, stored, 0);
    }
    // Counts what is in slots; an item that is all here is joined at once.
    __device__ __forceinline__ void leave(const DecodeParams& p, int units, int slot) {
        workers_barrier();
        Item of = item();
        if (units == of.num_units) {
            join_columns(p, of, 0, 0, of.rows(p) * ROW_VECTORS, thread, states);
        } else {
            if (thread == 0) {
                u32 old = count_release(p.counters + of.index(p), counted(units, slot));
                int before = old & COUNT_MASK;
                books->pending[place.pending] = {of, before, units, before + units == of.num_units && exits(old) > 0};
            }
            __syncwarp();
            if (lane == 0) place.pending++;
        }
        if (lane == 0) place.stored = 0;
        __syncwarp();
    }
    // After the last unit.
    __device__ __forceinline__ void end(const DecodeParams& p) {
        if (place.covered > 0) leave(p, place.covered, place.covered - 1);
        else if (place.stored > 0) leave(p, place.stored, 0);
        int pending = place.pending;
#pragma unroll 1
        for (int i = 0; i < pending; i++) {
            Pending& mine = books->pending[i];
            u32 left = 0, *counter = nullptr;
            if (thread == 0) {
                counter = p.counters + mine.item.index(p);
                u32 all = mine.item.num_units;
                for (int k = 0; k < PATIENCE && (load_acquire(counter) & COUNT_MASK) != all; k++) {
                }
                u32 old = count_release(counter, (u32)mine.units << 20);
                left = exits(old) + mine.units;
                books->count = (old & COUNT_MASK) == all ? old : 0;
            }
            workers_barrier();
            Item of = mine.item;
            u32 columns = of.rows(p) * ROW_VECTORS, begin = mine.all ? 0 : mine.before, end = mine.all ? of.num_units : mine.before + mine.units;
            if (books->count)
                join_columns(p, of, first_slot(books->count), columns * begin / of.num_units, columns * end / of.num_units, thread, states);
            workers_barrier();  // before the books change
            if (thread == 0 && left == (u32)of.num_units) *counter = 0;
        }
    }
};
