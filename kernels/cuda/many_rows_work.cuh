// Many query rows: who does what, and the flow of cache bytes. Units of work in the order [sequence][KV head][row block][unit], cut
// between CTAs by tiles; a CTA walks the tiles of its units in order, all its warps together.
#pragma once
#include "config.cuh"
#include "divmod.cuh"

struct Work {
    int b, kv_head, row_block, unit;
    int kv_len, num_tiles, segment_tiles, unit_tiles, num_units;  // of sequence b
    u32 offset;                                                   // tiles before this unit, over everything

    __device__ __forceinline__ void enter(const DecodeParams& p, int sequence) {
        b = sequence;
        kv_head = unit = row_block = 0;
        if (b >= p.batch) return;
        kv_len = p.kv_lens[b];
        num_tiles = (kv_len + TILE - 1) / TILE;
        segment_tiles = segment_tiles_of(num_tiles);
        unit_tiles = p.partial_per_segment ? segment_tiles : SPAN * segment_tiles;
        num_units = max(1, (num_tiles + unit_tiles - 1) / unit_tiles);  // an empty sequence still gets its zeros
    }
    __device__ __forceinline__ int first_tile() const { return unit * unit_tiles; }
    __device__ __forceinline__ int end_tile() const { return min(num_tiles, first_tile() + unit_tiles); }
    __device__ __forceinline__ void next(const DecodeParams& p) {
        offset += max(1, end_tile() - first_tile());
        if (++unit < num_units) return;
        unit = 0;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++kv_head < p.num_kv_heads) return;
        enter(p, b + 1);
    }
};

DEVICE u32 item_tiles(const DecodeParams& p, int b) { return (u32)max(1, (p.kv_lens[b] + TILE - 1) / TILE); }

// This CTA's run of units: from the first one at or after its share's start; `end` is where the next CTA's share begins.
DEVICE Work first_work(const DecodeParams& p, u32& end, u32* scratch) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 items = p.num_kv_heads * p.row_blocks;
    int chunk = (p.batch + THREADS - 1) / THREADS, begin = min(p.batch, thread * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop; b++) mine += item_tiles(p, b) * items;
    u32 up_to = mine;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        u32 other = __shfl_up_sync(~0u, up_to, i);
        if (lane >= i) up_to += other;
    }
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    u32 total = 0, before = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        u32 x = scratch[w];
        if (w < warp) before += x;
        total += x;
    }
    u32 start = (u32)((u64)total * blockIdx.x / gridDim.x);
    end = (u32)((u64)total * (blockIdx.x + 1) / gridDim.x);
    u32 from = before + up_to - mine;
    u32* found = scratch + THREADS / 32;
    if (start >= from && start < from + mine) {
        int b = begin;
        for (u32 w; start >= from + (w = item_tiles(p, b) * items); b++) from += w;
        found[0] = b;
        found[1] = from;
    }
    __syncthreads();
    Work work;
    work.enter(p, (int)found[0]);
    u32 each = (u32)max(1, work.num_tiles), item = (start - found[1]) / each;
    work.kv_head = item / p.row_blocks;
    work.row_block = item % p.row_blocks;
    work.offset = found[1] + item * each;
    work.unit = min((int)((start - work.offset) / work.unit_tiles), work.num_units - 1);
    work.offset += work.unit * work.unit_tiles;
    while (work.offset < start) work.next(p);
    return work;
}

// ---- the ring: a slot has a tile's K and V, and their parameters converted once for all warps ----

constexpr int TILE_BYTES = (K_BYTES_OF_BLOCK + V_BYTES_OF_BLOCK) * BLOCKS;
constexpr int AT_V = KV_ONE_STAGE ? K_BYTES_OF_BLOCK : K_BYTES_OF_BLOCK * BLOCKS;
constexpr int AT_SCRATCH_K = (TILE_BYTES + 15) / 16 * 16, AT_SCRATCH_V = AT_SCRATCH_K + SCRATCH_K, AT_DOWN = AT_SCRATCH_V + SCRATCH_V;
constexpr int TILE_STAGE_BYTES = (AT_DOWN + V_GROUPS * 8 + 127) / 128 * 128;

// FULL: the bytes are there. READY: the parameters are converted, too. EMPTY: all warps have read.
enum Signal { FULL, READY, EMPTY, SIGNALS };

struct Ring {
    u32 stages, barriers;  // shared addresses
    int stage;
    u32 phase;

    __device__ __forceinline__ u32 at() const { return stages + stage * TILE_STAGE_BYTES; }
    __device__ __forceinline__ u32 signal(int kind) const { return barriers + (stage * SIGNALS + kind) * 8; }
    __device__ __forceinline__ void wait(int kind) const { barrier_wait(signal(kind), phase); }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    // The whole warp is done.
    __device__ __forceinline__ void arrive(int kind, int lane) const {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(signal(kind));
    }
};

// One warp copies the tiles of the CTA's run into the ring, in the order of reading.
DEVICE void produce(const DecodeParams& p, Work work, u32 end, Ring ring, int lane) {
#pragma unroll 1
    for (; work.b < p.batch && work.offset < end; work.next(p)) {
        const u32* table = p.page_table + (u64)work.b * p.page_table_stride;
        const u8* head = p.k + work.kv_head * RUN_BYTES;
        int first = work.first_tile(), last_entry = (work.kv_len - 1) / PAGE;
        u32 pages = 0;
#pragma unroll 1
        for (int tile = first; tile < work.end_tile(); tile++) {
            int i = (tile - first) * BLOCKS % 32;
            // Past the last page a block repeats it: its tokens are not seen.
            if (i == 0) pages = table[min(tile * BLOCKS + lane, last_entry)];
            const u8* page = head + (u64)__shfl_sync(~0u, pages, i + lane % BLOCKS) * p.page_bytes;
            barrier_wait(ring.signal(EMPTY), ring.phase ^ 1);
            if (lane == 0) barrier_expect(ring.signal(FULL), TILE_BYTES);
            __syncwarp();
            u32 to = ring.at() + lane * K_STRIDE;
            if (lane < BLOCKS) {
                if (KV_ONE_STAGE || BLOCKS == 1) {
                    copy_bulk(to, page, K_BYTES_OF_BLOCK + V_BYTES_OF_BLOCK, ring.signal(FULL));
                } else {
                    copy_bulk(to, page, K_BYTES_OF_BLOCK, ring.signal(FULL));
                    copy_bulk(ring.at() + AT_V + lane * V_STRIDE, page + RUN_V, V_BYTES_OF_BLOCK, ring.signal(FULL));
                }
            }
            ring.advance();
        }
    }
}
