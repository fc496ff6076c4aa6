// The products of wgmma.cuh for GPUs without wgmma: each warp of a warpgroup multiplies its own 16 rows by mma.sync and waits for no other warp. Names and layouts
// are those of wgmma.cuh; a warpgroup's first warp is a multiple of four.
#pragma once
#include "common/ptx.cuh"

namespace attn {

// The address in 32 bits, then the distances in 14 each, then log2 of a swizzle's chunks.
DEVICE u64 matrices(u32 at, u32 along, u32 across = 128) { return (u64)(across << 14 | along) << 32 | at; }
template <int SWIZZLE> DEVICE u64 swizzled_matrices(u32 at, u32 along, u32 across = 8 * SWIZZLE) {
    static_assert(SWIZZLE == 128 || SWIZZLE == 64 || SWIZZLE == 32, "a swizzle of the copy engine");
    return matrices(at, along, across) | (u64)(SWIZZLE == 128 ? 3 : SWIZZLE == 64 ? 2 : 1) << 60;
}
// The upper half stays what the compiler knows it to be.
DEVICE u64 matrices_behind(u64 first, u32 bytes) { return (first & 0xffffffff00000000) | (u32)((u32)first + bytes); }

DEVICE void products_begin() {}
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() {}
template <int N> DEVICE void products_landed(float (&)[N]) {}
// Every thread has what the launch gives it.
template <int COUNT> DEVICE void give_up_registers() {}
template <int COUNT> DEVICE void take_registers() {}

// This warp's 16 rows of a left operand in shared memory: two matrices across, then those behind them along the depth.
DEVICE void load_left(u32 (&a)[4], u64 of) {
    u32 lane = threadIdx.x % 32, along = of >> 32 & 0x3fff, across = of >> 46 & 0x3fff;
    ldmatrix_x4(a, (u32)of + threadIdx.x / 32 % 4 * 256 + lane % 8 * 16 + (lane & 8 ? across : 0) + (lane & 16 ? along : 0));
}
// Four matrices of a right operand: two along the depth, then those behind them across. The j-th eight columns are the first two's.
template <bool TURNED> struct RightOperand {
    u32 at, along, across, chunks;  // at: of this lane's row in the first four; chunks: of 16 bytes, that a swizzle spans

    METHOD explicit RightOperand(u64 of) : along(of >> 32 & 0x3fff), across(of >> 46 & 0x3fff), chunks(1 << (of >> 60)) {
        u32 lane = threadIdx.x % 32;
        at = (u32)of + lane % 8 * chunks * 16;
        // Of swizzled rows chunks lie side by side, and `across` is from eight rows to the next.
        if (chunks == 1) at += (lane & 8 ? along : 0) + (lane & 16 ? across : 0);
        else at = swizzled(at + (lane & (TURNED ? 8 : 16) ? across : 0)) ^ (lane & (TURNED ? 16 : 8) ? 16 : 0);
    }
    METHOD u32 swizzled(u32 row) const { return row ^ (row >> 7 & chunks - 1) << 4; }
    METHOD void load(u32 (&b)[4], int j) const {
        u32 from = TURNED && chunks > 1 ? (at ^ j % chunks * 16) + j / chunks * along : at + j * across;
        if constexpr (TURNED) ldmatrix_x4_trans(b, from);
        else ldmatrix_x4(b, from);
    }
};
// Calls multiply(j, b0, b1) for each eight columns of a right operand.
template <int GROUPS, bool TURNED, class Multiply> DEVICE void each_eight_columns(u64 of, Multiply multiply) {
    static_assert(GROUPS % 2 == 0, "two at a time");
    RightOperand<TURNED> right(of);
#pragma unroll
    for (int j = 0; j < GROUPS; j += 2) {
        u32 b[4];
        right.load(b, j);
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
    template <int N> DEVICE void multiply_shared_unsigned(int (&d)[N], u64 a, u64 b, bool adds) {
        u32 left[4];
        load_left(left, a);
        multiply_unsigned(d, left, b, adds);
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

}  // namespace attn
