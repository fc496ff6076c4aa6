//! Attention in f64 over values as [`crate::pages`] reads them.
//!
//! In the integer arithmetic a query counts with its 8 bits, scores and V's scales lie on a grid, and an output may err by a step of each of its weights; a
//! row reads a rotated 4-bit cache as its own tile says (`docs/arithmetic.md`, sections 3 to 5).

use attn_conformance::oracle::QueryRow;
use attn_core::Problem;

use crate::pages::{self, Numbers, Side};

/// Half a 64th of an exponent of two, which a weight and a scale of V are off by on the grid.
const GRID_ERROR: f64 = 5.5e-3;

/// What a row answers, and how far another answer may be.
#[derive(Debug)]
pub struct Row {
    /// The outputs.
    pub out: Vec<f64>,
    /// The log-sum-exp.
    pub lse: f64,
    /// How far scores may be off, in natural units.
    pub score_bound: f64,
    /// How far the log-sum-exp may be off.
    pub lse_bound: f64,
    /// How far one output may be off, in the float arithmetic.
    pub element_bound: f64,
    /// How far the outputs may be off together, in the L2 norm.
    pub norm_bound: f64,
}

/// Attends every row of a problem; `integer` says by which arithmetic.
pub fn attend(problem: &Problem, integer: bool, q: &[f32], kv: &[[Side; 2]]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (b, (tokens, sides)) in problem.query_ranges().zip(kv).enumerate() {
        for i in 0..tokens.len() {
            for h in 0..problem.num_q_heads {
                let q_row = (tokens.start + i) * problem.num_q_heads + h;
                let q = &q[q_row * problem.head_dim.k..][..problem.head_dim.k];
                let row = QueryRow {
                    problem,
                    sequence: b,
                    token: i,
                    head: h,
                };
                let of = Attended { row, integer };
                rows.push(of.answer(q, sides));
            }
        }
    }
    rows
}

/// A query as a backend multiplies it with stored rows.
struct Query {
    x: Vec<f64>,
    /// What a step of rounding more or less could change, as a factor of the largest element of K.
    ties: f64,
}

impl Query {
    fn new(q: &[f32], k: &Side, integer: bool) -> Self {
        let mut x: Vec<f64> = q.iter().map(|x| f64::from(*x)).collect();
        if pages::is_rotated(k.scheme) {
            pages::turn_back(&mut x, k.block);
        }
        if !integer {
            return Query { x, ties: 0.0 };
        }
        // Each part has a step of its own; none is less than 2^-24 of the other's.
        let (first, second) = x.split_at(k.first_part.min(x.len()));
        let least = largest(&x) * 2f64.powi(-24);
        let parts = [first, second].map(|part| Query::part(part, largest(part).max(least) / 127.0));
        let ties = parts.iter().map(|part| part.ties).sum();
        Query {
            x: parts.into_iter().flat_map(|part| part.x).collect(),
            ties,
        }
    }

    fn part(x: &[f64], step: f64) -> Self {
        if step == 0.0 {
            return Query {
                x: x.to_vec(),
                ties: 0.0,
            };
        }
        // f32 errs by less than a 500th of a step: by 2^-16 of the largest element if 512 equal ones are summed.
        let is_tie = |x: &&f64| ((**x / step).fract().abs() - 0.5).abs() < 2e-3;
        let ties = x.iter().filter(is_tie).count() as f64 * step;
        let rounded = x.iter().map(|x| (x / step).round_ties_even() * step);
        Query {
            x: rounded.collect(),
            ties,
        }
    }
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |a, x| a.max(x.abs()))
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// A row, and the arithmetic that answers it.
struct Attended<'a> {
    row: QueryRow<'a>,
    integer: bool,
}

impl Attended<'_> {
    /// The numbers of token `t` that the row reads: a slice of one of [`Numbers`]' fields.
    fn token<'b>(&self, side: &'b Side, t: usize) -> (&'b Numbers, std::ops::Range<usize>) {
        let problem = self.row.problem;
        let head = self.row.head / (problem.num_q_heads / problem.num_kv_heads);
        let at = (t * problem.num_kv_heads + head) * side.dim;
        let own_tile = self.row.own_tile().max(0.0) as usize;
        let numbers = side.read_from(own_tile, t);
        (numbers, at..at + side.dim)
    }

    fn answer(&self, q: &[f32], [k, v]: &[Side; 2]) -> Row {
        let (row, problem) = (&self.row, self.row.problem);
        let query = Query::new(q, k, self.integer);
        let scale = f64::from(problem.score_scale());
        let (mut scores, mut size, mut key) = (Vec::new(), 0.0f64, 0.0f64);
        for t in 0..row.kv_len() {
            let (numbers, at) = self.token(k, t);
            let stored = &numbers.stored[at];
            key = key.max(largest(stored));
            let products = query.x.iter().zip(stored).map(|(q, k)| q * k * scale);
            let sum: f64 = products.clone().map(f64::abs).sum();
            size = size.max(sum);
            if row.sees(t) {
                size = size.max(sum + row.bias(t).abs());
                scores.push((t, row.score(t, products.sum())));
            }
        }
        let weights = row.weigh(&scores);
        // A sink's base-2 logit has steps as a score has; they show where its weight does.
        let most = scores.iter().map(|(_, score)| *score).chain(row.sink());
        let max = most.fold(f64::NEG_INFINITY, f64::max);
        let shown = row.sink().filter(|sink| max - sink < 100.0);
        size = shown.map_or(size, |sink| size.max(sink.abs()));
        // As large as the products of any element of the query and any of K could be.
        let most = largest(&query.x) * key * k.dim as f64 * scale;
        let score_bound = size * 4e-6
            + most * 2f64.powi(-21)
            + query.ties * key * scale
            + problem.scores.softcap.map_or(0.0, f64::from) * 1e-6;
        // Half a step of the grid is 2^-7 in base 2, and f16 rounds a weight by 2^-11 of itself, or by 2^-25, of a sum of at least 2^-7.
        let weight_bound = match self.integer {
            true => GRID_ERROR + 2f64.powi(-11) + scores.len() as f64 * 2f64.powi(-18),
            false => 1e-5,
        };
        let mut out = vec![0.0; v.dim];
        let (mut value, mut centred) = ([0.0f64; 2], 0.0f64);
        for &(t, weight) in &weights.of_tokens {
            let (numbers, at) = self.token(v, t);
            let values = &numbers.stored[at.clone()];
            value = [value[0].max(largest(values)), value[1].max(norm(values))];
            centred = centred.max(norm(&numbers.centred[at.clone()]));
            let products = out.iter_mut().zip(values);
            products.for_each(|(o, v)| *o += weight * v);
        }
        // Rotated rows are turned back: an element is a sum of a block's, and a norm is kept, or halved by the root of two.
        if pages::is_rotated(v.scheme) {
            pages::turn_back(&mut out, v.block);
            value[0] *= (v.block as f64).sqrt();
        }
        let bound = score_bound + weight_bound;
        // Codes count with their scale as it is read.
        let steps = match self.integer {
            true => self.weight_steps(v, &weights.of_tokens) + GRID_ERROR * centred,
            false => 0.0,
        };
        Row {
            out,
            lse: weights.lse,
            score_bound,
            lse_bound: bound + weights.lse.abs() * 1e-6,
            element_bound: 3.0 * bound * value[0] + 1e-35,
            norm_bound: steps + 3.0 * bound * value[1] + 1e-35,
        }
    }

    /// How far weights of one byte may move the sum of weights times values, in the L2 norm: each by less than a step of its tile.
    ///
    /// Steps of many tokens add like noise, of which this is eight standard deviations: a step is as often too much as too little.
    fn weight_steps(&self, v: &Side, weights: &[(usize, f64)]) -> f64 {
        let groups = v.scheme.groups(v.dim).count();
        let len = v.dim / groups;
        let mut squares = 0.0;
        for g in 0..groups {
            let (mut most, mut square) = (0.0, 0.0);
            for tile in weights.chunk_by(|a, b| a.0 / 64 == b.0 / 64) {
                // Each token's weight times its scale, and its codes' norm, in units of the scale.
                let tokens = tile.iter().map(|&(t, weight)| {
                    let (numbers, at) = self.token(v, t);
                    let at = at.start + g * len..at.start + (g + 1) * len;
                    let step = numbers.steps[at.start];
                    let codes = if step == 0.0 {
                        0.0
                    } else {
                        norm(&numbers.centred[at]) / step
                    };
                    (weight * step, codes)
                });
                let tokens: Vec<(f64, f64)> = tokens.collect();
                // κ is a 255th of the largest weight with its scale, both on the grid, rounded up to two significant bits at least.
                let largest = tokens.iter().fold(0.0f64, |a, (x, _)| a.max(*x));
                let step = largest * (1.0 + 2.0 * GRID_ERROR) * 1.5 / 255.0;
                most += tokens.iter().map(|(_, codes)| step * codes).sum::<f64>();
                square += tokens
                    .iter()
                    .map(|(_, codes)| (step * codes).powi(2))
                    .sum::<f64>();
            }
            squares += most.min(4.0 * f64::sqrt(square)).powi(2);
        }
        squares.sqrt()
    }
}

/// Compares an answer of the CPU with that of f64; `integer` says which arithmetic it took.
///
/// # Errors
/// The first output beyond its bound.
pub fn compare(
    problem: &Problem,
    integer: bool,
    got: &[Vec<f32>; 2],
    want: &[Row],
) -> Result<(), String> {
    for (i, (lse, row)) in got[1].iter().zip(want).enumerate() {
        let out = &got[0][i * problem.head_dim.v..][..problem.head_dim.v];
        if row.lse == f64::NEG_INFINITY {
            let zero = out.iter().all(|x| x.to_bits() == 0);
            crate::hold!(
                *lse == f32::NEG_INFINITY && zero,
                "row {i} sees nothing, but has lse {lse}; {problem:?}"
            );
            continue;
        }
        if row.score_bound > 0.5 {
            // The weights may be any.
            continue;
        }
        let error = (f64::from(*lse) - row.lse).abs();
        crate::hold!(
            error <= row.lse_bound,
            "lse of row {i} is {lse}, not {} (off by {error:e}, bound {:e}); {problem:?}",
            row.lse,
            row.lse_bound
        );
        let errors: Vec<f64> = out
            .iter()
            .zip(&row.out)
            .map(|(x, exact)| f64::from(*x) - exact)
            .collect();
        let (error, bound) = match integer {
            true => (norm(&errors), row.norm_bound),
            false => (largest(&errors), row.element_bound),
        };
        crate::hold!(
            error <= bound,
            "row {i} is off by {error:e} {}, bound {bound:e}: {out:?}, not {:?}; {problem:?}",
            if integer { "in the L2 norm" } else { "at most" },
            row.out
        );
    }
    Ok(())
}
