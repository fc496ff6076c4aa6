// The format that an instance is compiled for: the macros of kernels/src/cuda/instance.rs that all kernels with a format have, as constants.
// No other file reads these macros.
#pragma once
#include "common/tile.cuh"
#include "page/format.cuh"

namespace attn {

constexpr int K_DIM = ATTN_K_DIM, V_DIM = ATTN_V_DIM;  // elements of a key and a query, and of a value and an output
constexpr int PAGE = ATTN_PAGE;              // tokens of a page; 0: strided rows
constexpr int ROW_PAGE = ATTN_ROW_PAGE;      // tokens of a page of strided rows; 0: rows of whole sequences

using Keys = SideOf<ATTN_K, ATTN_K_GROUP_DIMS, ATTN_K_WINDOW, K_DIM>;
using Values = SideOf<ATTN_V, ATTN_V_GROUP_DIMS, ATTN_V_WINDOW, V_DIM, ATTN_LATENTS ? K_DIM : V_DIM>;
constexpr bool LATENTS = ATTN_LATENTS;  // V is the first elements of K, as these are stored: it has no bytes of its own
constexpr bool V_LIES_ALONG_TOKENS = Values::BITS < 16 && !LATENTS;  // in pages; else it lies as K does
using Run = RunOf<Keys, Values, PAGE, LATENTS>;

static_assert(!LATENTS || (Keys::BITS >= 8 && Keys::SCHEME == Values::SCHEME && (!Keys::IS_INTEGER || Keys::GROUP_DIMS == V_DIM) && Keys::GROUPS <= 2 &&
                           V_DIM <= K_DIM && V_DIM % (is_rotated(ATTN_K) ? Values::ROTATED_BLOCK : 1) == 0),
              "KvFormat::check");

constexpr int QUERY_PARTS = LATENTS ? Keys::GROUPS : 1;                // of a query, which have a step each: what meets K's groups
constexpr bool INTEGER = Keys::IS_INTEGER && Values::IS_INTEGER;  // whether all products are of integers
constexpr int WINDOW = Keys::WINDOW > Values::WINDOW ? Keys::WINDOW : Values::WINDOW;

// Home pages that hold a sequence's first tile, which all rows read with residuals: a sequence keeps those for good.
constexpr int first_residual_pages(int page) { return page == 0 ? 1 : larger(1, TILE / page); }
constexpr int FIRST_RESIDUAL_PAGES = first_residual_pages(PAGE);
// Where a table of residual pages has that of a sequence's home page: behind the first pages' entries, a ring of a power of two is for the last pages.
template <int FIRST = FIRST_RESIDUAL_PAGES> DEVICE u64 residual_slot(u32 ring, int sequence, u32 page) {
    return (u64)sequence * (FIRST + ring) + (page < FIRST ? page : FIRST + (page & ring - 1));
}

}  // namespace attn
