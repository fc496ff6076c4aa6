// Section 2 of docs/arithmetic.md: the Hadamard rotation of a row that several threads have in registers.
#pragma once
#include "common/ptx.cuh"
#include "page/instance.cuh"

namespace attn {

// Rotates a query (as keys are), or turns an output row (as values are) back. LANES neighbouring threads share the row: element i of x[k] is that of dim
// W·(lane + LANES·k) + i, lane < LANES.
template <class Side, int LANES, int N, int W> DEVICE void rotate_back(float (&x)[N][W], int lane) {
#pragma unroll
    for (int stride = 1; stride < Side::ROTATED_BLOCK; stride *= 2) {
        float sign = lane & stride / W ? -1.0f : 1.0f;
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int i = 0; i < W; i++) {
                if (stride >= W && stride < W * LANES) {
                    x[k][i] = fmaf(x[k][i], sign, __shfl_xor_sync(~0u, x[k][i], stride / W));
                    continue;
                }
                int k2 = stride < W ? k : k + stride / (W * LANES), i2 = stride < W ? i + stride : i;
                if ((stride < W ? i & stride : k & stride / (W * LANES)) != 0 || k2 >= N) continue;
                float a = x[k][i], b = x[k2 % N][i2 % W];
                x[k][i] = a + b;
                x[k2 % N][i2 % W] = a - b;
            }
    }
    constexpr float FACTOR = 1.0f / (1 << Side::BACK_HALVINGS);
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int i = 0; i < W; i++) x[k][i] = x[k][i] * FACTOR;
}

}  // namespace attn
