//! K and V in f32, and attention as the formula has it: what formats are compared with.

use attn::{Append, Heads};
use rayon::prelude::*;

use super::{Kv, check_room};
use crate::{config::ModelConfig, error::Error};

/// K and V of each layer and sequence in f32.
pub struct ExactKv {
    heads: Heads,
    windows: Vec<Option<usize>>,
    max_len: usize,
    lens: Vec<usize>,
    appends: Vec<Append>,
    /// For each layer and sequence, K and V `[tokens, kv heads, head_dim]`.
    rows: Vec<Vec<[Vec<f32>; 2]>>,
}

impl ExactKv {
    /// Empty, for `sequences` of up to `max_len` tokens.
    #[must_use]
    pub fn new(model: &ModelConfig, sequences: usize, max_len: usize) -> Self {
        let of_layer = vec![[Vec::new(), Vec::new()]; sequences];
        ExactKv {
            heads: model.heads,
            windows: model.windows.clone(),
            max_len,
            lens: vec![0; sequences],
            appends: Vec::new(),
            rows: vec![of_layer; model.windows.len()],
        }
    }

    /// Bytes of one token's K and V in all layers and heads.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        (self.rows.len() * self.heads.kv * self.heads.dim.k * 2 * size_of::<f32>()) as f64
    }

    /// One query head of the token at `position`: `out = Σ softmax(q·k / √dim)·v`.
    fn attend_head(
        &self,
        [k, v]: &[Vec<f32>; 2],
        head: usize,
        position: usize,
        window: Option<usize>,
        q: &[f32],
        out: &mut [f32],
    ) {
        let (heads, kv, dim) = (self.heads.q, self.heads.kv, self.heads.dim.k);
        let row = |t: usize| (t * kv + head / (heads / kv)) * dim;
        let first = window.map_or(0, |left| position.saturating_sub(left));
        let scale = 1.0 / (dim as f32).sqrt();
        let seen = first..position + 1;
        let mut weights: Vec<f32> = seen
            .clone()
            .map(|t| dot(q, &k[row(t)..][..dim]) * scale)
            .collect();
        let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
        let sum: f32 = weights.iter().sum();
        out.fill(0.0);
        for (t, weight) in seen.zip(weights) {
            let v = &v[row(t)..][..dim];
            let pairs = out.iter_mut().zip(v);
            pairs.for_each(|(out, v)| *out += weight / sum * v);
        }
    }
}

/// A dot product in eight sums, which compilers turn into vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

impl Kv for ExactKv {
    fn lens(&self) -> &[usize] {
        &self.lens
    }

    fn begin(&mut self, appends: &[Append]) -> Result<(), Error> {
        check_room(&self.lens, appends, self.max_len)?;
        appends
            .iter()
            .for_each(|a| self.lens[a.sequence] += a.tokens);
        self.appends = appends.to_vec();
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), Error> {
        let row = self.heads.kv * self.heads.dim.k;
        for Append { sequence, tokens } in self.appends.drain(..) {
            self.lens[sequence] -= tokens;
            let sides = self.rows.iter_mut().flat_map(|of| &mut of[sequence]);
            sides.for_each(|rows| rows.truncate(self.lens[sequence] * row));
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (heads, kv, dim) = (self.heads.q, self.heads.kv, self.heads.dim.k);
        // Sequence and position of each token.
        let mut places = Vec::new();
        let mut first = 0;
        for &Append { sequence, tokens } in &self.appends {
            let rows = first * kv * dim..(first + tokens) * kv * dim;
            self.rows[layer][sequence][0].extend_from_slice(&k[rows.clone()]);
            self.rows[layer][sequence][1].extend_from_slice(&v[rows]);
            let len = self.lens[sequence];
            places.extend((len - tokens..len).map(|position| (sequence, position)));
            first += tokens;
        }
        let window = self.windows[layer];
        let rows = out.par_chunks_mut(dim).zip(q.par_chunks(dim));
        rows.enumerate().for_each(|(i, (out, q))| {
            let (sequence, position) = places[i / heads];
            let kv = &self.rows[layer][sequence];
            self.attend_head(kv, i % heads, position, window, q, out);
        });
        Ok(())
    }
}
