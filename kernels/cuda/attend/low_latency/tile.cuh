// A tile that the four warps of a team share (low_latency.cu): each has 16 tokens' scores and a quarter of the dims' values.
#pragma once
#include "attend/floats.cuh"

// Where a team's copies come from: one work item.
struct ItemSource {
    int b, length, head;

    __device__ __forceinline__ int sequence() const { return b; }
    __device__ __forceinline__ int first_residual_tile(const DecodeParams& p) const { return first_residual_tile_of(p, p.q_len, length); }
    __device__ __forceinline__ int kv_len() const { return length; }
    __device__ __forceinline__ int kv_head() const { return head; }
};

// Folds a tile, whose stages come next in the ring, into the segment's state. Stages stay until both products are done.
template <class Team> DEVICE void attend_tile(const DecodeParams& p, const Work& work, const ItemRows& item, const Ring& ring, const Team& team, int index, StateOf<Team>& state) {
    const Rows& rows = item.rows;
    int t0 = index * TILE, tokens = min(TILE, work.kv_len - t0);
    bool residuals = WINDOW && index >= first_residual_tile_of(p, p.q_len, work.kv_len);
    float s[ROW_GROUPS][Team::SCORES];
    Ring next = ring;
    Stages at;
    wait_keys(next, residuals, at);
    SideParams<K_SCHEME, RowScales> k = {at.k.at + K_CODES, K_STRIDE, {p.k_scales, p.k_scale_strides, work.b, work.heads, t0}};
    tile_scores(at, k, item.q, team, [&](int g, int e) { return rows.tile[g][e] < index + K_WINDOW; }, s);
    int first = t0 + team.token() + team.lane / 4;
    if constexpr (HAS_SCORE_MODS) apply_score_mods(p, rows, first, s);
    bool full = rows.see_all(t0);
    Hidden hidden = mask(rows, first, full, s);
    float tops[ROW_GROUPS][2];
    row_max(s, team.lane, tops);
    team.publish_largest(tops);
    team.barrier();
    team.gather_largest(tops);
    weigh_scores(s, full, hidden, tops);
    team.publish_weights(s);
    wait_values(next, residuals, at);
    team.barrier();
    auto weights = [&](int g, float (&to)[WEIGHTS]) { team.gather_weights(g, to); };
    Rescale r = enter_tile(state, tops);
    SideParams<V_SCHEME, RowScales> v = {at.v.at + V_CODES, V_STRIDE, {p.v_scales, p.v_scale_strides, work.b, work.heads, t0}};
    tile_values(at, v, full, tokens, weights, r, team, [&](int g, int e) { return rows.tile[g][e] < index + V_WINDOW; }, state);
}
