// Second centres of K, the means of what first tiles store: section 12 of docs/arithmetic.md.
#pragma once
#include "page/token.cuh"

namespace attn {

typedef Token<Keys, false> KToken;
constexpr u32 PAGES_OF_TILE = FIRST_RESIDUAL_PAGES;

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
// The sum of dim d over a first tile, with that of one of its pages behind `sum`.
DEVICE float add_page(float sum, const u8* run, const u8* residuals, int d) {
    const u16* const scales = (const u16*)(run + Run::K_PARAMS) + d / KToken::WIDTH * PAGE;
#pragma unroll 8
    for (u32 t = 0; t < TILE / PAGES_OF_TILE; t++) {
        const float scale = half_float(scales[t]) * (Keys::HAS_HALF_STEPS ? 0.0625f : 1.0f);
        sum = sum + code_of(run, residuals, d, t) * scale;
    }
    return sum;
}
// The second centre, by the first one and the sum over the tile.
DEVICE u16 second_centre(u16 first, float sum) { return (u16)to_centre(bits_float((u32)first << 16) + sum * (1.0f / TILE)); }

}  // namespace attn
