// The producers of many_rows.cu: they copy a team's tiles into its ring of stages, and turn codes of 4 bits into bytes, or codes into f16.
#pragma once
#include "many_rows_unpack.cuh"
#include "many_rows_work.cuh"

// ---- copies ----

struct PartSource {
    Part part;

    __device__ __forceinline__ int sequence() const { return part.sequence; }
    __device__ __forceinline__ int kv_len() const { return part.kv_len; }
    __device__ __forceinline__ int kv_head() const { return part.kv_head; }
    __device__ __forceinline__ int first_residual_tile(const DecodeParams&) const { return part.first_residual_tile; }
};

// Copies the team's tiles in the order of its walk, a stage at a time.
struct Issuer {
    const DecodeParams& p;
    Walk walk;
    TileCopier<PartSource> copier;
    int end;

    __device__ __forceinline__ void start(const Ring& ring, int lane) {
        copier.ring = ring;
        copier.lane = lane;
        copier.step = 1;
        copier.stage_of_tile = 0;
        copier.maps = nullptr;
        copier.tile = end = 0;
    }
    // False if nothing is left.
    __device__ __forceinline__ bool issue() {
        Part& part = copier.source.part;
        if (copier.tile >= end) {
            do {
                if (!walk.next(p, part)) return false;
                copier.tile = part.first_tile();
                end = part.end_tile();
            } while (copier.tile >= end);
            copier.begin(p, part.sequence, part.kv_head, part.first_residual_tile);
            copier.appended = first_appended_tile(p, part.kv_len);
            copier.prefetch_residuals(p, end);
            copier.load_page_indices(p);
        }
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
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
        barrier_init(barriers + stage * 8, UNPACKERS * ARRIVALS);
        barrier_init(barriers + (UNPACKED_STAGES + stage) * 8, 4 * ROW_WARPS * ARRIVALS);
        barrier_init_fence();
    }
    __device__ __forceinline__ u32 at() const { return stages + stage * UNPACKED_STAGE; }
    __device__ __forceinline__ void advance() {
        if (++stage >= UNPACKED_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ u32 wait_full() const {
        barrier_wait(barriers + stage * 8, phase);
        return at();
    }
    __device__ __forceinline__ u32 wait_empty() const {
        barrier_wait(barriers + (UNPACKED_STAGES + stage) * 8, phase ^ 1);
        return at();
    }
    // What this warp has written is seen by products.
    __device__ __forceinline__ void publish(int lane) {
        fence_async();
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(barriers + stage * 8);
        advance();
    }
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        if (lane < ARRIVALS) barrier_arrive(barriers + (UNPACKED_STAGES + stage) * 8);
        advance();
    }
};

// Unpacks the team's tiles, and goes on copying those ahead; the unpacker-th of the team's warps.
DEVICE void unpack_tiles(const DecodeParams& p, Walk walk, Issuer& issuer, Ring ring, UnpackedRing unpacked, int unpacker, int lane) {
    int thread = unpacker * 32 + lane;
    auto issue = [&](int stages) {
        if (unpacker == 0)
#pragma unroll 1
            for (; stages > 0; stages--) issuer.issue();
    };
    issue(STAGES);
    Part part;
#pragma unroll 1
    while (walk.next(p, part)) {
#pragma unroll 1
        for (int index = part.first_tile(); index < part.end_tile(); index++) {
            bool residuals = WINDOW && index >= part.first_residual_tile;
            Ring next = ring;
            Stages at;
            wait_keys(next, residuals, at);
            wait_values(next, residuals, at);
            auto publish = [&](auto write) {
                write(unpacked.wait_empty());
                unpacked.publish(lane);
            };
            int tokens = part.kv_len - index * TILE;
            publish([&](u32 to) { unpack_side<false>(at.k.at, residuals ? at.k_residuals.at : 0, to, tokens, thread); });
            if (INTEGER && K_WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.k_residuals.at, to, thread); });
            publish([&](u32 to) { unpack_side<true>(at.v.at, residuals ? at.v_residuals.at : 0, to, tokens, thread); });
            if (INTEGER && V_WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.v_residuals.at, to, thread); });
            int stages = stages_of_keys(residuals) + stages_of_values(residuals);
            release_stages(ring, stages, lane);
            issue(stages);
        }
    }
}

// One of the producers' warps.
DEVICE void produce(const DecodeParams& p, const Walk& walk, const Ring& ring, const UnpackedRing& unpacked, int unpacker, int lane) {
    Issuer issuer = {p, walk};
    issuer.start(ring, lane);
    if constexpr (UNPACKS) {
        unpack_tiles(p, walk, issuer, ring, unpacked, unpacker, lane);
    } else {
#pragma unroll 1
        while (unpacker == 0 && issuer.issue()) {
        }
    }
    wait_for_dependencies();  // a launch that waits for this one relies on those before it, too
}
