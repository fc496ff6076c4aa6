// read.cu: reads bytes and discards them: the ceiling that decode times are compared with.
//
// Grid      persistent, 2 CTAs per SM; 128 threads. CTA i reads chunks i, i + grid, …
// Reads     `bytes` bytes from `from`.
// Writes    sink, only if the bytes cancel out, so that the compiler keeps the loads.
// Shared    6 stages of 16 KiB (bulk copies); plain 16-byte loads before sm_90.
// Host      attn-cuda/src/native/mod.rs::read_on; parameters in kernels/src/cuda/params.rs.
#include "params.h"
#include "ptx.cuh"

constexpr int STAGES = 6, CHUNK = 16384;

extern "C" __device__ const int attn_shared_bytes = STAGES * CHUNK + 128;

extern "C" __global__ void __launch_bounds__(128) attn_read(const __grid_constant__ ReadParams p) {
    u32 sum = 0;
#if ATTN_BULK
    SHARED_MEMORY(shared, 128);
    u32 base = shared_address(shared), barriers = base + STAGES * CHUNK;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    u64 step = (u64)gridDim.x * CHUNK;
    auto issue = [&](u64 at, int stage) {
        if (threadIdx.x != 0 || at >= p.bytes) return;
        u32 bytes = (u32)(p.bytes - at < CHUNK ? p.bytes - at : CHUNK);
        barrier_expect(barriers + 8 * stage, bytes);
        copy_bulk(base + stage * CHUNK, p.from + at, bytes, barriers + 8 * stage);
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
#else
    const uint4* from = (const uint4*)p.from;
    u64 count = p.bytes / 16, step = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __ldcs(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++) sum ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    for (; i < count; i += step) sum ^= __ldcs(from + i).x;
#endif
    if (sum == 0x9E3779B9u) *p.sink = sum;
}
