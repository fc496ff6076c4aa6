//! What a launch attends: the sequences of a problem, or blocks of their query tokens where these are many or unlike.

use std::borrow::Cow;

use attn_core::{Error, KvFormat, Problem, QueryBlock, Unsupported, problem::FEW_TOKENS};
use attn_kernels::cuda::{DeviceLimits, KvLayout, Preferences, block_rows, params, select};

use crate::{error::BACKEND, sizes};

/// The most query tokens of a launch plan: their blocks take half a gigabyte at least.
const MOST_TOKENS: usize = 1 << 25;

/// What the launches of a plan know of sequences, and what they leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlanKind {
    /// The query tokens of each sequence are those that the problem says.
    #[default]
    Known,
    /// Sequences bring any numbers of query tokens: what the problem says of `q_lens` is how many sequences and how many query tokens in all there are at most, and the most
    /// that one sequence mostly has, for which the kernel is chosen. [`ListBlocksArgs`](crate::native::ListBlocksArgs) tells launches how the tokens are shared.
    Ragged,
    /// As `Known`, over shards of sequences, whole spans of 1024 tokens each but for the last shard: [`CudaBackend::attend_spans_on`](crate::CudaBackend::attend_spans_on) leaves the
    /// states of spans. The problem's `kv_lens` are those of this shard; where tokens lie ahead or follow is read on the device, and its `tokens_before`, `tokens_after` and
    /// `sinks` do not matter.
    Spans,
}

/// What a native plan is for ([`CudaBackend::prepare_for`](crate::CudaBackend::prepare_for)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanFor {
    /// What its launches know of sequences, and what they leave.
    pub kind: PlanKind,
    /// Whether they attend keys that lack centres of K ([`CudaBackend::decode_with_centres_on`](crate::CudaBackend::decode_with_centres_on)): their kernel is loaded in place of the
    /// other one, which a launch over other keys loads then.
    pub centres: bool,
}

/// What each block of a launch is.
pub(super) enum Blocks {
    /// A sequence of the problem.
    Sequences,
    /// Some query tokens of a sequence, as the list says.
    Listed(Vec<QueryBlock>),
    /// The device makes the list, of so many entries.
    OnDevice(usize),
}

/// A problem as kernels see it: each of its sequences is a query block.
pub(super) struct Launched<'a> {
    pub(super) problem: Cow<'a, Problem>,
    pub(super) blocks: Blocks,
}

impl<'a> Launched<'a> {
    /// # Errors
    /// [`Unsupported::NoKernel`] for more query tokens than a list of blocks is made for.
    pub(super) fn new(
        kind: PlanKind,
        problem: &'a Problem,
        format: KvFormat,
        layout: KvLayout,
        limits: DeviceLimits,
        preferences: &Preferences,
    ) -> Result<Self, Unsupported> {
        if kind != PlanKind::Spans {
            problem.check_whole(BACKEND)?;
        }
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
        let rows = match many_rows {
            Some(config) => block_rows(&config, problem, limits.sms),
            // Rows of a CTA of `split_kv.cu`.
            None if problem.head_dim.max() > 128 => 16,
            None => 24,
        };
        let of_block = (rows / heads_per_kv).max(1);
        if kind == PlanKind::Ragged {
            return Ok(Self::ragged(problem, of_block));
        }
        let most = many_rows.map_or(FEW_TOKENS, |_| of_block);
        let few = |q_len: usize| q_len <= most;
        if problem.batch() == 0 || problem.uniform_q_len().is_some_and(few) {
            return Ok(Launched {
                problem: Cow::Borrowed(problem),
                blocks: Blocks::Sequences,
            });
        }
        let blocks: Vec<_> = problem.query_blocks(of_block).collect();
        Ok(Launched {
            problem: Cow::Owned(problem.of_blocks(&blocks)),
            blocks: Blocks::Listed(blocks),
        })
    }

    /// The problem with as many blocks as its query tokens have at most, however its sequences share them.
    fn ragged(problem: &Problem, of_block: usize) -> Self {
        // Of n tokens of one sequence n / of_block blocks are full, and each sequence may have one that is not.
        let all = problem.query_tokens();
        let partial = problem.batch().saturating_mul(of_block - 1);
        let entries = all.min(all.saturating_add(partial) / of_block);
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let mut of_blocks = problem.clone();
        of_blocks.kv_lens = vec![longest; entries];
        of_blocks.q_lens = vec![of_block; entries];
        Launched {
            problem: Cow::Owned(of_blocks),
            blocks: Blocks::OnDevice(entries),
        }
    }

    /// The caller's preferences, restricted to kernels that index blocks and sequences separately.
    pub(super) fn preferences(&self, given: &Preferences) -> Preferences {
        Preferences {
            are_blocks: !matches!(self.blocks, Blocks::Sequences),
            ..*given
        }
    }
}

/// Blocks as kernels read them.
///
/// # Errors
/// [`Error::Parameter`] for numbers of more than 31 bits.
pub(super) fn listed(blocks: &[QueryBlock]) -> Result<Vec<params::QueryBlock>, Error> {
    let block = |block: &QueryBlock| {
        Ok(params::QueryBlock {
            sequence: sizes::int("sequences", block.sequence)?,
            first: sizes::int("query tokens", block.first)?,
            tokens: sizes::int("query tokens", block.tokens)?,
            behind: sizes::int("query tokens", block.behind)?,
        })
    };
    blocks.iter().map(block).collect()
}
