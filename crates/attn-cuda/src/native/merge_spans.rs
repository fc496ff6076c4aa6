//! Unfinished states of shards of sequences: launches that leave them, and the launch that merges and finishes them. Tokens sharded over GPUs have the
//! bits of one GPU so.

use std::{ffi::c_void, sync::Arc};

use attn_core::{Error, KvFormat, Problem, error::refuse, layout::HEAD_DIMS, segments::num_spans};
use attn_kernels::cuda::{Instance, params::MergeSpansParams};

use super::{
    DecodeArgs, DeviceAddress, Dtype, KvLayout, NativePlan, PlanKind, Stream, launch_decode_as,
};
use crate::{device::LoadedKernel, error::failed, gpu::CudaBackend, sizes};

/// Where the states of a shard's spans go, as [`SpanStates`](attn_core::SpanStates) holds them: `spans` is [`NativePlan::spans`], rows are query tokens
/// times query heads.
#[derive(Debug, Clone, Copy)]
pub struct SpansArgs {
    /// i32 `[batch]`: tokens of each sequence that follow those of `kv_lens` in other shards; query tokens are the last of all. Null for none.
    pub tokens_after: DeviceAddress,
    /// f32 `[spans][rows][2]`: maximum, −∞ where a row sees no token of a span, and sum.
    pub max_sums: DeviceAddress,
    /// f32 `[spans][rows][head_dim]`; not written where a row sees no token.
    pub o: DeviceAddress,
}

/// Device addresses of one merge of spans' states: those of all shards, in the order of their tokens, such as an all-gather gives.
#[derive(Debug, Clone, Copy)]
pub struct MergeSpansArgs {
    /// f32 `[states][rows_apart][2]`, as [`SpansArgs::max_sums`] of shard after shard.
    pub max_sums: DeviceAddress,
    /// f32 `[states][rows_apart][head_dim]`.
    pub o: DeviceAddress,
    /// Spans of all shards together.
    pub states: usize,
    /// Rows of each state in memory: `rows`, or more where some of them are merged.
    pub rows_apart: usize,
    /// Rows to merge: query tokens times query heads.
    pub rows: usize,
    /// Query heads of a query token, and KV heads.
    pub num_q_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Outputs `[rows][head_dim]`.
    pub out: DeviceAddress,
    /// Number format of `out`, rounded once at the end.
    pub dtype: Dtype,
    /// f32 `[rows]`, or null.
    pub lse: DeviceAddress,
    /// f32 `[num_q_heads]`, or null without sinks.
    pub sinks: DeviceAddress,
    /// f32 `[num_kv_heads]` for V's schemes with a static scale, else null.
    pub v_tensor_scales: DeviceAddress,
}

/// A prepared merge of spans' states.
#[derive(Debug, Clone)]
pub struct NativeMergeSpans(Arc<LoadedKernel>);

/// Rows of a CTA of `merge_spans.cu`, a warp to each.
const ROWS: usize = 4;

/// The kernel's parameter block.
///
/// # Errors
/// [`Error::Parameter`] for a number that needs more than 31 bits, and for heads or rows that do not fit each other.
pub fn merge_spans_params(args: &MergeSpansArgs) -> Result<MergeSpansParams, Error> {
    if args.num_kv_heads == 0
        || args.num_q_heads == 0
        || !args.num_q_heads.is_multiple_of(args.num_kv_heads)
    {
        let given = format_args!("{}/{}", args.num_q_heads, args.num_kv_heads);
        let allowed = "a whole number of query heads per KV head";
        return refuse("num_q_heads/num_kv_heads", given, allowed);
    }
    if args.rows_apart < args.rows || !args.rows.is_multiple_of(args.num_q_heads) {
        let given = format_args!("{} of {}", args.rows, args.rows_apart);
        return refuse(
            "rows",
            given,
            "whole query tokens, and no more than rows_apart",
        );
    }
    Ok(MergeSpansParams {
        max_sums: args.max_sums.get(),
        o: args.o.get(),
        out: args.out.get(),
        lse: args.lse.get(),
        sinks: args.sinks.get(),
        v_tensor_scales: args.v_tensor_scales.get(),
        rows_apart: args.rows_apart as u64,
        states: sizes::int("states to merge", args.states)?,
        rows: sizes::int("rows to merge", args.rows)?,
        num_q_heads: sizes::int("num_q_heads", args.num_q_heads)?,
        heads_per_kv: sizes::int("heads_per_kv", args.num_q_heads / args.num_kv_heads)?,
        dtype: super::dtype::code(args.dtype),
        ..MergeSpansParams::default()
    })
}

/// Grid and threads of `merge_spans.cu`.
#[must_use]
pub fn merge_spans_grid(rows: usize) -> ([usize; 3], usize) {
    ([rows.div_ceil(ROWS), 1, 1], 32 * ROWS)
}

impl NativePlan {
    /// Spans of the longest sequence that a launch takes, at least one: states of each row that [`CudaBackend::attend_spans_on`] leaves.
    #[must_use]
    pub fn spans(&self) -> usize {
        num_spans(self.max_kv_len()).max(1)
    }
}

impl CudaBackend {
    /// Prepares launches over shards of sequences, whole spans of 1024 tokens each but for the last shard, for
    /// [`CudaBackend::attend_spans_on`]. The problem's `kv_lens` are those of this shard; where tokens follow is read on the device, and its
    /// `tokens_after` and `sinks` do not matter.
    ///
    /// # Errors
    /// Those of [`CudaBackend::prepare`].
    pub fn prepare_spans(
        &self,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
    ) -> Result<NativePlan, Error> {
        self.plan(PlanKind::Spans, problem, format, layout)
    }

    /// Enqueues the attention of a shard, and leaves the states of its spans, which [`CudaBackend::merge_spans_on`] merges with those of other shards:
    /// the states of [`DecodeAttention::attend_spans`](attn_core::DecodeAttention::attend_spans) on the CPU, bit for bit for integer formats. Can be captured.
    ///
    /// `out`, `lse`, `sinks` and `workspace` of `args` are not used.
    ///
    /// # Safety
    /// Those of [`CudaBackend::decode_on`]; `to` is device memory of the documented sizes, which nothing else uses meanwhile. On the device, no
    /// `tokens_after` is negative, a sequence has at most 2^20 tokens with them, and where it is positive, `kv_lens` is a multiple of 1024: other shards have no
    /// wild access, and other bits than one device.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a plan that [`CudaBackend::prepare_spans`] has not made; those of [`CudaBackend::decode_on`].
    pub unsafe fn attend_spans_on(
        &self,
        plan: &NativePlan,
        stream: Stream,
        args: &DecodeArgs,
        to: &SpansArgs,
    ) -> Result<(), Error> {
        // SAFETY: this function's contract.
        unsafe { launch_decode_as(&self.device, plan, stream.raw(), args, 0, Some(to)) }
    }

    /// Loads the kernel of [`CudaBackend::merge_spans_on`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for a head_dim that the library does not have; [`Error::Device`].
    pub fn prepare_merge_spans(
        &self,
        format: KvFormat,
        head_dim: usize,
    ) -> Result<NativeMergeSpans, Error> {
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::parameter(
                "head_dim",
                head_dim,
                "64, 80, 96, 128, 192, 256",
            ));
        }
        let instance = Instance::MergeSpans { format, head_dim };
        Ok(NativeMergeSpans(self.device.kernel(&instance, 0)?))
    }

    /// Enqueues the merge of the states of all shards' spans, in order, of each row's sink, and its end: the bits of
    /// [`SpanStates::finish`](attn_core::SpanStates::finish), which for integer formats are those of one device over all tokens. Can be captured.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes; `out` and `lse` overlap no state.
    /// - The states are those of launches of [`CudaBackend::attend_spans_on`], or of the CPU.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers that the kernel cannot take; [`Error::Device`] with the driver's refusal.
    pub unsafe fn merge_spans_on(
        &self,
        merge: &NativeMergeSpans,
        stream: Stream,
        args: &MergeSpansArgs,
    ) -> Result<(), Error> {
        let mut params = merge_spans_params(args)?;
        if args.rows == 0 {
            return Ok(());
        }
        let (grid, threads) = merge_spans_grid(args.rows);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: `attn_merge_spans` takes one MergeSpansParams, asserted on both sides; the rest is this function's contract.
        unsafe { merge.0.launch(stream.raw(), grid, threads, &mut arguments) }
            .map_err(failed("merging spans"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_heads_that_do_not_fit_are_refused() {
        let good = MergeSpansArgs {
            max_sums: DeviceAddress::NULL,
            o: DeviceAddress::NULL,
            states: 5,
            rows_apart: 24,
            rows: 16,
            num_q_heads: 8,
            num_kv_heads: 2,
            out: DeviceAddress::NULL,
            dtype: Dtype::Bf16,
            lse: DeviceAddress::NULL,
            sinks: DeviceAddress::NULL,
            v_tensor_scales: DeviceAddress::NULL,
        };
        let params = merge_spans_params(&good).unwrap();
        assert_eq!(
            (params.rows, params.rows_apart, params.heads_per_kv),
            (16, 24, 4)
        );
        assert_eq!(merge_spans_grid(6), ([2, 1, 1], 128));
        type Change = fn(&mut MergeSpansArgs);
        let changes: [(&str, Change); 6] = [
            ("rows", |a| a.rows = 15),
            ("rows", |a| a.rows_apart = 15),
            ("num_q_heads/num_kv_heads", |a| a.num_kv_heads = 0),
            ("num_q_heads/num_kv_heads", |a| a.num_kv_heads = 3),
            ("num_q_heads/num_kv_heads", |a| {
                (a.num_q_heads, a.rows) = (0, 0)
            }),
            ("states to merge", |a| a.states = 1 << 31),
        ];
        for (what, change) in changes {
            let mut args = good;
            change(&mut args);
            let refused = merge_spans_params(&args).unwrap_err();
            assert!(
                matches!(refused, Error::Parameter { what: w, .. } if w == what),
                "{refused}"
            );
        }
    }
}
