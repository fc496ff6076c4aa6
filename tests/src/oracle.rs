//! Attention in f64 over the dequantized cache: independent of tiles, segments and planes.

use attn_core::{
    HostPages, KvCache, Problem,
    layout::{Part, Side},
    quant::{self, Param},
};

/// Outputs and log-sum-exps in f64, laid out as the problem's; `cache` lies in host memory.
///
/// # Panics
/// If the cache's pages are not in host memory.
pub fn attend(problem: &Problem, cache: &KvCache, q: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let dim = problem.head_dim;
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for b in 0..problem.batch() {
        let kv: Vec<_> = (0..problem.num_kv_heads)
            .map(|g| dequantize(cache, b, g))
            .collect();
        for i in 0..problem.q_len {
            for h in 0..problem.num_q_heads {
                let at = ((b * problem.q_len + i) * problem.num_q_heads + h) * dim;
                let (k, v) = &kv[h / problem.heads_per_kv()];
                let (row, row_lse) = attend_row(problem, b, i, h, &q[at..at + dim], k, v);
                out.extend(row);
                lse.push(row_lse);
            }
        }
    }
    (out, lse)
}

/// Outputs `[q_len, num_q_heads, head_dim]` and log-sum-exps `[q_len, num_q_heads]` in f64 for one sequence, over K and V that are given
/// as f32 `[kv_len, num_kv_heads, head_dim]` instead of a cache.
pub fn attend_rows(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let dim = problem.head_dim;
    let of_head = |x: &[f32], g: usize| -> Vec<f64> {
        let rows = x.chunks_exact(dim).skip(g).step_by(problem.num_kv_heads);
        rows.flatten().map(|x| f64::from(*x)).collect()
    };
    let kv: Vec<_> = (0..problem.num_kv_heads)
        .map(|g| (of_head(k, g), of_head(v, g)))
        .collect();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (row, q) in q.chunks_exact(dim).enumerate() {
        let (i, h) = (row / problem.num_q_heads, row % problem.num_q_heads);
        let (k, v) = &kv[h / problem.heads_per_kv()];
        let (row, row_lse) = attend_row(problem, 0, i, h, q, k, v);
        out.extend(row);
        lse.push(row_lse);
    }
    (out, lse)
}

fn attend_row(
    problem: &Problem,
    b: usize,
    i: usize,
    h: usize,
    q: &[f32],
    k: &[f64],
    v: &[f64],
) -> (Vec<f64>, f64) {
    let dim = problem.head_dim;
    let position = problem.kv_lens[b] as f64 - problem.q_len as f64 + i as f64;
    // The specification's words, not `Problem::visible`: a wrong mask there must not be right here.
    let sees = |t: &usize| {
        let t = *t as f64;
        (!problem.causal || t <= position)
            && problem.window_left.is_none_or(|w| t >= position - w as f64)
    };
    let scores: Vec<(usize, f64)> = (0..problem.kv_lens[b])
        .filter(sees)
        .map(|t| {
            let dot: f64 = q
                .iter()
                .zip(&k[t * dim..])
                .map(|(q, k)| f64::from(*q) * k)
                .sum();
            let mut s = dot * f64::from(problem.softmax_scale);
            if let Some(cap) = problem.softcap {
                s = f64::from(cap) * (s / f64::from(cap)).tanh();
            }
            if let Some(slopes) = &problem.alibi_slopes {
                s += f64::from(slopes[h]) * (t as f64 - position);
            }
            (t, s)
        })
        .collect();
    let sink = problem.sinks.as_ref().map(|sinks| f64::from(sinks[h]));
    let logits = || scores.iter().map(|(_, s)| *s).chain(sink);
    let max = logits().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (vec![0.0; dim], max);
    }
    let sum: f64 = logits().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; dim];
    for (t, s) in scores {
        let weight = (s - max).exp() / sum;
        out.iter_mut()
            .zip(&v[t * dim..])
            .for_each(|(o, v)| *o += weight * v);
    }
    (out, max + sum.ln())
}

/// K and V of one KV head as `[t][d]`.
fn dequantize(cache: &KvCache, b: usize, head: usize) -> (Vec<f64>, Vec<f64>) {
    let (config, table) = (cache.config(), cache.table());
    let store = cache
        .store()
        .as_any()
        .downcast_ref::<HostPages>()
        .expect("the oracle reads host pages");
    let (layout, dim, len) = (*cache.layout(), config.head_dim, table.lens[b]);
    let scale = |scales: &[f32]| scales.get(head).copied().unwrap_or(1.0);
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for t in 0..len {
        let (page, slot) = (t / config.page_size, t % config.page_size);
        let open = layout.has_tail_page() && (page + 1) * config.page_size > len;
        let home = store.run(table.pages[b][page], head);
        let (k_run, k_layout) = match table.tail_pages[b] {
            Some(tail) if open => (store.run(tail, head), layout.tail_k()),
            _ => (home, layout),
        };
        let value = |run: &[u8], part: &Part, d: usize, scale: f32| {
            let param = part.load_param(run, slot, d * part.num_params() / dim);
            let unshifted = Param {
                shift: half::f16::ZERO,
                ..param
            };
            let code = part.load_code(run, slot, d);
            f64::from(quant::decode(part.scheme, code, unshifted, scale)) + param.shift.to_f64()
        };
        let (k_part, v_part) = (k_layout.part(Side::K), layout.part(Side::V));
        for d in 0..dim {
            k.push(value(k_run, &k_part, d, scale(&config.k_tensor_scales)));
            v.push(value(home, &v_part, d, scale(&config.v_tensor_scales)));
        }
    }
    (k, v)
}
