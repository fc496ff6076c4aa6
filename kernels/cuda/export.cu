// export.cu: writes cached tokens as rows of floats, turned back where their scheme is rotated: `convert::dequantize` of attn-core, rounded once.
//
// Grid      (num_kv_heads, tiles of the longest range, batch); 4 warps, each with 16 tokens of the tile. Heads come first, as those of a token lie
//           side by side in the rows that are written.
// Lanes     2 or 4 of a warp share a token: 16-byte panels are loaded whole, most butterflies of the rotation are inside a lane, and stores fill
//           sectors of 32 bytes.
// Macros    ATTN_K, ATTN_V, ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_K_WINDOW, ATTN_V_WINDOW, ATTN_HEAD_DIM, ATTN_PAGE, as in config.cuh.
// Reads     pool [page][kv_head][run]; kv_lens, which decide what is read with residuals; the ranges of tokens.
// Writes    k, v [token][num_kv_heads][head_dim] in f32, f16 or bf16: the ranges, one behind the other.
// Numerics  those of attn-core/src/quant.rs and rotation.rs; compiled without contraction, subnormals kept.
// Shared    none.
// Host      attn-cuda/src/native/export.rs; parameters in kernels/src/cuda/params.rs.
#include "append.cuh"
#include "dtype.cuh"

constexpr int TILE = 64, WARPS = 4, BLOCK = TILE / WARPS;
constexpr int PANELS = HEAD_DIM / 16, LANES = HEAD_DIM > 128 ? 4 : 2, EACH = (PANELS + LANES - 1) / LANES;  // panels of 16 dims, and those of a lane

DEVICE float of_fp8(u32 code) { return bits_float((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f; }

// The codes of one token in 16 dims, as loaded.
template <int SCHEME, bool COLUMNS> struct PanelCodes {
    typedef Token<SCHEME, 1, COLUMNS> Layout;
    static constexpr int BITS = code_bits(SCHEME), WORDS = COLUMNS ? 2 * BITS : BITS == 16 ? 8 : 4;

    u32 word[WORDS];  // in columns, a byte in each

    METHOD void load(const u8* codes, u32 t, u32 panel) {
        if constexpr (COLUMNS) {
            const u32 of_panel = t % 16, slot = 4 * (of_panel % 8 / 2) + 2 * (of_panel / 8) + of_panel % 2;
            const u8* const from = codes + (t / 16 * (HEAD_DIM * BITS / 8) + panel * WORDS) * 16 + slot;
#pragma unroll
            for (int i = 0; i < WORDS; i++) word[i] = from[16 * i];
        } else {
            const u8* const from = codes + (BITS == 16 ? (2 * panel * PAGE + t) * 16 : BITS == 8 ? (panel * PAGE + t) * 16 : Layout::place_in_rows(16 * panel, t));
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 x = *(const uint4*)(from + i / 4 * (PAGE * 16));
                word[i] = x.x, word[i + 1] = x.y, word[i + 2] = x.z, word[i + 3] = x.w;
            }
        }
    }
    // That of the panel's dim e, in token t.
    METHOD u32 code(int e, u32 t) const {
        if (COLUMNS) return BITS == 8 ? word[e % WORDS] : word[e % WORDS] >> e / 8 * 4 & 15;
        if (BITS == 16) return word[e / 2 % WORDS] >> e % 2 * 16 & 0xffff;
        return BITS == 8 ? word[e / 4 % WORDS] >> e % 4 * 8 & 255 : word[e / 4 % WORDS] >> e % 4 * 8 >> (is_high(t) ? 4 : 0) & 15;
    }
};

// One side of a token of one KV head: x[j][e] is that of dim 16 * panel(j) + e.
template <int SCHEME, int GROUPS, bool COLUMNS> struct StoredToken {
    typedef Token<SCHEME, GROUPS, COLUMNS> Layout;
    static constexpr int WIDTH = Layout::WIDTH, PARAMS = WIDTH % 16 == 0 ? 1 : 4;  // dims of a group; groups that a panel may lie in, by four dims
    static_assert(WIDTH % 4 == 0, "four dims are of one group");

    float x[EACH][16];
    int part;  // the lane's place among those that share the token

    METHOD u32 panel(int j) const { return PANELS % LANES ? min(LANES * j + part, PANELS - 1) : LANES * j + part; }

    static METHOD float value(u32 code, u32 param, float tensor_scale) {
        const float scale = half_float(param & 0xffff);
        if (SCHEME == F16) return half_float(code);
        if (SCHEME == BF16) return bits_float(code << 16);
        if (SCHEME == FP8) return of_fp8(code) * tensor_scale;
        if (SCHEME == INT4) return (float)code * scale + half_float(param >> 16);
        if (SCHEME == ROTATED_INT4) return whole(2 * code, 15.0f) * scale;
        return (float)(signed char)code * (SCHEME == INT8_TENSOR ? tensor_scale : scale);
    }

    // A small number less another one, both whole: without a conversion, of which a processor does few at a time.
    static METHOD float whole(u32 number, float less) { return bits_float(0x4b000000 | number) - (8388608.0f + less); }
    static METHOD float fine_value(u32 code, u32 residual, u32 param) { return whole(2 * (16 * code + residual), 255.0f) * (half_float(param & 0xffff) * 0.0625f); }

    // `residuals` is null where the row is read without.
    METHOD void load(const u8* codes, const u8* params, const u8* residuals, u32 t, float tensor_scale) {
        PanelCodes<SCHEME, COLUMNS> stored[EACH];
        u32 param[EACH][PARAMS] = {};
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            stored[j].load(codes, t, panel(j));
#pragma unroll
            for (int n = 0; n < PARAMS && Layout::HAS_PARAMS; n++) {
                const u32 at = (16 * panel(j) + 4 * n) / WIDTH * PAGE + t;
                param[j][n] = Layout::IS_INT4 ? ((const u32*)params)[at] : ((const u16*)params)[at];
            }
        }
        if (Layout::HALF_STEPS && residuals) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                PanelCodes<SCHEME, COLUMNS> fine;
                fine.load(residuals, t, panel(j));
#pragma unroll
                for (int e = 0; e < 16; e++) x[j][e] = fine_value(stored[j].code(e, t), fine.code(e, t), param[j][e / 4 % PARAMS]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < EACH; j++)
#pragma unroll
                for (int e = 0; e < 16; e++) x[j][e] = value(stored[j].code(e, t), param[j][e / 4 % PARAMS], tensor_scale);
        }
        if constexpr (is_rotated(SCHEME)) rotate_back();
    }
    // As `Token::rotate<true>`: one bit of the dims after another.
    METHOD void rotate_back() {
        constexpr int ROTATED = HEAD_DIM & -HEAD_DIM;
#pragma unroll
        for (int stride = 1; stride < ROTATED; stride *= 2) {
#pragma unroll
            for (int j = 0; j < EACH; j++)
#pragma unroll
                for (int e = 0; e < 16; e++) {
                    const int of_panels = stride / 16, of_lane = of_panels / LANES;
                    if (stride < 16) {
                        if (!(e & stride)) Layout::butterfly(x[j][e], x[j][(e | stride) % 16]);
                    } else if (of_panels < LANES) {
                        const float own = x[j][e], other = __shfl_xor_sync(~0u, own, of_panels);
                        x[j][e] = part & of_panels ? other - own : own + other;
                    } else if (!(j & of_lane)) {
                        Layout::butterfly(x[j][e], x[(j | of_lane) % EACH][e]);
                    }
                }
        }
        constexpr int HALVINGS = ROTATED >= 128 ? 4 : ROTATED >= 32 ? 3 : 2;
#pragma unroll
        for (int j = 0; j < EACH; j++)
#pragma unroll
            for (int e = 0; e < 16; e++) x[j][e] = x[j][e] * (1.0f / (1 << HALVINGS));
    }
    // Eight dims of 16 bits from `first` on.
    METHOD uint4 narrowed(int j, int first, int dtype) const {
        const float* const from = x[j] + first;
        return {narrow_pair(from[0], from[1], dtype), narrow_pair(from[2], from[3], dtype), narrow_pair(from[4], from[5], dtype), narrow_pair(from[6], from[7], dtype)};
    }
    // The whole warp stores; `row` is null in lanes whose token is not in the range.
    METHOD void store(u8* row, int dtype) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const u32 own = LANES * j + part, first = own & ~1u;
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
            if (!row) continue;
            uint4* const to = (uint4*)row + 2 * first + is_odd;
            to[0] = is_odd ? got : low;
            if (first + 1 < PANELS) to[2] = is_odd ? high : got;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) attn_export(const __grid_constant__ ExportParams p) {
    const int head = blockIdx.x, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = p.row_starts[b], begin = p.first_tokens ? p.first_tokens[b] : 0, end = begin + p.row_starts[b + 1] - first_row;
    const int tile = begin / TILE + (int)blockIdx.y, block = tile * TILE + warp * BLOCK, newest = (p.kv_lens[b] - 1) / TILE;
    if (block + BLOCK <= begin || block >= end) return;
    const float k_scale = p.k_tensor_scales ? p.k_tensor_scales[head] : 1.0f, v_scale = p.v_tensor_scales ? p.v_tensor_scales[head] : 1.0f;
    const auto run_of = [&](u32 page) { return p.pool + (u64)page * p.page_stride + (u64)head * RUN; };
    const int page = block / PAGE;
    const u8* const run = run_of(p.page_table[(u64)b * p.page_table_stride + page]);
    const u8* residuals = nullptr;
    if ((ATTN_K_WINDOW || ATTN_V_WINDOW) && newest < tile + (ATTN_K_WINDOW > ATTN_V_WINDOW ? ATTN_K_WINDOW : ATTN_V_WINDOW))
        residuals = run_of(p.residual_pages[(u64)b * p.residual_ring + (page & (p.residual_ring - 1))]);
    const auto with = [&](int window, int at) { return residuals && newest < tile + window ? residuals + at : nullptr; };
    // The block's tokens lie in one page, so those that are not in the range can be read, too.
#pragma unroll 1
    for (int t = block + lane / LANES; t < block + BLOCK; t += 32 / LANES) {
        const u64 token = (u64)(first_row + t - begin);
        const bool is_inside = t >= begin && t < end;
        const auto row_of = [&](void* rows, long long stride) { return is_inside ? (u8*)rows + (token * stride + (u64)head * HEAD_DIM) * element_bytes(p.dtype) : nullptr; };
        if (p.k) {
            StoredToken<ATTN_K, ATTN_K_GROUPS, false> k;
            k.part = lane % LANES;
            k.load(run, run + K_PARAMS, with(ATTN_K_WINDOW, 0), t % PAGE, k_scale);
            k.store(row_of(p.k, p.k_token_stride), p.dtype);
        }
        if (p.v) {
            StoredToken<ATTN_V, ATTN_V_GROUPS, (code_bits(ATTN_V) < 16)> v;
            v.part = lane % LANES;
            v.load(run + V_CODES, run + V_PARAMS, with(ATTN_V_WINDOW, K_RESIDUALS), t % PAGE, v_scale);
            v.store(row_of(p.v, p.v_token_stride), p.dtype);
        }
    }
}
