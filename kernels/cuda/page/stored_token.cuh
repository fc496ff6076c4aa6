// Tokens of pages as floats, turned back where their scheme is rotated: what export.cu and dequantize.cu read. `convert::dequantize` of attn-core.
//
// A CTA has a tile of a KV head, each of its four warps 16 of the tokens. Two or 4 lanes of a warp share a token: 16-byte panels are loaded whole, and most
// butterflies of the rotation are inside a lane, two in an instruction while numbers are whole and small.
#pragma once
#include "common/dtype.cuh"
#include "common/tile.cuh"
#include "page/token.cuh"

namespace attn {

constexpr int WARPS = 4, WARP_TOKENS = TILE / WARPS;
constexpr int TOKEN_LANES = larger(K_DIM, V_DIM) > 64 ? 4 : 2;  // lanes of a token
template <class Side> constexpr int LANE_PANELS = (Side::PANELS + TOKEN_LANES - 1) / TOKEN_LANES;  // panels of 16 dims of a lane

DEVICE float of_fp8(u32 code) { return bits_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f; }

// Codes of a side that lies along the tokens, of one block, turned: those of a token side by side. A warp's, in shared memory.
template <int DIM, int BITS> struct TurnedBlock {
    // Rows in a page, a byte for each token's slot, by four; the stride lets eight lanes read two tokens' 64 bytes at once.
    static constexpr int QUADS = DIM * BITS / 32, STRIDE = (QUADS + 15) / 32 * 32 + 16;

    alignas(16) u32 words[WARP_TOKENS][STRIDE];

    // Bytes 0 to 3 of four words, each in a word of its own.
    static METHOD void turn(u32 (&x)[4]) {
        const u32 low[2] = {__byte_perm(x[0], x[1], 0x5140), __byte_perm(x[2], x[3], 0x5140)},
                  high[2] = {__byte_perm(x[0], x[1], 0x7362), __byte_perm(x[2], x[3], 0x7362)};
        x[0] = __byte_perm(low[0], low[1], 0x5410), x[1] = __byte_perm(low[0], low[1], 0x7632);
        x[2] = __byte_perm(high[0], high[1], 0x5410), x[3] = __byte_perm(high[0], high[1], 0x7632);
    }
    // A lane's rows, as they lie in a page: of the block that begins with its token t.
    static constexpr int TIMES = (QUADS + 31) / 32;
    struct Rows {
        uint4 row[TIMES][4];
    };
    static METHOD Rows load(const u8* codes, u32 t, int lane) {
        const uint4* const from = (const uint4*)codes + t / WARP_TOKENS * (QUADS * 4);
        Rows rows = {};
#pragma unroll
        for (int n = 0; n < TIMES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (32 * n + lane < QUADS) rows.row[n][i] = from[4 * (32 * n + lane) + i];
        return rows;
    }
    METHOD const u8* fill(const Rows& rows, int lane) {
        __syncwarp();  // what was here has been read
#pragma unroll
        for (int n = 0; n < TIMES; n++)
#pragma unroll
            for (int slots = 0; slots < 4; slots++) {
                u32 x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint4& row = rows.row[n][i];
                    x[i] = slots == 0 ? row.x : slots == 1 ? row.y : slots == 2 ? row.z : row.w;
                }
                turn(x);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (32 * n + lane < QUADS) words[4 * slots + i][32 * n + lane] = x[i];
            }
        __syncwarp();
        return (const u8*)words;
    }
};
// The same for a side that lies by tokens in a page: it is read from there.
template <int DIM> struct TurnedBlock<DIM, 16> {
    typedef const u8* Rows;
    static METHOD Rows load(const u8* codes, u32, int) { return codes; }
    METHOD const u8* fill(Rows codes, int) { return codes; }
};

// The codes of one token in 16 dims, as loaded. COLUMNS: from a turned block.
template <class Side, bool COLUMNS> struct PanelCodes {
    typedef Token<Side, COLUMNS> Layout;
    static constexpr int BITS = Side::BITS, WORDS = COLUMNS ? BITS / 2 : BITS == 16 ? 8 : 4;

    u32 word[WORDS];

    METHOD void load(const u8* codes, u32 t, u32 panel) {
        if constexpr (COLUMNS) {
            const u8* const from = codes + (slot_of(t) * TurnedBlock<Side::DIM, BITS>::STRIDE + panel * WORDS) * 4;
            if constexpr (BITS == 8) {
                const uint4 x = *(const uint4*)from;
                word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
            } else {
                const uint2 x = *(const uint2*)from;
                word[0] = x.x, word[1] = x.y;
            }
        } else {
            const u8* const from = codes + (BITS == 16  ? (2 * panel * PAGE + t) * 16
                                            : BITS == 8 ? (panel * PAGE + t) * 16
                                                        : Layout::place_in_rows(16 * panel, t));
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 x = *(const uint4*)(from + i / 4 * (PAGE * 16));
                word[i] = x.x, word[i + 1] = x.y, word[i + 2] = x.z, word[i + 3] = x.w;
            }
        }
    }
    // That of the panel's dim e, in token t.
    METHOD u32 code(int e, u32 t) const {
        if (COLUMNS && BITS == 4) return word[e % 8 / 4] >> e % 4 * 8 >> e / 8 * 4 & 15;
        if (BITS == 16) return word[e / 2 % WORDS] >> e % 2 * 16 & 0xffff;
        return BITS == 8 ? word[e / 4 % WORDS] >> e % 4 * 8 & 255 : word[e / 4 % WORDS] >> e % 4 * 8 >> (is_high(t) ? 4 : 0) & 15;
    }
    // Those of dims 4 * quad to 4 * quad + 3, each in a byte: as they are, or of 4 bits 16 times as much.
    METHOD u32 quad(int quad, u32 t) const {
        if constexpr (BITS == 8) return word[quad];
        else return (COLUMNS ? quad < 2 ? word[quad] << 4 : word[quad - 2] : is_high(t) ? word[quad] : word[quad] << 4) & 0xf0f0f0f0;
    }
};

// ---- butterflies: of two floats, and of two pairs of f16 ----

struct F16Pair {
    u32 halves;
};
constexpr u32 ONES = 0x3c003c00, TWOS = 0x40004000, MINUS = 0x80008000;

DEVICE void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}
DEVICE void butterfly(F16Pair& a, F16Pair& b) {
    const u32 sum = f16_fma(a.halves, ONES, b.halves);
    b.halves = f16_fma(b.halves, ONES ^ MINUS, a.halves);
    a.halves = sum;
}
// With the lane whose number has another bit `mask`.
DEVICE float butterfly_of_lanes(float own, int mask, bool is_upper) { return fmaf(own, is_upper ? -1.0f : 1.0f, __shfl_xor_sync(~0u, own, mask)); }
DEVICE F16Pair butterfly_of_lanes(F16Pair own, int mask, bool is_upper) {
    return {f16_fma(own.halves, is_upper ? ONES ^ MINUS : ONES, __shfl_xor_sync(~0u, own.halves, mask))};
}

// One side of a token of one KV head: x[j][e] is that of dim 16 * panel(j) + e.
template <class Side, bool COLUMNS> struct StoredToken {
    typedef Token<Side, COLUMNS> Layout;
    static constexpr int SCHEME = Side::SCHEME, PANELS = Side::PANELS, LANE_PANELS = attn::LANE_PANELS<Side>, ROTATED_BLOCK = Side::ROTATED_BLOCK;
    static constexpr int WIDTH = Layout::WIDTH, PARAMS = WIDTH % 16 == 0 ? 1 : 4;  // dims of a group; groups that a panel may lie in, by four dims
    static_assert(WIDTH % 4 == 0, "four dims are of one group");

    float x[LANE_PANELS][16];
    int part;  // the lane's place among those that share the token

    METHOD u32 panel(int j) const { return PANELS % TOKEN_LANES ? min(TOKEN_LANES * j + part, PANELS - 1) : TOKEN_LANES * j + part; }

    // What turning back multiplies by in the end; parameters are multiplied by it, which are fewer.
    static constexpr float TURNED_BY = !is_rotated(SCHEME) ? 1.0f : 1.0f / (1 << Side::BACK_HALVINGS);

    // `by`: a power of two.
    static METHOD float value(u32 code, u32 param, float tensor_scale, float by) {
        const float scale = half_float(param & 0xffff) * by;
        if (SCHEME == F16) return half_float(code);
        if (SCHEME == BF16) return bits_float(code << 16);
        if (SCHEME == FP8) return of_fp8(code) * tensor_scale;
        if (SCHEME == INT4) return whole(code, 0.0f) * scale + half_float(param >> 16) * by;
        return whole(code ^ 0x80, 128.0f) * (SCHEME == INT8_TENSOR ? tensor_scale : scale);
    }

    // A small number less another one, both whole: without a conversion, of which a processor does few at a time.
    static METHOD float whole(u32 number, float less) { return bits_float(0x4b000000 | number) - (8388608.0f + less); }
    // `codes` and `residuals` of columns: turned blocks. `residuals` is null where the row is read without. UNIT: what numbers count, a power of two; 1 where a scheme has no parameters.
    template <int UNIT = 1> METHOD void load(const u8* codes, const u8* params, const u8* residuals, u32 t, float tensor_scale) {
        static_assert(UNIT == 1 || Layout::HAS_PARAMS, "parameters carry the unit");
        constexpr float BY = TURNED_BY / UNIT;
        PanelCodes<Side, COLUMNS> stored[LANE_PANELS];
        u32 param[LANE_PANELS][PARAMS] = {};
#pragma unroll
        for (int j = 0; j < LANE_PANELS; j++) {
            stored[j].load(codes, t, panel(j));
#pragma unroll
            for (int n = 0; n < PARAMS && Layout::HAS_PARAMS; n++) {
                const u32 at = (16 * panel(j) + 4 * n) / WIDTH * PAGE + t;
                param[j][n] = Layout::IS_INT4 ? ((const u32*)params)[at] : ((const u16*)params)[at];
            }
        }
        if constexpr (is_rotated(SCHEME)) {
            F16Pair pair[LANE_PANELS][8];
            if (Layout::HALF_STEPS && residuals) {
                PanelCodes<Side, COLUMNS> fine[LANE_PANELS];
#pragma unroll
                for (int j = 0; j < LANE_PANELS; j++) fine[j].load(residuals, t, panel(j));
#pragma unroll
                for (int j = 0; j < LANE_PANELS; j++)
#pragma unroll
                    for (int i = 0; i < 8; i += 2) {
                        u32 &low = pair[j][i].halves, &high = pair[j][i + 1].halves;
                        byte_pairs<128>(stored[j].quad(i / 2, t) | fine[j].quad(i / 2, t) >> 4, low, high);
                        low = f16_fma(low, TWOS, ONES), high = f16_fma(high, TWOS, ONES);  // 2 (16 code + residual) - 255
                    }
                turn_back_pairs<8>(pair, param, 0.0625f * BY);
            } else {
#pragma unroll
                for (int j = 0; j < LANE_PANELS; j++)
#pragma unroll
                    for (int i = 0; i < 8; i += 2) {
                        const u32 quad = stored[j].quad(i / 2, t);
                        if (Layout::HALF_STEPS) byte_pairs<120>(quad, pair[j][i].halves, pair[j][i + 1].halves);  // 8 (2 code - 15)
                        else byte_pairs<128>(quad ^ 0x80808080, pair[j][i].halves, pair[j][i + 1].halves);
                    }
                turn_back_pairs<Layout::HALF_STEPS ? OF_ONE_SCALE : 16>(pair, param, Layout::HALF_STEPS ? 0.125f * BY : BY);
            }
        } else {
#pragma unroll
            for (int j = 0; j < LANE_PANELS; j++)
#pragma unroll
                for (int e = 0; e < 16; e++) x[j][e] = value(stored[j].code(e, t), param[j][e / 4 % PARAMS], tensor_scale, BY);
        }
    }

    // The codes of a rotated row are whole numbers, and at least this many neighbours share one scale: their sums are scaled instead of the
    // elements. f16 holds sums up to 2048 exactly, and even ones up to 4096; callers know for how many neighbours (PAIRED) that suffices: coarse half steps, whose sums are even, for 256. The
    // products are exact, too, so the bits are those of scaling each element.
    static constexpr int OF_ONE_SCALE = smaller(smaller(WIDTH & -WIDTH, ROTATED_BLOCK), 256);
    template <int PAIRED> METHOD void turn_back_pairs(F16Pair (&pair)[LANE_PANELS][8], const u32 (&param)[LANE_PANELS][PARAMS], float by) {
        static_assert(PAIRED <= OF_ONE_SCALE, "numbers of several scales cannot be added up before");
        turn_back<1, PAIRED>(pair);
#pragma unroll
        for (int j = 0; j < LANE_PANELS; j++) {
            const float scale = half_float(param[j][0] & 0xffff) * by;
#pragma unroll
            for (int e = 0; e < 16; e++) x[j][e] = half_float(e % 2 ? pair[j][e / 2].halves >> 16 : pair[j][e / 2].halves & 0xffff) * scale;
        }
        turn_back<PAIRED, ROTATED_BLOCK>(x);
    }
    // As `rotate_back`: one bit of the dims after another, those from BEGIN to END. x[j] has a panel's dims, or pairs of them.
    template <int BEGIN, int END, class T, int N> METHOD void turn_back(T (&x)[LANE_PANELS][N]) const {
        constexpr int IN_ONE = 16 / N;
#pragma unroll
        for (int stride = BEGIN; stride < END; stride *= 2)
#pragma unroll
            for (int j = 0; j < LANE_PANELS; j++)
#pragma unroll
                for (int e = 0; e < N; e++) {
                    const int of_panels = stride / 16, of_lane = of_panels / TOKEN_LANES, apart = stride / IN_ONE;
                    if (stride < IN_ONE) {
                        if constexpr (IN_ONE == 2) x[j][e].halves = f16_butterfly(x[j][e].halves);
                    } else if (stride < 16) {
                        if (!(e & apart)) butterfly(x[j][e], x[j][(e | apart) % N]);
                    } else if (of_panels < TOKEN_LANES) {
                        x[j][e] = butterfly_of_lanes(x[j][e], of_panels, part & of_panels);
                    } else if (!(j & of_lane)) {
                        butterfly(x[j][e], x[(j | of_lane) % LANE_PANELS][e]);
                    }
                }
    }
};

}  // namespace attn
