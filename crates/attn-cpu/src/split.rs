//! A split of a step, and what its query rows see of each tile.

use std::ops::Range;

use attn_core::{
    Error, Problem, QueryBlock, Scheme, StepInputs,
    arithmetic::LOG2_E,
    segments::{SEGMENT, TILE},
};

use crate::{reader::Reader, softmax::Modifiers};

/// A block of query tokens, and a run of whole segments of one KV head that it attends.
#[derive(Debug, Clone)]
pub(crate) struct Split {
    pub block: QueryBlock,
    pub g: usize,
    pub segments: Range<usize>,
    /// Where its states begin.
    pub states: usize,
}

/// One split's inputs: a KV head of a sequence, and what its query rows see of it.
pub(crate) struct SplitInputs<'a> {
    pub problem: &'a Problem,
    pub split: &'a Split,
    pub reader: Reader<'a>,
    pub kv_len: usize,
    /// The block's query tokens, counted through the sequence's.
    pub queries: Range<usize>,
    /// The tokens that any query row sees.
    pub seen: Range<usize>,
    /// 2/softcap and softcap · log2 e.
    pub softcap: Option<[f32; 2]>,
    /// The schemes of K and V.
    pub schemes: [Scheme; 2],
}

/// Query tokens that read a tile alike.
pub(crate) struct Pass {
    pub queries: Range<usize>,
    /// Whether K, V are read with residuals.
    pub fine: [bool; 2],
}

/// A tile of a split: its first token, and how many it has.
#[derive(Clone, Copy)]
pub(crate) struct TilePlace {
    pub t0: usize,
    pub tokens: usize,
}

impl<'a> SplitInputs<'a> {
    #[inline(always)]
    pub fn new(step: &StepInputs<'a>, split: &'a Split) -> Result<Self, Error> {
        let (problem, format) = (step.problem(), step.plan().format());
        let (b, queries) = (split.block.sequence, split.block.queries(problem));
        let seen = queries
            .clone()
            .map(|i| problem.visible(b, i))
            .filter(|seen| !seen.is_empty())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .unwrap_or(0..0);
        Ok(SplitInputs {
            problem,
            split,
            reader: Reader::new(step.kv(), b, split.g)?,
            kv_len: problem.kv_lens[b],
            queries,
            seen,
            softcap: problem.scores.softcap.map(|cap| [2.0 / cap, cap * LOG2_E]),
            schemes: [format.k, format.v],
        })
    }

    /// The tiles of a segment that any query row sees.
    #[inline(always)]
    pub fn tiles(&self, segment: usize) -> impl Iterator<Item = TilePlace> {
        let (kv_len, seen) = (self.kv_len, &self.seen);
        let segment_tokens = SEGMENT * TILE;
        let tokens = segment * segment_tokens..kv_len.min((segment + 1) * segment_tokens);
        tokens
            .step_by(TILE)
            .map(move |t0| TilePlace {
                t0,
                tokens: TILE.min(kv_len - t0),
            })
            .filter(|tile| tile.t0 < seen.end && tile.t0 + tile.tokens > seen.start)
    }

    /// The tokens of a tile that a query row of a pass sees, counted from the tile's first one; none for other rows.
    #[inline(always)]
    pub fn seen_in(&self, tile: TilePlace, pass: &Pass) -> impl Fn(usize) -> [usize; 2] {
        let (queries, b) = (pass.queries.clone(), self.split.block.sequence);
        // What a query token sees starts and ends no earlier than what those before it see.
        let is_whole = tile.tokens == TILE
            && queries == self.queries
            && self.problem.visible(b, queries.start).end >= tile.t0 + TILE
            && self.problem.visible(b, queries.end - 1).start <= tile.t0;
        move |row| match is_whole {
            true => [0, TILE],
            false => self.seen_by(row, tile, &queries),
        }
    }

    /// What a row sees of a tile that not all rows see all of. A call of its own: the kernels have the answer for other tiles in registers.
    #[inline(never)]
    fn seen_by(&self, row: usize, tile: TilePlace, queries: &Range<usize>) -> [usize; 2] {
        let i = self.queries.start + row / self.problem.heads_per_kv();
        if !queries.contains(&i) {
            return [0, 0];
        }
        let seen = self.problem.visible(self.split.block.sequence, i);
        let end = tile.t0 + tile.tokens;
        [
            seen.start.max(tile.t0) - tile.t0,
            seen.end.min(end).max(tile.t0) - tile.t0,
        ]
    }

    /// The query tokens that read a tile alike, with and without residuals of K and V: query tokens of one step may lie in several tiles.
    #[inline(always)]
    pub fn passes(&self, tile: TilePlace) -> impl Iterator<Item = Pass> {
        let (schemes, problem, b) = (self.schemes, self.problem, self.split.block.sequence);
        let (t0, before) = (tile.t0 / TILE, problem.before(b));
        let fine = move |i: usize| {
            let i = match problem.scores.causal {
                true => i,
                false => problem.q_lens[b] - 1,
            };
            let position = problem.position(b, i).max(0) as usize;
            schemes.map(|scheme| scheme.reads_fine(t0, position / TILE, before))
        };
        let Range {
            start: mut next,
            end,
        } = self.queries;
        std::iter::from_fn(move || {
            if next == end {
                return None;
            }
            let (start, fine_here) = (next, fine(next));
            while next < end && fine(next) == fine_here {
                next += 1;
            }
            Some(Pass {
                queries: start..next,
                fine: fine_here,
            })
        })
    }

    /// Whether any query token of a pass sees any token of the tile.
    #[inline(always)]
    pub fn sees(&self, tile: TilePlace, pass: &Pass) -> bool {
        let mut seen = pass
            .queries
            .clone()
            .map(|i| self.problem.visible(self.split.block.sequence, i));
        seen.any(|seen| seen.start < tile.t0 + tile.tokens && seen.end > tile.t0)
    }

    /// The score modifiers of a query row in a tile.
    #[inline(always)]
    pub fn modifiers_in(&self, tile: TilePlace) -> impl Fn(usize) -> Modifiers {
        let (problem, per) = (self.problem, self.problem.heads_per_kv());
        let (softcap, first_head) = (self.softcap, self.split.g * per);
        let (b, first) = (self.split.block.sequence, self.queries.start);
        move |row| Modifiers {
            softcap,
            alibi: problem.scores.alibi_slopes.as_ref().map(|slopes| {
                let position = problem.position(b, first + row / per) as i32;
                (
                    slopes[first_head + row % per] * LOG2_E,
                    tile.t0 as i32 - position,
                )
            }),
        }
    }
}
