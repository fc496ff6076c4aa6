// The producers of many_rows.cu convert the codes of a tile from one place of shared memory to another: nibbles to bytes, or fp8 to f16. Bytes beside nibbles are copied.
#pragma once
#include "attend/pipeline.cuh"
#include "common/arithmetic.cuh"

namespace attn {

// ---- to bytes ----

// Nibbles of a side's tile to bytes: eight rows of 16 low nibbles, then those of the high ones. Of half steps the signed bytes 8 (2 code - 15). `thread`: of the
// team's unpackers.
template <bool ARE_HALF_STEPS> DEVICE void unpack_nibbles(u32 from, u32 to, int thread) {
#pragma unroll 2
    for (int i = thread; i < TILE * K_DIM / 32; i += 32 * Config::UNPACKERS) {
        float4 x = lds128(from + i * 16);
        u32 words[4] = {float_bits(x.x), float_bits(x.y), float_bits(x.z), float_bits(x.w)};
        float low[4], high[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            low[n] = bits_float(ARE_HALF_STEPS ? (words[n] << 4 & 0xf0f0f0f0) ^ 0x88888888 : words[n] & 0x0f0f0f0f);
            high[n] = bits_float(ARE_HALF_STEPS ? (words[n] & 0xf0f0f0f0) ^ 0x88888888 : words[n] >> 4 & 0x0f0f0f0f);
        }
        u32 row = to + (i / 8 * 16 + i % 8) * 16;
        sts128(row, {low[0], low[1], low[2], low[3]});
        sts128(row + 128, {high[0], high[1], high[2], high[3]});
    }
}
// A side's parameters as floats: of half steps the scale of a sixteenth, of K of an eighth, which is that of a byte; of plain codes the scale and the shift. V's scales come on the grid.
template <bool IS_V, int SCHEME> DEVICE void unpack_params(u32 from, u32 to, int thread) {
    SideParams<SCHEME, RowScales> params = {from, 0, {}};
    for (int t = thread; t < TILE; t += 32 * Config::UNPACKERS) {
        if constexpr (SCHEME == INT4) {
            float2 x = params.scale_shift(0, t);
            sts64(to + t * 8, IS_V ? grid_scale(x.x) : x.x, x.y);
        } else {
            float scale = params.scale(0, t);
            sts32(to + t * 4, float_bits(IS_V ? grid_scale(scale) * RESIDUAL_STEP : scale * (2.0f * RESIDUAL_STEP)));
        }
    }
}
// Rows of 16 bytes as they are.
DEVICE void copy_rows(u32 from, u32 to, int rows, int thread) {
#pragma unroll 2
    for (int i = thread; i < rows; i += 32 * Config::UNPACKERS) sts128(to + i * 16, lds128(from + i * 16));
}
// A side of a tile, with its parameters.
template <bool IS_V> DEVICE void unpack_side(u32 from, u32 to, int thread) {
    constexpr int SCHEME = IS_V ? Values::SCHEME : Keys::SCHEME;
    const u32 params = from + (IS_V ? Stage::V_CODES : Stage::K_CODES), to_params = to + Config::UNPACKED_PARAMS;
    if constexpr (code_bits(SCHEME) == 4) {
        unpack_nibbles<SCHEME == ROTATED_INT4>(from, to, thread);
        unpack_params<IS_V, SCHEME>(params, to_params, thread);
    } else {
        copy_rows(from, to, TILE * K_DIM / 16, thread);
        copy_rows(params, to_params, TILE * param_bytes(SCHEME) / 16, thread);
    }
}

// ---- fp8 to f16 ----

// Rows of 16 codes that a thread turns into f16, COUNT of them. Each becomes two of eight elements: pairs of codes by turns, which are neighbouring tokens of V in pages,
// and dims of K in the order in which a lane has a query's (load_row); or, in V's rows and where rows are wide, IN_ORDER.
enum class CodesOf { K, V_PAGE, V_ROWS };
template <CodesOf OF, bool ALL_EXIST, int COUNT> struct CodeRows {
    static constexpr bool IN_ORDER = OF == CodesOf::V_ROWS;
    static constexpr int ROWS = OF == CodesOf::V_PAGE ? Config::PART_DIMS : TILE, BATCH = COUNT < 4 ? COUNT : 4;
    u32 to, to_stride;  // where the first comes, and from one to the next
    int count;  // of those that exist
    int first_token, tokens;  // along the tokens: of the row, and of those that exist from the tile's first on

    // from(n): where the n-th lies.
    template <class From> METHOD void widen(From from) const {
#pragma unroll
        for (int n = 0; n < COUNT; n += BATCH) {
            float4 codes[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) codes[i] = lds128(from(n + i));
#pragma unroll
            for (int i = 0; i < BATCH && n + i < COUNT; i++)
                if (n + i < count) widen_row(codes[i], to + (n + i) * to_stride);
        }
    }
    METHOD void widen_row(const float4& codes, u32 at) const {
        u32 words[4] = {float_bits(codes.x), float_bits(codes.y), float_bits(codes.z), float_bits(codes.w)}, pairs[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (IN_ORDER) e4m3_pairs(words[n], pairs[n / 2][n % 2 * 2], pairs[n / 2][n % 2 * 2 + 1]);
            else e4m3_pairs(words[n], pairs[0][n], pairs[1][n]);
#pragma unroll
            for (int half = 0; half < 2; half++)
                // Of V, tokens that do not exist get zeros: their bytes may be a NaN, and 0·NaN is not 0.
                if (!ALL_EXIST) pairs[half][n] = cached(pairs[half][n], first_token + 8 * half + 2 * n, tokens);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32(&x)[4] = pairs[half];
            sts128(at + half * ROWS * 16, {bits_float(x[0]), bits_float(x[1]), bits_float(x[2]), bits_float(x[3])});
        }
    }
};

// A side of a tile that lies along the dims: K, or V in rows, whose tokens behind the last repeat it. A thread has one token.
template <CodesOf OF> DEVICE void widen_by_dims(u32 from, u32 to, int thread) {
    constexpr int AT_ONCE = 32 * Config::UNPACKERS / TILE;  // panels
    int token = thread % TILE, panel = thread / TILE;
    CodeRows<OF, true, (Keys::PANELS + AT_ONCE - 1) / AT_ONCE> rows = {to + (panel * 2 * TILE + token) * 16, AT_ONCE * 2 * TILE * 16};
    rows.count = Keys::PANELS % AT_ONCE == 0 ? Keys::PANELS : (Keys::PANELS - panel + AT_ONCE - 1) / AT_ONCE;
    rows.widen([&](int n) {
        if constexpr (PAGE == 0) return chunk_at<Stage::K_SWIZZLE>(from, 0, min(panel + n * AT_ONCE, Keys::PANELS - 1), token);
        return from + (thread + n * 32 * Config::UNPACKERS) * 16;
    });
}
// V of a tile of so many tokens in a page: a warp has 16 tokens after the other, in all dims.
template <bool ALL_EXIST> DEVICE void widen_values(u32 from, u32 to, int tokens, int thread) {
    constexpr int COUNT = (K_DIM + 31) / 32;
    int lane = thread % 32;
#pragma unroll 1
    for (int panel = thread / 32; panel < TILE / 16; panel += Config::UNPACKERS) {
        CodeRows<CodesOf::V_PAGE, ALL_EXIST, COUNT> rows = {to + (panel * 2 * K_DIM + lane) * 16, 32 * 16};
        rows.count = COUNT;
        rows.first_token = 16 * panel;
        rows.tokens = tokens;
        rows.widen([&](int n) { return from + (panel * K_DIM + lane + n * 32) * 16; });
    }
}
// Of wide rows: ROWS rows of 16 codes, some at once, as each load takes longer than the others' stores. place(i): where the i-th comes.
template <int ROWS, class Rows, class Place> DEVICE void widen_part(u32 from, int thread, const Rows& rows, Place place) {
    constexpr int AT_ONCE = 4, STEP = 32 * Config::UNPACKERS;
#pragma unroll 1
    for (int first = thread; first < ROWS; first += AT_ONCE * STEP) {
        float4 codes[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) codes[n] = lds128(from + min(first + n * STEP, ROWS - 1) * 16);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (first + n * STEP < ROWS) rows(first + n * STEP).widen_row(codes[n], place(first + n * STEP));
    }
}
// A part of a tile's K, or of latents.
DEVICE void widen_part_of_keys(u32 from, u32 to, int thread) {
    auto rows = [](int) { return CodeRows<CodesOf::V_ROWS, true, 1>{}; };
    widen_part<K_DIM / 16 / Config::K_PARTS * TILE>(from, thread, rows, [&](int i) { return to + (i / TILE * TILE + i) * 16; });
}
// The same of V, of which so many tokens exist.
template <bool ALL_EXIST> DEVICE void widen_part_of_values(u32 from, u32 to, int tokens, int thread) {
    constexpr int DIMS = Config::PART_DIMS;
    auto rows = [&](int i) { return CodeRows<CodesOf::V_PAGE, ALL_EXIST, 1>{0, 0, 1, 16 * (i / DIMS), tokens}; };
    widen_part<DIMS*(TILE / 16)>(from, thread, rows, [&](int i) { return to + (i / DIMS * DIMS + i) * 16; });
}
DEVICE void widen_values(u32 from, u32 to, int tokens, int thread) {
    tokens < TILE ? widen_values<false>(from, to, tokens, thread) : widen_values<true>(from, to, tokens, thread);
}

}  // namespace attn
