// Loads the codes of a tile from a stage as left operands of MMAs, whose 16 rows are tokens of K or dims of V.
//
// A register has four bytes of row lane/4 (`x[..][0]`), or of that row + 8 (`x[..][1]`). One `ldmatrix` reads eight rows of 16 bytes.
#pragma once
#include "attend/stage.cuh"

namespace attn {

// Sums of half steps count residuals' steps where residuals are read. Elsewhere those of low nibbles count scales, and those of high ones, which
// are 16 times as large, eighths: that costs the fewest instructions. `is_high`: of a lane's second row. All in residuals' steps:
DEVICE float half_steps_unit(bool residuals, bool is_high) { return residuals ? 1.0f : is_high ? 2.0f : 16.0f; }
// The same sum in residuals' steps, with those of residuals, whose sum is `of_residuals`, in rows that read them; `sum`: of what both are multiplied by.
DEVICE int with_residuals(int count, int start, bool is_high, bool is_fine, int of_residuals, int sum) {
    int coarse = (count - start) * (is_high ? 2 : 16) + start;
    return is_fine ? coarse + (is_high ? of_residuals >> 3 : 2 * of_residuals) - 15 * sum : coarse;
}

// The two rows of a byte of 4-bit codes: low nibbles, and high ones, which are 16 times as large.
DEVICE void split_nibbles(u32 x, u32 (&rows)[2]) {
    rows[0] = x & 0x0f0f0f0f;
    rows[1] = x & 0xf0f0f0f0;
}

// 16 tokens of K, from t on, in 8 bits: x[panel] has bytes 4·(lane%4) + {0..3} of a panel of 16 dims.
DEVICE void load_keys8(const Codes& k, int t, int lane, u32 (&x)[Keys::PANELS][2]) {
    int row = in_block(t) + lane % 16;
    u32 block = k.at + block_of(t) * k.stride;
    auto at = [&](int panel, int more) {
        if constexpr (PAGE == 0) return chunk_at<Stage::K_SWIZZLE>(k.at, panel, more, row);
        return block + ((panel + more) * Stage::BLOCK + row) * 16;
    };
#pragma unroll
    for (int panel = 0; panel + 1 < Keys::PANELS; panel += 2) {
        u32 y[4];
        ldmatrix_x4(y, at(panel, lane / 16));
#pragma unroll
        for (int i = 0; i < 4; i++) x[panel + i / 2][i % 2] = y[i];
    }
    if (Keys::PANELS % 2 == 1) {
        u32 y[2];
        ldmatrix_x2(y, at(Keys::PANELS - 1, 0));
        x[Keys::PANELS - 1][0] = y[0];
        x[Keys::PANELS - 1][1] = y[1];
    }
}
// The same in 4 bits; tokens t + 8 … are in the high nibbles.
DEVICE void load_keys4(const Codes& k, int t, int lane, u32 (&x)[Keys::PANELS][2]) {
    u32 block = k.at + block_of(t) * k.stride + (in_block(t) / 2 + lane % 8) * 16;
    auto at = [&](int panel) { return block + panel * (Stage::BLOCK / 2) * 16; };
#pragma unroll
    for (int panel = 0; panel < Keys::PANELS; panel += 4) {
        u32 y[4];
        int left = Keys::PANELS - panel;
        if (left >= 4) {
            ldmatrix_x4(y, at(panel + lane / 8));
        } else if (left >= 2) {
            u32 z[2];
            ldmatrix_x2(z, at(panel + lane / 8 % 2));
            y[0] = z[0];
            y[1] = z[1];
        } else {
            u32 z[1];
            ldmatrix_x1(z, at(panel));
            y[0] = z[0];
        }
#pragma unroll
        for (int i = 0; i < 4 && i < left; i++) split_nibbles(y[i], x[panel + i]);
    }
}

// 16 dims of V, the warp's j-th, in 8 bits: x[panel] has bytes 4·(lane%4) + {0..3}, in slot order, of a panel of 16 tokens.
DEVICE void load_values8(const Codes& v, int j, int lane, u32 (&x)[4][2]) {
    constexpr int IN_BLOCK = Stage::BLOCK / 16;
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        u32 y[4];
        int panel = pair + lane / 16;
        ldmatrix_x4(y, v.at + panel / IN_BLOCK * v.stride + (panel % IN_BLOCK * V_DIM + 16 * j + lane % 16) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) x[pair + i / 2][i % 2] = y[i];
    }
}
// The same of rows whose bytes lie along the dims, strided ones or those of latents: even dims are the first eight rows, odd ones the others; or, where `is_swapped`, the other
// way round.
DEVICE void load_value_rows(const Codes& v, int j, int lane, u32 (&x)[4][2], bool is_swapped = false) {
    const u32 first = is_swapped ? 0x7531 : 0x6420, second = first ^ (0x6420 ^ 0x7531);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = 32 * half + lane;
        u32 y[4];
        ldmatrix_x4_trans(y, PAGE == 0 ? chunk_at<Stage::V_SWIZZLE>(v.at, j, 0, t) : v.at + block_of(t) * v.stride + (j * Stage::BLOCK + in_block(t)) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[2 * half + i][0] = __byte_perm(y[2 * i], y[2 * i + 1], first);
            x[2 * half + i][1] = __byte_perm(y[2 * i], y[2 * i + 1], second);
        }
    }
}
// The same in 4 bits; dims + 8 are in the high nibbles.
DEVICE void load_values4(const Codes& v, int j, int lane, u32 (&x)[4][2]) {
    constexpr int IN_BLOCK = Stage::BLOCK / 16;
    int panel = lane / 8;
    u32 y[4];
    ldmatrix_x4(y, v.at + panel / IN_BLOCK * v.stride + (panel % IN_BLOCK * (V_DIM / 2) + 8 * j + lane % 8) * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) split_nibbles(y[i], x[i]);
}
DEVICE void load_values(const Codes& v, int j, int lane, u32 (&x)[4][2]) {
    if constexpr (Values::HAS_NIBBLES) load_values4(v, j, lane, x);
    else if constexpr (Stage::V_TOKEN_MAJOR) load_value_rows(v, j, lane, x);
    else load_values8(v, j, lane, x);
}
// The dim, in a block of 16, of the accumulators of row lane/4 + 8·half.
DEVICE int dim_of(int half, int lane) { return Stage::V_TOKEN_MAJOR ? 2 * (lane / 4) + half : 8 * half + lane / 4; }

}  // namespace attn
