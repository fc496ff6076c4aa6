// Products of a warpgroup (four warps): d = a·b + d in integers, asynchronous, 64 rows of a by N columns of b, 32 deep (wgmma, sm_90a).
//
// A thread of warp w has rows 16w + lane/4 and that + 8: d[4j + 2h + e] is row 16w + lane/4 + 8h, column 8j + 2·(lane%4) + e. Of `a` in registers it has
// bytes 4·(lane%4) + {0..3} of both rows, then those of the second 16 of the 32. In shared memory a and b lie in matrices of eight rows of 16 bytes.
#pragma once
#include "ptx.cuh"

// Matrices in shared memory: `along`, from 16 bytes of a row to its next 16, and 128 bytes from eight rows to the next eight.
DEVICE u64 matrices(u32 at, u32 along) { return (u64)(at >> 4 & 0x3fff) | (u64)(along >> 4) << 16 | (u64)(128 >> 4) << 32; }

// What registers and shared memory hold from here on is what products see.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products but the last PENDING groups.
template <int PENDING> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// The registers of a thread pool that this warpgroup keeps, or may have.
template <int COUNT> DEVICE void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

#define ATTN_32_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
    "%29, %30, %31}"
#define ATTN_32_OPERANDS \
    "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
    "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), \
    "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), \
    "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
#define ATTN_48_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
    "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define ATTN_48_OPERANDS \
    "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
    "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), \
    "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), \
    "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), \
    "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), \
    "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47])
#define ATTN_64_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
    "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
    "%57, %58, %59, %60, %61, %62, %63}"
#define ATTN_64_OPERANDS \
    "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
    "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), \
    "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), \
    "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), \
    "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), \
    "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), \
    "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), \
    "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])

// `adds`: whether d counts; else it is overwritten.
template <bool B_SIGNED> struct Products {
    // b has 64, 96 or 128 columns.
    DEVICE void multiply_shared(int (&d)[32], u64 a, u64 b, bool adds) {
        if constexpr (B_SIGNED)
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " ATTN_32_SUMS ", %32, %33, p; }" : ATTN_32_OPERANDS : "l"(a), "l"(b), "r"((int)adds));
        else
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.u8 " ATTN_32_SUMS ", %32, %33, p; }" : ATTN_32_OPERANDS : "l"(a), "l"(b), "r"((int)adds));
    }
    DEVICE void multiply_signed(int (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
        if constexpr (B_SIGNED)
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " ATTN_32_SUMS ", {%32, %33, %34, %35}, %36, p; }" : ATTN_32_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
        else
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.u8 " ATTN_32_SUMS ", {%32, %33, %34, %35}, %36, p; }" : ATTN_32_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
    }
    DEVICE void multiply_unsigned(int (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
        if constexpr (B_SIGNED)
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 " ATTN_32_SUMS ", {%32, %33, %34, %35}, %36, p; }" : ATTN_32_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
        else
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.u8 " ATTN_32_SUMS ", {%32, %33, %34, %35}, %36, p; }" : ATTN_32_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
    }
    DEVICE void multiply_unsigned(int (&d)[48], const u32 (&a)[4], u64 b, bool adds) {
        if constexpr (B_SIGNED)
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k32.s32.u8.s8 " ATTN_48_SUMS ", {%48, %49, %50, %51}, %52, p; }" : ATTN_48_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
        else
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k32.s32.u8.u8 " ATTN_48_SUMS ", {%48, %49, %50, %51}, %52, p; }" : ATTN_48_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
    }
    DEVICE void multiply_unsigned(int (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
        if constexpr (B_SIGNED)
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 " ATTN_64_SUMS ", {%64, %65, %66, %67}, %68, p; }" : ATTN_64_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
        else
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.u8 " ATTN_64_SUMS ", {%64, %65, %66, %67}, %68, p; }" : ATTN_64_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
    }
};
