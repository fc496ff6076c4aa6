// matrix_split.wgsl: one workgroup of four subgroups attends one item (some segments) of one (sequence, KV head) for 8 query rows,
// both products on cooperative matrices (f16 16x16x16, f32 sums).
//
// Grid       as decode_split.wgsl's; 128 threads.
// Round      a tile of 64 tokens. For the scores a subgroup has 16 tokens, for the weights two rows, for the values every fourth block of
//            16 dims: only scores and weights cross subgroups. Codes are widened into a stage of the subgroup's own, PU * 16 at a time.
// Ahead      a tile's V is asked for before its scores, the next tile's K before the weights.
// Reads, writes, numerics  as decode_split.wgsl; item word 7 is the slot of its first segment's state.
// Shared     15 KiB, or 19 with PU = 4: four or three workgroups at once on an SM with 64.
// Host       crates/attn-wgpu/src/shader.rs says when; launch.rs the items.
#if !PLAIN
enable f16;
enable wgpu_int16;
enable wgpu_cooperative_matrix;
#end
#let READS_POOL = 1
#let T = 128
#let MATRIX = 1
#let BLOCKS = (UNITS + 3) / 4
#let PHASES = (UNITS + PU - 1) / PU
#let K_VECS = K_BITS == 8 ? (UNITS + 1) / 2 : (UNITS + 3) / 4
#include "arithmetic.wgsl"
#include "pages.wgsl"

@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;

#include "matrix.wgsl"
var<workgroup> unit_max: array<f32, $(R * UNITS)>;
var<workgroup> row_unit: array<f32, $(R)>;                           // 2^-e
var<workgroup> weight_sum: array<i32, $(R)>;
var<workgroup> shift_term: array<f32, $(R)>;
#if K == CHANNEL
#include "channel_arrays.wgsl"
#else
var<workgroup> unit_sum: array<i32, $(R * UNITS)>;
var<workgroup> group_sum: array<i32, $(R)>;
#end
var<workgroup> row_first: array<i32, $(R)>;
var<workgroup> row_end: array<i32, $(R)>;
#if ALIBI
var<workgroup> row_slope: array<f32, $(R)>;
#end
var<workgroup> fold_alpha: array<f32, $(R)>;
var<workgroup> fold_beta: array<f32, $(R)>;                          // -1: nothing to fold
#include "query_unit.wgsl"
#include "plane.wgsl"
#include "score.wgsl"
#include "value.wgsl"

// 16 bytes of V: panel n of the tile (16 tokens in slot order), row `row` of it.
fn v_codes(pages_at: u32, head: u32, tile: u32, last: u32, n: u32, row: u32) -> vec4<u32> {
#if PS >= 64
    let run = run_of(tables[pages_at + tile / $(PS / 64)u], head);
    return load_vec(run.buffer, run.at + $(V_CODES)u + ((tile % $(PS / 64)u) * 4u + n) * $(V_ROWS)u + row);
#else
    let place = place_of(pages_at, head, min(tile * 64u + n * 16u, last));
    return load_vec(place.buffer, place.at + $(V_CODES)u + (place.token / 16u) * $(V_ROWS)u + row);
#end
}

@compute @workgroup_size(128)
fn matrix_split(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
#if PLAIN
    thread = tid;
#end
    let part = tid >> 5u;            // the subgroup
    let lane = tid & 31u;
#include "item.wgsl"
    let first_slot = tables[params.items_at + 8u * item + 7u];
    // What is asked for ahead.
    var load_at = tile;
#for j in 0..2
    var v_word_0_$(j) = 0u;
    var k_word_0_$(j) = 0u;
#end
#for n in 0..K_VECS
    var k_raw_$(n) = vec4<u32>(0u);
#end
    var channel_raw_0 = vec4<u32>(0u);
    if tile < tile_end {
#include "matrix_load.wgsl"
    }
#include "query.wgsl"
    workgroupBarrier();

    for (var segment = 0u; segment < num_segments; segment++) {
        let segment_end = min((first_segment + segment + 1u) * segment_tiles, tile_end);
        // Of rows 2 part and 2 part + 1, known to every lane of the subgroup.
#for n in 0..2
        var m_$(n) = NONE;
        var l_$(n) = 0.0;
#end
        // O of dim (lane mod 16) of the subgroup's block j, of four rows.
#for j in 0..BLOCKS
#for k in 0..4
        var o_$(j)_$(k) = 0.0;
#end
#end
        for (; tile < segment_end; tile++) {
#include "matrix_tile.wgsl"
        }
        let slot = ((first_slot + segment) * params.num_kv_heads + head) * params.row_blocks + row0 / $(R)u;
#for n in 0..2
        if lane == 0u {
            states[params.maxima_at + (slot * $(R)u + 2u * part + $(n)u) * 2u] = m_$(n);
            states[params.maxima_at + (slot * $(R)u + 2u * part + $(n)u) * 2u + 1u] = l_$(n);
        }
#end
#for j in 0..BLOCKS
        if part + $(4 * j)u < $(UNITS)u {
#for k in 0..4
            if 4u * (lane >> 4u) + $(k)u < num_rows {
                states[(slot * $(R)u + 4u * (lane >> 4u) + $(k)u) * $(D)u + (part + $(4 * j)u) * 16u + (lane & 15u)] = o_$(j)_$(k);
            }
#end
        }
#end
    }
}
