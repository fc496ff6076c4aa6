// Section 2 of docs/arithmetic.md: the Hadamard rotation of a row that several threads have in registers.
#pragma once
#include "common/ptx.cuh"
#include "page/instance.cuh"

namespace attn {

// Multiplies a row's blocks by the Hadamard matrix and by 2^-HALVINGS, one bit of the dims after another. LANES neighbouring threads share the row. Of the bits of an element's
// dim the lowest LOW are the lane's, the next ones those of i in x[k][i], then come the lane's others, and k's.
template <int BLOCK, int HALVINGS, int LANES, int LOW, int N, int W> DEVICE void rotate(float (&x)[N][W], int lane) {
    constexpr int W_BITS = log2_of(W), LANE_BITS = log2_of(LANES);
#pragma unroll
    for (int bit = 0; 1 << bit < BLOCK; bit++) {
        const bool is_element = bit >= LOW && bit < LOW + W_BITS;
        const int of_vector = bit < LOW ? bit : bit - W_BITS;  // the bit of a vector's number, lane + LANES·k
        const float sign = lane >> of_vector & 1 ? -1.0f : 1.0f;
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int i = 0; i < W; i++) {
                if (!is_element && of_vector < LANE_BITS) {
                    x[k][i] = fmaf(x[k][i], sign, __shfl_xor_sync(~0u, x[k][i], 1 << of_vector));
                    continue;
                }
                const int k2 = is_element ? k : k | 1 << of_vector - LANE_BITS, i2 = is_element ? i | 1 << bit - LOW : i;
                if ((k2 == k && i2 == i) || k2 >= N) continue;
                const float a = x[k][i], b = x[k2 % N][i2 % W];
                x[k][i] = a + b;
                x[k2 % N][i2 % W] = a - b;
            }
    }
    constexpr float FACTOR = 1.0f / (1 << HALVINGS);
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int i = 0; i < W; i++) x[k][i] = x[k][i] * FACTOR;
}
// To the row that is stored.
template <class Side, int LANES, int LOW, int N, int W> DEVICE void rotate_stored(float (&x)[N][W], int lane) {
    rotate<Side::ROTATED_BLOCK, Side::STORED_HALVINGS, LANES, LOW>(x, lane);
}
// Rotates a query (as keys are), or turns an output row (as values are) back.
template <class Side, int LANES, int N, int W> DEVICE void rotate_back(float (&x)[N][W], int lane) {
    rotate<Side::ROTATED_BLOCK, Side::BACK_HALVINGS, LANES, 0>(x, lane);
}

}  // namespace attn
