// append.cu: quantizes new tokens, writes them into pages and seals full Int4 Channel pages: the bytes of FORMATS.md.
//
// Grid      (page jobs, num_kv_heads, batch): a CTA owns one page of one KV head, so nibbles that share a byte share a CTA.
// Macros    ATTN_K, ATTN_V, ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_D, ATTN_PAGE, as in decode.cu.
// Reads     k, v [token][num_kv_heads][ATTN_D], f32, f16 or bf16; kv_lens, which count the new tokens already.
// Writes    pool [page][kv_head][run].
// Numerics  every quotient rounded once, as attn-core/src/quant.rs: scales in f64, codes by an exact remainder; compiled without
//           contraction.
// Tail page the first page of a call may read the tail page that its last page writes: one CTA does both, in that order.
// Host      crates/attn-cuda/src/params.rs::AppendParams.

struct AppendParams {
    const void* k;
    const void* v;
    unsigned char* pool;
    const unsigned int* page_table;   // [batch][page_table_stride]
    const unsigned int* tail_pages;   // [batch]; Int4 Channel only, else null
    const int* kv_lens;               // [batch], the new tokens included
    const float* k_tensor_scales;     // [num_kv_heads] or null
    const float* v_tensor_scales;     // [num_kv_heads] or null
    long long k_token_stride;         // elements from one token to the next
    long long v_token_stride;
    int tokens;                       // new tokens of each sequence; those of sequence b start at b * tokens
    int num_kv_heads;
    int page_table_stride;
    int dtype;                        // of k and v: 0 f32, 1 f16, 2 bf16
};
static_assert(sizeof(AppendParams) == 96, "edit crates/attn-cuda/src/params.rs too");

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum { F16, BF16, FP8, INT8_TOKEN, INT8_GROUP32, INT8_TENSOR, INT4_GROUPS, INT4_CHANNEL };

constexpr int D = ATTN_D, PAGE = ATTN_PAGE, WARPS = 4, THREADS = 32 * WARPS;
constexpr bool CHANNEL = ATTN_K == INT4_CHANNEL;

__host__ __device__ constexpr int code_bits(int scheme) { return scheme <= BF16 ? 16 : scheme >= INT4_GROUPS ? 4 : 8; }
__host__ __device__ constexpr int codes_bytes(int scheme) { return PAGE * D * code_bits(scheme) / 8; }
__host__ __device__ constexpr int params_bytes(int scheme, int groups) {
    return scheme == INT4_CHANNEL ? D * 4
         : scheme == INT4_GROUPS ? groups * PAGE * 4
         : scheme == INT8_TOKEN || scheme == INT8_GROUP32 ? groups * PAGE * 2 : 0;
}
constexpr int K_PARAMS = codes_bytes(ATTN_K);
constexpr int V_CODES = K_PARAMS + params_bytes(ATTN_K, ATTN_K_GROUPS);
constexpr int V_PARAMS = V_CODES + codes_bytes(ATTN_V);
constexpr int RUN = V_PARAMS + params_bytes(ATTN_V, ATTN_V_GROUPS);

__device__ __forceinline__ float f16_to_f32(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ u16 f32_to_f16(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
// 2^k for a normal result.
__device__ __forceinline__ double pow2(int k) { return __hiloint2double((1023 + k) << 20, 0); }
__device__ __forceinline__ int exponent(double x) { return ((__double2hiint(x) >> 20) & 0x7ff) - 1023; }

// quant.rs::round_to
__device__ double round_to(double x, int mantissa_bits, int min_exp, double max) {
    if (x == 0.0) return 0.0;
    int e = exponent(x);
    e = (e < min_exp ? min_exp : e) - mantissa_bits;
    return fmin(fmax(rint(x * pow2(-e)) * pow2(e), -max), max);
}
// quant.rs::to_f16: zero is always +0.
__device__ u16 to_f16(double x) { return f32_to_f16((float)(round_to(x, 10, -14, 65504.0) + 0.0)); }
// quant.rs::to_fp8
__device__ u16 to_fp8(float x, float scale) {
    double v = round_to(__ddiv_rn((double)x, (double)scale), 3, -6, 448.0);
    u16 sign = (u16)(__float_as_uint(x) >> 31 << 7);
    v = fabs(v);
    if (v < 0.015625) return sign | (u16)(v * 512.0);
    return sign | (u16)((exponent(v) + 7) << 3) | (u16)((__double2hiint(v) >> 17) & 7);
}
// quant.rs::code, without its division: a rounded guess, and the exact remainder tells whether its neighbour is nearer. The
// remainder is exact because the guess has 9 bits and the scale 11; a tenth of the f64 division's instructions.
__device__ __forceinline__ int code(float x, u16 scale, float lo, float hi) {
    if (scale == 0) return 0;
    float s = f16_to_f32(scale), n = rintf(fminf(fmaxf(x * __frcp_rn(s), lo - 1.0f), hi + 1.0f));
    float rest = __fmaf_rn(-n, s, x), twice = 2.0f * fabsf(rest);
    if (twice > s || (twice == s && ((int)n & 1))) n += copysignf(1.0f, rest);
    return (int)fminf(fmaxf(n, lo), hi);
}

__device__ __forceinline__ float warp_min(float x) {
    for (int i = 16; i; i >>= 1) x = fminf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

__device__ __forceinline__ float load(const void* base, int dtype, long long i) {
    if (dtype == 0) return ((const float*)base)[i];
    u16 h = ((const u16*)base)[i];
    return dtype == 1 ? f16_to_f32(h) : __uint_as_float((u32)h << 16);
}

// f16 scale and shift of int4 values in lo..hi; quant.rs::int4_group.
__device__ __forceinline__ ushort2 int4_param(float lo, float hi) {
    float span = fminf(__fsub_rn(hi, lo), 3.402823466e38f);
    return make_ushort2(to_f16(__ddiv_rn((double)span, 15.0)), to_f16((double)lo));
}
__device__ __forceinline__ int int4_code(float x, ushort2 param) {
    return code(__fsub_rn(x, f16_to_f32(param.y)), param.x, 0.0f, 15.0f);
}

// One warp encodes one token of one head: codes to shared memory, params [group][t] to `params`.
template <int SCHEME, int GROUPS>
__device__ void encode(const void* x, int dtype, long long at, float tensor_scale, u16* codes, u8* params, int t, int lane) {
    if constexpr (SCHEME == F16 || SCHEME == BF16 || SCHEME == FP8 || SCHEME == INT8_TENSOR) {
        for (int d = lane; d < D; d += 32) {
            float v = load(x, dtype, at + d);
            if (SCHEME == F16) codes[d] = f32_to_f16(fminf(fmaxf(v, -65504.f), 65504.f));
            if (SCHEME == BF16) {
                const float max = __uint_as_float(0x7f7f0000);
                u32 u = __float_as_uint(fminf(fmaxf(v, -max), max));
                codes[d] = (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
            }
            if (SCHEME == FP8) codes[d] = to_fp8(v, tensor_scale);
            if (SCHEME == INT8_TENSOR) {
                double q = rint(__ddiv_rn((double)v, (double)tensor_scale));
                codes[d] = (u8)(int)fmin(fmax(q, -127.0), 127.0);
            }
        }
    } else {
        constexpr int WIDTH = D / GROUPS;
        for (int g = 0; g < GROUPS; g++) {
            float lo = __uint_as_float(0x7f800000), hi = -lo;
            for (int d = lane; d < WIDTH; d += 32) {
                float v = load(x, dtype, at + g * WIDTH + d);
                lo = fminf(lo, v), hi = fmaxf(hi, v);
            }
            lo = warp_min(lo), hi = warp_max(hi);
            if constexpr (SCHEME == INT4_GROUPS) {
                ushort2 param = int4_param(lo, hi);
                if (lane == 0) *(ushort2*)(params + (g * PAGE + t) * 4) = param;
                for (int d = lane; d < WIDTH; d += 32) codes[g * WIDTH + d] = (u16)int4_code(load(x, dtype, at + g * WIDTH + d), param);
            } else {
                u16 scale = to_f16(__ddiv_rn((double)fmaxf(hi, -lo), 127.0));
                if (lane == 0) *(u16*)(params + (g * PAGE + t) * 2) = scale;
                for (int d = lane; d < WIDTH; d += 32) codes[g * WIDTH + d] = (u8)code(load(x, dtype, at + g * WIDTH + d), scale, -127.0f, 127.0f);
            }
        }
    }
    __syncwarp();
}

__device__ __forceinline__ bool is_high(int t) { return t % 16 >= 8; }

// Token t's codes into panels that run along the dims (all of K, 16-bit V): a word of each row per lane. Of 4 bits, tokens t and
// t + 8 share bytes: the first one's low nibbles clear the high ones.
template <int BITS>
__device__ void store_rows(const u16* c, u8* out, int t, int lane) {
    for (int w = lane; w < D * (BITS == 4 ? 8 : BITS) / 32; w += 32) {
        if constexpr (BITS == 16) {
            int d = 2 * w;
            *(u32*)(out + (d / 8 * PAGE + t) * 16 + d % 8 * 2) = c[d] | (u32)c[d + 1] << 16;
        } else if constexpr (BITS == 8) {
            int d = 4 * w;
            *(u32*)(out + (d / 16 * PAGE + t) * 16 + d % 16) = c[d] | c[d + 1] << 8 | c[d + 2] << 16 | (u32)c[d + 3] << 24;
        } else {
            int d = 4 * w;
            u32* at = (u32*)(out + (d / 16 * (PAGE / 2) + t / 16 * 8 + t % 8) * 16 + d % 16);
            u32 word = c[d] | c[d + 1] << 8 | c[d + 2] << 16 | (u32)c[d + 3] << 24;
            *at = is_high(t) ? (*at & 0x0f0f0f0f) | word << 4 : word;
        }
    }
}

// Token t's codes into panels that run along the tokens (V of 8 and 4 bits; of 4 bits, dims d and d + 8 share a byte).
template <int BITS>
__device__ void store_columns(const u16* c, u8* out, int t, int lane) {
    int x = t % 16, slot = 4 * (x % 8 / 2) + 2 * (x / 8) + x % 2;
    for (int row = lane; row < D * BITS / 8; row += 32) {
        int d = row / 8 * 16 + row % 8;
        out[(t / 16 * (D * BITS / 8) + row) * 16 + slot] = (u8)(BITS == 8 ? c[row] : c[d] | c[d + 8] << 4);
    }
}

// Re-codes the page's K per channel from Int8 Token codes and scales in shared memory.
__device__ void seal(const signed char (*codes)[D], const u16* scales, ushort2* channel, u8* run) {
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += THREADS) {
        float lo = __uint_as_float(0x7f800000), hi = -lo;
        for (int t = 0; t < PAGE; t++) {
            float x = __fmul_rn((float)codes[t][d], f16_to_f32(scales[t]));
            lo = fminf(lo, x), hi = fmaxf(hi, x);
        }
        channel[d] = int4_param(lo, hi);
        *(ushort2*)(run + K_PARAMS + 4 * d) = channel[d];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PAGE * D / 2; i += THREADS) {
        int row = i / D, d = i % D, t = row / 8 * 16 + row % 8;
        int a = int4_code(__fmul_rn((float)codes[t][d], f16_to_f32(scales[t])), channel[d]);
        int b = int4_code(__fmul_rn((float)codes[t + 8][d], f16_to_f32(scales[t + 8])), channel[d]);
        run[(d / 16 * (PAGE / 2) + row) * 16 + d % 16] = (u8)(a | b << 4);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_append(const __grid_constant__ AppendParams p) {
    __shared__ u16 staged[WARPS][D];
    const int head = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    // A decode behind this may begin already: it waits itself before it reads.
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const int end = p.kv_lens[b], begin = end - p.tokens;
    if (p.tokens <= 0 || begin < 0) return;
    const int first = begin / PAGE, last = (end - 1) / PAGE;
    int page = first + (int)blockIdx.x;
    if (page > last) return;
    const bool both = CHANNEL && first < last && begin % PAGE != 0 && end % PAGE != 0;
    if (both && page == last) return;
    const float k_scale = p.k_tensor_scales ? p.k_tensor_scales[head] : 1.f;
    const float v_scale = p.v_tensor_scales ? p.v_tensor_scales[head] : 1.f;
    u16* const codes = staged[warp];
    const unsigned int* const table = p.page_table + (long long)b * p.page_table_stride;

    for (;; page = last) {
        const int t0 = page == first ? begin % PAGE : 0, t1 = page == last ? (end - 1) % PAGE + 1 : PAGE;
        const long long token0 = (long long)b * p.tokens + (long long)page * PAGE - begin;  // the page's token 0 in k, v
        u8* const run = p.pool + ((long long)table[page] * p.num_kv_heads + head) * RUN;

        // K: a warp per token.
        if constexpr (CHANNEL) {
            __shared__ __align__(16) signed char open_codes[PAGE][D];
            __shared__ __align__(4) u16 open_scales[PAGE];
            __shared__ ushort2 channel[D];
            u8* const tail = p.pool + ((long long)p.tail_pages[b] * p.num_kv_heads + head) * RUN;
            u8* const tail_scales = tail + PAGE * D;
            const bool seals = t1 == PAGE;
            for (int t = t0 + warp; t < t1; t += WARPS) {
                long long at = (token0 + t) * p.k_token_stride + (long long)head * D;
                encode<INT8_TOKEN, 1>(p.k, p.dtype, at, 1.f, codes, seals ? (u8*)open_scales : tail_scales, t, lane);
                if (seals) for (int d = lane; d < D; d += 32) open_codes[t][d] = (signed char)codes[d];
                else store_rows<8>(codes, tail, t, lane);
                __syncwarp();
            }
            if (seals) {
                for (int i = threadIdx.x; i < t0 * D; i += THREADS) open_codes[i / D][i % D] = (signed char)tail[(i % D / 16 * PAGE + i / D) * 16 + i % D % 16];
                for (int t = threadIdx.x; t < t0; t += THREADS) open_scales[t] = ((const u16*)tail_scales)[t];
                seal(open_codes, open_scales, channel, run);
            }
        } else {
            // Low nibbles clear the high ones, so they go first.
            constexpr bool PAIRS = code_bits(ATTN_K) == 4;
            for (int phase = 0; phase < (PAIRS ? 2 : 1); phase++) {
                if (phase == 1) __syncthreads();
                for (int t = t0 + warp; t < t1; t += WARPS) {
                    if (PAIRS && is_high(t) != (phase == 1)) continue;
                    long long at = (token0 + t) * p.k_token_stride + (long long)head * D;
                    encode<ATTN_K, ATTN_K_GROUPS>(p.k, p.dtype, at, k_scale, codes, run + K_PARAMS, t, lane);
                    store_rows<code_bits(ATTN_K)>(codes, run, t, lane);
                    __syncwarp();
                }
            }
        }
        // Other warps take the first tokens than of K: a single token's K and V go side by side.
        for (int t = t0 + (warp + WARPS / 2) % WARPS; t < t1; t += WARPS) {
            long long at = (token0 + t) * p.v_token_stride + (long long)head * D;
            encode<ATTN_V, ATTN_V_GROUPS>(p.v, p.dtype, at, v_scale, codes, run + V_PARAMS, t, lane);
            if constexpr (code_bits(ATTN_V) == 16) store_rows<16>(codes, run + V_CODES, t, lane);
            else store_columns<code_bits(ATTN_V)>(codes, run + V_CODES, t, lane);
            __syncwarp();
        }
        __syncthreads();
        if (!both || page != first) return;
    }
}
