//! The specification as a program: `docs/arithmetic.md`, one row at a time, scalar, one thread.
//!
//! Speed is no goal here. Not here: where codes and parameters lie ([`crate::reader`]).

use attn_core::{
    Int4Scale, Int8Scale, Problem, Scheme,
    arithmetic::{
        EXP2_MIN, LOG2_E, TILE, WEIGHT_MAX, exp2_float, exp2_weight, exp2i, exponent,
        plane_exponent, round_13, segment_tiles, shift_exponent, softcap, weight_units,
    },
    quant,
};

use crate::{
    reader::{Reader, Side},
    state::{State, merge_spans},
};

/// An integer row and its exponent: `x ≈ q15·2^-e`.
pub(crate) struct Plane {
    pub q15: Vec<i32>,
    pub e: i32,
}

/// Section 2: quantizes a row to 15 bits.
pub(crate) fn plane(x: &[f32]) -> Plane {
    let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    plane_at(x, plane_exponent(amax))
}

fn plane_at(x: &[f32], e: i32) -> Plane {
    let q15 = x
        .iter()
        .map(|v| (v * exp2i(e)).round_ties_even() as i32)
        .collect();
    Plane { q15, e }
}

/// Section 3, sealed `Int4 Channel`: the row's plane for this page, and the term of the (centred) shifts.
pub(crate) fn channel_plane(q: &[f32], scale: &[f32], shift: &[f32]) -> (Plane, f32) {
    let max = |x: &[f32]| x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let bound = (q.chunks(4).zip(scale.chunks(4)))
        .map(|(q, scale)| max(q) * max(scale))
        .fold(0.0, f32::max);
    let folded: Vec<f32> = q.iter().zip(scale).map(|(q, s)| q * s).collect();
    let (a, b) = (max(q), max(shift));
    let j = if a == 0.0 || b == 0.0 {
        0
    } else {
        (20 - exponent(a) - exponent(b)).clamp(-100, 100)
    };
    let y: i32 = q
        .iter()
        .zip(shift)
        .map(|(q, s)| ((q * s) * exp2i(j)).round_ties_even() as i32)
        .sum();
    (
        plane_at(&folded, plane_exponent(bound)),
        y as f32 * exp2i(-j),
    )
}

/// One query row of a problem.
pub(crate) struct QueryRow<'a> {
    pub problem: &'a Problem,
    pub sequence: usize,
    /// Query token.
    pub i: usize,
    pub q_head: usize,
    /// `q'` of section 2.
    pub q: Vec<f32>,
}

impl<'a> QueryRow<'a> {
    pub fn new(
        problem: &'a Problem,
        sequence: usize,
        i: usize,
        q_head: usize,
        q: &[f32],
        k_tensor_scale: f32,
    ) -> Self {
        let c = (problem.softmax_scale * LOG2_E) * k_tensor_scale;
        QueryRow {
            problem,
            sequence,
            i,
            q_head,
            q: q.iter().map(|x| x * c).collect(),
        }
    }

    /// Section 2, for K of `Int4 Channel`: 13 bits, so that products with a page's scales are exact.
    pub fn rounded(mut self) -> Self {
        self.q.iter_mut().for_each(|x| *x = round_13(*x));
        self
    }

    /// Soft cap and ALiBi on a base-2 score of token `t`.
    pub fn modify(&self, mut s: f32, t: usize) -> f32 {
        if let Some(cap) = self.problem.softcap {
            s = softcap(s, 2.0 / cap, cap * LOG2_E);
        }
        if let Some(slopes) = &self.problem.alibi_slopes {
            let position = self.problem.kv_lens[self.sequence] as i32 - self.problem.q_len as i32
                + self.i as i32;
            s += (slopes[self.q_head] * LOG2_E) * (t as i32 - position) as f32;
        }
        s
    }
}

/// Attends one row to its whole sequence; writes `out` and returns the log-sum-exp.
pub(crate) fn attend(
    row: &QueryRow<'_>,
    reader: &Reader<'_>,
    integer: bool,
    out: &mut [f32],
) -> f32 {
    let kv_len = row.problem.kv_lens[row.sequence];
    let seen = row.problem.visible(row.sequence, row.i);
    let segment_tokens = segment_tiles(kv_len) * TILE;
    let mut segments = Vec::new();
    for segment in (0..kv_len).step_by(segment_tokens) {
        let mut state = State::empty(row.q.len());
        for t0 in (segment..kv_len.min(segment + segment_tokens)).step_by(TILE) {
            let tile = t0..kv_len.min(t0 + TILE);
            let visible: Vec<bool> = tile.clone().map(|t| seen.contains(&t)).collect();
            if visible.contains(&true) {
                fold_tile(row, reader, integer, tile, &visible, &mut state);
            }
        }
        segments.push(state);
    }
    let state = merge_spans(segments).unwrap_or_else(|| State::empty(row.q.len()));
    let sink = row.problem.sinks.as_ref().map(|sinks| sinks[row.q_head]);
    state.epilogue(sink, reader.tensor_scales[1], out)
}

fn fold_tile(
    row: &QueryRow<'_>,
    reader: &Reader<'_>,
    integer: bool,
    tile: std::ops::Range<usize>,
    visible: &[bool],
    state: &mut State,
) {
    let scores: Vec<f32> = tile
        .clone()
        .zip(visible)
        .map(|(t, &seen)| match seen {
            true if integer => row.modify(integer_score(&row.q, reader, t), t),
            true => row.modify(float_score(&row.q, reader, t), t),
            false => f32::NEG_INFINITY,
        })
        .collect();
    let largest = scores
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
        .ceil();
    let m = if integer { largest - 1.0 } else { largest };
    let p: Vec<f32> = scores
        .iter()
        .zip(visible)
        .map(|(s, &seen)| match seen {
            true if integer => exp2_weight((largest - s).min(WEIGHT_MAX)),
            true => exp2_float((s - m).max(EXP2_MIN)),
            false => 0.0,
        })
        .collect();
    let l: i32 = p.iter().copied().map(weight_units).sum();
    let value = if integer {
        integer_values(&p, reader, tile, row.q.len())
    } else {
        float_values(&p, visible, reader, tile, row.q.len())
    };
    state.fold(m, l, &value);
}

/// The code as the integer that enters both products: int4 codes are centred.
fn signed(scheme: Scheme, code: u16) -> i32 {
    if matches!(scheme, Scheme::Int8(_)) {
        i32::from(code as u8 as i8)
    } else {
        i32::from(code) - 8
    }
}

/// Section 3: the base-2 score of one token, before soft cap and ALiBi.
fn integer_score(q: &[f32], reader: &Reader<'_>, t: usize) -> f32 {
    let scheme = reader.scheme(Side::K, t);
    let dot = |plane: &Plane, dims: std::ops::Range<usize>| -> i32 {
        dims.map(|d| plane.q15[d] * signed(scheme, reader.code(Side::K, t, d)))
            .sum()
    };
    if scheme == Scheme::Int4(Int4Scale::Channel) {
        let params: Vec<_> = (0..q.len()).map(|d| reader.param(Side::K, t, d)).collect();
        let scale: Vec<f32> = params.iter().map(|p| p.scale.to_f32()).collect();
        let shift: Vec<f32> = params.iter().map(|p| p.centred_shift()).collect();
        let (plane, y) = channel_plane(q, &scale, &shift);
        return dot(&plane, 0..q.len()) as f32 * exp2i(-plane.e) + y;
    }
    let plane = plane(q);
    let groups = scheme.groups(q.len());
    let len = q.len() / groups;
    let mut a = 0.0;
    for g in 0..groups {
        let dims = g * len..(g + 1) * len;
        let param = reader.param(Side::K, t, g);
        let s = dot(&plane, dims.clone()) as f32;
        let term = if scheme == Scheme::Int8(Int8Scale::Tensor) {
            s
        } else {
            s * param.scale.to_f32()
        };
        a = if g == 0 { term } else { a + term };
        if matches!(scheme, Scheme::Int4(_)) {
            let sum: i32 = plane.q15[dims].iter().sum();
            a += sum as f32 * param.centred_shift();
        }
    }
    a * exp2i(-plane.e)
}

/// Section 4: the tile's value from integer weights; `p` covers the tile's cached tokens.
fn integer_values(
    p: &[f32],
    reader: &Reader<'_>,
    tile: std::ops::Range<usize>,
    head_dim: usize,
) -> Vec<f32> {
    let scheme = reader.scheme(Side::V, tile.start);
    let groups = scheme.groups(head_dim);
    let len = head_dim / groups;
    let mut value = vec![0.0; head_dim];
    for g in 0..groups {
        let params: Vec<_> = tile.clone().map(|t| reader.param(Side::V, t, g)).collect();
        let scales: Vec<f32> = params.iter().map(|x| x.scale.to_f32()).collect();
        let largest = scales.iter().copied().fold(0.0f32, f32::max);
        let f = if largest == 0.0 {
            0
        } else {
            14 - exponent(largest)
        };
        let w16: Vec<i32> = p
            .iter()
            .zip(&scales)
            .map(|(p, s)| (p * (s * exp2i(f))).round_ties_even() as i32)
            .collect();
        let shift_term = match scheme {
            Scheme::Int4(_) => {
                let shifts: Vec<f32> = params.iter().map(|x| x.centred_shift()).collect();
                shift_term(p, &shifts)
            }
            _ => 0.0,
        };
        for d in g * len..(g + 1) * len {
            // Below 2^30 for finite scales; a trusted view may have others, and must not panic.
            let terms = tile.clone().zip(&w16);
            let sum = terms.fold(0i32, |sum, (t, w)| {
                let v = signed(scheme, reader.code(Side::V, t, d));
                sum.wrapping_add(w.wrapping_mul(v))
            });
            let t = sum as f32 * exp2i(-f);
            value[d] = if matches!(scheme, Scheme::Int4(_)) {
                t + shift_term
            } else {
                t
            };
        }
    }
    value
}

/// Section 4: `Σ p·shift`, an integer sum in two planes.
pub(crate) fn shift_term(p: &[f32], shifts: &[f32]) -> f32 {
    let h = shift_exponent(shifts.iter().fold(0.0f32, |a, s| a.max(s.abs())));
    let (mut hi, mut lo) = (0i32, 0i32);
    for (p, shift) in p.iter().zip(shifts) {
        let p14 = (weight_units(*p) + 128) >> 8;
        let sh = (shift * exp2i(h)).round_ties_even() as i32;
        hi += p14 * (sh >> 8);
        lo += p14 * (sh & 255);
    }
    (hi as f32 * 256.0 + lo as f32) * exp2i(-14 - h)
}

/// The dequantized element, without its per-tensor scale.
fn dequantized(reader: &Reader<'_>, side: Side, t: usize, d: usize, head_dim: usize) -> f32 {
    let scheme = reader.scheme(side, t);
    let g = if scheme == Scheme::Int4(Int4Scale::Channel) {
        d
    } else {
        d / (head_dim / scheme.groups(head_dim))
    };
    quant::decode(
        scheme,
        reader.code(side, t, d),
        reader.param(side, t, g),
        1.0,
    )
}

/// Section 7: the base-2 score of one token in f32.
fn float_score(q: &[f32], reader: &Reader<'_>, t: usize) -> f32 {
    let mut acc = [0.0f32; 16];
    for (d, x) in q.iter().enumerate() {
        acc[d % 16] += x * dequantized(reader, Side::K, t, d, q.len());
    }
    reduce(acc)
}

/// Section 7: sums halves.
pub(crate) fn reduce(mut acc: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            acc[j] += acc[j + half];
        }
    }
    acc[0]
}

/// Section 7: the tile's value in f32.
fn float_values(
    p: &[f32],
    visible: &[bool],
    reader: &Reader<'_>,
    tile: std::ops::Range<usize>,
    head_dim: usize,
) -> Vec<f32> {
    let mut value = vec![0.0; head_dim];
    for ((t, p), _) in tile.zip(p).zip(visible).filter(|(_, seen)| **seen) {
        for (d, value) in value.iter_mut().enumerate() {
            *value += p * dequantized(reader, Side::V, t, d, head_dim);
        }
    }
    value
}
