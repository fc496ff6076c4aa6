// copy_pages.cu: copies whole pages from one pool to another, or to other places of the same.
//
// Grid      (pairs, slices of a page); 256 threads.
// Reads     pairs i64 [pair][2]: the page to read, and the page to write. A pair with a page that is in neither pool's range is skipped.
// Writes    the second page of each pair; the first pages are unchanged.
// Numerics  none: bytes are copied.
// Shared    none.
// Host      attn-cuda/src/native/copy_pages.rs; parameters in kernels/src/cuda/params.rs.
#include "common/ptx.cuh"

#include "common/params.h"

namespace attn {

constexpr int THREADS = 256, EACH = 4;  // vectors of 16 bytes that a thread has under way

extern "C" __global__ void __launch_bounds__(THREADS) attn_copy_pages(const __grid_constant__ CopyPagesParams p) {
    const long long from_page = p.pairs[2 * (u64)blockIdx.x], to_page = p.pairs[2 * (u64)blockIdx.x + 1];
    if (from_page < 0 || from_page >= p.from_pages || to_page < 0 || to_page >= p.to_pages) return;
    const uint4* const from = (const uint4*)(p.from + from_page * p.from_stride);
    uint4* const to = (uint4*)(p.to + to_page * p.to_stride);
    const u64 first = (u64)blockIdx.y * (THREADS * EACH) + threadIdx.x, end = p.page_bytes / 16;
    uint4 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (first + i * THREADS < end) x[i] = from[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (first + i * THREADS < end) to[first + i * THREADS] = x[i];
}

}  // namespace attn
