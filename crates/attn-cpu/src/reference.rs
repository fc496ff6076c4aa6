//! The specification as a program: `docs/arithmetic.md`, one row at a time, scalar, one thread.
//!
//! Speed is no goal here. Not here: where codes and parameters lie ([`crate::reader`]), and how they enter the products ([`crate::stored`]).

use std::ops::Range;

use attn_core::{
    Int8Scale, Problem, Scheme,
    arithmetic::{
        EXP2_MIN, LOG2_E, QueryParts, SEGMENT, TILE, exp2_float, exp2i, query_code, shift_sum,
        softcap, weight_units,
    },
    centres::{CENTRES, centre_of, score_base},
    grid, quant,
    rotation::rotate_back,
    row_state::{self, RowEnd},
};

use crate::{
    reader::{Reader, Side},
    state::{State, merged, spans},
    stored::Stored,
};

/// One query row of a problem.
pub(crate) struct QueryRow<'a> {
    pub problem: &'a Problem,
    pub sequence: usize,
    /// Query token.
    pub i: usize,
    pub q_head: usize,
    /// `q'` of section 3.
    pub q: Vec<f32>,
    /// `q8` of section 3.
    codes: Vec<i32>,
    /// `σ`.
    step: f32,
    /// `ρ`; 1 where rows have no parts.
    ratio: f32,
    /// What scores are added to on the grid, in the first tile and in all later ones (section 12).
    bases: [f32; CENTRES],
}

impl<'a> QueryRow<'a> {
    /// Sections 2 and 3: a query of `q_head` of query token `i`, scaled, rotated where K is, and in 8 bits.
    pub fn new(
        problem: &'a Problem,
        [sequence, i, q_head]: [usize; 3],
        q: &[f32],
        reader: &Reader<'_>,
    ) -> Self {
        let c = (problem.score_scale() * LOG2_E) * reader.tensor_scales[0];
        let mut q: Vec<f32> = q.iter().map(|x| x * c).collect();
        if let [Some(block), _] = reader.format().rotated_blocks(problem.head_dim) {
            rotate_back(&mut q, block);
        }
        let parts = reader.format().query_parts(problem.head_dim);
        let steps = QueryParts::of(&q, parts);
        let code = |(d, x): (usize, &f32)| query_code(*x, steps.inverse[parts.of_dim(d)]);
        QueryRow {
            problem,
            sequence,
            i,
            q_head,
            codes: q.iter().enumerate().map(code).collect(),
            step: steps.step,
            ratio: steps.ratio,
            bases: match reader.centres {
                Some(centres) => centres.map(|centre| score_base(&q, centre)),
                None => [grid::SCORE_BASE; CENTRES],
            },
            q,
        }
    }

    /// Elements of a value.
    fn v_dim(&self) -> usize {
        self.problem.head_dim.v
    }

    /// The row's position; that of the last query token where the problem is not causal.
    fn position(&self) -> i32 {
        let p = self.problem;
        let last = p.q_lens[self.sequence] - 1;
        let i = if p.scores.causal { self.i } else { last };
        p.position(self.sequence, i) as i32
    }

    /// Section 4: whether the row reads token `t` with residuals.
    fn is_fine(&self, scheme: Scheme, t: usize) -> bool {
        let tile = (self.position().max(0) as usize) / TILE;
        scheme.reads_fine(t / TILE, tile, self.problem.before(self.sequence))
    }

    /// Soft cap and ALiBi on a base-2 score of token `t`.
    pub fn modify(&self, mut s: f32, t: usize) -> f32 {
        if let Some(cap) = self.problem.scores.softcap {
            s = softcap(s, 2.0 / cap, cap * LOG2_E);
        }
        if let Some(slopes) = &self.problem.scores.alibi_slopes {
            let position = self.problem.position(self.sequence, self.i) as i32;
            s += (slopes[self.q_head] * LOG2_E) * (t as i32 - position) as f32;
        }
        s
    }
}

/// Attends one row to its whole sequence; writes `out` and returns the log-sum-exp.
pub(crate) fn attend(
    row: &QueryRow<'_>,
    stored: &Stored<'_>,
    integer: bool,
    out: &mut [f32],
) -> f32 {
    let spans = attend_spans(row, stored, integer);
    let State { m, l, o } = spans
        .reduce(merged)
        .unwrap_or_else(|| State::empty(row.v_dim()));
    let end = RowEnd {
        sink: row
            .problem
            .scores
            .sinks
            .as_ref()
            .map(|sinks| sinks[row.q_head]),
        v_tensor_scale: stored.reader.tensor_scales[1],
        rotated: stored.reader.format().rotated_blocks(row.problem.head_dim)[1],
    };
    out.copy_from_slice(&o);
    row_state::finish([m, l], out, end)
}

/// The states of one row's spans.
pub(crate) fn attend_spans(
    row: &QueryRow<'_>,
    stored: &Stored<'_>,
    integer: bool,
) -> impl Iterator<Item = State> {
    let kv_len = row.problem.kv_lens[row.sequence];
    let seen = row.problem.visible(row.sequence, row.i);
    let segment_tokens = SEGMENT * TILE;
    let mut segments = Vec::new();
    for segment in (0..kv_len).step_by(segment_tokens) {
        let mut state = State::empty(row.v_dim());
        for t0 in (segment..kv_len.min(segment + segment_tokens)).step_by(TILE) {
            let tile = t0..kv_len.min(t0 + TILE);
            let visible: Vec<bool> = tile.clone().map(|t| seen.contains(&t)).collect();
            if visible.contains(&true) {
                fold_tile(row, stored, integer, tile, &visible, &mut state);
            }
        }
        segments.push(state);
    }
    spans(segments)
}

fn fold_tile(
    row: &QueryRow<'_>,
    stored: &Stored<'_>,
    integer: bool,
    tile: Range<usize>,
    visible: &[bool],
    state: &mut State,
) {
    let (m, l, value) = if integer {
        integer_tile(row, stored, tile, visible)
    } else {
        float_tile(row, stored, tile, visible)
    };
    state.fold(m, l, &value);
}

/// Sections 4 and 5: the value `(m, l, T)` of a tile of which the row sees some tokens.
fn integer_tile(
    row: &QueryRow<'_>,
    stored: &Stored<'_>,
    tile: Range<usize>,
    visible: &[bool],
) -> (f32, f32, Vec<f32>) {
    let seen = || tile.clone().zip(visible).filter(|(_, seen)| **seen);
    let terms = seen().map(|(t, _)| integer_score(row, stored, t));
    let base = row.bases[centre_of(tile.start)];
    let of_centre = base - grid::SCORE_BASE;
    let (scores, step, base): (Vec<f32>, f32, f32) = if row.problem.scores.changes_scores() {
        let tokens = seen().map(|(t, _)| t);
        let modified = terms
            .zip(tokens)
            .map(|(a, t)| row.modify(a * row.step + of_centre, t));
        (modified.collect(), 1.0, grid::SCORE_BASE)
    } else {
        (terms.collect(), row.step, base)
    };
    let of_centre = base - grid::SCORE_BASE;
    let max = |y: &[f32]| y.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut y: Vec<f32> = scores
        .iter()
        .map(|a| grid::grid_score(*a, step, base))
        .collect();
    let mut ceil = grid::grid_ceil(max(&y));
    let mut exponent = ceil - grid::SCORE_BASE;
    if !grid::is_near(max(&y)) {
        let s: Vec<f32> = scores.iter().map(|a| a * step + of_centre).collect();
        let largest = max(&s).ceil();
        let from_largest = |s: &f32| grid::SCORE_BASE + (s - largest).max(-65536.0);
        y = s.iter().map(from_largest).collect();
        (ceil, exponent) = (grid::SCORE_BASE, largest);
    }
    let mut y = y.into_iter();
    let points: Vec<Option<i32>> = visible
        .iter()
        .map(|seen| seen.then(|| grid::weight_point(y.next().expect("a score each"), ceil)))
        .collect();
    let l: i32 = points
        .iter()
        .flatten()
        .copied()
        .map(grid::weight_units)
        .sum();
    let value = integer_values(row, &points, stored, tile);
    (exponent + grid::WEIGHT_SHIFT, l as f32 * exp2i(-24), value)
}

/// Section 8: the value `(m, l, T)` of a tile of which the row sees some tokens.
fn float_tile(
    row: &QueryRow<'_>,
    stored: &Stored<'_>,
    tile: Range<usize>,
    visible: &[bool],
) -> (f32, f32, Vec<f32>) {
    let scores: Vec<Option<f32>> = tile
        .clone()
        .zip(visible)
        .map(|(t, seen)| seen.then(|| row.modify(float_score(row, stored, t), t)))
        .collect();
    let seen = scores.iter().flatten().copied();
    let m = seen.fold(f32::NEG_INFINITY, f32::max).ceil();
    let weight = |s: &Option<f32>| s.map_or(0.0, |s| exp2_float((s - m).max(EXP2_MIN)));
    let p: Vec<f32> = scores.iter().map(weight).collect();
    let l: i32 = p.iter().copied().map(weight_units).sum();
    let value = float_values(row, &p, visible, stored, tile);
    (m, l as f32 * exp2i(-22), value)
}

/// The middle of half steps, in halves of a residual's step: of all 256 codes, or of the 16 that have no residual.
fn middle(fine: bool) -> i32 {
    if fine { 255 } else { 240 }
}

/// Section 4: the score of one token before its multiplication by the row's step.
fn integer_score(row: &QueryRow<'_>, stored: &Stored<'_>, t: usize) -> f32 {
    let scheme = stored.reader.scheme(Side::K);
    let fine = row.is_fine(scheme, t);
    let codes = stored.signed(Side::K, t, fine);
    let mut a = 0.0;
    let params = stored.params(Side::K, t).iter();
    for (g, (param, dims)) in params.zip(stored.groups(Side::K).ranges()).enumerate() {
        let scale = param.scale.to_f32();
        let (q, codes) = (&row.codes[dims.clone()], &codes[dims]);
        let query: i32 = q.iter().sum();
        let s: i32 = q.iter().zip(codes).map(|(q, code)| q * code).sum();
        let term = match scheme {
            Scheme::Int8(Int8Scale::Tensor) => s as f32,
            Scheme::Int4(_) => s as f32 * scale + query as f32 * param.centred_shift(),
            Scheme::RotatedInt4 { .. } => (2 * s - middle(fine) * query) as f32 * (scale / 16.0),
            _ => s as f32 * scale,
        };
        a = if g == 0 { term } else { a + term * row.ratio };
    }
    a
}

/// Section 5: the tile's value from weights of one byte; `points` are those of the tile's cached tokens, none of tokens that are not seen.
fn integer_values(
    row: &QueryRow<'_>,
    points: &[Option<i32>],
    stored: &Stored<'_>,
    tile: Range<usize>,
) -> Vec<f32> {
    let (scheme, dim) = (stored.reader.scheme(Side::V), row.v_dim());
    let fine = row.is_fine(scheme, tile.start);
    let half_steps = matches!(scheme, Scheme::RotatedInt4 { .. });
    let bits = if half_steps && fine { 2 } else { 3 };
    let len = stored.groups(Side::V).dims();
    let mut value = vec![0.0; dim];
    for (g, value) in value.chunks_exact_mut(len).enumerate() {
        let param = |t| stored.params(Side::V, t)[g];
        let params: Vec<_> = tile.clone().map(param).collect();
        let scaled = |(point, param): (&Option<i32>, &quant::Param)| {
            let scale = match scheme {
                Scheme::Int8(Int8Scale::Tensor) => 0,
                // A sixteenth of the scale.
                Scheme::RotatedInt4 { .. } => grid::scale_point(param.scale)? - 4 * grid::GRID,
                _ => grid::scale_point(param.scale)?,
            };
            Some((*point)? + scale)
        };
        let scaled: Vec<Option<i32>> = points.iter().zip(&params).map(scaled).collect();
        let largest = scaled.iter().flatten().copied().max();
        let [step, inverse] = grid::weight_step(largest.unwrap_or(i32::MIN), bits);
        let w8: Vec<i32> = tile
            .clone()
            .zip(&scaled)
            .map(|(t, point)| point.map_or(0, |point| grid::weight_byte(point, inverse, t)))
            .map(i32::from)
            .collect();
        let weights: i32 = w8.iter().sum();
        let shifts = match scheme {
            Scheme::Int4(_) => shift_sum(points.iter().zip(&params).map(|(point, param)| {
                let units = point.map_or(0, grid::weight_units);
                units as f32 * exp2i(-24) * param.centred_shift()
            })),
            _ => 0.0,
        };
        let mut sums = vec![0; len];
        for (t, w) in tile.clone().zip(&w8) {
            let codes = &stored.signed(Side::V, t, fine)[g * len..];
            sums.iter_mut()
                .zip(codes)
                .for_each(|(n, code)| *n += w * code);
        }
        for (value, mut n) in value.iter_mut().zip(sums) {
            if half_steps {
                n = 2 * n - middle(fine) * weights;
            }
            *value = n as f32 * step;
            if matches!(scheme, Scheme::Int4(_)) {
                *value += shifts;
            }
        }
    }
    value
}

/// Section 8: the base-2 score of one token in f32.
fn float_score(row: &QueryRow<'_>, stored: &Stored<'_>, t: usize) -> f32 {
    let fine = row.is_fine(stored.reader.scheme(Side::K), t);
    let mut acc = [0.0f32; 16];
    for (d, (x, k)) in row
        .q
        .iter()
        .zip(stored.dequantized(Side::K, t, fine))
        .enumerate()
    {
        acc[d % 16] += x * k;
    }
    reduce(acc)
}

/// Section 8: sums halves.
pub(crate) fn reduce(mut acc: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            acc[j] += acc[j + half];
        }
    }
    acc[0]
}

/// Section 8: the tile's value in f32.
fn float_values(
    row: &QueryRow<'_>,
    p: &[f32],
    visible: &[bool],
    stored: &Stored<'_>,
    tile: Range<usize>,
) -> Vec<f32> {
    let mut value = vec![0.0; row.v_dim()];
    for ((t, p), _) in tile.zip(p).zip(visible).filter(|(_, seen)| **seen) {
        let fine = row.is_fine(stored.reader.scheme(Side::V), t);
        let elements = stored.dequantized(Side::V, t, fine);
        value
            .iter_mut()
            .zip(elements)
            .for_each(|(value, v)| *value += p * v);
    }
    value
}
