// The constants that a kernel instance is compiled for (the macros ATTN_…, set by instance.rs), and the sizes that follow from them.
#pragma once
#include "common/arithmetic.cuh"
#include "common/params.h"

constexpr int K_SCHEME = ATTN_K, V_SCHEME = ATTN_V;
constexpr int K_GROUPS = ATTN_K_GROUPS, V_GROUPS = ATTN_V_GROUPS;  // per token; 1 where the scheme has none
constexpr int K_WINDOW = ATTN_K_WINDOW, V_WINDOW = ATTN_V_WINDOW;  // tiles that a row reads with residuals; 0: none
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int PAGE = ATTN_PAGE;                // tokens; 0: strided rows
constexpr int ROW_PAGE = ATTN_ROW_PAGE;        // tokens of a page of strided rows; 0: rows of whole sequences
constexpr int ROW_GROUPS = ATTN_ROW_GROUPS;    // row groups of 8 query rows per warp
constexpr int ROW_WARPS = ATTN_ROW_WARPS;      // warps of a team: they share a ring of stages and have their own rows
// Whether the teams of low_latency.cu merge through global memory: a work item then has any number of CTAs.
#ifdef ATTN_MERGE_GLOBAL
#define ATTN_LOW_LATENCY
constexpr bool MERGES_GLOBALLY = true;
#else
constexpr bool MERGES_GLOBALLY = false;
#endif
#ifdef ATTN_LOW_LATENCY
constexpr int TILE_WARPS = 4;  // warps that share each tile: a warp has its own tokens and, for the values, its own dims
#else
constexpr int TILE_WARPS = 1;
#endif
constexpr bool SHARES_TILES = TILE_WARPS > 1;
#ifdef ATTN_MANY_ROWS
constexpr int WARPGROUPS = 2, TEAMS = WARPGROUPS / ROW_WARPS;  // of many_rows.cu: ROW_WARPS counts warpgroups there
#else
constexpr int TEAMS = SPAN;          // of split_kv.cu: a team has a segment of the span, or a tile of the segment
#endif
constexpr int STAGES = ATTN_STAGES;  // per team
constexpr bool HAS_SCORE_MODS = ATTN_SCORE_MODS;  // window, soft cap, ALiBi

// Whether split_kv.cu leaves the states of all spans in the caller's memory: its sequences are shards of longer ones (section 10 of
// docs/arithmetic.md), and other launches merge and finish.
#ifdef ATTN_SPANS
constexpr bool LEAVES_SPANS = true;
#else
constexpr bool LEAVES_SPANS = false;
#endif

// Whether teams of many_rows.cu take whole work items: a launch without partials, as launch.rs says.
#ifdef ATTN_WHOLE_ITEMS
constexpr bool WHOLE_ITEMS = true;
#else
constexpr bool WHOLE_ITEMS = false;
#endif


// Lanes that arrive on an mbarrier for their warp, after __syncwarp: one. racecheck does not see that this orders the other lanes, too, so
// .ci/gpu compiles for it with all of them; nor what bar.arrive orders, so that warpgroups take no turns then (many_rows/floats.cuh).
#ifdef ATTN_EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

#ifdef ATTN_LOW_LATENCY  // low_latency.cu: four warps of a team share its tiles, and one is the producer
constexpr int ROWS = 8 * ROW_GROUPS, WORKERS = 32 * TILE_WARPS, TEAM_THREADS = WORKERS + 32, MAX_TEAMS = 2, THREADS = MAX_TEAMS * TEAM_THREADS;
constexpr int MERGE_THREADS = WORKERS;  // threads that merge a work item's partials
#elif defined(ATTN_MANY_ROWS)  // many_rows.cu: a warpgroup of producers, and those that attend 64 rows each, or 32
constexpr int WARPGROUP_ROWS = 8 * ROW_GROUPS, ROWS = WARPGROUP_ROWS * ROW_WARPS, THREADS = 128 * (1 + WARPGROUPS), MERGE_THREADS = 128 * ROW_WARPS;
#else
constexpr int ROWS = 8 * ROW_GROUPS * ROW_WARPS;
constexpr int THREADS = 32 * ROW_WARPS * TEAMS, MERGE_THREADS = THREADS;
#endif
constexpr int WEIGHTS = TILE / 4;  // of a row group, in a lane: of the whole tile

constexpr bool integer_scheme(int s) { return s >= INT8_TOKEN; }
__host__ __device__ constexpr int code_bits(int s) { return s <= BF16 ? 16 : s <= INT8_TENSOR || s == ROTATED_INT8 ? 8 : 4; }
constexpr bool is_rotated(int s) { return s == ROTATED_INT8 || s == ROTATED_INT4; }
constexpr bool has_row_scales(int s) { return integer_scheme(s) && s != INT8_TENSOR; }
constexpr bool INTEGER = integer_scheme(K_SCHEME) && integer_scheme(V_SCHEME);
constexpr bool K_INT4 = code_bits(K_SCHEME) == 4, V_INT4 = code_bits(V_SCHEME) == 4;
constexpr bool K_SHIFTS = K_SCHEME == INT4, V_SHIFTS = V_SCHEME == INT4;              // a shift beside each scale
constexpr bool K_HALF_STEPS = K_SCHEME == ROTATED_INT4, V_HALF_STEPS = V_SCHEME == ROTATED_INT4;  // codes count half steps
constexpr bool K_ROTATED = is_rotated(K_SCHEME), V_ROTATED = is_rotated(V_SCHEME);
constexpr bool V_TOKEN_MAJOR = PAGE == 0 && code_bits(V_SCHEME) == 8;  // V's bytes lie along the dims and are turned on their way

#ifdef ATTN_MANY_ROWS
constexpr int LEAST_BLOCK = TILE;  // products read tiles as pages of 64 tokens have them
// Codes of 4 bits are turned into bytes, and those of fp8 into f16, by the producers' warps, which then are the readers of their stages.
constexpr bool UNPACKS = K_INT4 || V_INT4 || K_SCHEME == FP8;
static_assert(!UNPACKS || (K_INT4 && V_INT4) || K_SCHEME == V_SCHEME, "of both sides, or of none");
// Whether pages may be those of dequantize.cu, of which some have been written with residuals, too.
constexpr bool MAY_BE_DEQUANTIZED = K_SCHEME == F16 && PAGE == TILE;
constexpr int UNPACKERS = 4 / TEAMS, READERS = UNPACKS ? UNPACKERS : 4 * ROW_WARPS;  // warps of a team
constexpr bool COPIER_READS = false;
constexpr bool PRODUCTS_READ_STAGES = !UNPACKS;  // as the copy engine does, by another way than a thread's
// Tiles of floats that a warpgroup attends at once: two where both warpgroups have the same ones and multiply while others weigh, else one, as a ring has half of the
// stages then, and of many dims, which leave registers for one. Where codes are turned, shared memory is what binds: one, and products read queries from registers. Not of 64 dims: there ptxas (13.0) puts weights into the
// registers of queries, as many as they are, while both are needed; .ci/kernels looks for that.
constexpr int FLOAT_STEP = INTEGER || UNPACKS || TEAMS > 1 || HEAD_DIM > 128 || !ATTN_BULK ? 1 : 2;
constexpr bool QUERIES_IN_REGISTERS = !INTEGER && UNPACKS && HEAD_DIM > 64;
constexpr bool TWO_PARTS = !INTEGER && !UNPACKS;  // whether f32 queries may be the sum of two floats; one is finer than any code
constexpr int UNPACKED_STAGES = !UNPACKS ? 0 : INTEGER ? 2 : 8 / TEAMS;
constexpr int UNPACKED_PARAMS = TILE * HEAD_DIM * (INTEGER ? 1 : 2), UNPACKED_STAGE = UNPACKED_PARAMS + (INTEGER ? TILE * 8 : 0);
#else
constexpr int LEAST_BLOCK = 16;
constexpr bool MAY_BE_DEQUANTIZED = false;
constexpr int READERS = SHARES_TILES ? TILE_WARPS : ROW_WARPS;  // warps that read a stage
constexpr bool COPIER_READS = READERS == 1;                     // the warp that copies is the one that reads
constexpr bool PRODUCTS_READ_STAGES = false;
#endif

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int TABLE_PAGE = PAGE ? PAGE : ROW_PAGE;      // tokens of an entry of the page table; 0: there is none
constexpr int SAFE_PAGE = TABLE_PAGE ? TABLE_PAGE : 1;  // for code that is compiled, but never runs, without pages
constexpr int BLOCK = PAGE == 0 ? TILE : smaller(larger(PAGE, LEAST_BLOCK), TILE);  // tokens that lie together in a stage
__host__ __device__ constexpr int params_bytes(int s, int groups, int tokens) {
    return s == INT8_TOKEN || s == INT8_GROUP || is_rotated(s) ? groups * tokens * 2 : s == INT4 ? groups * tokens * 4 : 0;
}
__host__ __device__ constexpr int codes_bytes(int s, int tokens) { return tokens * HEAD_DIM * code_bits(s) / 8; }
constexpr int K_CODES = codes_bytes(K_SCHEME, BLOCK), V_CODES = codes_bytes(V_SCHEME, BLOCK);
constexpr int PARAMS = PAGE ? 1 : 2;  // of someone else's rows, a scale comes in the four bytes in which it lies
constexpr int K_BYTES_OF_BLOCK = K_CODES + PARAMS * params_bytes(K_SCHEME, K_GROUPS, BLOCK);
constexpr int V_BYTES_OF_BLOCK = V_CODES + PARAMS * params_bytes(V_SCHEME, V_GROUPS, BLOCK);
constexpr int BLOCKS = TILE / BLOCK;
// Entries of the page table for a tile, and tiles of an entry: one of them is 1.
constexpr int ENTRIES = TABLE_PAGE == 0 || TABLE_PAGE > TILE ? 1 : TILE / TABLE_PAGE, TILES_OF_PAGE = TABLE_PAGE > TILE ? TABLE_PAGE / TILE : 1;
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

constexpr int PANELS = HEAD_DIM / 16;  // of 16 dims

// A stage has the K or the V of a tile, or both where they are small: half the copies and waits.
constexpr bool KV_ONE_STAGE = PAGE != 0 && (K_BYTES_OF_BLOCK + V_BYTES_OF_BLOCK) * BLOCKS <= 12288;
constexpr int K_STRIDE = K_BYTES_OF_BLOCK + (KV_ONE_STAGE ? V_BYTES_OF_BLOCK : 0), V_STRIDE = V_BYTES_OF_BLOCK + (KV_ONE_STAGE ? K_BYTES_OF_BLOCK : 0);  // from block to block
constexpr int CODES_BYTES = larger(K_STRIDE, V_STRIDE) * BLOCKS;
constexpr int STAGE_BYTES = (CODES_BYTES + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;

// Residuals of a tile that some row reads with them: behind their side's codes where the stage has room, else in the next stage. Other tiles
// have none.
constexpr int WINDOW = larger(K_WINDOW, V_WINDOW);
constexpr int RESIDUALS = BLOCK * HEAD_DIM / 2, RESIDUALS_OF_PAGE = PAGE * HEAD_DIM / 2;  // bytes of a side, in a block and in a page
constexpr int K_RESIDUALS = K_WINDOW ? RESIDUALS : 0, V_RESIDUALS = V_WINDOW ? RESIDUALS : 0;
constexpr bool K_RESIDUALS_APART = K_WINDOW && (KV_ONE_STAGE || (K_BYTES_OF_BLOCK + RESIDUALS) * BLOCKS > CODES_BYTES);
constexpr bool V_RESIDUALS_APART = V_WINDOW && (KV_ONE_STAGE || (V_BYTES_OF_BLOCK + RESIDUALS) * BLOCKS > CODES_BYTES);
static_assert(STAGES >= 2 || !(K_RESIDUALS_APART || V_RESIDUALS_APART), "codes and residuals are read together");
// Where K and V are in one stage, their residuals are in one, too, block after block.
constexpr int RESIDUAL_STRIDE = KV_ONE_STAGE ? K_RESIDUALS + V_RESIDUALS : RESIDUALS;

constexpr int STATE_STRIDE = HEAD_DIM + 4;  // floats; 4 keeps the rows that a warp stores at once in different banks
constexpr int CURSOR_BYTES = 64;
