// The runs of tokens that sequences are cut into (docs/arithmetic.md, section 1).
#pragma once
#include "common/ptx.cuh"

namespace attn {

constexpr int TILE = 64;            // tokens
constexpr int SEGMENT_SHIFT = 2, SPAN_SHIFT = 4;  // log2 of their tiles
constexpr int SPAN = 4;             // segments

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Runs of 2^shift tiles; none are one, as an empty sequence still gets its zeros.
DEVICE int runs_of(int num_tiles, int shift) { return (max(num_tiles, 1) - 1 >> shift) + 1; }

}  // namespace attn
