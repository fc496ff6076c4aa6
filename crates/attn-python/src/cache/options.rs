//! What Python says of a cache, of a step and of tokens to append, in the library's words.

use attn::{Append, Attend, CacheConfig, Heads, KvFormat, ScoreModifiers, SelectedPages};
use pyo3::prelude::*;

use crate::{dlpack::Array, errors, modifiers::Modifiers};

/// What a step attends, beside its rows.
#[derive(FromPyObject)]
pub struct StepOptions {
    sequences: Vec<usize>,
    q_lens: Vec<usize>,
    /// The tokens of each sequence that lie in shards ahead; empty without shards.
    tokens_before: Vec<usize>,
    /// The tokens of each sequence that follow in other shards; empty without shards.
    tokens_after: Vec<usize>,
    /// Selected pages, and how many each KV head of each sequence has.
    pages: Option<(Vec<u32>, Vec<usize>)>,
    layer: usize,
    modifiers: Modifiers,
}

/// What attends, in the library's words but for the borrowed lists.
pub(super) struct Attending {
    sequences: Vec<usize>,
    q_lens: Vec<usize>,
    tokens_before: Vec<usize>,
    tokens_after: Vec<usize>,
    pages: Option<(Vec<u32>, Vec<usize>)>,
    layer: usize,
    q_heads: usize,
    scores: ScoreModifiers,
}

impl Attending {
    /// With as many query heads as the queries have.
    pub(super) fn new(q: &Array<'_>, options: StepOptions) -> PyResult<Self> {
        let [.., q_heads, _] = q.shape[..] else {
            q.check_rank(3, "[query tokens, heads, dim]")?;
            unreachable!("three dims have heads");
        };
        Ok(Attending {
            sequences: options.sequences,
            q_lens: options.q_lens,
            tokens_before: options.tokens_before,
            tokens_after: options.tokens_after,
            pages: options.pages,
            layer: options.layer,
            q_heads,
            scores: options.modifiers.into(),
        })
    }

    pub(super) fn at(&self) -> Attend<'_> {
        Attend {
            layer: self.layer,
            q_heads: self.q_heads,
            sequences: &self.sequences,
            q_lens: Some(&self.q_lens),
            tokens_before: &self.tokens_before,
            tokens_after: &self.tokens_after,
            pages: self
                .pages
                .as_ref()
                .map(|(pages, counts)| SelectedPages { pages, counts }),
            scores: self.scores.clone(),
        }
    }
}

/// The description of a cache, attribute by attribute of Python's.
#[derive(FromPyObject)]
pub struct CacheOptions {
    format: String,
    /// Query heads of the steps to come, where they are known.
    q_heads: Option<usize>,
    heads: usize,
    dim: usize,
    v_dim: usize,
    max_tokens: usize,
    sequences: usize,
    layers: usize,
    pages: Option<usize>,
    page_size: usize,
    max_q_len: usize,
    checkpoints: usize,
    k_scales: Option<Vec<f32>>,
    v_scales: Option<Vec<f32>>,
    centres: Option<bool>,
}

impl CacheOptions {
    pub(super) fn config(self) -> PyResult<CacheConfig> {
        let format: KvFormat = self.format.parse().map_err(errors::of)?;
        let q_heads = self.q_heads.unwrap_or(self.heads);
        let heads = Heads::new(q_heads, self.heads, (self.dim, self.v_dim));
        let mut builder = CacheConfig::builder(format, heads)
            .sequences(self.sequences)
            .layers(self.layers)
            .max_len(self.max_tokens)
            .page_size(self.page_size)
            .max_q_len(self.max_q_len)
            .checkpoints(self.checkpoints);
        if let Some(centres) = self.centres {
            builder = builder.centres(centres);
        }
        if let Some(pages) = self.pages {
            builder = builder.pages(pages);
        }
        let [k, v] = [self.k_scales, self.v_scales].map(Option::unwrap_or_default);
        Ok(builder.tensor_scales(k, v).build())
    }
}

/// Counts of tokens as the library takes them.
pub(super) fn appends(sequences: &[usize], tokens: &[usize]) -> PyResult<Vec<Append>> {
    if sequences.len() != tokens.len() {
        return Err(errors::shape(format!(
            "sequences names {}, but tokens has {} counts",
            sequences.len(),
            tokens.len()
        )));
    }
    let pairs = sequences.iter().zip(tokens);
    Ok(pairs
        .map(|(&sequence, &tokens)| Append { sequence, tokens })
        .collect())
}
