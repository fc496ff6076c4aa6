// Rows of queries, outputs and new tokens in f32, f16 or bf16 (`DecodeParams::dtype`). 16-bit inputs are widened exactly; results are
// rounded once, to nearest even.
#pragma once
#include "common/ptx.cuh"

namespace attn {

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
// Words i of four neighbouring lanes, of which lane c has the c-th then: a transposed square. `lane`: c, and anything above its two bits.
DEVICE uint4 transpose_words(const u32 (&word)[4], int lane) {
    bool odd = lane & 1, upper = lane & 2;
    u32 first = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1), second = __shfl_xor_sync(~0u, odd ? word[2] : word[3], 1);
    // Of two lanes, words 0 or 1, and 2 or 3.
    uint2 low = {odd ? first : word[0], odd ? word[1] : first}, high = {odd ? second : word[2], odd ? word[3] : second};
    uint2 sent = upper ? low : high, kept = upper ? high : low;
    uint2 got = {__shfl_xor_sync(~0u, sent.x, 2), __shfl_xor_sync(~0u, sent.y, 2)};
    return upper ? uint4{got.x, got.y, kept.x, kept.y} : uint4{kept.x, kept.y, got.x, got.y};
}
// A row of N pairs in each of four neighbouring lanes: pair j of lane c is that of dims 8j + 2c and 8j + 2c + 1. All lanes of the warp; those of a null row
// store nothing.
template <int N> DEVICE void store_quad_row(u8* row, int dtype, const float (&x)[N][2], int lane) {
    int c = lane % 4;
    if (dtype == Dtype::F32) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (row) *(float2*)(row + (8 * j + 2 * c) * 4) = make_float2(x[j][0], x[j][1]);
        return;
    }
#pragma unroll
    for (int j = 0; j + 4 <= N; j += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = narrow_pair(x[j + i][0], x[j + i][1], dtype);
        uint4 vector = transpose_words(words, lane);
        if (row) *(uint4*)(row + 16 * (j + c)) = vector;
    }
#pragma unroll
    for (int j = N / 4 * 4; j < N; j++)
        if (row) *(u32*)(row + 16 * j + 4 * c) = narrow_pair(x[j][0], x[j][1], dtype);
}

}  // namespace attn
