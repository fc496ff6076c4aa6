// What producers of many_rows.cu turn the codes of a tile into, from one place of shared memory to another: nibbles into bytes, or codes of all kinds into f16.
#pragma once
#include "kv_pipeline.cuh"

// ---- to bytes ----

// Nibbles of a side's tile to bytes: eight rows of 16 low nibbles, then those of the high ones. Half steps are 16 times as large. `thread`: of
// the team's unpackers.
template <bool IS_SIXTEENFOLD> DEVICE void unpack_nibbles(u32 from, u32 to, int thread) {
#pragma unroll 2
    for (int i = thread; i < TILE * HEAD_DIM / 32; i += 32 * UNPACKERS) {
        float4 x = lds128(from + i * 16);
        u32 words[4] = {float_bits(x.x), float_bits(x.y), float_bits(x.z), float_bits(x.w)};
        float low[4], high[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            low[n] = bits_float(IS_SIXTEENFOLD ? words[n] << 4 & 0xf0f0f0f0 : words[n] & 0x0f0f0f0f);
            high[n] = bits_float(IS_SIXTEENFOLD ? words[n] & 0xf0f0f0f0 : words[n] >> 4 & 0x0f0f0f0f);
        }
        u32 row = to + (i / 8 * 16 + i % 8) * 16;
        sts128(row, {low[0], low[1], low[2], low[3]});
        sts128(row + 128, {high[0], high[1], high[2], high[3]});
    }
}
// A side's parameters as floats: of half steps the scale of a sixteenth, of plain codes the scale and the shift.
template <int SCHEME> DEVICE void unpack_params(u32 from, u32 to, int thread) {
    SideParams<SCHEME, RowScales> params = {from, 0, {}};
    for (int t = thread; t < TILE; t += 32 * UNPACKERS) {
        if constexpr (SCHEME == INT4) {
            float2 x = params.scale_shift(0, t);
            sts64(to + t * 8, x.x, x.y);
        } else {
            sts32(to + t * 4, float_bits(params.scale(0, t) * RESIDUAL_STEP));
        }
    }
}
// ---- to f16 ----

// The f16 parameters of a row of 16 codes: of K a token's, of V those of eight pairs of tokens, in slot order.
template <int SCHEME, bool IS_V> struct F16Params {
    u32 scale[IS_V ? 8 : 1], shift[IS_V ? 8 : 1];

    // `t`: the token, or the first of 16.
    __device__ __forceinline__ void load(u32 params, int t) {
        if constexpr (SCHEME == INT4) {
#pragma unroll
            for (int i = 0; i < (IS_V ? 8 : 1); i++) {
                uint2 x = IS_V ? lds64(params + (t + 2 * i) * 4) : uint2{lds32(params + t * 4), 0};
                if (!IS_V) x.y = x.x;
                scale[i] = __byte_perm(x.x, x.y, 0x5410);
                shift[i] = f16_fma(__byte_perm(x.x, x.y, 0x7632), 0x20002000, MINUS_ZEROS);  // of 2^-7, which F16_UNIT makes up for
            }
        } else if constexpr (has_row_scales(SCHEME) && IS_V) {
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                float4 x = lds128(params + (t + 2 * i) * 2);
                scale[i] = float_bits(x.x);
                scale[i + 1] = float_bits(x.y);
                scale[i + 2] = float_bits(x.z);
                scale[i + 3] = float_bits(x.w);
            }
        } else if constexpr (has_row_scales(SCHEME)) {
            scale[0] = lds16(params + t * 2) * 0x10001u;
        }
    }
    // A pair of codes times its scales, and with its shifts.
    __device__ __forceinline__ u32 apply(u32 codes, int pair) const {
        if constexpr (SCHEME == INT4) return f16_fma(codes, scale[IS_V ? pair : 0], shift[IS_V ? pair : 0]);
        else if constexpr (has_row_scales(SCHEME)) return f16_fma(codes, scale[IS_V ? pair : 0], MINUS_ZEROS);
        else return codes;
    }
    static constexpr u32 MINUS_ZEROS = 0x80008000;
};

// Four codes to two pairs of f16, exactly: those of fp8 as they are, others in 2^-7 of their scale. Half steps come 16 times as large, with residuals where IS_FINE.
template <int SCHEME, bool IS_FINE> DEVICE void code_pairs(u32 x, u32& low, u32& high) {
    if constexpr (SCHEME == FP8) {
        e4m3_pairs(x, low, high);
    } else if constexpr (code_bits(SCHEME) == 8) {
        byte_pairs<128, 0x4800>(x ^ 0x80808080, low, high);
    } else if constexpr (SCHEME == INT4) {
        byte_pairs<0, 0x4800>(x, low, high);
    } else if constexpr (!IS_FINE) {
        byte_pairs<120, 0x3c00>(x, low, high);
    } else {
        byte_pairs<0, 0x3c00>(x, low, high);
        constexpr u32 ONES = 0x3c003c00, BIAS = 0xaff8aff8;  // 127.5 · 2^-10, negative
        low = f16_fma(low, ONES, BIAS);
        high = f16_fma(high, ONES, BIAS);
    }
}

// Rows of 16 codes that a thread turns into f16, COUNT of them. A row lies along the dims (K) or along the tokens in slot order (V) and becomes two of eight
// elements, ROWS rows apart; a row of nibbles becomes those of the low ones and, eight rows behind, of the high ones.
template <int SCHEME, bool IS_V, bool IS_FINE, bool ALL_EXIST, int COUNT> struct CodeRows {
    static constexpr int NIBBLES = code_bits(SCHEME) == 4 ? 2 : 1, ROWS = IS_V ? HEAD_DIM : TILE, BATCH = COUNT < 4 ? COUNT : 4;
    u32 from, residuals, to;     // of the first
    u32 from_stride, to_stride;  // from one to the next
    int count;                   // of those that exist
    int first_token, tokens;     // of V: of the row, and of those that exist from the tile's first on

    __device__ __forceinline__ void widen(const F16Params<SCHEME, IS_V> (&params)[IS_V ? 1 : NIBBLES]) const {
#pragma unroll
        for (int n = 0; n < COUNT; n += BATCH) {
            float4 codes[BATCH], fine[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                codes[i] = lds128(from + (n + i) * from_stride);
                if (IS_FINE) fine[i] = lds128(residuals + (n + i) * from_stride);
            }
#pragma unroll
            for (int i = 0; i < BATCH && n + i < COUNT; i++)
                if (n + i < count)
#pragma unroll
                    for (int nibble = 0; nibble < NIBBLES; nibble++)
                        widen_row(codes[i], fine[i], nibble, params[IS_V ? 0 : nibble], to + (n + i) * to_stride + nibble * 128);
        }
    }
    __device__ __forceinline__ void widen_row(const float4& codes, const float4& fine, int nibble, const F16Params<SCHEME, IS_V>& params, u32 at) const {
        u32 words[4] = {float_bits(codes.x), float_bits(codes.y), float_bits(codes.z), float_bits(codes.w)}, pairs[2][4];
        u32 steps[4] = {float_bits(fine.x), float_bits(fine.y), float_bits(fine.z), float_bits(fine.w)};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 word = words[n];
            if (SCHEME == ROTATED_INT4) word = (nibble == 0 ? word << 4 : word) & 0xf0f0f0f0;
            else if (NIBBLES == 2) word = (nibble == 0 ? word : word >> 4) & 0x0f0f0f0f;
            if (IS_FINE) word |= (nibble == 0 ? steps[n] : steps[n] >> 4) & 0x0f0f0f0f;
            code_pairs<SCHEME, IS_FINE>(word, pairs[0][n], pairs[1][n]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32& pair = pairs[half][n];
                pair = params.apply(pair, 4 * half + n);
                // Of V, tokens that do not exist get zeros: their bytes may be a NaN, and 0·NaN is not 0.
                if (!ALL_EXIST) pair = cached(pair, first_token + 8 * half + 2 * n, tokens);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32(&x)[4] = pairs[half];
            sts128(at + half * ROWS * 16, {bits_float(x[0]), bits_float(x[1]), bits_float(x[2]), bits_float(x[3])});
        }
    }
};
DEVICE int row_of_nibbles(int row) { return row / 8 * 16 + row % 8; }  // of low ones

// K of a tile, and its residuals or 0, to f16: a thread has one token, or two that share bytes.
template <bool IS_FINE> DEVICE void widen_keys(u32 from, u32 residuals, u32 to, int thread) {
    constexpr int NIBBLES = K_INT4 ? 2 : 1, IN_PANEL = TILE / NIBBLES, AT_ONCE = 32 * UNPACKERS / IN_PANEL;  // panels
    int row = thread % IN_PANEL, token = K_INT4 ? row_of_nibbles(row) : row, panel = thread / IN_PANEL;
    F16Params<K_SCHEME, false> params[NIBBLES];
#pragma unroll
    for (int nibble = 0; nibble < NIBBLES; nibble++) params[nibble].load(from + K_CODES, token + 8 * nibble);
    CodeRows<K_SCHEME, false, IS_FINE, true, (PANELS + AT_ONCE - 1) / AT_ONCE> rows = {
        from + thread * 16, residuals + thread * 16, to + (panel * 2 * TILE + token) * 16, 32 * UNPACKERS * 16, AT_ONCE * 2 * TILE * 16};
    rows.count = PANELS % AT_ONCE == 0 ? PANELS : (PANELS - panel + AT_ONCE - 1) / AT_ONCE;
    rows.widen(params);
}
// V likewise: a warp has 16 tokens after the other, in all dims.
template <bool IS_FINE, bool ALL_EXIST> DEVICE void widen_values(u32 from, u32 residuals, u32 to, int tokens, int thread) {
    constexpr int NIBBLES = V_INT4 ? 2 : 1, IN_PANEL = HEAD_DIM / NIBBLES, COUNT = (IN_PANEL + 31) / 32;
    int lane = thread % 32, dim = V_INT4 ? row_of_nibbles(lane) : lane;
#pragma unroll 1
    for (int panel = thread / 32; panel < TILE / 16; panel += UNPACKERS) {
        F16Params<V_SCHEME, true> params[1];
        params[0].load(from + V_CODES, 16 * panel);
        u32 first = (panel * IN_PANEL + lane) * 16;
        CodeRows<V_SCHEME, true, IS_FINE, ALL_EXIST, COUNT> rows = {from + first, residuals + first, to + (panel * 2 * HEAD_DIM + dim) * 16, 32 * 16, 32 * NIBBLES * 16};
        rows.count = IN_PANEL % 32 == 0 ? COUNT : (IN_PANEL - lane + 31) / 32;
        rows.first_token = 16 * panel;
        rows.tokens = tokens;
        rows.widen(params);
    }
}
// A side of a tile of so many tokens, with its residuals if there are any.
template <bool IS_V> DEVICE void unpack_side(u32 from, u32 residuals, u32 to, int tokens, int thread) {
    constexpr int SCHEME = IS_V ? V_SCHEME : K_SCHEME;
    constexpr bool HAS_RESIDUALS = (IS_V ? V_WINDOW : K_WINDOW) != 0;
    if constexpr (INTEGER) {
        unpack_nibbles<SCHEME == ROTATED_INT4>(from, to, thread);
        unpack_params<SCHEME>(from + (IS_V ? V_CODES : K_CODES), to + UNPACKED_PARAMS, thread);
    } else if constexpr (!IS_V) {
        HAS_RESIDUALS && residuals ? widen_keys<HAS_RESIDUALS>(from, residuals, to, thread) : widen_keys<false>(from, 0, to, thread);
    } else if (HAS_RESIDUALS && residuals) {
        widen_values<HAS_RESIDUALS, false>(from, residuals, to, tokens, thread);
    } else {
        tokens < TILE ? widen_values<false, false>(from, 0, to, tokens, thread) : widen_values<false, true>(from, 0, to, tokens, thread);
    }
}
