// What an instance of many_rows.cu is compiled for: warpgroups of producers, and those that attend 64 rows each, or 32, or the same 64.
#pragma once
#include "attend/kernel_defaults.cuh"

namespace attn {

struct ManyRowsConfig : KernelDefaults {
    static constexpr int TEAM_WARPGROUPS = ATTN_ROW_WARPS;  // of a team: they share a ring of stages, and have their own rows unless these are wide
    static constexpr int WARPGROUPS = larger(2, TEAM_WARPGROUPS);  // that attend
    static constexpr int TEAMS = WARPGROUPS / TEAM_WARPGROUPS;
    static constexpr int ROWS = 8 * ATTN_ROW_GROUPS * TEAM_WARPGROUPS;  // query rows of a work item

    // Whether rows are wide: dims are too many for a warpgroup to hold the products and two states of 64 rows, or those of K and V are unlike; or latents. The warpgroups of
    // a team then have the same rows, each a share of V's dims: of integers they go through it part after part (many_rows/wide_integers.cuh), of floats they have it
    // at once (many_rows/wide_floats.cuh).
    static constexpr bool IS_WIDE = INTEGER ? K_DIM != V_DIM || V_DIM > 128 || LATENTS : larger(K_DIM, V_DIM) > 256;
    static constexpr bool LEAVES_EACH_SPAN = INTEGER && IS_WIDE;  // as a partial, where work items are not whole: a merge at the end waits for its loads once
    static constexpr int TURNERS = INTEGER && IS_WIDE && LATENTS ? 3 : 0;  // warps of the producers that turn latents into values
    static_assert(!IS_WIDE || TEAM_WARPGROUPS == WARPGROUPS, "select.rs");
    static constexpr int WARPGROUP_ROWS = IS_WIDE ? ROWS : ROWS / TEAM_WARPGROUPS;
    // Parts of dims, each of a tile in a stage of its own: those of K, those of V that a warpgroup goes through, and those of V that are copied. Products of floats read
    // latents as values where they lie as keys.
    static constexpr int K_PARTS = !IS_WIDE ? 1 : INTEGER ? (K_DIM > 320 ? 2 : 1) : !LATENTS && K_DIM > 256 ? 2 : 1;
    static constexpr int V_PARTS = INTEGER && IS_WIDE && V_DIM > 256 ? 2 : 1, V_STAGES = INTEGER || !IS_WIDE ? V_PARTS : LATENTS ? 0 : WARPGROUPS;
    static constexpr int PART_DIMS = V_DIM / V_PARTS / (IS_WIDE ? WARPGROUPS : 1);  // dims of V that a warpgroup has at once
    static constexpr bool HAS_ROOM_FOR_WEIGHTS = ATTN_BULK && K_DIM - V_DIM >= TILE;  // in a tile of latents: its rotary keys', once they are read
    static constexpr int PRODUCERS = ATTN_PRODUCERS;  // warpgroups that copy tiles and unpack codes
    static constexpr int THREADS = 128 * (PRODUCERS + WARPGROUPS);
    static constexpr int MERGE_THREADS = 128 * TEAM_WARPGROUPS;  // threads that merge a work item's partials
    static constexpr int LEAST_BLOCK = TILE;  // products read tiles as pages of 64 tokens have them
    static constexpr int SLICES = 32;
    static constexpr int SHARED_PARTIALS = 2;
    static constexpr bool MAY_BE_DEQUANTIZED = Keys::SCHEME == F16 && PAGE == TILE;
    // Whether teams take whole work items: a launch without partials, as launch.rs says.
#ifdef ATTN_WHOLE_ITEMS
    static constexpr bool WHOLE_ITEMS = true;
#else
    static constexpr bool WHOLE_ITEMS = false;
#endif

    // Whether codes of 4 bits are turned into bytes, and those of fp8 into f16, by the producers' warps, which then are the readers of their stages. Bytes of the other side
    // than that of 4 bits are copied: products read both from one ring.
    static constexpr bool UNPACKS = Keys::HAS_NIBBLES || Values::HAS_NIBBLES || Keys::SCHEME == FP8;
    static_assert(!UNPACKS || INTEGER || Keys::SCHEME == Values::SCHEME, "of both sides, or of none");
    // Whether the warps that turn fp8 into f16 read it from pages: latents in pairs of tiles as f16 leave no room for stages of codes.
    static constexpr bool WIDENS_PAGES = IS_WIDE && LATENTS && Keys::SCHEME == FP8 && HAS_ROOM_FOR_WEIGHTS;
    // Whether a warp of the team copies and does nothing else: tiles would wait to be unpacked behind the copies of a new work item's, which are many at once. A team with
    // two warps needs both.
    static constexpr bool COPIES_APART = 4 * PRODUCERS / TEAMS > 2 && !WIDENS_PAGES;
    static constexpr int UNPACKERS = 4 * PRODUCERS / TEAMS - COPIES_APART;  // warps of a team
    static constexpr int READERS = UNPACKS ? UNPACKERS : 4 * TEAM_WARPGROUPS;  // warps that read a stage
    static constexpr bool COPIER_READS = false;
    static constexpr bool PRODUCTS_READ_STAGES = !UNPACKS;
    // Of wide rows a stage has a part; latents of many dims leave room for one tile.
    static constexpr int UNPACKED_STAGES = !UNPACKS       ? 0
                                           : WIDENS_PAGES ? STAGES
                                           : IS_WIDE      ? (LATENTS && K_DIM > 320 ? 1 : 3)
                                                          : (INTEGER ? (ATTN_BULK ? 10 : 4) : 8) / TEAMS;
    static constexpr int UNPACKED_PARAMS = TILE * K_DIM * (INTEGER ? 1 : 2);  // where parameters begin in an unpacked stage
    static constexpr int UNPACKED_BYTES =
        IS_WIDE ? TILE * 2 * larger(K_DIM / K_PARTS, LATENTS ? 0 : PART_DIMS) : UNPACKED_PARAMS + (INTEGER ? TILE * 8 : 0);  // of an unpacked stage

    // Whether products read queries from registers: where codes are turned, and shared memory is what binds. Not of 64 dims: there ptxas (13.0) puts weights into the registers
    // of queries, as many as they are, while both are needed; .ci/kernels looks for that.
    static constexpr bool QUERIES_IN_REGISTERS = !INTEGER && UNPACKS && K_DIM > 64 && !IS_WIDE;
    static constexpr bool TWO_PARTS = !INTEGER && !UNPACKS;  // whether f32 queries may be the sum of two floats; one is finer than any code

    // Whether warps of the producers load the query rows of a work item while the one before it is attended (many_rows/loaded_rows.cuh): where they unpack nothing.
    static constexpr bool LOADS_AHEAD = WHOLE_ITEMS && !INTEGER && !UNPACKS && !IS_WIDE && K_DIM <= 128;
    static constexpr int ROW_BUFFERS = LOADS_AHEAD ? 2 : 1;  // of a warpgroup's query rows

    // Whether the warpgroups of a team take tiles of wide floats in pairs (many_rows/paired_floats.cuh): of latents, which leave room for weights.
    static constexpr bool HAS_PAIRS = !INTEGER && IS_WIDE && LATENTS && HAS_ROOM_FOR_WEIGHTS;

    // Index of this thread among those that merge together.
    static METHOD int merge_thread() { return (threadIdx.x - 128 * PRODUCERS) % MERGE_THREADS; }
};

}  // namespace attn
