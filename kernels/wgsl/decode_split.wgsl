// decode_split.wgsl: one workgroup of 32 lanes attends one item (a segment) of one (sequence, KV head) for $(R) query rows.
//
// Grid       (items, num_kv_heads * row_blocks, items / grid_x); 32 threads, which depend on no other: no barrier waits for a second subgroup.
// Round      a tile of 64 tokens: a lane has two tokens for the scores, every 32nd dim (or pair of dims) for the values; the state folds at once.
// Ahead      a tile's V is asked for before its scores, the next tile's K before its values, so memory and arithmetic overlap inside one subgroup.
// Reads      q f32 [batch, q_len, num_q_heads, head_dim]; pages as in FORMATS.md, each byte once per row block.
// Writes     states [item][kv_head][row_block][row][head_dim], and (m, l) of each row behind them.
// Numerics   docs/arithmetic.md; in the integer arithmetic every bit of it.
// Shared     planes of q and one tile's weights, as little as may be: it is what limits how many workgroups run at once.
// Host       crates/attn-wgpu/src/shader.rs chooses the constants, launch.rs the items.
#if MATRIX
enable f16;
enable wgpu_int16;
enable wgpu_cooperative_matrix;
#end
#let READS_POOL = 1
#include "arithmetic.wgsl"
#include "pages.wgsl"

@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;

#if INTEGER
#if !MATRIX
var<workgroup> planes: array<vec4<u32>, $(R * UNITS * 2)>;           // (row, unit of 16 dims, {hi, lo})
#end
var<workgroup> unit_max: array<f32, $(R * UNITS)>;
var<workgroup> row_unit: array<f32, $(R)>;                           // 2^-e
#if !MATRIX
var<workgroup> weights: array<vec4<u32>, $(VG * R * 8)>;             // (group of V, row, 16 tokens, {hi, lo})
#end
var<workgroup> weight_sum: array<i32, $(VG * R)>;                     // (group of V, row), as the next
var<workgroup> shift_term: array<f32, $(VG * R)>;
var<workgroup> value_unit: array<f32, $(VG)>;                        // 2^-f
#else
var<workgroup> queries: array<vec4<f32>, $(R * UNITS * 4)>;          // (row, 4 dims)
var<workgroup> values_p: array<f32, $(R * 64)>;                      // (row, token in slot order)
var<workgroup> values_param: array<vec2<f32>, $(VG * 64)>;           // (group, token in slot order): scale, shift; 0 past the end
#end
// Scores (row, token) by their bits, and in their place the weights of both of a lane's tokens (group of V, row, lane).
#let RS = SG != 32 || !INTEGER ? 64 : 32
var<workgroup> scratch: array<u32, $(R * RS + (VG - 1) * R * 32 * INTEGER)>;
#if INTEGER && K == CHANNEL
var<workgroup> channel_scale: array<vec4<f32>, $(UNITS * 4)>;
var<workgroup> channel_shift: array<vec4<f32>, $(UNITS * 4)>;
var<workgroup> unit_shift: array<f32, $(UNITS)>;
var<workgroup> unit_sum: array<vec2<i32>, $(R * UNITS)>;             // sum of q15, of the shift term
var<workgroup> row_amax: array<f32, $(R)>;
var<workgroup> row_sum: array<i32, $(R)>;
var<workgroup> row_shift: array<f32, $(R)>;
#elif INTEGER && (K == GROUPS || MATRIX)
var<workgroup> unit_sum: array<i32, $(R * UNITS)>;
var<workgroup> group_sum: array<i32, $(R * KG)>;
#end
var<workgroup> row_first: array<i32, $(R)>;
var<workgroup> row_end: array<i32, $(R)>;
#if ALIBI
var<workgroup> row_slope: array<f32, $(R)>;
#end
#if SG != 32
var<workgroup> tile_m: array<f32, $(R)>;
#end
var<workgroup> fold_alpha: array<f32, $(R)>;
var<workgroup> fold_beta: array<f32, $(R)>;                          // -1: nothing to fold
#include "reduce.wgsl"

// q' of 16 dims of one row.
fn query_unit(sequence: u32, head: u32, row: u32, unit: u32) -> array<vec4<f32>, 4> {
    let heads = params.heads_per_kv;
    let rows = heads * params.q_len;
    let safe = min(row, rows - 1u);
    let i = safe / heads;
    let h = head * heads + (safe - i * heads);
    let at = ((sequence * params.q_len + i) * params.num_q_heads + h) * $(D / 4)u + unit * 4u;
    let c = params.log2_scale * bitcast<f32>(tables[params.scales_at + 2u * head]);
    return array<vec4<f32>, 4>(q[at] * c, q[at + 1u] * c, q[at + 2u] * c, q[at + 3u] * c);
}

fn largest(x: array<vec4<f32>, 4>) -> f32 {
    let m = max(max(abs(x[0]), abs(x[1])), max(abs(x[2]), abs(x[3])));
    return max(max(m.x, m.y), max(m.z, m.w));
}
#if INTEGER
#include "plane.wgsl"
#end
#if MATRIX
#include "matrix.wgsl"
#end
#include "score.wgsl"
#include "value.wgsl"

@compute @workgroup_size(32)
fn decode_split(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
#if SG > 1 && SG < 32
    @builtin(subgroup_invocation_id) sg_lane: u32,
#end
) {
#if SG <= 1
    let sg_lane = 0u;
#end
    let item = workgroup.x + workgroup.z * params.grid_x;
    if item >= params.num_items {
        return;
    }
    let head = workgroup.y / params.row_blocks;
    let row0 = (workgroup.y - head * params.row_blocks) * $(R)u;
    let sequence = tables[params.items_at + 8u * item];
    let first_segment = tables[params.items_at + 8u * item + 1u];
    let num_segments = tables[params.items_at + 8u * item + 2u];
    let kv_len = tables[params.items_at + 8u * item + 3u];
    let segment_tiles = tables[params.items_at + 8u * item + 4u];
    let pages_at = tables[params.items_at + 8u * item + 5u];
    let tail_page = tables[params.items_at + 8u * item + 6u];
    let rows = params.heads_per_kv * params.q_len;
    let last = kv_len - 1u;
    let mine = (lane >> 3u) * 16u + (lane & 7u);
    let num_rows = min($(R)u, rows - row0);
    let all_rows = $(R)u + params.zero;
    let num_pairs = num_rows * $(UNITS)u;
#if VG == 1
    let num_weights = num_rows * 4u;
#else
    let num_weights = $(VG * R * 4)u;
#end

    // What each row sees.
    if lane < $(R)u {
        let row = row0 + lane;
        let position = i32(kv_len) - i32(params.q_len) + i32(row / params.heads_per_kv);
        var end = i32(kv_len);
        if params.causal != 0u {
            end = clamp(position + 1, 0, i32(kv_len));
        }
        var first = 0;
        if params.window_left >= 0 {
            first = clamp(position - params.window_left, 0, end);
        }
        row_first[lane] = first;
        row_end[lane] = select(0, end, row < rows);
#if ALIBI
        let h = head * params.heads_per_kv + min(row, rows - 1u) % params.heads_per_kv;
        row_slope[lane] = bitcast<f32>(tables[params.scales_at + 2u * params.num_kv_heads + h]);
#end
    }
    // The tiles of the item that any of them sees.
    let num_tiles = (kv_len + 63u) / 64u;
    var tile = first_segment * segment_tiles;
    var tile_end = min((first_segment + num_segments) * segment_tiles, num_tiles);
    {
        let last_row = min(row0 + $(R)u, rows) - 1u;
        let base = i32(kv_len) - i32(params.q_len);
        if params.causal != 0u {
            let seen_end = clamp(base + i32(last_row / params.heads_per_kv) + 1, 0, i32(kv_len));
            tile_end = min(tile_end, u32(seen_end + 63) / 64u);
        }
        if params.window_left >= 0 {
            tile = max(tile, u32(max(base + i32(row0 / params.heads_per_kv) - params.window_left, 0)) / 64u);
        }
    }
#include "ahead.wgsl"
#if K_AHEAD
    if tile < tile_end {
#include "load.wgsl"
    }
#end

    // The query, once.
    for (var pair = lane; pair < num_pairs; pair += 32u) {
        let x = query_unit(sequence, head, row0 + pair / $(UNITS)u, pair % $(UNITS)u);
#if INTEGER
        unit_max[pair] = largest(x);
#else
#for w in 0..4
        queries[pair * 4u + $(w)u] = x[$(w)];
#end
#end
    }
#if INTEGER
    workgroupBarrier();
#if K == CHANNEL
    if lane < $(R)u {
        var a = 0.0;
        for (var u = 0u; u < $(UNITS)u; u++) {
            a = max(a, unit_max[lane * $(UNITS)u + u]);
        }
        row_amax[lane] = a;
    }
#else
    for (var pair = lane; pair < num_pairs; pair += 32u) {
        let r = pair / $(UNITS)u;
        var a = 0.0;
        for (var u = 0u; u < $(UNITS)u; u++) {
            a = max(a, unit_max[r * $(UNITS)u + u]);
        }
        let e = plane_exponent(a);
        let sum = store_plane(pair * 2u, query_unit(sequence, head, row0 + r, pair % $(UNITS)u), exp2i(e));
        if pair % $(UNITS)u == 0u {
            row_unit[r] = exp2i(-e);
        }
#if K == GROUPS || MATRIX
        unit_sum[pair] = sum;
#end
    }
#if MATRIX
#include "matrix_query.wgsl"
#end
#if K == GROUPS || MATRIX
    workgroupBarrier();
    for (var at = lane; at < $(R * KG)u; at += 32u) {
        var sum = 0;
        for (var u = 0u; u < $(UNITS / KG)u; u++) {
            sum += unit_sum[at * $(UNITS / KG)u + u];
        }
        group_sum[at] = sum;
    }
#end
#end
#end
    // The state: O in registers, (row, the lane's dim k).
#for r in 0..R
#for k in 0..(CH * DPL)
    var o_$(r)_$(k) = 0.0;
#end
#end
    var m = NONE;         // of row `lane`, as l
    var l = 0.0;
    workgroupBarrier();

    for (; tile < tile_end; tile++) {
#include "tile.wgsl"
#include "fold.wgsl"
    }

    let slot = (item * params.num_kv_heads + head) * params.row_blocks + row0 / $(R)u;
    if lane < $(R)u {
        states[params.maxima_at + (slot * $(R)u + lane) * 2u] = m;
        states[params.maxima_at + (slot * $(R)u + lane) * 2u + 1u] = l;
    }
#for r in 0..R
    if $(r)u < num_rows {
#for k in 0..(CH * DPL)
        if dim_of(lane, $(k)u) < $(D)u {
            states[(slot * $(R)u + $(r)u) * $(D)u + dim_of(lane, $(k)u)] = o_$(r)_$(k);
        }
#end
    }
#end
}
