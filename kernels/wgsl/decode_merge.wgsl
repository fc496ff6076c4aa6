// decode_merge.wgsl: one workgroup merges the states of one row, segments inside spans and spans among themselves, left to right, and finishes it.
//
// Grid       (heads_per_kv * q_len, num_kv_heads, batch); 256 threads: 8 spans at a time, 32 lanes each.
// Reads      the states that decode_split.wgsl wrote.
// Writes     out f32 [batch, q_len, num_q_heads, head_dim], lse [batch, q_len, num_q_heads] (bits, -inf where nothing is seen).
// Numerics   docs/arithmetic.md, sections 5 and 6.
#let READS_POOL = 0
#include "arithmetic.wgsl"
#include "pages.wgsl"

@group(0) @binding(2) var<storage, read> states: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse: array<u32>;

var<workgroup> span_o: array<f32, $(8 * D)>;
var<workgroup> span_m: array<f32, 8>;
var<workgroup> span_l: array<f32, 8>;

@compute @workgroup_size(256)
fn decode_merge(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let row = workgroup.x;
    let head = workgroup.y;
    let sequence = workgroup.z;
    let about = params.sequences_at + 8u * sequence;
    let first_item = tables[about];
    let num_items = tables[about + 1u];
    let num_spans = (num_items + 3u) / 4u;
    let group = tid / 32u;
    let lane = tid % 32u;

    var m = NONE;
    var l = 0.0;
    var o = 0.0;          // of dim tid
    for (var span0 = 0u; span0 < num_spans; span0 += 8u) {
        let first = (span0 + group) * 4u;
        var gm = NONE;
        var gl = 0.0;
#for k in 0..((D + 31) / 32)
        var g_$(k) = 0.0;
#end
        if first < num_items {
#for j in 0..4
            let slot_$(j) = ((first_item + min(first + $(j)u, num_items - 1u)) * params.num_kv_heads + head) * params.row_blocks + row / $(R)u;
            let at_$(j) = slot_$(j) * $(R)u + row % $(R)u;
            let used_$(j) = first + $(j)u < num_items;
            let m_$(j) = select(NONE, states[params.maxima_at + 2u * at_$(j)], used_$(j));
            let l_$(j) = states[params.maxima_at + 2u * at_$(j) + 1u];
#for k in 0..((D + 31) / 32)
            let o_$(j)_$(k) = states[at_$(j) * $(D)u + min(lane + $(32 * k)u, $(D - 1)u)];
#end
#end
#for j in 0..4
            if m_$(j) != NONE {
                if gm == NONE {
                    gm = m_$(j);
                    gl = l_$(j);
#for k in 0..((D + 31) / 32)
                    g_$(k) = o_$(j)_$(k);
#end
                } else {
                    let top = max(gm, m_$(j));
                    let alpha = pow2(top - gm);
                    let beta = pow2(top - m_$(j));
                    gl = gl * alpha + l_$(j) * beta;
                    gm = top;
#for k in 0..((D + 31) / 32)
                    g_$(k) = ftz(g_$(k) * alpha) + ftz(o_$(j)_$(k) * beta);
#end
                }
            }
#end
        }
        workgroupBarrier();
        span_m[group] = gm;
        span_l[group] = gl;
#for k in 0..((D + 31) / 32)
        if lane + $(32 * k)u < $(D)u {
            span_o[group * $(D)u + lane + $(32 * k)u] = g_$(k);
        }
#end
        workgroupBarrier();
        for (var s = 0u; s < 8u; s++) {
            let sm = span_m[s];
            if sm != NONE {
                let so = span_o[s * $(D)u + min(tid, $(D - 1)u)];
                if m == NONE {
                    m = sm;
                    l = span_l[s];
                    o = so;
                } else {
                    let top = max(m, sm);
                    let alpha = pow2(top - m);
                    let beta = pow2(top - sm);
                    l = l * alpha + span_l[s] * beta;
                    o = ftz(o * alpha) + ftz(so * beta);
                    m = top;
                }
            }
        }
    }

    let i = row / params.heads_per_kv;
    let at = (sequence * params.q_len + i) * params.num_q_heads + head * params.heads_per_kv + row % params.heads_per_kv;
    if tid < $(D)u {
        let v_scale = bitcast<f32>(tables[params.scales_at + 2u * head + 1u]);
        var x = 0.0;
        if m != NONE {
            x = ftz(ftz(ftz(o) * rcp(l)) * v_scale);
        }
        out[at * $(D)u + tid] = x;
    }
    if tid == 0u {
        lse[at] = 0xFF800000u;
        if m != NONE {
            lse[at] = bitcast<u32>(log_sum_exp(m, l));
        }
    }
}
