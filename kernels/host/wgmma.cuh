// The functions of cuda/wgmma.cuh for the CPU: each lane computes its own sums, when it asks for them.
#pragma once
#include "ptx.cuh"

// The address, and the distance from 16 bytes of a row to its next 16.
DEVICE u64 matrices(u32 at, u32 along) {
    if (at % 16 || along % 16) fail("misaligned matrices");
    return (u64)along << 32 | at;
}
static inline const u8* matrix_bytes(u64 of, int row, int half) { return me().cta->shared + (u32)of + half * (u32)(of >> 32) + row / 8 * 128 + row % 8 * 16; }

DEVICE void products_begin() { __syncwarp(); }
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() { __syncwarp(); }
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
    template <int N> DEVICE void multiply_shared(int (&d)[N], u64 a, u64 b, bool adds) {
        u8 rows[2][32];
        for (int h = 0; h < 2; h++)
            for (int half = 0; half < 2; half++) memcpy(rows[h] + 16 * half, matrix_bytes(a, me().thread / 32 % 4 * 16 + lane_id() / 4 + 8 * h, half), 16);
        multiply(d, rows, true, b, adds);
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
