// Products of a warpgroup (four warps): d = a·b + d, asynchronous, 64 rows of a by N columns of b, 32 bytes deep (wgmma, sm_90a).
//
// A thread of warp w has rows 16w + lane/4 and that + 8: d[4j + 2h + e] is row 16w + lane/4 + 8h, column 8j + 2·(lane%4) + e. Of `a` in registers it has
// bytes 4·(lane%4) + {0..3} of both rows, then those of the second 16 of the 32. In shared memory a and b lie in matrices of eight rows of 16 bytes.
#pragma once
#include "common/ptx.cuh"

namespace attn {

// Matrices in shared memory: `along`, bytes from one matrix to the next along the depth, and `across`, along the columns (of a: its rows).
DEVICE u64 matrices(u32 at, u32 along, u32 across = 128) { return (u64)(at >> 4 & 0x3fff) | (u64)(along >> 4) << 16 | (u64)(across >> 4) << 32; }
// Those of rows of SWIZZLE bytes side by side, which the copy engine wrote: the 16-byte chunks of neighbouring rows lie in different banks. `along`: where rows lie along the
// columns, bytes from so many columns to the next ones; `across`: from eight rows to the next.
template <int SWIZZLE> DEVICE u64 swizzled_matrices(u32 at, u32 along, u32 across = 8 * SWIZZLE) {
    static_assert(SWIZZLE == 128 || SWIZZLE == 64 || SWIZZLE == 32, "a swizzle of the copy engine");
    return matrices(at, along, across) | (u64)(SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3) << 62;
}
// The matrices so many bytes behind others.
DEVICE u64 matrices_behind(u64 first, u32 bytes) { return (first & 0xffffffff00000000) | (u32)((u32)first + (bytes >> 4)); }

// What registers and shared memory hold from here on is what products see.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products but the last PENDING groups.
template <int PENDING> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Sums of products that are waited for: the compiler does not know that the wait is what brings them.
template <int N> DEVICE void products_landed(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The registers of a thread pool that this warpgroup keeps, or may have.
template <int COUNT> DEVICE void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

#define ATTN_8(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define ATTN_24(C) ATTN_8(C, 0), ATTN_8(C, 8), ATTN_8(C, 16)
#define ATTN_32(C) ATTN_24(C), ATTN_8(C, 24)
#define ATTN_40(C) ATTN_32(C), ATTN_8(C, 32)
#define ATTN_48(C) ATTN_40(C), ATTN_8(C, 40)
#define ATTN_64(C) ATTN_48(C), ATTN_8(C, 48), ATTN_8(C, 56)
#define ATTN_80(C) ATTN_64(C), ATTN_8(C, 64), ATTN_8(C, 72)
#define ATTN_96(C) ATTN_64(C), ATTN_8(C, 64), ATTN_8(C, 72), ATTN_8(C, 80), ATTN_8(C, 88)
#define ATTN_128(C) ATTN_96(C), ATTN_8(C, 96), ATTN_8(C, 104), ATTN_8(C, 112), ATTN_8(C, 120)
#define ATTN_TO_23 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define ATTN_TO_31 ATTN_TO_23 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_TO_39 ATTN_TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTN_TO_47 ATTN_TO_39 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTN_TO_63 ATTN_TO_47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTN_TO_79 ATTN_TO_63 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define ATTN_TO_95 ATTN_TO_79 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTN_TO_127 ATTN_TO_95 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The product of a in registers, with N numbers of d in a thread; SHAPE and TYPES: of the instruction; C: the constraint of d; TAIL: what follows the predicate.
#define ATTN_PRODUCT_OF(N, SUMS, A0, A1, A2, A3, B, ADDS, SHAPE, TYPES, C, TAIL)                                                                           \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE TYPES " {" SUMS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
                 "}, %" #B ", p" TAIL "; }"                                                                                                                  \
                 : ATTN_##N(C) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds))
#define ATTN_PRODUCT_24(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(24, ATTN_TO_23, 24, 25, 26, 27, 28, 29, "m64n48" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_32(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(32, ATTN_TO_31, 32, 33, 34, 35, 36, 37, "m64n64" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_40(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(40, ATTN_TO_39, 40, 41, 42, 43, 44, 45, "m64n80" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_48(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(48, ATTN_TO_47, 48, 49, 50, 51, 52, 53, "m64n96" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_64(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(64, ATTN_TO_63, 64, 65, 66, 67, 68, 69, "m64n128" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_80(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(80, ATTN_TO_79, 80, 81, 82, 83, 84, 85, "m64n160" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_96(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(96, ATTN_TO_95, 96, 97, 98, 99, 100, 101, "m64n192" DEPTH, TYPES, C, TAIL)
#define ATTN_PRODUCT_128(DEPTH, TYPES, C, TAIL) ATTN_PRODUCT_OF(128, ATTN_TO_127, 128, 129, 130, 131, 132, 133, "m64n256" DEPTH, TYPES, C, TAIL)
// The same of a in shared memory.
#define ATTN_SHARED_PRODUCT_OF(N, SUMS, A, B, ADDS, SHAPE, TYPES, C, TAIL)                                                                                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE TYPES " {" SUMS "}, %" #A ", %" #B ", p" TAIL "; }"     \
                 : ATTN_##N(C) : "l"(a), "l"(b), "r"((int)adds))
#define ATTN_SHARED_PRODUCT_24(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(24, ATTN_TO_23, 24, 25, 26, "m64n48" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_32(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(32, ATTN_TO_31, 32, 33, 34, "m64n64" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_40(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(40, ATTN_TO_39, 40, 41, 42, "m64n80" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_48(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(48, ATTN_TO_47, 48, 49, 50, "m64n96" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_64(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(64, ATTN_TO_63, 64, 65, 66, "m64n128" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_80(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(80, ATTN_TO_79, 80, 81, 82, "m64n160" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_96(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(96, ATTN_TO_95, 96, 97, 98, "m64n192" DEPTH, TYPES, C, TAIL)
#define ATTN_SHARED_PRODUCT_128(DEPTH, TYPES, C, TAIL) ATTN_SHARED_PRODUCT_OF(128, ATTN_TO_127, 128, 129, 130, "m64n256" DEPTH, TYPES, C, TAIL)
// Numbers of d of the head dims that there are.
#define ATTN_EACH_WIDTH(DEFINE) DEFINE(24) DEFINE(32) DEFINE(40) DEFINE(48) DEFINE(64) DEFINE(80) DEFINE(96) DEFINE(128)

// `adds`: whether d counts; else it is overwritten.
template <bool B_SIGNED> struct Products {
    // b has 64 columns.
    DEVICE void multiply_shared(int (&d)[32], u64 a, u64 b, bool adds) {
        if constexpr (B_SIGNED) ATTN_SHARED_PRODUCT_32("k32", ".s32.s8.s8", "+r", "");
        else ATTN_SHARED_PRODUCT_32("k32", ".s32.s8.u8", "+r", "");
    }
    DEVICE void multiply_signed(int (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
        if constexpr (B_SIGNED) ATTN_PRODUCT_32("k32", ".s32.s8.s8", "+r", "");
        else ATTN_PRODUCT_32("k32", ".s32.s8.u8", "+r", "");
    }
    // b has 48 to 256 columns.
#define ATTN_MULTIPLY(N)                                                                     \
    DEVICE void multiply_shared_unsigned(int (&d)[N], u64 a, u64 b, bool adds) {             \
        if constexpr (B_SIGNED) ATTN_SHARED_PRODUCT_##N("k32", ".s32.u8.s8", "+r", "");     \
        else ATTN_SHARED_PRODUCT_##N("k32", ".s32.u8.u8", "+r", "");                        \
    }                                                                                        \
    DEVICE void multiply_unsigned(int (&d)[N], const u32 (&a)[4], u64 b, bool adds) {        \
        if constexpr (B_SIGNED) ATTN_PRODUCT_##N("k32", ".s32.u8.s8", "+r", "");            \
        else ATTN_PRODUCT_##N("k32", ".s32.u8.u8", "+r", "");                               \
    }
    ATTN_EACH_WIDTH(ATTN_MULTIPLY)
#undef ATTN_MULTIPLY
};

// Products of 16-bit floats, 16 deep, summed in f32. Of `a` a thread has elements 2·(lane%4) + {0, 1} of both rows, then those of the second 8 of
// the 16. b's columns lie in rows of eight elements (K in pages), or, B_TURNED, its rows do (V in pages).
template <bool IS_BF16, bool B_TURNED> struct FloatProducts {
    // PRODUCT with the tail for b as it is turned, or not.
#define ATTN_OF_FLOATS(PRODUCT, TURNED, STRAIGHT)                                      \
    if constexpr (IS_BF16 && B_TURNED) PRODUCT("k16", ".f32.bf16.bf16", "+f", TURNED); \
    else if constexpr (IS_BF16) PRODUCT("k16", ".f32.bf16.bf16", "+f", STRAIGHT);      \
    else if constexpr (B_TURNED) PRODUCT("k16", ".f32.f16.f16", "+f", TURNED);         \
    else PRODUCT("k16", ".f32.f16.f16", "+f", STRAIGHT)
#define ATTN_MULTIPLY(N)                                                                                                                                       \
    DEVICE void multiply_shared(float (&d)[N], u64 a, u64 b, bool adds) { ATTN_OF_FLOATS(ATTN_SHARED_PRODUCT_##N, ", 1, 1, 0, 1", ", 1, 1, 0, 0"); }           \
    DEVICE void multiply(float (&d)[N], const u32 (&a)[4], u64 b, bool adds) { ATTN_OF_FLOATS(ATTN_PRODUCT_##N, ", 1, 1, 1", ", 1, 1, 0"); }
    ATTN_EACH_WIDTH(ATTN_MULTIPLY)
#undef ATTN_MULTIPLY
#undef ATTN_OF_FLOATS
};

}  // namespace attn
