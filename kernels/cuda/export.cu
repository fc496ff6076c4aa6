// export.cu: writes cached tokens as rows of floats, turned back where their scheme is rotated: `convert::dequantize` of attn-core, rounded once.
//
// Grid      (tiles of the longest range, num_kv_heads, batch); 4 warps, which take the tile's tokens in turn.
// Macros    ATTN_K, ATTN_V, ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_K_WINDOW, ATTN_V_WINDOW, ATTN_HEAD_DIM, ATTN_PAGE, as in config.cuh.
// Reads     pool [page][kv_head][run]; kv_lens, which decide what is read with residuals; the ranges of tokens.
// Writes    k, v [token][num_kv_heads][head_dim] in f32, f16 or bf16: the ranges, one behind the other.
// Numerics  those of attn-core/src/quant.rs and rotation.rs; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/export.rs; parameters in kernels/src/cuda/params.rs.
#include "append.cuh"
#include "dtype.cuh"

constexpr int TILE = 64, WARPS = 4;

DEVICE float of_fp8(u32 code) { return bits_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f; }

// One token's elements of one KV head, from its page to a row of floats.
template <int SCHEME, int GROUPS, bool COLUMNS> struct StoredToken {
    typedef Token<SCHEME, GROUPS, COLUMNS> Layout;
    static constexpr int BITS = Layout::BITS, UNIT = Layout::UNIT, EACH = Layout::EACH;

    Layout token;

    // The codes of unit i, one to an element, from a page's codes or residuals.
    static METHOD void codes_of(const u8* codes, u32 t, int i, int lane, u32 (&code)[UNIT]) {
        const u32 u = Layout::unit(i, lane), d = Layout::dim(u, 0);
        if constexpr (COLUMNS) {
            const u32 of_panel = t % 16, slot = 4 * (of_panel % 8 / 2) + 2 * (of_panel / 8) + of_panel % 2;
            const u32 byte = codes[(t / 16 * (HEAD_DIM * BITS / 8) + u) * 16 + slot];
            code[0] = BITS == 4 ? byte & 15 : byte;
            if (UNIT == 2) code[1 % UNIT] = byte >> 4;
        } else if constexpr (BITS == 16) {
            const uint2 x = *(const uint2*)(codes + (d / 8 * PAGE + t) * 16 + d % 8 * 2);
#pragma unroll
            for (int k = 0; k < UNIT; k++) code[k] = (k < 2 ? x.x : x.y) >> 16 * (k % 2) & 0xffff;
        } else {
            const u32 x = *(const u32*)(codes + (BITS == 8 ? (d / 16 * PAGE + t) * 16 + d % 16 : Layout::place_in_rows(d, t)));
#pragma unroll
            for (int k = 0; k < UNIT; k++) code[k] = BITS == 8 ? x >> 8 * k & 255 : x >> 8 * k >> (is_high(t) ? 4 : 0) & 15;
        }
    }
    static METHOD float value(u32 code, u32 residual, bool is_fine, u32 param, float tensor_scale) {
        const float scale = half_float(param & 0xffff);
        if (SCHEME == F16) return half_float(code);
        if (SCHEME == BF16) return bits_float(code << 16);
        if (SCHEME == FP8) return of_fp8(code) * tensor_scale;
        if (SCHEME == INT4) return (float)code * scale + half_float(param >> 16);
        if (SCHEME == ROTATED_INT4) {
            return is_fine ? (2.0f * (float)(16 * code + residual) - 255.0f) * (scale * 0.0625f) : (2.0f * (float)code - 15.0f) * scale;
        }
        return (float)(signed char)code * (SCHEME == INT8_TENSOR ? tensor_scale : scale);
    }

    // `residuals` is null where the row is read without.
    METHOD void load(const u8* codes, const u8* params, const u8* residuals, u32 t, float tensor_scale, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 code[UNIT], residual[UNIT] = {}, param = 0;
            codes_of(codes, t, i, lane, code);
            if (Layout::HALF_STEPS && residuals) codes_of(residuals, t, i, lane, residual);
            if (Layout::HAS_PARAMS) {
                const u32 at = Layout::group(Layout::unit(i, lane)) * PAGE + t;
                param = Layout::IS_INT4 ? ((const u32*)params)[at] : ((const u16*)params)[at];
            }
#pragma unroll
            for (int k = 0; k < UNIT; k++) token.x[i][k] = value(code[k], residual[k], residuals != nullptr, param, tensor_scale);
        }
        if constexpr (is_rotated(SCHEME)) token.template rotate<true>(lane);
    }
    METHOD void store(u8* row, int dtype, int lane) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (32 * i + lane >= Layout::UNITS) break;
            const u32 u = Layout::unit(i, lane);
            if constexpr (UNIT == 4) {
                store_four(row, dtype, Layout::dim(u, 0), {token.x[i][0], token.x[i][1 % UNIT], token.x[i][2 % UNIT], token.x[i][3 % UNIT]});
            } else {
#pragma unroll
                for (int k = 0; k < UNIT; k++) store_one(row, dtype, Layout::dim(u, k), token.x[i][k]);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_export(const __grid_constant__ ExportParams p) {
    const int head = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = p.row_starts[b], begin = p.first_tokens ? p.first_tokens[b] : 0, end = begin + p.row_starts[b + 1] - first_row;
    const int tile = begin / TILE + (int)blockIdx.x, newest = (p.kv_lens[b] - 1) / TILE;
    const float k_scale = p.k_tensor_scales ? p.k_tensor_scales[head] : 1.0f, v_scale = p.v_tensor_scales ? p.v_tensor_scales[head] : 1.0f;
    const auto run_of = [&](u32 page) { return p.pool + (u64)page * p.page_stride + (u64)head * RUN; };
    for (int t = max(tile * TILE, begin) + warp; t < min(tile * TILE + TILE, end); t += WARPS) {
        const int page = t / PAGE, of_page = t % PAGE;
        const u8* const run = run_of(p.page_table[(u64)b * p.page_table_stride + page]);
        const u8* residuals = nullptr;
        if ((ATTN_K_WINDOW || ATTN_V_WINDOW) && newest < tile + (ATTN_K_WINDOW > ATTN_V_WINDOW ? ATTN_K_WINDOW : ATTN_V_WINDOW))
            residuals = run_of(p.residual_pages[(u64)b * p.residual_ring + (page & (p.residual_ring - 1))]);
        const auto with = [&](int window, int at) { return residuals && newest < tile + window ? residuals + at : nullptr; };
        const u64 row = (u64)(first_row + t - begin);
        if (p.k) {
            StoredToken<ATTN_K, ATTN_K_GROUPS, false> k;
            k.load(run, run + K_PARAMS, with(ATTN_K_WINDOW, 0), of_page, k_scale, lane);
            k.store((u8*)p.k + (row * p.k_token_stride + (u64)head * HEAD_DIM) * element_bytes(p.dtype), p.dtype, lane);
        }
        if (p.v) {
            StoredToken<ATTN_V, ATTN_V_GROUPS, (code_bits(ATTN_V) < 16)> v;
            v.load(run + V_CODES, run + V_PARAMS, with(ATTN_V_WINDOW, K_RESIDUALS), of_page, v_scale, lane);
            v.store((u8*)p.v + (row * p.v_token_stride + (u64)head * HEAD_DIM) * element_bytes(p.dtype), p.dtype, lane);
        }
    }
}
