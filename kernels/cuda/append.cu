// append.cu: quantizes new tokens, writes them into pages and seals full Int4 Channel pages: the bytes of FORMATS.md.
//
// One token per sequence, a decode step: latency is everything (a launch, then length, page, store), so a warp takes K or V of
// one head, a lane stores what it loaded, and nothing meets in shared memory. Several tokens: a CTA owns a page of a head.
//
// Grid      one token: (heads in fours, batch), two warps per head; else (page jobs, num_kv_heads, batch).
// Macros    ATTN_K, ATTN_V, ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_D, ATTN_PAGE, as in decode.cu.
// Reads     k, v [token][num_kv_heads][ATTN_D], f32, f16 or bf16; kv_lens, which count the new tokens already.
// Writes    pool [page][kv_head][run].
// Numerics  append.cuh; compiled without contraction.
// Tail page the first page of a call may read the tail page that its last page writes: one CTA does both, in that order.
// Host      crates/attn-cuda/src/params.rs::AppendParams, native/append.rs.
#include "append.cuh"

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
    int batch;
    int num_kv_heads;
    int page_table_stride;
    int dtype;                        // of k and v: 0 f32, 1 f16, 2 bf16
};
static_assert(sizeof(AppendParams) == 104, "edit crates/attn-cuda/src/params.rs too");

constexpr int V_BITS = code_bits(ATTN_V);
typedef Token<CHANNEL ? INT8_TOKEN : ATTN_K, ATTN_K_GROUPS, false> KToken;
typedef Token<ATTN_V, ATTN_V_GROUPS, (V_BITS < 16)> VToken;

DEVICE u8* run_of(const AppendParams& p, u32 page, int head) {
    return p.pool + ((long long)page * p.num_kv_heads + head) * RUN;
}
DEVICE u32 page_of(const AppendParams& p, int b, int page) { return p.page_table[(long long)b * p.page_table_stride + page]; }
DEVICE float scale_of(const float* scales, int head) { return scales ? scales[head] : 1.0f; }

DEVICE void load_k(const AppendParams& p, KToken& k, long long token, int head, int lane) {
    k.load(p.k, p.dtype, p.k_token_stride, token * p.k_token_stride + (long long)head * D, lane);
}
DEVICE void load_v(const AppendParams& p, VToken& v, long long token, int head, int lane) {
    v.load(p.v, p.dtype, p.v_token_stride, token * p.v_token_stride + (long long)head * D, lane);
}

// ---- one token per sequence ----

// Which panels of full pages are this warp's to seal: everybody looks at all lengths, so that the few pages that a call fills
// are spread over the GPU, and a warp that is given one fetches it before it turns to its own token.
struct Seals {
    int task, tasks, step;  // each a run of panels of a head
    int panels;             // of a run

    // Sequences of 32 in which a page fills, n-th chunk.
    static DEVICE_METHOD u32 chunk(const AppendParams& p, int n, int lane) {
        int b = 32 * n + lane, len = b < p.batch ? p.kv_lens[b] : 0;
        return __ballot_sync(~0u, len > 0 && len % PAGE == 0);
    }
    DEVICE_METHOD void find(const AppendParams& p, int warp, int warps, int lane) {
        int count = 0, chunks = (p.batch + 31) / 32;
#pragma unroll 1
        for (int n = 0; n < chunks; n += 8) {
#pragma unroll
            for (int i = 0; i < 8; i++) count += __popc(chunk(p, n + i, lane));
        }
        // A head's panels share what has to be known of the new token, but only where there are more of them than warps.
        int heads = count * p.num_kv_heads;
        for (panels = 1; 2 * panels <= PANELS && PANELS % (2 * panels) == 0 && heads * (PANELS / panels) > warps;) panels *= 2;
        tasks = heads * (PANELS / panels);
        task = warp;
        step = warps;
    }
    // The n-th sequence whose page fills.
    static DEVICE_METHOD int sequence(const AppendParams& p, int n, int lane) {
        u32 some = 0;
        int at = -1;
        do {
            n -= __popc(some);
            some = chunk(p, ++at, lane);
        } while (n >= __popc(some));
        bool is_it = some >> lane & 1 && __popc(some & ((1u << lane) - 1)) == n;
        return 32 * at + __ffs(__ballot_sync(~0u, is_it)) - 1;
    }
};

// One run of panels under way.
struct Seal {
    const u8* tail;
    u8* home;
    int b, head, panel, end;

    // Finds it and asks for its bytes, which are there when the warp comes back from its own token.
    DEVICE_METHOD void fetch(const AppendParams& p, const Seals& seals, int lane) {
        const int runs = PANELS / seals.panels;
        head = seals.task / runs % p.num_kv_heads;
        b = Seals::sequence(p, seals.task / runs / p.num_kv_heads, lane);
        panel = seals.task % runs * seals.panels;
        end = panel + seals.panels;
        tail = run_of(p, p.tail_pages[b], head);
        for (int at = panel * PAGE * 16 + lane * 128; at < end * PAGE * 16; at += 32 * 128) touch(tail + at);
        if (lane < PAGE * 2 / 128) touch(tail + PAGE * D + lane * 128);
        home = run_of(p, page_of(p, b, (p.kv_lens[b] - 1) / PAGE), head);
    }
    DEVICE_METHOD void finish(const AppendParams& p, int lane) {
        KToken k;
        load_k(p, k, b, head, lane);
        k.encode(1.0f, lane);
#pragma unroll 1
        for (; panel < end; panel++) {
            Panel open;
            open.load(tail, (const u16*)(tail + PAGE * D), panel, 0, PAGE - 1, lane);
            open.set_last(k, panel, lane);
            open.seal(home, panel, lane);
        }
    }
};

DEVICE void append_k(const AppendParams& p, int b, int head, int lane) {
    KToken k;
    load_k(p, k, b, head, lane);
    const int at = p.kv_lens[b] - 1, t = at % PAGE;
    if (at < 0 || (CHANNEL && t == PAGE - 1)) return;
    u8* const run = run_of(p, CHANNEL ? p.tail_pages[b] : page_of(p, b, at / PAGE), head);
    k.encode(CHANNEL ? 1.0f : scale_of(p.k_tensor_scales, head), lane);
    launch_dependents();
    k.store(run, run + (CHANNEL ? PAGE * D : K_PARAMS), t, lane);
}
DEVICE void append_v(const AppendParams& p, int b, int head, int lane) {
    VToken v;
    load_v(p, v, b, head, lane);
    const int at = p.kv_lens[b] - 1;
    if (at < 0) return;
    u8* const run = run_of(p, page_of(p, b, at / PAGE), head);
    v.encode(scale_of(p.v_tensor_scales, head), lane);
    launch_dependents();
    v.store(run + V_CODES, run + V_PARAMS, at % PAGE, lane);
}

DEVICE void append_one(const AppendParams& p) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int b = blockIdx.y, head = blockIdx.x * (warps / 2) + warp / 2;
    Seals seals = {};
    Seal seal;
    if constexpr (CHANNEL) {
        const int ctas = gridDim.x * gridDim.y;
        seals.find(p, warp * ctas + b * gridDim.x + blockIdx.x, warps * ctas, lane);
        if (seals.task < seals.tasks) seal.fetch(p, seals, lane);
    }
    if (head < p.num_kv_heads) {
        if (warp % 2 == 0) append_k(p, b, head, lane);
        else append_v(p, b, head, lane);
    }
    if constexpr (CHANNEL) {
#pragma unroll 1
        while (seals.task < seals.tasks) {
            seal.finish(p, lane);
            seals.task += seals.step;
            if (seals.task < seals.tasks) seal.fetch(p, seals, lane);
        }
    }
}

// ---- several tokens per sequence ----

// Tokens [t0, t1) of a page.
struct Job {
    int head, t0, t1, warp, warps, lane;
    long long token0;  // the page's token 0 in k, v
};

// K of an Int4 Channel page: to the tail page, or from there and from `codes`, `scales` in shared memory into its home.
DEVICE void append_channel(const AppendParams& p, const Job& j, u8* run, u8* tail, u8* codes, u16* scales) {
    const bool seals = j.t1 == PAGE;
    u8* const tail_scales = tail + PAGE * D;
    for (int t = j.t0 + j.warp; t < j.t1; t += j.warps) {
        KToken k;
        load_k(p, k, j.token0 + t, j.head, j.lane);
        k.encode(1.0f, j.lane);
        k.store(seals ? codes : tail, seals ? (u8*)scales : tail_scales, t, j.lane);
    }
    if (!seals) return;
    __syncthreads();
    for (int panel = j.warp; panel < PANELS; panel += j.warps) {
        Panel open;
        open.load(tail, (const u16*)tail_scales, panel, 0, j.t0, j.lane);
        open.load(codes, scales, panel, j.t0, PAGE, j.lane);
        open.seal(run, panel, j.lane);
    }
}

DEVICE void append_rows(const AppendParams& p, const Job& j, u8* run) {
    // Of 4 bits, low nibbles clear the high ones, so they go first.
    constexpr bool PAIRS = code_bits(ATTN_K) == 4;
    const float scale = scale_of(p.k_tensor_scales, j.head);
    for (int phase = 0; phase < (PAIRS ? 2 : 1); phase++) {
        if (phase == 1) __syncthreads();
        for (int t = j.t0 + j.warp; t < j.t1; t += j.warps) {
            if (PAIRS && is_high(t) != (phase == 1)) continue;
            KToken k;
            load_k(p, k, j.token0 + t, j.head, j.lane);
            k.encode(scale, j.lane);
            k.store(run, run + K_PARAMS, t, j.lane);
        }
    }
}

DEVICE void append_many(const AppendParams& p) {
    const int b = blockIdx.z, end = p.kv_lens[b], begin = end - p.tokens;
    if (p.tokens <= 0 || begin < 0) return;
    const int first = begin / PAGE, last = (end - 1) / PAGE;
    int page = first + (int)blockIdx.x;
    if (page > last) return;
    const bool both = CHANNEL && first < last && begin % PAGE != 0 && end % PAGE != 0;
    if (both && page == last) return;
    Job j;
    j.head = blockIdx.y, j.warp = threadIdx.x / 32, j.warps = blockDim.x / 32, j.lane = threadIdx.x % 32;
    for (;; page = last) {
        j.t0 = page == first ? begin % PAGE : 0, j.t1 = page == last ? (end - 1) % PAGE + 1 : PAGE;
        j.token0 = (long long)b * p.tokens + (long long)page * PAGE - begin;
        u8* const run = run_of(p, page_of(p, b, page), j.head);
        if constexpr (CHANNEL) {
            __shared__ __align__(16) u8 codes[PAGE * D];
            __shared__ u16 scales[PAGE];
            append_channel(p, j, run, run_of(p, p.tail_pages[b], j.head), codes, scales);
        } else {
            append_rows(p, j, run);
        }
        const float scale = scale_of(p.v_tensor_scales, j.head);
        // Other warps take the first tokens than of K.
        for (int t = j.t0 + (j.warp + j.warps / 2) % j.warps; t < j.t1; t += j.warps) {
            VToken v;
            load_v(p, v, j.token0 + t, j.head, j.lane);
            v.encode(scale, j.lane);
            v.store(run + V_CODES, run + V_PARAMS, t, j.lane);
        }
        __syncthreads();
        if (!both || page != first) return;
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) attn_append(const __grid_constant__ AppendParams p) {
    // Every CTA waits, whatever it then does: who waits for this launch relies on the one before it, too. The next one may begin
    // when stores are all that is left: earlier, its CTAs only take room (5.0 µs instead of 4.2 from append to append).
    wait_for_dependencies();
    if (p.tokens == 1) append_one(p);
    else append_many(p);
}
