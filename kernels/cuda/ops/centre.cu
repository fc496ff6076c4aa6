// centre.cu: makes second centres of K, the means of what first tiles store: section 12 of docs/arithmetic.md.
//
// Grid      (first tiles, or 32 tokens, num_kv_heads), whole warps with a thread to each dim.
// Split     none: a sequence has one first tile in its life, and the order of a dim's sum is defined.
// Instance  page/instance.cuh; K is rotated int8, or rotated int4 with a window.
// Reads     pool [page][kv_head][run]: the home pages of first tiles and their residual pages; first centres.
// Writes    second centres.
// Numerics  page/token.cuh; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/centre.rs; parameters in kernels/src/cuda/params.rs.
#include "page/second_centre.cuh"

namespace attn {

static_assert(Keys::MAY_HAVE_CENTRES, "centres.rs");

constexpr u32 MOST_PAGES = 4;

// A first tile: the row of its centres, its home pages, their residual pages.
struct FirstTile {
    u32 centres, pages[MOST_PAGES], residual_pages[MOST_PAGES];
};

// Dim d of a KV head.
DEVICE void make_centre(const CentreParams& p, const FirstTile& tile, int head, int d) {
    float sum = 0.0f;
#pragma unroll 1
    for (u32 n = 0; n < PAGES_OF_TILE; n++) {
        const auto run_of = [&](u32 page) { return p.pool + page * p.page_stride + (u32)head * Run::BYTES; };
        sum = add_page(sum, run_of(tile.pages[n]), Keys::WINDOW ? run_of(tile.residual_pages[n]) : nullptr, d);
    }
    u16* const centres = centre_at<K_DIM>(p.centres, tile.centres, p.centre_stride, head);
    centres[K_DIM + d] = second_centre(centres[d], sum);
}

// Of 32 tokens those that are the last of their sequence's first tile.
DEVICE u32 last_of_tiles(const CentreParams& p, int first) {
    const int token = first + (int)threadIdx.x % 32;
    return __ballot_sync(~0u, token < p.tokens && p.slots[token] >= 0 && p.centre_positions[token] == TILE - 1);
}

extern "C" __global__ void __launch_bounds__((K_DIM + 31) / 32 * 32) attn_centre(const __grid_constant__ CentreParams p) {
    wait_for_dependencies();
    const int head = blockIdx.y, d = threadIdx.x;
    if (p.tiles) {
        if (d < K_DIM) make_centre(p, ((const FirstTile*)p.tiles)[blockIdx.x], head, d);
        return;
    }
    for (u32 left = last_of_tiles(p, 32 * blockIdx.x); left; left &= left - 1) {
        const u32 page = p.centre_rows[32 * blockIdx.x + __ffs(left) - 1];
        if (d < K_DIM) make_centre(p, {page, {page}, {}}, head, d);
    }
}

}  // namespace attn
