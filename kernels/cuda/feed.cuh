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
    Cursor* cursor;  // this team's; looked at once per tile
    Ring ring;
    int team, lane;
    int tile, tile_end, step, part;
    u32 page;  // of the tile; with pages shorter than a tile, lane i has block i's
    // Of the cursor's sequence and KV head: its pages, and where its run lies in the first page of the pool.
    const u32* table;
    const u8* runs;

    // Moves to the first tile of this team at or after the next unit.
    __device__ __forceinline__ void settle(const DecodeParams& p, Cursor& at) {
        while (tile >= tile_end) {
            at.next(p);
            if (!at.is_valid(p)) {
                tile = -1;
                return;
            }
            if (at.is_fresh) touch_query(p, at.work, lane);
            at.work.share(team, tile, tile_end);
        }
        move_to(p, at.work);
        __syncwarp();
        if (lane == 0) *cursor = at;
        __syncwarp();
    }
    __device__ __forceinline__ void move_to(const DecodeParams& p, const Work& work) {
        table = p.page_table + (u64)work.b * p.page_table_stride;
        runs = p.k + work.kv_head * RUN_BYTES;
        step = work.step();
    }
    // Reads the page table one stage before the page is needed. Past the last page a block repeats it: its tokens are not seen.
    __device__ __forceinline__ void look_up(const DecodeParams& p) {
        if constexpr (PAGE != 0) {
            if (tile < 0) return;
            int index = PAGE >= TILE ? tile * TILE / SAFE_PAGE : min(tile * BLOCKS + lane % BLOCKS, (cursor->work.kv_len - 1) / SAFE_PAGE);
            page = table[index];
        }
    }
    __device__ __forceinline__ void start(const DecodeParams& p, const Cursor& first) {
        part = 0;
        tile = -1;
        Cursor at = first;
        if (!at.is_valid(p)) return;
        at.work.share(team, tile, tile_end);
        move_to(p, at.work);
        if (lane == 0) *cursor = at;
        __syncwarp();
        if (tile >= tile_end) settle(p, at);
        look_up(p);
    }

    // Stages of the tile at hand.
    __device__ __forceinline__ int parts() const { return (WHOLE ? 1 : 2) + cursor->work.is_tail(tile); }

    // Copies the next part, if there is one, into the ring's next stage.
    __device__ __forceinline__ void issue(const DecodeParams& p) {
        if (tile < 0) return;
        if (WR > 1) barrier_wait(ring.empty(), ring.phase ^ 1);
        copy_part(p);
        ring.advance();
        if (++part < parts()) return;
        part = 0;
        tile += step;
        if (tile >= tile_end) {
            Cursor at = *cursor;
            settle(p, at);
        }
        look_up(p);
    }

    __device__ __forceinline__ const u8* run(const DecodeParams& p, u32 of_page) const {
        return runs + (u64)of_page * (u32)p.page_bytes;
    }

    __device__ __forceinline__ void copy_part(const DecodeParams& p) {
        bool tail = cursor->work.is_tail(tile), last = part + 1 == parts();
        bool has_k = WHOLE || !last, has_v = last;
        if constexpr (PAGE == 0) {
            copy_rows(p, has_k);
            return;
        }
        int k_bytes = !has_k ? 0 : tail ? (part == 0 ? TAIL_FIRST : TAIL_SECOND) : K_PART * BLOCKS;
#if ATTN_BULK
        if (elected()) barrier_expect(ring.full(), k_bytes + (has_v ? V_PART * BLOCKS : 0));
#endif
        if (tail && has_k) copy_tail(run(p, p.tail_pages[cursor->work.b]));
        if constexpr (PAGE > TILE) {
            if (has_k && !tail) copy_half(run(p, page), true, ring.at());
            if (has_v) copy_half(run(p, page), false, ring.at() + k_bytes);
        } else if (!tail || has_v) {
            // K and V of a block lie together, in the page as in the stage.
            int from = has_k && !tail ? 0 : RUN_V, bytes = (has_k && !tail ? K_PART : 0) + (has_v ? V_PART : 0);
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                u32 of_page = BLOCKS == 1 ? page : __shfl_sync(~0u, page, block);
                copy(ring.at() + (tail ? k_bytes : 0) + block * bytes, run(p, of_page) + from, bytes);
            }
        }
#if !ATTN_BULK
        copy_async_arrive(ring.full());
#endif
    }
    // Contiguous bytes, a multiple of 16.
    __device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes) {
#if ATTN_BULK
        if (elected()) copy_bulk(to, from, bytes, ring.full());
#else
#pragma unroll 4  // more would cost registers
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
    __device__ __forceinline__ void copy_half(const u8* run, bool is_k, u32 to) {
        int half = (tile * TILE) % SAFE_PAGE;
        int scheme = is_k ? K_SCHEME : V_SCHEME, groups = is_k ? K_GROUPS : V_GROUPS;
        int bits = code_bits(scheme);
        const u8* part_of = run + (is_k ? 0 : RUN_V);
        int codes = codes_bytes(scheme, PAGE);
        if (!is_k && bits < 16) {
            copy(to, part_of + half * D * bits / 8, codes / 2);
        } else {
            int panels = bits == 16 ? D / 8 : PANELS, row = bits == 4 ? 8 : 16;  // bytes of a token in a panel
            for (int i = 0; i < panels; i++) copy(to + i * TILE * row, part_of + (i * PAGE + half) * row, TILE * row);
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
        const Work& work = cursor->work;
        const u8* rows = (is_k ? p.k : p.v) + work.b * strides[0] + work.kv_head * strides[1];
        int pieces = D * code_bits(is_k ? K_SCHEME : V_SCHEME) / 128;
#pragma unroll 4
        for (int i = 0; i < TILE / 16; i++) {
            int t = i * 16 + lane / 2;
            const u8* row = rows + min(tile * TILE + t, work.kv_len - 1) * strides[2];
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
