//! Blocks of neighbouring query tokens: what backends divide a step's work by.

use crate::problem::Problem;

/// Query tokens of one sequence that stand side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryBlock {
    /// The sequence.
    pub sequence: usize,
    /// The first token's place among the query tokens of all sequences.
    pub first: usize,
    /// How many they are.
    pub tokens: usize,
    /// How many query tokens of the sequence come after them.
    pub behind: usize,
}

impl QueryBlock {
    /// The tokens, counted through their sequence's alone.
    #[must_use]
    pub fn queries(&self, problem: &Problem) -> std::ops::Range<usize> {
        let end = problem.q_lens[self.sequence] - self.behind;
        end - self.tokens..end
    }

    /// Cached tokens of its sequence, from the first on, that any of the tokens may see.
    #[must_use]
    pub fn seen_len(&self, problem: &Problem) -> usize {
        let kv_len = problem.kv_lens[self.sequence];
        let all = kv_len.saturating_add(problem.after(self.sequence));
        match problem.scores.causal {
            true => all.saturating_sub(self.behind).min(kv_len),
            false => kv_len,
        }
    }
}

impl Problem {
    /// The query tokens in blocks of neighbours, at most `max_tokens` each, in order: what backends divide work by.
    pub fn query_blocks(&self, max_tokens: usize) -> impl Iterator<Item = QueryBlock> + '_ {
        let step = max_tokens.max(1);
        self.query_ranges().enumerate().flat_map(move |(b, all)| {
            all.clone().step_by(step).map(move |first| QueryBlock {
                sequence: b,
                first,
                tokens: step.min(all.end - first),
                behind: all.end - first - step.min(all.end - first),
            })
        })
    }

    /// The problem whose sequences are these blocks of query tokens, each with the tokens that it may see: what kernels that attend blocks
    /// are chosen and sized by.
    #[must_use]
    pub fn of_blocks(&self, blocks: &[QueryBlock]) -> Problem {
        Problem {
            tokens_after: Vec::new(),
            kv_lens: blocks.iter().map(|block| block.seen_len(self)).collect(),
            q_lens: blocks.iter().map(|block| block.tokens).collect(),
            ..self.clone()
        }
    }
}
