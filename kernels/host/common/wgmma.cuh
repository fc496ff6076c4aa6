// The functions of cuda/wgmma.cuh for the CPU: each lane computes its own sums, when it asks for them.
#pragma once
#include "common/ptx.cuh"

namespace attn {

// The address in 24 bits, then the distances in 18, then log2 of a swizzle's chunks.
DEVICE u64 matrices(u32 at, u32 along, u32 across = 128) {
    if (at % 16 || along % 16 || across % 16) fail("misaligned matrices");
    return (u64)across << 42 | (u64)along << 24 | at;
}
template <int SWIZZLE> DEVICE u64 swizzled_matrices(u32 at, u32 along, u32 across = 8 * SWIZZLE) {
    static_assert(SWIZZLE == 128 || SWIZZLE == 64 || SWIZZLE == 32, "a swizzle of the copy engine");
    return matrices(at, along, across) | (u64)(SWIZZLE == 128 ? 3 : SWIZZLE == 64 ? 2 : 1) << 60;
}
DEVICE u64 matrices_behind(u64 first, u32 bytes) {
    if (bytes % 16) fail("misaligned matrices");
    return first + bytes;
}
struct Matrices {
    u32 at, along, across, swizzle;

    Matrices(u64 of) : at(of & 0xffffff), along(of >> 24 & 0x3ffff), across(of >> 42 & 0x3ffff), swizzle(16 << (of >> 60)) {}
    // The bytes at an address without swizzle.
    const u8* bytes(u32 address) const { return me().cta->shared + (swizzle == 16 ? address : address ^ (address >> 7 & (swizzle / 16 - 1)) << 4); }
    // Row `row` of the `half`-th matrix along the depth, counted over the matrices across.
    const u8* row(int row, int half) const {
        if (swizzle != 16) return bytes(at + row / 8 * across + row % 8 * swizzle + half * 16);
        return bytes(at + half * along + row / 8 * across + row % 8 * 16);
    }
    // Columns from `column` on, a multiple of eight, of 16-bit elements at depth k, where they lie side by side.
    const u8* columns(int column, int k) const {
        if (swizzle != 16) return bytes(at + column / (swizzle / 2) * along + k / 8 * across + k % 8 * swizzle + column % (swizzle / 2) * 2);
        return row(column + k % 8, k / 8);
    }
};
static inline const u8* matrix_bytes(u64 of, int row, int half) { return Matrices(of).row(row, half); }

DEVICE void products_begin() { __syncwarp(); }
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() { __syncwarp(); }
template <int N> DEVICE void products_landed(float (&)[N]) {}
template <int COUNT> DEVICE void give_up_registers() {}
template <int COUNT> DEVICE void take_registers() {}

template <bool B_SIGNED> struct Products {
    // Row r of a is that of `rows[r]`, 32 bytes.
    template <int N> static void multiply(int (&d)[N], const u8 (&rows)[2][32], bool a_signed, u64 b, bool adds) {
        for (int j = 0; j < N / 4; j++)
            for (int e = 0; e < 2; e++) {
                int column = 8 * j + 2 * (lane_id() % 4) + e;
                for (int h = 0; h < 2; h++) {
                    int sum = adds ? d[4 * j + 2 * h + e] : 0;
                    for (int k = 0; k < 32; k++) {
                        u8 x = rows[h][k], y = matrix_bytes(b, column, k / 16)[k % 16];
                        sum += (a_signed ? (int)(signed char)x : (int)x) * (B_SIGNED ? (int)(signed char)y : (int)y);
                    }
                    d[4 * j + 2 * h + e] = sum;
                }
            }
    }
    template <int N> DEVICE void multiply_shared(int (&d)[N], u64 a, u64 b, bool adds) { multiply_matrices(d, a, true, b, adds); }
    template <int N> DEVICE void multiply_shared_unsigned(int (&d)[N], u64 a, u64 b, bool adds) { multiply_matrices(d, a, false, b, adds); }
    template <int N> static void multiply_matrices(int (&d)[N], u64 a, bool a_signed, u64 b, bool adds) {
        u8 rows[2][32];
        for (int h = 0; h < 2; h++)
            for (int half = 0; half < 2; half++) memcpy(rows[h] + 16 * half, matrix_bytes(a, me().thread / 32 % 4 * 16 + lane_id() / 4 + 8 * h, half), 16);
        multiply(d, rows, a_signed, b, adds);
    }
    template <int N> static void multiply_registers(int (&d)[N], const u32 (&a)[4], bool a_signed, u64 b, bool adds) {
        u8 rows[2][32];
        for (int of = 0; of < 4; of++)
            for (int i = 0; i < 4; i++) {
                u32 x = __shfl_sync(~0u, a[i], lane_id() / 4 * 4 + of);
                memcpy(rows[i % 2] + 16 * (i / 2) + 4 * of, &x, 4);
            }
        multiply(d, rows, a_signed, b, adds);
    }
    template <int N> DEVICE void multiply_signed(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) { multiply_registers(d, a, true, b, adds); }
    template <int N> DEVICE void multiply_unsigned(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) { multiply_registers(d, a, false, b, adds); }
};

template <bool IS_BF16, bool B_TURNED> struct FloatProducts {
    static float number(const u8* at) {
        u16 x;
        memcpy(&x, at, 2);
        return IS_BF16 ? bits_float((u32)x << 16) : half_number(x);
    }
    template <int N> DEVICE void multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool adds) {
        float rows[2][16];
        for (int of = 0; of < 4; of++)
            for (int i = 0; i < 4; i++) {
                u32 x = __shfl_sync(~0u, a[i], lane_id() / 4 * 4 + of);
                for (int e = 0; e < 2; e++) rows[i % 2][8 * (i / 2) + 2 * of + e] = number((const u8*)&x + 2 * e);
            }
        multiply_rows(d, rows, b, adds);
    }
    template <int N> DEVICE void multiply_shared(float (&d)[N], u64 a, u64 b, bool adds) {
        float rows[2][16];
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) rows[h][k] = number(matrix_bytes(a, me().thread / 32 % 4 * 16 + lane_id() / 4 + 8 * h, k / 8) + k % 8 * 2);
        multiply_rows(d, rows, b, adds);
    }
    template <int N> static void multiply_rows(float (&d)[N], const float (&rows)[2][16], u64 b, bool adds) {
        for (int i = 0; i < N; i++) {
            int column = i / 4 * 8 + 2 * (lane_id() % 4) + i % 2;
            float sum = adds ? d[i] : 0.0f;
            for (int k = 0; k < 16; k++) {
                const u8* at = B_TURNED ? Matrices(b).columns(column / 8 * 8, k) + column % 8 * 2 : matrix_bytes(b, column, k / 8) + k % 8 * 2;
                sum += rows[i / 2 % 2][k] * number(at);
            }
            d[i] = sum;
        }
    }
};

}  // namespace attn
