// Partials of a work item in global memory, and the count of their arrival (split_kv.cu). `merge_partials` also serves low_latency.cu,
// which needs no count (partials_nonzero.cuh).
#pragma once
#include "attend/merge_warp.cuh"

namespace attn {

// The partials of a row to merge: from `first` (which covers those before it) to `end`.
struct PartialRows {
    float* states;  // O of the row
    float2* ml;     // null: a padding row, which has no partials
    int first, end;
    u32 rotated;  // shared address of a row that is rotated, and merged by several warps
};

// Partials of low_latency.cu are zero until they arrive.
DEVICE bool has_arrived(float2 x) { return float_bits(x.x) != 0 && float_bits(x.y) != 0; }
DEVICE bool has_arrived(float x) { return float_bits(x) != 0; }
DEVICE bool has_arrived(const float4& x) { return has_arrived(make_float2(x.x, x.y)) && has_arrived(make_float2(x.z, x.w)); }
// Full states are polled only while at most this many partials are missing, else (m, l) alone: other CTAs still read the cache.
constexpr int FEW = 4;

// Merges a row's partials by LANES threads. They compute the scales of LANES partials side by side while the first states are loaded;
// then each merges its own vectors of dims (float4, float2 or float) from `from` to `to`, in order, and writes the result. Tiles fold into
// segments, segments merge into spans, spans into the sequence's state. Not inlined: it is long and rare. Arguments by value: references would be reloaded from
// global memory. A launch waits for this last, for one warp's latencies in a row; so a batch of states is loaded at once, and four
// partials at a time are merged without a branch. Refilling merged places of the batch would make the compiler wait for each load.
template <class Vector, int LANES, Level LEVEL> static __device__ __noinline__ void merge_partials(PartialRows partials, Epilogue epilogue, int from, int to) {
    constexpr int WIDTH = sizeof(Vector) / 4, VECTORS = WIDTH < 4 ? 1 : (V_DIM / WIDTH + LANES - 1) / LANES;
    constexpr int CHUNK = VECTORS < 4 || Values::IS_ROTATED ? VECTORS : 4, WIDEST = WIDTH < (Config::MERGES_GLOBALLY ? 2 : 4) ? LANES : LANES / 2;
    constexpr int BATCH = Values::IS_ROTATED && WIDEST > SPAN && WIDEST * CHUNK * WIDTH > 64 ? WIDEST / 2 : WIDEST;  // of partials; a rotation takes registers, too
    constexpr int RUN = LEVEL == SPAN_STATES ? LANES : SPAN, OF_SPAN = LEVEL == TILE_VALUES ? SPAN * SPAN : SPAN;
    static_assert(LEVEL != TILE_VALUES || (LANES == 32 && BATCH % OF_SPAN == 0), "a batch has whole spans");
    const Vector ZERO = {};
    int lane = threadIdx.x % LANES;
    const float2 NO_PARTIAL = make_float2(MINUS_INFINITY, 0.0f);
    auto load_ml = [&](int partial) { return partial < partials.end ? __ldcg(partials.ml + (u64)partial * Config::ROWS) : NO_PARTIAL; };
#pragma unroll 1
    for (int at = from + lane; at < from + VECTORS * LANES; at += CHUNK * LANES) {
        float m = MINUS_INFINITY, l = 0.0f;
        Vector o[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) o[k] = ZERO;
#pragma unroll 1
        for (int base = partials.first; base < partials.end; base += LANES) {
            bool awaits = Config::MERGES_GLOBALLY && partials.ml, awaits_ml = awaits && base + lane < partials.end;
            float2 mine = awaits_ml ? make_float2(0.0f, 0.0f) : Config::MERGES_GLOBALLY ? NO_PARTIAL : load_ml(base + lane);
            float top = mine.x;  // the running maximum over the segment's tiles, the span's segments, or all spans
            Factors w, of_segment;
            Vector span[CHUNK];
            float span_sum = 0.0f;
#pragma unroll
            for (int u0 = 0; u0 < LANES; u0 += BATCH) {
                int count = partials.end - base - u0;
                if (count <= 0) break;
                Vector x[BATCH][CHUNK];
                auto each = [&](auto take) {
#pragma unroll
                    for (int i = 0; i < BATCH; i++) {
                        Vector* of_partial = (Vector*)(partials.states + (u64)min(base + u0 + i, partials.end - 1) * (Config::ROWS * V_DIM));
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) take(i, k, of_partial + min(at + k * LANES, to - 1));
                    }
                };
                if constexpr (Config::MERGES_GLOBALLY) {
                    // The first look and the next ones are the same instructions: those that a launch needs once arrive slowly.
                    each([&](int i, int k, Vector*) { x[i][k] = ZERO; });
#pragma unroll 1
                    for (bool few = true;;) {
                        if (awaits_ml && !has_arrived(mine)) mine = load_relaxed(partials.ml + (u64)(base + lane) * Config::ROWS);
                        if (few)
                            each([&](int i, int k, Vector* p) {
                                if (awaits && !has_arrived(x[i][k])) x[i][k] = load_relaxed(p);
                            });
                        u32 missing = __ballot_sync(~0u, awaits_ml && !has_arrived(mine));
                        bool all = missing == 0;
                        each([&](int i, int k, Vector*) { all &= has_arrived(x[i][k]); });
                        if (__all_sync(~0u, all || !awaits)) break;
                        few = __popc(missing) <= FEW * (32 / LANES);
                        backoff();
                    }
                    each([&](int, int, Vector* p) {
                        if (awaits) __stcg(p, ZERO);
                    });
                } else {
                    each([&](int i, int k, Vector* p) { x[i][k] = __ldcg(p); });
                }
                if (u0 == 0) {
                    if (Config::MERGES_GLOBALLY) top = mine.x;
                    // Beyond the last partial a side is empty: it changes nothing.
                    if constexpr (LEVEL == TILE_VALUES) {
                        w = segment_factors(mine.x, top);
                        of_segment = running_factors(top, top, SPAN, SPAN, MINUS_INFINITY);
                    } else {
                        w = running_factors(mine.x, top, 1, RUN, LEVEL == SPAN_STATES ? m : MINUS_INFINITY);
                    }
                }
#pragma unroll
                for (int u4 = 0; u4 < BATCH; u4 += SPAN) {
                    float sum = LEVEL == SPAN_STATES ? l : 0.0f;
                    Vector merged[CHUNK];
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) merged[k] = LEVEL == SPAN_STATES ? o[k] : ZERO;
#pragma unroll
                    for (int i = u4; i < u4 + SPAN; i++) {
                        Factors here = {__shfl_sync(~0u, w.alpha, u0 + i, LANES), __shfl_sync(~0u, w.beta, u0 + i, LANES)};
                        merge(sum, __shfl_sync(~0u, mine.y, u0 + i, LANES), here, LEVEL == TILE_VALUES);
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) merge(merged[k], i < count ? x[i][k] : ZERO, here, LEVEL == TILE_VALUES);
                    }
                    if constexpr (LEVEL == TILE_VALUES) {
                        Factors here = {__shfl_sync(~0u, of_segment.alpha, u0 + u4), __shfl_sync(~0u, of_segment.beta, u0 + u4)};
                        bool first = u4 % OF_SPAN == 0;
                        span_sum = (first ? 0.0f : span_sum) * here.alpha + sum * here.beta;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) {
                            if (first) span[k] = ZERO;
                            merge(span[k], merged[k], here, false);
                        }
                        if (u4 % OF_SPAN != OF_SPAN - SPAN) continue;
                        sum = span_sum;
#pragma unroll
                        for (int k = 0; k < CHUNK; k++) merged[k] = span[k];
                    }
                    Factors here = {0.0f, 1.0f};
                    if (LEVEL == SPAN_STATES) l = sum;
                    else here = merge_sums(m, l, make_float2(__shfl_sync(~0u, top, u0 + u4 + SPAN - 1, LANES), sum), false);
#pragma unroll
                    for (int k = 0; k < CHUNK; k++) {
                        if (LEVEL == SPAN_STATES) o[k] = merged[k];
                        else merge(o[k], merged[k], here, false);
                    }
                }
            }
            if (LEVEL == SPAN_STATES) m = __shfl_sync(~0u, top, LANES - 1, LANES);
        }
        epilogue.begin(m, l, at == 0);
        if constexpr (Values::IS_ROTATED && WIDTH == 1) {
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                if (at + k * LANES < to) sts32(partials.rotated + (at + k * LANES) * 4, float_bits(epilogue.of(o[k])));
        } else if constexpr (Values::IS_ROTATED) {
            epilogue.write_vectors<LANES>(o, lane);
        } else {
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                if (at + k * LANES < to) epilogue.write(at + k * LANES, o[k]);
        }
    }
}

template <class Vector, int LANES> DEVICE void merge_row(const DecodeParams& p, const WorkItem& item, int first, int row, u32 rotated, int from, int to) {
    u64 partial = item.index(p) * p.max_partials;
    float2* ml = Config::MERGES_GLOBALLY && row >= item.rows(p) ? nullptr : p.partial_max_sum + partial * Config::ROWS + row;
    PartialRows partials = {p.partial_o + (partial * Config::ROWS + row) * V_DIM, ml, first, item.num_partials, rotated};
    Epilogue epilogue = Epilogue::at(p, item, row);
    // Tiles are few, and merged by slices.
    if constexpr (Config::MERGES_GLOBALLY && LANES == 32)
        if (item.level == TILE_VALUES) return merge_partials<Vector, LANES, TILE_VALUES>(partials, epilogue, from, to);
    if (item.level == SEGMENT_STATES) merge_partials<Vector, LANES, SEGMENT_STATES>(partials, epilogue, from, to);
    else merge_partials<Vector, LANES, SPAN_STATES>(partials, epilogue, from, to);
}

// Merges all of a work item's partials by one CTA, or team.
DEVICE void merge_all_rows(const DecodeParams& p, const WorkItem& item, int first) {
    constexpr int LANES = Config::MERGE_THREADS / Config::ROWS;
    merge_row<float4, LANES>(p, item, first, Config::merge_thread() / LANES, 0, 0, ROW_VECTORS);
}

// ---- many partials: several CTAs merge them ----

// One CTA would read all of them at the 50 GB/s of its loads in flight, for half of the time of a launch of one sequence. With
// Config::SHARED_PARTIALS or more, CTAs claim slices of rows to merge when they increment the arrival count, and wait for it to be complete; the
// last arrival merges unclaimed slices. No CTA requires co-residency: after SPIN_LIMIT spins it withdraws its claims.

constexpr int SLICES = Config::SLICES, SLICE_ROWS = Config::ROWS / SLICES;
constexpr u32 COUNT_MASK = 0xffff, ALL_SLICES = ~0u;
constexpr int FIRST_SHIFT = 16, SLICES_SHIFT = 32;
#ifndef ATTN_SPIN_LIMIT  // loads of the count before a CTA withdraws its claims; the emulation has fewer
#define ATTN_SPIN_LIMIT 100
#endif

// A work item's arrival count: arrived partials; the first partial, set by the CTA that has the work item's first units; claimed slices.
// It stays complete until all CTAs with claims have seen it.
struct ArrivalCount {
    u64 bits;
    DEVICE u64 of(u32 partials, u32 first, u32 slices) { return partials | first << FIRST_SHIFT | (u64)slices << SLICES_SHIFT; }
    METHOD u32 partials() const { return (u32)bits & COUNT_MASK; }
    METHOD u32 first() const { return (u32)bits >> FIRST_SHIFT; }
    METHOD u32 slices() const { return (u32)(bits >> SLICES_SHIFT); }
};

// So many slices from the first on.
DEVICE u32 slices_before(u32 count) { return (u32)((1ull << count) - 1); }
// The slices that have rows.
DEVICE int num_slices(const DecodeParams& p, const WorkItem& item) { return (item.rows(p) + SLICE_ROWS - 1) / SLICE_ROWS; }
DEVICE u32 slices_of(const DecodeParams& p, const WorkItem& item) { return slices_before(num_slices(p, item)); }
// The slices for a CTA with partials from `from` to `end`.
DEVICE u32 slices_for(const DecodeParams& p, const WorkItem& item, int from, int end) {
    if (item.num_partials < Config::SHARED_PARTIALS && item.level != TILE_VALUES) return 0;
    // Slice s goes with partial s * num_partials / slices.
    const int slices = num_slices(p, item);
    const auto before = [&](int partial) { return slices_before((partial * slices + item.num_partials - 1) / item.num_partials); };
    return before(end) & ~before(from);
}

// The outcome of an arrival.
struct Arrival {
    u32 last;  // 0, or 1 + the first partial of a work item whose partials have all arrived
    u32 slices;  // slices that this CTA merges
};

// Called once a CTA with claims has seen the complete count; the last one clears it.
DEVICE void clear_after_last(u64* count, u32 slices) {
    ArrivalCount before = {count_release(count, 0 - ArrivalCount::of(0, 0, slices))};
    if (before.slices() == slices) *count = 0;
}
// One thread waits for the count to be complete. Returns 1 + the first partial, or 0 once the claims are withdrawn. The CTA that completes
// the count sees the claims of that moment, and those can no longer be withdrawn.
static __device__ __noinline__ u32 wait_for_partials(u64* count, u32 slices, u32 num_partials) {
    // Acquiring loads are slow, and should be: relaxed ones of 30 CTAs delay the counts themselves by 1 to 3 µs.
    ArrivalCount now;
    for (int look = 0; now.bits = load_acquire(count), now.partials() < num_partials; look++)
        if (look >= ATTN_SPIN_LIMIT && replace(count, now.bits, now.bits - ArrivalCount::of(0, 0, slices))) return 0;
    clear_after_last(count, slices);
    return 1 + now.first();
}
// The outcome of adding `add` to a count of `before`.
DEVICE Arrival on_arrival(const DecodeParams& p, const WorkItem& item, u64 before, u64 add) {
    u64* at = p.counters + item.index(p);
    u32 num_partials = item.num_partials, mine = ArrivalCount{add}.slices(), others = ArrivalCount{before}.slices();
    ArrivalCount now = {before + add};
    if (now.partials() < num_partials) return {mine ? wait_for_partials(at, mine, num_partials) : 0, mine};
    if (!others) *at = 0;
    else if (mine) clear_after_last(at, mine);
    return {1 + now.first(), others ? slices_of(p, item) & ~others : ALL_SLICES};
}

// The threads that merge together, and their place for a row that is rotated.
struct Mergers {
    u32 row;  // float [V_DIM, to a multiple of 32]
    int barrier_id;

    METHOD void barrier() const {
        if (Values::IS_ROTATED) barrier_of<Config::MERGE_THREADS>(barrier_id);
    }
};

DEVICE void merge_slices(const DecodeParams& p, const WorkItem& item, const Mergers& mergers, int first, u32 slices) {
    // Two dims per lane where one would give a warp several columns: columns in a row take 2 µs more of 28. Rows that are rotated come one by one.
    constexpr int ROWS_AT_ONCE = Values::IS_ROTATED ? 1 : SLICE_ROWS, WARPS = Config::MERGE_THREADS / 32;
    constexpr bool PAIRS = !Values::IS_ROTATED && SLICE_ROWS * (V_DIM / 32) > WARPS && V_DIM % 64 == 0;
    constexpr int WIDTH = PAIRS ? 2 : 1, COLUMNS = (V_DIM / WIDTH + 31) / 32;  // of a row
    int warp = Config::merge_thread() / 32;
    mergers.barrier();  // warps of the team may still use the place for their last tile
#pragma unroll 1
    for (; slices; slices &= slices - 1) {
        int slice = (__ffs(slices) - 1) * SLICE_ROWS;
#pragma unroll 1
        for (int row = slice; row < slice + SLICE_ROWS; row += ROWS_AT_ONCE) {
#pragma unroll 1
            for (int i = warp; i < ROWS_AT_ONCE * COLUMNS; i += WARPS) {
                int of_row = row + i / COLUMNS, from = i % COLUMNS * 32;
                if constexpr (PAIRS) merge_row<float2, 32>(p, item, first, of_row, 0, from, V_DIM / WIDTH);
                else merge_row<float, 32>(p, item, first, of_row, mergers.row, from, V_DIM / WIDTH);
            }
            mergers.barrier();
            if (Values::IS_ROTATED)
                Epilogue::at(p, item, row).write_rotated(mergers.row + Config::merge_thread() % 32 * 4, warp, WARPS, Config::merge_thread() % 32);
            mergers.barrier();  // before the place is another row's
        }
    }
}

// The merge that an arrival asks of all merging threads.
DEVICE void merge_arrived(const DecodeParams& p, const WorkItem& item, const Mergers& mergers, const Arrival& arrival) {
    if (arrival.slices == ALL_SLICES) merge_all_rows(p, item, arrival.last - 1);
    else merge_slices(p, item, mergers, arrival.last - 1, arrival.slices);
}

}  // namespace attn
