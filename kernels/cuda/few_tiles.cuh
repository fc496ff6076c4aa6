// Few short sequences in a launch of split_kv.cu (-DATTN_FEW_TILES), whatever lengths it was planned for: its four warps share each tile of the
// CTA, as a team of low_latency.cu does. A tile then takes 1 µs instead of 3, and CTAs find their tiles without adding up all work.
//
// Split     CTA i has the work item i mod items, and the slot i / items in it: the CTAs that attend come first, each on an SM of its own where
//           there are as many. A partial is a tile's value, one or two of a CTA, or a segment's state; the lengths decide, on the device.
// Copies    warp w copies the CTA's tile w into its own ring; no stage is used twice.
// Merge     through global memory without a count, as in partials_nonzero.cuh: the places are zero between launches, and a nonzero word has
//           arrived. The CTAs of the last slots merge a row each and wait for all CTAs of the work item, which have begun before them.
// Numerics  docs/arithmetic.md, the same bits as every other split.
// Host      kernels/src/cuda: select.rs (where a launch has it), launch.rs (slots and places).
#pragma once
#include "merge_warp.cuh"
#include "partials_nonzero.cuh"
#include "shared_tile.cuh"
#include "split_kv_smem.cuh"

static_assert(ROW_GROUPS == 1 && ROW_WARPS == 1 && HEAD_DIM % 64 == 0, "four warps of eight rows, each with 16 dims and more");
static_assert(V_GROUPS == 1 || V_GROUPS == 2 || V_GROUPS % TEAMS == 0, "a warp's dims are of one group, or of whole ones");
static_assert(STAGES >= (KV_ONE_STAGE ? 1 + (WINDOW > 0) : 2 + K_RESIDUALS_APART + V_RESIDUALS_APART), "a ring holds a tile");

struct FewTiles {
    typedef TeamOf<TEAMS> SharedTeam;
    // O of a row's partial: the values of each lane side by side, warp after warp.
    static constexpr int VALUES = SharedTeam::DIMS / 8, COLUMNS = HEAD_DIM / 32, LOADS = 16;
    // Where a warp gathers a column of a row's partials, and their (max, sum): over the stages, once all tiles are done.
    static constexpr int MAX_SUMS = FEW_PLACES * 32 * 4, GATHERED = MAX_SUMS + FEW_PLACES * 8;
    static_assert(GATHERED <= STAGES * STAGE_BYTES, "a warp's stages have room for a column");

    const DecodeParams& p;
    u32 shared;
    SharedTeam team;
    int item, slot;    // of the CTA
    Work work;
    int shift, all;    // log2 of a partial's tiles; partials of the work item
    int first, end;    // partials of the CTA

    __device__ __forceinline__ Ring ring_of(int tile) const {
        return {shared + tile * STAGES * STAGE_BYTES, shared + SharedMemory::BARRIERS + tile * STAGES * 16, 0, 0};
    }
    __device__ __forceinline__ int rows() const { return p.heads_per_kv * p.q_len; }
    __device__ __forceinline__ int first_tile() const { return first << shift; }
    __device__ __forceinline__ int end_tile() const { return min(work.num_tiles, end << shift); }
    // Partials of a CTA: two only where they are tiles.
    __device__ __forceinline__ int each() const { return all > p.few_slots ? 2 : 1; }

    // Whether partials are tiles; else they are segments.
    static __device__ __forceinline__ bool by_tiles(const DecodeParams& p, int tiles) { return tiles <= p.few_places; }
    static __device__ __forceinline__ bool are_few(const DecodeParams& p, int longest) {
        int tiles = (longest + TILE - 1) / TILE;
        return by_tiles(p, tiles) || runs_of(tiles, SEGMENT_SHIFT) <= min(p.few_slots, p.few_places);
    }
    __device__ __forceinline__ void enter(int kv_len) {
        work.measure = {SPANS, true};
        (Sequence&)work = Sequence::of(work.measure, kv_len);
        shift = by_tiles(p, work.num_tiles) ? 0 : SEGMENT_SHIFT;
        all = runs_of(work.num_tiles, shift);
        first = min(all, slot * each());
        end = min(all, first + each());
    }

    // This warp's tile of the CTA, of the pages `likely`.
    __device__ __forceinline__ void copy(TileCopier<ItemSource>& copier, u32 likely, int likely_at) const {
        copier.ring = ring_of(team.warp);
        copier.source.length = work.kv_len;
        copier.appended = first_appended_tile(p, work.kv_len);
        copier.tile = first_tile() + team.warp;
        if (copier.tile >= end_tile()) return;
        copier.load_page_indices(p, likely, likely_at);
        while (!copier.copy_next(p)) {
        }
    }
    __device__ __forceinline__ float2* max_sums(int partial, int row) const { return p.few_max_sums + ((u64)item * p.few_places + partial) * ROWS + row; }
    __device__ __forceinline__ float* o(int partial, int row) const {
        return p.few_o + (((u64)item * p.few_places + partial) * ROWS + row) * HEAD_DIM;
    }
    __device__ __forceinline__ void publish(int partial, const StateOf<SharedTeam>& state) const {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int row = 2 * (team.lane % 4) + e;
            if (row >= rows()) continue;
            if (team.warp == 0 && team.lane < 4) __stcg(max_sums(partial, row), encode_nonzero(state.m[0][e], state.l[0][e]));
            float* to = o(partial, row) + team.dim() + team.lane / 4 * VALUES;
#pragma unroll
            for (int j = 0; j < VALUES / 2; j++) __stcg((float2*)to + j, encode_nonzero(state.o[0][j][e], state.o[0][j][2 + e]));
        }
    }
    // The dim of a value of a row's partial.
    static __device__ __forceinline__ int dim_at(int place) {
        int in_warp = place % SharedTeam::DIMS, value = in_warp % VALUES;
        return place - in_warp + 16 * (value / 2) + dim_of(value % 2, 4 * (in_warp / VALUES));
    }
    // Brings a column of a row's partials into shared memory, as they arrive, and leaves zeros in their place.
    __device__ __forceinline__ void gather(int row, int column, u32 to) const {
        float2 ml[FEW_PLACES / 32];
#pragma unroll
        for (int i = 0; i < FEW_PLACES / 32; i++) ml[i] = make_float2(0.0f, 0.0f);
        float* from = o(0, row) + column * 32 + team.lane;
#pragma unroll 1
        for (int u = 0; u < all; u += LOADS) {
            float x[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) x[i] = 0.0f;
#pragma unroll 1
            for (bool arrived = false; !arrived; backoff()) {
                arrived = true;
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    if (u + i < all && !has_arrived(x[i])) x[i] = load_relaxed(from + (u64)(u + i) * (ROWS * HEAD_DIM));
#pragma unroll
                for (int i = 0; i < FEW_PLACES / 32; i++) {
                    int partial = team.lane + i * 32;
                    if (partial < all && !has_arrived(ml[i])) ml[i] = load_relaxed(max_sums(partial, row));
                    arrived &= partial >= all || has_arrived(ml[i]);
                }
#pragma unroll
                for (int i = 0; i < LOADS; i++) arrived &= u + i >= all || has_arrived(x[i]);
                arrived = __all_sync(~0u, arrived);
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                if (u + i >= all) continue;
                sts32(to + ((u + i) * 32 + team.lane) * 4, float_bits(x[i]));
                __stcg(from + (u64)(u + i) * (ROWS * HEAD_DIM), 0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < FEW_PLACES / 32; i++)
            if (team.lane + i * 32 < all) sts64(to + MAX_SUMS + (team.lane + i * 32) * 8, ml[i].x, ml[i].y);
        __syncwarp();
    }
    // Merges a row and writes its result: each warp 32 dims at a time.
    template <int LEVEL> __device__ __forceinline__ void merge(int row) const {
        u32 mine = shared + team.warp * STAGES * STAGE_BYTES, rotated = shared + SharedMemory::ROTATED_ROW;
        Epilogue epilogue = Epilogue::at(p, {work.b, work.heads, 0, all}, row);
        team.barrier();  // the stages, and the place of a row before, are no longer read
#pragma unroll 1
        for (int column = team.warp; column < COLUMNS; column += TEAMS) {
            gather(row, column, mine);
            MergedRow<1> x = merge_sent<LEVEL, 1, 32, 32>(mine, mine + MAX_SUMS, all);
            __syncwarp();  // before the place is another column's
            int dim = dim_at(column * 32 + team.lane);
            epilogue.begin(x.m, x.l, column == 0 && team.lane == 0);
            if constexpr (V_ROTATED) sts32(rotated + dim * 4, float_bits(epilogue.of(x.o[0])));
            else epilogue.write(dim, x.o[0]);
        }
        team.barrier();
        if constexpr (V_ROTATED) epilogue.write_rotated(rotated + team.lane * 4, team.warp, TEAMS, team.lane);
        // All warps have read them.
        for (int i = threadIdx.x; i < all; i += THREADS) __stcg(max_sums(i, row), make_float2(0.0f, 0.0f));
    }
    __device__ __forceinline__ void merge_rows() const {
        int ctas = ceil_of(all, each());
#pragma unroll 1
        for (int row = ctas - 1 - slot; row < rows(); row += ctas) {
            if (shift == 0) merge<TILE_VALUES>(row);
            else merge<SEGMENT_STATES>(row);
        }
    }
    static __device__ __forceinline__ int ceil_of(int n, int by) { return by == 2 ? n + 1 >> 1 : n; }

    __device__ __forceinline__ void attend(const ItemRows& rows) const {
        int tile = first_tile();
#pragma unroll 1
        for (int partial = first; partial < end; partial++) {
            StateOf<SharedTeam> state;
            state.clear();
            int until = min(work.num_tiles, partial + 1 << shift);
#pragma unroll 1
            for (; tile < until; tile++) attend_tile(p, work, rows, ring_of(tile - first_tile()), team, tile, state);
            publish(partial, state);
        }
    }
    // Attends the launch if its sequences are few and short: true then.
    static __device__ __forceinline__ bool run(const DecodeParams& p, u32 shared, const RowMaps* maps) {
        if (p.few_slots == 0) return false;
        int warp = warp_id(), lane = lane_id();
        int slot = blockIdx.x / p.items_divmod, item = blockIdx.x - slot * p.items_divmod.divisor;
        int length = lane < p.batch ? load_now(p.kv_lens + lane) : 0;
        FewTiles self = {p, shared, {shared + SharedMemory::STATES, warp, lane, 0}, item, slot};
        Work& work = self.work;
        work.b = work.sequence = item / p.num_kv_heads;
        work.heads = item - work.b * p.num_kv_heads;
        work.row_block = 0;
        TileCopier<ItemSource> copier;
        copier.lane = lane;
        copier.step = 1;
        copier.stage_of_tile = 0;
        copier.maps = maps;
        copier.source = {work.b, 0, work.heads};
        int likely_at = slot * ENTRIES / TILES_OF_PAGE;
        u32 likely = copier.prefetch_pages(p, likely_at);
        if (!are_few(p, warp_max(length))) return false;
        length = __shfl_sync(~0u, length, work.b);
        copier.begin(p, work.b, work.heads, first_residual_tile_of(p, p.q_len, length));
        self.enter(length);
        if (self.first == self.end) return true;
        self.copy(copier, likely, likely_at);
        ItemRows rows;
        load_query(p, work, work.heads, 0, lane, rows.q);
        rows.rows = visible(p, work, work.heads, 0, lane);
        self.attend(rows);
        self.merge_rows();
        return true;
    }
};
