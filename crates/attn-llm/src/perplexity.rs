//! What a cache format does to a model's predictions: perplexity, and the divergence of the next token from that over an f32 cache, with
//! products in f32.
//!
//! Teacher-forced: every position predicts the text's own next token, attending through the cache as decode would read it.

use std::sync::Arc;

use attn::{DecodeAttention, KvFormat};
use rayon::prelude::*;

use crate::{
    config::ModelConfig,
    error::Error,
    kv::{Around, ExactKv, Kv, NewRows, PagedKv},
    model::{Model, Piece, Wanted},
};

/// What a format came to over a text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Fidelity {
    /// The format; none is f32, in plain attention.
    pub format: Option<KvFormat>,
    /// Bytes of one token's K and V in all layers and heads.
    pub bytes_per_token: f64,
    /// exp of the mean of −ln p of the text's next token, over all but each piece's last position.
    pub perplexity: f64,
    /// Mean over all positions of Σ p·ln(p / q), where p is the next token's distribution over an f32 cache, and q over this one.
    pub mean_kl: f64,
    /// The mean of each piece.
    pub mean_kl_of_pieces: Vec<f64>,
    /// The divergence that 99 % of positions do not exceed.
    pub p99_kl: f64,
    /// The divergence that 99.9 % of positions do not exceed.
    pub p999_kl: f64,
    /// The share of positions whose likeliest token is that over an f32 cache.
    pub same_top: f64,
}

impl Fidelity {
    /// The name of the format, or f32.
    #[must_use]
    pub fn name(&self) -> String {
        let format = self.format.map(|format| format.to_string());
        format.unwrap_or_else(|| "f32".to_owned())
    }
}

/// What is compared.
pub struct Comparison<'a> {
    /// The model.
    pub model: &'a Model,
    /// The model that all are compared with, over f32; the same one, with other products, or none for `model` itself.
    pub reference: Option<&'a Model>,
    /// The backend of the formats.
    pub backend: Arc<dyn DecodeAttention>,
    /// The formats; none is f32 in plain attention.
    pub formats: &'a [Option<KvFormat>],
    /// Whether caches whose format allows it take centres off their keys ([`attn::centres`]).
    pub centres: bool,
    /// The norm of a constant that keys get in the five slowest rotary pairs of each KV head, as biases of K give; 0 for none. Softmax does not see it, since it
    /// changes all scores of a row alike.
    pub k_bias: f32,
    /// Tokens computed at once.
    pub chunk: usize,
}

/// A cache, and what its positions came to so far.
struct Run {
    format: Option<KvFormat>,
    bytes_per_token: f64,
    loss: f64,
    predictions: usize,
    /// The divergences of each piece's positions.
    kl: Vec<Vec<f64>>,
    same_top: usize,
}

/// Logits `[rows, vocab]`, as probabilities' logarithms when they are asked for.
pub(crate) struct Rows<'a> {
    logits: &'a [f32],
    /// ln Σ exp of each row.
    lse: Vec<f64>,
    pub top: Vec<usize>,
    vocab: usize,
}

impl<'a> Rows<'a> {
    pub fn new(logits: &'a [f32], vocab: usize) -> Self {
        let of_row = |row: &[f32]| {
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - largest).exp()).sum();
            let top = row.iter().position(|x| *x == largest).unwrap_or(0);
            (f64::from(largest) + sum.ln(), top)
        };
        let (lse, top) = logits.par_chunks(vocab).map(of_row).unzip();
        Rows {
            logits,
            lse,
            top,
            vocab,
        }
    }

    fn row(&self, i: usize) -> &'a [f32] {
        &self.logits[i * self.vocab..][..self.vocab]
    }

    fn ln_p(&self, i: usize, token: u32) -> f64 {
        f64::from(self.row(i)[token as usize]) - self.lse[i]
    }

    /// Σ p·ln(p / q) of one row, where p is this one's distribution.
    pub fn divergence(&self, other: &Rows<'_>, i: usize) -> f64 {
        let pairs = self.row(i).iter().zip(other.row(i));
        let term = |(a, b): (&f32, &f32)| {
            let (a, b) = (f64::from(*a) - self.lse[i], f64::from(*b) - other.lse[i]);
            a.exp() * (a - b)
        };
        pairs.map(term).sum()
    }
}

impl Run {
    /// Adds rows; `next` are the tokens that follow each of them, one less at the end of a piece.
    fn add(&mut self, exact: &Rows<'_>, own: &Rows<'_>, next: &[u32]) {
        // One by one, so that chunks do not change the sum.
        for (i, &token) in next.iter().enumerate() {
            self.loss -= own.ln_p(i, token);
        }
        self.predictions += next.len();
        let rows = 0..own.top.len();
        let kl = rows.clone().into_par_iter();
        let kl: Vec<f64> = kl.map(|i| exact.divergence(own, i)).collect();
        let last = self.kl.last_mut();
        last.expect("a piece has begun").extend(kl);
        self.same_top += rows.filter(|&i| own.top[i] == exact.top[i]).count();
    }

    fn fidelity(self) -> Fidelity {
        let mean = |kl: &[f64]| kl.iter().sum::<f64>() / kl.len() as f64;
        let mut all = self.kl.concat();
        all.sort_by(f64::total_cmp);
        let not_exceeded_by =
            |thousandths: usize| all[(all.len() * thousandths).div_ceil(1000).saturating_sub(1)];
        Fidelity {
            format: self.format,
            bytes_per_token: self.bytes_per_token,
            perplexity: (self.loss / self.predictions as f64).exp(),
            mean_kl: mean(&all),
            mean_kl_of_pieces: self.kl.iter().map(|kl| mean(kl)).collect(),
            p99_kl: not_exceeded_by(990),
            p999_kl: not_exceeded_by(999),
            same_top: self.same_top as f64 / all.len() as f64,
        }
    }
}

/// Runs every piece of a text, from an empty cache, over an f32 cache and over each format; `progress` gets the tokens done so far.
///
/// # Errors
/// [`Error::Request`] for a piece of fewer than two tokens, or no piece; those of [`Model::forward`].
pub fn perplexity(
    comparison: &Comparison<'_>,
    pieces: &[&[u32]],
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Fidelity>, Error> {
    let &Comparison {
        model,
        reference,
        formats,
        chunk,
        ..
    } = comparison;
    let reference = reference.unwrap_or(model);
    if reference.config() != model.config() {
        return Err(Error::Request {
            what: "the model that is compared with",
            given: "one of another shape".to_owned(),
            allowed: "the same model".to_owned(),
        });
    }
    if pieces.is_empty() || chunk == 0 || pieces.iter().any(|piece| piece.len() < 2) {
        return Err(Error::Request {
            what: "the text",
            given: format!("{} pieces, in chunks of {chunk}", pieces.len()),
            allowed: "one piece or more of two tokens or more, chunks of one or more".to_owned(),
        });
    }
    let new = |format| Run {
        format,
        bytes_per_token: 0.0,
        loss: 0.0,
        predictions: 0,
        kl: Vec::new(),
        same_top: 0,
    };
    let mut runs: Vec<Run> = formats.iter().copied().map(new).collect();
    let bias = comparison.bias();
    let mut done = 0;
    for piece in pieces {
        let mut exact = ExactKv::new(model.config(), 1, piece.len());
        let mut caches = caches(comparison, piece.len(), &mut runs)?;
        for (i, tokens) in piece.chunks(chunk).enumerate() {
            let start = i * chunk + 1;
            let next = &piece[start..(start + tokens.len()).min(piece.len())];
            let vocab = model.config().vocab;
            let logits = forward(reference, &mut exact, tokens, Wanted::All)?;
            let wanted = Rows::new(&logits, vocab);
            for (run, cache) in runs.iter_mut().zip(&mut caches) {
                match cache {
                    Some(cache) => {
                        let logits =
                            comparison.forward(&mut **cache, &bias, tokens, Wanted::All)?;
                        run.add(&wanted, &Rows::new(&logits, vocab), next);
                    }
                    None => run.add(&wanted, &wanted, next),
                }
            }
            done += tokens.len();
            progress(done);
        }
    }
    Ok(runs.into_iter().map(Run::fidelity).collect())
}

/// The logits of the next tokens of a cache's only sequence.
pub(crate) fn forward(
    model: &Model,
    kv: &mut dyn Kv,
    tokens: &[u32],
    wanted: Wanted,
) -> Result<Vec<f32>, Error> {
    let piece = Piece {
        sequence: 0,
        tokens,
    };
    model.forward(&[piece], kv, wanted)
}

impl Comparison<'_> {
    /// The constant that a KV head's keys get; none if its norm is 0.
    pub(crate) fn bias(&self) -> Option<Vec<f32>> {
        (self.k_bias != 0.0).then(|| k_bias(self.model.config(), self.k_bias))
    }

    /// The logits of the next tokens over a cache that is compared.
    pub(crate) fn forward(
        &self,
        kv: &mut dyn Kv,
        bias: &Option<Vec<f32>>,
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<Vec<f32>, Error> {
        let mut around = |rows: NewRows<'_>, attend: &mut Attend<'_>| match bias {
            None => attend(rows.k),
            Some(bias) => attend(&biased(rows.k, bias)),
        };
        let mut kv = Around {
            kv,
            around: &mut around,
        };
        forward(self.model, &mut kv, tokens, wanted)
    }

    /// An empty cache of a format for one sequence of so many tokens, of which up to `chunk` come at once.
    pub(crate) fn paged(
        &self,
        format: KvFormat,
        tokens: usize,
        chunk: usize,
    ) -> Result<PagedKv, Error> {
        let backend = Arc::clone(&self.backend);
        let config = self.model.config();
        PagedKv::new(backend, config, format, 1, tokens, chunk, self.centres)
    }
}

/// The call that attends a layer, with its keys.
type Attend<'a> = dyn FnMut(&[f32]) -> Result<(), Error> + 'a;

/// Rotary pairs that get a part of a constant in keys: the slowest ones.
const BIASED_PAIRS: usize = 5;

/// The constant of this norm that a KV head's keys get.
fn k_bias(model: &ModelConfig, norm: f32) -> Vec<f32> {
    let dim = model.heads.dim.k;
    let (pairs, count) = (dim / 2, BIASED_PAIRS.min(dim / 2));
    let each = norm / ((2 * count) as f32).sqrt();
    let mut bias = vec![0.0; dim];
    for i in pairs - count..pairs {
        let (a, b) = model.rope.style.pair(i, pairs);
        (bias[a], bias[b]) = (each, each);
    }
    bias
}

/// Keys with a constant.
fn biased(k: &[f32], bias: &[f32]) -> Vec<f32> {
    let constants = bias.iter().cycle();
    k.iter().zip(constants).map(|(x, c)| x + c).collect()
}

/// An empty cache of each format for a piece of so many tokens; none where predictions are those that all are compared with.
fn caches(
    comparison: &Comparison<'_>,
    tokens: usize,
    runs: &mut [Run],
) -> Result<Vec<Option<Box<dyn Kv>>>, Error> {
    let config = comparison.model.config();
    let mut caches: Vec<Option<Box<dyn Kv>>> = Vec::new();
    for run in runs {
        run.kl.push(Vec::new());
        if let Some(format) = run.format {
            let paged = comparison.paged(format, tokens, comparison.chunk)?;
            run.bytes_per_token = paged.bytes_per_token();
            caches.push(Some(Box::new(paged)));
            continue;
        }
        let exact = ExactKv::new(config, 1, tokens);
        run.bytes_per_token = exact.bytes_per_token();
        let differs = comparison.reference.is_some();
        caches.push(differs.then(|| Box::new(exact) as Box<dyn Kv>));
    }
    Ok(caches)
}
