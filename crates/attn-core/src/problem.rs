//! The attention step to take: shapes, lengths and score modifiers, validated here, once.

use crate::error::{Error, refuse};

/// head_dims that the library defines.
pub const HEAD_DIMS: [usize; 6] = [64, 80, 96, 128, 192, 256];

/// One decode step over a batch of cached sequences.
///
/// Build with [`Problem::new`], change public fields, and let [`DecodeStep::new`](crate::DecodeStep::new) or a backend's `plan` check it.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Query heads.
    pub num_q_heads: usize,
    /// KV heads; divides `num_q_heads`, at most 64 query heads each.
    pub num_kv_heads: usize,
    /// Elements per head: one of [`HEAD_DIMS`].
    pub head_dim: usize,
    /// Query tokens per sequence, 1..=16; the last stands at position `kv_len − 1`.
    pub q_len: usize,
    /// Cached tokens of each sequence, 0..=1 Mi.
    pub kv_lens: Vec<usize>,
    /// Multiplies q·k; positive.
    pub softmax_scale: f32,
    /// Whether query token i sees only tokens up to `kv_len − q_len + i`.
    pub causal: bool,
    /// `cap·tanh(s/cap)` on the scaled scores.
    pub softcap: Option<f32>,
    /// A token sees at most this many tokens before its own position.
    pub window_left: Option<usize>,
    /// Per query head: adds `slope·(t − position)` to the scaled score.
    pub alibi_slopes: Option<Vec<f32>>,
}

impl Problem {
    /// Causal decode with `softmax_scale = 1/√head_dim`, one query token, no modifiers.
    pub fn new(
        num_q_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        kv_lens: Vec<usize>,
    ) -> Self {
        Problem {
            num_q_heads,
            num_kv_heads,
            head_dim,
            q_len: 1,
            kv_lens,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
            causal: true,
            softcap: None,
            window_left: None,
            alibi_slopes: None,
        }
    }

    /// Query heads that read one KV head.
    pub fn heads_per_kv(&self) -> usize {
        self.num_q_heads / self.num_kv_heads
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.kv_lens.len()
    }

    /// Rows of the result: `[batch, q_len, num_q_heads]`.
    pub fn rows(&self) -> usize {
        self.batch() * self.q_len * self.num_q_heads
    }

    /// Refuses what the library does not define.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the parameter and what is allowed; [`Error::Length`] for the slopes.
    pub fn check(&self) -> Result<(), Error> {
        check_head_dim(self.head_dim)?;
        if self.num_kv_heads == 0
            || self.num_q_heads == 0
            || !self.num_q_heads.is_multiple_of(self.num_kv_heads)
        {
            return refuse(
                "num_q_heads/num_kv_heads",
                format!("{}/{}", self.num_q_heads, self.num_kv_heads),
                "a whole number of query heads per KV head, from 1 to 64",
            );
        }
        if self.heads_per_kv() > 64 {
            return refuse("heads_per_kv", self.heads_per_kv(), "1 to 64");
        }
        if !(1..=16).contains(&self.q_len) {
            return refuse(
                "q_len",
                self.q_len,
                "1 to 16; prefill is another kernel's work",
            );
        }
        if let Some(len) = self.kv_lens.iter().find(|&&len| len > 1 << 20) {
            return refuse("kv_len", len, "0 to 1048576");
        }
        if !(1e-20..=1e20).contains(&self.softmax_scale) {
            return refuse(
                "softmax_scale",
                self.softmax_scale,
                "1e-20 to 1e20; usually 1/sqrt(head_dim)",
            );
        }
        if let Some(cap) = self.softcap.filter(|cap| !(1e-3..=1e6).contains(cap)) {
            return refuse("softcap", cap, "0.001 to 1000000, or none");
        }
        if let Some(slopes) = &self.alibi_slopes {
            if slopes.len() != self.num_q_heads {
                return Err(Error::Length {
                    what: "alibi_slopes",
                    given: slopes.len(),
                    needed: self.num_q_heads,
                });
            }
            if let Some(s) = slopes
                .iter()
                .find(|s| **s != 0.0 && !(1e-20..=1e3).contains(&s.abs()))
            {
                return refuse("alibi_slopes", s, "0, or a magnitude of 1e-20 to 1000");
            }
        }
        Ok(())
    }

    /// Tokens that query token `i` of sequence `b` sees: `start..end`.
    pub fn visible(&self, b: usize, i: usize) -> std::ops::Range<usize> {
        let len = self.kv_lens[b] as isize;
        let position = len - self.q_len as isize + i as isize;
        let end = if self.causal {
            (position + 1).clamp(0, len)
        } else {
            len
        };
        let start = self
            .window_left
            .map_or(0, |w| (position - w as isize).clamp(0, end));
        start as usize..end as usize
    }
}

/// Refuses a head_dim that no kernel is written for.
pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), Error> {
    if HEAD_DIMS.contains(&head_dim) {
        Ok(())
    } else {
        refuse("head_dim", head_dim, "64, 80, 96, 128, 192, 256")
    }
}
