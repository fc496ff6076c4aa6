//! The list of a step's query blocks, made on the device from what each sequence brings.

use std::ffi::c_void;

use attn_core::{Error, Problem};
use attn_kernels::cuda::params::{CheckParams, DecodeParams, QueryBlocksParams};

use super::{DeviceAddress, LaunchPlan, NativePlan, Stream, check};
use crate::{error::failed, gpu::CudaBackend, sizes};

/// Threads of `query_blocks.cu`, and the most CTAs: each counts all sequences.
const THREADS: usize = 256;
const MOST_LISTERS: usize = 32;

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
    let ctas = entries.div_ceil(THREADS).min(MOST_LISTERS);
    ([ctas, 1, 1], THREADS)
}

impl CudaBackend {
    /// Enqueues the launch that lists a step's query blocks, for a plan of [`CudaBackend::prepare_ragged`]. Once for a step: the launches of all its
    /// layers read the list. Can be captured; sequences may bring other numbers of query tokens each time that the graph runs.
    ///
    /// `cu_seqlens_q` is i32 or u32 `[batch + 1]`: the first query token of each sequence, counted through all of them, then the end of the last
    /// one's. A sequence without query tokens costs nothing. The list goes to `to`, [`NativePlan::query_blocks_bytes`] bytes.
    ///
    /// With `ATTN_CUDA=check=1` a checking launch goes first, as in [`CudaBackend::decode_on`].
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
            return Err(Error::parameter(
                "plan",
                format_args!("a plan that knows the query tokens of each sequence"),
                "one of prepare_ragged; or pass NativePlan::query_blocks to its launches",
            ));
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
