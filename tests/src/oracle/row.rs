//! One query row in f64: the tokens that it sees, their scores, and the softmax over them.
//!
//! These are the specification's words, not `attn_core`'s functions: a wrong mask there must not be right here.

use attn_core::Problem;

/// A query head at a query token.
#[derive(Debug, Clone, Copy)]
pub struct QueryRow<'a> {
    /// The problem whose modifiers and lengths count.
    pub problem: &'a Problem,
    /// The sequence.
    pub sequence: usize,
    /// The query token's index among those of the sequence.
    pub token: usize,
    /// The query head.
    pub head: usize,
}

/// Softmax weights of the tokens that a row sees.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Tokens with their weights, which sum to one with that of the sink.
    pub of_tokens: Vec<(usize, f64)>,
    /// The log-sum-exp; −∞ if there is neither a token nor a sink.
    pub lse: f64,
}

impl QueryRow<'_> {
    /// Tokens of the sequence.
    #[must_use]
    pub fn kv_len(&self) -> usize {
        self.problem.kv_lens[self.sequence]
    }

    /// The place of the query token among the tokens of its sequence; below 0 if it lies before the first one.
    #[must_use]
    pub fn position(&self) -> f64 {
        self.kv_len() as f64 - self.problem.q_lens[self.sequence] as f64 + self.token as f64
    }

    /// The last tile that the row may see, with which its window of residuals ends.
    #[must_use]
    pub fn own_tile(&self) -> f64 {
        match self.problem.scores.causal {
            true => (self.position() / 64.0).floor(),
            false => ((self.kv_len() as f64 - 1.0) / 64.0).floor(),
        }
    }

    /// Whether the row sees a token.
    #[must_use]
    pub fn sees(&self, token: usize) -> bool {
        let (scores, behind) = (&self.problem.scores, self.position() - token as f64);
        let is_in_chunk = |chunk: usize| {
            let chunk_of = |position: f64| (position / chunk as f64).floor();
            chunk_of(token as f64) == chunk_of(self.position())
        };
        (!scores.causal || behind >= 0.0)
            && scores.window_left.is_none_or(|w| behind <= w as f64)
            && scores.chunk.is_none_or(is_in_chunk)
    }

    /// What ALiBi adds to the score of a token.
    #[must_use]
    pub fn bias(&self, token: usize) -> f64 {
        let slopes = self.problem.scores.alibi_slopes.as_ref();
        slopes.map_or(0.0, |slopes| {
            f64::from(slopes[self.head]) * (token as f64 - self.position())
        })
    }

    /// The score of a token whose key has this product with the query, times the softmax scale.
    #[must_use]
    pub fn score(&self, token: usize, product: f64) -> f64 {
        let capped = match self.problem.scores.softcap.map(f64::from) {
            Some(cap) => cap * (product / cap).tanh(),
            None => product,
        };
        capped + self.bias(token)
    }

    /// The logit of the head's sink.
    #[must_use]
    pub fn sink(&self) -> Option<f64> {
        let sinks = self.problem.scores.sinks.as_ref();
        sinks.map(|sinks| f64::from(sinks[self.head]))
    }

    /// The softmax over the scores of tokens and the sink.
    #[must_use]
    pub fn weigh(&self, scores: &[(usize, f64)]) -> Weights {
        let sink = self.sink();
        let logits = || scores.iter().map(|(_, s)| *s).chain(sink);
        let max = logits().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return Weights {
                of_tokens: Vec::new(),
                lse: max,
            };
        }
        let sum: f64 = logits().map(|s| (s - max).exp()).sum();
        let weight = |&(t, s): &(usize, f64)| (t, (s - max).exp() / sum);
        Weights {
            of_tokens: scores.iter().map(weight).collect(),
            lse: max + sum.ln(),
        }
    }
}
