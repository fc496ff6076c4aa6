// decode_merge.wgsl: one workgroup merges the partials of one row, or of some of its dims, and writes the row: tiles fold into segments (if
// splits are tiles), segments merge inside spans, then the spans merge, each left to right.
//
// Grid       (heads_per_kv * query tokens of a block * VD / MD, num_kv_heads, query blocks); 256 threads: SPANS spans at a time, LANES lanes each.
// Reads      the partials that decode_split.wgsl wrote.
// Writes     out f32 [query tokens, num_q_heads, head_dim], lse [query tokens, num_q_heads] (bits, -inf where nothing is seen).
// Numerics   docs/arithmetic.md, sections 2, 6 and 7.
// MD         the dims of a workgroup; fewer than VD where splits are tiles, because rows are few then and each has many partials. Where V is
//            rotated they are whole blocks. More than 256, a block of 512, are EACH to a thread, and half as many spans fit into workgroup memory.
#let EACH = (MD + 255) / 256
#let SPANS = 8 / EACH
#let LANES = 32 * EACH
#include "decode_params"

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tables: array<u32>;      // see decode_split.wgsl
@group(0) @binding(2) var<storage, read> partials: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse: array<u32>;
#include "arithmetic.wgsl"

var<workgroup> span_o: array<f32, $(SPANS * MD)>;
var<workgroup> span_m: array<f32, $(SPANS)>;
var<workgroup> span_l: array<f32, $(SPANS)>;

#if V_STRIDES > 0
// The dims' outputs turned back, from those of their block: a butterfly of each stride, the stages by turns in two parts of memory.
fn rotate_back(own: array<f32, $(EACH)>, tid: u32) -> array<f32, $(EACH)> {
    var x = own;
    workgroupBarrier();
#for s in 0..V_STRIDES
    {
        let half = $(s % 2 * MD)u;
#for e in 0..EACH
        if tid + $(256 * e)u < $(MD)u {
            span_o[half + tid + $(256 * e)u] = x[$(e)];
        }
#end
        workgroupBarrier();
#for e in 0..EACH
        {
            let dim = min(tid + $(256 * e)u, $(MD - 1)u);
            let other = span_o[half + (dim ^ (1u << $(s)u))];
            x[$(e)] = ftz(select(x[$(e)] + other, other - x[$(e)], (dim & (1u << $(s)u)) != 0u));
        }
#end
    }
#end
#for e in 0..EACH
    x[$(e)] = ftz(x[$(e)] * exp2i(-$((V_STRIDES + 1) / 2)));
#end
    return x;
}
#end

@compute @workgroup_size(256)
fn decode_merge(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let row = workgroup.x / $((VD + MD - 1) / MD)u;
    let dim0 = workgroup.x % $((VD + MD - 1) / MD)u * $(MD)u;
    let head = workgroup.y;
    let about = params.blocks_at + 8u * workgroup.z;
    let first_split = tables[about];
    let num_splits = tables[about + 1u];
    if row >= params.heads_per_kv * tables[about + 3u] {
        return;
    }
    let num_segments = (num_splits + $(PER_SEGMENT - 1)u) / $(PER_SEGMENT)u;
    let num_spans = (num_segments + 3u) / 4u;
    let group = tid / $(LANES)u;
    let lane = tid % $(LANES)u;

    var m = NONE;
    var l = 0.0;
    var o: array<f32, $(EACH)>;          // O of dims dim0 + tid, and 256 further
    for (var span0 = 0u; span0 < num_spans; span0 += $(SPANS)u) {
        let first = (span0 + group) * 4u;
        var gm = NONE;
        var gl = 0.0;
#for k in 0..((MD + LANES - 1) / LANES)
        var g_$(k) = 0.0;
#end
        if first < num_segments {
#for n in 0..PER_SEGMENT
#for j in 0..4
            let index_$(n)_$(j) = (first + $(j)u) * $(PER_SEGMENT)u + $(n)u;
            let partial_$(n)_$(j) = ((first_split + min(index_$(n)_$(j), num_splits - 1u)) * params.num_kv_heads + head) * params.row_blocks + row / $(R)u;
            let at_$(n)_$(j) = partial_$(n)_$(j) * $(R)u + row % $(R)u;
            let m_$(n)_$(j) = select(NONE, partials[params.maxima_at + 2u * at_$(n)_$(j)], index_$(n)_$(j) < num_splits);
            let l_$(n)_$(j) = partials[params.maxima_at + 2u * at_$(n)_$(j) + 1u];
#for k in 0..((MD + LANES - 1) / LANES)
            let o_$(n)_$(j)_$(k) = partials[at_$(n)_$(j) * $(VD)u + min(dim0 + lane + $(LANES * k)u, $(VD - 1)u)];
#end
#end
#end
#for j in 0..4
            var m_$(j) = m_0_$(j);
            var l_$(j) = l_0_$(j);
#for k in 0..((MD + LANES - 1) / LANES)
            var o_$(j)_$(k) = o_0_$(j)_$(k);
#end
#for n in 1..PER_SEGMENT
            if m_$(n)_$(j) != NONE {
                if m_$(j) == NONE {
                    m_$(j) = m_$(n)_$(j);
                    l_$(j) = l_$(n)_$(j);
#for k in 0..((MD + LANES - 1) / LANES)
                    o_$(j)_$(k) = o_$(n)_$(j)_$(k);
#end
                } else {
                    // The fold of section 6; the merges below flush both products.
                    let factors = fold_factors(m_$(j), m_$(n)_$(j));
                    m_$(j) = factors.x;
                    l_$(j) = l_$(j) * factors.y + l_$(n)_$(j) * factors.z;
#for k in 0..((MD + LANES - 1) / LANES)
                    o_$(j)_$(k) = ftz(o_$(j)_$(k) * factors.y) + o_$(n)_$(j)_$(k) * factors.z;
#end
                }
            }
#end
#end
#for j in 0..4
            if m_$(j) != NONE {
                if gm == NONE {
                    gm = m_$(j);
                    gl = l_$(j);
#for k in 0..((MD + LANES - 1) / LANES)
                    g_$(k) = o_$(j)_$(k);
#end
                } else {
                    let factors = merge_factors(gm, m_$(j));
                    gm = factors.x;
                    gl = gl * factors.y + l_$(j) * factors.z;
#for k in 0..((MD + LANES - 1) / LANES)
                    g_$(k) = ftz(g_$(k) * factors.y) + ftz(o_$(j)_$(k) * factors.z);
#end
                }
            }
#end
        }
        workgroupBarrier();
        span_m[group] = gm;
        span_l[group] = gl;
#for k in 0..((MD + LANES - 1) / LANES)
        if lane + $(LANES * k)u < $(MD)u {
            span_o[group * $(MD)u + lane + $(LANES * k)u] = g_$(k);
        }
#end
        workgroupBarrier();
        for (var s = 0u; s < $(SPANS)u; s++) {
            let sm = span_m[s];
            if sm != NONE {
                let is_first = m == NONE;
                let factors = merge_factors(m, sm);
                m = select(factors.x, sm, is_first);
                l = select(l * factors.y + span_l[s] * factors.z, span_l[s], is_first);
#for e in 0..EACH
                {
                    let so = span_o[s * $(MD)u + min(tid + $(256 * e)u, $(MD - 1)u)];
                    o[$(e)] = select(ftz(o[$(e)] * factors.y) + ftz(so * factors.z), so, is_first);
                }
#end
            }
        }
    }

    let i = row / params.heads_per_kv;
    let at = (tables[about + 2u] + i) * params.num_q_heads + head * params.heads_per_kv + row % params.heads_per_kv;
    // The sink's state comes from the host, and merges last.
    var alpha = 1.0;
    if params.sinks_at != 0u {
        let sink = params.sinks_at + 2u * (head * params.heads_per_kv + row % params.heads_per_kv);
        let factors = merge_factors(m, bitcast<f32>(tables[sink]));
        m = factors.x;
        l = l * factors.y + bitcast<f32>(tables[sink + 1u]) * factors.z;
        alpha = factors.y;
    }
    let v_scale = bitcast<f32>(tables[params.scales_at + 2u * head + 1u]);
    var x: array<f32, $(EACH)>;
    if m != NONE {
#for e in 0..EACH
        x[$(e)] = ftz(ftz(ftz(o[$(e)]) * (rcp(l) * alpha)) * v_scale);
#end
    }
#if V_STRIDES > 0
    x = rotate_back(x, tid);
#end
#for e in 0..EACH
    if tid + $(256 * e)u < $(MD)u && dim0 + tid + $(256 * e)u < $(VD)u {
        out[at * $(VD)u + dim0 + tid + $(256 * e)u] = x[$(e)];
    }
#end
    if dim0 + tid == 0u {
        lse[at] = 0xFF800000u;
        if m != NONE {
            lse[at] = bitcast<u32>(log_sum_exp(m, l));
        }
    }
}
