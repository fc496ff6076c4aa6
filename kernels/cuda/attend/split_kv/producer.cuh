// The producer of a team of split_kv.cu: a warp that copies the team's tiles of its CTA's work units into the ring.
#pragma once
#include "attend/pipeline.cuh"
#include "attend/split_kv/work.cuh"

namespace attn {

// The source of a team of split_kv.cu: its cursor in shared memory, read once per tile.
struct CursorSource {
    Cursor* cursor;
    int team;

    METHOD int sequence() const { return cursor->work.sequence; }
    METHOD int kv_len() const { return cursor->work.kv_len; }
    METHOD int first_residual_tile(const DecodeParams&) const { return cursor->work.first_residual_tile; }
    METHOD bool has_first() const { return cursor->work.has_first_tile(); }
    METHOD int kv_head() const { return cursor->work.kv_head(team); }
};
struct Producer : TileCopier<CursorSource> {
    static constexpr bool HAS_PLAIN = PAGE != 0 && PAGE <= TILE;

    int plain;  // stages to copy before the next decision

    // Moves to the first tile of this team at or after the next unit.
    METHOD void enter_next_unit(const DecodeParams& p, Cursor& at) {
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
    METHOD void move_to(const DecodeParams& p, const Work& work) {
        begin(p, work.sequence, work.kv_head(source.team), work.first_residual_tile);
        appended = first_appended_tile(p, work.kv_len);
        step = work.step();
    }
    METHOD void start(const DecodeParams& p, const Cursor& first) {
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
    METHOD void issue(const DecodeParams& p) {
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
        if (HAS_PLAIN && tile >= 0) plain = (Stage::HOLDS_BOTH ? 1 : 2) * plain_tiles(p);
    }
    // Tiles but the last one before the run's end, residuals, pages that are not there yet, and those that are not known.
    METHOD int plain_tiles(const DecodeParams& p) const {
        int tiles = min(tile_end, appended) - tile;
        if (WINDOW) tiles = has_residuals(p) ? 0 : min(tiles, source.first_residual_tile(p) - tile);
        if (step > 1) tiles = (tiles + Config::TEAMS - 1) / Config::TEAMS;
        return min(tiles, (32 - known) / PageTable::ENTRIES) - 1;
    }
    METHOD void copy_plain(const DecodeParams& p) {
        if (!Config::COPIER_READS) barrier_wait(ring.empty(), ring.phase ^ 1);
        u32 indices[PageTable::ENTRIES];
#pragma unroll
        for (int n = 0; n < PageTable::ENTRIES; n++) indices[n] = entry_of(n);
        bool has_v = Stage::HOLDS_BOTH || stage_of_tile == 1;
        if (copies()) {
            expect((Stage::HOLDS_BOTH ? Stage::K_BLOCK_BYTES + Stage::V_BLOCK_BYTES : has_v ? Stage::V_BLOCK_BYTES : Stage::K_BLOCK_BYTES) * Stage::BLOCKS);
            copy_blocks(p, indices, Stage::HOLDS_BOTH || !has_v, has_v);
        }
#if !ATTN_BULK
        copy_async_arrive(ring.full());
#endif
        ring.advance();
        plain--;
        if (!Stage::HOLDS_BOTH) stage_of_tile ^= 1;
        tile += has_v ? step : 0;
        known += has_v ? PageTable::ENTRIES : 0;
    }
};

}  // namespace attn
