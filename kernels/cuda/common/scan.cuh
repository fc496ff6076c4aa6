// Running sums over the threads of a warp, and of a CTA.
#pragma once
#include "common/ptx.cuh"

namespace attn {

// The sum of this lane's number and of those of the lanes before it.
DEVICE u32 running_sum(u32 x, int lane) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, x, i);
        if (lane >= i) x += other;
    }
    return x;
}

// The sums of the numbers of the threads before this one, and of all threads of the CTA.
struct RunningSum {
    u32 before, total;
};
// `sums` has room for a number of each warp. All threads of the CTA, which then have passed a barrier.
template <int WARPS> DEVICE RunningSum cta_running_sum(u32 x, u32* sums) {
    int lane = threadIdx.x % 32, warp = warp_id();
    u32 up_to = running_sum(x, lane);
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    RunningSum sum = {up_to - x, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        u32 of_warp = sums[w];
        if (w < warp) sum.before += of_warp;
        sum.total += of_warp;
    }
    return sum;
}

}  // namespace attn
