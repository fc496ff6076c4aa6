// The functions of cuda/ptx.cuh, and CUDA's own names, for an x86-64 CPU: with them `emulate.cpp` runs the unchanged text of the decode and
// append kernels.
//
// Threads are fibers (machine.h). They are switched only where a thread waits for another one: at barriers, at instructions of a whole
// warp, at mbarriers. Copies complete at once. The emulation therefore finds wrong bits, wrong addresses, misaligned accesses and deadlocks;
// it does not find races. Floats' sums are rounded otherwise than by a tensor core: the arithmetic does not define a GPU's float schemes to the bit.
#pragma once
#include "machine.h"

#define DEVICE static inline
#define METHOD inline
#define ATTN_BULK (__CUDA_ARCH__ >= 900)
#define __device__
#define __host__
#define __global__
#define __noinline__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(x)
#define __shared__ static  // valid because kernels with __shared__ variables run one CTA at a time
#define __CUDACC__
#define SHARED_MEMORY(name, align) u8* name = me().cta->shared

namespace attn {

template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline u32 min(u32 a, int b) { return a < (u32)b ? a : (u32)b; }
static inline u32 max(int a, u32 b) { return (u32)a > b ? (u32)a : b; }
static inline u32 max(u32 a, int b) { return max(b, a); }

struct uint2 { u32 x, y; };
struct int2 { int x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (Index{me().thread, 0, 0})
#define blockIdx (me().cta->index)
#define blockDim (Index{threads_per_cta, 1, 1})
#define gridDim (grid)

// ---- numbers ----

DEVICE float bits_float(u32 x) { return same_bits<float>(x); }
DEVICE u32 float_bits(float x) { return same_bits<u32>(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(u32 x) { return __builtin_ffs(x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline int __double2hiint(double x) { return (int)(same_bits<u64>(x) >> 32); }
static inline double __hiloint2double(int hi, int lo) { return same_bits<double>((u64)(u32)hi << 32 | (u32)lo); }
static inline u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
static inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 bytes = (u64)b << 32 | a;
    u32 x = 0;
    for (int i = 0; i < 4; i++) x |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return x;
}
DEVICE float largest_of_positive(float x, float y, float z) { return max(max(x, y), z); }
DEVICE float half_float(u32 h) { return half_number(h); }
DEVICE u16 float_half(float x) { return same_bits<u16>((_Float16)x); }
DEVICE float approximate_rcp(float x) { return 1.0f / x; }
DEVICE void begin_behind(float) {}
DEVICE float approximate_exp2(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
DEVICE float approximate_log2(float x) { return log2f(x); }
DEVICE u32 rounded_bytes(float a, float b, float c, float d) {
    auto byte = [](float x) { return (u32)min(max(rintf(x), 0.0f), 255.0f); };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

// ---- threads and warps ----

DEVICE int lane_id() { return me().thread % 32; }
DEVICE int warp_id() { return me().thread / 32; }
DEVICE int opaque(int x) { return x; }
DEVICE u32 warp_slot() { return me().thread / 32; }
static inline void __syncthreads() { cta_barrier(0, threads_per_cta); }
template <int N> DEVICE void barrier_of(int id = 1) { cta_barrier(id, N); }
template <int N> DEVICE void barrier_arrive_of(int id) { cta_arrive(id, N); }
DEVICE u32 peer_address(u32 at, u32 rank) { return at | rank << 24; }
template <class Vector> static inline void peer_send(u32 to, Vector x, u32 barrier) {
    if (to % sizeof(x)) fail("a misaligned store to another CTA");
    Cta& other = peer(to >> 24);
    memcpy(other.shared + (to & 0xffffff), &x, sizeof(x));
    mbarrier_landed(barrier & 0xffffff, sizeof(x), other);
}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { cluster_barrier(); }
static inline void __syncwarp(u32 = ~0u) { warp_op(SYNC, 0); }
static inline bool __all_sync(u32, bool x) { return warp_op(ALL, x); }
static inline bool __any_sync(u32, bool x) { return warp_op(ANY, x); }
static inline u32 __ballot_sync(u32, bool x) { return warp_op(SUM, (u32)x << lane_id()); }
template <class T> static inline T __shfl_sync(u32, T x, int from, int width = 32) {
    return same_bits<T>(warp_op(SHUFFLE, same_bits<u32>(x), from, width));
}
template <class T> static inline T __shfl_up_sync(u32, T x, int by, int width = 32) {
    return same_bits<T>(warp_op(SHUFFLE_UP, same_bits<u32>(x), by, width));
}
template <class T> static inline T __shfl_xor_sync(u32, T x, int mask) { return same_bits<T>(warp_op(SHUFFLE_XOR, same_bits<u32>(x), mask)); }
DEVICE u32 warp_sum(u32 x) { return warp_op(SUM, x); }
DEVICE u32 warp_max(u32 x) { return warp_op(MAX, x); }
DEVICE int warp_max(int x) { return (int)(warp_op(MAX, (u32)x ^ 0x80000000) ^ 0x80000000); }
DEVICE int warp_min(int x) { return ~warp_max(~x); }
DEVICE bool elected() { return lane_id() == 0; }

// ---- global memory ----

template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline void __stcg(T* p, T x) { *p = x; }
// Lets other fibers run for a varying number of turns before and after a count: a correct kernel gives the same bits in every order.
DEVICE void pause() {
    static u32 dice = 1;
    dice = dice * 1664525 + 1013904223;
    for (u32 i = dice >> 28; i > 0; i--) yield();
}
DEVICE u64 count_release(u64* counter, u64 n) {
    pause();
    u64 before = *counter;
    *counter += n;
    pause();
    return before;
}
DEVICE u64 count_relaxed(u64* counter, u64 n) { return count_release(counter, n); }
DEVICE bool replace(u64* at, u64 old, u64 now) {
    pause();
    bool is_old = *at == old;
    if (is_old) *at = now;
    return is_old;
}
DEVICE void replace_bits(u32* at, u32 kept, u32 x) {
    *at &= kept;
    pause();
    *at |= x;
}
DEVICE u64 load_acquire(const u64* at) {
    yield();
    return *(volatile const u64*)at;
}
template <class T> static inline T load_relaxed(const T* at) { return *at; }
DEVICE void backoff() { spin(); }
DEVICE int load_now(const int* at) { return *at; }
DEVICE void prefetch_line(const void*) {}
DEVICE void launch_dependents() {}
DEVICE void wait_for_dependencies() {}
DEVICE void after_dependencies() {}

// ---- shared memory ----

DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - me().cta->shared); }
template <class T> static inline T& shared_at(u32 at) {
    if (at % sizeof(T)) fail("a misaligned access to shared memory");
    return *(T*)(me().cta->shared + at);
}
DEVICE u32 lds32(u32 at) { return shared_at<u32>(at); }
DEVICE u32 lds16(u32 at) { return shared_at<u16>(at); }
DEVICE uint2 lds64(u32 at) { return *(uint2*)&shared_at<u64>(at); }
DEVICE float4 lds128(u32 at) { return shared_at<float4>(at); }
DEVICE void sts32(u32 at, u32 x) { shared_at<u32>(at) = x; }
DEVICE void sts64(u32 at, float x, float y) { *(float2*)&shared_at<u64>(at) = {x, y}; }
DEVICE void sts128(u32 at, float4 x) { shared_at<float4>(at) = x; }

template <int N> static inline void load_matrices(Op op, u32 (&x)[N], u32 at) {
    const u32* loaded = warp_exchange(op, {at});
    for (int i = 0; i < N; i++) x[i] = loaded[i];
}
DEVICE void ldmatrix_x1(u32 (&x)[1], u32 at) { load_matrices(MATRIX_1, x, at); }
DEVICE void ldmatrix_x2(u32 (&x)[2], u32 at) { load_matrices(MATRIX_2, x, at); }
DEVICE void ldmatrix_x4(u32 (&x)[4], u32 at) { load_matrices(MATRIX_4, x, at); }
DEVICE void ldmatrix_x4_trans(u32 (&x)[4], u32 at) { load_matrices(MATRIX_4_TRANSPOSED, x, at); }
DEVICE void stmatrix_x4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    const u32 x[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        const u32 row = __shfl_sync(~0u, at, 8 * i + lane_id() / 4);
        sts32(row + lane_id() % 4 * 4, x[i]);
    }
}
DEVICE u32 transposed(u32 x) { return warp_op(TRANSPOSE, x); }

// ---- tensor cores ----

DEVICE int byte_sum(u32 x, int c) { return c + (int)(x & 255) + (int)(x >> 8 & 255) + (int)(x >> 16 & 255) + (int)(x >> 24); }
DEVICE int signed_byte_sum(u32 x, int c) { return byte_sum(x ^ 0x80808080u, c) - 512; }

struct Sums {
    int x[4];
};
static inline Sums product(Op op, const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32* d = warp_exchange(op, {a0, a1, a2, a3, b0, b1, (u32)c.x[0], (u32)c.x[1], (u32)c.x[2], (u32)c.x[3]});
    return {{(int)d[0], (int)d[1], (int)d[2], (int)d[3]}};
}
DEVICE Sums mma_s8_k32(const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_S8_S8, c, a0, a1, a2, a3, b0, b1); }
DEVICE Sums mma_s8u8_k32(const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_S8_U8, c, a0, a1, a2, a3, b0, b1); }
DEVICE Sums mma_u8s8_k32(const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_U8_S8, c, a0, a1, a2, a3, b0, b1); }
DEVICE Sums mma_u8_k32(const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_U8_U8, c, a0, a1, a2, a3, b0, b1); }
DEVICE Sums mma_s8_k16(const Sums& c, u32 a0, u32 a1, u32 b0) { return mma_s8_k32(c, a0, a1, 0, 0, b0, 0); }
DEVICE Sums mma_u8s8_k16(const Sums& c, u32 a0, u32 a1, u32 b0) { return mma_u8s8_k32(c, a0, a1, 0, 0, b0, 0); }

struct FloatSums {
    float x[4];
};
static inline FloatSums product(Op op, const FloatSums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32* d = warp_exchange(op, {a0, a1, a2, a3, b0, b1, float_bits(c.x[0]), float_bits(c.x[1]), float_bits(c.x[2]), float_bits(c.x[3])});
    return {{bits_float(d[0]), bits_float(d[1]), bits_float(d[2]), bits_float(d[3])}};
}
DEVICE FloatSums mma_f16(const FloatSums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_F16, c, a0, a1, a2, a3, b0, b1); }
DEVICE FloatSums mma_bf16(const FloatSums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { return product(PRODUCT_BF16, c, a0, a1, a2, a3, b0, b1); }
DEVICE u32 f16_pair(float x, float y) { return float_half(x) | (u32)float_half(y) << 16; }
DEVICE u32 bf16_pair(float x, float y) {
    auto round = [](float z) {
        u32 bits = float_bits(z);
        return z != z ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
    };
    return round(x) | round(y) << 16;
}
// A pair of halves, each a function of three.
template <class Of> static inline u32 each_half(u32 a, u32 b, u32 c, Of of) {
    auto at = [&](u32 x, int i) { return half_float(x >> 16 * i & 0xffff); };
    return f16_pair(of(at(a, 0), at(b, 0), at(c, 0)), of(at(a, 1), at(b, 1), at(c, 1)));
}
DEVICE u32 f16_fma(u32 a, u32 b, u32 c) {
    return each_half(a, b, c, [](float x, float y, float z) { return fmaf(x, y, z); });
}
DEVICE u32 f16_butterfly(u32 a) {
    const float first = half_float(a & 0xffff), second = half_float(a >> 16);
    return f16_pair(first + second, first - second);
}
DEVICE void e4m3_pairs(u32 x, u32& low, u32& high) {
    // Exponent and mantissa lie 7 bits higher in f16, whose bias is 8 more.
    auto pair = [](u32 a, u32 b) {
        auto widened = [](u32 code) { return half_float((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f; };
        return f16_pair(widened(a), widened(b));
    };
    low = pair(x & 255, x >> 8 & 255);
    high = pair(x >> 16 & 255, x >> 24);
}
template <int BIAS> DEVICE void byte_pairs(u32 x, u32& low, u32& high) {
    auto number = [&](int i) { return (float)((int)(x >> 8 * i & 255) - BIAS); };
    low = f16_pair(number(0), number(1));
    high = f16_pair(number(2), number(3));
}

// ---- barriers and copies to shared memory ----

DEVICE void barrier_init(u32 at, u32 count) { mbarrier_init(at, count); }
DEVICE void barrier_init_fence() {}
DEVICE void barrier_arrive(u32 at) { mbarrier_arrive(at, 0); }
DEVICE void barrier_expect(u32 at, u32 bytes) { mbarrier_arrive(at, bytes); }
DEVICE void barrier_expect_more(u32 at, u32 bytes) { mbarrier_expect_more(at, bytes); }
DEVICE bool barrier_test(u32 at, u32 parity) {
    bool done = mbarrier_phase(at) != parity;
    if (!done) yield();
    return done;
}
DEVICE void barrier_wait(u32 at, u32 parity) { wait_for_change(mbarrier_phase(at), parity); }
static inline void copy(u32 to, const void* from, u32 bytes, u32 align) {
    if (to % align || bytes % align || (u64)from % align) fail("a misaligned copy to shared memory");
    memcpy(me().cta->shared + to, from, bytes);
}
DEVICE void copy16_async(u32 to, const void* from) { copy(to, from, 16, 16); }
DEVICE void copy4_async(u32 to, const void* from) { copy(to, from, 4, 4); }
DEVICE void copy_async_arrive(u32 at) { mbarrier_arrive(at, 0); }
DEVICE void copy_async_wait() {}
constexpr u64 EVICT_FIRST = 0;
DEVICE void prefetch_bulk(const void*, u32) {}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 at) {
    copy(to, from, bytes, 16);
    mbarrier_landed(at, bytes);
}
DEVICE void fence_async() {}
DEVICE void copy_box(u32, const void*, int, int, int, int, u32) { fail("tensor maps are not emulated"); }

}  // namespace attn
