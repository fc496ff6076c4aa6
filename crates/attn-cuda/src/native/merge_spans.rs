//! The launch that merges and finishes the states of shards' spans. Tokens sharded over GPUs have the bits of one GPU so.

use attn_core::{Error, HeadDim, KvFormat, error::refuse, layout::Side};
use attn_kernels::cuda::{Instance, params::MergeSpansParams};

use super::{
    dtype::{self, Dtype},
    grid::Grid,
    kv::check_scale_address,
    op::Op,
};
use crate::{handles::DeviceAddress, sizes};

/// The merge of the states of all shards' spans, in the order of their tokens, such as an all-gather gives, of each row's sink, and its end: the bits of
/// [`SpanStates::finish`](attn_core::SpanStates::finish), which for integer formats are those of one device over all tokens.
///
/// Prepared for a format and a head_dim that the library has. Refused are heads or rows that do not fit each other, and scales of V that are missing.
///
/// # Safety
/// `out` and `lse` overlap no state; the states are those of launches of [`CudaBackend::attend_spans_on`](crate::CudaBackend::attend_spans_on), or of the CPU.
#[derive(Debug, Clone, Copy)]
pub struct MergeSpansArgs {
    /// f32 `[states][rows_apart][2]`, as [`SpansArgs::max_sums`](crate::native::SpansArgs::max_sums) of shard after shard.
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

/// Rows of a CTA of `merge_spans.cu`, a warp to each.
const ROWS: usize = 4;

// SAFETY: `attn_merge_spans` takes one MergeSpansParams, asserted on both sides, and writes the merged rows alone.
unsafe impl Op for MergeSpansArgs {
    /// The format of what was attended, and elements of a value.
    type Shape = (KvFormat, usize);
    type Params = MergeSpansParams;
    const DOING: &'static str = "merging spans";

    fn instances(&(format, dim): &Self::Shape) -> Result<Vec<Instance>, Error> {
        let head_dim = HeadDim::same(dim);
        head_dim.check()?;
        Ok(vec![Instance::MergeSpans { format, head_dim }])
    }

    fn params(&self, (format, _): &Self::Shape) -> Result<MergeSpansParams, Error> {
        let (heads, kv_heads) = (self.num_q_heads, self.num_kv_heads);
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let given = format_args!("{heads}/{kv_heads}");
            let allowed = "a whole number of query heads per KV head";
            return refuse("num_q_heads/num_kv_heads", given, allowed);
        }
        if self.rows_apart < self.rows || !self.rows.is_multiple_of(heads) {
            let given = format_args!("{} of {}", self.rows, self.rows_apart);
            let allowed = "whole query tokens, and no more than rows_apart";
            return refuse("rows", given, allowed);
        }
        check_scale_address((Side::V, format.v), self.v_tensor_scales, kv_heads)?;
        Ok(MergeSpansParams {
            max_sums: self.max_sums.get(),
            o: self.o.get(),
            out: self.out.get(),
            lse: self.lse.get(),
            sinks: self.sinks.get(),
            v_tensor_scales: self.v_tensor_scales.get(),
            rows_apart: self.rows_apart as u64,
            states: sizes::int("states to merge", self.states)?,
            rows: sizes::int("rows to merge", self.rows)?,
            num_q_heads: sizes::int("num_q_heads", heads)?,
            heads_per_kv: sizes::int("heads_per_kv", heads / kv_heads)?,
            dtype: dtype::code(self.dtype),
            ..MergeSpansParams::default()
        })
    }

    fn grid(&self, _: &Self::Shape) -> Grid {
        Grid::new([self.rows.div_ceil(ROWS), 1, 1], 32 * ROWS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: (KvFormat, usize) = (KvFormat::INT8, 128);

    #[test]
    fn head_dims_of_no_kernel_are_refused() {
        let of = |head_dim| MergeSpansArgs::instances(&(KvFormat::INT8, head_dim));
        let instance = Instance::MergeSpans {
            format: KvFormat::INT8,
            head_dim: HeadDim::same(192),
        };
        assert_eq!(of(192).unwrap(), [instance]);
        for head_dim in [0, 100, 1024] {
            let said = of(head_dim).unwrap_err().to_string();
            assert!(said.contains("64, 80, 96, 128, 160, 192, 256"), "{said}");
        }
    }

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
        let params = good.params(&SHAPE).unwrap();
        assert_eq!(
            (params.rows, params.rows_apart, params.heads_per_kv),
            (16, 24, 4)
        );
        let some = MergeSpansArgs { rows: 6, ..good };
        assert_eq!(some.grid(&SHAPE), Grid::new([2, 1, 1], 128));
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
            let refused = args.params(&SHAPE).unwrap_err();
            assert!(
                matches!(refused, Error::Parameter { what: w, .. } if w == what),
                "{refused}"
            );
        }
    }

    #[test]
    fn static_scales_of_v_are_needed_and_those_of_k_are_not() {
        let params = |format: &str, v_tensor_scales| {
            let args = MergeSpansArgs {
                max_sums: DeviceAddress::NULL,
                o: DeviceAddress::NULL,
                states: 1,
                rows_apart: 8,
                rows: 8,
                num_q_heads: 8,
                num_kv_heads: 2,
                out: DeviceAddress::NULL,
                dtype: Dtype::F32,
                lse: DeviceAddress::NULL,
                sinks: DeviceAddress::NULL,
                v_tensor_scales,
            };
            let params = args.params(&(format.parse().unwrap(), 128));
            params.map(|params| params.v_tensor_scales)
        };
        let (none, some) = (DeviceAddress::NULL, DeviceAddress::new(0x100));
        let refused = params("int8/fp8", none).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::MissingScales {
                    what: "v_scales",
                    needed: 2,
                    ..
                }
            ),
            "{refused}"
        );
        assert_eq!(params("int8/fp8", some).unwrap(), 0x100);
        assert_eq!(params("fp8/int8", none).unwrap(), 0);
    }
}
