// The scalar functions of docs/arithmetic.md. Compiled with -fmad=false -ftz=true: what is written is what is rounded, and
// fmaf stands only where the product is exact, where the page says fma, and between a weight and its byte, where the margin allows it.
#pragma once
#include "common/tile.cuh"

namespace attn {

constexpr float MAGIC = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer, half to even
constexpr u32 MAGIC_BITS = 0x4B400000u;
#define MINUS_INFINITY bits_float(0xFF800000u)  // NVRTC has no constexpr name for it

// A weight p < 2 of the float arithmetic rides in this number's low bits: 23 of them are p·2^22, rounded.
constexpr float WEIGHT_BASE = 2.0f;
constexpr u32 WEIGHT_BASE_BITS = 0x40000000u;

DEVICE float exp2i(int k) { return bits_float((u32)(k + 127) << 23); }
DEVICE int exponent(float x) { return (int)(float_bits(x) >> 23 & 255) - 127; }

// The number that a sum which began at MAGIC_BITS has counted, |sum| ≤ 2^22.
DEVICE float counted(int x) { return bits_float((u32)x) - MAGIC; }

// 2^x for -125 <= x <= 0 to 1.6e-7.
DEVICE float exp2f_full(float x) {
    float t = x + MAGIC, r = x - (t - MAGIC);
    float y = bits_float(0x3AADFE47) * r + bits_float(0x3C1E7726);
    y = y * r + bits_float(0x3D635B15);
    y = y * r + bits_float(0x3E75FCD9);
    y = y * r + bits_float(0x3F317216);
    y = y * r + 1.0f;
    return bits_float(float_bits(y) + (float_bits(t) << 23));
}

// 2^k from -64 on, 0 below.
DEVICE float pow2(float k) { return k >= -64.0f ? bits_float(0x3F800000u + (float_bits(k + MAGIC) << 23)) : 0.0f; }

DEVICE float rcp(float x) {
    float y = bits_float(0x7EF311C7u - float_bits(x));
#pragma unroll
    for (int i = 0; i < 4; i++) y = y * (2.0f - x * y);
    return y;
}

// log2(x), x a normal number: n plus what is returned, -½ to ½.
DEVICE float log2_parts(float x, float& n) {
    int i = (int)float_bits(x) - 0x3F3504F3;
    float u = bits_float((u32)((i & 0x7FFFFF) + 0x3F3504F3)) - 1.0f;
    float y = bits_float(0x3E090EF7) * u + bits_float(0xBE607D7C);
    y = y * u + bits_float(0x3E5F6D97);
    y = y * u + bits_float(0xBE72988E);
    y = y * u + bits_float(0x3E931B3E);
    y = y * u + bits_float(0xBEB8BC98);
    y = y * u + bits_float(0x3EF63E7D);
    y = y * u + bits_float(0xBF38AA18);
    y = y * u + bits_float(0x3FB8AA36);
    n = (float)(i >> 23);
    return y * u;
}

// ---- the grid of section 5 ----

constexpr float SCORE_BASE = 196608.0f;  // 1.5·2^17: its sum with a score counts 64ths
constexpr float WEIGHT_SHIFT = 6.0f;     // weights are 2^-6 at most
// Whether the largest score of a row in a tile, plus SCORE_BASE, is where sums with SCORE_BASE lie on the grid.
DEVICE bool is_near(float top) { return top >= 131200.0f && top < 262144.0f; }
// The same, rounded up to an integer score.
DEVICE float grid_ceil(float top) { return bits_float(float_bits(top) + 63 & ~63u); }

// exp2_of_point   2^x of a point of the grid. It errs by 2^-22 at most and gives powers of two exactly, which the margin of section 5 allows; 0 below 2^-126.
// grid_scale      a scale of V, 0 or more, on the grid: the nearest 2^(n/64).
// The device's instructions are trusted once grid_functions.cu has shown it of all their inputs; polynomials do without them.
#if !ATTN_POLYNOMIAL
DEVICE float exp2_of_point(float x) { return approximate_exp2(x); }
DEVICE float grid_scale(float scale) { return exp2_of_point((approximate_log2(scale) + SCORE_BASE) - SCORE_BASE); }
#else
// Within 0.51·2^-22: a minimax fit on [0, 1).
DEVICE float exp2_of_point(float x) {
    float n = floorf(x), u = x - n;
    float y = bits_float(0x3AF37351) * u + bits_float(0x3C141224);
    y = y * u + bits_float(0x3D647F33);
    y = y * u + bits_float(0x3E75EEB5);
    y = y * u + bits_float(0x3F317258);
    y = y * u + 1.0f;
    return x < -126.0f ? 0.0f : bits_float(float_bits(y) + ((u32)(int)n << 23));
}
// The logarithm's integer is added last, behind the rounding to 64ths: beside it the fraction would lose bits.
DEVICE float grid_scale(float scale) {
    float n, fraction = log2_parts(scale, n);
    return scale > 0.0f ? exp2_of_point(((fraction + SCORE_BASE) - SCORE_BASE) + n) : 0.0f;
}
#endif

// The step κ of weights whose largest is x, rounded up to 3 significant bits (2 where V is read fine), and its inverse.
struct WeightStep {
    float step, inverse;
};
DEVICE WeightStep weight_step(float x, bool is_fine) {
    constexpr u32 INVERSES[4] = {0x3F7FED7B, 0x3F4CC6EE, 0x3F2A99E5, 0x3F124980};
    u32 low = is_fine ? 0x3fffff : 0x1fffff, bits = float_bits(fmaxf(x, 0x1p-50f) * bits_float(0x3B808081)) + low & ~low;
    u32 of_mantissa = bits & 0x400000 ? (bits & 0x200000 ? INVERSES[3] : INVERSES[2]) : (bits & 0x200000 ? INVERSES[1] : INVERSES[0]);
    return {bits_float(bits), bits_float(of_mantissa + 0x3F800000u - (bits & 0x7F800000))};
}
// What is added to a count of steps of token t before `weight_bytes`: θ, less what that adds by itself.
DEVICE float threshold(int t) {
    int place = (29 * t + 32) % TILE;
#if ATTN_BULK
    return ((float)place + 0.375f) * 0.015625f - 0.5f;
#else
    return bits_float(0x47000001u + place * 4);  // 32768 and 64ths, of which the addition's rounding adds an eighth
#endif
}
// Four bytes of counts of steps, each with its threshold.
DEVICE u32 weight_bytes(float a, float b, float c, float d) {
#if ATTN_BULK
    return rounded_bytes(a, b, c, d);
#else
    return __byte_perm(__byte_perm(float_bits(a), float_bits(b), 0x0051), __byte_perm(float_bits(c), float_bits(d), 0x0051), 0x5410);
#endif
}

// ---- states ----

// The powers of two by which both sides of a fold or merge are multiplied.
struct Factors {
    float alpha, beta;
};
// Folds a tile's exponent into a state's. -0 of a tile that has none: adding a product with it changes no bit, the sign of a zero included.
DEVICE Factors fold_factors(float& m, float tile) {
    float k = tile - m;
    bool takes = k > 40.0f;  // also where the state is empty: its numbers are zeros
    float factor = pow2(takes ? -k : k);
    Factors f = {takes && m > MINUS_INFINITY ? factor : 1.0f, takes ? 1.0f : tile > MINUS_INFINITY ? factor : -0.0f};
    m = takes ? tile : m;
    return f;
}

// Merges a sink, which has no value, into a row's (m, l). Returns the factor of the row's O: a power of two, or 0.
DEVICE float merge_sink(float sink, float& m, float& l) {
    float s = sink * bits_float(0x3FB8AA3B), sink_m = ceilf(s), top = fmaxf(m, sink_m);  // log2 e
    float alpha = pow2(m - top), beta = pow2(sink_m - top);
    l = l * alpha + exp2f_full(s - sink_m) * beta;
    m = top;
    return alpha;
}

DEVICE float softcap(float s, float inner, float outer) {
    float e = exp2f_full(fmaxf(-(fabsf(s) * inner), -125.0f));
    return copysignf(((1.0f - e) * rcp(1.0f + e)) * outer, s);
}

// ln(l·2^m).
DEVICE float log_sum(float m, float l) {
    float n, fraction = log2_parts(l, n);
    return ((m + n) + fraction) * bits_float(0x3F317218);
}

}  // namespace attn
