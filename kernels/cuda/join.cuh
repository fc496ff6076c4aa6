// Sections 5 and 6 outside the teams: their states join in order to the unit's, units' to the sequence's, spread over the CTA's
// threads.
//
// A unit is counted in global memory one tile into the next one, when its writes have long arrived, and the count's answer is
// looked at when that one ends: who counted an item's last unit joins them all. Two ways to spare the CTA its barriers were tried
// and lost: the last warp to arrive joining alone made the slowest team slower (int4 191 µs for 169 µs), joining a tile later cost
// registers (204 µs).
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

// All units of an item's rows first_row… by threads 0, 1, … `index`, LANES to a row.
// Called, not inlined: it is long and rare.
template <int LANES> static __device__ __noinline__ void join_units(const DecodeParams& p, Item item, int first_row, int index) {
    constexpr int VECTORS = (ROW_VECTORS + LANES - 1) / LANES, CHUNK = VECTORS < 4 ? VECTORS : 4, AHEAD = 8 / CHUNK;
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
        for (int u0 = 0; u0 < item.num_units; u0 += AHEAD) {
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

// The unit's state from the teams' in shared memory: the result itself if there is one unit, else the hand-over.
template <int LANES> DEVICE void join_teams(const DecodeParams& p, const Item& item, int unit, const u8* shared, int first_row, int index) {
    int row = first_row + index / LANES, at = index % LANES;
    const float4* states = (const float4*)((const float*)(shared + AT_STATES) + row * STATE_STRIDE);
    const float2* ml = (const float2*)(shared + AT_STATE_ML) + row;
    float m = ml[0].x, l = ml[0].y;
    Weight w[TEAMS];
#pragma unroll
    for (int team = 1; team < TEAMS; team++) w[team] = join_weight(m, l, ml[team * ROWS], p.tile_split);
    bool done = item.num_units == 1;
    Finish finish = {nullptr, 0.0f, 0.0f};
    u64 slot = item.index(p) * p.max_units + unit;
    if (done) finish = Finish::of(p, item, row, m, l, at == 0);
    else if (at == 0) __stcg(p.state_ml + slot * ROWS + row, make_float2(m, l));
    float4* to = (float4*)p.states + (slot * ROWS + row) * ROW_VECTORS;
#pragma unroll 4
    for (int k = at; k < ROW_VECTORS; k += LANES) {
        float4 o = states[k];
#pragma unroll
        for (int team = 1; team < TEAMS; team++) join(o, states[team * ROWS * (STATE_STRIDE / 4) + k], w[team], p.tile_split);
        if (done) finish.write(k, o);
        else __stcg(to + k, o);
    }
}

struct Join {
    u8* shared;
    u32* last;       // in shared memory: the previous unit was its item's last
    Item previous;
    bool counting;   // the previous unit is to be counted
    u32 before;      // thread 0: the count's answer

    __device__ __forceinline__ void start(u8* memory) {
        shared = memory;
        last = (u32*)(shared + AT_BARRIERS + TEAMS * STAGES * 16);
        previous.num_units = 0;
        counting = false;
    }
    __device__ __forceinline__ void count(const DecodeParams& p) {
        if (counting && threadIdx.x == 0) before = count_release(p.counters + previous.index(p));
        counting = false;
    }
    __device__ __forceinline__ void answer(const DecodeParams& p) {
        if (threadIdx.x != 0) return;
        bool is_last = previous.num_units > 1 && before == (u32)previous.num_units - 1;
        if (is_last) p.counters[previous.index(p)] = 0;
        *last = is_last;
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
            for (int j = 0; j < D / 8; j++) to[4 * j] = make_float2(state.o[g][j][0], state.o[g][j][1]);
            if (lane % 4 == 0) ml[row] = make_float2(state.m[g], state.l[g]);
        }
        answer(p);
        __syncthreads();
        Item item = {work.b, work.kv_head, work.row_block, work.num_units};
        join_teams<THREADS / ROWS>(p, item, work.unit, shared, 0, threadIdx.x);
        if (*last) join_units<THREADS / ROWS>(p, previous, 0, threadIdx.x);
        __syncthreads();
        previous = item;
        counting = item.num_units > 1;
    }
    __device__ __forceinline__ void finish(const DecodeParams& p) {
        count(p);
        answer(p);
        __syncthreads();
        if (*last) join_units<THREADS / ROWS>(p, previous, 0, threadIdx.x);
    }
};
