//! What launches read and write beside the pages: arrays compared with the plan.

use attn::backends::cuda::native::{
    AppendArgs, CentreTokens, DecodeArgs, DeviceAddress, DeviceKv, Dtype as CudaDtype, ExportArgs,
    KvRows, PageCentres, PagedSequences, Pages, RotaryArgs, SlotCentres,
};
use pyo3::{prelude::*, types::PyCapsule};

use super::{KvCapsules, Plan};
use crate::{
    arrays::{AttendArrays, CentreArrays, ExportArrays, RotaryArrays},
    dlpack::{Array, Dtype},
    errors,
    gpu::OnDevice,
};

impl Plan {
    /// Rows `[tokens, heads, dim]`, and their number.
    fn rows(
        &self,
        array: &Array<'_>,
        [heads, dim]: [usize; 2],
        first: usize,
    ) -> PyResult<(OnDevice, CudaDtype, usize)> {
        let shape = format!("[tokens, {heads}, {dim}]");
        array.check_rank(3, &shape)?;
        if array.shape[1..] != [heads, dim] {
            return Err(errors::shape(format!(
                "{} has the shape {:?}; needed: {shape}",
                array.what, array.shape
            )));
        }
        let (memory, dtype) = self.gpu.floats(array, first)?;
        Ok((memory, dtype, array.shape[0]))
    }

    /// The attention of the plan's queries over K and V.
    pub(super) fn decode_args(
        &self,
        kv: DeviceKv,
        arrays: &AttendArrays<'_>,
    ) -> PyResult<DecodeArgs> {
        let (heads, dim) = (self.problem.num_q_heads, self.problem.head_dim);
        let q = Array::new("q", &arrays.q)?;
        let (q_memory, dtype, tokens) = self.rows(&q, [heads, dim.k], 0)?;
        let (out, out_dtype, out_tokens) = match &arrays.out {
            None => (DeviceAddress::NULL, dtype, tokens),
            Some(out) => {
                let (memory, dtype, tokens) =
                    self.rows(&Array::new("out", out)?, [heads, dim.v], 0)?;
                (memory.address, dtype, tokens)
            }
        };
        let needed = self.problem.query_tokens();
        if tokens != needed || out_tokens != needed || dtype != out_dtype {
            return Err(errors::shape(format!(
                "q has {tokens} tokens of {dtype:?}, and out {out_tokens} of {out_dtype:?}; the plan has {needed} query tokens, in one type"
            )));
        }
        let per_head = |given: bool| (Dtype::F32, if given { 4 * heads } else { 0 });
        let lse = match &arrays.lse {
            Some(lse) => self
                .gpu
                .list("lse", Some(lse), (Dtype::F32, 4 * self.problem.rows()))?,
            None => DeviceAddress::NULL,
        };
        let workspace_bytes = match arrays.scratch {
            Some(_) => self.plan.zeroed_bytes(),
            None => self.plan.workspace_bytes(),
        };
        Ok(DecodeArgs {
            q: q_memory.address,
            out,
            dtype,
            lse,
            kv,
            query_blocks: self.gpu.list(
                "query_blocks",
                arrays.query_blocks.as_ref(),
                (Dtype::U8, self.plan.query_blocks_bytes()),
            )?,
            alibi_slopes: self.gpu.list(
                "alibi_slopes",
                arrays.alibi_slopes.as_ref(),
                per_head(self.problem.scores.alibi_slopes.is_some()),
            )?,
            sinks: self.gpu.list(
                "sinks",
                arrays.sinks.as_ref(),
                per_head(self.problem.scores.sinks.is_some()),
            )?,
            workspace: self.gpu.list(
                "workspace",
                Some(&arrays.workspace),
                (Dtype::U8, workspace_bytes),
            )?,
            scratch: match &arrays.scratch {
                Some(scratch) => {
                    let needed = (Dtype::U8, self.plan.scratch_bytes());
                    self.gpu.list("scratch", Some(scratch), needed)?
                }
                None => DeviceAddress::NULL,
            },
        })
    }

    /// Rows of K and V `[tokens, KV heads, dim]`, whose tokens may lie apart, and the number of tokens. Latents are appended as K alone.
    pub(super) fn kv_rows(
        &self,
        k: &Bound<'_, PyCapsule>,
        v: Option<&Bound<'_, PyCapsule>>,
    ) -> PyResult<(KvRows, usize)> {
        let (heads, dim) = (self.layout.num_kv_heads(), self.layout.head_dim());
        let k = Array::new("k", k)?;
        let (k_memory, dtype, tokens) = self.rows(&k, [heads, dim.k], 1)?;
        // The stride of a single token says nothing.
        let stride = |rows: &Array<'_>| match tokens {
            0 | 1 => rows.shape[1] * rows.shape[2],
            _ => usize::try_from(rows.strides[0]).unwrap_or(0),
        };
        let Some(v) = v else {
            if !self.layout.format().latents {
                return Err(errors::parameter(
                    "v is none; the plan's format stores V beside K",
                ));
            }
            let rows = KvRows {
                k: k_memory.address,
                v: DeviceAddress::NULL,
                dtype,
                k_token_stride: stride(&k),
                v_token_stride: heads * dim.v,
            };
            return Ok((rows, tokens));
        };
        let v = Array::new("v", v)?;
        let (v_memory, v_dtype, v_tokens) = self.rows(&v, [heads, dim.v], 1)?;
        if tokens != v_tokens || dtype != v_dtype {
            return Err(errors::shape(format!(
                "k has {tokens} tokens of {dtype:?}, and v {v_tokens} of {v_dtype:?}; pass both in one"
            )));
        }
        let rows = KvRows {
            k: k_memory.address,
            v: v_memory.address,
            dtype,
            k_token_stride: stride(&k),
            v_token_stride: stride(&v),
        };
        Ok((rows, tokens))
    }

    /// Where the centres of K of an append's tokens are in the pool.
    pub(super) fn slot_centres(
        &self,
        pool: &Pages,
        centres: &CentreArrays<'_>,
        tokens: usize,
    ) -> PyResult<SlotCentres> {
        let PageCentres { at, stride } =
            PageCentres::new(pool, &self.layout).map_err(errors::of)?;
        let list = |what, capsule| {
            let needed = (Dtype::I32, 4 * tokens);
            self.gpu.list(what, Some(capsule), needed)
        };
        Ok(SlotCentres {
            centres: at,
            stride,
            count: pool.num_pages,
            rows: list("first_pages", &centres.first_pages)?,
            positions: list("positions", &centres.positions)?,
            tokens: CentreTokens::All,
        })
    }

    /// The export of a range of tokens of each of the plan's sequences.
    pub(super) fn export_args(
        &self,
        sequences: PagedSequences,
        to: &ExportArrays<'_>,
    ) -> PyResult<ExportArgs> {
        let (rows, _) = self.kv_rows(&to.k, Some(&to.v))?;
        let (heads, dim) = (self.layout.num_kv_heads(), self.layout.head_dim());
        for (what, apart, row) in [
            ("k", rows.k_token_stride, heads * dim.k),
            ("v", rows.v_token_stride, heads * dim.v),
        ] {
            if apart < row {
                return Err(errors::shape(format!(
                    "{what} has tokens {apart} elements apart, which overlap; an export writes rows {row} or more apart: pass a tensor that was not expanded"
                )));
            }
        }
        let batch = self.problem.batch();
        Ok(ExportArgs {
            rows,
            sequences,
            row_starts: self.gpu.list(
                "row_starts",
                Some(&to.row_starts),
                (Dtype::I32, 4 * (batch + 1)),
            )?,
            first_tokens: match &to.first_tokens {
                None => DeviceAddress::NULL,
                first => self
                    .gpu
                    .list("first_tokens", first.as_ref(), (Dtype::I32, 4 * batch))?,
            },
            batch,
            max_tokens: to.max_tokens,
        })
    }

    /// The append of as many new tokens to each of the plan's sequences.
    pub(super) fn append_args(
        &self,
        sequences: PagedSequences,
        kv: &KvCapsules<'_>,
        rotary: Option<&RotaryArrays<'_>>,
    ) -> PyResult<AppendArgs> {
        let (rows, all) = self.kv_rows(&kv.0, kv.1.as_ref())?;
        let batch = self.problem.batch();
        let tokens = all.checked_div(batch).unwrap_or(0);
        if tokens.saturating_mul(batch) != all {
            return Err(errors::shape(format!(
                "k has {all} tokens for {batch} sequences; each gets as many: use append_slots for other numbers"
            )));
        }
        Ok(AppendArgs {
            rows,
            sequences,
            batch,
            tokens,
            rotary: self.rotary_args(rotary, rows.dtype, all)?,
        })
    }

    /// How an append of so many tokens rotates, if it does.
    pub(super) fn rotary_args(
        &self,
        rotary: Option<&RotaryArrays<'_>>,
        dtype: CudaDtype,
        tokens: usize,
    ) -> PyResult<Option<RotaryArgs>> {
        let shape = [tokens, self.problem.num_q_heads, self.layout.head_dim().k];
        let args = rotary.map(|rotary| rotary.args(&self.gpu, dtype, shape));
        args.transpose()
    }
}
