// How a scheme stores K or V, and where both lie in a page: crates/attn-core/FORMATS.md in constants.
#pragma once
#include "common/params.h"
#include "common/ptx.cuh"

namespace attn {

constexpr int code_bits(int scheme) { return scheme <= BF16 ? 16 : scheme == INT4 || scheme == ROTATED_INT4 ? 4 : 8; }
constexpr bool is_integer(int scheme) { return scheme >= INT8_TOKEN; }
constexpr bool is_rotated(int scheme) { return scheme == ROTATED_INT8 || scheme == ROTATED_INT4; }
// Bytes of a token's parameters in one quantization group: an f16 scale, beside it an f16 shift in plain int4.
constexpr int param_bytes(int scheme) { return scheme == INT4 ? 4 : is_integer(scheme) && scheme != INT8_TENSOR ? 2 : 0; }

// The exponent of a power of two.
constexpr int log2_of(int x) { return x < 2 ? 0 : 1 + log2_of(x / 2); }

// K or V of one KV head, in rows of DIM elements, which are rotated by the blocks of rows of ROTATED_AS.
template <int SCHEME_, int GROUP_DIMS_, int WINDOW_, int DIM_, int ROTATED_AS = DIM_> struct SideOf {
    static constexpr int DIM = DIM_;
    static constexpr int PANELS = DIM / 16;             // of 16 dims
    static constexpr int ROTATED_BLOCK = ROTATED_AS & -ROTATED_AS;  // dims that a rotation mixes: the largest power of two that divides a row
    // A rotated row is multiplied by a power of two: by 2^-STORED_HALVINGS where it is stored, by 2^-BACK_HALVINGS where it is turned back.
    static constexpr int STORED_HALVINGS = log2_of(ROTATED_BLOCK) / 2, BACK_HALVINGS = (log2_of(ROTATED_BLOCK) + 1) / 2;
    static constexpr int SCHEME = SCHEME_;
    static constexpr int GROUP_DIMS = GROUP_DIMS_;  // of a quantization group; the last has what is left
    static constexpr int GROUPS = (DIM + GROUP_DIMS - 1) / GROUP_DIMS;  // 1 where the scheme has none
    static constexpr int WINDOW = WINDOW_;  // tiles that a row reads with residuals; 0: none
    static constexpr int BITS = code_bits(SCHEME);
    static constexpr bool IS_INTEGER = is_integer(SCHEME);
    static constexpr bool IS_ROTATED = is_rotated(SCHEME);
    static constexpr bool HAS_NIBBLES = BITS == 4;
    static constexpr bool HAS_PARAMS = param_bytes(SCHEME) > 0;
    static constexpr bool HAS_SHIFTS = SCHEME == INT4;               // a shift beside each scale
    static constexpr bool HAS_HALF_STEPS = SCHEME == ROTATED_INT4;  // codes count half steps
    // Of K beside integers: whether rows may lack a centre, where that is rotated and the first tile is read finely.
    static constexpr bool MAY_HAVE_CENTRES = SCHEME == ROTATED_INT8 || (SCHEME == ROTATED_INT4 && WINDOW > 0);

    // Bytes of so many tokens.
    static constexpr int codes(int tokens) { return tokens * DIM * BITS / 8; }
    static constexpr int params(int tokens) { return GROUPS * tokens * param_bytes(SCHEME); }
    static constexpr int residuals(int tokens) { return WINDOW > 0 ? tokens * DIM / 2 : 0; }
};

// The run of one KV head in a page of so many tokens: where each part begins, in bytes. K's codes are first; in a residual page K's residuals. V of latents is in K's.
template <class K, class V, int TOKENS, bool LATENTS> struct RunOf {
    static constexpr int K_PARAMS = K::codes(TOKENS);
    static constexpr int K_END = K_PARAMS + K::params(TOKENS);
    static constexpr int V_CODES = LATENTS ? 0 : K_END;
    static constexpr int V_PARAMS = LATENTS ? K_PARAMS : V_CODES + V::codes(TOKENS);
    static constexpr int BYTES = LATENTS ? K_END : V_PARAMS + V::params(TOKENS);
    static constexpr int V_RESIDUALS = K::residuals(TOKENS);
};

// A KV head's two centres, one behind the other, among rows of centres [kv_head][2][DIM] in bf16, `stride` elements apart.
template <int DIM, class T> DEVICE T* centre_at(T* centres, u32 row, u64 stride, int head) { return centres + row * stride + (u32)head * (2 * DIM); }

// The byte of token t in the 16 bytes of a panel of 16 tokens of V: the order of an MMA's accumulators (slot order).
constexpr u32 slot_of(u32 t) {
    const u32 of_panel = t % 16;
    return 4 * (of_panel % 8 / 2) + 2 * (of_panel / 8) + of_panel % 2;
}

}  // namespace attn
