// One tile from bytes to state: K·Q, score modifiers and masks, softmax weights, P·V, fold (sections 4 and 5 of docs/arithmetic.md).
#pragma once
#include "attend/pipeline.cuh"
#include "attend/tile/floats.cuh"
#include "attend/tile/rows.cuh"

namespace attn {

// Which tile: its number in the sequence, of which `kv_len` tokens are seen; whether some row reads it with residuals, and whether all do, as it is the first.
struct TileOf {
    int index, sequence, kv_head, kv_len;
    bool residuals, is_first;
};

// Folds a tile into the segment's state. Its stages come next in the ring. `reader.keys_are_read` and `reader.values_are_read` are called as soon as the
// warp has read those of K and of V; the first one says where the ring goes on.
template <class Team, class Reader>
DEVICE void attend_tile(const DecodeParams& p, const TileOf& tile, const ItemRows& item, const Ring& ring, const Team& team, Reader& reader, StateOf<Team>& state) {
    const Rows& rows = item.rows;
    int t0 = tile.index * TILE, first = t0 + team.token() + team.lane / 4;
    float s[ROW_GROUPS][Team::SCORES];
    Ring next = ring;
    StagedTile at;
    wait_keys(next, tile.residuals, at);
    SideParams<Keys::SCHEME, RowScales> k = {at.k.at + Stage::K_CODES, Stage::K_STRIDE, {p.k_scales, p.k_scale_strides, tile.sequence, tile.kv_head, t0}};
    tile_scores(at, k, item.q, team, [&](int g, int e) { return tile.is_first || rows.tile[g][e] < tile.index + Keys::WINDOW; }, s);
    next = reader.keys_are_read(next, tile.residuals);
    const ScoreBases bases = ScoreBases::of_tile(item.q, tile.index == 0, team.lane);
    if constexpr (HAS_SCORE_MODS) apply_score_mods(p, item, bases, first, s);
    bool full = rows.see_all(t0);
    Hidden hidden = mask(rows, first, full, s);
    float tops[ROW_GROUPS][2];
    row_max(s, team.lane, tops);
    team.share_largest(tops);
    const Exponents exponents = find_exponents(tops, item.q.scale, bases, changes_scores(p), s);
    weigh_scores(s, full, hidden, exponents);
    team.publish_weights(s);
    wait_values(next, tile.residuals, at);
    auto weights = team.shared_weights(s);
    Rescale r = enter_tile(state, exponents);
    SideParams<Values::SCHEME, RowScales> v = {at.v.at + Stage::V_PARAMS, Stage::V_STRIDE, {p.v_scales, p.v_scale_strides, tile.sequence, tile.kv_head, t0}};
    auto is_fine = [&](int g, int e) { return tile.is_first || rows.tile[g][e] < tile.index + Values::WINDOW; };
    tile_values(at, v, full, min(TILE, tile.kv_len - t0), weights, r, team, is_fine, state);
    reader.values_are_read(tile.residuals);
}

}  // namespace attn
