// Shared by dequantize.cu, dequantize_rows.cu and gather_pages.cu: the scale of the numbers, the table of the pages that are written, and the test
// whether some query token reads a page with residuals.
#pragma once
#include "common/dtype.cuh"
#include "common/params.h"
#include "common/tile.cuh"
#include "page/instance.cuh"

namespace attn {

constexpr int K_BYTES = TILE * K_DIM * 2, V_BYTES = TILE * V_DIM * 2;  // of K and V in 16 bits, in a written page of one KV head

// The scale of the f16 numbers: with it the largest code times the largest scale is in f16's range.
constexpr int unit_of(int scheme) { return scheme <= FP8 || scheme == INT8_TENSOR ? 1 : 128; }
DEVICE float tensor_scale(const float* scales, int head) { return scales ? scales[head] : 1.0f; }

// Writes the scales of K's and V's numbers for each KV head, by one CTA of each.
DEVICE void write_units(const DequantizeParams& p) {
    if (blockIdx.y != 0 || blockIdx.z != 0 || threadIdx.x != 0) return;
    p.scales[blockIdx.x] = unit_of(Keys::SCHEME) * tensor_scale(p.step.k_tensor_scales, blockIdx.x);
    p.scales[gridDim.x + blockIdx.x] = unit_of(Values::SCHEME) * tensor_scale(p.step.v_tensor_scales, blockIdx.x);
}
// The page of the CTA's tile, which the table gets.
DEVICE u32 write_entry(const DequantizeParams& p) {
    const u32 page = blockIdx.z * p.pages_each + blockIdx.y;
    if (blockIdx.x == 0 && threadIdx.x == 0) p.table[page] = page;
    return page;
}

// The query tokens of a sequence.
DEVICE int query_tokens(const DequantizeParams& p, int b) {
    if (!p.step.query_blocks) return p.step.q_len;
    int first = 0, end = p.num_blocks;  // of the blocks, which come sequence by sequence, and then those without tokens
    while (first < end) {
        const int middle = (first + end) / 2;
        const QueryBlock block = p.step.query_blocks[middle];
        if (block.tokens > 0 && block.sequence < b) first = middle + 1;
        else end = middle;
    }
    if (first == p.num_blocks) return 0;
    const QueryBlock block = p.step.query_blocks[first];
    return block.sequence == b && block.tokens > 0 ? block.tokens + block.behind : 0;
}
// Whether some of a sequence's query tokens read a tile with residuals: all do the first.
DEVICE bool is_fine_tile(const DequantizeParams& p, int b, int tile, int kv_len) {
    const int tokens = WINDOW == 0 ? 0 : query_tokens(p, b);
    return tokens > 0 && (tile == 0 || tile > max(kv_len - (p.step.causal ? tokens : 1), 0) / TILE - WINDOW);
}

}  // namespace attn
