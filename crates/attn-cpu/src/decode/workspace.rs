//! How a step is cut into splits, and the memory for what they leave.

use attn_core::{
    Error, Problem, QueryBlock,
    error::reserve,
    problem::FEW_TOKENS,
    segments::{SPAN, num_segments},
};

use crate::split::Split;

/// Query rows of a block where a sequence has more than [`FEW_TOKENS`] query tokens: a tile is unpacked once for all of them, and their states stay in
/// a core's own cache.
const BLOCK_ROWS: usize = 128;

/// Memory that a step needs beside its inputs, kept for the next step.
#[derive(Default)]
pub(crate) struct Workspace {
    pub(super) splits: Vec<Split>,
    /// Blocks of query tokens, each with the index of its first split.
    pub(super) blocks: Vec<(QueryBlock, usize)>,
    pub(super) states: Vec<f32>,
    /// Log-sum-exps that the caller did not ask for.
    pub(super) unasked_lse: Vec<f32>,
}

impl Workspace {
    /// Cuts a problem into splits of spans, or into those that so many threads attend fastest; returns how many of the states that they leave
    /// make up a span, and the length of all states.
    pub(super) fn cut(
        &mut self,
        problem: &Problem,
        threads: usize,
        by_spans: bool,
    ) -> (usize, usize) {
        self.splits.clear();
        self.blocks.clear();
        let heads = problem.num_kv_heads;
        let few = problem.max_q_len() <= FEW_TOKENS;
        let block_tokens = match few {
            true => FEW_TOKENS,
            false => BLOCK_ROWS.div_ceil(problem.heads_per_kv()),
        };
        let (mut items, mut spans) = (0, 0);
        for block in problem.query_blocks(block_tokens) {
            self.blocks.push((block, 0));
            items += heads;
            spans += heads * segments_of(problem, &block).div_ceil(SPAN);
        }
        let per_split = if by_spans {
            SPAN
        } else if spans < 4 * threads {
            1
        } else if few || items < 4 * threads {
            SPAN
        } else {
            usize::MAX
        };
        let row = problem.heads_per_kv() * (problem.head_dim.v + 2);
        let mut states = 0;
        for (block, start) in &mut self.blocks {
            *start = self.splits.len();
            let count = segments_of(problem, block);
            let mut first = 0;
            while first < count {
                let segments = first..count.min(first.saturating_add(per_split));
                first = segments.end;
                for g in 0..heads {
                    self.splits.push(Split {
                        block: *block,
                        g,
                        segments: segments.clone(),
                        states,
                    });
                    states = states.saturating_add(block.tokens.saturating_mul(row));
                }
            }
        }
        // A split of a span or more has merged its segments.
        (if per_split == 1 { SPAN } else { 1 }, states)
    }
}

/// Segments that a block of query tokens may see.
fn segments_of(problem: &Problem, block: &QueryBlock) -> usize {
    num_segments(block.seen_len(problem))
}

/// Makes a list at least as long as needed.
pub(super) fn grow(what: &'static str, list: &mut Vec<f32>, len: usize) -> Result<(), Error> {
    reserve(what, list, len.saturating_sub(list.len()))?;
    list.resize(len.max(list.len()), 0.0);
    Ok(())
}
