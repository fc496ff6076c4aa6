// The producers of many_rows.cu: they copy a team's tiles into its ring of stages, and turn codes of 4 bits into bytes, and those of fp8 into f16.
#pragma once
#include "kv_pipeline.cuh"
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

// ---- codes of 4 bits, and of fp8 ----

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

// Nibbles of a side's tile to bytes: eight rows of 16 low nibbles, then those of the high ones. Half steps are 16 times as large. `thread`: of
// the team's unpackers.
template <bool IS_SIXTEENFOLD> DEVICE void unpack_nibbles(u32 from, u32 to, int thread) {
#pragma unroll 2
    for (int i = thread; i < TILE * HEAD_DIM / 32; i += 32 * UNPACKERS) {
        float4 x = lds128(from + i * 16);
        u32 words[4] = {float_bits(x.x), float_bits(x.y), float_bits(x.z), float_bits(x.w)};
        float low[4], high[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            low[n] = bits_float(IS_SIXTEENFOLD ? words[n] << 4 & 0xf0f0f0f0 : words[n] & 0x0f0f0f0f);
            high[n] = bits_float(IS_SIXTEENFOLD ? words[n] & 0xf0f0f0f0 : words[n] >> 4 & 0x0f0f0f0f);
        }
        u32 row = to + (i / 8 * 16 + i % 8) * 16;
        sts128(row, {low[0], low[1], low[2], low[3]});
        sts128(row + 128, {high[0], high[1], high[2], high[3]});
    }
}
// A side's parameters as floats: of half steps the scale of a sixteenth, of plain codes the scale and the shift.
template <int SCHEME> DEVICE void unpack_params(u32 from, u32 to, int thread) {
    SideParams<SCHEME, RowScales> params = {from, 0, {}};
    for (int t = thread; t < TILE; t += 32 * UNPACKERS) {
        if constexpr (SCHEME == INT4) {
            float2 x = params.scale_shift(0, t);
            sts64(to + t * 8, x.x, x.y);
        } else {
            sts32(to + t * 4, float_bits(params.scale(0, t) * RESIDUAL_STEP));
        }
    }
}
// Codes of fp8 to f16, ROWS rows of 16 to each panel: two rows of eight elements, ROWS rows apart. Of V they are tokens in slot order, and get zeros for
// those that do not exist, if some do not.
template <int ROWS, bool IS_V, bool ALL_EXIST> DEVICE void unpack_fp8(u32 from, u32 to, int tokens, int thread) {
#pragma unroll 4
    for (int i = thread; i < TILE * HEAD_DIM / 16; i += 32 * UNPACKERS) {
        float4 x = lds128(from + i * 16);
        u32 words[4] = {float_bits(x.x), float_bits(x.y), float_bits(x.z), float_bits(x.w)}, pairs[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 low, high;
            e4m3_pairs(words[n], low, high);
            if constexpr (IS_V) {
                int t = i / ROWS * 16 + 2 * n;
                pairs[0][n] = ALL_EXIST ? low : cached(low, t, tokens);
                pairs[1][n] = ALL_EXIST ? high : cached(high, t + 8, tokens);
            } else {
                pairs[n / 2][n % 2 * 2] = low;
                pairs[n / 2][n % 2 * 2 + 1] = high;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32(&y)[4] = pairs[half];
            sts128(to + ((i / ROWS * 2 + half) * ROWS + i % ROWS) * 16, {bits_float(y[0]), bits_float(y[1]), bits_float(y[2]), bits_float(y[3])});
        }
    }
}
// A side of a tile of so many tokens.
template <bool IS_V> DEVICE void unpack_side(u32 from, u32 to, int tokens, int thread) {
    if constexpr (INTEGER) {
        constexpr int SCHEME = IS_V ? V_SCHEME : K_SCHEME;
        unpack_nibbles<SCHEME == ROTATED_INT4>(from, to, thread);
        unpack_params<SCHEME>(from + (IS_V ? V_CODES : K_CODES), to + UNPACKED_PARAMS, thread);
    } else if (IS_V && tokens < TILE) {
        unpack_fp8<HEAD_DIM, true, false>(from, to, tokens, thread);
    } else {
        unpack_fp8<IS_V ? HEAD_DIM : TILE, IS_V, true>(from, to, tokens, thread);
    }
}
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
            publish([&](u32 to) { unpack_side<false>(at.k.at, to, tokens, thread); });
            if (K_WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.k_residuals.at, to, thread); });
            publish([&](u32 to) { unpack_side<true>(at.v.at, to, tokens, thread); });
            if (V_WINDOW && residuals) publish([&](u32 to) { unpack_nibbles<false>(at.v_residuals.at, to, thread); });
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
