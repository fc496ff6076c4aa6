// dequantize.cu: writes the cached tokens of a step as pages of 64 tokens in f16, which many_rows.cu attends instead of the cache. With many
// query rows, codes are then converted to floats once for all of them (section 11 of docs/arithmetic.md).
//
// Grid      (num_kv_heads, tiles of the longest sequence, batch); threads as in stored_token.cuh.
// Instance  page/instance.cuh.
// Reads     pool [page][kv_head][run], kv_lens; of schemes with a window the query blocks, which say what is read with residuals.
// Writes    pages of 64 tokens, K and V in f16: tile i of sequence b is page b * pages_each + i; if some query token reads the tile with
//           residuals, that version is the page fine_pages behind it. Also their page table, and the scale of the f16 numbers
//           of each KV head.
// Numerics  those of attn-core/src/quant.rs and rotation.rs, rounded once to f16; compiled without contraction, subnormals kept.
// Shared    V's codes of a warp's tokens, transposed.
// Host      attn-cuda/src/native/dequantize.rs; parameters in kernels/src/cuda/params.rs.
#include "ops/dequantized.cuh"
#include "page/stored_token.cuh"

namespace attn {

static_assert(K_DIM >= V_DIM, "many_rows.cu attends no other floats");
template <class Side, bool COLUMNS> struct WidenedToken : StoredToken<Side, COLUMNS> {
    using StoredToken<Side, COLUMNS>::x;
    using StoredToken<Side, COLUMNS>::part;
    static constexpr int PANELS = Side::PANELS, LANE_PANELS = attn::LANE_PANELS<Side>;

    static METHOD float number(float x) {
        // A vector that is no longer rotated may have dims larger than all codes times scales.
        return Side::IS_ROTATED ? fminf(fmaxf(x, -LARGEST_HALF), LARGEST_HALF) : x;
    }
    // Token t of a side, by panels of eight dims.
    METHOD void store(u8* side, int t) const {
#pragma unroll
        for (int j = 0; j < LANE_PANELS; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 word[4];
#pragma unroll
                for (int i = 0; i < 4; i++) word[i] = narrow_pair(number(x[j][8 * half + 2 * i]), number(x[j][8 * half + 2 * i + 1]), Dtype::F16);
                if (TOKEN_LANES * j + part < PANELS)
                    *(uint4*)(side + ((2 * (TOKEN_LANES * j + part) + half) * TILE + t) * 16) = {word[0], word[1], word[2], word[3]};
            }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_dequantize(const __grid_constant__ DequantizeParams p) {
    const int head = blockIdx.x, tile = blockIdx.y, b = blockIdx.z, warp = warp_id(), lane = threadIdx.x % 32, heads = gridDim.x;
    write_units(p);
    const int kv_len = p.step.kv_lens[b], block = tile * TILE + warp * WARP_TOKENS;
    if (block >= kv_len) return;
    const u32 to = write_entry(p);
    const auto run_of = [&](u32 page) { return p.step.k + (u64)page * (u32)p.step.page_stride + (u64)head * Run::BYTES; };
    const int page = block / PAGE;
    const u8* const run = run_of(p.step.page_table[(u64)b * p.step.page_table_stride + page]);
    const bool has_fine = is_fine_tile(p, b, tile, kv_len);
    const u8* residuals = nullptr;
    if (has_fine) residuals = run_of(p.step.residual_pages[residual_slot(p.step.residual_ring, b, page)]);
    // The block's tokens lie in one page, so those behind the last can be read, too.
    typedef TurnedBlock<V_DIM, Values::BITS> Turned;
    __shared__ Turned turned[WARPS], turned_residuals[Values::WINDOW ? WARPS : 1];
    const u8 *const v_codes = turned[warp].fill(Turned::load(run + Run::V_CODES, block % PAGE, lane), lane), *v_residuals = nullptr;
    if (Values::WINDOW && has_fine) v_residuals = turned_residuals[warp].fill(Turned::load(residuals + Run::V_RESIDUALS, block % PAGE, lane), lane);
#pragma unroll 1
    for (int is_fine = 0; is_fine <= has_fine; is_fine++) {
        u8* const side = p.pages + ((u64)(to + is_fine * p.fine_pages) * heads + head) * (K_BYTES + V_BYTES);
#pragma unroll 1
        for (int i = 0; i < WARP_TOKENS; i += 32 / TOKEN_LANES) {
            const int t = block + i + lane / TOKEN_LANES;
            WidenedToken<Keys, false> k;
            k.part = lane % TOKEN_LANES;
            k.load<unit_of(Keys::SCHEME)>(run, run + Run::K_PARAMS, Keys::WINDOW && is_fine ? residuals : nullptr, t % PAGE, 1.0f);
            k.store(side, t % TILE);
            WidenedToken<Values, V_LIES_ALONG_TOKENS> v;
            v.part = lane % TOKEN_LANES;
            v.load<unit_of(Values::SCHEME)>(v_codes, run + Run::V_PARAMS, is_fine ? v_residuals : nullptr, t % PAGE, 1.0f);
            v.store(side + K_BYTES, t % TILE);
        }
    }
}

}  // namespace attn
