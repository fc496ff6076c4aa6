//! The attention step to take: shapes, lengths and score modifiers, validated here, once.

use crate::{
    error::{Error, Unsupported, refuse},
    format::KvFormat,
    head_dim::HeadDim,
    layout::check_kv_heads,
    score_modifiers::{Arithmetic, ScoreModifiers},
    segments::{SPAN_TOKENS, num_spans},
};

/// Most tokens of a sequence, and most query tokens of one: positions and sums of weights are exact up to there (`docs/arithmetic.md`, section 9).
pub const MAX_TOKENS: usize = 1 << 20;

/// Most query heads of a KV head: those of attention over latents.
pub const MAX_HEADS_PER_KV: usize = 128;

/// Most elements that a slice of f32 can hold.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f32>();

/// Spans of the longest sequence that the library defines.
const MAX_SPANS: usize = (1 << 20) / SPAN_TOKENS;

/// Steps with at most this many query tokens of each sequence are bound by memory: they ignore [`Arithmetic::Fast`], and backends attend a sequence's tokens together.
pub const FEW_TOKENS: usize = 16;

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The number of query heads: a multiple of `kv`, at most [`MAX_HEADS_PER_KV`] for each KV head.
    pub q: usize,
    /// The number of KV heads.
    pub kv: usize,
    /// The number of dims of a head.
    pub dim: HeadDim,
}

impl Heads {
    /// `q` query heads over `kv` KV heads of `dim` dims: a number, or a pair of K's and V's where they differ.
    ///
    /// ```
    /// use attn_core::{HeadDim, Heads};
    ///
    /// assert_eq!(Heads::new(32, 8, 128), Heads { q: 32, kv: 8, dim: HeadDim::same(128) });
    /// assert_eq!(Heads::new(64, 4, (192, 128)).dim.v, 128);
    /// ```
    #[must_use]
    pub fn new(q: usize, kv: usize, dim: impl Into<HeadDim>) -> Self {
        let dim = dim.into();
        Heads { q, kv, dim }
    }

    /// Refuses numbers that no attention layer of the library has.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check(self) -> Result<(), Error> {
        self.dim.check()?;
        if self.kv == 0 || self.q == 0 || !self.q.is_multiple_of(self.kv) {
            return refuse(
                "num_q_heads/num_kv_heads",
                format_args!("{}/{}", self.q, self.kv),
                "a whole number of query heads per KV head, from 1 to 128",
            );
        }
        check_kv_heads(self.kv)?;
        match self.q / self.kv {
            1..=MAX_HEADS_PER_KV => Ok(()),
            many => refuse("heads_per_kv", many, "1 to 128"),
        }
    }
}

/// One step over a batch of cached sequences: decode, verification of several tokens, prompts, or some of each.
///
/// Queries are `[token][num_q_heads][head_dim.k]`, results `[token][num_q_heads][head_dim.v]`, the query tokens of sequence 0 first, then those of sequence 1.
///
/// ```
/// use attn_core::{Heads, Problem};
///
/// let heads = Heads::new(32, 8, 128);
/// let problem = Problem::new(heads, [8192; 4]).q_len(3).softcap(30.0);
/// assert_eq!((problem.batch(), problem.rows()), (4, 4 * 3 * 32));
/// // A token to decode, and the first 512 of a prompt.
/// let problem = Problem::new(heads, [8192, 512]).q_lens([1, 512]);
/// assert_eq!(problem.rows(), 513 * 32);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// The number of query heads.
    pub num_q_heads: usize,
    /// The number of KV heads; divides `num_q_heads`, at most [`MAX_HEADS_PER_KV`] query heads each.
    pub num_kv_heads: usize,
    /// The number of dims of a head.
    pub head_dim: HeadDim,
    /// Query tokens of each sequence, 0..=1 Mi; the last stands at position `kv_len − 1` where no tokens follow.
    pub q_lens: Vec<usize>,
    /// Cached tokens of each sequence, 0..=1 Mi.
    pub kv_lens: Vec<usize>,
    /// Tokens of each sequence that lie ahead of the cached ones, in other shards of it: multiples of [`SPAN_TOKENS`]; empty for none. Positions do not
    /// count them.
    pub tokens_before: Vec<usize>,
    /// Tokens of each sequence that follow the cached ones, in other shards of it; empty for none. Positions count them: query tokens are the last
    /// ones of cached and following tokens together.
    pub tokens_after: Vec<usize>,
    /// What changes scores, and how they are computed.
    pub scores: ScoreModifiers,
}

impl Problem {
    /// Describes causal decode with `softmax_scale = 1/√head_dim`, one query token, no modifiers.
    ///
    /// [`Problem::check`], and with it a backend's `plan`, refuses numbers that the library does not define.
    ///
    /// ```
    /// use attn_core::{Heads, Problem};
    ///
    /// let heads = Heads::new(32, 8, 128);
    /// // Two sequences, of at most 4096 and 1000 tokens.
    /// let problem = Problem::new(heads, [4096, 1000]).q_len(2).softcap(30.0);
    /// assert_eq!(problem.out_elements(), 2 * 2 * 32 * 128);
    /// problem.check()?;
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    #[must_use]
    pub fn new(heads: Heads, kv_lens: impl Into<Vec<usize>>) -> Self {
        let kv_lens = kv_lens.into();
        Problem {
            num_q_heads: heads.q,
            num_kv_heads: heads.kv,
            head_dim: heads.dim,
            q_lens: vec![1; kv_lens.len()],
            kv_lens,
            tokens_before: Vec::new(),
            tokens_after: Vec::new(),
            scores: ScoreModifiers::default(),
        }
    }

    /// Sets one number of query tokens for all sequences.
    #[must_use]
    pub fn q_len(mut self, q_len: usize) -> Self {
        self.q_lens = vec![q_len; self.kv_lens.len()];
        self
    }

    /// Sets the number of query tokens of each sequence; a sequence of none has no rows.
    #[must_use]
    pub fn q_lens(mut self, q_lens: impl Into<Vec<usize>>) -> Self {
        self.q_lens = q_lens.into();
        self
    }

    /// Sets the tokens of each sequence that lie in shards ahead of the cached ones: whole spans of [`SPAN_TOKENS`] tokens. The first tile of a shard
    /// that is not the sequence's first is then read as any other.
    ///
    /// ```
    /// use attn_core::{Heads, Problem};
    ///
    /// // The last 452 tokens of 2500.
    /// let problem = Problem::new(Heads::new(4, 1, 64), [452]).tokens_before([2048]);
    /// problem.check()?;
    /// assert_eq!((problem.position(0, 0), problem.reads_first_tile(0)), (451, false));
    /// assert!(problem.tokens_before([100]).check().is_err());
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    #[must_use]
    pub fn tokens_before(mut self, tokens: impl Into<Vec<usize>>) -> Self {
        self.tokens_before = tokens.into();
        self
    }

    /// Sets the tokens of each sequence that follow the cached ones. A sequence may lie in shards, as runs of whole spans of
    /// [`SPAN_TOKENS`] tokens but for the last; each shard is a problem of its own with the same queries, and sees those
    /// of its tokens that the queries see in the whole sequence. [`SpanStates`](crate::SpanStates) merge what shards give.
    ///
    /// ```
    /// use attn_core::{Heads, Problem};
    ///
    /// // The first 2048 tokens of 2500, of which the last is the query's.
    /// let problem = Problem::new(Heads::new(4, 1, 64), [2048]).tokens_after([452]);
    /// assert_eq!((problem.position(0, 0), problem.visible(0, 0)), (2499, 0..2048));
    /// ```
    #[must_use]
    pub fn tokens_after(mut self, tokens: impl Into<Vec<usize>>) -> Self {
        self.tokens_after = tokens.into();
        self
    }

    /// Sets all score modifiers.
    #[must_use]
    pub fn scores(mut self, scores: ScoreModifiers) -> Self {
        self.scores = scores;
        self
    }

    /// The positive factor of q·k.
    #[must_use]
    pub fn score_scale(&self) -> f32 {
        self.scores.scale(self.head_dim.k)
    }

    /// Sets the factor of q·k.
    #[must_use]
    pub fn softmax_scale(mut self, scale: f32) -> Self {
        self.scores.softmax_scale = Some(scale);
        self
    }

    /// Sets whether a query token sees only the tokens up to its own position.
    #[must_use]
    pub fn causal(mut self, causal: bool) -> Self {
        self.scores.causal = causal;
        self
    }

    /// Sets the soft cap of the scores.
    #[must_use]
    pub fn softcap(mut self, cap: f32) -> Self {
        self.scores.softcap = Some(cap);
        self
    }

    /// Sets the number of tokens before its own position that a token sees.
    #[must_use]
    pub fn window_left(mut self, tokens: usize) -> Self {
        self.scores.window_left = Some(tokens);
        self
    }

    /// Sets the number of tokens of a chunk: a token sees those of its own chunk alone, as Llama 4's layers with rotary positions do.
    #[must_use]
    pub fn chunk(mut self, tokens: usize) -> Self {
        self.scores.chunk = Some(tokens);
        self
    }

    /// Sets the ALiBi slope of each query head.
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: impl Into<Vec<f32>>) -> Self {
        self.scores.alibi_slopes = Some(slopes.into());
        self
    }

    /// Sets the attention sink of each query head: a logit that joins the softmax over the tokens that a query token sees, and has no value. The
    /// softmax scale, the soft cap, the slopes and the masks do not apply to it. A row that sees no token has outputs 0 and the sink as its
    /// log-sum-exp. A sink of -1e6 is the same as none for every row that sees a token with a score above -9e5.
    ///
    /// Where states of the same rows are merged ([`AttnState::merge_state`](crate::AttnState::merge_state)), one of the problems has the sinks.
    ///
    /// ```
    /// use attn_core::{Error, Heads, Problem};
    ///
    /// let heads = Heads::new(4, 1, 64);
    /// let problem = Problem::new(heads, [1000]).window_left(127).sinks([0.5, -1.25, 0.0, 2.0]);
    /// problem.check()?;
    /// assert!(matches!(problem.sinks([0.5]).check(), Err(Error::Length { what: "sinks", needed: 4, .. })));
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn sinks(mut self, sinks: impl Into<Vec<f32>>) -> Self {
        self.scores.sinks = Some(sinks.into());
        self
    }

    /// Sets how steps of integer formats are computed: [`Arithmetic::Fast`] for prompts whose bits nobody compares.
    ///
    /// ```
    /// use attn_core::{Arithmetic, Heads, KvFormat, Problem};
    ///
    /// let prompt = Problem::new(Heads::new(32, 8, 128), [4096]).q_len(4096);
    /// assert!(!prompt.may_use_floats(KvFormat::INT8));
    /// assert!(prompt.arithmetic(Arithmetic::Fast).may_use_floats(KvFormat::INT8));
    /// ```
    #[must_use]
    pub fn arithmetic(mut self, arithmetic: Arithmetic) -> Self {
        self.scores.arithmetic = arithmetic;
        self
    }

    /// Whether a backend may answer this step of a cache of the format by floats, where sums of integers fix every bit otherwise.
    #[must_use]
    pub fn may_use_floats(&self, format: KvFormat) -> bool {
        self.scores.arithmetic == Arithmetic::Fast
            && format.is_integer()
            && self.max_q_len() > FEW_TOKENS
    }

    /// The numbers of heads and dims.
    #[must_use]
    pub fn heads(&self) -> Heads {
        Heads::new(self.num_q_heads, self.num_kv_heads, self.head_dim)
    }

    /// Query heads that read one KV head; 0 if there is no KV head.
    #[must_use]
    pub fn heads_per_kv(&self) -> usize {
        self.num_q_heads.checked_div(self.num_kv_heads).unwrap_or(0)
    }

    /// Number of sequences.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.kv_lens.len()
    }

    /// Query tokens of all sequences.
    #[must_use]
    pub fn query_tokens(&self) -> usize {
        self.q_lens.iter().fold(0, |n, len| n.saturating_add(*len))
    }

    /// The query tokens of each sequence, counted through all of them; saturating as [`Problem::query_tokens`] does.
    pub fn query_ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.q_lens.iter().scan(0usize, |end, len| {
            let start = *end;
            *end = start.saturating_add(*len);
            Some(start..*end)
        })
    }

    /// Query tokens of every sequence where that is one number, else `None`.
    #[must_use]
    pub fn uniform_q_len(&self) -> Option<usize> {
        let first = *self.q_lens.first()?;
        self.q_lens.iter().all(|len| *len == first).then_some(first)
    }

    /// Most query tokens of a sequence.
    #[must_use]
    pub fn max_q_len(&self) -> usize {
        self.q_lens.iter().copied().max().unwrap_or(0)
    }

    /// Rows of the result: `[query tokens, num_q_heads]`. A product that overflows saturates, and [`Problem::check`] refuses it.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.query_tokens().saturating_mul(self.num_q_heads)
    }

    /// Elements of a token's K, and of its V, of all KV heads.
    #[must_use]
    pub fn kv_elements(&self) -> [usize; 2] {
        let dims = self.head_dim.both();
        dims.map(|dim| self.num_kv_heads.saturating_mul(dim))
    }

    /// The shape of the queries, `[query tokens, num_q_heads, head_dim.k]`.
    #[must_use]
    pub fn q_shape(&self) -> [usize; 3] {
        [self.query_tokens(), self.num_q_heads, self.head_dim.k]
    }

    /// The shape of the result, `[query tokens, num_q_heads, head_dim.v]`.
    #[must_use]
    pub fn out_shape(&self) -> [usize; 3] {
        [self.query_tokens(), self.num_q_heads, self.head_dim.v]
    }

    /// Elements of the queries, saturating as [`Problem::rows`] does.
    #[must_use]
    pub fn q_elements(&self) -> usize {
        self.rows().saturating_mul(self.head_dim.k)
    }

    /// Elements of the result, saturating as [`Problem::rows`] does.
    #[must_use]
    pub fn out_elements(&self) -> usize {
        self.rows().saturating_mul(self.head_dim.v)
    }

    /// Refuses shapes, lengths and parameters that the library does not define.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the parameter and what is allowed; [`Error::Length`] for the slopes and the sinks.
    pub fn check(&self) -> Result<(), Error> {
        self.heads().check()?;
        self.check_q_lens()?;
        for (what, lens) in [("q_len", &self.q_lens), ("kv_len", &self.kv_lens)] {
            if let Some(len) = lens.iter().find(|&&len| len > MAX_TOKENS) {
                return refuse(what, *len, "0 to 1048576");
            }
        }
        self.check_other_shards()?;
        let elements = self.q_elements().max(self.out_elements());
        if elements > MAX_ELEMENTS {
            return refuse(
                "query tokens x num_q_heads x head_dim",
                elements,
                "fewer than 2^61 elements, which a slice of f32 can hold; make the batch smaller",
            );
        }
        self.scores.check(self.num_q_heads)
    }

    /// Refuses other numbers of query tokens than one for each sequence.
    pub(crate) fn check_q_lens(&self) -> Result<(), Error> {
        if self.q_lens.len() == self.batch() {
            return Ok(());
        }
        Err(Error::Length {
            what: "q_lens",
            given: self.q_lens.len(),
            needed: self.batch(),
        })
    }

    fn check_other_shards(&self) -> Result<(), Error> {
        for (what, given) in [
            ("tokens_before", self.tokens_before.len()),
            ("tokens_after", self.tokens_after.len()),
        ] {
            let needed = self.batch();
            if given != 0 && given != needed {
                return Err(Error::Length {
                    what,
                    given,
                    needed,
                });
            }
        }
        for b in 0..self.batch() {
            let (before, after) = (self.before(b), self.after(b));
            if before > 0 && self.scores.chunk.is_some() {
                let allowed =
                    "0 with chunks, whose positions count from the sequence's first token";
                return refuse("tokens_before", before, allowed);
            }
            if !before.is_multiple_of(SPAN_TOKENS) {
                let allowed = "multiples of 1024: shards ahead are of whole spans";
                return refuse("tokens_before", before, allowed);
            }
            if self.all_tokens(b) > MAX_TOKENS {
                let allowed = "0 to 1048576 tokens of a sequence, cached and following";
                return refuse("tokens_after", after, allowed);
            }
            if before.saturating_add(self.all_tokens(b)) > MAX_TOKENS {
                let allowed = "0 to 1048576 tokens of a sequence, ahead, cached and following";
                return refuse("tokens_before", before, allowed);
            }
        }
        Ok(())
    }

    /// Refuses fewer spans than the longest sequence has tokens for, and more than any has.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_spans(&self, spans: usize) -> Result<(), Error> {
        let longest = self.kv_lens.iter().copied().max().unwrap_or(0);
        if (num_spans(longest).max(1)..=MAX_SPANS).contains(&spans) {
            return Ok(());
        }
        refuse(
            "spans",
            format_args!("{spans} for a sequence of {longest} tokens"),
            "one for each 1024 tokens of the longest sequence, and one at least; at most 1024",
        )
    }

    /// For backends that take whole sequences alone.
    ///
    /// # Errors
    /// [`Unsupported::NoKernel`] where tokens lie ahead or follow in other shards.
    pub fn check_whole(&self, backend: &'static str) -> Result<(), Unsupported> {
        let places = [
            (&self.tokens_before, "lie ahead"),
            (&self.tokens_after, "follow"),
        ];
        for (tokens, place) in places {
            if let Some(tokens) = tokens.iter().find(|tokens| **tokens > 0) {
                return Err(Unsupported::NoKernel {
                    backend,
                    what: format!(
                        "a shard of a sequence, of which {tokens} tokens {place} in others"
                    ),
                    built: "whole sequences; backends cpu and cuda take shards".into(),
                });
            }
        }
        Ok(())
    }

    /// For backends that take shards.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a shard that ends inside a span of [`SPAN_TOKENS`] though tokens follow.
    pub fn check_shards(&self) -> Result<(), Error> {
        let mut lens = self.kv_lens.iter().zip(&self.tokens_after);
        match lens.find(|(len, after)| **after > 0 && **len % SPAN_TOKENS != 0) {
            None => Ok(()),
            Some((len, _)) => refuse(
                "the length of a shard",
                *len,
                "multiples of 1024, but for the last shard of a sequence",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_that_overflow_are_refused() {
        let mut p = Problem::new(Heads::new(1 << 16, 1 << 16, 256), vec![0; 128]).q_len(16);
        p.check().unwrap();
        p.num_q_heads = 1 << 53;
        p.num_kv_heads = 1 << 53;
        assert!(matches!(
            p.check(),
            Err(Error::Parameter {
                what: "num_kv_heads",
                ..
            })
        ));
        assert_eq!((p.rows(), p.q_elements()), (usize::MAX, usize::MAX));
        assert_eq!(p.out_elements(), usize::MAX);
        p.num_kv_heads = 0;
        assert_eq!(p.heads_per_kv(), 0);
        assert!(p.check().is_err());
    }

    #[test]
    fn ranges_are_closed_at_both_ends() {
        let with = |spoil: &dyn Fn(&mut Problem)| {
            let mut p = Problem::new(Heads::new(2, 1, 64), vec![1]);
            spoil(&mut p);
            p.check()
        };
        for scale in [1e-15, 1e15] {
            with(&|p| p.scores.softmax_scale = Some(scale)).unwrap();
        }
        for scale in [0.0, 9e-16, 1.1e15, -1.0, f32::NAN, f32::INFINITY] {
            let error = with(&|p| p.scores.softmax_scale = Some(scale)).unwrap_err();
            assert!(matches!(
                error,
                Error::Parameter {
                    what: "softmax_scale",
                    ..
                }
            ));
        }
        for cap in [1e-3, 1e3] {
            with(&|p| p.scores.softcap = Some(cap)).unwrap();
        }
        for cap in [9e-4, 1001.0, f32::NAN] {
            let error = with(&|p| p.scores.softcap = Some(cap)).unwrap_err();
            assert!(matches!(
                error,
                Error::Parameter {
                    what: "softcap",
                    ..
                }
            ));
        }
        with(&|p| p.scores.alibi_slopes = Some(vec![0.0, -1e3])).unwrap();
        for slopes in [vec![1.0], vec![1.0; 3]] {
            let error = with(&|p| p.scores.alibi_slopes = Some(slopes.clone())).unwrap_err();
            assert!(matches!(
                error,
                Error::Length {
                    what: "alibi_slopes",
                    needed: 2,
                    ..
                }
            ));
        }
        for slope in [1e-21, 1001.0, f32::NAN] {
            let error = with(&|p| p.scores.alibi_slopes = Some(vec![0.5, slope])).unwrap_err();
            assert!(matches!(
                error,
                Error::Parameter {
                    what: "alibi_slopes",
                    ..
                }
            ));
        }
    }
}
