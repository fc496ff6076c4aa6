// centre.cu: makes second centres of K, the means of what first tiles store: section 12 of docs/arithmetic.md.
//
// Grid      (first tiles, num_kv_heads), whole warps with a thread to each dim.
// Split     none: a sequence has one first tile in its life, and the order of a dim's sum is defined.
// Instance  page/instance.cuh; K is rotated int8, or rotated int4 with a window.
// Reads     pool [page][kv_head][run]: the home pages of first tiles and their residual pages; first centres.
// Writes    second centres.
// Numerics  page/token.cuh; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/centre.rs; parameters in kernels/src/cuda/params.rs.
#include "page/token.cuh"

namespace attn {

static_assert(Keys::MAY_HAVE_CENTRES, "centres.rs");

typedef Token<Keys, false> KToken;
constexpr u32 PAGES_OF_TILE = FIRST_RESIDUAL_PAGES, MOST_PAGES = 4;

// A first tile in the list: its sequence, its home pages, their residual pages.
struct FirstTile {
    u32 sequence, pages[MOST_PAGES], residual_pages[MOST_PAGES];
};

// What K's codes count in token t of a page, read finely: of dim d.
DEVICE float code_of(const u8* run, const u8* residuals, int d, u32 t) {
    if constexpr (Keys::HAS_HALF_STEPS) {
        const u32 at = KToken::place_in_rows(d, t), shift = is_high(t) ? 4 : 0;
        const int code = 16 * (run[at] >> shift & 15) + (residuals[at] >> shift & 15);
        return 2.0f * (float)code - 255.0f;
    } else {
        return (float)(signed char)run[(d / 16 * PAGE + t) * 16 + d % 16];
    }
}

extern "C" __global__ void __launch_bounds__((K_DIM + 31) / 32 * 32) attn_centre(const __grid_constant__ CentreParams p) {
    wait_for_dependencies();
    const FirstTile& tile = ((const FirstTile*)p.tiles)[blockIdx.x];
    const int head = blockIdx.y, d = threadIdx.x;
    if (d >= K_DIM) return;
    float sum = 0.0f;
#pragma unroll 1
    for (u32 n = 0; n < PAGES_OF_TILE; n++) {
        const auto run_of = [&](u32 page) { return p.pool + page * p.page_stride + (u32)head * Run::BYTES; };
        const u8 *const run = run_of(tile.pages[n]), *const residuals = Keys::WINDOW ? run_of(tile.residual_pages[n]) : nullptr;
        const u16* const scales = (const u16*)(run + Run::K_PARAMS) + d / KToken::WIDTH * PAGE;
#pragma unroll 8
        for (u32 t = 0; t < TILE / PAGES_OF_TILE; t++) {
            const float scale = half_float(scales[t]) * (Keys::HAS_HALF_STEPS ? 0.0625f : 1.0f);
            sum = sum + code_of(run, residuals, d, t) * scale;
        }
    }
    u16* const centres = centre_at<K_DIM>(p.centres, tile.sequence, gridDim.y, head);
    const float first = bits_float((u32)centres[d] << 16);
    centres[K_DIM + d] = (u16)to_centre(first + sum * (1.0f / TILE));
}

}  // namespace attn
