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
#let READS_POOL = 1
#let T = 32
#let MATRIX = 0
#include "arithmetic.wgsl"
#include "pages.wgsl"

@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;

#if INTEGER
var<workgroup> planes: array<vec4<u32>, $(R * UNITS * 2)>;           // (row, unit of 16 dims, {hi, lo})
var<workgroup> unit_max: array<f32, $(R * UNITS)>;
var<workgroup> row_unit: array<f32, $(R)>;                           // 2^-e
var<workgroup> weights: array<vec4<u32>, $(VG * R * 8)>;             // (group of V, row, 16 tokens, {hi, lo})
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
#include "channel_arrays.wgsl"
#elif INTEGER && K == GROUPS
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

#include "query_unit.wgsl"
#if INTEGER
#include "plane.wgsl"
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
    let tid = lane;
#include "item.wgsl"
    let all_rows = $(R)u + params.zero;
#if VG == 1
    let num_weights = num_rows * 4u;
#else
    let num_weights = $(VG * R * 4)u;
#end
#include "ahead.wgsl"
#if K_AHEAD
    if tile < tile_end {
#include "load.wgsl"
    }
#end

#include "query.wgsl"
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
