// What one kernel instance is specialised for (-HEAD_DIM ATTN_…), and the sizes that follow from it.
#pragma once
#include "arithmetic.cuh"
#include "params.h"

constexpr int K_SCHEME = ATTN_K, V_SCHEME = ATTN_V;
constexpr int K_GROUPS = ATTN_K_GROUPS, V_GROUPS = ATTN_V_GROUPS;  // per token; 1 where the scheme has none
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int PAGE = ATTN_PAGE;      // tokens; 0: strided rows
constexpr int ROW_GROUPS = ATTN_ROW_GROUPS;            // row groups of 8 query rows per warp
constexpr int ROW_WARPS = ATTN_ROW_WARPS;          // warps of a team: they share a ring of stages and have their own rows
// Whether the teams of low_latency.cu merge through global memory: a work item then has any number of CTAs.
#ifdef ATTN_MERGE_GLOBAL
#define ATTN_LOW_LATENCY
constexpr bool MERGES_GLOBALLY = true;
#else
constexpr bool MERGES_GLOBALLY = false;
#endif
#ifdef ATTN_LOW_LATENCY
constexpr int TILE_WARPS = 4;                // warps that share each tile: a warp has its own tokens and, for the values, its own dims
#else
constexpr int TILE_WARPS = 1;
#endif
constexpr bool SHARES_TILES = TILE_WARPS > 1;
constexpr int TEAMS = SPAN;          // of split_kv.cu: a team has a segment of the span, or a tile of the segment
constexpr int STAGES = ATTN_STAGES;  // per team
constexpr bool HAS_SCORE_MODS = ATTN_SCORE_MODS;   // window, soft cap, ALiBi

// Lanes that arrive on an mbarrier for their warp, after __syncwarp: one. racecheck does not see that this orders the other lanes, too, so
// .ci/gpu compiles for it with all of them.
#ifdef ATTN_EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

#ifdef ATTN_MANY_ROWS  // many_rows.cu: no teams; all warps share the tiles, and two more feed them
constexpr int ROWS = 8 * ROW_WARPS, THREADS = 32 * (ROW_WARPS + 2);
#elif defined(ATTN_LOW_LATENCY)  // low_latency.cu: the warps of a team share its tiles, and one more feeds them
constexpr int ROWS = 8 * ROW_GROUPS, WORKERS = 32 * TILE_WARPS, TEAM_THREADS = WORKERS + 32, MAX_TEAMS = 2, THREADS = MAX_TEAMS * TEAM_THREADS;
constexpr int MERGE_THREADS = WORKERS;  // threads that merge a work item's partials
#else
constexpr int ROWS = 8 * ROW_GROUPS * ROW_WARPS;
constexpr int THREADS = 32 * ROW_WARPS * TEAMS, MERGE_THREADS = THREADS;
#endif
constexpr int READERS = SHARES_TILES ? TILE_WARPS : ROW_WARPS;  // warps that read a stage
// A warp's part of a tile.
constexpr int TOKENS = TILE / TILE_WARPS, DIMS = HEAD_DIM / TILE_WARPS, SCORES = TOKENS / 4;  // scores: of a row, in a lane

constexpr bool integer_scheme(int s) { return s >= INT8_TOKEN; }
__host__ __device__ constexpr int code_bits(int s) { return s <= BF16 ? 16 : s <= INT8_TENSOR ? 8 : 4; }
constexpr bool INTEGER = integer_scheme(K_SCHEME) && integer_scheme(V_SCHEME);
constexpr bool K_INT4 = code_bits(K_SCHEME) == 4, V_INT4 = code_bits(V_SCHEME) == 4;
constexpr bool K_FLOAT = !integer_scheme(K_SCHEME), V_FLOAT = !integer_scheme(V_SCHEME);
constexpr bool V_TOKEN_MAJOR = PAGE == 0 && code_bits(V_SCHEME) == 8;  // V's bytes lie along the dims and are turned on their way
constexpr bool K_PER_CHANNEL = K_SCHEME == INT4_CHANNEL;

constexpr int SAFE_PAGE = PAGE ? PAGE : 1;  // for code that is compiled, but never runs, without pages
constexpr int BLOCK = PAGE == 0 || PAGE > TILE ? TILE : PAGE;  // tokens that lie together in a stage
__host__ __device__ constexpr int params_bytes(int s, int groups, int tokens) {
    return s == INT8_TOKEN || s == INT8_GROUP ? groups * tokens * 2
         : s == INT4_GROUPS ? groups * tokens * 4
         : s == INT4_CHANNEL ? HEAD_DIM * 4 : 0;
}
__host__ __device__ constexpr int codes_bytes(int s, int tokens) { return tokens * HEAD_DIM * code_bits(s) / 8; }
constexpr int K_CODES = codes_bytes(K_SCHEME, BLOCK), V_CODES = codes_bytes(V_SCHEME, BLOCK);
constexpr int PARAMS = PAGE ? 1 : 2;  // of someone else's rows, a scale comes in the four bytes in which it lies
constexpr int K_BYTES_OF_BLOCK = K_CODES + PARAMS * params_bytes(K_SCHEME, K_GROUPS, BLOCK);
constexpr int V_BYTES_OF_BLOCK = V_CODES + PARAMS * params_bytes(V_SCHEME, V_GROUPS, BLOCK);
constexpr int BLOCKS = TILE / BLOCK, TILES_OF_PAGE = PAGE > TILE ? PAGE / TILE : 1;
// Where token t of a tile lies; avoids a division that the compiler cannot prove away.
DEVICE int block_of(int t) { return BLOCKS == 1 ? 0 : t / BLOCK; }
DEVICE int in_block(int t) { return BLOCKS == 1 ? t : t % BLOCK; }

// Strided rows lie in a stage as the copy engine puts them there: side by side as far as its swizzle reaches, so many bytes
// of each, the 16-byte chunks of neighbouring rows in different banks; the rest of each row behind them.
__host__ __device__ constexpr int swizzle_of(int scheme) {
    int row = HEAD_DIM * code_bits(scheme) / 8;
    return row % 128 == 0 ? 128 : row % 64 == 0 ? 64 : row % 32 == 0 ? 32 : 16;
}
constexpr int K_SWIZZLE = swizzle_of(K_SCHEME), V_SWIZZLE = swizzle_of(V_SCHEME);
constexpr int STAGE_ALIGN = PAGE ? 128 : 1024;  // the swizzle goes by address
// Where chunk `fixed + more` of a token's row lies; rows of 16 bytes are panels. What the compiler knows of the chunk, `fixed`, costs
// one instruction: no bit of it and of `more` is the same, and a stage's address leaves the swizzle's bits alone.
template <int SWIZZLE> DEVICE u32 chunk_at(u32 stage, int fixed, int more, int t) {
    constexpr int CHUNKS = SWIZZLE / 16;
    u32 row = stage + (more / CHUNKS * TILE + t) * SWIZZLE + (more % CHUNKS ^ t * SWIZZLE / 128 % CHUNKS) * 16;
    return (row ^ fixed % CHUNKS * 16) + fixed / CHUNKS * TILE * SWIZZLE;
}

// The run of one KV head in a page.
constexpr int RUN_V = codes_bytes(K_SCHEME, PAGE) + params_bytes(K_SCHEME, K_GROUPS, PAGE);
constexpr int RUN_BYTES = RUN_V + codes_bytes(V_SCHEME, PAGE) + params_bytes(V_SCHEME, V_GROUPS, PAGE);

constexpr int PANELS = HEAD_DIM / 16;                // of 16 dims (8-bit codes)
constexpr int FOURS = (PANELS + 3) / 4;       // of panels
constexpr int TAIL_PANELS = (PANELS + 1) / 2;  // an open page's int8 K comes in two stages

constexpr int larger(int a, int b) { return a > b ? a : b; }
// A stage has the K or the V of a tile, or both where they are small: half the copies and waits. An open page's K comes in two
// stages, of which the second then has the V, too.
constexpr bool KV_ONE_STAGE = PAGE != 0 && (K_BYTES_OF_BLOCK + V_BYTES_OF_BLOCK) * BLOCKS <= 12288;
constexpr int K_STRIDE = K_BYTES_OF_BLOCK + (KV_ONE_STAGE ? V_BYTES_OF_BLOCK : 0), V_STRIDE = V_BYTES_OF_BLOCK + (KV_ONE_STAGE ? K_BYTES_OF_BLOCK : 0);  // from block to block
constexpr int TAIL_FIRST = TAIL_PANELS * TILE * 16, TAIL_SECOND = (PANELS - TAIL_PANELS) * TILE * 16 + TILE * 2;
constexpr int STAGE_BYTES =
    (larger(larger(K_STRIDE, V_STRIDE) * BLOCKS, K_PER_CHANNEL ? larger(TAIL_FIRST, TAIL_SECOND + (KV_ONE_STAGE ? V_BYTES_OF_BLOCK : 0)) : 0) + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;

// A warp's scratch: parameters of the tile's K, then of its V, converted once. Of channels: {scale}[HEAD_DIM], {shift}[HEAD_DIM], and
// the largest scale of every word (channel.cuh).
constexpr int PAGE_SHIFTS = HEAD_DIM * 4, PAGE_LARGEST = 2 * HEAD_DIM * 4;
constexpr int SCRATCH_K = K_PER_CHANNEL ? PAGE_LARGEST + FOURS * 64 : K_INT4 ? K_GROUPS * TILE * 8 : K_GROUPS * TILE * 4;
constexpr int SCRATCH_V = V_GROUPS * TILE * 4 + (V_INT4 ? V_GROUPS * TILE * 2 : 0);
constexpr int SCRATCH_BYTES = larger(SCRATCH_K, SCRATCH_V);

constexpr int STATE_STRIDE = HEAD_DIM + 8;        // floats; 8 keeps the rows of a quad group in different banks
constexpr int QUERY_BYTES = K_PER_CHANNEL ? ROWS / 8 * (PANELS + FOURS) * 512 : 0;
constexpr int CURSOR_BYTES = 64;
