// Who does what: units of work in the order [sequence][KV head][unit][row block], cut between CTAs by tiles.
//
// A unit is a span (a team takes one of its segments each) or, when there is too little work for that, a segment (a team takes
// one tile each). Everything follows from kv_lens on the device, so that a captured graph serves growing sequences.
#pragma once
#include "config.cuh"
#include "params.h"

struct Work {
    int b, kv_head, unit, row_block;  // where we are
    int kv_len, num_tiles, segment_tiles, unit_tiles, num_units;  // of sequence b
    u32 offset;                       // tiles before this unit, over everything


    __device__ __forceinline__ void enter(const DecodeParams& p, int sequence) {
        b = sequence;
        kv_head = unit = row_block = 0;
        if (b >= p.batch) return;
        kv_len = p.kv_lens[b];
        num_tiles = (kv_len + TILE - 1) / TILE;
        segment_tiles = segment_tiles_of(num_tiles);
        unit_tiles = p.tile_split ? segment_tiles : SPAN * segment_tiles;
        num_units = num_tiles == 0 ? 1 : (num_tiles + unit_tiles - 1) / unit_tiles;  // an empty sequence still gets its zeros
    }
    __device__ __forceinline__ int tiles_here() const {
        return max(1, min(unit_tiles, num_tiles - unit * unit_tiles));
    }
    __device__ __forceinline__ void next(const DecodeParams& p) {
        offset += tiles_here();
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++unit < num_units) return;
        unit = 0;
        if (++kv_head < p.num_kv_heads) return;
        enter(p, b + 1);
    }
    // This team's tiles of the unit: first, first + step, … below end.
    __device__ __forceinline__ void share(const DecodeParams& p, int team, int& first, int& end, int& step) const {
        if (p.tile_split) {
            first = unit * segment_tiles + team;
            end = min(num_tiles, (unit + 1) * segment_tiles);
            step = TEAMS;
        } else {
            first = (unit * SPAN + team) * segment_tiles;
            end = min(num_tiles, first + segment_tiles);
            step = 1;
        }
    }
    // The open page's K is elsewhere (Int4 Channel).
    __device__ __forceinline__ bool is_tail(int tile) const {
        return CHANNEL && (tile * TILE / SAFE_PAGE + 1) * PAGE > kv_len;
    }
};

// Tiles times row blocks and heads of one sequence.
DEVICE u32 weight(const DecodeParams& p, int b) {
    return (u32)max(1, (p.kv_lens[b] + TILE - 1) / TILE) * p.num_kv_heads * p.row_blocks;
}

// This CTA's run of units: starts at the first unit at or after its share's start; `end` is where the next CTA's share begins.
DEVICE Work first_work(const DecodeParams& p, u32& end, u32* scratch) {
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int chunk = (p.batch + THREADS - 1) / THREADS, begin = min(p.batch, thread * chunk), stop = min(p.batch, begin + chunk);
    u32 mine = 0;
    for (int b = begin; b < stop; b++) mine += weight(p, b);
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
    __syncthreads();
    u32 start = (u32)((u64)total * blockIdx.x / gridDim.x);
    end = (u32)((u64)total * (blockIdx.x + 1) / gridDim.x);
    u32 from = before + up_to - mine;
    if (start >= from && start < from + mine) {
        int b = begin;
        for (u32 w; start >= from + (w = weight(p, b)); b++) from += w;
        scratch[0] = b;
        scratch[1] = from;
    }
    __syncthreads();
    Work work;
    work.enter(p, (int)scratch[0]);
    work.offset = scratch[1];
    __syncthreads();
    // Whole heads first, then whole units.
    u32 per_head = (u32)max(1, work.num_tiles) * p.row_blocks;
    u32 heads = (start - work.offset) / per_head;
    work.kv_head = heads;
    work.offset += heads * per_head;
    u32 units = (start - work.offset) / (work.unit_tiles * p.row_blocks);
    work.unit = min((int)units, work.num_units - 1);
    work.offset += work.unit * work.unit_tiles * p.row_blocks;
    while (work.offset < start) work.next(p);
    return work;
}
