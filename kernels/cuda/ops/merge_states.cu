// merge_states.cu: merges results over disjoint tokens by their log-sum-exps, in the order given: `AttnState::merge_state` of attn-core, bit for bit.
//
// Grid      (rows / 4); 4 warps, a row each.
// Reads     outs [state][row][head_dim] in f32, f16 or bf16; lses f32 [state][row], -inf where a state saw no token of the row.
// Writes    out [row][head_dim], rounded once; lse f32 [row], or nothing.
// Numerics  state_weight and the rounding of each step are attn-core's; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/merge_states.rs; parameters in kernels/src/cuda/params.rs.
#include "common/arithmetic.cuh"
#include "common/dtype.cuh"
#include "common/params.h"

namespace attn {

constexpr int WARPS = 4;  // of a CTA, a row each
constexpr int BATCH = 8;  // states whose loads are under way at once: one after the other, their latencies are most of a launch

// exp(x), x <= 0.
DEVICE float state_weight(float x) { return exp2f_full(fmaxf(x * bits_float(0x3FB8AA3B), -125.0f)); }

struct Weighted {
    float a, b, scale;

    METHOD float of(float x, float y) const { return (x * a + y * b) * scale; }
};

// Four neighbours as they lie in memory.
template <bool NARROW> struct Four;
template <> struct Four<false> {
    float4 x;
    METHOD void load(const void* numbers, u64 at) { x = *(const float4*)((const float*)numbers + at); }
    METHOD float4 widened(int) const { return x; }
};
template <> struct Four<true> {
    uint2 x;
    METHOD void load(const void* numbers, u64 at) { x = *(const uint2*)((const u16*)numbers + at); }
    METHOD float4 widened(int dtype) const {
        const float2 low = widen_pair(x.x, dtype), high = widen_pair(x.y, dtype);
        return {low.x, low.y, high.x, high.y};
    }
};

// Vectors of a lane in the longest row that attn_core defines, 576 dims.
constexpr int MOST_VECTORS = 5;
template <int N> struct Count {
    static constexpr int value = N;
};

// Merges a row by a warp, of whose lanes each has VECTORS of four dims.
template <bool NARROW, int VECTORS> DEVICE void merge_row(const MergeStatesParams& p, int lane, u64 row) {
    const int vectors = p.head_dim / 4;
    float sum = MINUS_INFINITY;
    float4 o[VECTORS] = {};
#pragma unroll 1
    for (int base = 0; base < p.states; base += BATCH) {
        float lses[BATCH];
        Four<NARROW> outs[BATCH][VECTORS];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const u64 state = min(base + i, p.states - 1);
            lses[i] = p.lses[state * p.lse_stride + row];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) outs[i][k].load(p.outs, state * p.out_stride + row * p.head_dim + 4 * min(lane + 32 * k, vectors - 1));
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float other = base + i < p.states ? lses[i] : MINUS_INFINITY;
            const bool none = other == MINUS_INFINITY, is_first = sum == MINUS_INFINITY;
            const float top = fmaxf(sum, other), a = state_weight(sum - top), b = state_weight(other - top);
            const Weighted w = {a, b, rcp(a + b)};
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                const float4 x = outs[i][k].widened(p.in_dtype);
                const float4 both = {w.of(o[k].x, x.x), w.of(o[k].y, x.y), w.of(o[k].z, x.z), w.of(o[k].w, x.w)};
                o[k] = none ? o[k] : is_first ? x : both;
            }
            sum = none ? sum : is_first ? other : top + log_sum(0.0f, a + b);
        }
    }
    u8* const to = row_at(p.out, row, p.head_dim, p.out_dtype);
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
        if (lane + 32 * k < vectors) store_four(to, p.out_dtype, 4 * (lane + 32 * k), o[k]);
    if (lane == 0 && p.lse) p.lse[row] = sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_merge_states(const __grid_constant__ MergeStatesParams p) {
    const int lane = threadIdx.x % 32;
    const u64 row = (u64)blockIdx.x * WARPS + warp_id();
    if (row >= (u64)p.rows) return;
    const bool narrow = p.in_dtype != Dtype::F32;
    const auto merge = [&](auto vectors) {
        if (narrow) merge_row<true, decltype(vectors)::value>(p, lane, row);
        else merge_row<false, decltype(vectors)::value>(p, lane, row);
    };
    if (p.head_dim <= 128) merge(Count<1>());
    else if (p.head_dim <= 256) merge(Count<2>());
    else merge(Count<MOST_VECTORS>());
}

}  // namespace attn
