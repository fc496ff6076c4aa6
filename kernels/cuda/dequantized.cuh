// What dequantize.cu and dequantize_rows.cu write beside numbers: what these count, and a table of their pages.
#pragma once
#include "dtype.cuh"
#include "params.h"

// What a number of f16 counts: with it the largest code times the largest scale is in f16's range.
constexpr int unit_of(int scheme) { return scheme <= FP8 || scheme == INT8_TENSOR ? 1 : 128; }
DEVICE float tensor_scale(const float* scales, int head) { return scales ? scales[head] : 1.0f; }

// What K's and V's numbers of each KV head count, by one CTA of each.
template <int K_SCHEME, int V_SCHEME> DEVICE void write_units(const DequantizeParams& p) {
    if (blockIdx.y != 0 || blockIdx.z != 0 || threadIdx.x != 0) return;
    p.scales[blockIdx.x] = unit_of(K_SCHEME) * tensor_scale(p.step.k_tensor_scales, blockIdx.x);
    p.scales[gridDim.x + blockIdx.x] = unit_of(V_SCHEME) * tensor_scale(p.step.v_tensor_scales, blockIdx.x);
}
// The page of the CTA's tile, which the table gets.
DEVICE u32 write_entry(const DequantizeParams& p) {
    const u32 page = blockIdx.z * p.pages_each + blockIdx.y;
    if (blockIdx.x == 0 && threadIdx.x == 0) p.table[page] = page;
    return page;
}
