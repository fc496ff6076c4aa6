// A stage: the place in shared memory for K, V or both of a tile, and how their bytes lie there.
//
// Tokens of a page lie in a stage as in the page, block after block. Strided rows lie as the copy engine puts them there.
#pragma once
#include "attend/config.cuh"

namespace attn {

// The page table, for pages and for pages of rows.
struct PageTable {
    static constexpr int ENTRY_TOKENS = PAGE ? PAGE : ROW_PAGE;                 // 0: there is no table
    static constexpr int SAFE_ENTRY_TOKENS = ENTRY_TOKENS ? ENTRY_TOKENS : 1;  // for code that is compiled, but never runs, without a table
    // Entries of a tile, and tiles of an entry: one of them is 1.
    static constexpr int ENTRIES = ENTRY_TOKENS == 0 || ENTRY_TOKENS > TILE ? 1 : TILE / ENTRY_TOKENS;
    static constexpr int TILES = ENTRY_TOKENS > TILE ? ENTRY_TOKENS / TILE : 1;
};

// The bytes that the copy engine's swizzle spans where rows have so many.
constexpr int swizzle_of(int row_bytes) { return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : row_bytes % 32 == 0 ? 32 : 16; }

struct Stage {
    static constexpr int BLOCK = PAGE == 0 ? TILE : smaller(larger(PAGE, Config::LEAST_BLOCK), TILE);  // tokens that lie together
    static constexpr int BLOCKS = TILE / BLOCK;

    // Bytes of a block: codes, and these with their parameters. Of someone else's rows, a scale comes in the four bytes in which it lies.
    static constexpr int K_CODES = Keys::codes(BLOCK), V_CODES = Values::codes(BLOCK);
    static constexpr int PARAM_WORDS = PAGE ? 1 : 2;
    static constexpr int K_BLOCK_BYTES = K_CODES + PARAM_WORDS * Keys::params(BLOCK);
    static constexpr int V_BLOCK_BYTES = LATENTS ? 0 : V_CODES + PARAM_WORDS * Values::params(BLOCK);  // latents: K's are V's
    static constexpr int V_PARAMS = LATENTS ? K_CODES : V_CODES;                                       // behind V's codes

    // Whether a stage has K and V of a tile, where they are small: half the copies and waits; or the same. Else it has one of them.
    static constexpr bool HOLDS_BOTH = PAGE != 0 && (LATENTS || (K_BLOCK_BYTES + V_BLOCK_BYTES) * BLOCKS <= 12288);
    // From block to block.
    static constexpr int K_STRIDE = K_BLOCK_BYTES + (HOLDS_BOTH ? V_BLOCK_BYTES : 0);
    static constexpr int V_STRIDE = V_BLOCK_BYTES + (HOLDS_BOTH ? K_BLOCK_BYTES : 0);
    static constexpr int CODES_BYTES = larger(K_STRIDE, V_STRIDE) * BLOCKS;
    static constexpr int ALIGN = PAGE ? 128 : 1024;  // the swizzle goes by address
    // Of a part of a tile's K, the last of which has the parameters of both sides behind it, and of its V.
    static constexpr int K_PART = K_CODES / Config::K_PARTS, V_PART = Config::V_STAGES == 0 ? 0 : V_CODES / larger(Config::V_STAGES, 1);
    static constexpr int WIDE_PARAMS = Keys::params(BLOCK) + (LATENTS ? 0 : Values::params(BLOCK)), WIDE_BYTES = larger(K_PART + WIDE_PARAMS, V_PART);
    static constexpr int BYTES = ((Config::IS_WIDE ? WIDE_BYTES : CODES_BYTES) + ALIGN - 1) / ALIGN * ALIGN;
    static_assert(!Config::IS_WIDE || (BLOCKS == 1 && (LATENTS || !HOLDS_BOTH)), "many_rows/config.cuh");

    // Residuals of a tile that some row reads with them: behind their side's codes where the stage has room, else in the next stage. Other tiles
    // have none.
    static constexpr int K_RESIDUALS = Keys::residuals(BLOCK), V_RESIDUALS = Values::residuals(BLOCK);
    static constexpr bool K_RESIDUALS_APART = Keys::WINDOW && (HOLDS_BOTH || (K_BLOCK_BYTES + K_RESIDUALS) * BLOCKS > CODES_BYTES);
    static constexpr bool V_RESIDUALS_APART = Values::WINDOW && (HOLDS_BOTH || (V_BLOCK_BYTES + V_RESIDUALS) * BLOCKS > CODES_BYTES);
    static_assert(Config::STAGES >= 2 || !(K_RESIDUALS_APART || V_RESIDUALS_APART), "codes and residuals are read together");
    // From block to block. Where K and V are in one stage, their residuals are in one, too, block after block.
    static constexpr int K_RESIDUAL_STRIDE = HOLDS_BOTH ? K_RESIDUALS + V_RESIDUALS : K_RESIDUALS;
    static constexpr int V_RESIDUAL_STRIDE = HOLDS_BOTH ? K_RESIDUALS + V_RESIDUALS : V_RESIDUALS;

    // Strided rows lie side by side as far as the swizzle reaches, so many bytes of each, the 16-byte chunks of neighbouring rows in different
    // banks; the rest of each row behind them.
    static constexpr int K_SWIZZLE = swizzle_of(Keys::codes(1)), V_SWIZZLE = swizzle_of(Values::codes(1));
    static constexpr bool V_TOKEN_MAJOR = Values::BITS == 8 && (LATENTS || PAGE == 0);  // V's bytes lie along the dims and are turned on their way
};

// Where token t of a tile lies; avoids a division that the compiler cannot prove away.
DEVICE int block_of(int t) { return Stage::BLOCKS == 1 ? 0 : t / Stage::BLOCK; }
DEVICE int in_block(int t) { return Stage::BLOCKS == 1 ? t : t % Stage::BLOCK; }

// Where chunk `fixed + more` of a token's row lies; rows of 16 bytes are panels. What the compiler knows of the chunk, `fixed`, costs
// one instruction: no bit of it and of `more` is the same, and a stage's address leaves the swizzle's bits alone.
template <int SWIZZLE> DEVICE u32 chunk_at(u32 stage, int fixed, int more, int t) {
    constexpr int CHUNKS = SWIZZLE / 16;
    u32 row = stage + (more / CHUNKS * TILE + t) * SWIZZLE + (more % CHUNKS ^ t * SWIZZLE / 128 % CHUNKS) * 16;
    return (row ^ fixed % CHUNKS * 16) + fixed / CHUNKS * TILE * SWIZZLE;
}

// ---- a tile in its stages ----

// Codes or residuals of a side's tile.
struct Codes {
    u32 at;
    int stride;  // from block to block
};

// `residuals` says whether those are there.
struct StagedTile {
    Codes k, v, k_residuals, v_residuals;
    bool residuals;
};

// A residual's step, in scales.
constexpr float RESIDUAL_STEP = 0.0625f;

// The f16 parameters of a side's tile: `rows(at, group, t)` is where the scale of a strided row lies in the stage.
template <int SCHEME, class Rows> struct SideParams {
    u32 at;      // of the tile's first block's
    int stride;  // from block to block
    Rows rows;

    METHOD u32 place(int group, int t, int bytes) const { return at + block_of(t) * stride + (group * Stage::BLOCK + in_block(t)) * bytes; }
    METHOD float scale(int group, int t) const { return half_float(lds16(PAGE == 0 ? rows(at, group, t) : place(group, t, 2))); }
    // The scale, and the shift that goes with centred codes (`INT4`).
    METHOD float2 scale_shift(int group, int t) const {
        u32 x = lds32(place(group, t, 4));
        float scale = half_float(x & 0xffff);
        return make_float2(scale, fmaf(8.0f, scale, half_float(x >> 16)));
    }
};

// A scale, or a shift, of a token that exists; else a number in the place of what lies there, which may be a NaN, and 0·NaN is not 0.
DEVICE float finite_scale(float x) { return fminf(fabsf(x), 0x1p20f); }
DEVICE float finite(float x) { return fminf(fmaxf(x, -0x1p20f), 0x1p20f); }
// A pair of 16-bit elements of tokens t and t + 1, with 0 for a token beyond the sequence, for the same reason.
DEVICE u32 cached(u32 pair, int t, int tokens) { return t + 1 < tokens ? pair : t < tokens ? pair & 0xffff : 0; }

}  // namespace attn
