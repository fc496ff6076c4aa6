// Loads a token's elements into the lanes of a warp, rotates and encodes them by the rules of FORMATS.md and stores them.
//
// Every quotient is rounded once and gives the bits of attn-core/src/quant.rs, without its f64 divisions, in a tenth of their instructions:
// a scale's quotient is rounded to odd in f32 before it is rounded to f16; a code is an approximate quotient, rounded, and only near a
// tie does the exact remainder decide. Both are tested on the host over all scales.
#pragma once
#include "common/ptx.cuh"
#include "page/instance.cuh"
#include "page/rotation.cuh"

namespace attn {

constexpr float LARGEST_HALF = 65504.0f, LARGEST = 3.402823466e38f;
constexpr float ROUND = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer, which the low bits then hold
#define INFINITE bits_float(0x7f800000u)

// An integer that orders as the float does, and its inverse.
DEVICE int ordered(float x) {
    int i = (int)float_bits(x);
    return i ^ (i >> 31 & 0x7fffffff);
}
DEVICE float from_ordered(int i) { return bits_float((u32)(i ^ (i >> 31 & 0x7fffffff))); }

// ---- quant.rs ----

// to_f16(a / N) for a >= 0. The quotient is rounded to odd in f32, so that the rounding to f16 is the only one that counts.
template <int N> DEVICE u16 half_quotient(float a) {
    constexpr float inverse = 1.0f / N;
    float q = a * inverse;
    q = fmaf(fmaf(-q, (float)N, a), inverse, q);
    float rest = fmaf(-q, (float)N, a);
    u32 odd = (float_bits(q) - (rest < 0.0f)) | (rest != 0.0f);
    return float_half(fminf(bits_float(odd), LARGEST_HALF));
}
// to_f16 of an f32: zero is always +0.
DEVICE u16 half_shift(float x) {
    u16 h = float_half(fminf(fmaxf(x, -LARGEST_HALF), LARGEST_HALF));
    return h == 0x8000 ? 0 : h;
}

DEVICE double pow2(int k) { return __hiloint2double((1023 + k) << 20, 0); }  // 2^k, where that is normal
DEVICE int exponent(double x) { return ((__double2hiint(x) >> 20) & 0x7ff) - 1023; }

DEVICE u32 to_fp8(float x, float scale) {
    double v = __ddiv_rn((double)x, (double)scale);
    int e = exponent(v);
    e = (e < -6 ? -6 : e) - 3;
    v = v == 0.0 ? 0.0 : fmin(fabs(rint(v * pow2(-e)) * pow2(e)), 448.0);
    u32 sign = float_bits(x) >> 31 << 7;
    if (v < 0.015625) return sign | (u32)(v * 512.0);
    return sign | (u32)(exponent(v) + 7) << 3 | ((u32)__double2hiint(v) >> 17 & 7);
}
DEVICE u32 to_tensor_int8(float x, float scale) {
    double q = rint(__ddiv_rn((double)x, (double)scale));
    return (u32)(int)fmin(fmax(q, -127.0), 127.0);
}
DEVICE u32 to_bf16(float x) {
    const float max = bits_float(0x7f7f0000);
    u32 u = float_bits(fminf(fmaxf(x, -max), max));
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

// `code(x, scale, lo, hi)` of quant.rs, exactly: the remainder is exact because the rounded quotient has 9 bits and the scale 11.
DEVICE u32 exact_code(float x, float scale, float lo, float hi) {
    if (scale == 0.0f) return 0;
    float n = rintf(fminf(fmaxf(x * approximate_rcp(scale), lo - 1.0f), hi + 1.0f));
    float rest = fmaf(-n, scale, x), twice = 2.0f * fabsf(rest);
    if (twice > scale || (twice == scale && ((int)n & 1))) n += copysignf(1.0f, rest);
    return (u32)(int)fminf(fmaxf(n, lo), hi);
}

// Symmetric int8 codes by one scale. `code` is fast and sets `near` if the quotient is too close to a tie to be certain; `exact` always holds.
struct Symmetric {
    float scale, inverse;

    METHOD void set(u32 half) {
        scale = half_float(half);
        inverse = half == 0 ? 0.0f : approximate_rcp(scale);
    }
    // Whether the scale is so far below amax / 127 (saturated, or a subnormal of few bits) that codes may exceed 127: then all are exact.
    METHOD bool is_short(u32 half) const { return half < 0x80 || half == 0x7bff; }
    METHOD u32 code(float x, bool& near) const {
        float v = x * inverse, sum = v + ROUND;
        near |= fabsf(v - (sum - ROUND)) > 0.49993f;  // v is off by 2^-15 at most
        return float_bits(sum);
    }
    METHOD u32 exact(float x) const { return exact_code(x, scale, -127.0f, 127.0f); }
};
// Half steps of a rotated row by one scale: floor(8x / scale) + 128. `code` is as Symmetric's, but certain away from whole numbers.
struct HalfSteps {
    float step, inverse;

    METHOD void set(u32 half) {
        step = 0.125f * half_float(half);
        inverse = half == 0 ? 0.0f : approximate_rcp(step);
    }
    METHOD bool is_short(u32 half) const { return half < 0x80 || half == 0x7bff; }
    METHOD u32 code(float x, bool& near) const {
        float v = x * inverse, sum = v + ROUND, rest = v - (sum - ROUND);
        near |= fabsf(rest) < 0.00007f;  // v is off by 2^-15 at most
        return clamped((int)(float_bits(sum) - float_bits(ROUND)) - (rest < 0.0f));
    }
    // Signs of exact remainders: a product of n and the step has 20 bits, and an fma's sign is its exact value's.
    METHOD u32 exact(float x) const {
        if (step == 0.0f) return 128;
        float n = floorf(fminf(fmaxf(x * approximate_rcp(step), -130.0f), 130.0f));
        if (fmaf(-n, step, x) < 0.0f) n -= 1.0f;
        else if (fmaf(-(n + 1.0f), step, x) >= 0.0f) n += 1.0f;
        return clamped((int)n);
    }
    static METHOD u32 clamped(int n) { return (u32)min(max(n + 128, 0), 255); }
};
// int4 codes by a scale and a shift, which are the low and the high half of a word; as Symmetric.
struct Shifted {
    float scale, shift, inverse;

    METHOD void set(u32 param) {
        scale = half_float(param & 0xffff), shift = half_float(param >> 16);
        inverse = (param & 0xffff) == 0 ? 0.0f : approximate_rcp(15.0f * scale);
    }
    METHOD bool is_short(u32) const { return false; }
    METHOD u32 code(float x, bool& near) const {
        float v = __saturatef(__fsub_rn(x, shift) * inverse), sum = fmaf(v, 15.0f, ROUND);
        near |= fabsf(fmaf(v, 15.0f, ROUND - sum)) > 0.49998f;  // 15·v is off by 2^-18 at most
        return float_bits(sum);
    }
    METHOD u32 exact(float x) const { return exact_code(__fsub_rn(x, shift), scale, 0.0f, 15.0f); }
};

// The f16 scale (low half) and shift of int4 elements between lo and hi.
DEVICE u32 int4_param(float lo, float hi) { return half_quotient<15>(fminf(__fsub_rn(hi, lo), LARGEST)) | (u32)half_shift(lo) << 16; }

// A word of the low bytes of four words.
DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) { return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410); }

// ---- centres of K (docs/arithmetic.md, section 12) ----

// An element of a centre, as bf16 of at most 2^50.
DEVICE u32 to_centre(float x) { return to_bf16(fminf(fmaxf(x, -0x1p50f), 0x1p50f)); }

// ---- one token of one head ----

DEVICE bool is_high(u32 t) { return t % 16 >= 8; }

// One token's elements of one KV head, in the lanes of a warp.
//
// A lane has units, which are elements that are stored together: four dims of a row; or, in COLUMNS, where tokens of a dim are adjacent,
// the one or two dims of a byte. Lanes past the last unit repeat it.
template <class Side, bool COLUMNS> struct Token {
    static constexpr int SCHEME = Side::SCHEME, GROUPS = Side::GROUPS, BITS = Side::BITS, UNIT = !COLUMNS ? 4 : BITS == 4 ? 2 : 1;
    static constexpr int UNITS = Side::DIM / UNIT, EACH = (UNITS + 31) / 32, WIDTH = Side::GROUP_DIMS;
    static constexpr bool IS_INT4 = SCHEME == INT4, HALF_STEPS = SCHEME == ROTATED_INT4;
    static constexpr bool SHARES_BYTES = !COLUMNS && BITS == 4;  // with the token eight before or behind it
    static constexpr bool HAS_PARAMS = param_bytes(SCHEME) > 0;

    int dtype;
    bool is_pairs;
    u32 raw[EACH][UNIT];
    float x[EACH][UNIT];
    u32 code[EACH][UNIT];  // the code is in the low bits; of half steps, 8 bits of which the low four are the residual
    u32 param[EACH];       // scale, or {scale, shift}, of the unit's group

    static METHOD u32 unit(int i, int lane) { return UNITS % 32 ? (u32)min(32 * i + lane, UNITS - 1) : 32 * i + lane; }
    static METHOD u32 dim(u32 unit, int k) { return !COLUMNS ? 4 * unit + k : BITS == 4 ? unit / 8 * 16 + unit % 8 + 8 * k : unit; }
    static METHOD u32 group(u32 unit) { return GROUPS == 1 ? 0 : dim(unit, 0) / WIDTH; }

    // Issues the loads of the elements from `at` on; `base` is aligned to vectors unless the stride is odd. Elements stay as loaded, rows of
    // 16-bit elements as pairs, so that no instruction waits for the loads here.
    METHOD void load(const void* base, int type, long long stride, long long at, int lane) {
        dtype = type;
        is_pairs = !COLUMNS && dtype != 0 && stride % 4 == 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int u = unit(i, lane);
            const float* wide = (const float*)base + at;
            const u16* narrow = (const u16*)base + at;
            if (!COLUMNS && stride % 4 == 0 && dtype == 0) {
                float4 v = *(const float4*)(wide + 4 * u);
                raw[i][0] = float_bits(v.x), raw[i][1 % UNIT] = float_bits(v.y), raw[i][2 % UNIT] = float_bits(v.z), raw[i][3 % UNIT] = float_bits(v.w);
            } else if (is_pairs) {
                uint2 v = *(const uint2*)(narrow + 4 * u);
                raw[i][0] = v.x, raw[i][1 % UNIT] = v.y;
            } else {
#pragma unroll
                for (int k = 0; k < UNIT; k++) raw[i][k] = dtype == 0 ? float_bits(wide[dim(u, k)]) : narrow[dim(u, k)];
            }
        }
    }
    METHOD float element(int i, int k) const {
        u32 word = is_pairs ? raw[i][k / 2 % UNIT] : raw[i][k];
        if (dtype == 0) return bits_float(word);
        u32 half = is_pairs && k % 2 ? word >> 16 : word & 0xffff;
        return dtype == 1 ? half_float(half) : bits_float(half << 16);
    }

    // Replaces each unit's value by the reduction over all units of its group.
    template <class T, class Reduce> static METHOD void over_groups(T (&v)[EACH], T none, int lane, Reduce reduce) {
        T mine[EACH];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            T of_lane = none;
            bool first = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                T x = group(unit(i, lane)) == g ? v[i] : none;
                of_lane = first ? x : reduce.two(of_lane, x);
                first = false;
            }
            T all = reduce.warp(of_lane);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (g == 0 || group(unit(i, lane)) == g) mine[i] = all;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] = mine[i];
    }
    struct Larger {
        static METHOD int two(int a, int b) { return max(a, b); }
        static METHOD int warp(int x) { return warp_max(x); }
    };
    struct Smaller {
        static METHOD int two(int a, int b) { return min(a, b); }
        static METHOD int warp(int x) { return warp_min(x); }
    };

    METHOD void find_params(int lane) {
        int hi[EACH], lo[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float top = IS_INT4 ? x[i][0] : fabsf(x[i][0]), bottom = top;
#pragma unroll
            for (int k = 1; k < UNIT; k++) {
                top = fmaxf(top, IS_INT4 ? x[i][k] : fabsf(x[i][k]));
                bottom = fminf(bottom, x[i][k]);
            }
            hi[i] = ordered(top);
            lo[i] = ordered(bottom);
        }
        over_groups(hi, (int)0x80000000, lane, Larger());
        if (IS_INT4) over_groups(lo, 0x7fffffff, lane, Smaller());
#pragma unroll
        for (int i = 0; i < EACH; i++)
            param[i] = IS_INT4      ? int4_param(from_ordered(lo[i]), from_ordered(hi[i]))
                       : HALF_STEPS ? half_quotient<16>(from_ordered(hi[i]))
                                    : half_quotient<127>(from_ordered(hi[i]));
    }

    METHOD void widen() {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < UNIT; k++) x[i][k] = element(i, k);
    }
    // Turns `x` into the row to store, where the scheme is rotated.
    METHOD void to_stored(int lane) {
        if constexpr (is_rotated(SCHEME)) {
            rotate_stored<Side, 32, (COLUMNS ? 3 : 0)>(x, lane);
            // Lanes past the last unit repeat it.
            if constexpr (UNITS % 32 != 0)
#pragma unroll
                for (int k = 0; k < UNIT; k++) {
                    const float last = __shfl_sync(~0u, x[EACH - 1][k], (UNITS - 1) % 32);
                    if (32 * (EACH - 1) + lane >= UNITS) x[EACH - 1][k] = last;
                }
        }
    }
    // Takes a centre off the row to store; `makes`: the row is the centre's own, which is stored, too. Lanes past the last unit do what that one's does.
    METHOD void take_off(u16* centre, bool makes, int lane) {
        static_assert(!COLUMNS, "rows of K");
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            uint2* const at = (uint2*)(centre + 4 * unit(i, lane));
            uint2 c;
            if (makes) {
                c = {to_centre(x[i][0]) | to_centre(x[i][1 % UNIT]) << 16, to_centre(x[i][2 % UNIT]) | to_centre(x[i][3 % UNIT]) << 16};
                *at = c;
            } else {
                c = *at;
            }
            const u32 halves[4] = {c.x << 16, c.x & 0xffff0000, c.y << 16, c.y & 0xffff0000};
#pragma unroll
            for (int k = 0; k < UNIT; k++) x[i][k] = x[i][k] - bits_float(halves[k]);
        }
    }
    // Encodes the row to store.
    METHOD void encode(float tensor_scale, int lane) {
        if constexpr (!HAS_PARAMS) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int k = 0; k < UNIT; k++) code[i][k] = plain(x[i][k], tensor_scale);
        } else {
            find_params(lane);
            if constexpr (IS_INT4) quantize<Shifted>();
            else if constexpr (HALF_STEPS) quantize<HalfSteps>();
            else quantize<Symmetric>();
        }
    }
    template <class By> METHOD void quantize() {
        By by[EACH];
        bool near = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (GROUPS > 1 || i == 0) by[i].set(param[i]), near |= by[i].is_short(param[i]);
            else by[i] = by[0];
#pragma unroll
            for (int k = 0; k < UNIT; k++) code[i][k] = by[i].code(x[i][k], near);
        }
        if (!near) return;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int k = 0; k < UNIT; k++) code[i][k] = by[i].exact(x[i][k]);
    }
    static METHOD u32 plain(float x, float tensor_scale) {
        if (SCHEME == F16) return float_half(fminf(fmaxf(x, -LARGEST_HALF), LARGEST_HALF));
        if (SCHEME == BF16) return to_bf16(x);
        return SCHEME == FP8 ? to_fp8(x, tensor_scale) : to_tensor_int8(x, tensor_scale);
    }

    // Where four dims of a token of 4 bits lie, from d on.
    static METHOD u32 place_in_rows(u32 d, u32 t) { return (d / 16 * (PAGE / 2) + t / 16 * 8 + t % 8) * 16 + d % 16; }

    // Stores the token as token t of a page. `joined`: whether the token eight behind, whose codes of 4 bits share its bytes, is stored by this launch, too.
    METHOD void store(u8* codes, u8* params, u32 t, int lane, bool joined) const {
        store_codes<false>(codes, t, lane, joined);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 u = unit(i, lane);
            if (HAS_PARAMS && dim(u, 0) % WIDTH == 0) {
                u32 at = group(u) * PAGE + t;
                if (IS_INT4) ((u32*)params)[at] = param[i];
                else ((u16*)params)[at] = (u16)param[i];
            }
        }
    }
    // Stores the token's residuals as token t of a residual page, likewise.
    METHOD void store_residuals(u8* codes, u32 t, int lane, bool joined) const { store_codes<true>(codes, t, lane, joined); }

    template <bool RESIDUALS> METHOD void store_codes(u8* codes, u32 t, int lane, bool joined) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 u = unit(i, lane);
            if constexpr (COLUMNS) store_column<RESIDUALS>(i, u, codes, t);
            else store_row<RESIDUALS>(i, dim(u, 0), codes, t, joined);
        }
    }
    template <bool RESIDUALS> METHOD u32 stored(int i, int k) const {
        u32 c = code[i][k % UNIT];
        return !HALF_STEPS ? c : RESIDUALS ? c & 15 : c >> 4;
    }
    template <bool RESIDUALS> METHOD u32 word(int i) const {
        return low_bytes(stored<RESIDUALS>(i, 0), stored<RESIDUALS>(i, 1), stored<RESIDUALS>(i, 2), stored<RESIDUALS>(i, 3));
    }
    // Panels along the dims. Tokens t and t + 8 of 4 bits share bytes: storing token t clears the high nibbles, unless they are stored at the same time.
    template <bool RESIDUALS> METHOD void store_row(int i, u32 d, u8* out, u32 t, bool joined) const {
        if constexpr (BITS == 16) {
            uint2 both = {__byte_perm(code[i][0], code[i][1 % UNIT], 0x5410), __byte_perm(code[i][2 % UNIT], code[i][3 % UNIT], 0x5410)};
            *(uint2*)(out + (d / 8 * PAGE + t) * 16 + d % 8 * 2) = both;
        } else if constexpr (BITS == 8) {
            *(u32*)(out + (d / 16 * PAGE + t) * 16 + d % 16) = word<false>(i);
        } else {
            u32 x = word<RESIDUALS>(i), *at = (u32*)(out + place_in_rows(d, t));
            if (is_high(t)) replace_bits(at, 0x0f0f0f0f, x << 4);
            else if (joined) replace_bits(at, 0xf0f0f0f0, x);
            else *at = x;
        }
    }
    // Panels along the tokens, in slot order. Dims d and d + 8 of 4 bits share a byte.
    template <bool RESIDUALS> METHOD void store_column(int i, u32 row, u8* out, u32 t) const {
        u32 byte = BITS == 4 ? stored<RESIDUALS>(i, 0) | stored<RESIDUALS>(i, 1) << 4 : code[i][0];
        out[(t / 16 * (Side::DIM * BITS / 8) + row) * 16 + slot_of(t)] = (u8)byte;
    }
};

}  // namespace attn
