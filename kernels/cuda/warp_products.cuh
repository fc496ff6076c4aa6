// The products of wgmma.cuh for GPUs without wgmma: each warp of a warpgroup multiplies its own 16 rows, by mma.sync, and waits for none. Names and layouts
// are those of wgmma.cuh; a warpgroup's first warp is a multiple of four.
#pragma once
#include "ptx.cuh"

DEVICE u64 matrices(u32 at, u32 along, u32 across = 128) { return (u64)(across << 16 | along) << 32 | at; }
// Rows that the copy engine would write: not here (select.rs).
template <int SWIZZLE> DEVICE u64 swizzled_matrices(u32 at, u32 along, u32 across = 0) { return matrices(at, along, across); }
DEVICE u64 matrices_behind(u64 first, u32 bytes) { return first + bytes; }

DEVICE void products_begin() {}
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() {}
template <int N> DEVICE void products_landed(float (&)[N]) {}
// Every thread has what the launch gives it.
template <int COUNT> DEVICE void give_up_registers() {}
template <int COUNT> DEVICE void take_registers() {}

// Where this lane's row of four matrices lies that are loaded at once, two along the depth by two across: the first two are side by side in that direction.
template <bool ACROSS_FIRST> DEVICE u32 row_of_four(u64 of) {
    u32 lane = threadIdx.x % 32, along = of >> 32 & 0xffff, across = of >> 48;
    return (u32)of + lane % 8 * 16 + (lane & 8 ? ACROSS_FIRST ? across : along : 0) + (lane & 16 ? ACROSS_FIRST ? along : across : 0);
}
// This warp's 16 rows of a left operand in shared memory.
DEVICE void load_left(u32 (&a)[4], u64 of) { ldmatrix_x4(a, row_of_four<true>(of + threadIdx.x / 32 % 4 * 256)); }
// Calls multiply(j, b0, b1) for each eight columns of a right operand.
template <int GROUPS, bool TURNED, class Multiply> DEVICE void each_eight_columns(u64 of, Multiply multiply) {
    static_assert(GROUPS % 2 == 0, "two at a time");
    u32 at = row_of_four<false>(of), across = of >> 48;
#pragma unroll
    for (int j = 0; j < GROUPS; j += 2) {
        u32 b[4];
        if constexpr (TURNED) ldmatrix_x4_trans(b, at + j * across);
        else ldmatrix_x4(b, at + j * across);
        multiply(j, b[0], b[1]);
        multiply(j + 1, b[2], b[3]);
    }
}

template <bool B_SIGNED> struct Products {
    template <int N, class Mma> DEVICE void multiply(int (&d)[N], u64 b, bool adds, Mma mma) {
        each_eight_columns<N / 4, false>(b, [&](int j, u32 b0, u32 b1) {
            Sums sums = adds ? Sums{{d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]}} : Sums{};
            sums = mma(sums, b0, b1);
#pragma unroll
            for (int i = 0; i < 4; i++) d[4 * j + i] = sums.x[i];
        });
    }
    template <int N> DEVICE void multiply_signed(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) {
        multiply(d, b, adds, [&](const Sums& sums, u32 b0, u32 b1) {
            if constexpr (B_SIGNED) return mma_s8_k32(sums, a[0], a[1], a[2], a[3], b0, b1);
            else return mma_s8u8_k32(sums, a[0], a[1], a[2], a[3], b0, b1);
        });
    }
    template <int N> DEVICE void multiply_unsigned(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) {
        multiply(d, b, adds, [&](const Sums& sums, u32 b0, u32 b1) {
            if constexpr (B_SIGNED) return mma_u8s8_k32(sums, a[0], a[1], a[2], a[3], b0, b1);
            else return mma_u8_k32(sums, a[0], a[1], a[2], a[3], b0, b1);
        });
    }
    template <int N> DEVICE void multiply_shared(int (&d)[N], u64 a, u64 b, bool adds) {
        u32 left[4];
        load_left(left, a);
        multiply_signed(d, left, b, adds);
    }
};

template <bool IS_BF16, bool B_TURNED> struct FloatProducts {
    template <int N> DEVICE void multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool adds) {
        each_eight_columns<N / 4, B_TURNED>(b, [&](int j, u32 b0, u32 b1) {
            FloatSums sums = adds ? FloatSums{{d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]}} : FloatSums{};
            sums = IS_BF16 ? mma_bf16(sums, a[0], a[1], a[2], a[3], b0, b1) : mma_f16(sums, a[0], a[1], a[2], a[3], b0, b1);
#pragma unroll
            for (int i = 0; i < 4; i++) d[4 * j + i] = sums.x[i];
        });
    }
    template <int N> DEVICE void multiply_shared(float (&d)[N], u64 a, u64 b, bool adds) {
        u32 left[4];
        load_left(left, a);
        multiply(d, left, b, adds);
    }
};
