// append.cu: quantizes new tokens, writes them into pages and seals full Int4 Channel pages: the bytes of FORMATS.md.
//
// Grid      one token: (heads / 4, sealing rows + batch), two warps per head; else (page jobs, num_kv_heads, batch), 128 threads.
// Split     one token per sequence is latency alone (launch, length, page, store): a warp takes K or V of one head, a lane stores what it
//           loaded, and shared memory is not used. With several tokens a CTA owns a page of a head.
// Macros    ATTN_K, ATTN_V, ATTN_K_GROUPS, ATTN_V_GROUPS, ATTN_HEAD_DIM, ATTN_PAGE, as in config.cuh.
// Reads     k, v [token][num_kv_heads][head_dim], f32, f16 or bf16; kv_lens, which count the new tokens already.
// Writes    pool [page][kv_head][run]. The first page of a call may read the tail page that its last page writes: one CTA does both, in
//           that order.
// Numerics  append.cuh; compiled without contraction, subnormals kept.
// Host      attn-cuda/src/native/append.rs; parameters in kernels/src/cuda/params.rs.
#include "append.cuh"

constexpr int V_BITS = code_bits(ATTN_V);
typedef Token<K_PER_CHANNEL ? INT8_TOKEN : ATTN_K, ATTN_K_GROUPS, false> KToken;
typedef Token<ATTN_V, ATTN_V_GROUPS, (V_BITS < 16)> VToken;

DEVICE u8* run_of(const AppendParams& p, u32 page, int head) {
    return p.pool + (u64)page * (u32)(p.num_kv_heads * RUN) + (u32)head * RUN;
}
DEVICE u32 page_of(const AppendParams& p, int b, u32 page) { return p.page_table[(long long)b * p.page_table_stride + page]; }
DEVICE float scale_of(const float* scales, int head) { return scales ? scales[head] : 1.0f; }

DEVICE void load_k(const AppendParams& p, KToken& k, long long token, int head, int lane) {
    k.load(p.k, p.dtype, p.k_token_stride, token * p.k_token_stride + (long long)head * HEAD_DIM, lane);
}
DEVICE void load_v(const AppendParams& p, VToken& v, long long token, int head, int lane) {
    v.load(p.v, p.dtype, p.v_token_stride, token * p.v_token_stride + (long long)head * HEAD_DIM, lane);
}

// ---- one token per sequence ----

// The role of a warp: it appends, or only seals. CTAs (heads in fours, sealers and then sequences), two warps per head.
struct Roles {
    int warp, warps, lane, sealers, row;  // warps: of a CTA; sealers: rows of CTAs; row: the sequence, below 0 for sealers

    METHOD static Roles of(const AppendParams& p) {
        const int sealers = gridDim.y - p.batch;
        return {(int)threadIdx.x / 32, (int)blockDim.x / 32, (int)threadIdx.x % 32, sealers, (int)blockIdx.y - sealers};
    }
};

// The page of a sequence that has so many tokens now has just been filled.
DEVICE bool fills(int len) { return len > 0 && (u32)len % PAGE == 0; }

// Which dims of full pages are a warp's to seal, four at a time. Some CTAs do nothing else: they look at all lengths, so that the
// few pages that a call fills are spread over the GPU. Where many fill, the warps of those sequences help once they have stored their
// token. All others are done then and make room: a decode behind this launch ends 1 µs sooner than if they looked, too.
struct Seals {
    static constexpr int CHUNKS = 8, SEQUENCES = 32 * CHUNKS;
    u32 mask;               // lane i: of 32 sequences, those whose page fills
    int task, tasks, step;  // each a run of quads of a head
    int quads;              // of a run

    // Of the sequences from `first` on, among which a warp's own is, if it has one.
    METHOD void find(const AppendParams& p, const Roles& who, int first) {
        const int lane = who.lane;
        int count = 0, len[CHUNKS];
        mask = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            int b = first + 32 * i + lane;
            len[i] = b < p.batch ? p.kv_lens[b] : 0;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 some = __ballot_sync(~0u, fills(len[i]));
            count += __popc(some);
            if (lane == i) mask = some;
        }
        // The first warp of each CTA, then the second, so that work comes to all SMs. A head's quads share what has to be known of the
        // new token, but only where there are more of them than warps.
        int heads = count * p.num_kv_heads, sealers = who.warps * who.sealers * gridDim.x;
        bool alone = heads * QUADS <= sealers;
        step = alone ? sealers : sealers + who.warps * count * gridDim.x;
        for (quads = 1; QUADS % (2 * quads) == 0 && heads * (QUADS / quads) > step;) quads *= 2;
        tasks = alone && who.row >= 0 ? 0 : heads * (QUADS / quads);
        task = who.row < 0 ? (who.warp * who.sealers + blockIdx.y) * gridDim.x + blockIdx.x
                           : sealers + (who.warp * count + rank(who.row - first, lane)) * gridDim.x + blockIdx.x;
    }
    // Of the sequences whose pages fill, those before the lane's 32.
    METHOD int before(int lane) const {
        int up_to = __popc(mask);
#pragma unroll
        for (int i = 1; i < CHUNKS; i *= 2) {
            int other = __shfl_up_sync(~0u, up_to, i);
            if (lane >= i) up_to += other;
        }
        return up_to - __popc(mask);
    }
    // And those before sequence i of all.
    METHOD int rank(int i, int lane) const {
        return __shfl_sync(~0u, before(lane), i / 32) + __popc(__shfl_sync(~0u, mask, i / 32) & ((1u << i % 32) - 1));
    }
    // The n-th sequence whose page fills.
    METHOD int sequence(int n, int lane) const {
        int up_to = before(lane), chunk = 31 - __clz(__ballot_sync(~0u, lane < CHUNKS && up_to <= n));
        u32 some = __shfl_sync(~0u, mask, chunk);
        n -= __shfl_sync(~0u, up_to, chunk);
        bool is_it = some >> lane & 1 && __popc(some & ((1u << lane) - 1)) == n;
        return 32 * chunk + __ffs(__ballot_sync(~0u, is_it)) - 1;
    }
};

// One run of quads.
struct Seal {
    KToken k;  // the new token
    Quad open;
    const u8* tail;
    u8* home;
    int quad, end;

    METHOD void fetch(const AppendParams& p, const Seals& seals, int first, int lane) {
        const int runs = QUADS / seals.quads, of_head = seals.task / runs, head = of_head % p.num_kv_heads;
        const int b = first + seals.sequence(of_head / p.num_kv_heads, lane);
        quad = seals.task % runs * seals.quads;
        end = quad + seals.quads;
        tail = run_of(p, p.tail_pages[b], head);
        home = run_of(p, page_of(p, b, (p.kv_lens[b] - 1) / PAGE), head);
        load_k(p, k, b, head, lane);
        open.load_scales((const u16*)(tail + PAGE * HEAD_DIM), 0, PAGE - 1, lane);
        open.load(tail, quad, 0, PAGE - 1, lane);
    }
    METHOD void finish(int lane) {
        k.encode(1.0f, lane);
#pragma unroll 1
        for (;;) {
            open.set_last(k, quad, lane);
            Quad now = open;
            int at = quad++;
            if (quad < end) open.load(tail, quad, 0, PAGE - 1, lane);
            now.seal(home, at, lane);
            if (quad >= end) return;
        }
    }
};

DEVICE void seal_ones(const AppendParams& p, const Roles& who) {
    if (who.row >= 0 && !fills(p.kv_lens[who.row])) return;
    const int own = max(who.row, 0) / Seals::SEQUENCES * Seals::SEQUENCES, end = who.row < 0 ? p.batch : own + 1;
#pragma unroll 1
    for (int first = own; first < end; first += Seals::SEQUENCES) {
        Seals seals;
        seals.find(p, who, first);
#pragma unroll 1
        for (; seals.task < seals.tasks; seals.task += seals.step) {
            Seal seal;
            seal.fetch(p, seals, first, who.lane);
            seal.finish(who.lane);
        }
    }
}

DEVICE void append_k(const AppendParams& p, int b, int head, int lane) {
    KToken k;
    load_k(p, k, b, head, lane);
    const int len = p.kv_lens[b];
    const u32 tail = K_PER_CHANNEL ? p.tail_pages[b] : 0, at = len - 1, t = at % PAGE;
    if (len <= 0 || (K_PER_CHANNEL && t == PAGE - 1)) return;
    u8* const run = run_of(p, K_PER_CHANNEL ? tail : page_of(p, b, at / PAGE), head);
    k.encode(K_PER_CHANNEL ? 1.0f : scale_of(p.k_tensor_scales, head), lane);
    k.store(run, run + (K_PER_CHANNEL ? PAGE * HEAD_DIM : K_PARAMS), t, lane);
}
DEVICE void append_v(const AppendParams& p, int b, int head, int lane) {
    VToken v;
    load_v(p, v, b, head, lane);
    const int len = p.kv_lens[b];
    const u32 at = len - 1;
    if (len <= 0) return;
    u8* const run = run_of(p, page_of(p, b, at / PAGE), head);
    v.encode(scale_of(p.v_tensor_scales, head), lane);
    v.store(run + V_CODES, run + V_PARAMS, at % PAGE, lane);
}

DEVICE void append_one(const AppendParams& p) {
    const Roles who = Roles::of(p);
    const int head = blockIdx.x * (who.warps / 2) + who.warp / 2;
    if (who.row >= 0 && head < p.num_kv_heads) {
        if (who.warp % 2 == 0) append_k(p, who.row, head, who.lane);
        else append_v(p, who.row, head, who.lane);
    }
    if constexpr (K_PER_CHANNEL) seal_ones(p, who);
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
    u8* const tail_scales = tail + PAGE * HEAD_DIM;
    for (int t = j.t0 + j.warp; t < j.t1; t += j.warps) {
        KToken k;
        load_k(p, k, j.token0 + t, j.head, j.lane);
        k.encode(1.0f, j.lane);
        k.store(seals ? codes : tail, seals ? (u8*)scales : tail_scales, t, j.lane);
    }
    if (!seals) return;
    __syncthreads();
    Quad open;
    open.load_scales((const u16*)tail_scales, 0, j.t0, j.lane);
    open.load_scales(scales, j.t0, PAGE, j.lane);
    for (int quad = j.warp; quad < QUADS; quad += j.warps) {
        open.load(tail, quad, 0, j.t0, j.lane);
        open.load(codes, quad, j.t0, PAGE, j.lane);
        open.seal(run, quad, j.lane);
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
    const bool both = K_PER_CHANNEL && first < last && begin % PAGE != 0 && end % PAGE != 0;
    if (both && page == last) return;
    Job j;
    j.head = blockIdx.y, j.warp = threadIdx.x / 32, j.warps = blockDim.x / 32, j.lane = threadIdx.x % 32;
    for (;; page = last) {
        j.t0 = page == first ? begin % PAGE : 0, j.t1 = page == last ? (end - 1) % PAGE + 1 : PAGE;
        j.token0 = (long long)b * p.tokens + (long long)page * PAGE - begin;
        u8* const run = run_of(p, page_of(p, b, page), j.head);
        if constexpr (K_PER_CHANNEL) {
            __shared__ __align__(16) u8 codes[PAGE * HEAD_DIM];
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

extern "C" __global__ void __launch_bounds__(256, 5) attn_append(const __grid_constant__ AppendParams p) {
    // Every CTA waits, because a launch that waits for this one relies on those before it, too. A launch that waits for all of this one should
    // not begin before it ends (append to append: 4.2 µs, 5.0 if launched early), but a decode has other work meanwhile.
    wait_for_dependencies();
    if (p.is_followed) launch_dependents();
    if (p.tokens == 1) append_one(p);
    else append_many(p);
}
