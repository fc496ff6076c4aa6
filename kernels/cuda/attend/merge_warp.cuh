// The merge of partials in shared memory by one warp: tiles' values, segments' states or spans', in the order of section 6 of docs/arithmetic.md.
#pragma once
#include "attend/merge.cuh"

namespace attn {

// The largest of this lane and of those 1, 2, … count - 1 strides before it, in runs of `count`.
DEVICE float running_max(float x, int stride, int count) {
#pragma unroll
    for (int i = 1; i < count; i *= 2) {
        float other = __shfl_up_sync(~0u, x, i * stride);
        if ((int)lane_id() / stride % count >= i) x = fmaxf(x, other);
    }
    return x;
}
// The scales of merging this lane's run with those before it in a run of `count`; `top`: the running maximum, `m` that of the start.
DEVICE Factors running_factors(float x, float& top, int stride, int count, float m) {
    top = fmaxf(running_max(x, stride, count), m);
    float before = __shfl_up_sync(~0u, top, stride);
    if ((int)lane_id() / stride % count == 0) before = m;
    return merge_factors(before, x, top);
}

// The factors of folding this lane's tile into those before it in its segment, a run of SPAN lanes; `m`: the exponent of all of them.
DEVICE Factors segment_factors(float tile, float& m) {
    int lane = lane_id();
    Factors mine = {};
    m = MINUS_INFINITY;
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        Factors w = fold_factors(m, __shfl_sync(~0u, tile, lane / SPAN * SPAN + i));
        if (lane % SPAN == i) mine = w;
    }
    return mine;
}

// A merged state of a row: COLUMNS dims to a lane.
template <int COLUMNS> struct MergedRow {
    float m, l, o[COLUMNS];

    METHOD void add(const MergedRow& b, const Factors& w, bool is_fold) {
        merge(l, b.l, w, is_fold);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) merge(o[k], b.o[k], w, is_fold);
    }
};
DEVICE Factors factors_at(const Factors& w, int lane) { return {__shfl_sync(~0u, w.alpha, lane), __shfl_sync(~0u, w.beta, lane)}; }

// Merges the partials of some dims of a row by one warp: a lane finds the scales of one partial, and merges its own dims, APART from each other, of WIDTH.
// Tiles fold into segments, segments merge into spans, spans into the sequence's state.
template <int LEVEL, int COLUMNS, int WIDTH, int APART> DEVICE MergedRow<COLUMNS> merge_sent(u32 states, u32 mls, int partials) {
    constexpr int BATCH = LEVEL == TILE_VALUES ? 16 : 8, SEGMENT = LEVEL == TILE_VALUES ? SPAN : 1, RUN = LEVEL == SPAN_STATES ? 1 : SEGMENT * SPAN;
    static_assert(BATCH % RUN == 0, "a batch has is_row spans");
    int lane = lane_id();
    MergedRow<COLUMNS> all = {MINUS_INFINITY};
#pragma unroll 1
    for (int base = 0; base < partials; base += 32) {
        uint2 ml = lds64(mls + min(base + lane, partials - 1) * 8);
        bool is_partial = base + lane < partials;
        float m = is_partial ? bits_float(ml.x) : MINUS_INFINITY, l = is_partial ? bits_float(ml.y) : 0.0f, top = m;
        Factors of_tile, of_segment, of_span;
        if (LEVEL == TILE_VALUES) of_tile = segment_factors(m, top);
        if (LEVEL >= SEGMENT_STATES) {
            of_segment = running_factors(top, top, SEGMENT, SPAN, MINUS_INFINITY);
            top = __shfl_sync(~0u, top, lane | RUN - 1);
        }
        of_span = running_factors(top, top, RUN, 32 / RUN, all.m);
        all.m = __shfl_sync(~0u, top, 31);
#pragma unroll 1
        for (int u = 0; u < min(32, partials - base); u += BATCH) {
            MergedRow<COLUMNS> segment, span;
            u32 from = states + ((base + u) * WIDTH + lane) * 4;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                // Beyond the last partial a side is empty: it changes nothing.
                MergedRow<COLUMNS> here = {0.0f, __shfl_sync(~0u, l, u + i)};
                bool some = base + u + i < partials;
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) here.o[k] = some ? bits_float(lds32(from + (i * WIDTH + k * APART) * 4)) : 0.0f;
                if (LEVEL == TILE_VALUES) {
                    if (i % SEGMENT == 0) segment = {};
                    segment.add(here, factors_at(of_tile, u + i), true);
                    if (i % SEGMENT != SEGMENT - 1) continue;
                    here = segment;
                }
                if (LEVEL >= SEGMENT_STATES) {
                    if (i % RUN < SEGMENT) span = {};
                    span.add(here, factors_at(of_segment, u + i), false);
                    if (i % RUN != RUN - 1) continue;
                    here = span;
                }
                all.add(here, factors_at(of_span, u + i), false);
            }
        }
    }
    return all;
}

}  // namespace attn
