// The functions of cuda/wgmma.cuh for the CPU: each lane computes its own sums, when it asks for them (machine.cpp).
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
DEVICE void products_begin() { __syncwarp(); }
DEVICE void products_commit() {}
template <int PENDING> DEVICE void products_wait() { __syncwarp(); }
template <int N> DEVICE void products_landed(float (&)[N]) {}
template <int COUNT> DEVICE void give_up_registers() {}
template <int COUNT> DEVICE void take_registers() {}

// Where a lane's two rows of a left operand in shared memory lie.
DEVICE int product_row(int h) { return me().thread / 32 % 4 * 16 + lane_id() / 4 + 8 * h; }

template <bool B_SIGNED> struct Products {
    template <int N> DEVICE void multiply_shared(int (&d)[N], u64 a, u64 b, bool adds) { multiply_matrices(d, a, true, b, adds); }
    template <int N> DEVICE void multiply_shared_unsigned(int (&d)[N], u64 a, u64 b, bool adds) { multiply_matrices(d, a, false, b, adds); }
    template <int N> DEVICE void multiply_signed(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) { multiply_registers(d, a, true, b, adds); }
    template <int N> DEVICE void multiply_unsigned(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) { multiply_registers(d, a, false, b, adds); }

    template <int N> static void multiply_matrices(int (&d)[N], u64 a, bool a_signed, u64 b, bool adds) {
        u8 rows[2][32];
        for (int h = 0; h < 2; h++)
            for (int half = 0; half < 2; half++) memcpy(rows[h] + 16 * half, Matrices(a).row(product_row(h), half), 16);
        multiply_bytes(d, N, rows, a_signed, b, B_SIGNED, adds);
    }
    template <int N> static void multiply_registers(int (&d)[N], const u32 (&a)[4], bool a_signed, u64 b, bool adds) {
        u32 words[4][4];
        quad_words(a, words);
        u8 rows[2][32];
        for (int of = 0; of < 4; of++)
            for (int i = 0; i < 4; i++) memcpy(rows[i % 2] + 16 * (i / 2) + 4 * of, &words[of][i], 4);
        multiply_bytes(d, N, rows, a_signed, b, B_SIGNED, adds);
    }
};

template <bool IS_BF16, bool B_TURNED> struct FloatProducts {
    template <int N> DEVICE void multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool adds) {
        u32 words[4][4];
        quad_words(a, words);
        u16 rows[2][16];
        for (int of = 0; of < 4; of++)
            for (int i = 0; i < 4; i++) memcpy(&rows[i % 2][8 * (i / 2) + 2 * of], &words[of][i], 4);
        multiply_floats(d, N, rows, IS_BF16, b, B_TURNED, adds);
    }
    template <int N> DEVICE void multiply_shared(float (&d)[N], u64 a, u64 b, bool adds) {
        u16 rows[2][16];
        for (int h = 0; h < 2; h++)
            for (int half = 0; half < 2; half++) memcpy(&rows[h][8 * half], Matrices(a).row(product_row(h), half), 16);
        multiply_floats(d, N, rows, IS_BF16, b, B_TURNED, adds);
    }
};

}  // namespace attn
