// The pipeline of cache bytes: each team has a ring of stages. Its producer warp copies K and V of the team's tiles into it, in the order
// in which the team reads them, as far ahead as there are free stages.
#pragma once
#include "attend/query_blocks.cuh"
#include "attend/stage.cuh"
#include "common/params.h"

namespace attn {

struct Ring {
    u32 stages, barriers;  // shared addresses; barriers: full[STAGES], then empty[STAGES]
    int stage;
    u32 phase;

    static constexpr int COPIERS = (ATTN_BULK && PAGE != 0 ? 1 : 32) +
                                   Config::TURNERS;  // lanes that arrive at `full`: that of the copy engine, or all; and one of each warp that turns a stage

    // Called by one thread per stage before the ring is used.
    DEVICE void init(u32 barriers, int stage) {
        barrier_init(barriers + stage * 8, COPIERS);
        barrier_init(barriers + (Config::STAGES + stage) * 8, Config::READERS * ARRIVALS);
        barrier_init_fence();
    }
    // Of the stage so many ahead, as long as the ring does not end there.
    METHOD u32 at(int ahead = 0) const { return stages + (stage + ahead) * Stage::BYTES; }
    METHOD u32 full(int ahead = 0) const { return barriers + (stage + ahead) * 8; }
    METHOD u32 empty(int ahead = 0) const { return barriers + (Config::STAGES + stage + ahead) * 8; }
    // By a divisor of STAGES.
    METHOD void advance(int by = 1) {
        stage += by;
        if (stage == Config::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Reader: waits for the stage's bytes.
    METHOD u32 wait() const {
        barrier_wait(full(), phase);
        return at();
    }
    // Reader: the whole team has read the stage.
    METHOD void release(int lane) {
        __syncwarp();
        if (!Config::COPIER_READS && lane < ARRIVALS) barrier_arrive(empty());
        advance();
    }
};

// The stages of a tile, in this order: K and V, or K, then V where they are large; behind each its residuals, if the tile has some and they
// have a stage of their own.
DEVICE int stages_of_keys(bool residuals) { return 1 + (residuals && (Stage::HOLDS_BOTH || Stage::K_RESIDUALS_APART)); }
DEVICE int stages_of_values(bool residuals) { return Stage::HOLDS_BOTH ? 0 : 1 + (residuals && Stage::V_RESIDUALS_APART); }

// A reader waits for a tile's K, which comes next in the ring, and with it for all that is in the same stages.
DEVICE void wait_keys(Ring& next, bool residuals, StagedTile& at) {
    u32 stage = next.wait();
    next.advance();
    at.residuals = residuals;
    at.k = {stage, Stage::K_STRIDE};
    at.v = {LATENTS ? stage : stage + Stage::K_BLOCK_BYTES, Stage::V_STRIDE};
    at.k_residuals = {stage + Stage::K_BLOCK_BYTES * Stage::BLOCKS, Stage::K_RESIDUALS};
    if (stages_of_keys(residuals) == 1) return;
    stage = next.wait();
    next.advance();
    at.k_residuals = {stage, Stage::K_RESIDUAL_STRIDE};
    at.v_residuals = {stage + Stage::K_RESIDUALS, Stage::V_RESIDUAL_STRIDE};
}
// The same for V.
DEVICE void wait_values(Ring& next, bool residuals, StagedTile& at) {
    if (Stage::HOLDS_BOTH) return;
    u32 stage = next.wait();
    next.advance();
    at.v = {stage, Stage::V_STRIDE};
    at.v_residuals = {stage + Stage::V_BLOCK_BYTES * Stage::BLOCKS, Stage::V_RESIDUALS};
    if (stages_of_values(residuals) == 1) return;
    at.v_residuals.at = next.wait();
    next.advance();
}

// The first tile of a page that the launch ahead writes.
DEVICE int first_appended_tile(const DecodeParams& p, int kv_len) {
    return p.appended == 0 ? 0x7fffffff : (kv_len - p.appended) / larger(PAGE, TILE) * PageTable::TILES;
}

// Copies a run of tiles, first tile, first tile + step, …, one stage after the other, of the sequence and KV head that `Source` gives:
// sequence(), kv_len(), kv_head(), first_residual_tile(p), has_first(): whether the first tile is that of the whole sequence.
template <class Source> struct TileCopier {
    Source source;
    Ring ring;
    int lane;
    int tile, tile_end, step, stage_of_tile;
    u32 pages;  // page numbers of the next tiles, an entry of the page table to a lane
    int known;  // lanes of `pages` that are used up
    u32 residual_pages;  // an entry of their table to a lane, see `residual_lane`
    int appended;  // `first_appended_tile`, until the append has ended
    const RowMaps* maps;  // tensor maps of strided rows
    const u8* runs;  // of the sequence and KV head in the first page of the pool

    METHOD void begin(const DecodeParams& p, int sequence, int kv_head, int first_residual_tile) {
        runs = p.k + kv_head * Run::BYTES;
        if (!WINDOW) return;
        int page = lane, first = first_residual_tile * TILE / PageTable::SAFE_ENTRY_TOKENS;
        if (BY_HALVES) {
            // A ring that fits is known without the sequence's length.
            if (lane >= 16 && p.residual_ring > 16) page = first + (lane - first & 15);
        } else {
            int ahead = lane - first & 31, windowed = 32 - FIRST_RESIDUAL_PAGES;
            page = ahead < windowed ? first + ahead : ahead - windowed;
        }
        residual_pages = p.residual_pages[residual_slot(p.residual_ring, sequence, page)];
    }
    // Whether the lower half of the lanes is for the first pages, and the upper half has room for those that the windows of a query block's rows read:
    // the tiles of 128 query tokens, and those before them. Else the first pages are in the lanes that those leave.
    static constexpr bool BY_HALVES = (WINDOW + 2) * PageTable::ENTRIES <= 16;
    static_assert((WINDOW + 2) * PageTable::ENTRIES + FIRST_RESIDUAL_PAGES <= 32, "a lane has one page");
    // The lane that has the residual page of home page `index`: page i of those that windows read in lane i mod 32, or i mod 16 of the upper half.
    METHOD int residual_lane(const DecodeParams& p, int index) const {
        bool is_first = index < FIRST_RESIDUAL_PAGES;
        if (BY_HALVES) return is_first ? index : (index | 16) & 31;
        int first = source.first_residual_tile(p) * TILE / PageTable::SAFE_ENTRY_TOKENS;
        return (is_first ? first - FIRST_RESIDUAL_PAGES + index : index) & 31;
    }
    METHOD const u32* table(const DecodeParams& p) const { return p.page_table + (u64)source.sequence() * p.page_table_stride; }
    // Reads the page table 32 entries at a time, one stage before the first is needed. Past the last page an entry repeats it: its
    // tokens are not seen.
    METHOD void load_page_indices(const DecodeParams& p) {
        if constexpr (PageTable::ENTRY_TOKENS != 0) {
            known = 0;
            if (tile < 0) return;
            pages = table(p)[entry()];
            if (Config::MAY_BE_DEQUANTIZED && p.fine_window > 0 && (entry() == 0 || entry() >= source.first_residual_tile(p))) pages += p.fine_pages;
        }
    }
    // The lane's.
    METHOD int entry() const {
        int ahead = tile + lane / PageTable::ENTRIES * step;
        int index = PageTable::ENTRY_TOKENS > TILE ? ahead / PageTable::TILES : ahead * PageTable::ENTRIES + lane % PageTable::ENTRIES;
        return min(index, (source.kv_len() - 1) / PageTable::SAFE_ENTRY_TOKENS);
    }
    // 32 entries from `first` on, as far as the table goes, before it is known which are needed; and what was needed, if it is there.
    METHOD u32 prefetch_pages(const DecodeParams& p, int first) const {
        return PageTable::ENTRY_TOKENS == 0 || p.page_table_stride == 0 ? 0 : table(p)[min(first + lane, p.page_table_stride - 1)];
    }
    METHOD void load_page_indices(const DecodeParams& p, u32 seen, int first) {
        if constexpr (PageTable::ENTRY_TOKENS != 0) {
            known = 0;
            int at = entry();
            pages = __shfl_sync(~0u, seen, at - first);
            if (!__all_sync(~0u, (u32)(at - first) < 32)) pages = table(p)[at];
        }
    }
    METHOD bool has_residuals(const DecodeParams& p) const { return attn::has_residuals(tile, source.first_residual_tile(p), source.has_first()); }
    // Copies the next stage of the current tile; true if the next call begins a new tile.
    METHOD bool copy_next(const DecodeParams& p) {
        if (PAGE != 0 && tile >= appended) {
            wait_for_dependencies();
            appended = 0x7fffffff;
        }
        if (!Config::COPIER_READS) barrier_wait(ring.empty(), ring.phase ^ 1);
        copy_stage(p);
        ring.advance();
        bool residuals = has_residuals(p);
        if (++stage_of_tile < stages_of_keys(residuals) + stages_of_values(residuals)) return false;
        stage_of_tile = 0;
        tile += step;
        known += PageTable::ENTRIES;
        return true;
    }

    // The page of the current tile's entry n; the whole warp asks.
    METHOD u32 entry_of(int n) const { return __shfl_sync(~0u, pages, known + n); }
    METHOD const u8* run(const DecodeParams& p, u32 of_page) const { return runs + (u64)of_page * (u32)p.page_stride; }

    METHOD void copy_stage(const DecodeParams& p) {
        if constexpr (PAGE == 0) {
            bool has_k = stage_of_tile == 0;
            if constexpr (Stage::K_CODES == Stage::V_CODES) {
                copy_rows<Keys>(has_k ? maps->k : maps->v, has_k ? p.k : p.v, has_k ? p.k_strides : p.v_strides);
            } else {
                if (has_k) copy_rows<Keys>(maps->k, p.k, p.k_strides);
                else copy_rows<Values>(maps->v, p.v, p.v_strides);
            }
            if (has_k) copy_scales<Keys>(Stage::K_CODES, p.k_scales, p.k_scale_strides);
            else copy_scales<Values>(Stage::V_CODES, p.v_scales, p.v_scale_strides);
            copy_async_arrive(ring.full());
        } else {
            bool with_residuals = has_residuals(p);
            int of_keys = stages_of_keys(with_residuals);
            bool has_k = stage_of_tile < of_keys, has_codes = stage_of_tile == 0 || stage_of_tile == of_keys, has_v = Stage::HOLDS_BOTH || !has_k;
            u32 indices[PageTable::ENTRIES], residuals[PageTable::ENTRIES];  // of the pages
#pragma unroll
            for (int n = 0; n < PageTable::ENTRIES; n++) {
                indices[n] = entry_of(n);
                if (WINDOW) residuals[n] = residual_page(p, n);
            }
            if (copies()) {
                bool apart = Stage::HOLDS_BOTH || (has_k ? Stage::K_RESIDUALS_APART : Stage::V_RESIDUALS_APART);
                int code_bytes = has_codes ? ((has_k ? Stage::K_BLOCK_BYTES : 0) + (has_v ? Stage::V_BLOCK_BYTES : 0)) * Stage::BLOCKS : 0, residual_bytes = 0;
                if (with_residuals && has_codes != apart)
                    residual_bytes = ((has_k ? Stage::K_RESIDUALS : 0) + (has_v ? Stage::V_RESIDUALS : 0)) * Stage::BLOCKS;
                expect(code_bytes + residual_bytes);
                if (has_codes) copy_blocks(p, indices, has_k, has_v);
                if (residual_bytes) copy_residuals(p, residuals, has_k, has_v, ring.at() + code_bytes);
            }
#if !ATTN_BULK
            copy_async_arrive(ring.full());
#endif
        }
    }
    // Fetches the residuals that windows have in tiles before `end` into L2: they are the last to be read, and few stages hide their way from memory.
    METHOD void prefetch_residuals(const DecodeParams& p, int end) const {
#if ATTN_BULK
        if (!WINDOW) return;
        int ahead = max(tile, source.first_residual_tile(p)) + lane / PageTable::ENTRIES;
        int index = min(PAGE > TILE ? ahead / PageTable::TILES : ahead * PageTable::ENTRIES + lane % PageTable::ENTRIES,
                        (source.kv_len() - 1) / PageTable::SAFE_ENTRY_TOKENS);
        u32 page = __shfl_sync(~0u, residual_pages, residual_lane(p, index));
        if (ahead < end) prefetch_bulk(run(p, page), Keys::residuals(PAGE) + Values::residuals(PAGE));
#endif
    }
    // The residual page of the tile's entry n; past the last page it is the last one's.
    METHOD u32 residual_page(const DecodeParams& p, int n) const {
        int index = min(PAGE > TILE ? tile / PageTable::TILES : tile * PageTable::ENTRIES + n, (source.kv_len() - 1) / PageTable::SAFE_ENTRY_TOKENS);
        return __shfl_sync(~0u, residual_pages, residual_lane(p, index));
    }
    // K, V, or both of a tile; they lie together, in the page as in the stage.
    METHOD void copy_blocks(const DecodeParams& p, const u32 (&indices)[PageTable::ENTRIES], bool has_k, bool has_v) {
        int from = has_k ? 0 : Run::V_CODES, bytes = (has_k ? Stage::K_BLOCK_BYTES : 0) + (has_v ? Stage::V_BLOCK_BYTES : 0);
#pragma unroll
        for (int n = 0; n < PageTable::ENTRIES; n++) {
            if constexpr (PAGE == Stage::BLOCK) {
                copy(ring.at() + n * bytes, run(p, indices[n]) + from, bytes);
            } else {
                if (has_k) copy_piece(run(p, indices[n]), true, ring.at(), n);
                if (has_v && !LATENTS) copy_piece(run(p, indices[n]), false, ring.at() + (has_k ? Stage::K_BLOCK_BYTES : 0), n);
            }
        }
    }
    // Residuals of K, V, or both; in a page they lie side after side.
    METHOD void copy_residuals(const DecodeParams& p, const u32 (&indices)[PageTable::ENTRIES], bool has_k, bool has_v, u32 to) {
#pragma unroll
        for (int n = 0; n < PageTable::ENTRIES; n++) {
            const u8* from = run(p, indices[n]);
            if constexpr (PAGE == Stage::BLOCK) {
                int bytes = (has_k ? Stage::K_RESIDUALS : 0) + (has_v ? Stage::V_RESIDUALS : 0);
                copy(to + n * bytes, from + (has_k ? 0 : Run::V_RESIDUALS), bytes);
            } else {
                if (has_k && Keys::WINDOW) copy_panels<8>(to, from, Keys::PANELS, n);
                if (has_v && Values::WINDOW)
                    copy(to + (has_k ? Stage::K_RESIDUALS : 0) + n * PIECE * V_DIM / 2, from + Run::V_RESIDUALS + in_page() * V_DIM / 2, PIECE * V_DIM / 2);
            }
        }
    }
    METHOD void expect(u32 bytes) {
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
    METHOD void copy(u32 to, const u8* from, u32 bytes) {
#if ATTN_BULK
        copy_bulk(to, from, bytes, ring.full());
#else
#pragma unroll 4  // more would cost registers
        for (u32 i = lane * 16; i < bytes; i += 512) copy16_async(to + i, from + i);
#endif
    }
    // Tokens that a tile and an entry of the page table have in common: where they are less than both, they are a piece of each.
    static constexpr int PIECE = smaller(PageTable::SAFE_ENTRY_TOKENS, TILE);
    // Where the tile's piece begins in its page.
    METHOD int in_page() const { return tile * TILE % PageTable::SAFE_ENTRY_TOKENS; }
    // The entry n's piece of panels with so many bytes to a token, as a page of 64 tokens has them.
    template <int EACH> METHOD void copy_panels(u32 to, const u8* from, int panels, int n) {
#pragma unroll 4
        for (int i = 0; i < panels; i++) copy(to + (i * TILE + n * PIECE) * EACH, from + (i * PAGE + in_page()) * EACH, PIECE * EACH);
    }
    // The entry n's piece of a side, as a page of 64 tokens has it.
    METHOD void copy_piece(const u8* run, bool is_k, u32 to, int n) {
        is_k ? copy_piece_of<Keys, false>(run, to, n) : copy_piece_of<Values, true>(run + Run::V_CODES, to, n);
    }
    template <class Side, bool IS_V> METHOD void copy_piece_of(const u8* side, u32 to, int n) {
        constexpr int BITS = Side::BITS, EACH = param_bytes(Side::SCHEME);
        if constexpr (IS_V && BITS < 16) copy(to + n * Side::codes(PIECE), side + Side::codes(in_page()), Side::codes(PIECE));
        else copy_panels<BITS == 4 ? 8 : 16>(to, side, BITS == 16 ? 2 * Side::PANELS : Side::PANELS, n);
        if constexpr (EACH != 0) copy_panels<EACH>(to + Side::codes(TILE), side + Side::codes(PAGE), Side::GROUPS, n);
    }
    // Part `part` of PARTS of a tile's strided rows: by the copy engine where all tokens exist, one instruction for as many bytes of each row as its swizzle spans,
    // and for each page; else in 16-byte chunks, with neighbouring lanes side by side in a row, and tokens past the end repeating the last one.
    template <class Side, int PARTS = 1> METHOD void copy_rows(const long long* map, const u8* codes, const long long* strides, int part = 0) {
        constexpr int ROW = Side::codes(1) / PARTS, SWIZZLE = swizzle_of(Side::codes(1));
        static_assert(ROW % SWIZZLE == 0 || PARTS == 1 || PAGE != 0, "select.rs: a part is made of what the swizzle spans");
        int kv_head = source.kv_head(), left = source.kv_len() - tile * TILE;
        bool is_whole = ATTN_BULK && left >= TILE && maps->are_set;
#if ATTN_BULK
        u32 places[PageTable::ENTRIES];
#pragma unroll
        for (int n = 0; n < PageTable::ENTRIES; n++) places[n] = ROW_PAGE ? entry_of(n) : source.sequence();
        if (is_whole && elected()) {
            fence_async();  // chunks of a tile that was not whole may have been here
            barrier_expect_more(ring.full(), TILE * ROW);
#pragma unroll
            for (int n = 0; n < PageTable::ENTRIES; n++)
#pragma unroll
                for (int at = 0; at < ROW; at += SWIZZLE)
                    copy_box(ring.at() + at * TILE + n * (TILE / PageTable::ENTRIES) * SWIZZLE, map, part * ROW + at, place_of(0), kv_head, places[n], ring.full());
        }
#endif
        if (is_whole) return;
        copy_chunks<SWIZZLE>(codes + kv_head * strides[1] + part * ROW, strides, ROW / 16, left);
        if (ATTN_BULK && Config::PRODUCTS_READ_STAGES) {
            copy_async_wait();
            fence_async();
        }
    }
    template <class Side> METHOD void copy_scales(int at, const u16* scales, const long long* strides) {
        if (Side::SCHEME != INT8_TOKEN && Side::SCHEME != INT8_GROUP) return;
        const u16* of_head = scales + source.kv_head() * strides[1];
#pragma unroll
        for (int i = lane; i < TILE; i += 32) {
            const u16* of_token = row(of_head, strides, min(i, source.kv_len() - 1 - tile * TILE));
#pragma unroll
            for (int group = 0; group < Side::GROUPS; group++)
                copy4_async(ring.at() + at + (group * TILE + i) * 4, (const void*)((u64)(of_token + group) & ~3ull));
        }
    }
    template <int SWIZZLE> METHOD void copy_chunks(const u8* of_head, const long long* strides, int chunks, int left) {
        constexpr int LANES = SWIZZLE == 16 ? 2 : SWIZZLE / 16;  // of a row
        constexpr int UNROLL = ATTN_BULK ? 1 : 4;                // seldom, or always
#pragma unroll UNROLL
        for (int t = lane / LANES; t < TILE; t += 32 / LANES) {
            const u8* of_token = row(of_head, strides, min(t, left - 1));
            for (int chunk = lane % LANES; chunk < chunks; chunk += LANES) copy16_async(chunk_at<SWIZZLE>(ring.at(), 0, chunk, t), of_token + chunk * 16);
        }
    }
    // Where the tile's token t is among those of its page, or of its sequence.
    METHOD int place_of(int t) const { return ROW_PAGE ? (tile * TILE + t) % PageTable::SAFE_ENTRY_TOKENS : tile * TILE + t; }
    // The row of the tile's token t, of one KV head; the whole warp asks.
    template <class T> METHOD const T* row(const T* of_head, const long long* strides, int t) const {
        u32 first = ROW_PAGE ? entry_of(t * PageTable::ENTRIES / TILE) : source.sequence();
        return of_head + first * strides[0] + place_of(t) * strides[2];
    }
};

// Where the f16 scale of a tile's token t of someone else's cache lies, in a word at `at`.
struct RowScales {
    const u16* scales;
    const long long* strides;
    int b, kv_head, t0;

    METHOD u32 operator()(u32 at, int group, int t) const {
        // The address's lowest bit but one says which half of the word is meant.
        u32 index = (u32)b * (u32)strides[0] + (u32)kv_head * (u32)strides[1] + (u32)(t0 + t) * (u32)strides[2] + group;
        return at + (group * TILE + t) * 4 + ((u32)(u64)scales + 2 * index & 2);
    }
};

}  // namespace attn
