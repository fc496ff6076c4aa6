// A team of warps that share each tile (low_latency.cu): a warp has 16 of the tokens for the scores and a quarter of the dims for the
// values. In the other kernels a team is one warp for these functions.
#pragma once
#include "config.cuh"

// What the warps exchange about a tile.
constexpr int SUMS = V_INT4 ? 1 + 2 * V_GROUPS : 1;  // per row, of four lanes of each warp: weights; and of each group, shifts' high and low bytes
constexpr int PLANES_BYTES = V_FLOAT ? 16 : 8;       // of a lane, for 16 tokens
constexpr int EXCHANGED_SUMS = ROWS * TILE_WARPS * 4, EXCHANGED_PLANES = EXCHANGED_SUMS + SUMS * ROWS * TILE_WARPS * 16;
constexpr int EXCHANGED_QUERY = EXCHANGED_PLANES + V_GROUPS * ROW_GROUPS * (TILE / 16) * 32 * PLANES_BYTES;  // of a page of channels: planes, shifts' sums
constexpr int EXCHANGED_SHIFTS = EXCHANGED_QUERY + PANELS * 32 * 8, EXCHANGE_BYTES = K_PER_CHANNEL ? EXCHANGED_SHIFTS + 8 * TILE_WARPS * 4 : EXCHANGED_QUERY;

struct Team {
    u32 exchange;  // shared address
    int warp, lane, index;

    __device__ __forceinline__ void barrier() const { barrier_of<32 * TILE_WARPS>(1 + index); }

    // The warp's first token of a tile and its first dim.
    __device__ __forceinline__ int token() const { return SHARES_TILES ? warp * TOKENS : 0; }
    __device__ __forceinline__ int dim() const { return SHARES_TILES ? warp * DIMS : 0; }
    // V's groups that the warp's dims belong to: one where groups are longer than that.
    static constexpr int GROUPS = V_GROUPS > TILE_WARPS ? V_GROUPS / TILE_WARPS : SHARES_TILES ? 1 : V_GROUPS;
    __device__ __forceinline__ int group() const { return SHARES_TILES ? warp * V_GROUPS / TILE_WARPS : 0; }

    // Publishes each row's maximum of this warp; behind the next barrier `gather_largest` gives the maximum of all.
    __device__ __forceinline__ void publish_largest(const float (&x)[ROW_GROUPS]) const {
        if (lane % 4 == 0)
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) sts32(exchange + ((g * 8 + lane / 4) * TILE_WARPS + warp) * 4, float_bits(x[g]));
    }
    __device__ __forceinline__ void gather_largest(float (&x)[ROW_GROUPS]) const {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++) {
            float4 all = lds128(exchange + (g * 8 + lane / 4) * TILE_WARPS * 4);
            x[g] = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
        }
    }
    // A row's sum number `kind`: published per lane, and gathered from all lanes behind the next barrier. No warp waits for the sum at once, so
    // adding sixteen numbers then takes less than shuffling now.
    __device__ __forceinline__ u32 sum_at(int kind, int g) const { return exchange + EXCHANGED_SUMS + (kind * ROWS + g * 8 + lane / 4) * TILE_WARPS * 16; }
    __device__ __forceinline__ void publish_sum(int kind, int g, int x) const { sts32(sum_at(kind, g) + (warp * 4 + lane % 4) * 4, x); }
    __device__ __forceinline__ int gather_sum(int kind, int g) const {
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < TILE_WARPS; i++) {
            float4 x = lds128(sum_at(kind, g) + i * 16);
            all += float_bits(x.x) + float_bits(x.y) + float_bits(x.z) + float_bits(x.w);
        }
        return (int)all;
    }
    // The planes of a page's query, and the partial sums of its shifts' term.
    __device__ __forceinline__ u32 plane_at(int panel) const { return exchange + EXCHANGED_QUERY + (panel * 32 + lane) * 8; }
    __device__ __forceinline__ void publish_plane(int panel, u32 hi, u32 lo) const { sts64(plane_at(panel), bits_float(hi), bits_float(lo)); }
    __device__ __forceinline__ void gather_plane(int panel, u32& hi, u32& lo) const {
        uint2 x = lds64(plane_at(panel));
        hi = x.x;
        lo = x.y;
    }
    __device__ __forceinline__ u32 shift_at() const { return exchange + EXCHANGED_SHIFTS + lane / 4 * TILE_WARPS * 4; }
    __device__ __forceinline__ void publish_shift(int sum) const {
        if (lane % 4 == 0) sts32(shift_at() + warp * 4, sum);
    }
    __device__ __forceinline__ int gather_shift() const {
        float4 x = lds128(shift_at());
        return (int)(float_bits(x.x) + float_bits(x.y) + float_bits(x.z) + float_bits(x.w));
    }
    __device__ __forceinline__ u32 planes_at(int group, int g, int panel) const {
        return exchange + EXCHANGED_PLANES + (((group * ROW_GROUPS + g) * (TILE / 16) + panel) * 32 + lane) * PLANES_BYTES;
    }
};
