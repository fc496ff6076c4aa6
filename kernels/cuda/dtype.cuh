// Rows of queries, outputs and new tokens in f32, f16 or bf16 (`DecodeParams::dtype`). 16-bit inputs are widened exactly; results are
// rounded once, to nearest even.
#pragma once
#include "ptx.cuh"

namespace Dtype {
enum { F32, F16, BF16 };
}

DEVICE int element_bytes(int dtype) { return dtype == Dtype::F32 ? 4 : 2; }
DEVICE u8* row_at(const void* rows, u64 row, int elements, int dtype) { return (u8*)rows + row * elements * element_bytes(dtype); }

DEVICE float widen(u32 bits, int dtype) { return dtype == Dtype::F16 ? half_float(bits & 0xffff) : bits_float(bits << 16); }
// Two neighbours, in one word.
DEVICE float2 widen_pair(u32 x, int dtype) { return make_float2(widen(x, dtype), widen(x >> 16, dtype)); }
DEVICE u32 narrow_pair(float x, float y, int dtype) { return dtype == Dtype::F16 ? f16_pair(x, y) : bf16_pair(x, y); }
DEVICE float element(const void* numbers, u64 at, int dtype) {
    return dtype == Dtype::F32 ? ((const float*)numbers)[at] : widen(((const u16*)numbers)[at], dtype);
}
// Elements `at` … at + 3 (at a multiple of four).
DEVICE float4 load_four(const void* numbers, u64 at, int dtype) {
    if (dtype == Dtype::F32) return *(const float4*)((const float*)numbers + at);
    const uint2 x = *(const uint2*)((const u16*)numbers + at);
    const float2 low = widen_pair(x.x, dtype), high = widen_pair(x.y, dtype);
    return {low.x, low.y, high.x, high.y};
}

// Elements `at`, at + 1 (at even), of a row.
DEVICE void store_pair(u8* row, int dtype, int at, float x, float y) {
    if (dtype == Dtype::F32) *(float2*)(row + at * 4) = make_float2(x, y);
    else *(u32*)(row + at * 2) = narrow_pair(x, y, dtype);
}
// Elements at … at + 3 (at a multiple of four).
DEVICE void store_four(u8* row, int dtype, int at, const float4& x) {
    if (dtype == Dtype::F32) *(float4*)(row + at * 4) = x;
    else *(uint2*)(row + at * 2) = {narrow_pair(x.x, x.y, dtype), narrow_pair(x.z, x.w, dtype)};
}
DEVICE void store_one(u8* row, int dtype, int at, float x) {
    if (dtype == Dtype::F32) *(float*)(row + at * 4) = x;
    else *(u16*)(row + at * 2) = (u16)narrow_pair(x, 0.0f, dtype);
}
