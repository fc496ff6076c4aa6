// The scalar functions of docs/arithmetic.md. Compiled with -fmad=false -ftz=true: what is written is what is rounded, and
// fmaf stands only where the product is exact.
#pragma once
#include "common/tile.cuh"

namespace attn {

constexpr float MAGIC = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer, half to even
constexpr u32 MAGIC_BITS = 0x4B400000u;
#define MINUS_INFINITY bits_float(0xFF800000u)  // NVRTC has no constexpr name for it

constexpr u32 EXP2W_C0 = 0x3F7FFB48, EXP2W_C1 = 0x3F317982, EXP2W_C2 = 0x3E786F4E;
// A weight p < 2 rides in this number's low bits: 23 of them are p·2^22, rounded.
constexpr float WEIGHT_BASE = 2.0f;
constexpr u32 WEIGHT_BASE_BITS = 0x40000000u;

DEVICE float exp2i(int k) { return bits_float((u32)(k + 127) << 23); }
DEVICE int exponent(float x) { return (int)(float_bits(x) >> 23 & 255) - 127; }

// The number that a sum which began at MAGIC_BITS has counted, |sum| ≤ 2^22.
DEVICE float counted(int x) { return bits_float((u32)x) - MAGIC; }

// 2^(1 - v) for 0 <= v <= 64, as a weight, from u = v/64: degree 3.
DEVICE float exp2w(float u) {
    float t = fmaf(u, -64.0f, MAGIC + 1.0f), r = fmaf(u, -64.0f, -(t - (MAGIC + 1.0f)));
    float y = bits_float(0x3D620000) * r + bits_float(EXP2W_C2);
    y = y * r + bits_float(EXP2W_C1);
    y = y * r + bits_float(EXP2W_C0);
    return bits_float(float_bits(y) + (float_bits(t) << 23));
}

// The same to full precision: degree 5.
DEVICE float exp2f_full(float x) {
    float t = x + MAGIC, r = x - (t - MAGIC);
    float y = bits_float(0x3AADFE47) * r + bits_float(0x3C1E7726);
    y = y * r + bits_float(0x3D635B15);
    y = y * r + bits_float(0x3E75FCD9);
    y = y * r + bits_float(0x3F317216);
    y = y * r + 1.0f;
    return bits_float(float_bits(y) + (float_bits(t) << 23));
}

// 2^-distance up to 64, 0 beyond.
DEVICE float pow2(float distance) { return distance <= 64.0f ? bits_float(0x3F800000u - (float_bits(distance + MAGIC) << 23)) : 0.0f; }

// `rcp` of 1, 5/4, 6/4 and 7/4: all that it is asked of a κ, since it scales with powers of two.
constexpr u32 RCP_OF_4_4 = 0x3F7FFFFF, RCP_OF_5_4 = 0x3F4CCCCD, RCP_OF_6_4 = 0x3F2AAAAB, RCP_OF_7_4 = 0x3F124924;

DEVICE float rcp(float x) {
    float y = bits_float(0x7EF311C7u - float_bits(x));
#pragma unroll
    for (int i = 0; i < 4; i++) y = y * (2.0f - x * y);
    return y;
}

// The step κ of weights whose largest is x, rounded up to 3 significant bits (2 where V is read fine), and its reciprocal; zeros if they are
// too small to count.
struct WeightStep {
    float step, inverse;
};
DEVICE WeightStep weight_step(float x, bool is_fine) {
    u32 low = is_fine ? 0x3fffff : 0x1fffff, bits = float_bits(x * bits_float(0x3B808081)) + low & ~low;
    u32 of_mantissa = bits & 0x400000 ? (bits & 0x200000 ? RCP_OF_7_4 : RCP_OF_6_4) : (bits & 0x200000 ? RCP_OF_5_4 : RCP_OF_4_4);
    u32 counts = x >= 0x1p-100f ? ~0u : 0;  // a mask, since the compiler would make branches of a choice
    return {bits_float(bits & counts), bits_float((of_mantissa + 0x3F800000u - (bits & 0x7F800000)) & counts)};
}
// θ of token t, rounded as its sum with a weight is.
DEVICE float threshold(int t) { return bits_float(0x47000002u + (29 * t + 32) % TILE * 4); }

// Merges a sink, which has no value, into a row's (m, l). Returns the factor of the row's O: a power of two, or 0.
DEVICE float merge_sink(float sink, float& m, float& l) {
    float s = sink * bits_float(0x3FB8AA3B), sink_m = ceilf(s), top = fmaxf(m, sink_m);  // log2 e
    float alpha = pow2(top - m), beta = pow2(top - sink_m);
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
    int i = (int)float_bits(l) - 0x3F3504F3;
    float u = bits_float((u32)((i & 0x7FFFFF) + 0x3F3504F3)) - 1.0f;
    float y = bits_float(0x3E090EF7) * u + bits_float(0xBE607D7C);
    y = y * u + bits_float(0x3E5F6D97);
    y = y * u + bits_float(0xBE72988E);
    y = y * u + bits_float(0x3E931B3E);
    y = y * u + bits_float(0xBEB8BC98);
    y = y * u + bits_float(0x3EF63E7D);
    y = y * u + bits_float(0xBF38AA18);
    y = y * u + bits_float(0x3FB8AA36);
    y = y * u;
    return ((m + (float)(i >> 23)) + y) * bits_float(0x3F317218);
}

}  // namespace attn
