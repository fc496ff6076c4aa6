// dequantize_rows.cu: writes rows of other engines, contiguous or in pages, as pages of 64 tokens; dequantize.cu does so with this library's pages.
//
// Grid      that of dequantize.cu; four lanes of a warp share a token.
// Instance  page/instance.cuh; no 4 bits or rotation; bf16 as both.
// Reads     rows of codes and their f16 scales [group], kv_lens; of pages their table.
// Writes    pages of 64 tokens, K and V in f16, or in bf16 if the rows are: tile i of sequence b is page b * pages_each + i. Also their page
//           table, and the scale of the f16 numbers of each KV head. Tokens past kv_len are left as they are.
// Numerics  those of attn-core/src/quant.rs, rounded once to f16, and none of 16 bits; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/dequantize.rs; parameters in kernels/src/cuda/params.rs.
#include "ops/dequantized.cuh"

namespace attn {

static_assert(K_DIM == V_DIM, "a row of either side is written by one function");
constexpr int WARPS = 4;

// A side's rows of one KV head; `first`: the sequence, or the page.
struct StridedRows {
    const u8* codes;
    const u16* scales;
    const long long *strides, *scale_strides;

    DEVICE StridedRows of_head(const u8* codes, const u16* scales, const long long (&strides)[3], const long long (&scale_strides)[3], int head) {
        return {codes + head * strides[1], scales ? scales + head * scale_strides[1] : nullptr, strides, scale_strides};
    }
    // A panel of 16 dims of a row, as eight pairs of f16.
    template <int SCHEME, int GROUP_DIMS> METHOD void widen(u32 first, int place, int panel, u32 (&pairs)[8]) const {
        const u8* row = codes + first * strides[0] + place * strides[2];
        if constexpr (SCHEME == F16 || SCHEME == BF16) {
            const uint4 x = ((const uint4*)row)[2 * panel], y = ((const uint4*)row)[2 * panel + 1];
            const u32 words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 8; i++) pairs[i] = words[i];
        } else {
            const uint4 x = ((const uint4*)row)[panel];
            const u32 words[4] = {x.x, x.y, x.z, x.w};
            const u16* of_row = SCHEME == FP8 || SCHEME == INT8_TENSOR ? nullptr : scales + first * scale_strides[0] + place * scale_strides[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (SCHEME == FP8) {
                    e4m3_pairs(words[i], pairs[2 * i], pairs[2 * i + 1]);
                } else {
                    // Four dims are of one group.
                    const float scale = of_row ? half_float(of_row[(16 * panel + 4 * i) / GROUP_DIMS]) * (1.0f / unit_of(SCHEME)) : 1.0f;
                    const auto number = [&](int e) { return (float)(signed char)(words[i] >> 8 * e) * scale; };
                    pairs[2 * i] = f16_pair(number(0), number(1));
                    pairs[2 * i + 1] = f16_pair(number(2), number(3));
                }
            }
        }
    }
    // The tile's tokens that exist, by panels of eight dims.
    template <int SCHEME, int GROUP_DIMS> METHOD void write(const DequantizeParams& p, int b, int tile, int tokens, u8* side) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < TILE; i += 8 * WARPS) {
            const int t = i + threadIdx.x / 32 * 8 + lane / 4, token = tile * TILE + t;
            if (t >= tokens) continue;
            const u32 first = ROW_PAGE ? p.step.page_table[(u64)b * p.step.page_table_stride + token / (ROW_PAGE ? ROW_PAGE : 1)] : b;
            const int place = ROW_PAGE ? token % (ROW_PAGE ? ROW_PAGE : 1) : token;
#pragma unroll
            for (int panel = lane % 4; panel < Keys::PANELS; panel += 4) {
                u32 pairs[8];
                widen<SCHEME, GROUP_DIMS>(first, place, panel, pairs);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(uint4*)(side + ((2 * panel + half) * TILE + t) * 16) = {pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]};
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_dequantize_rows(const __grid_constant__ DequantizeParams p) {
    const int head = blockIdx.x, tile = blockIdx.y, b = blockIdx.z, heads = gridDim.x;
    write_units(p);
    const int tokens = p.step.kv_lens[b] - tile * TILE;
    if (tokens <= 0) return;
    const u32 to = write_entry(p);
    u8* const side = p.pages + ((u64)to * heads + head) * (K_BYTES + V_BYTES);
    StridedRows::of_head(p.step.k, p.step.k_scales, p.step.k_strides, p.step.k_scale_strides, head).write<Keys::SCHEME, Keys::GROUP_DIMS>(p, b, tile, tokens, side);
    StridedRows::of_head(p.step.v, p.step.v_scales, p.step.v_strides, p.step.v_scale_strides, head).write<Values::SCHEME, Values::GROUP_DIMS>(p, b, tile, tokens, side + K_BYTES);
}

}  // namespace attn
