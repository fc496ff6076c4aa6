//! A Llama-type model, and its forward pass over tokens of several sequences.

use attn::{Append, RotaryTable};
use rayon::prelude::*;

use crate::{config::ModelConfig, error::Error, kv::Kv, linear::Linear};

/// A model whose weights are in memory, in f32.
pub struct Model {
    pub(crate) config: ModelConfig,
    /// `[vocab, hidden]`.
    pub(crate) embeddings: Vec<f32>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) output: Linear,
    pub(crate) remarks: Vec<String>,
}

pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub attention_output: Linear,
    /// RMSNorm of each head of Q and K, before positions.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub feed_forward_norm: Vec<f32>,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// The next tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// The sequence.
    pub sequence: usize,
    /// Its tokens, after those that it has.
    pub tokens: &'a [u32],
}

/// The tokens after which the next one's logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Each piece's last token.
    Last,
    /// Every token.
    All,
}

impl Model {
    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What its files leave open or have beyond what is read, a sentence each: defaults that were taken, keys that are not known, files that lie
    /// beside it.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Appends tokens to their sequences, and gives the logits `[wanted tokens, vocab]` of what comes next, in the order of `pieces`.
    ///
    /// `pieces` name each sequence once, in ascending order. A token's logits have the same bits alone, in a longer piece and beside others.
    ///
    /// # Errors
    /// [`Error::Context`]; [`Error::Request`] for a token that the vocabulary lacks and for an empty piece; those of the cache. The sequences have
    /// none of the tokens then, whichever layer failed.
    pub fn forward(
        &self,
        pieces: &[Piece<'_>],
        kv: &mut dyn Kv,
        wanted: Wanted,
    ) -> Result<Vec<f32>, Error> {
        self.check_pieces(pieces)?;
        let append = |piece: &Piece<'_>| Append {
            sequence: piece.sequence,
            tokens: piece.tokens.len(),
        };
        let appends: Vec<Append> = pieces.iter().map(append).collect();
        kv.begin(&appends)?;
        let logits = self.logits(pieces, &appends, kv, wanted);
        if logits.is_err() {
            kv.cancel()?;
        }
        logits
    }

    /// The logits of a step that has begun.
    fn logits(
        &self,
        pieces: &[Piece<'_>],
        appends: &[Append],
        kv: &mut dyn Kv,
        wanted: Wanted,
    ) -> Result<Vec<f32>, Error> {
        let positions: Vec<usize> = appends
            .iter()
            .flat_map(|append| {
                let len = kv.lens()[append.sequence];
                len - append.tokens..len
            })
            .collect();
        // A row for each token.
        let table = self.config.rope.rotary.table(positions.into_iter())?;
        let hidden = self.config.hidden;
        let tokens = pieces.iter().flat_map(|piece| piece.tokens);
        let mut x: Vec<f32> = tokens
            .flat_map(|&token| &self.embeddings[token as usize * hidden..][..hidden])
            .copied()
            .collect();
        for (i, layer) in self.layers.iter().enumerate() {
            self.attend(i, layer, &mut x, &table, kv)?;
            self.feed_forward(layer, &mut x)?;
        }
        if wanted == Wanted::Last {
            let mut end = 0;
            let last = appends.iter().flat_map(|append| {
                end += append.tokens;
                x[(end - 1) * hidden..end * hidden].to_vec()
            });
            x = last.collect();
        }
        self.output.forward(&self.normalized(&x, &self.norm))
    }

    fn check_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), Error> {
        if !pieces.is_sorted_by(|a, b| a.sequence < b.sequence)
            || pieces.iter().any(|piece| piece.tokens.is_empty())
        {
            return Err(Error::Request {
                what: "the batch",
                given: "a list with an empty piece, or sequences out of order".to_owned(),
                allowed: "one or more tokens of each sequence, in ascending order".to_owned(),
            });
        }
        let mut tokens = pieces.iter().flat_map(|piece| piece.tokens);
        match tokens.find(|token| **token as usize >= self.config.vocab) {
            Some(token) => Err(Error::Request {
                what: "a token",
                given: token.to_string(),
                allowed: format!("0 to {}", self.config.vocab - 1),
            }),
            None => Ok(()),
        }
    }

    /// Adds an attention layer's output to `x`; `table` has a row for each token.
    fn attend(
        &self,
        index: usize,
        layer: &Layer,
        x: &mut [f32],
        table: &RotaryTable,
        kv: &mut dyn Kv,
    ) -> Result<(), Error> {
        let normalized = self.normalized(x, &layer.attention_norm);
        let mut q = layer.q.forward(&normalized)?;
        let mut k = layer.k.forward(&normalized)?;
        let v = layer.v.forward(&normalized)?;
        for (x, norm) in [(&mut q, &layer.q_norm), (&mut k, &layer.k_norm)] {
            if let Some(norm) = norm {
                *x = self.normalized(x, norm);
            }
            let width = x.len() / table.len();
            let rows = x.par_chunks_mut(width).enumerate();
            let dim = self.config.heads.dim.k;
            let style = self.config.rope.style;
            rows.try_for_each(|(token, row)| table.rotate(style, row, dim, token))?;
        }
        let mut out = vec![0.0; q.len()];
        kv.attend(index, &q, &k, &v, &mut out)?;
        add(x, &layer.attention_output.forward(&out)?);
        Ok(())
    }

    /// Adds a feed-forward layer's output to `x`.
    fn feed_forward(&self, layer: &Layer, x: &mut [f32]) -> Result<(), Error> {
        let normalized = self.normalized(x, &layer.feed_forward_norm);
        let mut gate = layer.gate.forward(&normalized)?;
        let up = layer.up.forward(&normalized)?;
        let width = layer.gate.outputs;
        let rows = gate.par_chunks_mut(width).zip(up.par_chunks(width));
        rows.for_each(|(gate, up)| {
            let pairs = gate.iter_mut().zip(up);
            pairs.for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
        });
        add(x, &layer.down.forward(&gate)?);
        Ok(())
    }

    /// RMSNorm of each run of `weight.len()` elements.
    fn normalized(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        let n = weight.len();
        let rows = y.par_chunks_mut(n).zip(x.par_chunks(n));
        rows.for_each(|(y, x)| {
            let square: f32 = x.iter().map(|x| x * x).sum();
            let factor = 1.0 / (square / n as f32 + self.config.norm_eps).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * factor * weight;
            }
        });
        y
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
