//! The SIMD path: a tile is unpacked once for all query rows of its KV head, and rows run over contiguous vectors.
//!
//! The sums are those of [`crate::reference`]; integer sums are free in their order, float ones keep it. Segments go to
//! rayon's threads and come back in order, so the number of threads changes nothing.

use std::ops::Range;

use attn_core::{
    DecodeStep, Int4Scale, Int8Scale, Scheme,
    arithmetic::{EXP2_MIN, TILE, exp2_float, exp2_weight, exp2i, exponent, segment_tiles},
    quant::{self, Param},
};
use rayon::prelude::*;
use wide::{f32x8, i16x16, i32x8};

use crate::{
    reader::{Reader, Side},
    reference::{Plane, Row, channel_plane, plane, reduce, shift_term},
    state::{State, merge_spans},
};

/// All query rows of one KV head: outputs `[q_len · heads_per_kv, head_dim]` and log-sum-exps.
pub(crate) fn attend_head(
    step: &DecodeStep<'_>,
    reader: &Reader<'_>,
    b: usize,
    g: usize,
) -> (Vec<f32>, Vec<f32>) {
    let problem = &step.plan().problem;
    let (dim, per, kv_len) = (problem.head_dim, problem.heads_per_kv(), problem.kv_lens[b]);
    let integer = step.plan().format.is_integer();
    let rows: Vec<RowPlan<'_>> = (0..problem.q_len * per)
        .map(|r| {
            let (i, q_head) = (r / per, g * per + r % per);
            let at = ((b * problem.q_len + i) * problem.num_q_heads + q_head) * dim;
            let row = Row::new(
                problem,
                b,
                i,
                q_head,
                &step.q()[at..at + dim],
                reader.tensor_scales[0],
            );
            let plane = IntRow::new(&plane(&row.q), 0.0);
            RowPlan {
                seen: problem.visible(b, i),
                row,
                plane,
            }
        })
        .collect();
    let seen = rows.iter().map(|r| r.seen.start).min().unwrap_or(0)
        ..rows.iter().map(|r| r.seen.end).max().unwrap_or(0);
    let segment_tokens = segment_tiles(kv_len) * TILE;
    let segments: Vec<Vec<State>> = (0..kv_len.div_ceil(segment_tokens))
        .into_par_iter()
        .map(|segment| {
            let tokens = segment * segment_tokens..kv_len.min((segment + 1) * segment_tokens);
            let mut states = vec![State::empty(dim); rows.len()];
            let mut tile = Tile::new(dim);
            for t0 in tokens.clone().step_by(TILE) {
                let span = t0..kv_len.min(t0 + TILE);
                if span.start < seen.end && seen.start < span.end {
                    tile.fold(&rows, reader, integer, span, &mut states);
                }
            }
            states
        })
        .collect();
    let (mut out, mut lse) = (vec![0.0; rows.len() * dim], vec![0.0; rows.len()]);
    let mut columns: Vec<Vec<State>> = rows
        .iter()
        .map(|_| Vec::with_capacity(segments.len()))
        .collect();
    for states in segments {
        columns
            .iter_mut()
            .zip(states)
            .for_each(|(column, state)| column.push(state));
    }
    for ((column, out), lse) in columns
        .into_iter()
        .zip(out.chunks_exact_mut(dim))
        .zip(&mut lse)
    {
        let state = merge_spans(column).unwrap_or_else(|| State::empty(dim));
        *lse = state.finish(reader.tensor_scales[1], out);
    }
    (out, lse)
}

struct RowPlan<'a> {
    row: Row<'a>,
    seen: Range<usize>,
    plane: IntRow,
}

/// A row's integers as 16-bit lanes.
struct IntRow {
    q15: Vec<i16>,
    scale: f32,
    /// Added to every score: the shifts of a sealed `Int4 Channel` page.
    offset: f32,
}

impl IntRow {
    fn new(plane: &Plane, offset: f32) -> Self {
        IntRow {
            q15: plane.q15.iter().map(|&x| x as i16).collect(),
            scale: exp2i(-plane.e),
            offset,
        }
    }
}

/// Exact dot product of 16-bit integers whose length is a multiple of 16.
fn dot(a: &[i16], b: &[i16]) -> i32 {
    let mut acc = i32x8::ZERO;
    for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
        let lanes = |x: &[i16]| i16x16::from(<[i16; 16]>::try_from(x).expect("chunks of 16"));
        acc += lanes(a).dot(lanes(b));
    }
    acc.to_array().iter().sum()
}

/// One tile, unpacked: everything that does not depend on the query row.
struct Tile {
    dim: usize,
    codes: Vec<u16>,
    /// K codes `[t][d]`.
    k_int: Vec<i16>,
    /// V codes `[d][t]`.
    v_int: Vec<i16>,
    k_params: Vec<Param>,
    v_params: Vec<Param>,
    k_float: Vec<f32>,
    v_float: Vec<f32>,
    /// Per V group: exponent f, then scales·2^f and shifts `[g][t]`.
    v_exponents: Vec<i32>,
    v_scales: Vec<f32>,
    v_shifts: Vec<f32>,
    value: Vec<f32>,
}

fn as_integer(scheme: Scheme, code: u16) -> i16 {
    if matches!(scheme, Scheme::Int8(_)) {
        i16::from(code as u8 as i8)
    } else {
        code as i16 - 8
    }
}

impl Tile {
    fn new(dim: usize) -> Self {
        Tile {
            dim,
            codes: vec![0; TILE * dim],
            k_int: vec![0; TILE * dim],
            v_int: vec![0; TILE * dim],
            k_params: Vec::new(),
            v_params: Vec::new(),
            k_float: vec![0.0; TILE * dim],
            v_float: vec![0.0; TILE * dim],
            v_exponents: Vec::new(),
            v_scales: Vec::new(),
            v_shifts: Vec::new(),
            value: vec![0.0; dim],
        }
    }

    fn fold(
        &mut self,
        rows: &[RowPlan<'_>],
        reader: &Reader<'_>,
        integer: bool,
        span: Range<usize>,
        states: &mut [State],
    ) {
        self.load(reader, Side::K, integer, &span);
        self.load(reader, Side::V, integer, &span);
        let channel = integer && reader.is_channel(span.start);
        let (scale, shift): (Vec<f32>, Vec<f32>) = if channel {
            self.k_params
                .iter()
                .map(|p| (p.scale.to_f32(), p.centred_shift()))
                .unzip()
        } else {
            Default::default()
        };
        for (plan, state) in rows.iter().zip(states) {
            let seen = plan.seen.start.max(span.start)..plan.seen.end.min(span.end);
            if seen.is_empty() {
                continue;
            }
            let scheme = reader.scheme(Side::K, span.start);
            let mut scores = [f32::NEG_INFINITY; TILE];
            if channel {
                let (plane, y) = channel_plane(&plan.row.q, &scale, &shift);
                self.integer_scores(&IntRow::new(&plane, y), scheme, &span, &seen, &mut scores);
            } else if integer {
                self.integer_scores(&plan.plane, scheme, &span, &seen, &mut scores);
            } else {
                self.float_scores(&plan.row.q, &span, &seen, &mut scores);
            }
            if plan.row.problem.softcap.is_some() || plan.row.problem.alibi_slopes.is_some() {
                for t in seen.clone() {
                    scores[t - span.start] = plan.row.modify(scores[t - span.start], t);
                }
            }
            let (m, l, p) = weights(
                &scores,
                integer,
                seen.start - span.start..seen.end - span.start,
            );
            if integer {
                self.integer_values(reader.scheme(Side::V, span.start), &p);
            } else {
                self.float_values(&p, seen.start - span.start..seen.end - span.start);
            }
            state.fold(m, l, &self.value);
        }
    }

    /// Unpacks one side; pages shorter than a tile are taken one after another.
    fn load(&mut self, reader: &Reader<'_>, side: Side, integer: bool, span: &Range<usize>) {
        let (dim, scheme) = (self.dim, reader.scheme(side, span.start));
        let groups = if scheme == Scheme::Int4(Int4Scale::Channel) {
            dim
        } else {
            scheme.groups(dim)
        };
        let per_tile = scheme == Scheme::Int4(Int4Scale::Channel);
        let params = if side == Side::K {
            &mut self.k_params
        } else {
            &mut self.v_params
        };
        params.clear();
        let mut t = span.start;
        while t < span.end {
            let n = span.end.min(reader.page_end(t)) - t;
            reader.codes(
                side,
                t,
                n,
                dim,
                &mut self.codes[(t - span.start) * dim..][..n * dim],
            );
            t += n;
        }
        if per_tile {
            params.extend((0..groups).map(|d| reader.param(side, span.start, d)));
        } else {
            for t in span.clone() {
                params.extend((0..groups).map(|g| reader.param(side, t, g)));
            }
        }
        let n = span.len();
        match (integer, side) {
            (true, Side::K) => {
                let codes = &self.codes[..n * dim];
                self.k_int
                    .iter_mut()
                    .zip(codes)
                    .for_each(|(k, &c)| *k = as_integer(scheme, c));
            }
            (true, Side::V) => {
                for (d, column) in self.v_int.chunks_exact_mut(TILE).enumerate() {
                    column.fill(0);
                    for (t, v) in column[..n].iter_mut().enumerate() {
                        *v = as_integer(scheme, self.codes[t * dim + d]);
                    }
                }
                self.scale_groups(scheme, groups, n);
            }
            (false, _) => {
                let float = if side == Side::K {
                    &mut self.k_float
                } else {
                    &mut self.v_float
                };
                let len = dim / groups;
                for (i, (x, &c)) in float[..n * dim].iter_mut().zip(&self.codes).enumerate() {
                    let (t, d) = (i / dim, i % dim);
                    let param = if per_tile {
                        params[d]
                    } else {
                        params[t * groups + d / len]
                    };
                    *x = quant::decode(scheme, c, param, 1.0);
                }
            }
        }
    }

    /// Brings each group's scales to the power of two that fills 16 bits.
    fn scale_groups(&mut self, scheme: Scheme, groups: usize, n: usize) {
        self.v_exponents.clear();
        self.v_scales.clear();
        self.v_shifts.clear();
        for g in 0..groups {
            let of = |t: usize| self.v_params[t * groups + g];
            let largest = (0..n).map(|t| of(t).scale.to_f32()).fold(0.0f32, f32::max);
            let f = if largest == 0.0 {
                0
            } else {
                15 - exponent(largest)
            };
            self.v_exponents.push(f);
            let scales = (0..TILE).map(|t| {
                if t < n {
                    of(t).scale.to_f32() * exp2i(f)
                } else {
                    0.0
                }
            });
            self.v_scales.extend(scales);
            if matches!(scheme, Scheme::Int4(_)) {
                self.v_shifts
                    .extend((0..TILE).map(|t| if t < n { of(t).centred_shift() } else { 0.0 }));
            }
        }
    }

    fn integer_scores(
        &self,
        row: &IntRow,
        scheme: Scheme,
        span: &Range<usize>,
        seen: &Range<usize>,
        scores: &mut [f32; TILE],
    ) {
        let dim = self.dim;
        let groups = scheme.groups(dim);
        let len = dim / groups;
        let sums: Vec<f32> = match scheme {
            Scheme::Int4(Int4Scale::Groups(_)) => row
                .q15
                .chunks_exact(len)
                .map(|q| q.iter().map(|&x| i32::from(x)).sum::<i32>() as f32)
                .collect(),
            _ => Vec::new(),
        };
        for t in seen.start - span.start..seen.end - span.start {
            let k = &self.k_int[t * dim..][..dim];
            scores[t] = match scheme {
                Scheme::Int4(Int4Scale::Channel) => {
                    dot(&row.q15, k) as f32 * row.scale + row.offset
                }
                Scheme::Int8(Int8Scale::Tensor) => dot(&row.q15, k) as f32 * row.scale,
                _ => {
                    let mut a = 0.0;
                    for g in 0..groups {
                        let param = self.k_params[t * groups + g];
                        let term = dot(&row.q15[g * len..][..len], &k[g * len..][..len]) as f32
                            * param.scale.to_f32();
                        a = if g == 0 { term } else { a + term };
                        if let Some(sum) = sums.get(g) {
                            a += sum * param.centred_shift();
                        }
                    }
                    a * row.scale
                }
            };
        }
    }

    fn integer_values(&mut self, scheme: Scheme, p: &[f32; TILE]) {
        let len = self.dim / self.v_exponents.len();
        let asymmetric = matches!(scheme, Scheme::Int4(_));
        for (g, &f) in self.v_exponents.iter().enumerate() {
            let (mut hi, mut lo) = ([0i16; TILE], [0i16; TILE]);
            for (t, scale) in self.v_scales[g * TILE..][..TILE].iter().enumerate() {
                // rhe(w) for 0 ≤ w < 2^16: adding 2^23 rounds, the low bits are the integer.
                let w = (p[t] * scale + 8_388_608.0).to_bits();
                (hi[t], lo[t]) = ((w >> 8 & 255) as i16, (w & 255) as i16);
            }
            let shift = if asymmetric {
                shift_term(p, &self.v_shifts[g * TILE..][..TILE])
            } else {
                0.0
            };
            for d in g * len..(g + 1) * len {
                let v = &self.v_int[d * TILE..][..TILE];
                let sum = dot(&hi, v) * 256 + dot(&lo, v);
                let t = sum as f32 * exp2i(-f);
                self.value[d] = if asymmetric { t + shift } else { t };
            }
        }
    }

    fn float_scores(
        &self,
        q: &[f32],
        span: &Range<usize>,
        seen: &Range<usize>,
        scores: &mut [f32; TILE],
    ) {
        for t in seen.start - span.start..seen.end - span.start {
            let mut acc = [f32x8::ZERO; 2];
            let k = &self.k_float[t * self.dim..][..self.dim];
            for (i, (q, k)) in q.chunks_exact(8).zip(k.chunks_exact(8)).enumerate() {
                let lanes = |x: &[f32]| f32x8::from(<[f32; 8]>::try_from(x).expect("chunks of 8"));
                acc[i % 2] += lanes(q) * lanes(k);
            }
            let mut all = [0.0; 16];
            all[..8].copy_from_slice(&acc[0].to_array());
            all[8..].copy_from_slice(&acc[1].to_array());
            scores[t] = reduce(all);
        }
    }

    fn float_values(&mut self, p: &[f32; TILE], seen: Range<usize>) {
        self.value.fill(0.0);
        for t in seen {
            let v = &self.v_float[t * self.dim..][..self.dim];
            for (value, v) in self.value.iter_mut().zip(v) {
                *value += p[t] * v;
            }
        }
    }
}

/// Section 4: maximum, fixed-point sum and weights of one row; 0 where nothing is seen.
fn weights(scores: &[f32; TILE], integer: bool, seen: Range<usize>) -> (f32, i32, [f32; TILE]) {
    let m = scores[seen.clone()]
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
        .ceil();
    let mut p = [0.0; TILE];
    for (p, s) in p[seen.clone()].iter_mut().zip(&scores[seen]) {
        let x = (s - m).max(EXP2_MIN);
        *p = if integer {
            exp2_weight(x)
        } else {
            exp2_float(x)
        };
    }
    let l = p
        .iter()
        .map(|p| ((p + 2.0).to_bits() - 0x4000_0000) as i32)
        .sum();
    (m, l, p)
}
