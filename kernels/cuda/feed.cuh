// The flow of cache bytes: each team has a ring of stages; its first warp copies K parts and V parts of the team's tiles into
// it, in the order in which the team reads them, as far ahead as there are free stages.
#pragma once
#include "work.cuh"

struct Ring {
    u32 stages, barriers;  // shared addresses; barriers: full[STAGES], then empty[STAGES]
    int stage;
    u32 phase;

    __device__ __forceinline__ u32 at() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (STAGES + stage) * 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Reader: waits for the stage's bytes.
    __device__ __forceinline__ u32 wait() const {
        barrier_wait(full(), phase);
        return at();
    }
    // Reader: the whole team has read the stage.
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        if (WR > 1 && lane == 0) barrier_arrive(empty());
        advance();
    }
};

struct Feed {
    Work* work;  // in shared memory, of this team: registers are short, and it is looked at once per tile
    Ring ring;
    u32 end;
    int team, lane;
    int tile, tile_end, step, part;
    u32 page;  // of the tile; with pages shorter than a tile, lane i has block i's
    u64 policy;

    // Moves to the first tile of this team at or after the next unit.
    __device__ __forceinline__ void settle(const DecodeParams& p, Work& at) {
        while (tile >= tile_end) {
            at.next(p);
            if (at.offset >= end || at.b >= p.batch) {
                tile = -1;
                return;
            }
            at.share(p, team, tile, tile_end, step);
        }
        __syncwarp();
        if (lane == 0) *work = at;
        __syncwarp();
    }
    // Reads the page table one stage before the page is needed. Past the last page a block repeats it: its tokens are not seen.
    __device__ __forceinline__ void look_up(const DecodeParams& p) {
        if constexpr (PAGE != 0) {
            if (tile < 0) return;
            int index = PAGE >= TILE ? tile * TILE / SAFE_PAGE : min(tile * BLOCKS + lane % BLOCKS, (work->kv_len - 1) / SAFE_PAGE);
            page = p.page_table[(u64)work->b * p.page_table_stride + index];
        }
    }
    __device__ __forceinline__ void start(const DecodeParams& p, const Work& first) {
        part = 0;
        tile = -1;
        if (first.offset >= end || first.b >= p.batch) return;
        Work at = first;
        at.share(p, team, tile, tile_end, step);
        if (lane == 0) *work = at;
        __syncwarp();
        if (tile >= tile_end) settle(p, at);
        look_up(p);
    }

    // Copies the next part, if there is one, into the ring's next stage.
    __device__ __forceinline__ void issue(const DecodeParams& p) {
        if (tile < 0) return;
        if (WR > 1) barrier_wait(ring.empty(), ring.phase ^ 1);
        copy_part(p);
        ring.advance();
        if (++part < (work->is_tail(tile) ? 3 : 2)) return;
        part = 0;
        tile += step;
        if (tile >= tile_end) {
            Work at = *work;
            settle(p, at);
        }
        look_up(p);
    }

    __device__ __forceinline__ const u8* run(const DecodeParams& p, u32 of_page) const {
        return p.k + (u64)of_page * p.page_bytes + work->kv_head * RUN_BYTES;
    }

    __device__ __forceinline__ void copy_part(const DecodeParams& p) {
        bool tail = work->is_tail(tile), is_k = part + 1 < (tail ? 3 : 2);
        if constexpr (PAGE == 0) {
            copy_rows(p, is_k);
        } else {
#if ATTN_BULK
            u32 total = tail && is_k ? (part == 0 ? TAIL_PANELS * TILE * 16 : (PANELS - TAIL_PANELS) * TILE * 16 + TILE * 2)
                      : (is_k ? K_PART : V_PART) * BLOCKS;
            if (lane == 0) barrier_expect(ring.full(), total);
#endif
            if (tail && is_k) {
                copy_tail(run(p, p.tail_pages[work->b]));
            } else if constexpr (PAGE > TILE) {
                copy_half(run(p, page), is_k);
            } else {
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) {
                    u32 of_page = BLOCKS == 1 ? page : __shfl_sync(~0u, page, block);
                    u32 bytes = is_k ? K_PART : V_PART;
                    copy(ring.at() + block * bytes, run(p, of_page) + (is_k ? 0 : RUN_V), bytes);
                }
            }
#if !ATTN_BULK
            copy_async_arrive(ring.full());
#endif
        }
    }
    // Contiguous bytes, a multiple of 16.
    __device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes) {
#if ATTN_BULK
        if (lane == 0) copy_bulk(to, from, bytes, ring.full(), policy);
#else
        for (u32 i = lane * 16; i < bytes; i += 512) copy16_async(to + i, from + i);
#endif
    }
    // The int8 K of an open page, in two halves of its panels; its scales come with the second.
    __device__ __forceinline__ void copy_tail(const u8* k) {
        int half = (tile * TILE) % SAFE_PAGE;  // 64 for the second tile of a page of 128
        int panel = part == 0 ? 0 : TAIL_PANELS, panels = part == 0 ? TAIL_PANELS : PANELS - TAIL_PANELS;
        if (PAGE == TILE) {
            copy(ring.at(), k + panel * TILE * 16, panels * TILE * 16);
        } else {
            for (int i = 0; i < panels; i++) copy(ring.at() + i * TILE * 16, k + ((panel + i) * PAGE + half) * 16, TILE * 16);
        }
        if (part == 1) copy(ring.at() + panels * TILE * 16, k + PAGE * D + half * 2, TILE * 2);
    }
    // One tile of a page of 128 tokens, laid out like a page of 64.
    __device__ __forceinline__ void copy_half(const u8* run, bool is_k) {
        int half = (tile * TILE) % SAFE_PAGE;
        int scheme = is_k ? K_SCHEME : V_SCHEME, groups = is_k ? K_GROUPS : V_GROUPS;
        int bits = code_bits(scheme);
        const u8* part_of = run + (is_k ? 0 : RUN_V);
        u32 to = ring.at();
        int codes = codes_bytes(scheme, PAGE);
        if (!is_k && bits < 16) {
            copy(to, part_of + half * D * bits / 8, codes / 2);
        } else {
            int row = 16;  // bytes of a panel's row
            int whole = D * bits / 8 / 16;
            for (int i = 0; i < whole; i++) copy(to + i * TILE * row, part_of + (i * PAGE + half) * row, TILE * row);
            if (D * bits / 8 % 16) copy(to + whole * TILE * row, part_of + whole * PAGE * row + half * 8, TILE * 8);
        }
        to += codes / 2;
        part_of += codes;
        if (scheme == INT4_CHANNEL) {
            copy(to, part_of, D * 4);
        } else {
            int each = params_bytes(scheme, 1, 1);
            if (each)
                for (int g = 0; g < groups; g++) copy(to + g * TILE * each, part_of + (g * PAGE + half) * each, TILE * each);
        }
    }
    // A tile of someone else's rows, in 16-byte pieces, laid out like K's panels; two lanes read a sector. Tokens past the end
    // repeat the last one.
    __device__ __forceinline__ void copy_rows(const DecodeParams& p, bool is_k) {
        const long long* strides = is_k ? p.k_strides : p.v_strides;
        const u8* rows = (is_k ? p.k : p.v) + work->b * strides[0] + work->kv_head * strides[1];
        int pieces = D * code_bits(is_k ? K_SCHEME : V_SCHEME) / 128;
#pragma unroll 4
        for (int i = 0; i < TILE / 16; i++) {
            int t = i * 16 + lane / 2;
            const u8* row = rows + min(tile * TILE + t, work->kv_len - 1) * strides[2];
            for (int piece = lane % 2; piece < pieces; piece += 2) copy16_async(ring.at() + (piece * TILE + t) * 16, row + piece * 16);
        }
        copy_async_arrive(ring.full());
    }
};

// The f16 scales of a tile's tokens 2·lane, 2·lane + 1 of someone else's cache.
DEVICE u32 scale_pair(const u16* scales, const long long* strides, int b, int kv_head, int t, int kv_len, int group) {
    const u16* at = scales + b * strides[0] + kv_head * strides[1] + group;
    return at[min(t, kv_len - 1) * strides[2]] | (u32)at[min(t + 1, kv_len - 1) * strides[2]] << 16;
}
