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

// A row of 16 codes becomes two of eight f16: pairs of codes by turns, which are neighbouring tokens of V in pages, and dims of K in the order in which a lane has a query's
// (load_row); or, in V's rows and where rows are wide, IN_ORDER.
enum class CodesOf { K, V_PAGE, ROWS_IN_ORDER };
template <CodesOf OF, bool ALL_EXIST> struct CodeRow {
    static constexpr int ROWS = OF == CodesOf::V_PAGE ? Config::PART_DIMS : TILE;  // from its first half to its second one
    int first_token, tokens;  // along the tokens: of the row, and of those that exist from the tile's first on

    METHOD void widen(const float4& codes, u32 at) const {
        u32 words[4] = {float_bits(codes.x), float_bits(codes.y), float_bits(codes.z), float_bits(codes.w)}, pairs[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (OF == CodesOf::ROWS_IN_ORDER) e4m3_pairs(words[n], pairs[n / 2][n % 2 * 2], pairs[n / 2][n % 2 * 2 + 1]);
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

// COUNT rows of codes, some at once, as each load takes longer than the others' stores. from(i), row(i), place(i): where the i-th lies, what it is, and where it comes.
template <u32 COUNT, class From, class Row, class Place> DEVICE void widen_rows(u32 thread, From from, Row row, Place place) {
    constexpr u32 STEP = 32 * Config::UNPACKERS, ROWS = (COUNT + STEP - 1) / STEP, AT_ONCE = ROWS < 4 ? ROWS : 4;
    constexpr u32 UNROLLED = Config::TEAMS == 1 || Config::PRODUCERS > 1 ? 4 : 1;  // of two teams and one warpgroup, more takes registers that those that attend need
    const auto exists = [&](u32 n) { return n < ROWS && (COUNT % STEP == 0 || n + 1 < ROWS || thread + n * STEP < COUNT); };
#pragma unroll UNROLLED
    for (u32 first = 0; first < ROWS; first += AT_ONCE) {
        float4 codes[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++)
            if (exists(first + n)) codes[n] = lds128(from(thread + (first + n) * STEP));
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++)
            if (exists(first + n)) row(thread + (first + n) * STEP).widen(codes[n], place(thread + (first + n) * STEP));
    }
}
// A side of a tile that lies along the dims, or a part of it: K, latents, or V in rows, whose tokens behind the last repeat it.
template <CodesOf OF> DEVICE void widen_by_dims(u32 from, u32 to, int thread) {
    widen_rows<K_DIM / 16 / Config::K_PARTS * TILE>(
        thread, [&](u32 i) { return PAGE == 0 ? chunk_at<Stage::K_SWIZZLE>(from, 0, i / TILE, i % TILE) : from + i * 16; },
        [](u32) { return CodeRow<OF, true>{}; }, [&](u32 i) { return to + (i / TILE * TILE + i) * 16; });
}
// V of a tile in a page, or a part of it, of which so many tokens exist.
template <bool ALL_EXIST> DEVICE void widen_by_tokens(u32 from, u32 to, int tokens, int thread) {
    constexpr int DIMS = Config::PART_DIMS;
    widen_rows<DIMS*(TILE / 16)>(
        thread, [&](u32 i) { return from + i * 16; }, [&](u32 i) { return CodeRow<CodesOf::V_PAGE, ALL_EXIST>{16 * (i / DIMS), tokens}; },
        [&](u32 i) { return to + (i / DIMS * DIMS + i) * 16; });
}
DEVICE void widen_by_tokens(u32 from, u32 to, int tokens, int thread) {
    tokens < TILE ? widen_by_tokens<false>(from, to, tokens, thread) : widen_by_tokens<true>(from, to, tokens, thread);
}

}  // namespace attn
