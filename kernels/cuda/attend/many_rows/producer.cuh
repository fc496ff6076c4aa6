// The producers of many_rows.cu: they copy a team's tiles into its ring of stages, and turn codes of 4 bits into bytes, or those of fp8 into f16.
#pragma once
#include "attend/many_rows/unpack.cuh"
#include "attend/many_rows/work.cuh"
#include "attend/tile/codes.cuh"

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

// Fetches a range's queries into L2, ahead of the warps that attend. A token's rows of a KV head lie side by side.
DEVICE void prefetch_queries(const DecodeParams& p, const WorkRange& range, int lane) {
    QueryBlock queries = query_block(p, range.b);
    u64 row = (u64)queries.first * p.num_q_heads + range.kv_head * p.heads_per_kv;
#pragma unroll 1
    for (int t = lane; t < queries.tokens; t += 32)
        prefetch_bulk(row_at(p.q, row + (u64)t * p.num_q_heads, K_DIM, p.dtype), p.heads_per_kv * K_DIM * element_bytes(p.dtype));
}

// Copies the team's tiles in the order of its scheduler, a stage at a time.
struct Issuer {
    const DecodeParams& p;
    Scheduler scheduler;
    TileCopier<RangeSource> copier;
    int end;

    METHOD void start(const Ring& ring, const RowMaps* maps, int lane) {
        copier.ring = ring;
        copier.lane = lane;
        copier.step = 1;
        copier.stage_of_tile = 0;
        copier.maps = maps;
        copier.tile = end = 0;
    }
    // False if nothing is left, or known: a warp that unpacks, too, cannot wait for the next item, which is published behind tiles that it unpacks.
    METHOD bool issue() {
        WorkRange& range = copier.source.range;
        bool begins = copier.tile >= end;
        if (begins) {
            do {
                if (Config::UNPACKS && !Config::COPIES_APART && !scheduler.is_known()) return false;
                if (!scheduler.next(p, range, copier.lane)) return false;
                copier.tile = range.first_tile;
                end = range.end_tile;
            } while (copier.tile >= end);
            copier.begin(p, range.sequence, range.kv_head, range.first_residual_tile);
            copier.appended = first_appended_tile(p, range.kv_len);
            copier.prefetch_residuals(p, end);
            copier.load_page_indices(p);
        }
        if (copier.copy_next(p) && copier.known == 32) copier.load_page_indices(p);
        if (!Config::UNPACKS && (INTEGER || Config::WHOLE_ITEMS) && !Config::LOADS_AHEAD && begins)
            prefetch_queries(p, copier.source.range, copier.lane);  // others gain nothing by it
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

// The unpacker-th of the team's warps unpacks its tiles; unless another one copies, the first goes on copying those ahead.
struct Unpacker {
    Issuer& issuer;
    Ring ring;
    UnpackedRing unpacked;
    int unpacker, lane;
    int free;  // stages that are not copied to yet

    METHOD int thread() const { return unpacker * 32 + lane; }
    METHOD void issue(int stages) {
        if (Config::COPIES_APART || unpacker != 0) return;
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
        if (Stage::V_TOKEN_MAJOR) widen_by_dims<CodesOf::ROWS_IN_ORDER>(at.v.at, to, thread());
        else widen_by_tokens(at.v.at, to, range.kv_len - index * TILE, thread());
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
            for (int index = range.first_tile; index < range.end_tile; index++) {
                if constexpr (INTEGER) unpack_bytes(range, index);
                else unpack_floats(range, index);
            }
        }
    }
};

// ---- wide rows ----

// Of latents: the barrier that is behind those of a ring, of its stage: a part's bytes are copied, but not turned.
DEVICE u32 copied(const Ring& ring) { return ring.barriers + (2 * Config::STAGES + ring.stage) * 8; }

// Calls keys(first tile, end) and values(…, part) for each span of the team's ranges in the order in which parts are copied: of integers all tiles of K, then all of V's
// first part, and so on.
template <class Begin, class Keys, class Values>
DEVICE void each_part(const DecodeParams& p, Scheduler& scheduler, WorkRange& range, int lane, Begin begin, Keys keys, Values values) {
#pragma unroll 1
    while (scheduler.next(p, range, lane)) {
        begin();
#pragma unroll 1
        for (int first = range.first_tile; first < range.end_tile; first += 1 << SPAN_SHIFT) {
            const int end = min(range.end_tile, first + (1 << SPAN_SHIFT));
            keys(first, end);
#pragma unroll 1
            for (int part = 0; part < Config::V_PARTS; part++) values(first, end, part);
        }
    }
}

// Copies the team's spans in the order of its scheduler, each part of a tile to a stage.
struct PartCopier : TileCopier<RangeSource> {
    static constexpr int ENTRIES = (1 << SPAN_SHIFT) * PageTable::ENTRIES / PageTable::TILES;  // of a span, which begins with a page: up to two for each lane
    static constexpr int PANEL_DIMS = 128 / Keys::BITS, PART_PANELS = K_DIM / PANEL_DIMS / Config::K_PARTS;  // of 16 bytes
    u32 of_span[2];

    METHOD int entry_at(int tile) const { return PageTable::TILES > 1 ? tile / PageTable::TILES : tile * PageTable::ENTRIES; }
    // Past the last page an entry repeats it: its tokens are not seen.
    METHOD void load_span(const DecodeParams& p, int first_tile) {
#pragma unroll
        for (int i = 0; i < (ENTRIES + 31) / 32; i++)
            of_span[i] = table(p)[min(entry_at(first_tile) + 32 * i + lane, (source.kv_len() - 1) / PageTable::SAFE_ENTRY_TOKENS)];
    }
    METHOD u32 page_of(int first_tile, int n) const {
        int at = entry_at(tile) - entry_at(first_tile) + n;
        return __shfl_sync(~0u, ENTRIES > 32 && at >= 32 ? of_span[1] : of_span[0], at & 31);
    }
    // Copies a part of the tile, by copy(run of the page, n, place). `is_turned`: other warps turn it, and say when it is there.
    template <class Copy> METHOD void copy_part(const DecodeParams& p, int first_tile, u32 bytes, bool is_turned, Copy copy_entry) {
        u32 pages[PageTable::ENTRIES];
#pragma unroll
        for (int n = 0; n < PageTable::ENTRIES; n++) pages[n] = page_of(first_tile, n);
        barrier_wait(ring.empty(), ring.phase ^ 1);
        const u32 barriers = ring.barriers;
        if (copies()) {
            // One of the two is for the bytes, and the other's phases go with it.
            if (Config::TURNERS) barrier_arrive(is_turned ? ring.full() : copied(ring));
            if (is_turned) ring.barriers = copied(ring) - ring.stage * 8;
            expect(bytes);
#pragma unroll
            for (int n = 0; n < PageTable::ENTRIES; n++) copy_entry(run(p, pages[n]), n, ring.at());
        }
        ring.barriers = barriers;
#if !ATTN_BULK
        copy_async_arrive(ring.full());
#endif
        ring.advance();
    }
    // Panels of a side that lies along the dims, from the first on.
    METHOD void copy_panels_of(const u8* run, int first, int count, int n, u32 to) {
        const u8* panels = run + first * PAGE * 16;
        if (PAGE == TILE) copy(to, panels, count * TILE * 16);
        else copy_panels<16>(to, panels, count, n);
    }
    METHOD void copy_keys(const DecodeParams& p, int first_tile) {
        constexpr int PARAMS = Keys::params(TILE), EACH = param_bytes(Keys::SCHEME), EACH_V = LATENTS ? 0 : param_bytes(Values::SCHEME);
#pragma unroll 1
        for (int part = 0; part < Config::K_PARTS; part++) {
            const bool is_last = part + 1 == Config::K_PARTS;
            copy_part(p, first_tile, Stage::K_PART + (is_last ? Stage::WIDE_PARAMS : 0), false, [&](const u8* from, int n, u32 to) {
                copy_panels_of(from, part * PART_PANELS, PART_PANELS, n, to);
                if (!is_last) return;
                if (EACH != 0) copy_panels<EACH>(to + Stage::K_PART, from + Run::K_PARAMS, Keys::GROUPS, n);
                if (EACH_V != 0) copy_panels<EACH_V>(to + Stage::K_PART + PARAMS, from + Run::V_PARAMS, 1, n);
            });
        }
    }
    METHOD void copy_values(const DecodeParams& p, int first_tile, int part) {
        constexpr int PANEL_BYTES = V_DIM * 16, PART_BYTES = PANEL_BYTES / larger(Config::V_STAGES, 1);  // of 16 tokens
        copy_part(p, first_tile, Stage::V_PART, LATENTS, [&](const u8* from, int n, u32 to) {
            if constexpr (!V_LIES_ALONG_TOKENS) {
                constexpr int PANELS = V_DIM / PANEL_DIMS / larger(Config::V_STAGES, 1);
                copy_panels_of(from + Run::V_CODES, part * PANELS, PANELS, n, to);
                return;
            }
            const u8* first = from + Run::V_CODES + in_page() / 16 * PANEL_BYTES + part * PART_BYTES;
#pragma unroll
            for (int i = 0; i < PIECE / 16; i++) copy(to + (n * (PIECE / 16) + i) * PART_BYTES, first + i * PANEL_BYTES, PART_BYTES);
        });
    }
    // Part after part of the tile's strided rows.
    template <class Side, int PARTS> METHOD void copy_parts_of_rows(const long long* map, const u8* codes, const long long* strides) {
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {
            barrier_wait(ring.empty(), ring.phase ^ 1);
            copy_rows<Side, PARTS>(map, codes, strides, part);
            copy_async_arrive(ring.full());
            ring.advance();
        }
    }
    METHOD void copy_rows_of_tiles(const DecodeParams& p, int first_tile, int end_tile) {
        known = 32;
#pragma unroll 1
        for (tile = first_tile; tile < end_tile; tile++) {
            if (known == 32) load_page_indices(p);
            copy_parts_of_rows<Keys, Config::K_PARTS>(maps->k, p.k, p.k_strides);
            copy_parts_of_rows<Values, larger(Config::V_STAGES, 1)>(maps->v, p.v, p.v_strides);
            known += PageTable::ENTRIES;
        }
    }
    METHOD void copy_all(const DecodeParams& p, Scheduler scheduler) {
        static_assert(WINDOW == 0 || !Config::IS_WIDE, "select.rs");
        WorkRange& range = source.range;
        const auto begin = [&] {
            runs = p.k + range.kv_head * Run::BYTES;
            appended = first_appended_tile(p, range.kv_len);
            prefetch_queries(p, range, lane);
        };
        const auto keys = [&](int first_tile, int end_tile) {
            if constexpr (PAGE == 0) return copy_rows_of_tiles(p, first_tile, end_tile);
            load_span(p, first_tile);
            if (end_tile > appended) {
                wait_for_dependencies();
                appended = 0x7fffffff;
            }
#pragma unroll 1
            for (tile = first_tile; tile < end_tile; tile++) {
                copy_keys(p, first_tile);
                // Floats read a tile's V behind its K.
#pragma unroll 1
                for (int part = 0; !INTEGER && part < Config::V_STAGES; part++) copy_values(p, first_tile, part);
            }
        };
        const auto values = [&](int first_tile, int end_tile, int part) {
#pragma unroll 1
            for (tile = first_tile; INTEGER && tile < end_tile; tile++) copy_values(p, first_tile, part);
        };
        each_part(p, scheduler, range, lane, begin, keys, values);
    }
};

// The turner-th of the warps that turn latents into values where they lie in a stage. A panel of 16 dims has a token's side by side; then those of a dim's tokens are, in
// slot order: [half of the dims][16 tokens][dim][16 bytes].
struct Turner {
    static constexpr int PANELS = Values::PANELS / Config::V_PARTS, PANEL_BYTES = TILE * 16, AT_ONCE = 3;
    Ring ring;
    int turner, lane;

    // So many panels at once, as each load takes longer than the others' stores.
    template <int N> METHOD void turn_panels(u32 at) const {
        u32 x[N][4][2];
#pragma unroll
        for (int i = 0; i < N; i++) load_value_rows({at + i * PANEL_BYTES, 0}, 0, lane, x[i], lane >= 16);
        __syncwarp();
        // Of the row whose place the lane says: an even one of the first eight, or an odd one of the others, which lie in other banks.
        const int dim = 2 * (lane % 8) + (lane % 8 >= 4);
        const u32 to = at + dim / 8 * 512 + dim % 8 * 16 + lane / 8 * 128;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) stmatrix_x4((to ^ e * 16) + i * PANEL_BYTES, x[i][0][e], x[i][1][e], x[i][2][e], x[i][3][e]);
    }
    // Every stage is one that these warps say is there, too.
    METHOD void arrive() {
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full());
        ring.advance();
    }
    METHOD void turn_part() {
        barrier_wait(copied(ring), ring.phase);
#pragma unroll 1
        for (int panel = AT_ONCE * turner; panel < PANELS; panel += AT_ONCE * Config::TURNERS) {
            const u32 at = ring.at() + panel * PANEL_BYTES;
            if (panel + AT_ONCE <= PANELS) turn_panels<AT_ONCE>(at);
            else turn_panels<larger(PANELS % AT_ONCE, 1)>(at);
        }
        fence_async();  // products see what is turned
        arrive();
    }
    METHOD void turn_all(const DecodeParams& p, Scheduler scheduler) {
        WorkRange range;
        const auto keys = [&](int first_tile, int end_tile) {
#pragma unroll 1
            for (int i = (end_tile - first_tile) * Config::K_PARTS; i > 0; i--) {
                barrier_wait(copied(ring), ring.phase);  // else a phase could be taken for the one before it
                arrive();
            }
        };
        const auto values = [&](int first_tile, int end_tile, int) {
#pragma unroll 1
            for (int i = first_tile; i < end_tile; i++) turn_part();
        };
        each_part(p, scheduler, range, lane, [] {}, keys, values);
    }
};

// The unpacker-th of the warps that turn parts of fp8 into f16.
struct Widener {
    Ring ring;
    UnpackedRing unpacked;
    int unpacker, lane;

    template <class Widen> METHOD void widen_part(Widen widen) {
        const u32 from = ring.wait();
        widen(from, unpacked.wait_empty(), unpacker * 32 + lane);
        unpacked.publish(lane);
        unpacked.advance();
        release_stages(ring, 1, lane);
    }
    METHOD void widen_tile(int tokens) {
#pragma unroll 1
        for (int part = 0; part < Config::K_PARTS; part++)
            widen_part([](u32 from, u32 to, int thread) { widen_by_dims<CodesOf::ROWS_IN_ORDER>(from, to, thread); });
#pragma unroll 1
        for (int part = 0; part < Config::V_STAGES; part++) widen_part([&](u32 from, u32 to, int thread) { widen_by_tokens(from, to, tokens, thread); });
    }
    METHOD void widen_all(const DecodeParams& p, Scheduler scheduler) {
        WorkRange range;
        const auto tiles = [&](int first_tile, int end_tile) {
#pragma unroll 1
            for (int i = first_tile; i < end_tile; i++) widen_tile(range.kv_len - i * TILE);
        };
        each_part(p, scheduler, range, lane, [] {}, tiles, [](int, int, int) {});
    }
};

// The widener-th of the warps that turn fp8 into f16 on its way from pages. A lane has a token, and loads some rows of 16 codes ahead of those that it turns.
struct PageWidener : PartCopier {
    static constexpr int STEP = 32 * Config::UNPACKERS / TILE, ROWS = K_DIM / 16 / STEP, AT_ONCE = 5, BATCHES = (ROWS + AT_ONCE - 1) / AT_ONCE;
    static_assert(!Config::WIDENS_PAGES || (ROWS * STEP * 16 == K_DIM && BATCHES % 2 == 0),
                  "all lanes have as many rows, and the next tile's first ones a place");
    UnpackedRing unpacked;
    int widener;
    float4 codes[2][AT_ONCE];

    METHOD int thread() const { return widener * 32 + lane; }
    METHOD int token() const { return thread() % TILE; }
    // The lane's first row of the tile.
    METHOD const u8* first_row(const DecodeParams& p, int first_tile) const {
        const int at = entry_at(tile) - entry_at(first_tile) + (PageTable::ENTRIES > 1 ? token() / PIECE : 0);
        u32 page = __shfl_sync(~0u, of_span[0], at & 31);
        if (ENTRIES > 32) {
            const u32 second = __shfl_sync(~0u, of_span[1], at & 31);
            if (at >= 32) page = second;
        }
        return run(p, page) + (in_page() + token() % PIECE + thread() / TILE * PAGE) * 16;
    }
    // Fetches the tile into L2: pages that it has, or its rows of panels. `first`: the lane's first row.
    METHOD void prefetch(const u8* first) const {
        if (PAGE <= TILE && thread() < TILE && token() % PIECE == 0) prefetch_bulk(first, K_DIM * PAGE);
        if (PAGE > TILE && thread() < K_DIM / 16) prefetch_bulk(first + ((thread() - thread() / TILE) * PAGE - token()) * 16, TILE * 16);
    }
    METHOD void load(const u8* from, int batch) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (batch * AT_ONCE + n < ROWS) codes[batch % 2][n] = __ldcg((const float4*)(from + (batch * AT_ONCE + n) * STEP * PAGE * 16));
    }
    METHOD void widen(u32 to, int batch) const {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (batch * AT_ONCE + n < ROWS)
                CodeRow<CodesOf::ROWS_IN_ORDER, true>{}.widen(codes[batch % 2][n], to + ((thread() / TILE + (batch * AT_ONCE + n) * STEP) * 2 * TILE + token()) * 16);
    }
    METHOD void widen_all(const DecodeParams& p, Scheduler scheduler) {
        WorkRange& range = source.range;
        const auto begin = [&] {
            runs = p.k + range.kv_head * Run::BYTES;
            appended = first_appended_tile(p, range.kv_len);
            if (widener == 0) prefetch_queries(p, range, lane);
        };
        const auto tiles = [&](int first_tile, int end_tile) {
            load_span(p, first_tile);
            if (end_tile > appended) {
                wait_for_dependencies();
                appended = 0x7fffffff;
            }
            tile = first_tile;
            const u8* from = first_row(p, first_tile);
            load(from, 0);
#pragma unroll 1
            for (; tile < end_tile;) {
                tile++;
                const u8* next = from;
                if (tile < end_tile) {
                    next = first_row(p, first_tile);
                    prefetch(next);
                }
                const u32 to = unpacked.wait_empty();
#pragma unroll
                for (int batch = 0; batch < BATCHES; batch++) {
                    if (batch + 1 < BATCHES) load(from, batch + 1);
                    else if (tile < end_tile) load(next, 0);
                    widen(to, batch);
                }
                unpacked.publish(lane);
                unpacked.advance();
                from = next;
            }
        };
        each_part(p, scheduler, range, lane, begin, tiles, [](int, int, int) {});
    }
};

// The producer-th of a team's warps.
DEVICE void produce(const DecodeParams& p, const RowMaps* maps, const Scheduler& scheduler, const Ring& ring, const UnpackedRing& unpacked, int producer, int lane) {
    const bool copies = producer == 0;
    const int unpacker = producer - Config::COPIES_APART;
    if constexpr (Config::IS_WIDE) {
        if constexpr (Config::WIDENS_PAGES) {
            PageWidener widener;
            widener.lane = lane;
            widener.widener = producer;
            widener.unpacked = unpacked;
            return widener.widen_all(p, scheduler);
        }
        PartCopier copier;
        copier.ring = ring;
        copier.lane = lane;
        copier.step = 1;
        copier.maps = maps;
        if (copies) copier.copy_all(p, scheduler);
        if constexpr (Config::TURNERS > 0)
            if (!copies) Turner{ring, unpacker, lane}.turn_all(p, scheduler);
        if constexpr (Config::UNPACKS)
            if (!copies) Widener{ring, unpacked, unpacker, lane}.widen_all(p, scheduler);
        return;
    }
    Issuer issuer = {p, scheduler};
    issuer.start(ring, maps, lane);
    if constexpr (Config::UNPACKS) {
        if (unpacker >= 0) return Unpacker{issuer, ring, unpacked, unpacker, lane, 0}.unpack(p, scheduler);
    }
#pragma unroll 1
    while (copies && issuer.issue()) {}
}

}  // namespace attn
