//! Attention in f64 over values as [`crate::pages`] reads them.

use attn_core::Problem;

/// One sequence's K and V as `[token][head][dim]`.
pub type KvOf<'a> = [&'a [f64]; 2];

/// An answer in f64, and how large its terms were.
#[derive(Debug, Default)]
pub struct Answer {
    /// `[batch, q_len, num_q_heads, head_dim]`.
    pub out: Vec<f64>,
    /// `[batch, q_len, num_q_heads]`.
    pub lse: Vec<f64>,
    /// For each row, the largest sum of magnitudes of a score's products, in natural units and after scaling.
    pub score: Vec<f64>,
    /// For each row, the sum of a score's products as large as any query element and any element of K could make them.
    pub plane: Vec<f64>,
    /// For each row, the largest magnitude in V.
    pub value: Vec<f64>,
}

/// Attends every row of a problem.
pub fn attend(problem: &Problem, q: &[f32], kv: &[KvOf<'_>]) -> Answer {
    let mut answer = Answer::default();
    let dim = problem.head_dim;
    for (b, kv) in kv.iter().enumerate().take(problem.kv_lens.len()) {
        for i in 0..problem.q_len {
            for h in 0..problem.num_q_heads {
                let at = ((b * problem.q_len + i) * problem.num_q_heads + h) * dim;
                row(problem, [b, i, h], &q[at..at + dim], *kv, &mut answer);
            }
        }
    }
    answer
}

fn row(problem: &Problem, [b, i, h]: [usize; 3], q: &[f32], [k, v]: KvOf<'_>, answer: &mut Answer) {
    let dim = problem.head_dim;
    let head = h / (problem.num_q_heads / problem.num_kv_heads);
    let position = problem.kv_lens[b] as f64 - problem.q_len as f64 + i as f64;
    let (mut seen, mut largest, mut value) = (Vec::new(), 0.0f64, 0.0f64);
    let mut key = 0.0f64;
    for t in 0..problem.kv_lens[b] {
        let at = (t * problem.num_kv_heads + head) * dim;
        // Values of tokens that are not seen still enter a tile's exponents.
        value = v[at..at + dim].iter().fold(value, |a, x| a.max(x.abs()));
        key = k[at..at + dim].iter().fold(key, |a, x| a.max(x.abs()));
        let before = position - t as f64;
        let in_window = problem.window_left.is_none_or(|w| before <= w as f64);
        let products = q.iter().zip(&k[at..at + dim]);
        let products = products.map(|(q, k)| f64::from(*q) * k * f64::from(problem.softmax_scale));
        let size: f64 = products.clone().map(f64::abs).sum();
        largest = largest.max(size);
        if (problem.causal && before < 0.0) || !in_window {
            continue;
        }
        let mut s: f64 = products.sum();
        if let Some(cap) = problem.softcap {
            s = f64::from(cap) * (s / f64::from(cap)).tanh();
        }
        if let Some(slopes) = &problem.alibi_slopes {
            let bias = f64::from(slopes[h]) * -before;
            largest = largest.max(size + bias.abs());
            s += bias;
        }
        seen.push((at, s));
    }
    let sink = problem.sinks.as_ref().map(|sinks| f64::from(sinks[h]));
    let logits = || seen.iter().map(|(_, s)| *s).chain(sink);
    let max = logits().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits().map(|s| (s - max).exp()).sum();
    // A sink's base-2 logit has steps as a score has; they show where its weight does.
    let shown = sink.filter(|sink| max - sink < 100.0);
    largest = shown.map_or(largest, |sink| largest.max(sink.abs()));
    let mut out = vec![0.0; dim];
    for (at, s) in &seen {
        let weight = (s - max).exp() / sum;
        let values = &v[*at..*at + dim];
        out.iter_mut()
            .zip(values)
            .for_each(|(o, v)| *o += weight * v);
    }
    answer.out.extend(out);
    answer
        .lse
        .push(if sum == 0.0 { max } else { max + sum.ln() });
    answer.score.push(largest);
    answer.value.push(value);
    let query = q.iter().fold(0.0, |a: f64, x| a.max(f64::from(x.abs())));
    let scale = f64::from(problem.softmax_scale);
    answer.plane.push(query * key * dim as f64 * scale);
}

/// Compares an answer of the CPU with that of f64; `integer` says which arithmetic it took.
///
/// In integers a query has 15 bits below its largest element (a page of channels wastes up to a bit or two), so a score errs by
/// that part of the largest sum that the query and the keys could make. In f32 it errs by 2^-22 of its terms' sum; a soft cap's form loses cap·2^-23 of a score. The weights' polynomial errs by 7.5e-5, codes
/// of weights by 2^-16. Outputs err by the weights' error, of the largest value.
///
/// # Errors
/// The first output beyond its bound.
pub fn compare(
    problem: &Problem,
    integer: bool,
    got: &[Vec<f32>; 2],
    want: &Answer,
) -> Result<(), String> {
    for (row, (lse, exact)) in got[1].iter().zip(&want.lse).enumerate() {
        let out = &got[0][row * problem.head_dim..][..problem.head_dim];
        if *exact == f64::NEG_INFINITY {
            let zero = out.iter().all(|x| x.to_bits() == 0);
            crate::hold!(
                *lse == f32::NEG_INFINITY && zero,
                "row {row} sees nothing, but has lse {lse}; {problem:?}"
            );
            continue;
        }
        let size = want.score[row];
        let cap = problem.softcap.map_or(0.0, f64::from);
        let bound = if integer {
            1e-3 + size * 1e-4 + want.plane[row] / 8192.0
        } else {
            1e-5 + size * 4e-6
        } + cap * 1e-6;
        if bound > 0.5 {
            // The weights may be any.
            continue;
        }
        let error = (f64::from(*lse) - exact).abs();
        crate::hold!(
            error <= bound + exact.abs() * 1e-6,
            "lse of row {row} is {lse}, not {exact} (off by {error:e}, bound {bound:e}, sums {size} and {}); {problem:?}",
            want.plane[row]
        );
        let bound = 3.0 * bound * want.value[row] + 1e-37;
        for (d, (x, exact)) in out
            .iter()
            .zip(&want.out[row * problem.head_dim..])
            .enumerate()
        {
            let error = (f64::from(*x) - exact).abs();
            crate::hold!(
                error <= bound,
                "row {row}, dim {d} is {x}, not {exact} (off by {error:e}, bound {bound:e}); {problem:?}"
            );
        }
    }
    Ok(())
}
