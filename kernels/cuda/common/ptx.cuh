// One function for each instruction that C++ has no name for; nothing here is about attention.
#pragma once

namespace attn {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Functions; and functions of an object.
#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ATTN_BULK 1  // the bulk copy engine
#else
#define ATTN_BULK 0
#endif

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Read once: the compiler would rather read the special register again than keep it.
DEVICE int lane_id() {
    int x;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
    return x;
}

// The thread's warp in its CTA. All lanes ask; the compiler then knows that it is the same in all of them, as it does not of threadIdx.
DEVICE int warp_id() { return __shfl_sync(~0u, (int)threadIdx.x / 32, 0); }

DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }

// The largest of numbers none of which is negative: their bits have the same order.
DEVICE float largest_of_positive(float x, float y, float z) { return bits_float((u32)__vimax3_s32((int)float_bits(x), (int)float_bits(y), (int)float_bits(z))); }

DEVICE float half_float(u32 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)h));
    return x;
}

DEVICE u16 float_half(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
// Within one unit in the last place.
DEVICE float approximate_rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// What follows in a thread's program, and has effects, does not begin before x is known, which is not negative: ptxas moves waits ahead of sums that do not need them.
DEVICE void begin_behind(float x) { asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p nanosleep.u32 1; }" ::"f"(x) : "memory"); }
DEVICE float approximate_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float approximate_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Four floats rounded to integers, half to even, cut to 0..255: bytes, the first one lowest.
DEVICE u32 rounded_bytes(float a, float b, float c, float d) {
    u32 high, all;
    asm("{ .reg .s32 x, y; cvt.rni.s32.f32 x, %1; cvt.rni.s32.f32 y, %2; cvt.pack.sat.u8.s32.b32 %0, y, x, 0; }" : "=r"(high) : "f"(c), "f"(d));
    asm("{ .reg .s32 x, y; cvt.rni.s32.f32 x, %1; cvt.rni.s32.f32 y, %2; cvt.pack.sat.u8.s32.b32 %0, y, x, %3; }" : "=r"(all) : "f"(a), "f"(b), "r"(high));
    return all;
}

// ---- shared memory ----

#define SHARED_MEMORY(name, align) extern __shared__ __align__(align) u8 name[]

DEVICE u32 lds32(u32 at) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at)); return x; }
DEVICE u32 lds16(u32 at) { u16 x; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at)); return x; }
DEVICE uint2 lds64(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
    return x;
}
DEVICE float4 lds128(u32 at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
    return x;
}
DEVICE void sts32(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(x)); }
DEVICE void sts64(u32 at, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y)); }
DEVICE void sts128(u32 at, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w));
}

// Each lane of an 8-lane group names a 16-byte row; lane 4r + c receives bytes 4c..4c+3 of row r of each matrix.
DEVICE void ldmatrix_x1(u32 (&x)[1], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x[0]) : "r"(at));
}
DEVICE void ldmatrix_x2(u32 (&x)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
}
DEVICE void ldmatrix_x4(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
DEVICE void ldmatrix_x4_trans(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
// The reverse of ldmatrix_x4; of Hopper.
DEVICE void stmatrix_x4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Transposes 8 × 8 halves: lane 4r + c has columns 2c, 2c + 1 of row r, and gets those of the transposed.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// `c` and the four bytes of a word, unsigned or signed.
DEVICE int byte_sum(u32 x, int c) { return (int)__dp4a(x, 0x01010101u, (u32)c); }
DEVICE int signed_byte_sum(u32 x, int c) { return __dp4a((int)x, 0x01010101, c); }

// ---- tensor cores: d = a·b + c; elements 0, 1 are row lane/4, elements 2, 3 row lane/4 + 8; columns 2·(lane%4) + {0, 1} ----

struct Sums {
    int x[4];
};

#define ATTN_MMA_K32(name, a_type, b_type)                                                                                        \
    DEVICE Sums name(const Sums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                                                \
        Sums d;                                                                                                                       \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "          \
            "{%10, %11, %12, %13};"                                                                                                   \
            : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3])                                                                  \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c.x[0]), "r"(c.x[1]), "r"(c.x[2]), "r"(c.x[3]));              \
        return d;                                                                                                                     \
    }
#define ATTN_MMA_K16(name, a_type, b_type)                                                                                        \
    DEVICE Sums name(const Sums& c, u32 a0, u32 a1, u32 b0) {                                                                        \
        Sums d;                                                                                                                       \
        asm("mma.sync.aligned.m16n8k16.row.col.s32." a_type "." b_type ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"    \
            : "=r"(d.x[0]), "=r"(d.x[1]), "=r"(d.x[2]), "=r"(d.x[3])                                                                  \
            : "r"(a0), "r"(a1), "r"(b0), "r"(c.x[0]), "r"(c.x[1]), "r"(c.x[2]), "r"(c.x[3]));                                         \
        return d;                                                                                                                     \
    }
ATTN_MMA_K32(mma_s8_k32, "s8", "s8")
ATTN_MMA_K16(mma_s8_k16, "s8", "s8")
ATTN_MMA_K32(mma_u8s8_k32, "u8", "s8")
ATTN_MMA_K16(mma_u8s8_k16, "u8", "s8")
ATTN_MMA_K32(mma_s8u8_k32, "s8", "u8")
ATTN_MMA_K32(mma_u8_k32, "u8", "u8")

struct FloatSums {
    float x[4];
};

#define ATTN_MMA_FLOAT(name, type)                                                                                                \
    DEVICE FloatSums name(const FloatSums& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                                      \
        FloatSums d;                                                                                                                  \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "              \
            "{%10, %11, %12, %13};"                                                                                                   \
            : "=f"(d.x[0]), "=f"(d.x[1]), "=f"(d.x[2]), "=f"(d.x[3])                                                                  \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]), "f"(c.x[3]));              \
        return d;                                                                                                                     \
    }
ATTN_MMA_FLOAT(mma_f16, "f16")
ATTN_MMA_FLOAT(mma_bf16, "bf16")

// Pairs of 16-bit floats, the first in the low half.
DEVICE u32 f16_pair(float x, float y) {
    u32 z;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(z) : "f"(x), "f"(y));
    return z;
}
DEVICE u32 bf16_pair(float x, float y) {
    u32 z;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(z) : "f"(x), "f"(y));
    return z;
}
// Four e4m3 codes to two pairs of f16, exactly.
DEVICE void e4m3_pairs(u32 x, u32& low, u32& high) {
#if ATTN_BULK
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(low), "=r"(high) : "r"(x));
#else
    // Exponent and mantissa lie 7 bits higher in f16, whose bias is 8 more: 2^8 makes up for it, for subnormals too.
    u32 a = __byte_perm(x, 0, 0x1404), b = __byte_perm(x, 0, 0x3424);  // each code in a high byte
    a = (a & 0x80008000) | (a >> 1 & 0x3f803f80);
    b = (b & 0x80008000) | (b >> 1 & 0x3f803f80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(a), "r"(0x5c005c00));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(b), "r"(0x5c005c00));
#endif
}

// Four bytes, less BIAS, to two pairs of f16, exactly.
template <int BIAS> DEVICE void byte_pairs(u32 x, u32& low, u32& high) {
    constexpr u32 BASE = 0x6400, OFFSET = (BASE + BIAS) * 0x10001u;
    low = __byte_perm(x, BASE * 0x10001u, 0x5150);  // 1024 + byte
    high = __byte_perm(x, BASE * 0x10001u, 0x5352);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(OFFSET));
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(OFFSET));
}
// a·b + c of pairs of f16.
DEVICE u32 f16_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// The sum of a pair of f16, and the first less the second.
DEVICE u32 f16_butterfly(u32 a) {
    u32 d;
    asm("{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, %1; mov.b32 x, {l, l}; mov.b32 y, {h, h}; fma.rn.f16x2 %0, y, %2, x; }" : "=r"(d) : "r"(a), "r"(0xbc003c00));
    return d;
}

#define ATTN_REDUX(name, type, op)                                                            \
    DEVICE type name(type x) {                                                                \
        type y;                                                                               \
        asm volatile("redux.sync." op " %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));             \
        return y;                                                                             \
    }
ATTN_REDUX(warp_sum, u32, "add.u32")
ATTN_REDUX(warp_max, u32, "max.u32")
ATTN_REDUX(warp_max, int, "max.s32")
ATTN_REDUX(warp_min, int, "min.s32")

// Adds. What this CTA wrote before a barrier is visible to threads that see the count, and the other way round.
DEVICE u64 count_release(u64* counter, u64 n) {
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(n) : "memory");
    return before;
}
// Adds, and orders nothing: what orders drops the SM's first cache.
DEVICE u64 count_relaxed(u64* counter, u64 n) {
    u64 before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(n) : "memory");
    return before;
}

// Whether `old` was there, and now is `now`.
DEVICE bool replace(u64* at, u64 old, u64 now) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(before) : "l"(at), "l"(old), "l"(now) : "memory");
    return before == old;
}

// Replaces the bits of a word but for `kept`, whatever others do to those.
DEVICE void replace_bits(u32* at, u32 kept, u32 x) {
    asm volatile("red.relaxed.gpu.global.and.b32 [%0], %1;" :: "l"(at), "r"(kept) : "memory");
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" :: "l"(at), "r"(x) : "memory");
}

// Has a line of 128 bytes brought to L2.
DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }

// A launch that may begin before the one ahead of it has ended waits here for its results.
DEVICE void wait_for_dependencies() {
#if ATTN_BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch may begin, once all CTAs have said so or ended; it sees nothing of this one yet.
DEVICE void launch_dependents() {
#if ATTN_BULK
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void after_dependencies() {
    launch_dependents();
    wait_for_dependencies();
}

// ---- clusters: CTAs that run at once and write to each other's shared memory ----

#if ATTN_BULK
// compute-sanitizer takes no st.async of a CTA without others: .ci/gpu compiles for it with ATTN_SANITIZED, and such a CTA then stores and counts by itself.
#ifdef ATTN_SANITIZED
DEVICE bool sends_itself() { return gridDim.x == 1; }
#else
DEVICE bool sends_itself() { return false; }
#endif
template <class Vector> DEVICE void send_itself(u32 to, const Vector& x, u32 barrier) {
    const float* words = (const float*)&x;
#pragma unroll
    for (int i = 0; i < (int)sizeof(x) / 4; i++) sts32(to + 4 * i, float_bits(words[i]));
    asm volatile("fence.acq_rel.cta; mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "n"(sizeof(x)) : "memory");
}
// Where what lies at `at` here lies in CTA `rank` of the cluster.
DEVICE u32 peer_address(u32 at, u32 rank) {
    if (sends_itself()) return at;
    u32 x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(at), "r"(rank));
    return x;
}
// To another CTA, whose barrier counts the bytes when they are there.
DEVICE void peer_send(u32 to, float2 x, u32 barrier) {
    if (sends_itself()) return send_itself(to, x, barrier);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(to), "f"(x.x), "f"(x.y), "r"(barrier) : "memory");
}
DEVICE void peer_send(u32 to, float4 x, u32 barrier) {
    if (sends_itself()) return send_itself(to, x, barrier);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier) : "memory");
}
// All threads of the cluster that have not ended; what was written before is seen behind it.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

#define ATTN_LOAD(name, type, letter, how)                                                    \
    DEVICE type name(const type* at) {                                                        \
        type x;                                                                               \
        asm volatile("ld." how " %0, [%1];" : "=" letter(x) : "l"(at) : "memory");            \
        return x;                                                                             \
    }
// Issued here, wherever the value is used.
ATTN_LOAD(load_now, int, "r", "global.s32")
ATTN_LOAD(load_acquire, u64, "l", "acquire.gpu.global.u64")
// Loads what another CTA may have stored.
ATTN_LOAD(load_relaxed, float, "f", "relaxed.gpu.global.f32")
DEVICE float2 load_relaxed(const float2* at) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
    return x;
}
DEVICE float4 load_relaxed(const float4* at) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
    return x;
}
DEVICE void backoff() {}  // hardware schedules other warps; the host build yields here
// Optimization barrier: values derived from x are not hoisted out of the loop around it (register pressure).
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Where on the SM the warp lies: every fourth slot belongs to the same scheduler. A hint, which may change.
DEVICE u32 warp_slot() {
    u32 x;
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(x));
    return x;
}

// ---- barriers and copies to shared memory ----

// Of N threads; barrier 0 is that of the whole CTA.
template <int N> DEVICE void barrier_of(int id = 1) { asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(N) : "memory"); }
// Arrives there and does not wait for the others.
template <int N> DEVICE void barrier_arrive_of(int id) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "n"(N) : "memory"); }

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_init_fence() {
#if ATTN_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" :: "r"(barrier) : "memory");
}
DEVICE bool barrier_test(u32 barrier, u32 parity) {
    u32 done;
#if ATTN_BULK
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    return done != 0;
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_test(barrier, parity)) {
    }
}

DEVICE void copy16_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
DEVICE void copy4_async(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
// The barrier sees one arrival of this thread once its copies so far have landed.
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
// Waits for this thread's copies so far.
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if ATTN_BULK
// True in one lane. Unlike a test of the lane's number it tells the compiler so, which spares a loop around each bulk copy.
DEVICE bool elected() {
    u32 x;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(x));
    return x != 0;
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" :: "r"(barrier), "r"(bytes) : "memory");
}
// The cache is read once: it should not push anything else out of L2. What `createpolicy.fractional.L2::evict_first` with 1.0 gives.
constexpr u64 EVICT_FIRST = 0x12F0000000000000;
// Fetches global memory into L2; both numbers are multiples of 16.
DEVICE void prefetch_bulk(const void* from, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes)); }
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}
// More bytes to come, without an arrival.
DEVICE void barrier_expect_more(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Orders the threads' writes to shared memory before those of the copy engine, and before reads by products.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A box of a tensor of four dimensions, from these coordinates on.
DEVICE void copy_box(u32 to, const void* map, int x, int y, int z, int w, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(EVICT_FIRST) : "memory");
}
#else
DEVICE void fence_async() {}  // threads copy, and products read as threads do
DEVICE void prefetch_bulk(const void*, u32) {}
#endif

}  // namespace attn
