// decode_split.wgsl: one workgroup attends one item (a segment, or a span of them) of one (sequence, KV head) for $(R) query rows.
//
// Grid       (items, num_kv_heads * row_blocks, items / grid_x); 128 threads in 4 teams of 32.
// Round      each team takes one tile of 64 tokens; then all threads fold the four tile values in order.
// Reads      q f32 [batch, q_len, num_q_heads, head_dim]; pages as in FORMATS.md, each byte once per row block.
// Writes     states [item][kv_head][row_block][row][head_dim], and (m, l) of each row behind them.
// Numerics   docs/arithmetic.md; in the integer arithmetic every bit of it.
// Shared     planes of q, and by turns the raw weights and the tiles' values; never a dequantized cache.
// Host       crates/attn-wgpu/src/shader.rs chooses the constants, launch.rs the items.
#let READS_POOL = 1
#include "arithmetic.wgsl"
#include "pages.wgsl"

@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> states: array<f32>;

#let PLANE_SETS = K == CHANNEL ? 4 : 1
#let ROW_SETS = K == CHANNEL ? 4 : 1
#if INTEGER
var<workgroup> planes: array<vec4<u32>, $(PLANE_SETS * R * UNITS * 2)>;       // (set, row, unit of 16 dims, {hi, lo})
#else
var<workgroup> queries: array<vec4<f32>, $(R * UNITS * 4)>;                  // (row, 4 dims)
var<workgroup> v_params: array<vec2<f32>, 256>;                               // (team, token in slot order): scale, shift; 0 past the end
#end
var<workgroup> scratch: array<u32, $(SCRATCH_WORDS)>;                         // the raw weights (team, row, lane), then tile values (team, row, dim)
var<workgroup> weights: array<vec4<u32>, $(INTEGER ? 4 * R * 8 : 4 * R * 16)>; // (team, row, 16 tokens, {hi, lo}); float: (team, row, slot)
var<workgroup> row_first: array<i32, $(R)>;
var<workgroup> row_end: array<i32, $(R)>;
var<workgroup> row_unit: array<f32, $(ROW_SETS * R)>;                         // 2^-e
#if ALIBI
var<workgroup> row_slope: array<f32, $(R)>;
#end
#if K == CHANNEL
var<workgroup> row_amax: array<f32, $(R)>;
var<workgroup> unit_max: array<f32, $(4 * R * UNITS)>;
var<workgroup> unit_shift: array<f32, $(4 * UNITS)>;
var<workgroup> unit_sum: array<vec2<i32>, $(4 * R * UNITS)>;                  // sum of q15, of the shift term
var<workgroup> row_sum: array<i32, $(4 * R)>;
var<workgroup> row_shift: array<f32, $(4 * R)>;
#elif INTEGER && K == GROUPS
var<workgroup> unit_sum: array<i32, $(R * UNITS)>;
var<workgroup> group_sum: array<i32, $(R * KG)>;
#end
var<workgroup> tile_m: array<f32, $(4 * R)>;
var<workgroup> tile_l: array<i32, $(4 * R)>;
var<workgroup> fold_alpha: array<f32, $(4 * R)>;
var<workgroup> fold_beta: array<f32, $(4 * R)>;                               // -1: the tile is skipped
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
#include "score.wgsl"
#include "value.wgsl"

@compute @workgroup_size(128)
fn decode_split(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
#if SG > 1
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
    let sequence = tables[params.items_at + 4u * item];
    let first_segment = tables[params.items_at + 4u * item + 1u];
    let num_segments = tables[params.items_at + 4u * item + 2u];
    let about = params.sequences_at + 8u * sequence;
    let kv_len = tables[about];
    let segment_tiles = tables[about + 1u];
    let pages_at = tables[about + 2u];
    let tail_page = tables[about + 3u];
    let rows = params.heads_per_kv * params.q_len;
    let team = tid / 32u;
    let lane = tid % 32u;

    // What each row sees.
    if tid < $(R)u {
        let row = row0 + tid;
        let position = i32(kv_len) - i32(params.q_len) + i32(row / params.heads_per_kv);
        var end = i32(kv_len);
        if params.causal != 0u {
            end = clamp(position + 1, 0, i32(kv_len));
        }
        var first = 0;
        if params.window_left >= 0 {
            first = clamp(position - params.window_left, 0, end);
        }
        row_first[tid] = first;
        row_end[tid] = select(0, end, row < rows);
#if ALIBI
        let h = head * params.heads_per_kv + min(row, rows - 1u) % params.heads_per_kv;
        row_slope[tid] = bitcast<f32>(tables[params.scales_at + 2u * params.num_kv_heads + h]);
#end
    }
    // The least and the last token that any of them sees.
    var seen_first = 0;
    var seen_end = i32(kv_len);
    {
        let last_row = min(row0 + $(R)u, rows) - 1u;
        let base = i32(kv_len) - i32(params.q_len);
        if params.causal != 0u {
            seen_end = clamp(base + i32(last_row / params.heads_per_kv) + 1, 0, i32(kv_len));
        }
        if params.window_left >= 0 {
            seen_first = max(base + i32(row0 / params.heads_per_kv) - params.window_left, 0);
        }
    }

    // The query, once.
    {
        let pr = tid / 16u;
        let pu = tid % 16u;
        let mine = pr < $(R)u && pu < $(UNITS)u;
        var x = query_unit(sequence, head, row0 + pr, min(pu, $(UNITS - 1)u));
#if INTEGER
        if mine {
            scratch[pr * $(UNITS)u + pu] = bitcast<u32>(largest(x));
        }
        workgroupBarrier();
        if mine {
            var a = 0.0;
            for (var u = 0u; u < $(UNITS)u; u++) {
                a = max(a, bitcast<f32>(scratch[pr * $(UNITS)u + u]));
            }
#if K == CHANNEL
            row_amax[pr] = a;
#else
            let e = plane_exponent(a);
            let sum = store_plane((pr * $(UNITS)u + pu) * 2u, x, exp2i(e));
            row_unit[pr] = exp2i(-e);
#if K == GROUPS
            unit_sum[pr * $(UNITS)u + pu] = sum;
#end
#end
        }
#if K == GROUPS
        workgroupBarrier();
        if tid < $(R * KG)u {
            var sum = 0;
            for (var u = 0u; u < $(UNITS / KG)u; u++) {
                sum += unit_sum[tid * $(UNITS / KG)u + u];
            }
            group_sum[tid] = sum;
        }
#end
#else
        if mine {
#for w in 0..4
            queries[(pr * $(UNITS)u + pu) * 4u + $(w)u] = x[$(w)];
#end
        }
#end
    }

    // States: of the segment, and of the span; element (row, dim) = (chunk row + e / CD, e % CD) with e = tid + 128 k.
#for g in 0..VG
#for c in 0..CH
#for k in 0..ELEMS
    var o_$(g)_$(c)_$(k) = 0.0;
    var span_$(g)_$(c)_$(k) = 0.0;
#end
#end
#end
    var m = NONE;         // of row tid, as l
    var l = 0.0;
    var span_m = NONE;
    var span_l = 0.0;

    let num_tiles = (kv_len + 63u) / 64u;
    for (var segment = first_segment; segment < first_segment + num_segments; segment++) {
        let tile_end = min((segment + 1u) * segment_tiles, num_tiles);
        for (var tile0 = segment * segment_tiles; tile0 < tile_end; tile0 += 4u) {
            if i32(tile0 * 64u) >= seen_end || i32(tile0 * 64u + 256u) <= seen_first {
                continue;
            }
            let tile = tile0 + team;
            // Tokens past the end are read as the last one's bytes, and weigh nothing.
            let last = kv_len - 1u;
#if SG != 32
            workgroupBarrier();
            clear_reduced(tid);
#end
            workgroupBarrier();
#include "tile.wgsl"
#include "fold.wgsl"
        }
        // The segment's state merges into the span's.
        workgroupBarrier();
        if tid < $(R)u {
            if m == NONE {
                fold_alpha[tid] = -1.0;
                fold_beta[tid] = 0.0;
            } else if span_m == NONE {
                fold_alpha[tid] = 0.0;
                fold_beta[tid] = -1.0;
                span_m = m;
                span_l = l;
            } else {
                let top = max(span_m, m);
                let alpha = pow2(top - span_m);
                let beta = pow2(top - m);
                span_l = span_l * alpha + l * beta;
                span_m = top;
                fold_alpha[tid] = alpha;
                fold_beta[tid] = beta;
            }
            m = NONE;
            l = 0.0;
        }
        workgroupBarrier();
#for rc in 0..(R / TROWS)
#for k in 0..CHUNK_ELEMS
        {
            let row = min($(rc * TROWS)u + (tid + $(128 * k)u) / $(CD)u, $(R - 1)u);
            let alpha = fold_alpha[row];
            let beta = fold_beta[row];
#for g in 0..VG
#for c in 0..CH
            if beta < 0.0 {
                span_$(g)_$(c)_$(rc * CHUNK_ELEMS + k) = o_$(g)_$(c)_$(rc * CHUNK_ELEMS + k);
            } else if alpha >= 0.0 {
                span_$(g)_$(c)_$(rc * CHUNK_ELEMS + k) = ftz(span_$(g)_$(c)_$(rc * CHUNK_ELEMS + k) * alpha) + ftz(o_$(g)_$(c)_$(rc * CHUNK_ELEMS + k) * beta);
            }
            o_$(g)_$(c)_$(rc * CHUNK_ELEMS + k) = 0.0;
#end
#end
        }
#end
#end
    }

    let slot = (item * params.num_kv_heads + head) * params.row_blocks + row0 / $(R)u;
    if tid < $(R)u {
        states[params.maxima_at + (slot * $(R)u + tid) * 2u] = span_m;
        states[params.maxima_at + (slot * $(R)u + tid) * 2u + 1u] = span_l;
    }
#for rc in 0..(R / TROWS)
#for k in 0..CHUNK_ELEMS
    {
        let e = tid + $(128 * k)u;
        let row = $(rc * TROWS)u + e / $(CD)u;
        let dim = e % $(CD)u;
        if e < $(TROWS * CD)u {
#for g in 0..VG
#for c in 0..CH
            if dim < $(GD - c * CD)u {
                states[(slot * $(R)u + row) * $(D)u + $(g * GD + c * CD)u + dim] = span_$(g)_$(c)_$(rc * CHUNK_ELEMS + k);
            }
#end
#end
        }
    }
#end
#end
}
