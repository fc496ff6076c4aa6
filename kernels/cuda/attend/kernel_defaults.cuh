// What the configurations of the decode kernels have in common. A kernel's own (NAME/config.cuh) says where it differs.
#pragma once
#include "common/tile.cuh"
#include "page/instance.cuh"

namespace attn {

struct KernelDefaults {
    static constexpr int CTAS = ATTN_CTAS;      // that share an SM
    static constexpr int STAGES = ATTN_STAGES;  // of a team's ring
    static constexpr int TILE_WARPS = 1;        // warps that share each tile
    static constexpr bool IS_WIDE = false;      // whether a stage has a part of K's or V's dims of a tile, and K's last part V's parameters, too
    static constexpr int K_PARTS = 1, V_PARTS = 1, V_STAGES = 1;
    static constexpr int TURNERS = 0;           // warps that turn latents into values, where they lie in a stage
    static constexpr int LEAST_BLOCK = 16;      // tokens that lie together in a stage, at least
    static constexpr int SLICES = 8;            // in which CTAs that share a work item's merge claim its rows
    static constexpr int SHARED_PARTIALS = 12;  // of so many partials and more of a work item, several CTAs merge rows
    static constexpr int STATE_STRIDE = V_DIM + 4;  // floats of a state's row in shared memory; 4 keeps the rows that a warp stores at once in different banks

    // Whether teams merge through global memory: a work item then has any number of CTAs.
    static constexpr bool MERGES_GLOBALLY = false;
    // Whether the states of all spans are left in the caller's memory: sequences are shards of longer ones (section 10 of docs/arithmetic.md), and
    // other launches merge and finish.
    static constexpr bool LEAVES_SPANS = false;
    // Whether pages may be those of dequantize.cu, of which some have been written with residuals, too.
    static constexpr bool MAY_BE_DEQUANTIZED = false;
    // Whether products read stages as the copy engine does, by another way than a thread's.
    static constexpr bool PRODUCTS_READ_STAGES = false;
};

}  // namespace attn
