// merge_states.cu: merges results over disjoint tokens by their log-sum-exps, in the order given: `AttnState::merge_state` of attn-core, bit for bit.
//
// Grid      (rows / 4); 4 warps, a row each.
// Reads     outs [state][row][head_dim] in f32, f16 or bf16; lses f32 [state][row], -inf where a state saw no token of the row.
// Writes    out [row][head_dim], rounded once; lse f32 [row], or nothing.
// Numerics  state_weight and the rounding of each step are attn-core's; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/merge_states.rs; parameters in kernels/src/cuda/params.rs.
#include "arithmetic.cuh"
#include "dtype.cuh"
#include "params.h"

constexpr int WARPS = 4, MOST_VECTORS = 2;  // vectors of a lane: head_dim is 256 at most

// exp(x), x <= 0.
DEVICE float state_weight(float x) { return exp2f_full(fmaxf(x * bits_float(0x3FB8AA3B), -125.0f)); }

struct Weighted {
    float a, b, scale;

    __device__ __forceinline__ float of(float x, float y) const { return (x * a + y * b) * scale; }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_merge_states(const __grid_constant__ MergeStatesParams p) {
    const int lane = threadIdx.x % 32, vectors = p.head_dim / 4;
    const u64 row = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= (u64)p.rows) return;
    float sum = MINUS_INFINITY;
    float4 o[MOST_VECTORS] = {};
    // Choices instead of branches, so that the loads of several states are under way at once.
#pragma unroll 8
    for (int i = 0; i < p.states; i++) {
        const float other = p.lses[(u64)i * p.lse_stride + row];
        const u64 first = (u64)i * p.out_stride + row * p.head_dim;
        const bool none = other == MINUS_INFINITY, is_first = sum == MINUS_INFINITY;
        const float top = fmaxf(sum, other), a = state_weight(sum - top), b = state_weight(other - top);
        const Weighted w = {a, b, rcp(a + b)};
#pragma unroll
        for (int k = 0; k < MOST_VECTORS; k++) {
            const int vector = lane + 32 * k;
            if (vector >= vectors) break;
            const float4 x = load_four(p.outs, first + 4 * vector, p.in_dtype);
            const float4 both = {w.of(o[k].x, x.x), w.of(o[k].y, x.y), w.of(o[k].z, x.z), w.of(o[k].w, x.w)};
            o[k] = none ? o[k] : is_first ? x : both;
        }
        sum = none ? sum : is_first ? other : top + log_sum(0.0f, a + b);
    }
    u8* const to = row_at(p.out, row, p.head_dim, p.out_dtype);
#pragma unroll
    for (int k = 0; k < MOST_VECTORS; k++)
        if (lane + 32 * k < vectors) store_four(to, p.out_dtype, 4 * (lane + 32 * k), o[k]);
    if (lane == 0 && p.lse) p.lse[row] = sum;
}
