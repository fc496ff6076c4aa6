// import.cu: copies rows of a contiguous cache (BNSH, BSNH, any strides) into native pages; codes and scales keep their bits.
//
// Grid      (pages of the longest sequence, num_kv_heads, batch); 128 threads.
// Instance  page/instance.cuh; no 4 bits or rotation.
// Reads     rows of codes and their f16 scales [group].
// Writes    pool [page][kv_head][run]; tokens past kv_len are left as they are.
// Numerics  none: bytes are copied.
// Shared    none.
// Host      attn-cuda/src/native/import.rs; parameters in kernels/src/cuda/params.rs.

#include "common/params.h"
#include "common/ptx.cuh"
#include "page/instance.cuh"

namespace attn {

static_assert(Keys::SCHEME <= INT8_TENSOR && Values::SCHEME <= INT8_TENSOR, "int4 has no row form");

constexpr int K_SCALES = Keys::HAS_PARAMS ? Keys::GROUPS : 0, V_SCALES = Values::HAS_PARAMS ? Values::GROUPS : 0;  // of a token and KV head
constexpr int K_BYTES = Keys::codes(1), V_BYTES = Values::codes(1);                                              // of its codes

extern "C" __global__ void __launch_bounds__(128) attn_import(const __grid_constant__ ImportParams p) {
    const int page = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
    const int left = p.kv_lens[b] - page * PAGE, tokens = left < PAGE ? left : PAGE;
    if (tokens <= 0) return;
    const long long home = p.page_table[(long long)b * p.page_table_stride + page];
    u8* const run = p.pool + (home * p.num_kv_heads + head) * Run::BYTES;
    auto row = [&](const long long (&s)[3], int t) { return b * s[0] + head * s[1] + ((long long)page * PAGE + t) * s[2]; };
    for (int i = threadIdx.x; i < tokens * K_BYTES; i += 128) {
        int t = i / K_BYTES, byte = i % K_BYTES;
        run[(byte / 16 * PAGE + t) * 16 + byte % 16] = p.k[row(p.k_strides, t) + byte];
    }
    for (int i = threadIdx.x; i < tokens * K_SCALES; i += 128) {
        int t = i / K_SCALES, g = i % K_SCALES;
        ((u16*)(run + Run::K_PARAMS))[g * PAGE + t] = p.k_scales[row(p.k_scale_strides, t) + g];
    }
    for (int i = threadIdx.x; i < tokens * V_BYTES; i += 128) {
        int t = i / V_BYTES, byte = i % V_BYTES;
        int at = Values::BITS == 16 ? (byte / 16 * PAGE + t) * 16 + byte % 16 : (t / 16 * V_DIM + byte) * 16 + slot_of(t);
        run[Run::V_CODES + at] = p.v[row(p.v_strides, t) + byte];
    }
    for (int i = threadIdx.x; i < tokens * V_SCALES; i += 128) {
        int t = i / V_SCALES, g = i % V_SCALES;
        ((u16*)(run + Run::V_PARAMS))[g * PAGE + t] = p.v_scales[row(p.v_scale_strides, t) + g];
    }
}

}  // namespace attn
