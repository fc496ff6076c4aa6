// read.cu: reads bytes and discards them: the ceiling that decode times are compared with.
//
// Grid      persistent, 2 CTAs per SM; 128 threads. CTA i reads chunks i, i + grid, …
// Reads     `bytes` bytes from `from`.
// Writes    sink, only if the bytes cancel out, so that the compiler keeps the loads.
// Shared    stages of 16 KiB: 6 filled by bulk copies; 4 filled by cp.async before sm_90, so that two CTAs fit an A100's SM.
// Host      attn-cuda/src/native/mod.rs::read_on; parameters in kernels/src/cuda/params.rs.
#include "common/params.h"
#include "common/ptx.cuh"

namespace attn {

#if ATTN_BULK
constexpr int STAGES = 6, FILLERS = 1;
#else
constexpr int STAGES = 4, FILLERS = 128;
#endif
constexpr int CHUNK = 16384;

extern "C" __device__ const int attn_shared_bytes = STAGES * CHUNK + 128;

extern "C" __global__ void __launch_bounds__(128) attn_read(const __grid_constant__ ReadParams p) {
    u32 sum = 0;
    SHARED_MEMORY(shared, 128);
    u32 base = shared_address(shared), barriers = base + STAGES * CHUNK;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i, FILLERS);
        barrier_init_fence();
    }
    __syncthreads();
    u64 step = (u64)gridDim.x * CHUNK;
    auto issue = [&](u64 at, int stage) {
        if (at >= p.bytes) return;
        u32 bytes = (u32)(p.bytes - at < CHUNK ? p.bytes - at : CHUNK);
        u32 to = base + stage * CHUNK, barrier = barriers + 8 * stage;
#if ATTN_BULK
        if (threadIdx.x != 0) return;
        barrier_expect(barrier, bytes);
        copy_bulk(to, p.from + at, bytes, barrier);
#else
        for (u32 i = threadIdx.x * 16; i < bytes; i += 128 * 16) copy16_async(to + i, p.from + at + i);
        copy_async_arrive(barrier);
#endif
    };
    u64 at = (u64)blockIdx.x * CHUNK;
    for (int i = 0; i < STAGES; i++) issue(at + i * step, i);
    for (u32 i = 0; at < p.bytes; at += step, i++) {
        int stage = i % STAGES;
        barrier_wait(barriers + 8 * stage, i / STAGES & 1);
        sum ^= lds32(base + stage * CHUNK + threadIdx.x * 4);
        __syncthreads();
        issue(at + STAGES * step, stage);
    }
    if (sum == 0x9E3779B9u) *p.sink = sum;
}

}  // namespace attn
