//! What changes the scores of attention: the scale, masks, soft cap, ALiBi, sinks, and the choice of the arithmetic.

use crate::error::{Error, Given, refuse};

/// softmax_scale and static scales: their product with each other and with log2 e is a normal f32.
pub(crate) const SCALES: std::ops::RangeInclusive<f32> = 1e-15..=1e15;

/// Soft caps: the form `1 - exp2(-2s/cap)` loses up to `cap * 2^-23` of a score.
const SOFTCAPS: std::ops::RangeInclusive<f32> = 1e-3..=1e3;

/// Sinks: in base 2 they stay below 2^21, where f32 has fractions.
const MAX_SINK: f32 = 1e6;

/// How a step of an integer format is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Arithmetic {
    /// To the bit: every backend gives the same answer, for a token alone, in a batch, or in a prompt.
    #[default]
    Exact,
    /// A prompt may be computed by floats, which is faster on a GPU with tensor cores: keys and values are the cache's values rounded to f16, and the
    /// weights f16. The answer is at least as near to attention over the same cache as the exact one, but no bits are promised: another backend, GPU or
    /// cut of the batch may round otherwise. It applies to steps in which some sequence has more than 16 query tokens, and to all rows of such a step;
    /// wherever a backend has no such kernel it answers exactly.
    Fast,
}

/// What changes the scores of attention, and how they are computed. The default is causal attention with the softmax scale `1/√head_dim`, and nothing else.
///
/// ```
/// use attn_core::ScoreModifiers;
///
/// // A layer whose tokens see 127 tokens before their own.
/// let scores = ScoreModifiers { window_left: Some(127), ..ScoreModifiers::default() };
/// assert!(scores.causal);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreModifiers {
    /// The positive factor of q·k; none for `1/√head_dim`.
    pub softmax_scale: Option<f32>,
    /// Whether query token i sees only tokens up to `kv_len − q_len + i`, its own position.
    pub causal: bool,
    /// The soft cap: scaled scores become `cap·tanh(s/cap)`.
    pub softcap: Option<f32>,
    /// A token sees at most this many tokens before its own position; any number is allowed.
    pub window_left: Option<usize>,
    /// Tokens of a chunk: a token sees those of its own chunk alone, from the last multiple of this number up to its own position on. 1 and more; positions count
    /// from the sequence's first token.
    pub chunk: Option<usize>,
    /// The ALiBi slope of each query head, which adds `slope·(t − position)` to the scaled score.
    pub alibi_slopes: Option<Vec<f32>>,
    /// The attention sink of each query head: a logit that takes part in the softmax and has no value. Log-sum-exps include it.
    pub sinks: Option<Vec<f32>>,
    /// How steps of integer formats are computed.
    pub arithmetic: Arithmetic,
}

impl Default for ScoreModifiers {
    fn default() -> Self {
        ScoreModifiers {
            softmax_scale: None,
            causal: true,
            softcap: None,
            window_left: None,
            chunk: None,
            alibi_slopes: None,
            sinks: None,
            arithmetic: Arithmetic::Exact,
        }
    }
}

impl ScoreModifiers {
    /// The positive factor of q·k for heads of so many dims.
    #[must_use]
    pub fn scale(&self, head_dim: usize) -> f32 {
        let usual = || 1.0 / (head_dim as f32).sqrt();
        self.softmax_scale.unwrap_or_else(usual)
    }

    /// The first position that a token at `position` sees, by its window and its chunk; that of a token that stands before the sequence may be negative.
    pub(crate) fn first_position(&self, position: isize) -> isize {
        // Checked lengths are far below 2^30; a larger window or chunk hides no cached token, and a cast of it would wrap.
        let signed = |x: usize| x.min(1 << 30) as isize;
        let of_window = self
            .window_left
            .map_or(0, |window| position - signed(window));
        let of_chunk = self.chunk.map_or(0, |chunk| {
            position - position.rem_euclid(signed(chunk).max(1))
        });
        of_window.max(of_chunk)
    }

    /// Whether tokens are hidden for being too far before a query's position.
    #[must_use]
    pub fn hides_old_tokens(&self) -> bool {
        self.window_left.is_some() || self.chunk.is_some()
    }

    /// For backends: the window and the chunk as kernels take them, which have no sequence longer than 2^20: −1 without a window, 0 without chunks.
    #[must_use]
    pub fn kernel_masks(&self) -> [i32; 2] {
        let number = |x: Option<usize>, none| x.map_or(none, |x| x.min(1 << 30) as i32);
        [number(self.window_left, -1), number(self.chunk, 0)]
    }

    /// Whether scores pass through a soft cap or ALiBi's slopes.
    #[must_use]
    pub fn changes_scores(&self) -> bool {
        self.softcap.is_some() || self.alibi_slopes.is_some()
    }

    /// Refuses values that the library does not define for so many query heads.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the modifier and what is allowed; [`Error::Length`] for the slopes and the sinks.
    pub fn check(&self, num_q_heads: usize) -> Result<(), Error> {
        if let Some(scale) = self.softmax_scale.filter(|scale| !SCALES.contains(scale)) {
            return refuse(
                "softmax_scale",
                scale,
                "1e-15 to 1e15; usually 1/sqrt(head_dim)",
            );
        }
        if let Some(cap) = self.softcap.filter(|cap| !SOFTCAPS.contains(cap)) {
            return refuse(
                "softcap",
                cap,
                "0.001 to 1000, or none: a larger one changes no score that a model makes",
            );
        }
        if let Some(chunk) = self.chunk.filter(|chunk| *chunk == 0 || !self.causal) {
            let given = format_args!(
                "{chunk}{}",
                if self.causal {
                    ""
                } else {
                    " without a causal mask"
                }
            );
            return refuse(
                "chunk",
                given,
                "1 and more tokens of causal attention, or none",
            );
        }
        let is_slope = |s: f32| s == 0.0 || (1e-20..=1e3).contains(&s.abs());
        let is_sink = |s: f32| s.abs() <= MAX_SINK;
        PerHead {
            what: "alibi_slopes",
            values: self.alibi_slopes.as_deref(),
            allowed: "0, or a magnitude of 1e-20 to 1000",
        }
        .check(num_q_heads, is_slope)?;
        PerHead {
            what: "sinks",
            values: self.sinks.as_deref(),
            allowed: "a magnitude up to 1e6; -1e6 for a head without a sink",
        }
        .check(num_q_heads, is_sink)
    }
}

/// A modifier that has a value for each query head.
struct PerHead<'a> {
    what: &'static str,
    values: Option<&'a [f32]>,
    allowed: &'static str,
}

impl PerHead<'_> {
    /// Refuses another number of values than one for each query head, and values that are not allowed.
    fn check(&self, num_q_heads: usize, is_allowed: impl Fn(f32) -> bool) -> Result<(), Error> {
        let Some(values) = self.values else {
            return Ok(());
        };
        if values.len() != num_q_heads {
            return Err(Error::Length {
                what: self.what,
                given: values.len(),
                needed: num_q_heads,
            });
        }
        match values.iter().position(|x| !is_allowed(*x)) {
            Some(head) => {
                let given = format_args!("{} for query head {head}", Given::from(values[head]));
                refuse(self.what, given, self.allowed)
            }
            None => Ok(()),
        }
    }
}
