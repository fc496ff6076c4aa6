//! Attention in f64 over the dequantized cache: independent of tiles, segments and integers.
//!
//! Queries count as a backend multiplies them, rounded to 8 bits (`docs/arithmetic.md`, section 3) or as they are.

mod row;

use attn_core::{
    HeadDim, HostPages, KvCache, KvFormat, Problem,
    arithmetic::{LOG2_E, QueryParts, query_code},
    layout::{Part, Side},
    quant::{self, Param},
    rotation::{block, rotate_back},
};

pub use row::{QueryRow, Weights};

/// What queries count as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// What they are.
    Exact,
    /// Rounded to 8 bits a row, after the rotation where K is rotated.
    Rounded,
}

/// Outputs and log-sum-exps in f64, laid out as the problem's; `cache` lies in host memory.
///
/// # Panics
/// If the cache's pages are not in host memory.
pub fn attend(
    problem: &Problem,
    cache: &KvCache,
    q: &[f32],
    queries: Queries,
) -> (Vec<f64>, Vec<f64>) {
    let dim = problem.head_dim.k;
    let format = cache.config().format;
    let scale = |h: usize| {
        let k_scale = cache
            .config()
            .k_tensor_scales
            .get(h / problem.heads_per_kv());
        problem.score_scale() * LOG2_E * k_scale.copied().unwrap_or(1.0)
    };
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (b, tokens) in problem.query_ranges().enumerate() {
        let kv: Vec<_> = (0..problem.num_kv_heads)
            .map(|g| [Side::K, Side::V].map(|side| Stored::new(cache, b, g, side)))
            .collect();
        for i in 0..tokens.len() {
            for h in 0..problem.num_q_heads {
                let at = ((tokens.start + i) * problem.num_q_heads + h) * dim;
                let q = &q[at..at + dim];
                let exact: Vec<f64> = q.iter().map(|x| f64::from(*x)).collect();
                let read = match queries {
                    Queries::Exact => exact.clone(),
                    Queries::Rounded => rounded(q, scale(h), format, problem.head_dim),
                };
                let row = QueryRow {
                    problem,
                    sequence: b,
                    token: i,
                    head: h,
                };
                let kv = &kv[h / problem.heads_per_kv()];
                let (row, row_lse) = attend_row(&row, [&read, &exact], kv);
                out.extend(row);
                lse.push(row_lse);
            }
        }
    }
    (out, lse)
}

/// Outputs `[q_len, num_q_heads, head_dim.v]` and log-sum-exps `[q_len, num_q_heads]` in f64 for one sequence, over K and V that are given
/// as f32 `[kv_len, num_kv_heads, head_dim]`, each with its own head_dim, instead of a cache.
pub fn attend_rows(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let HeadDim { k: k_dim, v: v_dim } = problem.head_dim;
    let of_head = |x: &[f32], dim: usize, g: usize| {
        let rows = x.chunks_exact(dim).skip(g).step_by(problem.num_kv_heads);
        Stored::exact(rows.flatten().map(|x| f64::from(*x)).collect(), dim)
    };
    let kv: Vec<_> = (0..problem.num_kv_heads)
        .map(|g| [of_head(k, k_dim, g), of_head(v, v_dim, g)])
        .collect();
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (row, q) in q.chunks_exact(k_dim).enumerate() {
        let (i, h) = (row / problem.num_q_heads, row % problem.num_q_heads);
        let q: Vec<f64> = q.iter().map(|x| f64::from(*x)).collect();
        let row = QueryRow {
            problem,
            sequence: 0,
            token: i,
            head: h,
        };
        let (row, row_lse) = attend_row(&row, [&q, &q], &kv[h / problem.heads_per_kv()]);
        out.extend(row);
        lse.push(row_lse);
    }
    (out, lse)
}

/// A query of 8 bits, as the arithmetic's own functions round it, in the units it had, turned back where K is rotated by blocks.
fn rounded(q: &[f32], scale: f32, format: KvFormat, head_dim: HeadDim) -> Vec<f64> {
    let [rotated, _] = format.rotated_blocks(head_dim);
    let mut row: Vec<f32> = q.iter().map(|x| x * scale).collect();
    if let Some(block) = rotated {
        rotate_back(&mut row, block);
    }
    let parts = format.query_parts(head_dim);
    let steps = QueryParts::of(&row, parts);
    let units = [1.0, f64::from(steps.ratio)].map(|x| x * f64::from(steps.step) / f64::from(scale));
    let code = |(d, x): (usize, &f32)| {
        let part = parts.of_dim(d);
        f64::from(query_code(*x, steps.inverse[part])) * units[part]
    };
    let mut row: Vec<f64> = row.iter().enumerate().map(code).collect();
    if let Some(block) = rotated {
        rotate(&mut row, block, block.trailing_zeros() / 2);
    }
    row
}

/// Multiplies blocks of a row by the Hadamard matrix and by 2^-`halvings`.
fn rotate(row: &mut [f64], block: usize, halvings: u32) {
    let factor = f64::powi(0.5, halvings as i32);
    for block in row.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Attends a row to K and V of its KV head; its outputs and its log-sum-exp. The query meets keys as it is read, and their centres as it is.
fn attend_row(
    row: &QueryRow<'_>,
    [q, exact]: [&[f64]; 2],
    [k, v]: &[Stored; 2],
) -> (Vec<f64>, f64) {
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let own_tile = row.own_tile();
    let seen = (0..row.kv_len()).filter(|t| row.sees(*t));
    let scores: Vec<(usize, f64)> = seen
        .map(|t| {
            let dot = dot(q, k.row(t, own_tile)) + dot(exact, k.centre(t));
            (t, row.score(t, dot * f64::from(row.problem.score_scale())))
        })
        .collect();
    let weights = row.weigh(&scores);
    let mut out = vec![0.0; row.problem.head_dim.v];
    for (t, weight) in weights.of_tokens {
        let v = v.row(t, own_tile);
        out.iter_mut().zip(v).for_each(|(o, v)| *o += weight * v);
    }
    (out, weights.lse)
}

/// K or V of one KV head of a sequence as it reads back, `[t][d]`: without and with residuals.
struct Stored {
    coarse: Vec<f64>,
    fine: Vec<f64>,
    /// What the cache has taken off the rows of the first 64 tokens, and off those of all later ones.
    centres: [Vec<f64>; 2],
    dim: usize,
    /// Tiles that a row reads with residuals, beside the first; 0 for a scheme without residuals.
    window: usize,
}

impl Stored {
    /// Numbers that every row reads alike.
    fn exact(coarse: Vec<f64>, dim: usize) -> Self {
        Stored {
            fine: Vec::new(),
            centres: [const { Vec::new() }; 2],
            window: 0,
            coarse,
            dim,
        }
    }

    /// What was taken off token t.
    fn centre(&self, t: usize) -> &[f64] {
        &self.centres[usize::from(t >= 64)]
    }

    /// Token t as a row whose own tile is `own_tile` reads it.
    fn row(&self, t: usize, own_tile: f64) -> &[f64] {
        let is_fine = t < 64 || own_tile - ((t / 64) as f64) < self.window as f64;
        let rows = if is_fine && self.window > 0 {
            &self.fine
        } else {
            &self.coarse
        };
        &rows[t * self.dim..][..self.dim]
    }

    fn new(cache: &KvCache, b: usize, head: usize, side: Side) -> Self {
        let (config, table, layout) = (cache.config(), cache.table(), cache.layout());
        let store = cache
            .store()
            .as_any()
            .downcast_ref::<HostPages>()
            .expect("the oracle reads host pages");
        let scales = match side {
            Side::K => &config.k_tensor_scales,
            Side::V => &config.v_tensor_scales,
        };
        let scale = scales.get(head).copied().unwrap_or(1.0);
        let (part, residual) = (layout.part(side), layout.residual(side));
        let (pages, residuals) = (&table.pages[b], &table.residual_pages[b]);
        let mut stored = Stored::exact(Vec::new(), part.dim());
        stored.window = part.scheme.window().tiles();
        if let (Side::K, Some(centres)) = (side, store.centres(0, b, head)) {
            stored.centres = centres.map(|centre| {
                let mut centre: Vec<f64> = centre.iter().map(|x| x.to_f64()).collect();
                let block = block(stored.dim);
                rotate(&mut centre, block, block.trailing_zeros().div_ceil(2));
                centre
            });
        }
        for t in 0..table.lens[b] {
            let (page, slot) = (t / config.page_size, t % config.page_size);
            let run = store.run(0, pages[page], head);
            let mut coarse: Vec<f64> = (0..stored.dim)
                .map(|d| value(&part, run, slot, d, scale))
                .collect();
            // The residual pages of the first 64 tokens come first, then those of the last pages.
            let of_first = 64usize.div_ceil(config.page_size);
            let kept = match page < of_first {
                true => Some(page),
                false => (page + residuals.len())
                    .checked_sub(pages.len())
                    .filter(|kept| *kept >= of_first),
            };
            let mut fine = match (&residual, kept) {
                (Some(residual), Some(kept)) => {
                    let residuals = store.run(0, residuals[kept], head);
                    let value = |d| fine_value(&part, run, residual, residuals, slot, d);
                    (0..stored.dim).map(value).collect()
                }
                _ => coarse.clone(),
            };
            let blocks = config.format.rotated_blocks(layout.head_dim());
            if let Some(block) = blocks[side as usize] {
                let halvings = block.trailing_zeros().div_ceil(2);
                rotate(&mut coarse, block, halvings);
                rotate(&mut fine, block, halvings);
            }
            stored.coarse.extend(coarse);
            stored.fine.extend(fine);
        }
        stored
    }
}

/// The value of a code `(slot, d)` of a run; its shift is added in f64.
fn value(part: &Part, run: &[u8], slot: usize, d: usize, tensor_scale: f32) -> f64 {
    let param = part.load_param(run, slot, part.groups().of_dim(d));
    let unshifted = Param {
        shift: half::f16::ZERO,
        ..param
    };
    let code = part.load_code(run, slot, d);
    f64::from(quant::decode(part.scheme, code, unshifted, tensor_scale)) + param.shift.to_f64()
}

/// The value of a code `(slot, d)` with its residual.
fn fine_value(
    part: &Part,
    run: &[u8],
    residual: &Part,
    residuals: &[u8],
    slot: usize,
    d: usize,
) -> f64 {
    let param = part.load_param(run, slot, part.groups().of_dim(d));
    let codes = [
        part.load_code(run, slot, d),
        residual.load_code(residuals, slot, d),
    ];
    f64::from(quant::half_step_value(codes[0], codes[1], param.scale))
}
