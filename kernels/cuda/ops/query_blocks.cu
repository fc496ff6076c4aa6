// query_blocks.cu: lists the query blocks of a step from cu_seqlens_q on the device, as Problem::query_blocks of attn-core does on the host.
// All layers of a step share the list.
//
// Grid      (entries of the list / 256, up to 32); 256 threads. Every CTA counts the blocks of all sequences, and writes its part of the entries.
// Reads     cu_seqlens_q i32 [batch + 1].
// Writes    blocks [num_blocks], sequence after sequence, then entries without tokens; nothing outside of it, whatever cu_seqlens_q holds.
// Numerics  none.
// Shared    the ends of 256 sequences' blocks.
// Host      attn-cuda/src/native/list_blocks.rs; parameters in kernels/src/cuda/params.rs.
#include "common/params.h"
#include "common/ptx.cuh"
#include "common/scan.cuh"

namespace attn {

constexpr int THREADS = 256, WARPS = THREADS / 32;

// A sequence's query tokens, counted through all sequences'.
struct Queries {
    int begin, end;

    DEVICE Queries of(const QueryBlocksParams& p, int b) {
        int begin = min(max(p.cu_seqlens_q[b], 0), p.query_tokens);
        return {begin, min(max(p.cu_seqlens_q[b + 1], begin), p.query_tokens)};
    }
    METHOD QueryBlock block(int sequence, int index, int block_tokens) const {
        int first = begin + index * block_tokens, tokens = max(min(block_tokens, end - first), 0);
        return {sequence, first, tokens, max(end - first - tokens, 0)};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attn_query_blocks(const __grid_constant__ QueryBlocksParams p) {
    __shared__ u32 ends[THREADS], of_warp[WARPS];
    const u32 mine = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    u32 done = 0;  // entries of the sequences so far
#pragma unroll 1
    for (int first = 0; first < p.batch; first += THREADS) {
        const int b = first + threadIdx.x;
        u32 blocks = 0;
        if (b < p.batch) {
            const Queries queries = Queries::of(p, b);
            blocks = (u32)(queries.end - queries.begin + p.block_tokens - 1) / p.block_tokens;
        }
        const RunningSum sum = cta_running_sum<WARPS>(blocks, of_warp);
        ends[threadIdx.x] = sum.before + blocks;
        __syncthreads();
        const u32 count = min(sum.total, (u32)p.num_blocks - done);
#pragma unroll 1
        for (u32 i = mine; i < count; i += step) {
            int before = 0;  // sequences whose blocks end before this one
#pragma unroll
            for (int half = THREADS / 2; half; half /= 2)
                if (ends[before + half - 1] <= i) before += half;
            const int sequence = min(first + before, p.batch - 1);
            p.blocks[done + i] = Queries::of(p, sequence).block(sequence, (int)(i - (before ? ends[before - 1] : 0)), p.block_tokens);
        }
        done += count;
        __syncthreads();  // before the ends are others'
    }
#pragma unroll 1
    for (u32 i = done + mine; i < (u32)p.num_blocks; i += step) p.blocks[i] = {};
}

}  // namespace attn
