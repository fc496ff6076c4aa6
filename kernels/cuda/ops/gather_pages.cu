// gather_pages.cu: copies the cached tokens of a step into pages of 64 tokens, byte for byte, which many_rows.cu attends instead of smaller
// ones. With many query rows, each tile is assembled once for all of them, and then takes one copy for K and one for V.
//
// Grid      (num_kv_heads, tiles of the longest sequence, batch).
// Instance  page/instance.cuh; pages of 16 or 32 tokens.
// Reads     pool [page][kv_head][run], kv_lens and page table; of schemes with a window the residual pages, and the query blocks, which say what is read with residuals.
// Writes    pages of 64 tokens: tile i of sequence b is page b * pages_each + i, and its residuals, where some query token reads it with them, are fine_pages
//           behind; the tables of both. Tokens behind the last page are those of that page again.
// Numerics  none: bytes are copied.
// Shared    where the tile's pages lie.
// Host      attn-cuda/src/native/dequantize.rs; parameters in kernels/src/cuda/params.rs.
#include "ops/dequantized.cuh"

namespace attn {

constexpr int THREADS = 128, ENTRIES = TILE / PAGE;  // threads of a CTA, and pages of a tile
static_assert(PAGE < TILE, "larger pages are tiles already");
constexpr int RUN_OF_TILE = Run::BYTES * ENTRIES;

// Panels of a side, from `AT` in a run: bytes of each token side by side, EACH of them, COUNT times. All threads of the CTA copy them.
template <int AT, int COUNT, int EACH> DEVICE void gather(const u8* const (&from)[ENTRIES], u8* to) {
    constexpr int PIECE = PAGE * EACH / 16;  // vectors of a panel in a page
    uint4* const vectors = (uint4*)(to + AT * ENTRIES);
#pragma unroll 8
    for (int i = threadIdx.x; i < COUNT * ENTRIES * PIECE; i += THREADS) {
        const int panel = i / (ENTRIES * PIECE), n = i / PIECE % ENTRIES;
        vectors[i] = ((const uint4*)(from[n] + AT))[panel * PIECE + i % PIECE];
    }
}
// A side's codes: K's by panels of 16 dims or, of 16 bits, of eight; V's of fewer bits by blocks of 16 tokens.
template <int AT, class Side, int BITS, bool IS_V> DEVICE void gather_codes(const u8* const (&from)[ENTRIES], u8* to) {
    constexpr int OF_TOKEN = Side::DIM * BITS / 8, EACH = IS_V && BITS < 16 ? OF_TOKEN : BITS == 4 ? 8 : 16;
    gather<AT, OF_TOKEN / EACH, EACH>(from, to);
}
template <int AT, class Side> DEVICE void gather_params(const u8* const (&from)[ENTRIES], u8* to) {
    if constexpr (Side::HAS_PARAMS) gather<AT, Side::GROUPS, param_bytes(Side::SCHEME)>(from, to);
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_gather_pages(const __grid_constant__ DequantizeParams p) {
    const int head = blockIdx.x, tile = blockIdx.y, b = blockIdx.z, heads = gridDim.x;
    const int kv_len = p.step.kv_lens[b];
    if (tile * TILE >= kv_len) return;
    const u32 page = write_entry(p);
    __shared__ const u8 *pages[ENTRIES], *residual_pages[ENTRIES];
    const bool has_fine = is_fine_tile(p, b, tile, kv_len);
    if (threadIdx.x < ENTRIES) {
        const auto run_of = [&](u32 page) { return p.step.k + (u64)page * (u32)p.step.page_stride + (u64)head * Run::BYTES; };
        const int entry = min(tile * ENTRIES + (int)threadIdx.x, (kv_len - 1) / PAGE);
        pages[threadIdx.x] = run_of(p.step.page_table[(u64)b * p.step.page_table_stride + entry]);
        if (has_fine) residual_pages[threadIdx.x] = run_of(p.step.residual_pages[residual_slot(p.step.residual_ring, b, entry)]);
    }
    __syncthreads();
    u8* const to = p.pages + ((u64)page * heads + head) * RUN_OF_TILE;
    gather_codes<0, Keys, Keys::BITS, false>(pages, to);
    gather_params<Run::K_PARAMS, Keys>(pages, to);
    if constexpr (!LATENTS) {
        gather_codes<Run::V_CODES, Values, Values::BITS, true>(pages, to);
        gather_params<Run::V_PARAMS, Values>(pages, to);
    }
    if (WINDOW && head == 0 && threadIdx.x == 0) p.residual_table[residual_slot<first_residual_pages(TILE)>(p.residual_ring, b, tile)] = page + p.fine_pages;
    if (!has_fine) return;
    u8* const fine = to + (u64)p.fine_pages * heads * RUN_OF_TILE;
    if (Keys::WINDOW) gather_codes<0, Keys, 4, false>(residual_pages, fine);
    if (Values::WINDOW) gather_codes<Run::V_RESIDUALS, Values, 4, true>(residual_pages, fine);
}

}  // namespace attn
