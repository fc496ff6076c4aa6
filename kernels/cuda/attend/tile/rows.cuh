// A warp's query rows of a work item: the tokens they see, their queries, and the score modifiers.
#pragma once
#include "attend/query_rows.cuh"
#include "attend/tile/query.cuh"
#include "attend/tile/value.cuh"

namespace attn {

// By row group and column.
struct Rows {
    int start[ROW_GROUPS][2], end[ROW_GROUPS][2];  // tokens that a row sees
    float slope[ROW_GROUPS][2];
    int position[ROW_GROUPS][2];
    int tile[ROW_GROUPS][2];  // from which its window counts

    template <class Take> DEVICE void each(Take take) {
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
            for (int e = 0; e < 2; e++) take(g, e);
    }
    // Whether all rows of the warp see all tokens of the tile that starts at t0.
    METHOD bool see_all(int t0) const {
        bool full = true;
        each([&](int g, int e) { full &= start[g][e] <= t0 && t0 + TILE <= end[g][e]; });
        return __all_sync(~0u, full);
    }
    METHOD bool sees(int g, int e, int t) const { return t >= start[g][e] && t < end[g][e]; }
};

// The warp's rows of a work item, from its row `warp_row` on.
template <class Item> DEVICE Rows seen_rows(const DecodeParams& p, const Item& item, int kv_head, int warp_row, int lane) {
    Rows rows;
    QueryBlock queries = query_block(p, item.b);
    int first = first_position(p, queries, item.kv_len);
    Rows::each([&](int g, int e) {
        int row = item.row_block * Config::ROWS + warp_row + g * 8 + 2 * (lane % 4) + e;
        SeenTokens seen = seen_tokens(p, queries, kv_head, item.kv_len, first, row);
        rows.end[g][e] = seen.end;
        rows.start[g][e] = seen.start;
        rows.slope[g][e] = seen.slope;
        rows.position[g][e] = seen.position;
        rows.tile[g][e] = seen.tile;
    });
    return rows;
}

// Loads the warp's queries. `has_first`: its tiles may be the sequence's first one. `loaded()` is called once all have been loaded, ahead of what is computed of
// centres: copies of keys that wait for the queries need not wait for that.
template <class Item, class Loaded>
DEVICE void load_query(const DecodeParams& p, const Item& item, int kv_head, int warp_row, int lane, bool has_first, Query& q, Loaded loaded) {
    const u32 row = centre_row(p, item.b, item.kv_len);
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
        Centres centres;
        centres.has_first = has_first;
        auto loading = [&] { centres.load(find_centres(p, row, kv_head), lane); };
        float x[Keys::PANELS][4];
        const Largest largest = load_row(query_row(p, item, kv_head, warp_row + g * 8 + lane / 4), lane, x, loading);
        if constexpr (INTEGER) quantize(q, g, x, largest, lane);
        else quantize_float(q, g, x, largest, lane);
        if (g == ROW_GROUPS - 1) loaded();
        find_bases(q, g, x, centres, lane);
    }
}

// A warp's rows of a work item, and their queries.
struct ItemRows {
    Rows rows;
    Query q;
};

// Soft cap and ALiBi; scores are complete then. `first`: the token of the lane's first score. Scores of integers still lack their rows' steps, and their tokens' keys
// may lack a centre.
template <int SCORES>
DEVICE void apply_score_mods(const DecodeParams& p, const ItemRows& item, const ScoreBases& bases, int first, float (&s)[ROW_GROUPS][SCORES]) {
    if (!changes_scores(p)) return;
    const Rows& rows = item.rows;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            int e = n % 2, t = first + token_of(n);
            float x = INTEGER ? s[g][n] * item.q.scale[g][e] : s[g][n];
            if (HAS_CENTRES) x = x + (bases.of[g][e] - SCORE_BASE);
            if (p.softcap_inner != 0.0f) x = softcap(x, p.softcap_inner, p.softcap_outer);
            if (p.alibi_slopes) x = x + rows.slope[g][e] * (float)(t - rows.position[g][e]);
            s[g][n] = x;
        }
}

// The scores of tokens that a row does not see become -inf, whatever they were; `full`: the rows see all.
template <int SCORES> DEVICE Hidden mask(const Rows& rows, int first, bool full, float (&s)[ROW_GROUPS][SCORES]) {
    Hidden hidden = {};
    if (full) return hidden;
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            if (!rows.sees(g, n % 2, first + token_of(n))) s[g][n] = MINUS_INFINITY;
            hidden.scores[g] |= s[g][n] > MINUS_INFINITY ? 0 : 1u << n;
        }
    return hidden;
}

}  // namespace attn
