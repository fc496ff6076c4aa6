// Shared memory of a CTA of many_rows.cu, as split_kv/shared_memory.cuh.
#pragma once
#include "attend/stage.cuh"

namespace attn {

constexpr int QUEUE_SLOTS = 4, SCHEDULER_BYTES = QUEUE_SLOTS * 20;
constexpr int QUERY_BYTES = 64 * K_DIM * (INTEGER ? 1 : Config::QUERIES_IN_REGISTERS ? 0 : 2);   // of 64 rows
constexpr int ROW_SETS = Config::IS_WIDE ? 1 : Config::WARPGROUPS * Config::ROW_BUFFERS;          // of 64 rows each
constexpr int LOADED_BYTES = 328, LOADED_ROWS = Config::LOADS_AHEAD ? ROW_SETS : 0;  // of a LoadedRows (many_rows/loaded_rows.cuh), of which each set has one

// Of wide rows: what the weights of a span leave for its values, tile after tile.
struct SpanMemory {
    static constexpr int TILES = 1 << SPAN_SHIFT;
    enum : int {
        WEIGHTS = 0,  // bytes of weights [TILES][2][128 threads][4 words], as left operands
        EXPONENTS = WEIGHTS + TILES * 64 * TILE,  // float [SPAN][64 rows][4 tiles]: exponents, then the factors of the state that a tile folds into
        STEPS = EXPONENTS + TILES * 64 * 4,  // float [SPAN][64][4]: the steps of weights, then the units of products with V
        SUMS = STEPS + TILES * 64 * 4,  // float [SPAN][64][4]: then, at rows 0 and 32, whether a segment's state is rescaled for one of 32 rows
        SEGMENTS = SUMS + TILES * 64 * 4,  // float2 [SPAN][64]: exponents and sums of segments; while rows are loaded, their steps and bases
        ROWS = SEGMENTS + SPAN * 64 * 8,  // float2 [64]: those of finished rows
        BYTES = ROWS + 64 * 8
    };
};

constexpr int STATE_BYTES =
    INTEGER ? +SpanMemory::BYTES : 64 * 8;  // of wide rows; of floats float [2][64 rows]: powers of two that queries were multiplied by, then maxima by warpgroups

struct SharedMemory {
    // clang-format off: a table
    enum : int {
        STAGES_AT = 0,                                                                              // u8 [TEAMS][STAGES][Stage::BYTES]
        UNPACKED_AT = STAGES_AT + (Config::WIDENS_PAGES ? 0 : Config::TEAMS * Config::STAGES * Stage::BYTES),  // u8 [TEAMS][UNPACKED_STAGES][UNPACKED_BYTES]
        QUERIES = UNPACKED_AT + Config::TEAMS * Config::UNPACKED_STAGES * Config::UNPACKED_BYTES,   // [WARPGROUPS][ROW_BUFFERS][panels of 16 bytes][64 rows]: s8, or the first parts of floats
        STATES = QUERIES + ROW_SETS * QUERY_BYTES,                                                  // of integers: float4 [WARPGROUPS][V_DIM / 8][128 threads]: O of a span; wide: SpanMemory
        THRESHOLDS = STATES + (Config::IS_WIDE ? STATE_BYTES : INTEGER ? Config::WARPGROUPS * 64 * V_DIM * 4 : 0),  // of integers: float [TILE]
        SCALES = THRESHOLDS + (INTEGER ? TILE * 4 : 0),                                             // of values in bytes: float [WARPGROUPS][4 warps][TILE]
        BARRIERS = SCALES + (INTEGER && !Values::HAS_NIBBLES ? Config::WARPGROUPS * 4 * TILE * 4 : 0),  // u64 [TEAMS][2][STAGES], then [TEAMS][2][UNPACKED_STAGES]: full, empty
        COPIED = BARRIERS + Config::TEAMS * (Config::STAGES + Config::UNPACKED_STAGES) * 16,        // of latents: u64 [STAGES][2], one of which is unused
        LOADED = COPIED + (Config::TURNERS ? Config::STAGES * 16 : 0),                              // LoadedRows [WARPGROUPS][ROW_BUFFERS]
        LOADED_BARRIERS = LOADED + LOADED_ROWS * LOADED_BYTES,                                      // u64 [WARPGROUPS][2][ROW_BUFFERS]: full, empty
        SUMS = LOADED_BARRIERS + LOADED_ROWS * 16,                                                  // u32 [THREADS / 32]
        ARRIVALS_AT = SUMS + 64,                                                                    // Arrival [TEAMS]
        NOWHERE = ARRIVALS_AT + 16 * Config::TEAMS,
        SCHEDULERS = NOWHERE + 16,                                                                  // SpanRangeScheduler [TEAMS], or of each ItemQueueScheduler its barriers, then items
        BYTES = SCHEDULERS + Config::TEAMS * SCHEDULER_BYTES
    };
    // clang-format on
};

extern "C" __device__ const int attn_shared_bytes = SharedMemory::BYTES;
extern "C" __device__ const int attn_threads = Config::THREADS;

}  // namespace attn
