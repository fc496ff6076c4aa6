// The machine of machine.h: fibers and how they are switched, barriers, and the instructions of a whole warp.
#include "machine.h"
#ifndef __x86_64__
#error "fibers are switched by x86-64's registers"
#endif
#include <immintrin.h>
#include <setjmp.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <vector>

struct Barrier {
    u32 arrived = 0, round = 0;
};
struct Warp32 {
    Barrier barrier;
    Op op;
    u32 in[32][12], out[32][4];
};
struct Mbarrier {
    u32 count, pending;
    long bytes;
    u32 phase;
};
struct Block : Cta {
    std::vector<u8> memory;
    std::vector<Warp32> warps;
    Barrier barriers[17];  // the last one is the cluster's
    std::map<u32, Mbarrier> mbarriers;
};
struct Thread : Fiber {
    void* stack;  // what switch_stacks has left there
    // While `watched` is there and has the value `seen`, the fiber waits.
    const u32* watched;
    u32 seen;
    bool done;
};

static struct Machine {
    std::vector<Thread> fibers;
    std::vector<Block> ctas;
    u32 at, alive;
    u64 idle;   // turns since the last progress: a completed barrier, an mbarrier arrival, a thread's end
    u64 spins;  // turns in which a thread polled memory for another thread's store
    void (*kernel)();
    jmp_buf home;
    const char* error;
} machine;

Fiber* running;
Index grid;
u32 threads_per_cta;

static Thread& self() { return static_cast<Thread&>(*running); }
static Block& block() { return static_cast<Block&>(*running->cta); }

void fail(const char* what) {
    machine.error = what;
    longjmp(machine.home, 1);
}

// Goes on with what `to` has left, and leaves the stack in `from`: registers that a function keeps, by x86-64's calling convention. (swapcontext would
// call the kernel for the signal mask each time.)
__attribute__((naked)) static void switch_stacks(void** from, void* to) {
    asm(R"(
        push %rbp
        push %rbx
        push %r12
        push %r13
        push %r14
        push %r15
        mov %rsp, (%rdi)
        mov %rsi, %rsp
        pop %r15
        pop %r14
        pop %r13
        pop %r12
        pop %rbx
        pop %rbp
        ret
    )");
}

void yield() {
    u32 count = (u32)machine.fibers.size();
    if (++machine.idle > 1000ull * count) fail("all threads wait for each other");
    Thread& from = self();
    for (u32 i = 0; i < count; i++) {
        machine.at = machine.at + 1 < count ? machine.at + 1 : 0;
        Thread& next = machine.fibers[machine.at];
        if (next.done || (next.watched && *next.watched == next.seen)) continue;
        next.watched = nullptr;
        running = &next;
        if (&next != &from) switch_stacks(&from.stack, next.stack);
        return;
    }
    fail("all threads wait for each other");
}
// A spinning warp completes warp barriers, which count as progress, so `yield` cannot find a spin that never ends: spins are limited instead.
void spin() {
    if (++machine.spins > 100000000) fail("a word that never comes");
    yield();
}
void wait_for_change(const u32& x, u32 seen) {
    if (x != seen) return;
    self().watched = &x;
    self().seen = seen;
    yield();
}

// True in the last of `count` threads to arrive; in the others false, once the last one has called `release`.
static bool arrives_last(Barrier& barrier, u32 count) {
    u32 round = barrier.round;
    if (++barrier.arrived == count) return true;
    wait_for_change(barrier.round, round);
    return false;
}
static void release(Barrier& barrier) {
    barrier.arrived = 0;
    barrier.round++;
    machine.idle = 0;
}
void cta_barrier(int index, u32 count) {
    Barrier& barrier = block().barriers[index];
    if (arrives_last(barrier, count)) release(barrier);
}
void cta_arrive(int index, u32 count) {
    Barrier& barrier = block().barriers[index];
    if (++barrier.arrived == count) release(barrier);
}
Cta& peer(u32 rank) { return *(&block() - block().index.x + rank); }
void cluster_barrier() {
    Barrier& barrier = static_cast<Block&>(peer(0)).barriers[16];
    if (arrives_last(barrier, grid.x * threads_per_cta)) release(barrier);
}

static Mbarrier& mbarrier(u32 at, Block& of) {
    auto found = of.mbarriers.find(at);
    if (found == of.mbarriers.end()) fail("an mbarrier that nobody initialized");
    return found->second;
}
static void complete(Mbarrier& b) {
    machine.idle = 0;
    if (b.pending != 0 || b.bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.count;
}
void mbarrier_init(u32 at, u32 count) { block().mbarriers[at] = {count, count, 0, 0}; }
const u32& mbarrier_phase(u32 at) { return mbarrier(at, block()).phase; }
void mbarrier_arrive(u32 at, u32 bytes) {
    Mbarrier& b = mbarrier(at, block());
    if (b.pending == 0) fail("more arrivals at an mbarrier than it waits for");
    b.bytes += bytes;
    b.pending--;
    complete(b);
}
void mbarrier_expect_more(u32 at, u32 bytes) { mbarrier(at, block()).bytes += bytes; }
void mbarrier_landed(u32 at, u32 bytes, Cta& cta) {
    Mbarrier& b = mbarrier(at, static_cast<Block&>(cta));
    b.bytes -= bytes;
    complete(b);
}

// ---- instructions of a whole warp ----

// ldmatrix: lane 8i + r gives the address of the 16-byte row r of matrix i. Lane 4r + c gets bytes 4c to 4c + 3 of row r or, transposed,
// the halves 2c and 2c + 1 of column r.
static void load_matrices(const Cta& cta, Warp32& w, int count, bool transposed) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < count; i++) {
            auto row = [&](int r) {
                u32 at = w.in[8 * i + r][0];
                if (at % 16) fail("a misaligned matrix");
                return cta.shared + at;
            };
            u16 halves[2];
            for (int h = 0; h < 2; h++) {
                int r = lane / 4, c = 2 * (lane % 4) + h;
                memcpy(&halves[h], transposed ? row(c) + 2 * r : row(r) + 2 * c, 2);
            }
            w.out[lane][i] = halves[0] | (u32)halves[1] << 16;
        }
}
// movmatrix: lane 4r + c has the halves 2c and 2c + 1 of row r, and gets those of column r.
static void transpose(Warp32& w) {
    for (int lane = 0; lane < 32; lane++) {
        auto half = [&](int row, int column) { return w.in[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff; };
        int r = lane / 4, c = 2 * (lane % 4);
        w.out[lane][0] = half(c, r) | half(c + 1, r) << 16;
    }
}
// mma.m16n8k32, with the fragments that PTX defines (drawn in kernels/README.md).
static void multiply(Warp32& w, bool a_signed, bool b_signed) {
    int a[16][32], b[32][8];
    auto byte = [](u32 x, int i, bool is_signed) { return is_signed ? (int)(signed char)(x >> 8 * i) : (int)(x >> 8 * i & 255); };
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++) {
                int k = 16 * half + lane % 4 * 4 + i;
                a[lane / 4][k] = byte(w.in[lane][2 * half], i, a_signed);
                a[lane / 4 + 8][k] = byte(w.in[lane][2 * half + 1], i, a_signed);
                b[k][lane / 4] = byte(w.in[lane][4 + half], i, b_signed);
            }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2, sum = 0;
            for (int k = 0; k < 32; k++) sum += a[row][k] * b[k][column];
            w.out[lane][i] = w.in[lane][6 + i] + (u32)sum;
        }
}
// mma.m16n8k16 of 16-bit floats; a tensor core's own order and roundings of the sum are not known.
template <class Number> static void multiply_floats(Warp32& w, Number number) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++) {
                int k = 8 * half + lane % 4 * 2 + i;
                a[lane / 4][k] = number(w.in[lane][2 * half] >> 16 * i & 0xffff);
                a[lane / 4 + 8][k] = number(w.in[lane][2 * half + 1] >> 16 * i & 0xffff);
                b[k][lane / 4] = number(w.in[lane][4 + half] >> 16 * i & 0xffff);
            }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = same_bits<float>(w.in[lane][6 + i]);
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            w.out[lane][i] = same_bits<u32>(sum);
        }
}
static void reduce(Warp32& w) {
    u32 x = w.in[0][0];
    for (int lane = 1; lane < 32; lane++) {
        u32 y = w.in[lane][0];
        x = w.op == ALL ? x & y : w.op == ANY ? x | y : w.op == SUM ? x + y : std::max(x, y);
    }
    for (auto& out : w.out) out[0] = x;
}
static void shuffle(Warp32& w) {
    for (int lane = 0; lane < 32; lane++) {
        int operand = w.in[lane][1], width = w.in[lane][2], first = lane & ~(width - 1);
        int from = w.op == SHUFFLE ? first | (operand & (width - 1)) : w.op == SHUFFLE_XOR ? lane ^ operand : lane - operand;
        w.out[lane][0] = w.in[from < first ? lane : from][0];
    }
}
const u32* warp_exchange(Op op, std::initializer_list<u32> in) {
    Warp32& w = block().warps[me().thread / 32];
    int lane = me().thread % 32;
    if (w.barrier.arrived != 0 && w.op != op) fail("a warp's lanes are at different instructions");
    w.op = op;
    std::copy(in.begin(), in.end(), w.in[lane]);
    if (!arrives_last(w.barrier, 32)) return w.out[lane];
    // clang-format off
    switch (op) {
    case SYNC: break;
    case ALL: case ANY: case SUM: case MAX: reduce(w); break;
    case SHUFFLE: case SHUFFLE_UP: case SHUFFLE_XOR: shuffle(w); break;
    case MATRIX_1: load_matrices(block(), w, 1, false); break;
    case MATRIX_2: load_matrices(block(), w, 2, false); break;
    case MATRIX_4: load_matrices(block(), w, 4, false); break;
    case MATRIX_4_TRANSPOSED: load_matrices(block(), w, 4, true); break;
    case TRANSPOSE: transpose(w); break;
    case PRODUCT_S8_S8: multiply(w, true, true); break;
    case PRODUCT_S8_U8: multiply(w, true, false); break;
    case PRODUCT_U8_S8: multiply(w, false, true); break;
    case PRODUCT_U8_U8: multiply(w, false, false); break;
    case PRODUCT_F16: multiply_floats(w, half_number); break;
    case PRODUCT_BF16: multiply_floats(w, [](u32 x) { return same_bits<float>(x << 16); }); break;
    }
    // clang-format on
    release(w.barrier);
    return w.out[lane];
}

void quad_words(const u32 (&mine)[4], u32 (&all)[4][4]) {
    warp_exchange(SYNC, {mine[0], mine[1], mine[2], mine[3]});
    const Warp32& w = block().warps[me().thread / 32];
    for (int i = 0; i < 4; i++) memcpy(all[i], w.in[me().thread % 32 / 4 * 4 + i], sizeof all[i]);
    warp_exchange(SYNC, {});  // all have read
}

// ---- products of a warpgroup ----

static __m128i half_row(const u8* at, bool is_signed, bool second) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)(at + 8 * second));
    return is_signed ? _mm_cvtepi8_epi16(x) : _mm_cvtepu8_epi16(x);
}
void multiply_bytes(int* d, int count, const u8 (&rows)[2][32], bool rows_signed, const Matrices& b, bool b_signed, bool adds) {
    __m128i a[2][4];
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 4; i++) a[h][i] = half_row(rows[h] + i / 2 * 16, rows_signed, i % 2);
    const int first = 2 * (me().thread % 4);
    for (int j = 0; j < count / 4; j++)
        for (int e = 0; e < 2; e++) {
            __m128i column[4];
            for (int i = 0; i < 4; i++) column[i] = half_row(b.row(8 * j + first + e, i / 2), b_signed, i % 2);
            for (int h = 0; h < 2; h++) {
                __m128i sum = _mm_setzero_si128();
                for (int i = 0; i < 4; i++) sum = _mm_add_epi32(sum, _mm_madd_epi16(a[h][i], column[i]));
                int of[4];
                _mm_storeu_si128((__m128i*)of, sum);
                int& to = d[4 * j + 2 * h + e];
                to = (adds ? to : 0) + of[0] + of[1] + of[2] + of[3];
            }
        }
}
void multiply_floats(float* d, int count, const u16 (&rows)[2][16], bool are_bf16, const Matrices& b, bool b_turned, bool adds) {
    auto number = [&](const u8* at) {
        u16 x;
        memcpy(&x, at, 2);
        return are_bf16 ? same_bits<float>((u32)x << 16) : half_number(x);
    };
    float a[2][16];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 16; k++) a[h][k] = number((const u8*)&rows[h][k]);
    const int first = 2 * (me().thread % 4);
    for (int j = 0; j < count / 4; j++)
        for (int e = 0; e < 2; e++) {
            float column[16];
            for (int k = 0; k < 16; k++) column[k] = number(b_turned ? b.columns(8 * j, k) + (first + e) * 2 : b.row(8 * j + first + e, k / 8) + k % 8 * 2);
            for (int h = 0; h < 2; h++) {
                float& to = d[4 * j + 2 * h + e];
                float sum = adds ? to : 0.0f;
                for (int k = 0; k < 16; k++) sum += a[h][k] * column[k];
                to = sum;
            }
        }
}

// ---- a launch ----

static void enter() {
    machine.kernel();
    self().done = true;
    machine.idle = 0;
    if (--machine.alive == 0) longjmp(machine.home, 2);
    yield();
}

const char* launch(void (*kernel)(), Index of, u32 first, u32 count, u32 threads, u32 shared_bytes) {
    constexpr size_t STACK = 128 << 10;
    machine = {};
    machine.kernel = kernel;
    grid = of;
    threads_per_cta = threads;
    machine.alive = count * threads;
    machine.ctas.resize(count);
    machine.fibers.resize(count * threads);
    u8* stacks = (u8*)mmap(nullptr, STACK * machine.alive, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return "no memory for the threads' stacks";
    for (u32 i = 0; i < count; i++) {
        Block& cta = machine.ctas[i];
        u32 at = first + i;
        cta.index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        cta.memory.assign(shared_bytes + 1024, 0xff);  // NaN, so that a kernel that reads what is not there fails
        cta.shared = (u8*)(((u64)cta.memory.data() + 1023) / 1024 * 1024);
        cta.warps.resize(threads / 32);
    }
    for (u32 i = 0; i < machine.alive; i++) {
        Thread& f = machine.fibers[i];
        f.cta = &machine.ctas[i / threads];
        f.thread = i % threads;
        // As if switch_stacks had been called at the start of `enter`: six registers, the way back, and what aligns the stack as a call does.
        void** top = (void**)(stacks + STACK * (i + 1));
        top[-2] = (void*)enter;
        f.stack = top - 8;
    }
    size_t stacks_bytes = STACK * machine.alive;
    running = &machine.fibers[0];
    void* own;
    if (setjmp(machine.home) == 0) switch_stacks(&own, machine.fibers[0].stack);
    munmap(stacks, stacks_bytes);
    return machine.error;
}
