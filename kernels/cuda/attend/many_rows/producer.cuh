// The producers of many_rows.cu: they copy a team's tiles into its ring of stages, and turn codes of 4 bits into bytes, or those of fp8 into f16.
#pragma once
#include "attend/many_rows/unpack.cuh"
#include "attend/many_rows/work.cuh"

namespace attn {

// ---- copies ----

struct RangeSource {
    WorkRange range;

    METHOD int sequence() const { return range.sequence; }
    METHOD int kv_len() const { return range.kv_len; }
    METHOD int kv_head() const { return range.kv_head; }
    METHOD bool has_first() const { return true; }
    METHOD int first_residual_tile(const DecodeParams&) const { return range.first_residual_tile; }
};

// Whether a range's last step has a tile that does not exist: its stages are passed on, so that steps begin where they did.
DEVICE bool ends_within_step(const WorkRange& range) { return (range.end_tile() - range.first_tile()) % Config::FLOAT_STEP != 0; }

// Copies the team's tiles in the order of its scheduler, a stage at a time.
struct Issuer {
    const DecodeParams& p;
    Scheduler scheduler;
    TileCopier<RangeSource> copier;
    int end;
    bool pads;  // whether stages are to be skipped after the range

    METHOD void start(const Ring& ring, const RowMaps* maps, int lane) {
        copier.ring = ring;
        copier.lane = lane;
        copier.step = 1;
        copier.stage_of_tile = 0;
        copier.maps = maps;
        copier.tile = end = 0;
        pads = false;
    }
    // Fetches the range's queries into L2, ahead of the warps that attend. A token's rows of a KV head lie side by side.
    METHOD void prefetch_queries() const {
        const WorkRange& range = copier.source.range;
        QueryBlock queries = query_block(p, range.b);
        u64 row = (u64)queries.first * p.num_q_heads + range.kv_head * p.heads_per_kv;
#pragma unroll 1
        for (int t = copier.lane; t < queries.tokens; t += 32)
            prefetch_bulk(row_at(p.q, row + (u64)t * p.num_q_heads, K_DIM, p.dtype), p.heads_per_kv * K_DIM * element_bytes(p.dtype));
    }
    // False if nothing is left, or known: a warp that unpacks, too, cannot wait for the next item, which is published behind tiles that it unpacks.
    METHOD bool issue() {
        WorkRange& range = copier.source.range;
        bool begins = copier.tile >= end;
        if (begins) {
            for (int i = 0; pads && i < 2; i++) copier.skip_stage();
            pads = false;
            do {
                if (Config::UNPACKS && !scheduler.is_known()) return false;
                if (!scheduler.next(p, range, copier.lane)) return false;
                copier.tile = range.first_tile();
                end = range.end_tile();
            } while (copier.tile >= end);
            pads = ends_within_step(range);
            copier.begin(p, range.sequence, range.kv_head, range.first_residual_tile);
            copier.appended = first_appended_tile(p, range.kv_len);
            copier.prefetch_residuals(p, end);
            copier.load_page_indices(p);
        }
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
        if (!Config::UNPACKS && (INTEGER || Config::WHOLE_ITEMS) && begins) prefetch_queries();  // others gain nothing by it
        return true;
    }
};

// ---- unpacked codes ----

// A reader is done with some stages.
DEVICE void release_stages(Ring& ring, int count, int lane) {
#pragma unroll 1
    for (; count > 0; count--) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(ring.empty());
        ring.advance();
    }
}

// The ring of unpacked codes: a stage has K's or V's codes and parameters of a tile, or the side's residuals, which come behind it.
struct UnpackedRing {
    u32 stages, barriers;  // shared addresses; barriers: full[UNPACKED_STAGES], then empty[UNPACKED_STAGES]
    int stage;
    u32 phase;

    DEVICE void init(u32 barriers, int stage) {
        barrier_init(barriers + stage * 8, Config::UNPACKERS * ARRIVALS);
        barrier_init(barriers + (Config::UNPACKED_STAGES + stage) * 8, 4 * Config::TEAM_WARPGROUPS * ARRIVALS);
        barrier_init_fence();
    }
    METHOD u32 at(int ahead = 0) const { return stages + (stage + ahead) * Config::UNPACKED_BYTES; }
    METHOD u32 full(int ahead = 0) const { return barriers + (stage + ahead) * 8; }
    METHOD u32 empty(int ahead = 0) const { return barriers + (Config::UNPACKED_STAGES + stage + ahead) * 8; }
    METHOD void advance(int by = 1) {
        stage += by;
        if (stage >= Config::UNPACKED_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    METHOD u32 wait() const {
        barrier_wait(full(), phase);
        return at();
    }
    METHOD u32 wait_empty(int ahead = 0) const {
        barrier_wait(empty(ahead), phase ^ 1);
        return at(ahead);
    }
    // What this warp has written is seen by products.
    METHOD void publish(int lane, int ahead = 0) const {
        fence_async();
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(full(ahead));
    }
    METHOD void release(int lane) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(empty());
        advance();
    }
};

// The unpacker-th of the team's warps unpacks its tiles, and the first goes on copying those ahead.
struct Unpacker {
    Issuer& issuer;
    Ring ring;
    UnpackedRing unpacked;
    int unpacker, lane;
    int free;  // stages that are not copied to yet

    METHOD int thread() const { return unpacker * 32 + lane; }
    METHOD void issue(int stages) {
        if (unpacker != 0) return;
        free = Config::WHOLE_ITEMS ? free + stages : stages;  // none is left where all ranges are known
#pragma unroll 1
        for (; free > 0; free--)
            if (!issuer.issue() && Config::WHOLE_ITEMS) return;
    }
    // The tile that comes next in the ring of stages.
    METHOD StagedTile wait_tile(bool residuals) const {
        Ring next = ring;
        StagedTile at;
        wait_keys(next, residuals, at);
        wait_values(next, residuals, at);
        return at;
    }
    METHOD void release_tile(bool residuals) {
        int stages = stages_of_keys(residuals) + stages_of_values(residuals);
        release_stages(ring, stages, lane);
        issue(stages);
    }

    // To bytes: K, its residuals, V, its residuals.
    METHOD void unpack_bytes(const WorkRange& range, int index) {
        bool residuals = range.has_residuals(index);
        StagedTile at = wait_tile(residuals);
        auto publish = [&](auto write) {
            write(unpacked.wait_empty());
            unpacked.publish(lane);
            unpacked.advance();
        };
        publish([&](u32 to) { unpack_side<false>(at.k.at, to, thread()); });
        if (Keys::WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.k_residuals.at, to, thread()); });
        publish([&](u32 to) { unpack_side<true>(at.v.at, to, thread()); });
        if (Values::WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.v_residuals.at, to, thread()); });
        release_tile(residuals);
    }
    // To f16: K and V.
    METHOD void unpack_floats(const WorkRange& range, int index) {
        StagedTile at = wait_tile(false);
        widen_by_dims<CodesOf::K>(at.k.at, unpacked.wait_empty(), thread());
        unpacked.publish(lane);
        u32 to = unpacked.wait_empty(1);
        if (Stage::V_TOKEN_MAJOR) widen_by_dims<CodesOf::V_ROWS>(at.v.at, to, thread());
        else widen_values(at.v.at, to, range.kv_len - index * TILE, thread());
        unpacked.publish(lane, 1);
        unpacked.advance(2);
        release_tile(false);
    }
    METHOD void unpack(const DecodeParams& p, Scheduler scheduler) {
        issue(Config::STAGES);
        WorkRange range;
#pragma unroll 1
        while (scheduler.next(p, range, lane)) {
            if (Config::WHOLE_ITEMS) issue(0);  // what is known now
#pragma unroll 1
            for (int index = range.first_tile(); index < range.end_tile(); index++) {
                if constexpr (INTEGER) unpack_bytes(range, index);
                else unpack_floats(range, index);
            }
        }
    }
};

// One of the producers' warps.
DEVICE void produce(const DecodeParams& p, const RowMaps* maps, const Scheduler& scheduler, const Ring& ring, const UnpackedRing& unpacked, int unpacker, int lane) {
    Issuer issuer = {p, scheduler};
    issuer.start(ring, maps, lane);
    if constexpr (Config::UNPACKS) {
        Unpacker{issuer, ring, unpacked, unpacker, lane, 0}.unpack(p, scheduler);
    } else {
#pragma unroll 1
        while (unpacker == 0 && issuer.issue()) {}
    }
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}

}  // namespace attn
