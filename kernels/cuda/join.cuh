// Section 5 and 6 outside the warps: teams' states join in order to the unit's, units' to the sequence's, in whole float4s of
// rows, spread over the CTA's threads.
#pragma once
#include "work.cuh"

struct Joined {
    float m, l;
    float4 o;
};

DEVICE Joined nothing() { return {MINUS_INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}}; }

// `merge` of docs/arithmetic.md.
DEVICE void merge(Joined& a, const Joined& b) {
    if (b.m == MINUS_INFINITY) return;
    if (a.m == MINUS_INFINITY) {
        a = b;
        return;
    }
    float m = fmaxf(a.m, b.m), alpha = pow2(m - a.m), beta = pow2(m - b.m);
    a.l = a.l * alpha + b.l * beta;
    a.o.x = a.o.x * alpha + b.o.x * beta;
    a.o.y = a.o.y * alpha + b.o.y * beta;
    a.o.z = a.o.z * alpha + b.o.z * beta;
    a.o.w = a.o.w * alpha + b.o.w * beta;
    a.m = m;
}

// `fold` of a tile whose value was kept as a state of its own.
DEVICE void fold(Joined& a, const Joined& b) {
    if (b.m == MINUS_INFINITY) return;
    float m = fmaxf(a.m, b.m), alpha = pow2(m - a.m), beta = pow2(m - b.m);
    a.l = fmaf(b.l, beta, a.l * alpha);
    a.o.x = fmaf(b.o.x, beta, a.o.x * alpha);
    a.o.y = fmaf(b.o.y, beta, a.o.y * alpha);
    a.o.z = fmaf(b.o.z, beta, a.o.z * alpha);
    a.o.w = fmaf(b.o.w, beta, a.o.w * alpha);
    a.m = m;
}

constexpr int VECTORS = ROWS * D / 4;                          // of a state
constexpr int PER_THREAD = (VECTORS + THREADS - 1) / THREADS;

struct Output {
    const DecodeParams& p;
    int b, kv_head, row_block;

    // Writes dims d.. of a row.
    __device__ __forceinline__ void finish(int vector, const Joined& a) const {
        int row = vector / (D / 4), d = vector % (D / 4) * 4, r = row_block * ROWS + row;
        if (r >= p.heads_per_kv * p.q_len) return;
        int i = r / p.heads_per_kv, head = kv_head * p.heads_per_kv + r % p.heads_per_kv;
        u64 at = ((u64)b * p.q_len + i) * p.num_q_heads + head;
        float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
        float lse = MINUS_INFINITY;
        if (a.m > MINUS_INFINITY) {
            float scale = rcp(a.l), tensor = p.v_tensor_scales ? p.v_tensor_scales[kv_head] : 1.0f;
            out = {a.o.x * scale * tensor, a.o.y * scale * tensor, a.o.z * scale * tensor, a.o.w * scale * tensor};
            lse = log_sum(a.m, a.l);
        }
        *(float4*)(p.out + at * D + d) = out;
        if (d == 0 && p.lse) p.lse[at] = lse;
    }
    __device__ __forceinline__ u64 slot(int unit) const {
        return (((u64)b * p.num_kv_heads + kv_head) * p.row_blocks + row_block) * p.max_units + unit;
    }
};

// All units of one (sequence, KV head, row block), by the CTA that finished last.
DEVICE void join_units(const Output& to, int num_units) {
    const DecodeParams& p = to.p;
#pragma unroll 1
    for (int vector = threadIdx.x; vector < VECTORS; vector += THREADS) {
        int row = vector / (D / 4);
        Joined all = nothing(), span = nothing();
        for (int u0 = 0; u0 < num_units; u0 += SPAN) {
            Joined x[SPAN];
#pragma unroll
            for (int i = 0; i < SPAN; i++) {
                u64 slot = to.slot(min(u0 + i, num_units - 1));
                float2 ml = __ldcg(p.state_ml + slot * ROWS + row);
                x[i].o = __ldcg((const float4*)(p.states + slot * ROWS * D) + vector);
                x[i].m = u0 + i < num_units ? ml.x : MINUS_INFINITY;
                x[i].l = ml.y;
            }
            if (p.tile_split) {
                span = nothing();
#pragma unroll
                for (int i = 0; i < SPAN; i++) merge(span, x[i]);
                merge(all, span);
            } else {
#pragma unroll
                for (int i = 0; i < SPAN; i++) merge(all, x[i]);
            }
        }
        to.finish(vector, all);
    }
}

// The unit's state from the teams' in shared memory, and what follows: the result, or a hand-over and perhaps the last join.
DEVICE void join_unit(const DecodeParams& p, const Work& work, const u8* shared, u32* last) {
    Output to = {p, work.b, work.kv_head, work.row_block};
    const float* states = (const float*)(shared + AT_STATES);
    const float2* ml = (const float2*)(shared + AT_STATE_ML);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        int vector = threadIdx.x + k * THREADS;
        if (VECTORS % THREADS && vector >= VECTORS) break;
        int row = vector / (D / 4), d = vector % (D / 4) * 4;
        Joined unit = nothing();
#pragma unroll
        for (int team = 0; team < TEAMS; team++) {
            float2 x = ml[team * ROWS + row];
            Joined part = {x.x, x.y, *(const float4*)(states + (team * ROWS + row) * STATE_STRIDE + d)};
            if (p.tile_split) fold(unit, part);
            else merge(unit, part);
        }
        if (work.num_units == 1) {
            to.finish(vector, unit);
        } else {
            u64 slot = to.slot(work.unit);
            __stcg((float4*)(p.states + slot * ROWS * D) + vector, unit.o);
            if (d == 0) __stcg(p.state_ml + slot * ROWS + row, make_float2(unit.m, unit.l));
        }
    }
    if (work.num_units > 1) __threadfence();
    __syncthreads();
    if (work.num_units == 1) return;
    if (threadIdx.x == 0) {
        u32* counter = p.counters + ((u64)work.b * p.num_kv_heads + work.kv_head) * p.row_blocks + work.row_block;
        bool is_last = atomicAdd(counter, 1u) == (u32)work.num_units - 1;
        if (is_last) *counter = 0;
        *last = is_last;
        __threadfence();
    }
    __syncthreads();
    if (*last) join_units(to, work.num_units);
}
