// decode_split.wgsl: one workgroup of 64 lanes attends one split (a segment or a tile) of one (sequence, KV head) for $(R) query rows.
//
// Grid       (grid_x splits, num_kv_heads * row_blocks, num_splits / grid_x); 64 threads: two subgroups share a tile and halve its registers.
// Round      a tile of 64 tokens: a lane has one token for the scores, every 64th dim (or pair of dims) for the values; the state folds at once.
// Ahead      V of a tile is loaded before its scores, the next tile's page before that tile. K is not: it would take registers, and with
//            them occupancy.
// Reads      q f32 [query tokens, num_q_heads, head_dim]; pages as in FORMATS.md, each byte once per row block; centres of K.
// Writes     partials [split][kv_head][row_block][row][head_dim], and (m, l) of each row behind them.
// Numerics   docs/arithmetic.md; the integer arithmetic bit for bit.
// Shared     q in bytes and one tile's weights; their size limits how many workgroups run at once.
// Host       kernels/src/wgsl/decode.rs chooses the constants, split.rs the splits; crates/attn-wgpu/src/launch.rs fills the tables.
#let WRITES = 0
#let T = 64
// Whether products with K, and with V, are sums of integers; and whether the answer is that of the integer arithmetic.
#let K_INTEGER = K < F16
#let V_INTEGER = V < F16
#let INTEGER = K_INTEGER && V_INTEGER
// Whether scores are counted as they come from the products, without soft cap and ALiBi.
#let PLAIN = INTEGER && !SOFTCAP && !ALIBI
// Whether a score may lie in the middle between two points of the grid while its product with the row's step does not.
#let TIES = PLAIN && !CENTRES
// Whether a row's scores count from what its query has with a centre of K: until the weights they are what the row's step multiplies.
#let BASED = PLAIN && CENTRES
// Whether a tile lies inside one page.
#let PAGED = PS >= 64 && !VIEW
// Rows whose steps overlap.
#let RU = R > 1 ? R / 2 : 1
// Whether the registers hold all of V while the scores are computed.
#let V_FIRST = V_INTEGER && CH == 1
// Groups of K's dims with a scale each in the scores.
#let SGROUPS = K == G32 || K == GROUPS || K == STEPS || QUERY_PARTS > 1 ? KG : 1
// Whether K's codes are not centred on 0, so that scores need the sums of the query's bytes.
#let K_CENTRED = K == GROUPS || K == STEPS
// Whether a lane multiplies half of the dims of two tokens, `lane` and `lane ^ 32`, so that each loaded vector of the query serves two tokens.
// The halves of a token are added through workgroup memory.
#let HALVES = K_INTEGER && UNITS % 2 == 0 && (SGROUPS == 1 || QUERY_PARTS > 1)
#let HALF = HALVES ? UNITS / 2 : UNITS
#let TOKENS = HALVES ? 2 : 1
// Pairs (row, unit of 16 dims) of the query that a lane loads.
#let PAIRS = (R * UNITS + T - 1) / T
// Words that hold the weights of a token, those of four rows in each.
#let QUADS = (R + 3) / 4
#include "decode_params"

// The tables: for each split {query block, its index there, tokens that the block may see, places of the sequence's pages and of its residual pages in
// the tables, the block's first query token, how many they are, how many of the sequence come after them (0 if causal)}; for each query block
// {first split, splits, first query token, how many they are, the cache's sequence, 3 unused}; the pages of each sequence (or its rows, view.wgsl); the slots of each one's residual
// pages (residual_place in pages.wgsl); scales, slopes and sinks.
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> partials: array<f32>;
#if CENTRES
@group(0) @binding($(4 + POOLS)) var<storage, read> centres: array<vec2<u32>>;       // [sequence][kv_head][first, second][head_dim] in bf16
#end

#if K_INTEGER
var<workgroup> query_bytes: array<vec4<u32>, $(R * UNITS)>;          // (row, unit)
var<workgroup> row_step: array<f32, $(R)>;                           // sigma
#if QUERY_PARTS > 1
var<workgroup> row_ratio: array<f32, $(R)>;                          // rho
#end
#if CENTRES
var<workgroup> row_base: array<f32, $(2 * R)>;                       // (first or second centre, row): G
#end
#else
var<workgroup> queries: array<vec4<f32>, $(R * UNITS * 4)>;          // (row, 4 dims)
#end
#if V_INTEGER
var<workgroup> weight_step_of: array<vec2<f32>, $(VG * R)>;          // (group of V, row): kappa, and nearly 1/kappa
// (group, four rows, token in slot order). Each 16 tokens lie 20 words apart, so that lanes that read different sixteens have no bank conflict.
var<workgroup> weight_bytes: array<u32, $(VG * QUADS * 80)>;
var<workgroup> weights: array<vec4<u32>, $(VG * R * 4)>;             // (group, row, 16 tokens in slot order)
var<workgroup> folds: array<vec4<u32>, $(VG * R)>;                   // (group, row): see join_factors
#else
var<workgroup> weights_f32: array<f32, $(R * 64)>;                   // (row, token in slot order)
#end
// Products of a token with half of the dims; then f32 weights, for the shifts: (row, token). Rows are RS words apart for the same reason.
#let RS = 72
#if HALVES || V == GROUPS
var<workgroup> scratch: array<u32, $(HALVES ? QUERY_PARTS * R * RS : R * RS)>;
#end
#if V == GROUPS
var<workgroup> shifts: array<f32, $(VG * 64)>;                       // (group, token)
var<workgroup> shift_parts: array<f32, $(VG * R * 8)>;               // (group, row, token modulo 8)
var<workgroup> shift_term: array<f32, $(VG * R)>;                    // (group, row)
#end
var<workgroup> row_sees: array<vec2<u32>, $(R)>;                     // first token, and how many
#if ALIBI
var<workgroup> row_slope: array<f32, $(R)>;
#end
var<workgroup> fold_alpha: array<f32, $(R)>;
var<workgroup> fold_beta: array<f32, $(R)>;                          // -1: nothing to fold
#include "reduce.wgsl"

#include "arithmetic.wgsl"
#if CENTRES
// G of row r in a tile.
fn base_of(tile: u32, r: u32) -> f32 {
    return row_base[select($(R)u, 0u, tile == 0u) + r];
}

#end
#if VIEW
#include "view.wgsl"
#else
#include "pages.wgsl"
#end
#include "query.wgsl"
#include "scores.wgsl"
#include "softmax.wgsl"
#include "values.wgsl"
#include "fold.wgsl"

// The first position that a query token at a position sees, by its window and its chunk.
fn first_position(position: i32) -> i32 {
    var first = 0;
    if params.window_left >= 0 {
        first = position - params.window_left;
    }
    if params.chunk > 0 {
        first = max(first, position - max(position, 0) % params.chunk);
    }
    return first;
}

// The workgroup's split and rows, the tokens that each row sees, and the tiles of the split that any row sees.
#def find_work(): workgroup, lane -> split, head, row0, first_query, num_queries, position_0, kv_len, pages_at, residuals_at, last, num_rows, num_pairs, tile, tile_end, sequence
let split = workgroup.x + workgroup.z * params.grid_x;
if split >= params.num_splits {
    return;
}
let head = workgroup.y / params.row_blocks;
let row0 = (workgroup.y - head * params.row_blocks) * $(R)u;
let index = tables[params.splits_at + 8u * split + 1u];
let kv_len = tables[params.splits_at + 8u * split + 2u];
let pages_at = tables[params.splits_at + 8u * split + 3u];
let residuals_at = tables[params.splits_at + 8u * split + 4u];
let first_query = tables[params.splits_at + 8u * split + 5u];
let num_queries = tables[params.splits_at + 8u * split + 6u];
let position_0 = i32(kv_len) - i32(tables[params.splits_at + 8u * split + 7u]) - i32(num_queries);
#if CENTRES
let sequence = tables[params.blocks_at + 8u * tables[params.splits_at + 8u * split] + 4u];
#end
let rows = params.heads_per_kv * num_queries;
if row0 >= rows {
    return;
}
let last = kv_len - 1u;
let num_rows = min($(R)u, rows - row0);
let num_pairs = num_rows * $(UNITS)u;

// The tokens that each row sees.
if lane < $(R)u {
    let row = row0 + lane;
    let position = position_0 + i32(row / params.heads_per_kv);
    var end = i32(kv_len);
    if params.causal != 0u {
        end = clamp(position + 1, 0, i32(kv_len));
    }
    let first = clamp(first_position(position), 0, end);
    row_sees[lane] = vec2<u32>(u32(first), select(0u, u32(end - first), row < rows));
#if ALIBI
    let h = head * params.heads_per_kv + min(row, rows - 1u) % params.heads_per_kv;
    row_slope[lane] = bitcast<f32>(tables[params.scales_at + 2u * params.num_kv_heads + h]);
#end
}
// The tiles of the split that any row sees.
let num_tiles = (kv_len + 63u) / 64u;
var tile = index * $(4 / PER_SEGMENT)u;
var tile_end = min((index + 1u) * $(4 / PER_SEGMENT)u, num_tiles);
{
    let last_row = min(row0 + $(R)u, rows) - 1u;
    if params.causal != 0u {
        let seen_end = clamp(position_0 + i32(last_row / params.heads_per_kv) + 1, 0, i32(kv_len));
        tile_end = min(tile_end, u32(seen_end + 63) / 64u);
    }
    tile = max(tile, u32(max(first_position(position_0 + i32(row0 / params.heads_per_kv)), 0)) / 64u);
}
#end

#if K_WINDOW + V_WINDOW > 0
// The place of a token's residuals. Residual pages of the first tile have slots of their own; later ones take turns in a ring of slots behind them.
fn residual_place(residuals_at: u32, head: u32, kv_len: u32, tile: u32, index: u32) -> TokenAddr {
    let token = min(tile * 64u + index, kv_len - 1u);
    let page = token / $(PS)u;
    let slot = select($(FIRST_RESIDUAL_PAGES)u + (page & (params.residual_ring - 1u)), page, page < $(FIRST_RESIDUAL_PAGES)u);
    let run = run_of(tables[residuals_at + slot], head);
    return TokenAddr(run.buffer, run.at, token % $(PS)u);
}

// How many of the workgroup's rows, the first ones, read a tile with residuals: rows whose own tile is less than `window` tiles on, and all rows
// in the sequence's first tile.
fn fine_rows(tile: u32, window: u32, kv_len: u32, position_0: i32, row0: u32) -> u32 {
    if tile == 0u {
        return $(R)u;
    }
    let end = i32(64u * (tile + window));
    if params.causal == 0u {
        return select(0u, $(R)u, i32(kv_len) <= end);
    }
    let tokens = end - position_0;
    return u32(clamp(tokens * i32(params.heads_per_kv) - i32(row0), 0, $(R)));
}
#end

// The tile's pages and the place of the lane's token; the next tile's page is loaded ahead.
#def locate_tile(): tile, lane, kv_len, position_0, pages_at, head, row0 -> page_ahead, token, pages, v_tile, place, k_fine, v_fine
let token = tile * 64u + lane;
#if PAGED
let pages = page_ahead;
page_ahead = tables[pages_at + (tile + 1u) / $(PS / 64)u];
let v_tile = run_of(pages, head);
#else
let pages = pages_at;
#end
let place = k_place(pages, head, kv_len, tile, lane);
#if K_WINDOW > 0
let k_fine = fine_rows(tile, $(K_WINDOW)u, kv_len, position_0, row0);
#else
let k_fine = 0u;
#end
#if V_WINDOW > 0
let v_fine = fine_rows(tile, $(V_WINDOW)u, kv_len, position_0, row0);
#else
let v_fine = 0u;
#end
#end

@compute @workgroup_size($(T))
fn decode_split(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
#use find_work()
#if V_INTEGER
    let theta = threshold(lane);
#end
    let slot = slot_of(lane);
#if HALVES
    let scratch_of_other = lane ^ 32u;
#end
#if PAGED
    // The next tile's page; past the last one it is the word that follows the pages in the tables, and unused.
    var page_ahead = tables[pages_at + tile / $(PS / 64)u];
#end
#use load_query()
    // The state: O in registers, (row, the lane's dim k).
#for r in 0..R
#for k in 0..(CH * DPL)
    var o_$(r)_$(k) = 0.0;
#end
#end
    var m = NONE;         // m and l of row `lane`
    var l = 0.0;
    for (; tile < tile_end; tile++) {
#use locate_tile()
#use load_v_params()
#if K_INTEGER
#use load_k()
#end
#if V_FIRST
#use load_v(0)
#end
#use v_params()
#use score_tile()
#use softmax_tile()
#use fold_tile()
    }

    let partial = (split * params.num_kv_heads + head) * params.row_blocks + row0 / $(R)u;
    if lane < $(R)u {
        partials[params.maxima_at + (partial * $(R)u + lane) * 2u] = m;
        partials[params.maxima_at + (partial * $(R)u + lane) * 2u + 1u] = l;
    }
#for r in 0..R
    if $(r)u < num_rows {
#for k in 0..(CH * DPL)
        if dim_of(lane, $(k)u) < $(VD)u {
            partials[(partial * $(R)u + $(r)u) * $(VD)u + dim_of(lane, $(k)u)] = o_$(r)_$(k);
        }
#end
    }
#end
}
