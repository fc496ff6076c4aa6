//! What a launch attends: the sequences of a problem, or blocks of their query tokens where these are many or unlike.

use std::borrow::Cow;

use attn_core::{KvFormat, Problem, QueryBlock, Unsupported};
use attn_kernels::cuda::{DeviceLimits, KvLayout, LowLatency, Preferences, params, select};

use crate::{error::BACKEND, sizes};

/// Query tokens of a sequence that one launch attends as they come, if every sequence has as many.
const FEW_TOKENS: usize = 16;

/// The most query tokens of a launch plan: their blocks take half a gigabyte at least.
const MOST_TOKENS: usize = 1 << 25;

/// A problem as kernels see it: each of its sequences is a query block.
pub(super) struct Launched<'a> {
    pub(super) problem: Cow<'a, Problem>,
    /// Empty where the blocks are the problem's own sequences.
    pub(super) blocks: Vec<QueryBlock>,
}

impl<'a> Launched<'a> {
    /// # Errors
    /// [`Unsupported::NoKernel`] for more query tokens than a list of blocks is made for.
    pub(super) fn new(
        problem: &'a Problem,
        format: KvFormat,
        layout: KvLayout,
        limits: DeviceLimits,
        preferences: &Preferences,
    ) -> Result<Self, Unsupported> {
        let tokens = problem.query_tokens();
        if tokens > MOST_TOKENS {
            return Err(Unsupported::NoKernel {
                backend: BACKEND,
                what: format!("{tokens} query tokens"),
                built: format!("up to {MOST_TOKENS}: attend fewer at once"),
            });
        }
        let many_rows = select::many_rows(problem, format, layout, limits, preferences);
        let heads_per_kv = problem.heads_per_kv().max(1);
        let most = match many_rows {
            Some(config) => config.rows() / heads_per_kv,
            None => FEW_TOKENS,
        };
        let few = |q_len: usize| q_len <= most;
        if problem.batch() == 0 || problem.uniform_q_len().is_some_and(few) {
            return Ok(Launched {
                problem: Cow::Borrowed(problem),
                blocks: Vec::new(),
            });
        }
        let rows = match many_rows {
            Some(config) => config.rows(),
            // Rows of a CTA of `split_kv.cu`.
            None if problem.head_dim > 128 => 16,
            None => 24,
        };
        let tokens = rows / heads_per_kv;
        let blocks: Vec<_> = problem.query_blocks(tokens).collect();
        Ok(Launched {
            problem: Cow::Owned(problem.of_blocks(&blocks)),
            blocks,
        })
    }

    /// The caller's preferences, without kernels that take a block's place for its sequence's.
    pub(super) fn preferences(&self, given: &Preferences) -> Preferences {
        let mut preferences = *given;
        if !self.blocks.is_empty() {
            preferences.low_latency = LowLatency::Never;
        }
        preferences
    }

    /// The blocks as kernels read them.
    ///
    /// # Errors
    /// [`Error::Parameter`](attn_core::Error::Parameter) for numbers of more than 31 bits.
    pub(super) fn params(&self) -> Result<Vec<params::QueryBlock>, attn_core::Error> {
        let block = |block: &QueryBlock| {
            Ok(params::QueryBlock {
                sequence: sizes::int("sequences", block.sequence)?,
                first: sizes::int("query tokens", block.first)?,
                tokens: sizes::int("query tokens", block.tokens)?,
                behind: sizes::int("query tokens", block.behind)?,
            })
        };
        self.blocks.iter().map(block).collect()
    }
}
