//! The merge of results over disjoint tokens, on the device: tokens sharded over GPUs, or a shared prefix attended once.

use attn_core::{Error, MAX_HEAD_DIM, error::refuse};
use attn_kernels::cuda::{Instance, params::MergeStatesParams};

use super::{
    dtype::{self, Dtype},
    grid::Grid,
    op::Op,
};
use crate::{handles::DeviceAddress, sizes};

/// The merge of `states` results of the same `rows` rows over disjoint tokens, in their order, such as an all-gather of shards gives: the bits of
/// [`AttnState::merge_state`](attn_core::AttnState::merge_state) one after the other, rounded to `out_dtype` at the end. The same results in the same order
/// give the same bits. A log-sum-exp includes its row's sink, so only one of the results may have been computed with sinks.
///
/// Refused are other head_dims than multiples of 4 up to 576, and strides at which states overlap.
///
/// # Safety
/// `out` and `lse` overlap no state but, where number formats are the same, the first; outputs are finite, and log-sum-exps finite or −∞.
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
    /// Elements of a row: a multiple of 4, up to 576.
    pub head_dim: usize,
}

/// Rows of a CTA of `merge_states.cu`, a warp to each.
const ROWS: usize = 4;

// SAFETY: `attn_merge_states` takes one MergeStatesParams, asserted on both sides, and writes the merged rows alone.
unsafe impl Op for MergeStatesArgs {
    type Shape = ();
    type Params = MergeStatesParams;
    const DOING: &'static str = "merging states";

    fn instances((): &()) -> Result<Vec<Instance>, Error> {
        Ok(vec![Instance::MergeStates])
    }

    fn params(&self, (): &()) -> Result<MergeStatesParams, Error> {
        if self.head_dim == 0 || self.head_dim > MAX_HEAD_DIM || !self.head_dim.is_multiple_of(4) {
            return refuse("head_dim", self.head_dim, "multiples of 4 up to 576");
        }
        let elements = sizes::product("merged outputs", &[self.rows, self.head_dim])?;
        if self.out_stride < elements || !self.out_stride.is_multiple_of(4) {
            let allowed = "a multiple of 4 elements, at least rows · head_dim";
            return refuse("stride of outputs", self.out_stride, allowed);
        }
        if self.lse_stride < self.rows {
            return refuse("stride of log-sum-exps", self.lse_stride, "at least rows");
        }
        let [out_stride, lse_stride] = sizes::strides([self.out_stride, self.lse_stride]);
        Ok(MergeStatesParams {
            outs: self.outs.get(),
            lses: self.lses.get(),
            out: self.out.get(),
            lse: self.lse.get(),
            out_stride,
            lse_stride,
            states: sizes::int("states to merge", self.states)?,
            rows: sizes::int("rows to merge", self.rows)?,
            head_dim: sizes::int("head_dim", self.head_dim)?,
            in_dtype: dtype::code(self.in_dtype),
            out_dtype: dtype::code(self.out_dtype),
            ..MergeStatesParams::default()
        })
    }

    fn grid(&self, (): &()) -> Grid {
        Grid::new([self.rows.div_ceil(ROWS), 1, 1], 32 * ROWS)
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
        let params = good.params(&()).unwrap();
        assert_eq!((params.states, params.rows, params.head_dim), (3, 7, 128));
        assert_eq!((params.in_dtype, params.out_dtype), (2, 0));
        assert_eq!(good.grid(&()), Grid::new([2, 1, 1], 128));
        type Change = fn(&mut MergeStatesArgs);
        let changes: [(&str, Change); 6] = [
            ("head_dim", |a| a.head_dim = 0),
            ("head_dim", |a| (a.head_dim, a.out_stride) = (580, 7 * 580)),
            ("head_dim", |a| a.head_dim = 30),
            ("stride of outputs", |a| a.out_stride = 7 * 128 - 4),
            ("stride of log-sum-exps", |a| a.lse_stride = 6),
            ("states to merge", |a| a.states = 1 << 31),
        ];
        for (what, change) in changes {
            let mut args = good;
            change(&mut args);
            let refused = args.params(&()).unwrap_err();
            assert!(
                matches!(refused, Error::Parameter { what: w, .. } if w == what),
                "{refused}"
            );
        }
    }
}
