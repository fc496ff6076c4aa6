// Builds one kernel, ATTN_UNIT, into a shared library whose function `attn_emulate` runs it on the CPU.
#include ATTN_UNIT

#include <pmmintrin.h>

#if ATTN_APPENDS
typedef AppendParams Params;
#else
typedef DecodeParams Params;
#endif

static const Params* params;

static void kernel() {
#if ATTN_APPENDS
    attn_append(*params);
#elif ATTN_PAGE == 0
    attn_decode(*params, RowMaps{});
#else
    attn_decode(*params);
#endif
}

static const char* run(Index grid, u32 threads) {
    u32 ctas = grid.x * grid.y * grid.z;
#if ATTN_APPENDS
    for (u32 i = 0; i < ctas; i++)
        if (const char* error = launch(kernel, grid, i, 1, threads, 0)) return error;
    return nullptr;
#else
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);  // decode kernels are compiled with -ftz=true
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
    if (threads % attn_threads != 0) return "the launch has another number of threads than the kernel";
    return launch(kernel, grid, 0, ctas, threads, threads / attn_threads * attn_shared_bytes);
#endif
}

extern "C" const char* attn_emulate(const Params* p, const u32* grid, u32 threads) {
    params = p;
    u32 before = _mm_getcsr();
    const char* error = run({grid[0], grid[1], grid[2]}, threads);
    _mm_setcsr(before);
    return error;
}
