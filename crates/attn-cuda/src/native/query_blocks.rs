//! What a launch attends: the sequences of a problem, or blocks of their query tokens where these are many or unlike; and the launch that lists
//! the blocks of a step on the device.

use std::{borrow::Cow, ffi::c_void};

use attn_core::{Error, KvFormat, Problem, QueryBlock, Unsupported};
use attn_kernels::cuda::{
    DeviceLimits, KvLayout, LowLatency, Preferences,
    params::{self, CheckParams, DecodeParams, QueryBlocksParams},
    select,
};

use super::{DeviceAddress, LaunchPlan, NativePlan, Stream, check};
use crate::{
    error::{BACKEND, failed},
    gpu::CudaBackend,
    sizes,
};

/// Query tokens of a sequence that one launch attends as they come, if every sequence has as many.
const FEW_TOKENS: usize = 16;

/// The most query tokens of a launch plan: their blocks take half a gigabyte at least.
const MOST_TOKENS: usize = 1 << 25;

/// Threads of `query_blocks.cu`, and the most CTAs: each counts all sequences.
const LIST_THREADS: usize = 256;
const MOST_LISTERS: usize = 32;

/// What a launch plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanKind {
    /// The query tokens of each sequence that the problem says.
    Known,
    /// As many query tokens as the problem's in all, of which each sequence brings any number: by a list that the device makes.
    Ragged,
}

/// What each block of a launch is.
pub(super) enum Blocks {
    /// A sequence of the problem.
    Sequences,
    /// Some query tokens of a sequence, as the list says.
    Listed(Vec<QueryBlock>),
    /// The same, by a list of so many entries that the device makes.
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
            Some(config) => config.rows(),
            // Rows of a CTA of `split_kv.cu`.
            None if problem.head_dim > 128 => 16,
            None => 24,
        };
        let of_block = (rows / heads_per_kv).max(1);
        if kind == PlanKind::Ragged {
            return Ok(Self::ragged(problem, of_block));
        }
        let most = many_rows.map_or(FEW_TOKENS, |_| rows / heads_per_kv);
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

    /// The caller's preferences, without kernels that take a block's place for its sequence's.
    pub(super) fn preferences(&self, given: &Preferences) -> Preferences {
        let mut preferences = *given;
        if !matches!(self.blocks, Blocks::Sequences) {
            preferences.low_latency = LowLatency::Never;
        }
        preferences
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

impl LaunchPlan {
    /// The parameters of `query_blocks.cu`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers of more than 31 bits.
    pub fn query_blocks_params(
        &self,
        problem: &Problem,
        cu_seqlens_q: DeviceAddress,
        to: DeviceAddress,
    ) -> Result<QueryBlocksParams, Error> {
        Ok(QueryBlocksParams {
            cu_seqlens_q: cu_seqlens_q.get(),
            blocks: to.get(),
            batch: sizes::int("sequences", problem.batch())?,
            num_blocks: sizes::int("query blocks", self.num_blocks)?,
            block_tokens: sizes::int("query tokens", self.block_tokens)?,
            query_tokens: sizes::int("query tokens", problem.query_tokens())?,
        })
    }
}

/// Grid and threads of `query_blocks.cu`.
#[must_use]
pub fn query_blocks_grid(entries: usize) -> ([usize; 3], usize) {
    let ctas = entries.div_ceil(LIST_THREADS).min(MOST_LISTERS);
    ([ctas, 1, 1], LIST_THREADS)
}

impl CudaBackend {
    /// Enqueues the launch that lists a step's query blocks, for a plan of [`CudaBackend::prepare_ragged`]. Once for a step: the launches of all its
    /// layers read the list. Can be captured; sequences may bring other numbers of query tokens each time that the graph runs.
    ///
    /// `cu_seqlens_q` is i32 or u32 `[batch + 1]`: the first query token of each sequence, counted through all of them, then the end of the last
    /// one's. A sequence without query tokens costs nothing. The list goes to `to`, [`NativePlan::query_blocks_bytes`] bytes.
    ///
    /// With `ATTN_CHECK=1` a checking launch goes first, as in [`CudaBackend::decode_on`].
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes; no launch that reads the list runs meanwhile.
    /// - On the device, the numbers never fall, and end at [`NativePlan::max_query_tokens`] at most. (Others give a list of other blocks, and no
    ///   write elsewhere.)
    ///
    /// # Errors
    /// [`Error::Parameter`] for another plan; [`Error::Device`] with the driver's refusal, or with [`CudaError::Check`](crate::CudaError::Check).
    pub unsafe fn query_blocks_on(
        &self,
        plan: &NativePlan,
        stream: Stream,
        cu_seqlens_q: DeviceAddress,
        to: DeviceAddress,
    ) -> Result<(), Error> {
        let Some(kernel) = &plan.list_blocks else {
            return Err(Error::Parameter {
                what: "plan",
                given: "a plan that knows the query tokens of each sequence".to_owned(),
                allowed: "one of prepare_ragged; or pass NativePlan::query_blocks to its launches",
            });
        };
        let launch_plan = &plan.launch_plan;
        let mut params = launch_plan.query_blocks_params(&plan.problem, cu_seqlens_q, to)?;
        if params.num_blocks == 0 {
            return Ok(());
        }
        if let Some(kernel) = &plan.check {
            let limits = CheckParams {
                cu_seqlens_q: cu_seqlens_q.get(),
                query_tokens: params.query_tokens,
                ..CheckParams::default()
            };
            let mut checked = DecodeParams {
                batch: params.batch,
                ..DecodeParams::default()
            };
            // SAFETY: this function's contract.
            unsafe { check(&self.device, kernel, stream.raw(), &mut checked, limits) }
                .map_err(failed("checking the query tokens"))?;
        }
        let (grid, threads) = query_blocks_grid(params.num_blocks as usize);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: `attn_query_blocks` takes one QueryBlocksParams, asserted on both sides; the rest is this function's contract.
        unsafe { kernel.launch(stream.raw(), grid, threads, &mut arguments) }
            .map_err(failed("listing query blocks"))
    }
}
