// import.cu: copies rows of a contiguous cache (BNSH, BSNH, any strides) into native pages; codes and scales keep their bits.
//
// Grid      (pages of the longest sequence, num_kv_heads, batch); 128 threads.
// Macros    ATTN_K, ATTN_V (no int4), ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_HEAD_DIM, ATTN_PAGE, as in config.cuh.
// Reads     rows of ATTN_HEAD_DIM codes and their f16 scales [group].
// Writes    pool [page][kv_head][run]; tokens past kv_len are left as they are.
// Numerics  none: bytes are copied.
// Shared    none.
// Host      attn-cuda/src/native/import.rs; parameters in kernels/src/cuda/params.rs.

#include "common/params.h"

typedef unsigned char u8;
typedef unsigned short u16;

static_assert(ATTN_K <= INT8_TENSOR && ATTN_V <= INT8_TENSOR, "int4 has no row form");

constexpr int HEAD_DIM = ATTN_HEAD_DIM, PAGE = ATTN_PAGE;
// Bytes of a code, and scales of a token and KV head.
constexpr int width(int scheme) { return scheme <= BF16 ? 2 : 1; }
constexpr int scales(int scheme, int groups) { return scheme == INT8_TOKEN || scheme == INT8_GROUP ? groups : 0; }
constexpr int K_BYTES = HEAD_DIM * width(ATTN_K), V_BYTES = HEAD_DIM * width(ATTN_V);  // codes of one token and KV head
constexpr int K_SCALES = scales(ATTN_K, ATTN_K_GROUPS), V_SCALES = scales(ATTN_V, ATTN_V_GROUPS);
constexpr int K_PARAMS = PAGE * K_BYTES, V_CODES = K_PARAMS + PAGE * K_SCALES * 2;
constexpr int V_PARAMS = V_CODES + PAGE * V_BYTES, RUN = V_PARAMS + PAGE * V_SCALES * 2;

extern "C" __global__ void __launch_bounds__(128) attn_import(const __grid_constant__ ImportParams p) {
    const int page = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
    const int left = p.kv_lens[b] - page * PAGE, tokens = left < PAGE ? left : PAGE;
    if (tokens <= 0) return;
    const long long home = p.page_table[(long long)b * p.page_table_stride + page];
    u8* const run = p.pool + (home * p.num_kv_heads + head) * RUN;
    auto row = [&](const long long (&s)[3], int t) { return b * s[0] + head * s[1] + ((long long)page * PAGE + t) * s[2]; };
    for (int i = threadIdx.x; i < tokens * K_BYTES; i += 128) {
        int t = i / K_BYTES, byte = i % K_BYTES;
        run[(byte / 16 * PAGE + t) * 16 + byte % 16] = p.k[row(p.k_strides, t) + byte];
    }
    for (int i = threadIdx.x; i < tokens * K_SCALES; i += 128) {
        int t = i / K_SCALES, g = i % K_SCALES;
        ((u16*)(run + K_PARAMS))[g * PAGE + t] = p.k_scales[row(p.k_scale_strides, t) + g];
    }
    for (int i = threadIdx.x; i < tokens * V_BYTES; i += 128) {
        int t = i / V_BYTES, byte = i % V_BYTES, x = t % 16;
        int at = width(ATTN_V) == 2 ? (byte / 16 * PAGE + t) * 16 + byte % 16
                                    : (t / 16 * HEAD_DIM + byte) * 16 + 4 * (x % 8 / 2) + 2 * (x / 8) + x % 2;
        run[V_CODES + at] = p.v[row(p.v_strides, t) + byte];
    }
    for (int i = threadIdx.x; i < tokens * V_SCALES; i += 128) {
        int t = i / V_SCALES, g = i % V_SCALES;
        ((u16*)(run + V_PARAMS))[g * PAGE + t] = p.v_scales[row(p.v_scale_strides, t) + g];
    }
}
