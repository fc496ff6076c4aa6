// A warp's query rows of a work item: the tokens they see, their queries, and the score modifiers.
#pragma once
#include "value.cuh"
#include "split.cuh"

struct Rows {
    int start[ROW_GROUPS], end[ROW_GROUPS];  // tokens that row lane/4 sees
    float slope[ROW_GROUPS];
    int position[ROW_GROUPS];
};

DEVICE Rows visible(const DecodeParams& p, const Work& work, int kv_head, int warp_row, int lane) {
    Rows rows;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        int r = work.row_block * ROWS + warp_row + g * 8 + lane / 4;
        bool real = r < p.heads_per_kv * p.q_len;
        int i = (u32)r / p.heads_per_kv_divmod, position = work.kv_len - p.q_len + i;
        // Rows that fill up the tile see everything, so that they never make a full tile look masked.
        rows.end[g] = !real ? 0x7fffffff : p.causal ? min(max(position + 1, 0), work.kv_len) : work.kv_len;
        rows.start[g] = !real || p.window_left < 0 ? 0 : min(max(position - p.window_left, 0), rows.end[g]);
        rows.slope[g] = HAS_SCORE_MODS && real && p.alibi_slopes ? p.alibi_slopes[(kv_head - i) * p.heads_per_kv + r] : 0.0f;
        rows.position[g] = position;
    }
    return rows;
}

DEVICE void load_query(const DecodeParams& p, const Work& work, int kv_head, int warp_row, int lane, Query& q) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float x[PANELS][4], largest = load_row(query_row(p, work, kv_head, warp_row + g * 8 + lane / 4), lane, x);
        if constexpr (K_FLOAT) quantize_float(q, g, x, largest);
        else quantize(q, g, x, largest);
    }
}

// q' for pages of channels, see `query_word`: of rows 8·first to 8·end, by so many threads.
template <bool NARROW> DEVICE void store_query(const DecodeParams& p, const Work& work, int kv_head, u32 query, int first, int end, int thread, int threads) {
    for (int i = first * PANELS * 32 + thread; i < end * PANELS * 32; i += threads) {
        int lane = i % 32, panel = i / 32 % PANELS, eight = i / 32 / PANELS;
        float x[4];
        query_row(p, work, kv_head, eight * 8 + lane / 4).four<NARROW>(panel * 16 + 4 * (lane % 4), x);
        if (INTEGER)
#pragma unroll
            for (float& element : x) element = round_13(element);
        float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
        sts128(query_word(query, eight, panel, lane), {x[0], x[1], x[2], x[3]});
        sts32(query_largest(query, eight, panel / 4, lane) + panel % 4 * 4, float_bits(largest));
    }
}
DEVICE void store_query(const DecodeParams& p, const Work& work, int kv_head, u32 query, int first, int end, int thread, int threads) {
    if (p.dtype == Dtype::F32) store_query<false>(p, work, kv_head, query, first, end, thread, threads);
    else store_query<true>(p, work, kv_head, query, first, end, thread, threads);
}

// Exponents of what `store_query` left in shared memory, row by row.
DEVICE void measure_queries(u32 query, int warp_row, int lane, int (&exponents)[ROW_GROUPS]) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        float largest = 0.0f;
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            largest = fmaxf(largest, bits_float(lds32(query_largest(query, warp_row / 8 + g, panel / 4, lane) + panel % 4 * 4)));
        exponents[g] = exponent(quad_max(largest));
    }
}

// A warp's rows of a work item, and their queries.
struct ItemRows {
    Rows rows;
    Query q;
    int exponent_q[ROW_GROUPS];  // channel scheme: E of the largest q'
};

// Soft cap and ALiBi; scores are complete then. `first`: the token of the lane's first score.
DEVICE void apply_score_mods(const DecodeParams& p, const Rows& rows, int first, float (&s)[ROW_GROUPS][SCORES], float (&scale)[ROW_GROUPS]) {
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            float x = s[g][i] * scale[g];
            if (p.softcap_inner != 0.0f) x = softcap(x, p.softcap_inner, p.softcap_outer);
            if (p.alibi_slopes) x = x + rows.slope[g] * (float)(first + 8 * (i / 2) + i % 2 - rows.position[g]);
            s[g][i] = x;
        }
        scale[g] = 1.0f;
    }
}
