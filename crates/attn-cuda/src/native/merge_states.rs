//! The merge of results over disjoint tokens, on the device: tokens sharded over GPUs, or a shared prefix attended once.

use std::{ffi::c_void, sync::Arc};

use attn_core::{Error, error::refuse};
use attn_kernels::cuda::{Instance, params::MergeStatesParams};

use super::{DeviceAddress, Dtype, Stream};
use crate::{device::LoadedKernel, error::failed, gpu::CudaBackend, sizes};

/// Device addresses of one merge: `states` results of the same `rows` rows, such as an all-gather of shards gives.
#[derive(Debug, Clone, Copy)]
pub struct MergeStatesArgs {
    /// Outputs `[states][rows][head_dim]`.
    pub outs: DeviceAddress,
    /// Log-sum-exps f32 `[states][rows]`: natural log, −∞ where a state saw no token of a row.
    pub lses: DeviceAddress,
    /// Elements from one state's outputs to the next one's: `rows · head_dim`, or more; a multiple of 4.
    pub out_stride: usize,
    /// Elements from one state's log-sum-exps to the next one's: `rows`, or more.
    pub lse_stride: usize,
    /// Number format of `outs`.
    pub in_dtype: Dtype,
    /// Merged outputs `[rows][head_dim]`; may be those of the first state.
    pub out: DeviceAddress,
    /// Number format of `out`, rounded once at the end.
    pub out_dtype: Dtype,
    /// Merged log-sum-exps f32 `[rows]`, or null; may be those of the first state.
    pub lse: DeviceAddress,
    /// Results to merge; with 0 every row is zeros and −∞.
    pub states: usize,
    /// Rows of each: query tokens times query heads.
    pub rows: usize,
    /// Elements of a row: a multiple of 4, up to 256.
    pub head_dim: usize,
}

/// A prepared merge of states.
#[derive(Debug, Clone)]
pub struct NativeMergeStates(Arc<LoadedKernel>);

/// Rows of a CTA of `merge_states.cu`, a warp to each.
const ROWS: usize = 4;

/// The kernel's parameter block.
///
/// # Errors
/// [`Error::Parameter`] for a number that needs more than 31 bits, and for rows that the kernel's vectors do not divide.
pub fn merge_states_params(args: &MergeStatesArgs) -> Result<MergeStatesParams, Error> {
    if args.head_dim == 0 || args.head_dim > 256 || !args.head_dim.is_multiple_of(4) {
        return refuse("head_dim", args.head_dim, "multiples of 4 up to 256");
    }
    let elements = sizes::product("merged outputs", &[args.rows, args.head_dim])?;
    if args.out_stride < elements || !args.out_stride.is_multiple_of(4) {
        let allowed = "a multiple of 4 elements, at least rows · head_dim";
        return refuse("stride of outputs", args.out_stride, allowed);
    }
    if args.lse_stride < args.rows {
        return refuse("stride of log-sum-exps", args.lse_stride, "at least rows");
    }
    let [out_stride, lse_stride, _] = sizes::strides([args.out_stride, args.lse_stride, 0]);
    Ok(MergeStatesParams {
        outs: args.outs.get(),
        lses: args.lses.get(),
        out: args.out.get(),
        lse: args.lse.get(),
        out_stride,
        lse_stride,
        states: sizes::int("states to merge", args.states)?,
        rows: sizes::int("rows to merge", args.rows)?,
        head_dim: sizes::int("head_dim", args.head_dim)?,
        in_dtype: super::dtype::code(args.in_dtype),
        out_dtype: super::dtype::code(args.out_dtype),
        ..MergeStatesParams::default()
    })
}

/// Grid and threads of `merge_states.cu`.
#[must_use]
pub fn merge_states_grid(rows: usize) -> ([usize; 3], usize) {
    ([rows.div_ceil(ROWS), 1, 1], 32 * ROWS)
}

impl CudaBackend {
    /// Loads the kernel of [`CudaBackend::merge_on`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn prepare_merge(&self) -> Result<NativeMergeStates, Error> {
        let kernel = self.device.kernel(&Instance::MergeStates, 0)?;
        Ok(NativeMergeStates(kernel))
    }

    /// Enqueues the merge of results over disjoint tokens, in their order: the bits of [`AttnState::merge_state`](attn_core::AttnState::merge_state)
    /// one after the other, rounded to `out_dtype` at the end. The same results in the same order give the same bits. Can be captured.
    ///
    /// A log-sum-exp includes its row's sink, so only one of the results may have been computed with sinks.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes.
    /// - `out` and `lse` overlap no state but, where number formats are the same, the first; outputs are finite, and log-sum-exps finite or −∞.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers that the kernel cannot take; [`Error::Device`] with the driver's refusal.
    pub unsafe fn merge_on(
        &self,
        merge: &NativeMergeStates,
        stream: Stream,
        args: &MergeStatesArgs,
    ) -> Result<(), Error> {
        let mut params = merge_states_params(args)?;
        if args.rows == 0 {
            return Ok(());
        }
        let (grid, threads) = merge_states_grid(args.rows);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: `attn_merge_states` takes one MergeStatesParams, asserted on both sides; the rest is this function's contract.
        unsafe { merge.0.launch(stream.raw(), grid, threads, &mut arguments) }
            .map_err(failed("merging states"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_the_kernel_cannot_hold_are_refused() {
        let good = MergeStatesArgs {
            outs: DeviceAddress::NULL,
            lses: DeviceAddress::NULL,
            out_stride: 7 * 128,
            lse_stride: 7,
            in_dtype: Dtype::Bf16,
            out: DeviceAddress::NULL,
            out_dtype: Dtype::F32,
            lse: DeviceAddress::NULL,
            states: 3,
            rows: 7,
            head_dim: 128,
        };
        let params = merge_states_params(&good).unwrap();
        assert_eq!((params.states, params.rows, params.head_dim), (3, 7, 128));
        assert_eq!((params.in_dtype, params.out_dtype), (2, 0));
        assert_eq!(merge_states_grid(7), ([2, 1, 1], 128));
        type Change = fn(&mut MergeStatesArgs);
        let changes: [(&str, Change); 6] = [
            ("head_dim", |a| a.head_dim = 0),
            ("head_dim", |a| (a.head_dim, a.out_stride) = (260, 7 * 260)),
            ("head_dim", |a| a.head_dim = 30),
            ("stride of outputs", |a| a.out_stride = 7 * 128 - 4),
            ("stride of log-sum-exps", |a| a.lse_stride = 6),
            ("states to merge", |a| a.states = 1 << 31),
        ];
        for (what, change) in changes {
            let mut args = good;
            change(&mut args);
            let refused = merge_states_params(&args).unwrap_err();
            assert!(
                matches!(refused, Error::Parameter { what: w, .. } if w == what),
                "{refused}"
            );
        }
    }
}
