// One decode kernel, ATTN_UNIT, as a function of a shared library.
#include ATTN_UNIT

#include <pmmintrin.h>

static const DecodeParams* params;

static void kernel() {
#if ATTN_PAGE == 0
    attn_decode(*params, RowMaps{});
#else
    attn_decode(*params);
#endif
}

extern "C" const char* attn_emulate(const DecodeParams* p, u32 grid) {
    params = p;
    u32 before = _mm_getcsr();
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);  // as the kernels are compiled
    _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
    const char* error = launch(kernel, grid, attn_threads, attn_shared_bytes);
    _mm_setcsr(before);
    return error;
}
