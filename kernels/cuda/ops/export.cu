// export.cu: writes cached tokens as rows of floats, turned back where their scheme is rotated: `convert::dequantize` of attn-core, rounded once.
//
// Grid      (num_kv_heads, tiles of the longest range, batch); threads as in stored_token.cuh. Heads come first, as those of a token lie side by side in
//           the rows that are written. Lanes that share a token fill sectors of 32 bytes.
// Instance  page/instance.cuh.
// Reads     pool [page][kv_head][run]; kv_lens, which decide what is read with residuals; the ranges of tokens.
// Writes    k, v [token][num_kv_heads][head_dim] in f32, f16 or bf16: the ranges, one behind the other.
// Numerics  those of attn-core/src/quant.rs and rotation.rs; compiled without contraction, subnormals kept.
// Shared    V's codes of a warp's tokens, transposed.
// Host      attn-cuda/src/native/export.rs; parameters in kernels/src/cuda/params.rs.
#include "page/stored_token.cuh"

namespace attn {

template <class Side, bool COLUMNS> struct ExportedToken : StoredToken<Side, COLUMNS> {
    using StoredToken<Side, COLUMNS>::x;
    using StoredToken<Side, COLUMNS>::part;
    static constexpr int PANELS = Side::PANELS, LANE_PANELS = attn::LANE_PANELS<Side>;

    // Eight dims of 16 bits from `first` on.
    METHOD uint4 narrowed(int j, int first, int dtype) const {
        const float* const from = x[j] + first;
        return {narrow_pair(from[0], from[1], dtype), narrow_pair(from[2], from[3], dtype), narrow_pair(from[4], from[5], dtype), narrow_pair(from[6], from[7], dtype)};
    }
    // The whole warp stores; `row` is null in lanes whose token is not in the range.
    METHOD void store(u8* row, int dtype) const {
#pragma unroll
        for (int j = 0; j < LANE_PANELS; j++) {
            const u32 own = TOKEN_LANES * j + part, first = own & ~1u;
            if (dtype == Dtype::F32) {
#pragma unroll
                for (int e = 0; e < 16; e += 4)
                    if (row && own < PANELS) store_four(row, dtype, 16 * own + e, {x[j][e], x[j][e + 1], x[j][e + 2], x[j][e + 3]});
                continue;
            }
            // Neighbouring lanes have neighbouring panels of the row. They exchange halves, so that each panel is stored at once.
            const bool is_odd = part % 2;
            const uint4 low = narrowed(j, 0, dtype), high = narrowed(j, 8, dtype), sent = is_odd ? low : high;
            const uint4 got = {__shfl_xor_sync(~0u, sent.x, 1), __shfl_xor_sync(~0u, sent.y, 1), __shfl_xor_sync(~0u, sent.z, 1), __shfl_xor_sync(~0u, sent.w, 1)};
            if (!row || first >= PANELS) continue;
            uint4* const to = (uint4*)row + 2 * first + is_odd;
            to[0] = is_odd ? got : low;
            if (first + 1 < PANELS) to[2] = is_odd ? high : got;
        }
    }
};

// With fewer registers than the compiler would take, more CTAs of an SM have loads under way; a lane of longer rows has twice the numbers.
extern "C" __global__ void __launch_bounds__(32 * WARPS, larger(K_DIM, V_DIM) > 256   ? 2
                                                         : larger(K_DIM, V_DIM) > 128 ? 4
                                                                                      : 6) attn_export(const __grid_constant__ ExportParams p) {
    const int head = blockIdx.x, b = blockIdx.z, warp = warp_id(), lane = threadIdx.x % 32;
    const int first_row = p.row_starts[b], begin = p.first_tokens ? p.first_tokens[b] : 0, end = begin + p.row_starts[b + 1] - first_row;
    const int tile = begin / TILE + (int)blockIdx.y, block = tile * TILE + warp * WARP_TOKENS, newest = (p.kv_lens[b] - 1) / TILE;
    if (block + WARP_TOKENS <= begin || block >= end) return;
    const float k_scale = p.k_tensor_scales ? p.k_tensor_scales[head] : 1.0f, v_scale = p.v_tensor_scales ? p.v_tensor_scales[head] : 1.0f;
    const auto run_of = [&](u32 page) { return p.pool + (u64)page * p.page_stride + (u64)head * Run::BYTES; };
    const int page = block / PAGE;
    const u8* const run = run_of(p.page_table[(u64)b * p.page_table_stride + page]);
    const u8* residuals = nullptr;
    if (WINDOW && (tile == 0 || newest < tile + WINDOW)) residuals = run_of(p.residual_pages[residual_slot(p.residual_ring, b, page)]);
    const auto with = [&](int window, int at) { return window && (tile == 0 || newest < tile + window) ? residuals + at : nullptr; };
    typedef TurnedBlock<V_DIM, V_LIES_ALONG_TOKENS ? Values::BITS : 16> Turned;
    __shared__ Turned turned[WARPS], turned_residuals[Values::WINDOW ? WARPS : 1];
    // V's codes are under way with K's.
    typename Turned::Rows v_rows = {};
    if (p.v) v_rows = Turned::load(run + Run::V_CODES, block % PAGE, lane);
    // The block's tokens lie in one page, so those that are not in the range can be read, too.
    const auto each_token = [&](auto take) {
#pragma unroll 1
        for (int i = 0; i < WARP_TOKENS; i += 32 / TOKEN_LANES) {
            const int t = block + i + lane / TOKEN_LANES;
            take(t, t >= begin && t < end, (u64)(first_row + t - begin));
        }
    };
    const auto row_of = [&](void* rows, long long stride, u64 token, int dim) { return (u8*)rows + (token * stride + (u64)head * dim) * element_bytes(p.dtype); };
    if (p.k)
        each_token([&](int t, bool is_inside, u64 token) {
            ExportedToken<Keys, false> k;
            k.part = lane % TOKEN_LANES;
            k.load(run, run + Run::K_PARAMS, with(Keys::WINDOW, 0), t % PAGE, k_scale);
            k.store(is_inside ? row_of(p.k, p.k_token_stride, token, K_DIM) : nullptr, p.dtype);
        });
    if (!p.v) return;
    const u8 *const v_codes = turned[warp].fill(v_rows, lane), *v_residuals = with(Values::WINDOW, Run::V_RESIDUALS);
    if (Values::WINDOW && v_residuals) v_residuals = turned_residuals[warp].fill(Turned::load(v_residuals, block % PAGE, lane), lane);
    each_token([&](int t, bool is_inside, u64 token) {
        ExportedToken<Values, V_LIES_ALONG_TOKENS> v;
        v.part = lane % TOKEN_LANES;
        v.load(v_codes, run + Run::V_PARAMS, v_residuals, t % PAGE, v_scale);
        v.store(is_inside ? row_of(p.v, p.v_token_stride, token, V_DIM) : nullptr, p.dtype);
    });
}

}  // namespace attn
