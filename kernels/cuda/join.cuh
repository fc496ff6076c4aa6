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
        int i = (u32)r / p.by_heads, head = kv_head * p.heads_per_kv + r - i * p.heads_per_kv;
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
    __device__ __forceinline__ void finish(float m, float l, bool first) {
        bool some = m > MINUS_INFINITY;
        if (first && lse) *lse = some ? log_sum(m, l) : MINUS_INFINITY;
        scale = some ? rcp(l) : 1.0f;
    }
    __device__ __forceinline__ void write(int vector, const float4& o) const {
        if (!out) return;
        ((float4*)out)[vector] = {o.x * scale * tensor, o.y * scale * tensor, o.z * scale * tensor, o.w * scale * tensor};
    }
};

// Slots of an item whose states a row's threads join: from `first` (it covers those before) to `end`.
struct Slots {
    const float4* states;  // of the row
    const float2* ml;
    int first, end;
};

// A row's threads, LANES, find the weights of LANES slots side by side, while the first states are on their way; then each joins its
// own dims in order, and writes the result. Slots are spans, or segments that make spans first. Called, not inlined: it is long and
// rare. By value: what a reference points to would come from global memory. Four slots at a time without a branch: this is the
// last thing that a launch waits for, one warp's latencies in a row.
template <int LANES, bool SEGMENTS> static __device__ __noinline__ void join_slots(Slots slots, Finish finish) {
    constexpr int VECTORS = (ROW_VECTORS + LANES - 1) / LANES, CHUNK = VECTORS < 4 ? VECTORS : 4, AHEAD = 16 / CHUNK / SPAN * SPAN;
    constexpr int RUN = SEGMENTS ? SPAN : LANES;
    int lane = threadIdx.x % LANES;
    auto load_ml = [&](int slot) { return slot < slots.end ? __ldcg(slots.ml + (u64)slot * ROWS) : make_float2(MINUS_INFINITY, 0.0f); };
#pragma unroll 1
    for (int at = lane; at < VECTORS * LANES; at += CHUNK * LANES) {
        float m = MINUS_INFINITY, l = 0.0f;
        float4 o[CHUNK], x[AHEAD][CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
        auto load = [&](int slot, float4 (&to)[CHUNK]) {
            const float4* from = slots.states + (u64)min(slot, slots.end - 1) * (ROWS * ROW_VECTORS) + at;
#pragma unroll
            for (int k = 0; k < CHUNK; k++) to[k] = __ldcg(from + (ROW_VECTORS % LANES == 0 || at + k * LANES < ROW_VECTORS ? k * LANES : 0));
        };
        float2 mine = load_ml(slots.first + lane);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) load(slots.first + i, x[i]);
#pragma unroll 1
        for (int base = slots.first; base < slots.end; base += LANES) {
            if (base != slots.first) mine = load_ml(base + lane);
            // The running maximum over the span's segments, or over all spans.
            float top = mine.x;
#pragma unroll
            for (int i = 1; i < RUN; i *= 2) {
                float other = __shfl_up_sync(~0u, top, i, LANES);
                if (lane % RUN >= i) top = fmaxf(top, other);
            }
            if (!SEGMENTS) top = fmaxf(top, m);
            float before = __shfl_up_sync(~0u, top, 1, LANES);
            if (lane % RUN == 0) before = SEGMENTS ? MINUS_INFINITY : m;
            // Beyond the last slot a side is empty: it changes nothing.
            Weight w = weight_of(before, mine.x, top);
            int count = min(LANES, slots.end - base);
#pragma unroll 1
            for (int u0 = 0; u0 < count; u0 += AHEAD) {
#pragma unroll
                for (int u4 = 0; u4 < AHEAD; u4 += SPAN) {
                    if (u0 + u4 >= count) break;
                    float sum = SEGMENTS ? 0.0f : l;
                    float4 joined[CHUNK];
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) joined[k] = SEGMENTS ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : o[k];
#pragma unroll
                    for (int i = 0; i < SPAN; i++) {
                        int u = u0 + u4 + i;
                        Weight here = {__shfl_sync(~0u, w.alpha, u, LANES), __shfl_sync(~0u, w.beta, u, LANES)};
                        sum = sum * here.alpha + __shfl_sync(~0u, mine.y, u, LANES) * here.beta;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++)
                            join(joined[k], u < count ? x[u4 + i][k] : make_float4(0.0f, 0.0f, 0.0f, 0.0f), here, false);
                        load(base + u + AHEAD, x[u4 + i]);
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
            if (at + k * LANES < ROW_VECTORS) finish.write(at + k * LANES, o[k]);
    }
}

template <int LANES> DEVICE void join_rows(const DecodeParams& p, const Item& item, int first) {
    int row = threadIdx.x / LANES;
    if (row >= ROWS) return;
    u64 slot = item.index(p) * p.max_slots;
    Slots slots = {(const float4*)p.states + (slot * ROWS + row) * ROW_VECTORS, p.state_ml + slot * ROWS + row, first, item.num_slots};
    Finish finish = Finish::at(p, item, row);
    if (p.tile_split) join_slots<LANES, true>(slots, finish);
    else join_slots<LANES, false>(slots, finish);
}

// Rows that only fill up the tile have no result: with few real ones, each gets twice the threads, and twice the loads in flight.
DEVICE void join_units(const DecodeParams& p, const Item& item, int first) {
    constexpr int LANES = THREADS / ROWS;
    int real = p.heads_per_kv * p.q_len - item.row_block * ROWS;
    if (LANES < 32 && real * 32 <= THREADS) join_rows<32>(p, item, first);
    else join_rows<LANES>(p, item, first);
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

    // The result of an item that a team had for itself: a warp's rows are its own, four threads to a row.
    __device__ __forceinline__ void item(const DecodeParams& p, const Work& work, int team, int warp_row, int lane) const {
        __syncwarp();
        Item item = {work.b, work.kv_head(team), work.row_block, 0};
        if (item.kv_head < p.num_kv_heads) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                int row = warp_row + g * 8 + lane / 4;
                Finish finish = Finish::at(p, item, row);
                float2 ml = ((const float2*)(shared + AT_STATE_ML))[team * ROWS + row];
                finish.finish(ml.x, ml.y, lane % 4 == 0);
                const float4* state = (const float4*)((const float*)(shared + AT_STATES) + (team * ROWS + row) * STATE_STRIDE);
                for (int vector = lane % 4; vector < ROW_VECTORS; vector += 4) finish.write(vector, state[vector]);
            }
        }
        __syncthreads();
    }

    // The states of all teams at the end of a unit.
    __device__ __forceinline__ void unit(const DecodeParams& p, const Cursor& here, const Cursor& next) {
        answer(p);
        __syncthreads();
        settle(p);
        const Work& work = here.work;
        TeamTakes takes = work.takes();
        int covered = known->covered, slot = work.slot, end = slot + work.slots_here;
        bool first = slot == 0, last = end == work.num_slots;
        // What has two levels to join, and several row blocks that take turns, go by slots.
        bool keeps = first ? last || (takes != A_TILE && p.row_blocks == 1) : covered > 0;
        Unit u = {{work.b, work.heads, work.row_block, work.num_slots}, slot, end, first, keeps, keeps && last,
                  !keeps || (!last && (!next.is_valid(p) || next.is_fresh)), takes};
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
        TeamTakes takes;
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
            finish.finish(sum.x, sum.y, at == 0);
        }
        u64 slot = u.item.index(p) * p.max_slots + u.end - 1;
        if (u.leaves && at == 0) __stcg(p.state_ml + slot * ROWS + row, sum);
        float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
#pragma unroll 1  // for a launch of one unit, instructions take longer to arrive than to run
        for (int vector = at; vector < ROW_VECTORS; vector += LANES) {
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
