// The format that an instance is compiled for: the macros of kernels/src/cuda/instance.rs that all kernels with a format have, as constants.
// No other file reads these macros.
#pragma once
#include "page/format.cuh"

namespace attn {

constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int PANELS = HEAD_DIM / 16;        // of 16 dims
constexpr int ROTATED_BLOCK = HEAD_DIM & -HEAD_DIM;  // dims that a rotation mixes: the largest power of two that divides a row
constexpr int PAGE = ATTN_PAGE;              // tokens of a page; 0: strided rows
constexpr int ROW_PAGE = ATTN_ROW_PAGE;      // tokens of a page of strided rows; 0: rows of whole sequences

using Keys = SideOf<ATTN_K, ATTN_K_GROUPS, ATTN_K_WINDOW, HEAD_DIM>;
using Values = SideOf<ATTN_V, ATTN_V_GROUPS, ATTN_V_WINDOW, HEAD_DIM>;
using Run = RunOf<Keys, Values, PAGE>;

constexpr bool INTEGER = Keys::IS_INTEGER && Values::IS_INTEGER;  // whether all products are of integers
constexpr int WINDOW = Keys::WINDOW > Values::WINDOW ? Keys::WINDOW : Values::WINDOW;

}  // namespace attn
