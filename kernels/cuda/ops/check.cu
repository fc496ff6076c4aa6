// check.cu: checks the device inputs of a decode or append launch, and reports the first one that would be fatal (ATTN_CUDA=check=1).
//
// Grid      (batch), of slots (1); 128 threads.
// Reads     kv_lens, tokens_before, tokens_after, page table, residual pages, sinks, queries, positions of appended tokens; or slots, their residual pages and their
//           tokens' positions, centres and numbers in their sequences; or cu_seqlens_q.
// Writes    report: {kind, index, value, limit}; kind 0 if all inputs are allowed.
// Shared    the end of the query tokens.
// Host      attn-cuda/src/native/mod.rs::check; parameters in kernels/src/cuda/params.rs.

#include "common/dtype.cuh"
#include "common/params.h"
#include "common/tile.cuh"

namespace attn {

enum { OK, KV_LEN, PAGE, RESIDUAL_PAGE, QUERY, SINK, SLOT, POSITION, QUERY_START, TOKENS_AFTER, TOKENS_BEFORE, CENTRE_ROW, CENTRE_POSITION };
constexpr int SPAN_TOKENS = TILE << SPAN_SHIFT;  // shards but the last are of whole spans
constexpr int MOST_TOKENS = 1 << 20;  // of a sequence in all shards

__device__ void report(int* to, int kind, int index, int value, int limit) {
    if (atomicCAS(to, OK, kind) == OK) to[1] = index, to[2] = value, to[3] = limit;
}

__device__ int clipped(long long x) { return x < -0x7fffffff ? -0x7fffffff : x < 0x7fffffff ? (int)x : 0x7fffffff; }

__device__ void check_position(const CheckParams& c, int token, long long at) {
    if (at < 0 || at >= c.num_positions) report(c.report, POSITION, token, clipped(at), clipped(c.num_positions));
}

__device__ void check_centre(const CheckParams& c, int token, long long slot) {
    const unsigned int row = c.centre_rows[token];
    if (row >= c.num_centre_rows) report(c.report, CENTRE_ROW, token, (int)row, (int)c.num_centre_rows);
    // A sequence's pages are full but for the last, so that a token's number in its sequence and its place in the page agree.
    const int at = c.centre_positions[token];
    if (at < 0 || at >= MOST_TOKENS || at % c.page_size != (int)(slot % c.page_size)) report(c.report, CENTRE_POSITION, token, at, (int)(slot % c.page_size));
}

__device__ void check_slots(const DecodeParams& p, const CheckParams& c) {
    for (int i = threadIdx.x; i < c.query_tokens; i += blockDim.x) {
        const long long slot = c.slots[i];
        if (slot >= (long long)c.num_pages * c.page_size) report(c.report, SLOT, i, clipped(slot), (int)c.num_pages);
        // A token without a slot may have no position, either.
        if (slot >= 0 && c.positions != nullptr) check_position(c, i, c.positions[i]);
        if (slot >= 0 && c.centre_rows != nullptr) check_centre(c, i, slot);
        if (slot < 0 || p.residual_pages == nullptr) continue;
        const unsigned int page = p.residual_pages[i];
        if (page >= c.num_pages && page != ~0u) report(c.report, RESIDUAL_PAGE, i, (int)page, (int)c.num_pages);
    }
}

// Query tokens of a step: those of a list of blocks where the device has made one. All threads of the CTA.
__device__ int query_tokens(const DecodeParams& p, const CheckParams& c) {
    if (c.num_blocks == 0) return c.query_tokens;
    __shared__ int end;
    if (threadIdx.x == 0) end = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < c.num_blocks; i += blockDim.x)
        if (p.query_blocks[i].tokens > 0) atomicMax(&end, p.query_blocks[i].first + p.query_blocks[i].tokens);
    __syncthreads();
    return min(end, c.query_tokens);
}

extern "C" __global__ void attn_check(const __grid_constant__ DecodeParams p, const __grid_constant__ CheckParams c) {
    if (c.slots != nullptr) {
        check_slots(p, c);
        return;
    }
    if (c.cu_seqlens_q != nullptr) {
        const int at = blockIdx.x, begin = c.cu_seqlens_q[at], end = c.cu_seqlens_q[at + 1];
        const bool begins = begin >= 0 && begin <= c.query_tokens;
        if (threadIdx.x == 0 && !(begins && end >= begin && end <= c.query_tokens))
            report(c.report, QUERY_START, begins ? at + 1 : at, begins ? end : begin, c.query_tokens);
        return;
    }
    const int b = blockIdx.x, len = p.kv_lens[b];
    if (len < c.min_kv_len || len > c.max_kv_len) {
        if (threadIdx.x == 0) report(c.report, KV_LEN, b, len, c.max_kv_len);
        return;
    }
    const int appended = c.min_kv_len;
    for (int i = threadIdx.x; c.num_positions > 0 && i < appended; i += blockDim.x) {
        const int token = b * appended + i;
        check_position(c, token, c.positions != nullptr ? c.positions[token] : len - appended + i);
    }
    const int after = p.tokens_after != nullptr ? p.tokens_after[b] : 0, before = p.tokens_before != nullptr ? p.tokens_before[b] : 0;
    if (threadIdx.x == 0) {
        if (after < 0 || (after > 0 && len % SPAN_TOKENS != 0)) report(c.report, TOKENS_AFTER, b, after, len);
        const int most = MOST_TOKENS - min(len + max(after, 0), MOST_TOKENS);
        if (before < 0 || before > most || before % SPAN_TOKENS != 0) report(c.report, TOKENS_BEFORE, b, before, most / SPAN_TOKENS * SPAN_TOKENS);
    }
    if (c.page_size > 0) {
        const int pages = (len + c.page_size - 1) / c.page_size;
        if (pages > p.page_table_stride) {
            if (threadIdx.x == 0) report(c.report, KV_LEN, b, len, p.page_table_stride * c.page_size);
            return;
        }
        const int ring = (int)p.residual_ring, first_pages = c.page_size < TILE ? TILE / c.page_size : 1;
        for (int i = threadIdx.x; i < pages; i += blockDim.x) {
            const unsigned int page = p.page_table[(long long)b * p.page_table_stride + i];
            if (page >= c.num_pages) report(c.report, PAGE, b * p.page_table_stride + i, (int)page, (int)c.num_pages);
            // The last pages have residual pages, and those of the sequence's first tile.
            const bool has_residuals = i + ring >= pages || (i < first_pages && before == 0);
            if (ring == 0 || !has_residuals) continue;
            const int slot = b * (first_pages + ring) + (i < first_pages ? i : first_pages + (i & (ring - 1)));
            if (p.residual_pages[slot] >= c.num_pages) report(c.report, RESIDUAL_PAGE, slot, (int)p.residual_pages[slot], (int)c.num_pages);
        }
    }
    if (p.q == nullptr) return;  // append
    for (int i = threadIdx.x; b == 0 && p.sinks != nullptr && i < p.num_q_heads; i += blockDim.x)
        if (!(fabsf(p.sinks[i]) <= 1e6f)) report(c.report, SINK, i, __float_as_int(p.sinks[i]), 0);
    const long long token = (long long)p.num_q_heads * c.head_dim, all = token * query_tokens(p, c);
    for (long long i = (long long)b * blockDim.x + threadIdx.x; i < all; i += (long long)gridDim.x * blockDim.x) {
        const int head = (int)(i / c.head_dim % p.num_q_heads) / p.heads_per_kv;
        const float scale = p.k_tensor_scales ? p.k_tensor_scales[head] : 1.f;
        const float q = element(p.q, i, p.dtype), x = q * (p.log2_scale * scale);
        if (!(fabsf(x) <= 18446744073709551616.f)) report(c.report, QUERY, (int)i, __float_as_int(q), 0);
    }
}

}  // namespace attn
