// A team of warps that share each tile (low_latency.cu): of four, a warp has 16 of the tokens for the scores and a quarter of
// the dims for the values. In split_kv.cu a team is one warp for these functions.
#pragma once
#include "attend/config.cuh"

namespace attn {

constexpr int ROW_GROUPS = Config::ROW_GROUPS;
constexpr int WEIGHTS = TILE / 4;  // of a row group, in a lane: of the whole tile

template <int WARPS> struct TeamOf {
    static constexpr bool SHARES_TILES = WARPS > 1;
    // A warp's part of a tile: tokens for the scores, dims for the values; and scores of a row group in a lane.
    static constexpr int TOKENS = TILE / WARPS, DIMS = V_DIM / WARPS, SCORES = TOKENS / 4;
    // What the warps exchange about a tile: each row's maximum over each warp's tokens, and all weights.
    static constexpr int EXCHANGED_WEIGHTS = Config::ROWS * WARPS * 4, EXCHANGE_BYTES = EXCHANGED_WEIGHTS + ROW_GROUPS * WARPS * 32 * 16;

    u32 exchange;  // shared address
    int warp, lane, index;

    METHOD void barrier() const { barrier_of<32 * WARPS>(1 + index); }

    // The warp's first token of a tile and its first dim.
    METHOD int token() const { return SHARES_TILES ? warp * TOKENS : 0; }
    METHOD int dim() const { return SHARES_TILES ? warp * DIMS : 0; }
    // V's groups that the warp's dims belong to: one where groups are longer than that.
    static constexpr int GROUPS = Values::GROUPS > WARPS ? Values::GROUPS / WARPS : SHARES_TILES ? 1 : Values::GROUPS;
    METHOD int group() const { return SHARES_TILES ? warp * Values::GROUPS / WARPS : 0; }

    METHOD u32 largest_at(int g, int e) const { return exchange + (g * 8 + 2 * (lane % 4) + e) * WARPS * 4; }
    // Makes the warps' maxima of each row those of the team.
    METHOD void share_largest(float (&x)[ROW_GROUPS][2]) const {
        if constexpr (SHARES_TILES) {
            publish_largest(x);
            barrier();
            gather_largest(x);
        }
    }
    METHOD void publish_largest(const float (&x)[ROW_GROUPS][2]) const {
        if (lane < 4)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 2; e++) sts32(largest_at(g, e) + warp * 4, float_bits(x[g][e]));
    }
    METHOD void gather_largest(float (&x)[ROW_GROUPS][2]) const {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float4 all = lds128(largest_at(g, e));
                x[g][e] = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
            }
    }
    METHOD u32 weights_at(int g, int of_warp) const { return exchange + EXCHANGED_WEIGHTS + ((g * WARPS + of_warp) * 32 + lane) * 16; }
    // Publishes the weights of the warp's tokens, of which `shared_weights` gives those of the tile. Each warp makes bytes of them for its own groups of
    // V: their largest product with a scale is of the whole tile, and would take one more exchange.
    METHOD void publish_weights(const float (&p)[ROW_GROUPS][SCORES]) const {
        if constexpr (SHARES_TILES)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) sts128(weights_at(g, warp), {p[g][0], p[g][1], p[g][2], p[g][3]});
    }
    // Waits until all warps of the team have published their weights; gives a function that copies a row group's weights of the tile.
    METHOD auto shared_weights(const float (&p)[ROW_GROUPS][SCORES]) const {
        if constexpr (SHARES_TILES) {
            barrier();
            return [this](int g, float (&to)[WEIGHTS]) { gather_weights(g, to); };
        } else {
            return [&p](int g, float (&to)[WEIGHTS]) {
#pragma unroll
                for (int n = 0; n < WEIGHTS; n++) to[n] = p[g][n];
            };
        }
    }
    METHOD void gather_weights(int g, float (&p)[WEIGHTS]) const {
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            float4 x = lds128(weights_at(g, i));
            p[4 * i] = x.x;
            p[4 * i + 1] = x.y;
            p[4 * i + 2] = x.z;
            p[4 * i + 3] = x.w;
        }
    }
};
typedef TeamOf<Config::TILE_WARPS> Team;  // the kernel's

}  // namespace attn
