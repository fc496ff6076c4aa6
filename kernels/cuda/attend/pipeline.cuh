// The pipeline of cache bytes: each team has a ring of stages. Its producer warp copies K and V of the team's tiles into it, in the order
// in which the team reads them, as far ahead as there are free stages.
#pragma once
#include "attend/codes.cuh"
#include "attend/split_kv/work.cuh"

// Further kernel arguments: tensor maps of strided rows.
#if ATTN_PAGE == 0
#define ATTN_ROW_MAPS , const __grid_constant__ RowMaps maps
#else
#define ATTN_ROW_MAPS
#endif

struct Ring {
    u32 stages, barriers;  // shared addresses; barriers: full[STAGES], then empty[STAGES]
    int stage;
    u32 phase;

    static constexpr int COPIERS = ATTN_BULK && PAGE != 0 ? 1 : 32;  // lanes that arrive at `full`: that of the copy engine, or all

    // Called by one thread per stage before the ring is used.
    DEVICE void init(u32 barriers, int stage) {
        barrier_init(barriers + stage * 8, COPIERS);
        barrier_init(barriers + (STAGES + stage) * 8, READERS * ARRIVALS);
        barrier_init_fence();
    }
    // Of the stage so many ahead, as long as the ring does not end there.
    __device__ __forceinline__ u32 at(int ahead = 0) const { return stages + (stage + ahead) * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int ahead = 0) const { return barriers + (stage + ahead) * 8; }
    __device__ __forceinline__ u32 empty(int ahead = 0) const { return barriers + (STAGES + stage + ahead) * 8; }
    // By a divisor of STAGES.
    __device__ __forceinline__ void advance(int by = 1) {
        stage += by;
        if (stage == STAGES) {
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
        if (!COPIER_READS && lane < ARRIVALS) barrier_arrive(empty());
        advance();
    }
};

// The stages of a tile, in this order: K and V, or K, then V where they are large; behind each its residuals, if the tile has some and they
// have a stage of their own.
DEVICE int stages_of_keys(bool residuals) { return 1 + (residuals && (KV_ONE_STAGE || K_RESIDUALS_APART)); }
DEVICE int stages_of_values(bool residuals) { return KV_ONE_STAGE ? 0 : 1 + (residuals && V_RESIDUALS_APART); }

// A reader waits for a tile's K, which comes next in the ring, and with it for all that is in the same stages.
DEVICE void wait_keys(Ring& next, bool residuals, Stages& at) {
    u32 stage = next.wait();
    next.advance();
    at.residuals = residuals;
    at.k = {stage, K_STRIDE};
    at.v = {stage + K_BYTES_OF_BLOCK, V_STRIDE};
    at.k_residuals = {stage + K_BYTES_OF_BLOCK * BLOCKS, RESIDUALS};
    if (stages_of_keys(residuals) == 1) return;
    stage = next.wait();
    next.advance();
    at.k_residuals = {stage, RESIDUAL_STRIDE};
    at.v_residuals = {stage + K_RESIDUALS, RESIDUAL_STRIDE};
}
// The same for V.
DEVICE void wait_values(Ring& next, bool residuals, Stages& at) {
    if (KV_ONE_STAGE) return;
    u32 stage = next.wait();
    next.advance();
    at.v = {stage, V_STRIDE};
    at.v_residuals = {stage + V_BYTES_OF_BLOCK * BLOCKS, RESIDUALS};
    if (stages_of_values(residuals) == 1) return;
    at.v_residuals.at = next.wait();
    next.advance();
}

// Copies a run of tiles, first tile, first tile + step, …, one stage after the other, of the sequence and KV head that `Source` gives:
// sequence(), kv_len(), kv_head(), first_residual_tile(p).
template <class Source> struct TileCopier {
    Source source;
    Ring ring;
    int lane;
    int tile, tile_end, step, stage_of_tile;
    u32 pages;  // page numbers of the next tiles, an entry of the page table to a lane
    int known;  // lanes of `pages` that are used up
    u32 residual_pages;  // of the sequence's home pages from the first that is read with residuals on: that of page i in lane i mod 32
    int appended;  // `first_appended_tile`, until the append has ended
    const RowMaps* maps;  // tensor maps of strided rows
    const u8* runs;  // of the sequence and KV head in the first page of the pool

    __device__ __forceinline__ void begin(const DecodeParams& p, int sequence, int kv_head, int first_residual_tile) {
        runs = p.k + kv_head * RUN_BYTES;
        if (!WINDOW) return;
        int page = lane;
        if (p.residual_ring > 32) {
            int first = max(first_residual_tile, 0) * TILE / SAFE_PAGE;
            page = first + (lane - first & 31);
        }
        residual_pages = p.residual_pages[(u64)sequence * p.residual_ring + (page & p.residual_ring - 1)];
    }
    __device__ __forceinline__ const u32* table(const DecodeParams& p) const { return p.page_table + (u64)source.sequence() * p.page_table_stride; }
    // Reads the page table 32 entries at a time, one stage before the first is needed. Past the last page an entry repeats it: its
    // tokens are not seen.
    __device__ __forceinline__ void load_page_indices(const DecodeParams& p) {
        if constexpr (TABLE_PAGE != 0) {
            known = 0;
            if (tile < 0) return;
            pages = table(p)[entry()];
            if (MAY_BE_DEQUANTIZED && entry() >= source.first_residual_tile(p)) pages += p.fine_pages;
        }
    }
    // The lane's.
    __device__ __forceinline__ int entry() const {
        int ahead = tile + lane / ENTRIES * step;
        int index = TABLE_PAGE > TILE ? ahead / TILES_OF_PAGE : ahead * ENTRIES + lane % ENTRIES;
        return min(index, (source.kv_len() - 1) / SAFE_PAGE);
    }
    // 32 entries from `first` on, as far as the table goes, before it is known which are needed; and what was needed, if it is there.
    __device__ __forceinline__ u32 prefetch_pages(const DecodeParams& p, int first) const {
        return TABLE_PAGE == 0 ? 0 : table(p)[min(first + lane, p.page_table_stride - 1)];
    }
    __device__ __forceinline__ void load_page_indices(const DecodeParams& p, u32 seen, int first) {
        if constexpr (TABLE_PAGE != 0) {
            known = 0;
            int at = entry();
            pages = __shfl_sync(~0u, seen, at - first);
            if (!__all_sync(~0u, (u32)(at - first) < 32)) pages = table(p)[at];
        }
    }
    __device__ __forceinline__ bool has_residuals(const DecodeParams& p) const { return WINDOW && tile >= source.first_residual_tile(p); }
    // Copies the next stage of the current tile; true if the next call begins a new tile.
    __device__ __forceinline__ bool copy_next(const DecodeParams& p) {
        if (PAGE != 0 && tile >= appended) {
            wait_for_dependencies();
            appended = 0x7fffffff;
        }
        if (!COPIER_READS) barrier_wait(ring.empty(), ring.phase ^ 1);
        copy_stage(p);
        ring.advance();
        bool residuals = has_residuals(p);
        if (++stage_of_tile < stages_of_keys(residuals) + stages_of_values(residuals)) return false;
        stage_of_tile = 0;
        tile += step;
        known += ENTRIES;
        return true;
    }

    // Passes a stage on as it is.
    __device__ __forceinline__ void skip_stage() {
        barrier_wait(ring.empty(), ring.phase ^ 1);
        if (lane < Ring::COPIERS) barrier_arrive(ring.full());
        ring.advance();
    }

    // The page of the current tile's entry n; the whole warp asks.
    __device__ __forceinline__ u32 entry_of(int n) const { return __shfl_sync(~0u, pages, known + n); }
    __device__ __forceinline__ const u8* run(const DecodeParams& p, u32 of_page) const {
        return runs + (u64)of_page * (u32)p.page_stride;
    }

    __device__ __forceinline__ void copy_stage(const DecodeParams& p) {
        if constexpr (PAGE == 0) {
            bool has_k = stage_of_tile == 0;
            if constexpr (K_CODES == V_CODES) {
                copy_rows<K_SCHEME>(has_k ? maps->k : maps->v, has_k ? p.k : p.v, has_k ? p.k_strides : p.v_strides);
            } else {
                if (has_k) copy_rows<K_SCHEME>(maps->k, p.k, p.k_strides);
                else copy_rows<V_SCHEME>(maps->v, p.v, p.v_strides);
            }
            if (has_k) copy_scales<K_SCHEME, K_GROUPS>(K_CODES, p.k_scales, p.k_scale_strides);
            else copy_scales<V_SCHEME, V_GROUPS>(V_CODES, p.v_scales, p.v_scale_strides);
            copy_async_arrive(ring.full());
        } else {
            bool with_residuals = has_residuals(p);
            int of_keys = stages_of_keys(with_residuals);
            bool has_k = stage_of_tile < of_keys, has_codes = stage_of_tile == 0 || stage_of_tile == of_keys, has_v = KV_ONE_STAGE || !has_k;
            u32 indices[ENTRIES], residuals[ENTRIES];  // of the pages
#pragma unroll
            for (int n = 0; n < ENTRIES; n++) {
                indices[n] = entry_of(n);
                if (WINDOW) residuals[n] = residual_page(p, n);
            }
            if (copies()) {
                bool apart = KV_ONE_STAGE || (has_k ? K_RESIDUALS_APART : V_RESIDUALS_APART);
                int codes_bytes = has_codes ? ((has_k ? K_BYTES_OF_BLOCK : 0) + (has_v ? V_BYTES_OF_BLOCK : 0)) * BLOCKS : 0, residual_bytes = 0;
                if (with_residuals && has_codes != apart) residual_bytes = ((has_k ? K_RESIDUALS : 0) + (has_v ? V_RESIDUALS : 0)) * BLOCKS;
                expect(codes_bytes + residual_bytes);
                if (has_codes) copy_blocks(p, indices, has_k, has_v);
                if (residual_bytes) copy_residuals(p, residuals, has_k, has_v, ring.at() + codes_bytes);
            }
#if !ATTN_BULK
            copy_async_arrive(ring.full());
#endif
        }
    }
    // Fetches the residuals of tiles before `end` into L2: they are the last to be read, and few stages hide their way from memory.
    __device__ __forceinline__ void prefetch_residuals(const DecodeParams& p, int end) const {
#if ATTN_BULK
        if (!WINDOW) return;
        int ahead = max(tile, source.first_residual_tile(p)) + lane / ENTRIES;
        int index = min(PAGE > TILE ? ahead / TILES_OF_PAGE : ahead * ENTRIES + lane % ENTRIES, (source.kv_len() - 1) / SAFE_PAGE);
        u32 page = __shfl_sync(~0u, residual_pages, index & 31);
        if (ahead < end) prefetch_bulk(run(p, page), (K_WINDOW ? RESIDUALS_OF_PAGE : 0) + (V_WINDOW ? RESIDUALS_OF_PAGE : 0));
#endif
    }
    // The residual page of the tile's entry n; past the last page it is the last one's.
    __device__ __forceinline__ u32 residual_page(const DecodeParams& p, int n) const {
        int index = min(PAGE > TILE ? tile / TILES_OF_PAGE : tile * ENTRIES + n, (source.kv_len() - 1) / SAFE_PAGE);
        return __shfl_sync(~0u, residual_pages, index & 31);
    }
    // K, V, or both of a tile; they lie together, in the page as in the stage.
    __device__ __forceinline__ void copy_blocks(const DecodeParams& p, const u32 (&indices)[ENTRIES], bool has_k, bool has_v) {
        int from = has_k ? 0 : RUN_V, bytes = (has_k ? K_BYTES_OF_BLOCK : 0) + (has_v ? V_BYTES_OF_BLOCK : 0);
#pragma unroll
        for (int n = 0; n < ENTRIES; n++) {
            if constexpr (PAGE == BLOCK) {
                copy(ring.at() + n * bytes, run(p, indices[n]) + from, bytes);
            } else {
                if (has_k) copy_piece(run(p, indices[n]), true, ring.at(), n);
                if (has_v) copy_piece(run(p, indices[n]), false, ring.at() + (has_k ? K_BYTES_OF_BLOCK : 0), n);
            }
        }
    }
    // Residuals of K, V, or both; in a page they lie side after side.
    __device__ __forceinline__ void copy_residuals(const DecodeParams& p, const u32 (&indices)[ENTRIES], bool has_k, bool has_v, u32 to) {
        constexpr int V_FROM = K_WINDOW ? RESIDUALS_OF_PAGE : 0;
#pragma unroll
        for (int n = 0; n < ENTRIES; n++) {
            const u8* from = run(p, indices[n]);
            if constexpr (PAGE == BLOCK) {
                int bytes = (has_k ? K_RESIDUALS : 0) + (has_v ? V_RESIDUALS : 0);
                copy(to + n * bytes, from + (has_k ? 0 : V_FROM), bytes);
            } else {
                if (has_k && K_WINDOW) copy_panels<8>(to, from, PANELS, n);
                if (has_v && V_WINDOW) copy(to + (has_k ? K_RESIDUALS : 0) + n * PIECE * HEAD_DIM / 2, from + V_FROM + in_page() * HEAD_DIM / 2, PIECE * HEAD_DIM / 2);
            }
        }
    }
    __device__ __forceinline__ void expect(u32 bytes) {
#if ATTN_BULK
        barrier_expect(ring.full(), bytes);
#endif
    }
    // Whether this lane copies pages: with the copy engine one lane does, else all.
    DEVICE bool copies() {
#if ATTN_BULK
        return elected();
#else
        return true;
#endif
    }
    // Contiguous bytes, a multiple of 16.
    __device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes) {
#if ATTN_BULK
        copy_bulk(to, from, bytes, ring.full());
#else
#pragma unroll 4  // more would cost registers
        for (u32 i = lane * 16; i < bytes; i += 512) copy16_async(to + i, from + i);
#endif
    }
    // Tokens that a tile and an entry of the page table have in common: where they are less than both, they are a piece of each.
    static constexpr int PIECE = smaller(SAFE_PAGE, TILE);
    // Where the tile's piece begins in its page.
    __device__ __forceinline__ int in_page() const { return tile * TILE % SAFE_PAGE; }
    // The entry n's piece of panels with so many bytes to a token, as a page of 64 tokens has them.
    template <int EACH> __device__ __forceinline__ void copy_panels(u32 to, const u8* from, int panels, int n) {
#pragma unroll 4
        for (int i = 0; i < panels; i++) copy(to + (i * TILE + n * PIECE) * EACH, from + (i * PAGE + in_page()) * EACH, PIECE * EACH);
    }
    // The entry n's piece of a side, as a page of 64 tokens has it.
    __device__ __forceinline__ void copy_piece(const u8* run, bool is_k, u32 to, int n) {
        is_k ? copy_piece_of<K_SCHEME, K_GROUPS, false>(run, to, n) : copy_piece_of<V_SCHEME, V_GROUPS, true>(run + RUN_V, to, n);
    }
    template <int SCHEME, int GROUPS, bool IS_V> __device__ __forceinline__ void copy_piece_of(const u8* side, u32 to, int n) {
        constexpr int BITS = code_bits(SCHEME), EACH = params_bytes(SCHEME, 1, 1);
        if constexpr (IS_V && BITS < 16) copy(to + n * PIECE * HEAD_DIM * BITS / 8, side + in_page() * HEAD_DIM * BITS / 8, PIECE * HEAD_DIM * BITS / 8);
        else copy_panels<BITS == 4 ? 8 : 16>(to, side, BITS == 16 ? 2 * PANELS : PANELS, n);
        if constexpr (EACH != 0) copy_panels<EACH>(to + codes_bytes(SCHEME, TILE), side + codes_bytes(SCHEME, PAGE), GROUPS, n);
    }
    // A tile of strided rows: by the copy engine where all tokens exist, one instruction for as many bytes of each row as its swizzle spans,
    // and for each page; else in 16-byte chunks, with neighbouring lanes side by side in a row, and tokens past the end repeating the last one.
    template <int SCHEME> __device__ __forceinline__ void copy_rows(const long long* map, const u8* codes, const long long* strides) {
        constexpr int SWIZZLE = swizzle_of(SCHEME), ROW = HEAD_DIM * code_bits(SCHEME) / 8;
        int kv_head = source.kv_head(), left = source.kv_len() - tile * TILE;
        bool is_whole = ATTN_BULK && left >= TILE && maps->are_set;
#if ATTN_BULK
        u32 places[ENTRIES];
#pragma unroll
        for (int n = 0; n < ENTRIES; n++) places[n] = ROW_PAGE ? entry_of(n) : source.sequence();
        if (is_whole && elected()) {
            fence_async();  // chunks of a tile that was not whole may have been here
            barrier_expect_more(ring.full(), TILE * ROW);
#pragma unroll
            for (int n = 0; n < ENTRIES; n++)
#pragma unroll
                for (int at = 0; at < ROW; at += SWIZZLE)
                    copy_box(ring.at() + at * TILE + n * (TILE / ENTRIES) * SWIZZLE, map, at, place_of(0), kv_head, places[n], ring.full());
        }
#endif
        if (is_whole) return;
        copy_chunks<SWIZZLE>(codes + kv_head * strides[1], strides, ROW / 16, left);
        if (ATTN_BULK && PRODUCTS_READ_STAGES) {
            copy_async_wait();
            fence_async();
        }
    }
    template <int SCHEME, int GROUPS> __device__ __forceinline__ void copy_scales(int at, const u16* scales, const long long* strides) {
        if (SCHEME != INT8_TOKEN && SCHEME != INT8_GROUP) return;
        const u16* of_head = scales + source.kv_head() * strides[1];
#pragma unroll
        for (int i = lane; i < TILE; i += 32) {
            const u16* of_token = row(of_head, strides, min(i, source.kv_len() - 1 - tile * TILE));
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                copy4_async(ring.at() + at + (group * TILE + i) * 4, (const void*)((u64)(of_token + group) & ~3ull));
        }
    }
    template <int SWIZZLE> __device__ __forceinline__ void copy_chunks(const u8* of_head, const long long* strides, int chunks, int left) {
        constexpr int LANES = SWIZZLE == 16 ? 2 : SWIZZLE / 16;  // of a row
        constexpr int UNROLL = ATTN_BULK ? 1 : 4;                // seldom, or always
#pragma unroll UNROLL
        for (int t = lane / LANES; t < TILE; t += 32 / LANES) {
            const u8* of_token = row(of_head, strides, min(t, left - 1));
            for (int chunk = lane % LANES; chunk < chunks; chunk += LANES) copy16_async(chunk_at<SWIZZLE>(ring.at(), 0, chunk, t), of_token + chunk * 16);
        }
    }
    // Where the tile's token t is among those of its page, or of its sequence.
    __device__ __forceinline__ int place_of(int t) const { return ROW_PAGE ? (tile * TILE + t) % SAFE_PAGE : tile * TILE + t; }
    // The row of the tile's token t, of one KV head; the whole warp asks.
    template <class T> __device__ __forceinline__ const T* row(const T* of_head, const long long* strides, int t) const {
        u32 first = ROW_PAGE ? entry_of(t * ENTRIES / TILE) : source.sequence();
        return of_head + first * strides[0] + place_of(t) * strides[2];
    }
};

// The source of a team of split_kv.cu: its cursor in shared memory, read once per tile.
struct CursorSource {
    Cursor* cursor;
    int team;

    __device__ __forceinline__ int sequence() const { return cursor->work.sequence; }
    __device__ __forceinline__ int kv_len() const { return cursor->work.kv_len; }
    __device__ __forceinline__ int first_residual_tile(const DecodeParams&) const { return cursor->work.first_residual_tile; }
    __device__ __forceinline__ int kv_head() const { return cursor->work.kv_head(team); }
};
struct Producer : TileCopier<CursorSource> {
    static constexpr bool HAS_PLAIN = PAGE != 0 && PAGE <= TILE;

    int plain;  // stages to copy before the next decision

    // Moves to the first tile of this team at or after the next unit.
    __device__ __forceinline__ void enter_next_unit(const DecodeParams& p, Cursor& at) {
        while (tile >= tile_end) {
            at.next(p);
            if (!at.is_valid(p)) {
                tile = -1;
                return;
            }
            at.work.team_tiles(p, source.team, tile, tile_end);
        }
        move_to(p, at.work);
        __syncwarp();
        if (lane == 0) *source.cursor = at;
        __syncwarp();
        prefetch_residuals(p, tile_end);
    }
    __device__ __forceinline__ void move_to(const DecodeParams& p, const Work& work) {
        begin(p, work.sequence, work.kv_head(source.team), work.first_residual_tile);
        appended = first_appended_tile(p, work.kv_len);
        step = work.step();
    }
    __device__ __forceinline__ void start(const DecodeParams& p, const Cursor& first) {
        stage_of_tile = plain = 0;
        tile = -1;
        Cursor at = first;
        if (!at.is_valid(p)) return;
        at.work.team_tiles(p, source.team, tile, tile_end);
        move_to(p, at.work);
        if (lane == 0) *source.cursor = at;
        __syncwarp();
        if (tile >= tile_end) enter_next_unit(p, at);
        else prefetch_residuals(p, tile_end);
        load_page_indices(p);
    }
    // Copies the next stage, if there is one. Decisions about a tile and their branches cost 12 % of an int4 kernel's time, so runs of
    // tiles like the one before are counted, and copied without them.
    __device__ __forceinline__ void issue(const DecodeParams& p) {
        if (HAS_PLAIN && __any_sync(~0u, plain > 0)) {  // a vote: the compiler then knows that the warp stays together
            copy_plain(p);
            return;
        }
        if (tile < 0 || !copy_next(p)) return;
        if (tile >= tile_end) {
            Cursor at = *source.cursor;
            enter_next_unit(p, at);
            known = 32;
        }
        if (known == 32) load_page_indices(p);
        if (HAS_PLAIN && tile >= 0) plain = (KV_ONE_STAGE ? 1 : 2) * plain_tiles(p);
    }
    // Tiles but the last one before the run's end, residuals, pages that are not there yet, and those that are not known.
    __device__ __forceinline__ int plain_tiles(const DecodeParams& p) const {
        int tiles = min(tile_end, appended) - tile;
        if (WINDOW) tiles = min(tiles, source.first_residual_tile(p) - tile);
        if (step > 1) tiles = (tiles + TEAMS - 1) / TEAMS;
        return min(tiles, (32 - known) / ENTRIES) - 1;
    }
    __device__ __forceinline__ void copy_plain(const DecodeParams& p) {
        if (!COPIER_READS) barrier_wait(ring.empty(), ring.phase ^ 1);
        u32 indices[ENTRIES];
#pragma unroll
        for (int n = 0; n < ENTRIES; n++) indices[n] = entry_of(n);
        bool has_v = KV_ONE_STAGE || stage_of_tile == 1;
        if (copies()) {
            expect((KV_ONE_STAGE ? K_BYTES_OF_BLOCK + V_BYTES_OF_BLOCK : has_v ? V_BYTES_OF_BLOCK : K_BYTES_OF_BLOCK) * BLOCKS);
            copy_blocks(p, indices, KV_ONE_STAGE || !has_v, has_v);
        }
#if !ATTN_BULK
        copy_async_arrive(ring.full());
#endif
        ring.advance();
        plain--;
        if (!KV_ONE_STAGE) stage_of_tile ^= 1;
        tile += has_v ? step : 0;
        known += has_v ? ENTRIES : 0;
    }
};

// Where the f16 scale of a tile's token t of someone else's cache lies, in a word at `at`.
struct RowScales {
    const u16* scales;
    const long long* strides;
    int b, kv_head, t0;

    __device__ __forceinline__ u32 operator()(u32 at, int group, int t) const {
        // The address's lowest bit but one says which half of the word is meant.
        u32 index = (u32)b * (u32)strides[0] + (u32)kv_head * (u32)strides[1] + (u32)(t0 + t) * (u32)strides[2] + group;
        return at + (group * TILE + t) * 4 + ((u32)(u64)scales + 2 * index & 2);
    }
};
