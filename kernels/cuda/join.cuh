// Sections 5 and 6 outside the teams: their states join in order to the unit's, units' to the sequence's, spread over the CTA's
// threads.
//
// Global memory is left alone as far as possible: a CTA that has an item's first units keeps their joined state in registers, and
// writes the result itself if it comes to the item's end (storing every unit's state cost 20 µs of 270 at batch 512, though it is
// under 2 % of the bytes). What crosses a CTA's border is handed over in slots and counted; who completes the count joins the slots.
// A unit is counted one tile into the next one, when its writes have long arrived, and the count's answer is looked at when that
// one ends. Two ways to spare the CTA its barriers were tried and lost: the last warp to arrive joining alone made the slowest team
// slower (int4 191 µs for 169), joining a tile later cost registers (204 µs).
#pragma once
#include "value.cuh"
#include "work.cuh"

constexpr int ROW_VECTORS = D / 4;   // float4s of a row

// What joining does to both sides. An empty side has O = +0 and takes part with weight -0: what it adds changes nothing, not even
// a zero's sign.
struct Weight {
    float alpha, beta;
};

DEVICE Weight join_weight(float& m, float& l, float2 b, bool is_fold) {
    float top = fmaxf(m, b.x);
    bool empty = m == MINUS_INFINITY, b_empty = b.x == MINUS_INFINITY;
    Weight w = {empty ? (b_empty ? 0.0f : -0.0f) : pow2(top - m), b_empty ? -0.0f : pow2(top - b.x)};
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
    int b, kv_head, row_block, num_units;

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
    float scale, tensor;

    // Writes the log-sum-exp, too, if this is the row's first thread.
    DEVICE Finish of(const DecodeParams& p, const Item& item, int row, float m, float l, bool first) {
        long long at = item.row(p, row);
        if (at < 0) return {nullptr, 0.0f, 0.0f};
        bool some = m > MINUS_INFINITY;
        if (first && p.lse) p.lse[at] = some ? log_sum(m, l) : MINUS_INFINITY;
        // Nothing seen: O is +0, and so is the result.
        return {p.out + at * D, some ? rcp(l) : 1.0f, p.v_tensor_scales ? p.v_tensor_scales[item.kv_head] : 1.0f};
    }
    __device__ __forceinline__ void write(int vector, const float4& o) const {
        if (!out) return;
        ((float4*)out)[vector] = {o.x * scale * tensor, o.y * scale * tensor, o.z * scale * tensor, o.w * scale * tensor};
    }
};

// All units of an item from slot first_unit on (it covers those before), rows first_row… by threads 0, 1, … `index`, LANES to a row.
// Called, not inlined: it is long and rare.
template <int LANES> static __device__ __noinline__ void join_units(const DecodeParams& p, Item item, int first_unit, int first_row, int index) {
    constexpr int VECTORS = (ROW_VECTORS + LANES - 1) / LANES, CHUNK = VECTORS < 4 ? VECTORS : 4, AHEAD = 16 / CHUNK;
    int row = first_row + index / LANES;
    u64 slot = item.index(p) * p.max_units;
    const float4* states = (const float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
    const float2* ml = p.state_ml + slot * ROWS + row;
#pragma unroll 1
    for (int at = index % LANES; at < ROW_VECTORS; at += CHUNK * LANES) {
        float m = MINUS_INFINITY, l = 0.0f, span_m = MINUS_INFINITY, span_l = 0.0f;
        float4 o[CHUNK], span_o[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) o[k] = span_o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int u0 = first_unit; u0 < item.num_units; u0 += AHEAD) {
            float2 x_ml[AHEAD];
            float4 x[AHEAD][CHUNK];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int u = min(u0 + i, item.num_units - 1);
                x_ml[i] = __ldcg(ml + (u64)u * ROWS);
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
                    x[i][k] = __ldcg(states + (u64)u * (ROWS * ROW_VECTORS) + min(at + k * LANES, ROW_VECTORS - 1));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int u = u0 + i;
                if (u >= item.num_units) break;
                if (!p.tile_split) {
                    Weight w = join_weight(m, l, x_ml[i], false);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) join(o[k], x[i][k], w, false);
                    continue;
                }
                Weight w = join_weight(span_m, span_l, x_ml[i], false);
#pragma unroll
                for (int k = 0; k < CHUNK; k++) join(span_o[k], x[i][k], w, false);
                if (u % SPAN != SPAN - 1 && u != item.num_units - 1) continue;
                w = join_weight(m, l, make_float2(span_m, span_l), false);
#pragma unroll
                for (int k = 0; k < CHUNK; k++) {
                    join(o[k], span_o[k], w, false);
                    span_o[k] = {0.0f, 0.0f, 0.0f, 0.0f};
                }
                span_m = MINUS_INFINITY;
                span_l = 0.0f;
            }
        }
        Finish finish = Finish::of(p, item, row, m, l, at == 0);
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (at + k * LANES < ROW_VECTORS) finish.write(at + k * LANES, o[k]);
    }
}

// What the CTA's threads share about the join: registers are short.
struct Shared {
    u32 last;       // 0, or 1 + the first slot of `counted`, all of whose units are there
    Item counted;   // of the unit to be counted
    Item kept;      // whose first units are joined in registers
};

struct Join {
    static constexpr int LANES = THREADS / ROWS, VECTORS = (ROW_VECTORS + LANES - 1) / LANES;

    u8* shared;
    Shared* known;
    bool counting;
    u32 add, before;  // thread 0: to the count, and its answer
    // The joined state of this thread's part of a row over the item's first units.
    int covered;      // units, 0: none
    float m, l;
    float4 o[VECTORS];

    __device__ __forceinline__ void start(u8* memory) {
        shared = memory;
        known = (Shared*)(shared + AT_JOIN);
        if (threadIdx.x == 0) known->counted.num_units = 0;
        counting = false;
        covered = 0;
        add = before = 0;
    }
    // A count has the units in its low half, and in its high half the first slot, from whoever has the item's first units.
    __device__ __forceinline__ void count(const DecodeParams& p) {
        if (counting && threadIdx.x == 0) before = count_release(p.counters + known->counted.index(p), add);
        counting = false;
    }
    __device__ __forceinline__ void answer(const DecodeParams& p) {
        if (threadIdx.x != 0) return;
        u32 counted = before + add;
        bool is_last = known->counted.num_units > 1 && (counted & 0xffff) == (u32)known->counted.num_units;
        if (is_last) p.counters[known->counted.index(p)] = 0;
        known->last = is_last ? 1 + (counted >> 16) : 0;
        before = add = 0;
    }
    // After a barrier that follows the answer.
    __device__ __forceinline__ void settle(const DecodeParams& p) {
        if (known->last == 0) return;
        join_units<LANES>(p, known->counted, known->last - 1, 0, threadIdx.x);
        __syncthreads();
    }

    // The states of all teams at the end of a unit.
    __device__ __forceinline__ void unit(const DecodeParams& p, const Work& work, const State& state, int team, int warp_row, int lane) {
        float* states = (float*)(shared + AT_STATES);
        float2* ml = (float2*)(shared + AT_STATE_ML);
#pragma unroll
        for (int g = 0; g < G; g++) {
            int row = team * ROWS + warp_row + g * 8 + lane / 4;
            float2* to = (float2*)(states + row * STATE_STRIDE + 2 * (lane % 4));
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                if constexpr (V_ROWS) {
                    float4* at = (float4*)(states + row * STATE_STRIDE + 4 * (lane % 4)) + 2 * j;
                    const float(&even)[2] = state.o[g][j], (&odd)[2] = state.o[g][(j + 1) % (D / 8)];
                    if (j % 2 == 0) *at = {even[0], odd[0], even[1], odd[1]};
                } else {
                    to[4 * j] = make_float2(state.o[g][j][0], state.o[g][j][1]);
                }
            }
            if (lane % 4 == 0) ml[row] = make_float2(state.m[g], state.l[g]);
        }
        answer(p);
        __syncthreads();
        settle(p);
        bool keeps = join_teams(p, work);
        __syncthreads();
        // Now that nobody looks at the unit before this one any more.
        if (threadIdx.x == 0) (keeps ? known->kept : known->counted) = {work.b, work.kv_head, work.row_block, work.num_units};
    }
    // The unit's state from the teams' in shared memory, and on from there; whether it stays in registers.
    __device__ __forceinline__ bool join_teams(const DecodeParams& p, const Work& work) {
        int row = threadIdx.x / LANES, at = threadIdx.x % LANES;
        const float4* states = (const float4*)((const float*)(shared + AT_STATES) + row * STATE_STRIDE);
        const float2* ml = (const float2*)(shared + AT_STATE_ML) + row;
        Item here = {work.b, work.kv_head, work.row_block, work.num_units};
        float2 unit = ml[0];
        Weight w[TEAMS];
#pragma unroll
        for (int team = 1; team < TEAMS; team++) w[team] = join_weight(unit.x, unit.y, ml[team * ROWS], p.tile_split);
        // Units of split tiles have two levels to join, those of several row blocks take turns: both go by slots.
        bool keeps = work.unit == 0 ? here.num_units == 1 || (!p.tile_split && p.row_blocks == 1) : covered > 0;
        bool ends = keeps && work.unit == here.num_units - 1;
        Weight w_kept = {0.0f, 1.0f};
        if (keeps && work.unit > 0) {
            w_kept = join_weight(m, l, unit, false);
        } else if (keeps) {
            m = unit.x;
            l = unit.y;
        }
        Finish finish = {nullptr, 0.0f, 0.0f};
        if (ends) finish = Finish::of(p, here, row, m, l, at == 0);
        u64 slot = here.index(p) * p.max_units + work.unit;
        if (!keeps && at == 0) __stcg(p.state_ml + slot * ROWS + row, unit);
        float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            int vector = at + k * LANES;
            if (ROW_VECTORS % LANES && vector >= ROW_VECTORS) continue;
            float4 x = states[vector];
#pragma unroll
            for (int team = 1; team < TEAMS; team++) join(x, states[team * ROWS * (STATE_STRIDE / 4) + vector], w[team], p.tile_split);
            if (!keeps) {
                __stcg(to + vector, x);
            } else {
                if (work.unit == 0) o[k] = x;
                else join(o[k], x, w_kept, false);
                if (ends) finish.write(vector, o[k]);
            }
        }
        covered = keeps && !ends ? work.unit + 1 : 0;
        if (!keeps) {
            add = 1;
            counting = true;
        }
        return keeps;
    }
    __device__ __forceinline__ void finish(const DecodeParams& p) {
        count(p);
        answer(p);
        __syncthreads();
        if (covered > 0) {
            int row = threadIdx.x / LANES, at = threadIdx.x % LANES;
            u64 slot = known->kept.index(p) * p.max_units + covered - 1;
            if (at == 0) __stcg(p.state_ml + slot * ROWS + row, make_float2(m, l));
            float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                if (ROW_VECTORS % LANES == 0 || at + k * LANES < ROW_VECTORS) __stcg(to + at + k * LANES, o[k]);
        }
        settle(p);
        if (covered == 0) return;
        __syncthreads();
        if (threadIdx.x == 0) known->counted = known->kept;
        add = covered | (covered - 1) << 16;
        counting = true;
        count(p);
        answer(p);
        __syncthreads();
        settle(p);
    }
};
