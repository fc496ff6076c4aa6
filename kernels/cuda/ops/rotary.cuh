// Rotates K and queries by their tokens' positions: attn-core/src/rotary.rs, with its roundings. A pair (a, b) becomes
// (a·cos − b·sin, b·cos + a·sin); each product is rounded, then the sum, as kernels that include this are compiled without contraction.
#pragma once
#include "common/dtype.cuh"
#include "common/params.h"
#include "page/token.cuh"

namespace attn {

constexpr bool HAS_ROTARY = ATTN_ROTARY;  // whether K is rotated by its position before it is encoded, and queries beside it

// Two neighbouring numbers as they were loaded, so that no instruction waits for the loads.
struct TwoNumbers {
    u32 low, high;  // of 16 bits: both in `low`

    METHOD float2 widened(int dtype) const { return dtype == Dtype::F32 ? make_float2(bits_float(low), bits_float(high)) : widen_pair(low, dtype); }
};
// Numbers `at`, at + 1; `at` is even where they are aligned to each other.
DEVICE TwoNumbers load_two(const void* numbers, u64 at, int dtype, bool is_aligned = true) {
    const u32* wide = (const u32*)numbers + at;
    const u16* narrow = (const u16*)numbers + at;
    if (!is_aligned) return dtype == Dtype::F32 ? TwoNumbers{wide[0], wide[1]} : TwoNumbers{narrow[0] | (u32)narrow[1] << 16, 0};
    if (dtype != Dtype::F32) return {*(const u32*)narrow, 0};
    const uint2 both = *(const uint2*)wide;
    return {both.x, both.y};
}

// A token's position: as the caller says, or its number in its sequence, `otherwise`.
DEVICE long long position_of(const AppendParams& p, long long token, int otherwise) { return p.positions ? p.positions[token] : otherwise; }

// Whether the table has it; a token without is left out.
DEVICE bool has_position(const AppendParams& p, long long token, int otherwise) { return (u64)position_of(p, token, otherwise) < (u64)p.num_positions; }

// Cosines and sines of a token's pairs.
struct Angles {
    const void* row;
    int half;

    // Finds the row of the table; false for a position outside of it.
    METHOD bool find(const AppendParams& p, long long position) {
        half = p.rotary_dim / 2;
        row = row_at(p.cos_sin, position, p.rotary_dim, p.cos_sin_dtype);
        return (u64)position < (u64)p.num_positions;
    }
    METHOD TwoNumbers cosines(const AppendParams& p, int pair) const { return load_two(row, pair, p.cos_sin_dtype); }
    METHOD TwoNumbers sines(const AppendParams& p, int pair) const { return load_two(row, half + pair, p.cos_sin_dtype); }
};

// What a lane of a token of K needs beside its own dims, which are four by four: the other halves of their pairs, cosines and sines. The position is
// loaded early, and the row that it leads to behind what need not wait for it.
template <class Token> struct RotaryOf {
    static constexpr int EACH = Token::EACH;
    static_assert(Token::UNIT == 4, "dims of K lie side by side");

    long long position;  // where the caller says positions
    // Of dims 0 and 1 of a unit, and of 2 and 3.
    TwoNumbers partner[EACH][2], cosine[EACH][2], sine[EACH][2];

    // Neighbours are the lane's own.
    METHOD void load_partners(const AppendParams& p, long long token, int head, int lane) {
        position = position_of(p, token, 0);
        const long long at = token * p.k_token_stride + (long long)head * K_DIM;
        const int half = p.rotary_dim / 2;
        if (p.is_interleaved) return;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int d = Token::dim(Token::unit(i, lane), 2 * k), other = d < half ? d + half : d - half;
                if (d < p.rotary_dim) partner[i][k] = load_two(p.k, at + other, p.dtype, p.k_token_stride % 4 == 0);
            }
    }
    METHOD bool load_angles(const AppendParams& p, int of_sequence, int lane) {
        Angles angles;
        if (!angles.find(p, p.positions ? position : of_sequence)) return false;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int d = Token::dim(Token::unit(i, lane), 2 * k);
                if (d >= p.rotary_dim || (k == 1 && p.is_interleaved)) continue;
                const int pair = p.is_interleaved ? d / 2 : d < angles.half ? d : d - angles.half;
                cosine[i][k] = angles.cosines(p, pair);
                sine[i][k] = angles.sines(p, pair);
            }
        return true;
    }
    // Rotates the token's widened dims.
    METHOD void rotate(const AppendParams& p, Token& token, int lane) const {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int d = Token::dim(Token::unit(i, lane), 2 * k);
                if (d >= p.rotary_dim) continue;
                float &x = token.x[i][2 * k % Token::UNIT], &y = token.x[i][(2 * k + 1) % Token::UNIT];
                if (p.is_interleaved) {
                    const float2 cosines = cosine[i][0].widened(p.cos_sin_dtype), sines = sine[i][0].widened(p.cos_sin_dtype);
                    const float c = k ? cosines.y : cosines.x, s = k ? sines.y : sines.x, a = x, b = y;
                    x = a * c - b * s;
                    y = b * c + a * s;
                    continue;
                }
                const float2 c = cosine[i][k].widened(p.cos_sin_dtype), s = sine[i][k].widened(p.cos_sin_dtype);
                const float2 other = partner[i][k].widened(p.dtype);
                const bool is_first = d < p.rotary_dim / 2;
                x = is_first ? x * c.x - other.x * s.x : x * c.x + other.x * s.x;
                y = is_first ? y * c.y - other.y * s.y : y * c.y + other.y * s.y;
            }
    }
};

// Query heads of a token that a warp of one token rotates: they have its cosines and sines in common, and their loads are under way together.
constexpr int ROTARY_EACH = (K_DIM / 4 + 31) / 32, QUERY_HEADS = larger(4 / ROTARY_EACH, 1);

// Rotates query heads of a token, from `head` on: a lane has both halves of its pairs, so q_out may be q. A token whose position is outside of the table is left.
template <int HEADS> DEVICE void rotate_queries(const AppendParams& p, long long token, int of_sequence, int head, int lane) {
    const int heads = min(HEADS, p.num_q_heads - head);
    if (heads <= 0) return;
    const long long position = position_of(p, token, of_sequence);
    const long long from = token * p.q_token_stride + (long long)head * K_DIM;
    u8* const to = row_at(p.q_out, token * p.q_out_token_stride + (long long)head * K_DIM, 1, p.dtype);
    // Two pairs at a time: dims first, first + 1 and second, second + 1.
    const int half = p.rotary_dim / 2;
    TwoNumbers x[HEADS][ROTARY_EACH], y[HEADS][ROTARY_EACH];
    auto pair_of = [&](int i) { return 2 * (32 * i + lane); };
    auto first_of = [&](int pair) { return p.is_interleaved ? 2 * pair : pair; };
    auto second_of = [&](int pair) { return p.is_interleaved ? 2 * pair + 2 : pair + half; };
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < ROTARY_EACH; i++) {
            const int pair = pair_of(i);
            if (h >= heads || pair >= half) break;
            x[h][i] = load_two(p.q, from + h * K_DIM + first_of(pair), p.dtype);
            y[h][i] = load_two(p.q, from + h * K_DIM + second_of(pair), p.dtype);
        }
    Angles angles;
    if (!angles.find(p, position)) return;
#pragma unroll
    for (int i = 0; i < ROTARY_EACH; i++) {
        const int pair = pair_of(i);
        if (pair >= half) break;
        const TwoNumbers cosines = angles.cosines(p, pair), sines = angles.sines(p, pair);
        const float2 c = cosines.widened(p.cos_sin_dtype), s = sines.widened(p.cos_sin_dtype);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h >= heads) break;
            const float2 u = x[h][i].widened(p.dtype), w = y[h][i].widened(p.dtype);
            // The pairs are (u.x, u.y), (w.x, w.y), or (u.x, w.x), (u.y, w.y).
            const float b0 = p.is_interleaved ? u.y : w.x, a1 = p.is_interleaved ? w.x : u.y;
            const float first0 = u.x * c.x - b0 * s.x, second0 = b0 * c.x + u.x * s.x;
            const float first1 = a1 * c.y - w.y * s.y, second1 = w.y * c.y + a1 * s.y;
            store_pair(to, p.dtype, h * K_DIM + first_of(pair), first0, p.is_interleaved ? second0 : first1);
            store_pair(to, p.dtype, h * K_DIM + second_of(pair), p.is_interleaved ? first1 : second0, second1);
        }
    }
    if (p.q == p.q_out) return;
    // What is behind the rotated dims.
    for (int h = 0; h < heads; h++)
        for (int d = p.rotary_dim + 2 * lane; d < K_DIM; d += 64) {
            const float2 x = load_two(p.q, from + h * K_DIM + d, p.dtype).widened(p.dtype);
            store_pair(to, p.dtype, h * K_DIM + d, x.x, x.y);
        }
}

}  // namespace attn
