// A grid's CTAs, warps and threads as fibers on one CPU thread. A fiber runs until it waits for another one, then the next one runs that does not wait.
//
// Here: what a kernel's text and the functions of ptx.cuh use. machine.cpp has the rest, compiled once for all kernels.
#pragma once
#include <pmmintrin.h>

#include <cmath>
#include <cstring>
#include <initializer_list>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <class To, class From> static inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

// The instructions that need all lanes of a warp.
// clang-format off: lines of a kind
enum Op {
    SYNC, ALL, ANY, SUM, MAX, SHUFFLE, SHUFFLE_UP, SHUFFLE_XOR,
    MATRIX_1, MATRIX_2, MATRIX_4, MATRIX_4_TRANSPOSED, TRANSPOSE,
    PRODUCT_S8_S8, PRODUCT_S8_U8, PRODUCT_U8_S8, PRODUCT_U8_U8, PRODUCT_F16, PRODUCT_BF16,
};
// clang-format on

struct Index {
    u32 x, y, z;
};
struct Cta {
    Index index;
    u8* shared;
};
struct Fiber {
    Cta* cta;
    u32 thread;
};

// The running fiber, and its launch.
extern Fiber* running;
extern Index grid;
extern u32 threads_per_cta;

static inline Fiber& me() { return *running; }

// Ends the launch with an error.
[[noreturn]] void fail(const char* what);

// Runs the next thread that does not wait. Many turns of every thread without progress are a deadlock, as are threads that all wait: it ends the launch.
void yield();
// As `yield`, for a thread that polls memory for another thread's store; a launch has a limited number of them.
void spin();
// Returns once another thread has changed `x` from `seen`.
void wait_for_change(const u32& x, u32 seen);

void cta_barrier(int index, u32 count);
// Arrives and does not wait.
void cta_arrive(int index, u32 count);
void cluster_barrier();
// Another CTA of the cluster, which is a row of the grid.
Cta& peer(u32 rank);

void mbarrier_init(u32 at, u32 count);
const u32& mbarrier_phase(u32 at);
void mbarrier_arrive(u32 at, u32 bytes);
void mbarrier_expect_more(u32 at, u32 bytes);
// Bytes that a copy has written.
void mbarrier_landed(u32 at, u32 bytes, Cta& cta = *me().cta);

// An instruction of a whole warp: each lane leaves its operands, and the last lane computes all results.
const u32* warp_exchange(Op op, std::initializer_list<u32> in);
static inline u32 warp_op(Op op, u32 x, u32 operand = 0, u32 width = 32) { return warp_exchange(op, {x, operand, width})[0]; }

// Four words of each of the lane's quad.
void quad_words(const u32 (&mine)[4], u32 (&all)[4][4]);

static inline float half_number(u32 h) {
    u32 magnitude = h & 0x7fff, sign = (h & 0x8000) << 16;
    if (magnitude < 0x400) return same_bits<float>(sign | same_bits<u32>((float)magnitude * 0x1p-24f));
    return same_bits<float>(sign | (magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : (magnitude << 13) + 0x38000000));
}

// A matrix of a warpgroup's product in shared memory, as wgmma.cuh describes it: the address in 24 bits, then the distances in 18, then log2 of a swizzle's chunks.
struct Matrices {
    u32 at, along, across, swizzle;

    Matrices(u64 of) : at(of & 0xffffff), along(of >> 24 & 0x3ffff), across(of >> 42 & 0x3ffff), swizzle(16 << (of >> 60)) {}
    // The bytes at an address without swizzle.
    const u8* bytes(u32 address) const { return me().cta->shared + (swizzle == 16 ? address : address ^ (address >> 7 & (swizzle / 16 - 1)) << 4); }
    // Row `row` of the `half`-th matrix along the depth, counted over the matrices across.
    const u8* row(int row, int half) const {
        if (swizzle != 16) return bytes(at + row / 8 * across + row % 8 * swizzle + half * 16);
        return bytes(at + half * along + row / 8 * across + row % 8 * 16);
    }
    // Columns from `column` on, a multiple of eight, of 16-bit elements at depth k, where they lie side by side.
    const u8* columns(int column, int k) const {
        if (swizzle != 16) return bytes(at + column / (swizzle / 2) * along + k / 8 * across + k % 8 * swizzle + column % (swizzle / 2) * 2);
        return row(column + k % 8, k / 8);
    }
};
// Products of a lane's two rows with the columns of b that are its own, 32 bytes deep, or 16 floats: d[4j + 2h + e] is that of row h and column 8j + 2·(lane%4) + e.
void multiply_bytes(int* d, int count, const u8 (&rows)[2][32], bool rows_signed, const Matrices& b, bool b_signed, bool adds);
void multiply_floats(float* d, int count, const u16 (&rows)[2][16], bool are_bf16, const Matrices& b, bool b_turned, bool adds);

// Runs `count` CTAs of `threads` threads each, from CTA `first` of the grid on. Returns null or an error.
const char* launch(void (*kernel)(), Index grid, u32 first, u32 count, u32 threads, u32 shared_bytes);
