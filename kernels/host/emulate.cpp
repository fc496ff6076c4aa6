// Builds one kernel, ATTN_UNIT, into a shared library whose function `attn_emulate` runs it on the CPU.
#include ATTN_UNIT

using namespace attn;

typedef ATTN_PARAMS Params;

static const Params* params;

static void kernel() {
#if ATTN_TAKES_MAPS
    ATTN_ENTRY(*params, RowMaps{});
#else
    ATTN_ENTRY(*params);
#endif
}

static const char* run(Index grid, u32 threads) {
    u32 ctas = grid.x * grid.y * grid.z;
#if ATTN_FLUSHES  // compiled with -ftz=true
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
#endif
#if ATTN_DECODES
    if (threads % attn_threads != 0) return "the launch has another number of threads than the kernel";
    return launch(kernel, grid, 0, ctas, threads, threads / attn_threads * attn_shared_bytes);
#else
    // CTAs of other kernels do not wait for each other, and share no memory.
    for (u32 i = 0; i < ctas; i++)
        if (const char* error = launch(kernel, grid, i, 1, threads, 0)) return error;
    return nullptr;
#endif
}

extern "C" __attribute__((visibility("default"))) const char* attn_emulate(const Params* p, const u32* grid, u32 threads) {
    params = p;
    u32 before = _mm_getcsr();
    const char* error = run({grid[0], grid[1], grid[2]}, threads);
    _mm_setcsr(before);
    return error;
}
