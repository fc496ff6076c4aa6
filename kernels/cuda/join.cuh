// Sections 5 and 6 outside the teams: their states join in order to the unit's, units' to the sequence's, spread over the CTA's
// threads.
//
// Global memory is left alone as far as possible: a CTA that has an item's first units keeps their joined state in shared memory,
// and writes the result itself if it comes to the item's end (storing every unit's state cost 20 µs of 270 at batch 512, though it
// is under 2 % of the bytes). What crosses a CTA's border is handed over in slots and counted; who completes the count joins the
// slots. A unit is counted one tile into the next one, when its writes have long arrived, and the count's answer is looked at when
// that one ends. Two ways to spare the CTA its barriers were tried and lost: the last warp to arrive joining alone made the slowest
// team slower (int4 191 µs for 169), joining a tile later cost registers (204 µs).
#pragma once
#include "value.cuh"
#include "work.cuh"

constexpr int ROW_VECTORS = D / 4;   // float4s of a row

// What joining does to both sides. An empty side has O = +0 and takes part with weight -0: what it adds changes nothing, not even
// a zero's sign.
struct Weight {
    float alpha, beta;
};

DEVICE Weight weight_of(float m, float m_b, float top) {
    bool empty = m == MINUS_INFINITY, b_empty = m_b == MINUS_INFINITY;
    return {empty ? (b_empty ? 0.0f : -0.0f) : pow2(top - m), b_empty ? -0.0f : pow2(top - m_b)};
}
DEVICE Weight join_weight(float& m, float& l, float2 b, bool is_fold) {
    float top = fmaxf(m, b.x);
    Weight w = weight_of(m, b.x, top);
    m = top;
    l = is_fold ? fmaf(b.y, w.beta, l * w.alpha) : l * w.alpha + b.y * w.beta;
    return w;
}
// `merge` of docs/arithmetic.md, or `fold` of a tile whose value was kept as a state: they round alike but for subnormals.
DEVICE void join(float4& a, const float4& b, const Weight& w, bool is_fold) {
    if (is_fold) {
        a = {fmaf(b.x, w.beta, a.x * w.alpha), fmaf(b.y, w.beta, a.y * w.alpha), fmaf(b.z, w.beta, a.z * w.alpha),
             fmaf(b.w, w.beta, a.w * w.alpha)};
    } else {
        a = {a.x * w.alpha + b.x * w.beta, a.y * w.alpha + b.y * w.beta, a.z * w.alpha + b.z * w.beta,
             a.w * w.alpha + b.w * w.beta};
    }
}

// One (sequence, KV head, row block).
struct Item {
    int b, kv_head, row_block, num_slots;

    __device__ __forceinline__ u64 index(const DecodeParams& p) const {
        return ((u64)b * p.num_kv_heads + kv_head) * p.row_blocks + row_block;
    }
    // The row's place in Q, out and lse, or -1.
    __device__ __forceinline__ long long row(const DecodeParams& p, int row) const {
        int r = row_block * ROWS + row;
        if (r >= p.heads_per_kv * p.q_len) return -1;
        int i = r / p.heads_per_kv, head = kv_head * p.heads_per_kv + r % p.heads_per_kv;
        return ((long long)b * p.q_len + i) * p.num_q_heads + head;
    }
};

struct Finish {
    float* out;
    float* lse;
    float scale, tensor;

    DEVICE Finish at(const DecodeParams& p, const Item& item, int row) {
        long long at = item.row(p, row);
        if (at < 0) return {nullptr, nullptr, 0.0f, 0.0f};
        return {p.out + at * D, p.lse ? p.lse + at : nullptr, 0.0f, p.v_tensor_scales ? p.v_tensor_scales[item.kv_head] : 1.0f};
    }
    // Writes the log-sum-exp, too, if this is the row's first thread. Nothing seen: O is +0, and so is the result.
    __device__ __forceinline__ void finish(const DecodeParams& p, float m, float l, bool first) {
        bool some = m > MINUS_INFINITY;
        if (first && lse) *lse = some ? log_sum(m, l) : MINUS_INFINITY;
        scale = some ? rcp(l) : 1.0f;
    }
    __device__ __forceinline__ void write(int vector, const float4& o) const {
        if (!out) return;
        ((float4*)out)[vector] = {o.x * scale * tensor, o.y * scale * tensor, o.z * scale * tensor, o.w * scale * tensor};
    }
};

// All slots of an item from `first` on (it covers those before), LANES threads to a row. A row's threads find the weights of LANES
// slots side by side; then each joins its own dims in order. Called, not inlined: it is long and rare.
template <int LANES> static __device__ __noinline__ void join_slots(const DecodeParams& p, Item item, int first) {
    constexpr int VECTORS = (ROW_VECTORS + LANES - 1) / LANES, CHUNK = VECTORS < 4 ? VECTORS : 4, AHEAD = 16 / CHUNK;
    int row = threadIdx.x / LANES, lane = threadIdx.x % LANES, run = p.tile_split ? SPAN : LANES;
    if (row >= ROWS) return;
    u64 slot = item.index(p) * p.max_slots;
    const float4* states = (const float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
    const float2* ml = p.state_ml + slot * ROWS + row;
    Finish finish = Finish::at(p, item, row);
#pragma unroll 1
    for (int at = lane; at < VECTORS * LANES; at += CHUNK * LANES) {
        float m = MINUS_INFINITY, l = 0.0f, span_l = 0.0f;
        float4 o[CHUNK], span_o[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) o[k] = span_o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int base = first; base < item.num_slots; base += LANES) {
            float2 mine = base + lane < item.num_slots ? __ldcg(ml + (u64)(base + lane) * ROWS) : make_float2(MINUS_INFINITY, 0.0f);
            // The running maximum over the span's segments, or over all spans.
            float top = mine.x;
            for (int i = 1; i < run; i *= 2) {
                float other = __shfl_up_sync(~0u, top, i, LANES);
                if (lane % run >= i) top = fmaxf(top, other);
            }
            if (!p.tile_split) top = fmaxf(top, m);
            float before = __shfl_up_sync(~0u, top, 1, LANES);
            if (lane % run == 0) before = p.tile_split ? MINUS_INFINITY : m;
            Weight w = weight_of(before, mine.x, top);
            int slots = min(LANES, item.num_slots - base);
#pragma unroll 1
            for (int u0 = 0; u0 < slots; u0 += AHEAD) {
                float4 x[AHEAD][CHUNK];
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
#pragma unroll
                    for (int k = 0; k < CHUNK; k++)
                        x[i][k] = __ldcg(states + (u64)(base + min(u0 + i, slots - 1)) * (ROWS * ROW_VECTORS) + min(at + k * LANES, ROW_VECTORS - 1));
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    int u = u0 + i;
                    if (u >= slots) break;
                    Weight here = {__shfl_sync(~0u, w.alpha, u, LANES), __shfl_sync(~0u, w.beta, u, LANES)};
                    float l_here = __shfl_sync(~0u, mine.y, u, LANES);
                    if (!p.tile_split) {
                        l = l * here.alpha + l_here * here.beta;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) join(o[k], x[i][k], here, false);
                        continue;
                    }
                    span_l = span_l * here.alpha + l_here * here.beta;
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) join(span_o[k], x[i][k], here, false);
                    if (u % SPAN != SPAN - 1 && base + u != item.num_slots - 1) continue;
                    here = join_weight(m, l, make_float2(__shfl_sync(~0u, top, u, LANES), span_l), false);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        join(o[k], span_o[k], here, false);
                        span_o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
                    }
                    span_l = 0.0f;
                }
            }
            if (!p.tile_split) m = __shfl_sync(~0u, top, LANES - 1, LANES);
        }
        finish.finish(p, m, l, at == 0);
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (at + k * LANES < ROW_VECTORS) finish.write(at + k * LANES, o[k]);
    }
}

// Rows that only fill up the tile have no result: with few real ones, each gets twice the threads, and twice the loads in flight.
DEVICE void join_units(const DecodeParams& p, const Item& item, int first) {
    constexpr int LANES = THREADS / ROWS;
    int real = p.heads_per_kv * p.q_len - item.row_block * ROWS;
    if (LANES < 32 && real * 32 <= THREADS) join_slots<32>(p, item, first);
    else join_slots<LANES>(p, item, first);
}

// What the CTA's threads share about the join: registers are short.
struct Shared {
    u32 last;       // 0, or 1 + the first slot of `counted`, all of whose slots are there
    u32 add;        // what the count of `counted` goes up by
    int covered;    // slots of the running item whose joined state is kept, 0: none
    Item counted;   // of what is to be counted
};

struct Join {
    static constexpr int LANES = THREADS / ROWS, VECTORS = (ROW_VECTORS + LANES - 1) / LANES;
    enum Pending { NOTHING, TO_COUNT, COUNTED };

    u8* shared;
    Shared* known;
    Pending pending;
    u32 before;  // thread 0: the count's answer

    __device__ __forceinline__ void start(u8* memory) {
        shared = memory;
        known = (Shared*)(shared + AT_JOIN);
        if (threadIdx.x == 0) {
            known->last = 0;
            known->covered = 0;
        }
        pending = NOTHING;
    }
    // A count has the slots in its low half, and in its high half the first one, from whoever has the item's first units.
    __device__ __forceinline__ void count(const DecodeParams& p) {
        if (pending != TO_COUNT) return;
        if (threadIdx.x == 0) before = count_release(p.counters + known->counted.index(p), known->add);
        pending = COUNTED;
    }
    // Before a barrier that `settle` follows.
    __device__ __forceinline__ void answer(const DecodeParams& p) {
        if (pending != COUNTED || threadIdx.x != 0) return;
        u32 counted = before + known->add;
        bool is_last = (counted & 0xffff) == (u32)known->counted.num_slots;
        if (is_last) p.counters[known->counted.index(p)] = 0;
        known->last = is_last ? 1 + (counted >> 16) : 0;
    }
    __device__ __forceinline__ void settle(const DecodeParams& p) {
        if (pending != COUNTED) return;
        pending = NOTHING;
        if (known->last == 0) return;
        join_units(p, known->counted, known->last - 1);
        __syncthreads();
    }

    // A team's state at the end of a segment: the first one of a unit is put where the join will look for it, others join it there.
    __device__ __forceinline__ void segment(const State& state, bool first, int team, int warp_row, int lane) {
        float* states = (float*)(shared + AT_STATES);
        float2* ml = (float2*)(shared + AT_STATE_ML);
#pragma unroll
        for (int g = 0; g < G; g++) {
            int row = team * ROWS + warp_row + g * 8 + lane / 4;
            float2 x = make_float2(state.m[g], state.l[g]);
            Weight w;
            if (!first) {
                float2 before = ml[row];
                w = join_weight(before.x, before.y, x, false);
                x = before;
                __syncwarp();
            }
            if (lane % 4 == 0) ml[row] = x;
            // Of V that was turned on its way, a lane has four neighbouring dims in two accumulators.
            constexpr int STEP = V_ROWS ? 2 : 1;
            float4* to = (float4*)(states + row * STATE_STRIDE + (V_ROWS ? 4 : 2) * (lane % 4));
#pragma unroll
            for (int j = 0; j < D / 8; j += STEP) {
                const float(&even)[2] = state.o[g][j], (&odd)[2] = state.o[g][(j + 1) % (D / 8)];
                if constexpr (V_ROWS) {
                    float4 y = {even[0], odd[0], even[1], odd[1]};
                    if (!first) {
                        float4 o = to[2 * j];
                        join(o, y, w, false);
                        y = o;
                    }
                    to[2 * j] = y;
                } else {
                    float2& at = *(float2*)(to + 2 * j);
                    float2 y = make_float2(even[0], even[1]);
                    if (!first) y = make_float2(at.x * w.alpha + y.x * w.beta, at.y * w.alpha + y.y * w.beta);
                    at = y;
                }
            }
        }
    }

    // The states of all teams at the end of a unit.
    __device__ __forceinline__ void unit(const DecodeParams& p, const Cursor& here, const Cursor& next) {
        answer(p);
        __syncthreads();
        settle(p);
        const Work& work = here.work;
        int covered = known->covered, slots = work.unit_slots(), slot = work.unit * slots, num_slots = work.num_slots();
        bool first = work.unit == 0, last = work.unit == work.num_units - 1;
        // What has two levels to join, and several row blocks that take turns, go by slots.
        bool keeps = first ? last || (work.takes != A_TILE && p.row_blocks == 1) : covered > 0;
        Unit u = {{work.b, work.kv_head, work.row_block, num_slots}, slot, min(slot + slots, num_slots), first, keeps, keeps && last,
                  !keeps || (!last && (!next.is_valid(p) || next.is_fresh)), work.takes};
        if (u.takes == A_SPAN && !keeps) hand_over_spans(p, u);
        else join_teams(p, u);
        __syncthreads();
        if (threadIdx.x == 0) {
            known->covered = keeps && !last && !u.leaves ? u.end : 0;
            if (u.leaves) {
                known->counted = u.item;
                known->add = keeps ? u.end | (u.end - 1) << 16 : u.end - u.slot;
            }
        }
        if (u.leaves) pending = TO_COUNT;
    }
    struct Unit {
        Item item;
        int slot, end;            // slots of the unit
        bool first, keeps, ends;  // of the item; joined with the units before it; with the result
        bool leaves;              // for a slot: what this CTA has of the item ends here, or the unit is on its own
        int takes;
    };
    // The unit's state from the teams' in shared memory, and on from there. Spans join what is kept one by one.
    __device__ __forceinline__ void join_teams(const DecodeParams& p, const Unit& u) {
        int row = threadIdx.x / LANES, at = threadIdx.x % LANES;
        const float4* states = (const float4*)((const float*)(shared + AT_STATES) + row * STATE_STRIDE);
        const float2* ml = (const float2*)(shared + AT_STATE_ML) + row;
        float4* kept = (float4*)(shared + AT_KEPT) + row * ROW_VECTORS;
        float2* kept_ml = (float2*)(shared + AT_KEPT_ML) + row;
        bool joins = u.keeps && !u.first, one_by_one = u.takes == A_SPAN, is_fold = u.takes == A_TILE;
        // w[0] is for what is kept: before the teams' states, or after them.
        float2 sum = one_by_one && joins ? *kept_ml : ml[0];
        Weight w[1 + TEAMS];
        if (one_by_one && joins) w[0] = join_weight(sum.x, sum.y, ml[0], false);
#pragma unroll
        for (int team = 1; team < TEAMS; team++) w[team] = join_weight(sum.x, sum.y, ml[team * ROWS], is_fold);
        if (!one_by_one && joins) {
            float2 before = *kept_ml;
            w[0] = join_weight(before.x, before.y, sum, false);
            sum = before;
        }
        __syncwarp();  // a row's threads, all of one warp, have read what its first one overwrites
        if (at == 0) *kept_ml = sum;
        Finish finish = {};
        if (u.ends) {
            finish = Finish::at(p, u.item, row);
            finish.finish(p, sum.x, sum.y, at == 0);
        }
        u64 slot = u.item.index(p) * p.max_slots + u.end - 1;
        if (u.leaves && at == 0) __stcg(p.state_ml + slot * ROWS + row, sum);
        float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            int vector = at + k * LANES;
            if (ROW_VECTORS % LANES && vector >= ROW_VECTORS) continue;
            float4 x = states[vector], o;
            if (joins) o = kept[vector];
            if (one_by_one && joins) {
                join(o, x, w[0], false);
                x = o;
            }
#pragma unroll
            for (int team = 1; team < TEAMS; team++) join(x, states[team * ROWS * (STATE_STRIDE / 4) + vector], w[team], is_fold);
            if (!one_by_one && joins) {
                join(o, x, w[0], false);
                x = o;
            }
            if (u.ends) finish.write(vector, x);
            else if (u.leaves) __stcg(to + vector, x);
            else kept[vector] = x;
        }
    }
    // Each team's span to its slot.
    __device__ __forceinline__ void hand_over_spans(const DecodeParams& p, const Unit& u) {
        int row = threadIdx.x / LANES;
        const float* states = (const float*)(shared + AT_STATES) + row * STATE_STRIDE;
#pragma unroll 1
        for (int team = 0; team < u.end - u.slot; team++) {
            u64 slot = u.item.index(p) * p.max_slots + u.slot + team;
            const float4* from = (const float4*)(states + team * ROWS * STATE_STRIDE);
            float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
            for (int at = threadIdx.x % LANES; at < ROW_VECTORS; at += LANES) __stcg(to + at, from[at]);
            if (threadIdx.x % LANES == 0) __stcg(p.state_ml + slot * ROWS + row, ((const float2*)(shared + AT_STATE_ML))[team * ROWS + row]);
        }
    }
    __device__ __forceinline__ void finish(const DecodeParams& p) {
        if (pending == NOTHING) return;
        count(p);
        answer(p);
        __syncthreads();
        settle(p);
    }
};
