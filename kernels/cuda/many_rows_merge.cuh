// Many query rows: segments merge into spans, spans into an item's state, in the order of docs/arithmetic.md.
//
// A thread keeps its own elements of a state (row lane/4 of its warp, dims 8j + 2·(lane%4) + {0, 1}), so a span's state waits in
// shared memory, and that of an item's first spans in a slot of global memory, without a barrier. What crosses a CTA's border goes through slots of global memory and is counted; when an item's count is
// complete, each of its CTAs merges a part of its columns. A CTA waits for others only when all its own units are counted, and not for
// ever, because others may not be resident: who gives up says so in the count, and whoever completes it then merges all columns.
#pragma once
#include "value.cuh"
#include "many_rows_work.cuh"

constexpr int WORKERS = ROWS * 4;                // threads with rows
constexpr int ROW_VECTORS = HEAD_DIM / 4;               // float4s of a row
constexpr int STATE_BYTES = WORKERS * (HEAD_DIM / 8 + 1) * 8;

// All threads with rows; the feeding warps go their own way.
DEVICE void workers_barrier() { barrier_of<WORKERS>(); }

struct MergeScale {
    float alpha, beta;
};

// An empty side has O = +0 and takes part with weight -0: what it adds changes nothing, not even a zero's sign.
DEVICE MergeScale merge_scale(float& m, float& l, float2 b) {
    float top = fmaxf(m, b.x);
    bool empty = m == MINUS_INFINITY, b_empty = b.x == MINUS_INFINITY;
    MergeScale w = {empty ? (b_empty ? 0.0f : -0.0f) : pow2(top - m), b_empty ? -0.0f : pow2(top - b.x)};
    m = top;
    l = l * w.alpha + b.y * w.beta;
    return w;
}
DEVICE void merge(float4& a, const float4& b, const MergeScale& w) {
    a = {a.x * w.alpha + b.x * w.beta, a.y * w.alpha + b.y * w.beta, a.z * w.alpha + b.z * w.beta, a.w * w.alpha + b.w * w.beta};
}

// A state of one thread in shared memory.
DEVICE void keep_state(u32 at, const State& state) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) sts64(at + j * WORKERS * 8, state.o[0][j][0], state.o[0][j][1]);
    sts64(at + HEAD_DIM / 8 * WORKERS * 8, state.m[0], state.l[0]);
}
// state = merge(what is kept, state)
DEVICE void merge_kept(u32 at, State& state) {
    uint2 ml = lds64(at + HEAD_DIM / 8 * WORKERS * 8);
    float m = bits_float(ml.x), l = bits_float(ml.y);
    MergeScale w = merge_scale(m, l, make_float2(state.m[0], state.l[0]));
    state.m[0] = m;
    state.l[0] = l;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
        uint2 a = lds64(at + j * WORKERS * 8);
        state.o[0][j][0] = bits_float(a.x) * w.alpha + state.o[0][j][0] * w.beta;
        state.o[0][j][1] = bits_float(a.y) * w.alpha + state.o[0][j][1] * w.beta;
    }
}

// One (sequence, KV head, row block).
struct WorkItem {
    int b, kv_head, row_block, num_units;

    __device__ __forceinline__ u64 index(const DecodeParams& p) const {
        return ((u64)b * p.num_kv_heads + kv_head) * p.row_blocks + row_block;
    }
    __device__ __forceinline__ int rows(const DecodeParams& p) const { return min(ROWS, p.heads_per_kv * p.q_len - row_block * ROWS); }
    // The row's progress in Q, out and lse.
    __device__ __forceinline__ u64 row(const DecodeParams& p, int row) const {
        int r = row_block * ROWS + row, i = r / p.heads_per_kv, head = kv_head * p.heads_per_kv + r % p.heads_per_kv;
        return ((u64)b * p.q_len + i) * p.num_q_heads + head;
    }
};

// Section 6 of a row: factors of its O; its log-sum-exp is written by the thread that is `first` in it.
struct Epilogue {
    u8* out;
    float scale, tensor;
    int dtype;

    DEVICE Epilogue of(const DecodeParams& p, const WorkItem& item, int row, float m, float l, bool first) {
        u64 at = item.row(p, row);
        float alpha = 1.0f;
        if (p.sinks) alpha = merge_sink(p.sinks[item.kv_head * p.heads_per_kv + (item.row_block * ROWS + row) % p.heads_per_kv], m, l);
        bool some = m > MINUS_INFINITY;
        if (first && p.lse) p.lse[at] = some ? log_sum(m, l) : MINUS_INFINITY;
        float tensor = p.v_tensor_scales ? p.v_tensor_scales[item.kv_head] : 1.0f;
        return {row_at(p.out, at, HEAD_DIM, p.dtype), some ? rcp(l) * alpha : 1.0f, tensor, p.dtype};
    }
    __device__ __forceinline__ float of(float o) const { return o * scale * tensor; }
};

// An item's count: units that are there, the first slot (it covers the units before it), units whose CTAs have seen the end.
constexpr u32 COUNT_MASK = 0x3ff;
DEVICE u32 first_partial(u32 count) { return count >> 10 & 0x3ff; }
DEVICE u32 counted(u32 units, u32 slot) { return units | slot << 10; }
DEVICE u32 exits(u32 count) { return count >> 20; }

// Columns (float4s of rows) [begin, end) of an item from its slots, by all workers; `shared` has room for STATE_BYTES.
static __device__ __noinline__ void merge_columns(const DecodeParams& p, WorkItem item, int slot, int begin, int end, int thread, u8* shared) {
    constexpr int ROOM = STATE_BYTES / 24;
    int units = item.num_units - slot, quads = (units + 3) / 4, spans = p.partial_per_segment ? quads : units;
    float4* span_o = (float4*)shared;
    float2* span_ml = (float2*)(shared + ROOM * 16);
    int most = min(min(ROOM / spans, WORKERS), end - begin);
    u64 first = item.index(p) * p.max_partials + slot;
    for (int at = begin; at < end; at += most) {
        int columns = min(most, end - at);
        for (int i = thread; i < quads * columns; i += WORKERS) {
            int quad = i / columns, column = i % columns, row = (at + column) / ROW_VECTORS, vector = (at + column) % ROW_VECTORS;
            float4 x[4];
            float2 ml[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u64 of_row = (first + min(quad * 4 + k, units - 1)) * ROWS + row;
                x[k] = __ldcg((const float4*)p.partial_o + of_row * ROW_VECTORS + vector);
                ml[k] = __ldcg(p.partial_max_sum + of_row);
            }
            if (p.partial_per_segment) {
#pragma unroll
                for (int k = 1; k < 4; k++)
                    if (quad * 4 + k < units) merge(x[0], x[k], merge_scale(ml[0].x, ml[0].y, ml[k]));
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
            for (int s = 1; s < spans; s++) merge(o, span_o[s * columns + column], merge_scale(ml.x, ml.y, span_ml[s * columns + column]));
            Epilogue epilogue = Epilogue::of(p, item, row, ml.x, ml.y, vector == 0);
            store_four(epilogue.out, epilogue.dtype, 4 * vector, {epilogue.of(o.x), epilogue.of(o.y), epilogue.of(o.z), epilogue.of(o.w)});
        }
        workers_barrier();
    }
}

// An item that other CTAs have units of, too.
struct PendingCount {
    WorkItem item;
    int before, units;  // counted before this CTA's, and this CTA's
    int all;            // whether this CTA completed the count and another one had given up
};
struct SharedState {
    PendingCount pending[2];  // where this CTA's run begins and where it ends
    u32 count;
};
// About a millisecond of looking at a count.
#ifndef ATTN_SPIN_LIMIT  // tests have less
#define ATTN_SPIN_LIMIT 2000
#endif
constexpr int SPIN_LIMIT = ATTN_SPIN_LIMIT;

// What a warp needs once per unit; in shared memory, because registers are short.
struct Progress {
    Work work;    // the unit
    u32 end;      // where the CTA's run ends
    int covered;  // units of the item, from its first on, that are merged in the last one's slot
    int stored;   // units of the item that went to slots of their own
    int pending;
};

struct Merge {
    u8* states;   // room for a state of all workers
    SharedState* shared_state;
    Progress& progress;
    int thread, lane;  // among the workers, and in the warp

    __device__ __forceinline__ WorkItem item() const {
        const Work& work = progress.work;
        return {work.b, work.kv_head, work.row_block, work.num_units};
    }
    __device__ __forceinline__ u32 own() const { return shared_address(states) + thread * 8; }
    __device__ __forceinline__ int row() const { return thread / 4; }
    // This row's progress in the slot of a unit.
    __device__ __forceinline__ u64 slot(const DecodeParams& p, int unit) const {
        return (item().index(p) * p.max_partials + unit) * ROWS + row();
    }
    __device__ __forceinline__ void store(const DecodeParams& p, const State& state, int unit) {
        u64 at = slot(p, unit);
        if (lane % 4 == 0) __stcg(p.partial_max_sum + at, make_float2(state.m[0], state.l[0]));
        float2* to = (float2*)(p.partial_o + at * HEAD_DIM) + lane % 4;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) __stcg(to + 4 * j, make_float2(state.o[0][j][0], state.o[0][j][1]));
    }
    // state = merge(what this row has in a slot, state)
    __device__ __forceinline__ void merge_stored(const DecodeParams& p, State& state, int unit) {
        u64 at = slot(p, unit);
        float2 ml = __ldcg(p.partial_max_sum + at);
        const float2* from = (const float2*)(p.partial_o + at * HEAD_DIM) + lane % 4;
        MergeScale w = merge_scale(ml.x, ml.y, make_float2(state.m[0], state.l[0]));
        state.m[0] = ml.x;
        state.l[0] = ml.y;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++) {
            float2 a = __ldcg(from + 4 * j);
            state.o[0][j][0] = a.x * w.alpha + state.o[0][j][0] * w.beta;
            state.o[0][j][1] = a.y * w.alpha + state.o[0][j][1] * w.beta;
        }
    }
    __device__ __forceinline__ void write_result(const DecodeParams& p, const State& state) {
        Epilogue epilogue = Epilogue::of(p, item(), row(), state.m[0], state.l[0], lane % 4 == 0);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
            store_pair(epilogue.out, epilogue.dtype, 8 * j + 2 * (lane % 4), epilogue.of(state.o[0][j][0]), epilogue.of(state.o[0][j][1]));
    }
    // Each segment that another one of the unit follows.
    __device__ __forceinline__ void segment(State& state, bool is_first) {
        u32 at = own();
        if (!is_first) merge_kept(at, state);
        keep_state(at, state);
    }
    __device__ __forceinline__ void unit(const DecodeParams& p, State& state, bool is_first) {
        int unit = progress.work.unit, units = progress.work.num_units, covered = progress.covered, stored = progress.stored;
        bool keeps = unit == 0 ? units == 1 || !p.partial_per_segment : covered > 0, ends = unit == units - 1;
        __syncwarp();  // what other lanes stored of this row at the unit before is read
        if (row() < item().rows(p)) {
            if (!is_first) merge_kept(own(), state);
            if (keeps && unit > 0) merge_stored(p, state, unit - 1);
            if (keeps && ends) write_result(p, state);
            else store(p, state, unit);
        }
        covered = keeps && !ends ? unit + 1 : 0;
        stored += !keeps;
        __syncwarp();
        if (lane == 0) {
            progress.covered = covered;
            progress.stored = stored;
        }
        __syncwarp();
        if (ends && stored > 0) count_arrival(p, stored, 0);
    }
    // Counts what is in slots; an item that is all here is merged at once.
    __device__ __forceinline__ void count_arrival(const DecodeParams& p, int units, int slot) {
        workers_barrier();
        WorkItem of = item();
        if (units == of.num_units) {
            merge_columns(p, of, 0, 0, of.rows(p) * ROW_VECTORS, thread, states);
        } else {
            if (thread == 0) {
                u32 old = count_release(p.counters + of.index(p), counted(units, slot));
                int before = old & COUNT_MASK;
                shared_state->pending[progress.pending] = {of, before, units, before + units == of.num_units && exits(old) > 0};
            }
            __syncwarp();
            if (lane == 0) progress.pending++;
        }
        if (lane == 0) progress.stored = 0;
        __syncwarp();
    }
    // After the last unit.
    __device__ __forceinline__ void end(const DecodeParams& p) {
        if (progress.covered > 0) count_arrival(p, progress.covered, progress.covered - 1);
        else if (progress.stored > 0) count_arrival(p, progress.stored, 0);
        int pending = progress.pending;
#pragma unroll 1
        for (int i = 0; i < pending; i++) {
            PendingCount& mine = shared_state->pending[i];
            u32 left = 0, *counter = nullptr;
            if (thread == 0) {
                counter = p.counters + mine.item.index(p);
                u32 all = mine.item.num_units;
                for (int k = 0; k < SPIN_LIMIT && (load_acquire(counter) & COUNT_MASK) != all; k++) {
                }
                u32 old = count_release(counter, (u32)mine.units << 20);
                left = exits(old) + mine.units;
                shared_state->count = (old & COUNT_MASK) == all ? old : 0;
            }
            workers_barrier();
            WorkItem of = mine.item;
            u32 columns = of.rows(p) * ROW_VECTORS, begin = mine.all ? 0 : mine.before, end = mine.all ? of.num_units : mine.before + mine.units;
            if (shared_state->count)
                merge_columns(p, of, first_partial(shared_state->count), columns * begin / of.num_units, columns * end / of.num_units, thread, states);
            workers_barrier();  // before the shared_state change
            if (thread == 0 && left == (u32)of.num_units) *counter = 0;
        }
    }
};
