//! What launches read and write beside the pages: arrays compared with the plan.

use attn::backends::cuda::native::{
    AppendArgs, DecodeArgs, DeviceAddress, Dtype as CudaDtype, ExportArgs, RotaryArgs,
};
use pyo3::{prelude::*, types::PyCapsule};

use super::{
    Plan,
    places::{Kv, Paged},
};
use crate::{
    arrays::{AttendArrays, ExportArrays},
    dlpack::{Array, Dtype},
    errors,
    gpu::OnDevice,
    rotary::RotaryArrays,
};

/// Rows of K and V, `[tokens, KV heads, dim]`.
pub(super) struct NewTokens {
    pub k: DeviceAddress,
    pub v: DeviceAddress,
    pub dtype: CudaDtype,
    /// Elements from one token to the next.
    pub k_stride: usize,
    pub v_stride: usize,
    pub tokens: usize,
}

impl Plan {
    /// Rows `[tokens, heads, dim]`, and their number.
    fn rows(
        &self,
        array: &Array<'_>,
        heads: usize,
        first: usize,
    ) -> PyResult<(OnDevice, CudaDtype, usize)> {
        let dim = self.layout.head_dim();
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
        kv: impl Into<Kv>,
        arrays: &AttendArrays<'_>,
    ) -> PyResult<DecodeArgs> {
        let (kv, heads) = (kv.into(), self.problem.num_q_heads);
        let (q_memory, dtype, tokens) = self.rows(&Array::new("q", &arrays.q)?, heads, 0)?;
        let (out, out_dtype, out_tokens) = match &arrays.out {
            None => (DeviceAddress::NULL, dtype, tokens),
            Some(out) => {
                let (memory, dtype, tokens) = self.rows(&Array::new("out", out)?, heads, 0)?;
                (memory.address, dtype, tokens)
            }
        };
        let needed = self.problem.query_tokens();
        if tokens != needed || out_tokens != needed || dtype != out_dtype {
            return Err(errors::shape(format!(
                "q has {tokens} tokens of {dtype:?}, and out {out_tokens} of {out_dtype:?}; the plan has {needed} query tokens, in one type"
            )));
        }
        let [k_tensor_scales, v_tensor_scales] = kv.scales;
        let per_head = |given: bool| (Dtype::F32, if given { 4 * heads } else { 0 });
        let lse = match &arrays.lse {
            Some(lse) => self
                .gpu
                .list("lse", Some(lse), (Dtype::F32, 4 * self.problem.rows()))?,
            None => DeviceAddress::NULL,
        };
        Ok(DecodeArgs {
            q: q_memory.address,
            out,
            dtype,
            lse,
            kv: kv.kv,
            kv_lens: kv.kv_lens,
            query_blocks: self.gpu.list(
                "query_blocks",
                arrays.query_blocks.as_ref(),
                (Dtype::U8, self.plan.query_blocks_bytes()),
            )?,
            k_tensor_scales,
            v_tensor_scales,
            alibi_slopes: self.gpu.list(
                "alibi_slopes",
                arrays.alibi_slopes.as_ref(),
                per_head(self.problem.alibi_slopes.is_some()),
            )?,
            sinks: self.gpu.list(
                "sinks",
                arrays.sinks.as_ref(),
                per_head(self.problem.sinks.is_some()),
            )?,
            workspace: self.gpu.list(
                "workspace",
                Some(&arrays.workspace),
                (Dtype::U8, self.plan.workspace_bytes()),
            )?,
        })
    }

    /// New K and V, whose tokens may lie apart.
    pub(super) fn new_tokens(
        &self,
        k: &Bound<'_, PyCapsule>,
        v: &Bound<'_, PyCapsule>,
    ) -> PyResult<NewTokens> {
        let heads = self.layout.num_kv_heads();
        let (k, v) = (Array::new("k", k)?, Array::new("v", v)?);
        let (k_memory, dtype, tokens) = self.rows(&k, heads, 1)?;
        let (v_memory, v_dtype, v_tokens) = self.rows(&v, heads, 1)?;
        if tokens != v_tokens || dtype != v_dtype {
            return Err(errors::shape(format!(
                "k has {tokens} tokens of {dtype:?}, and v {v_tokens} of {v_dtype:?}; pass both in one"
            )));
        }
        let stride = |rows: &Array<'_>| usize::try_from(rows.strides[0]).unwrap_or(0);
        Ok(NewTokens {
            k: k_memory.address,
            v: v_memory.address,
            dtype,
            k_stride: stride(&k),
            v_stride: stride(&v),
            tokens,
        })
    }

    /// The export of a range of tokens of each of the plan's sequences.
    pub(super) fn export_args(
        &self,
        paged: Paged,
        rows: &ExportArrays<'_>,
    ) -> PyResult<ExportArgs> {
        let new = self.new_tokens(&rows.k, &rows.v)?;
        let [k_tensor_scales, v_tensor_scales] = paged.scales;
        let batch = self.problem.batch();
        Ok(ExportArgs {
            k: new.k,
            v: new.v,
            dtype: new.dtype,
            k_token_stride: new.k_stride,
            v_token_stride: new.v_stride,
            pool: paged.pool,
            page_table: paged.page_table,
            page_table_stride: paged.page_table_stride,
            residual_pages: paged.residual_pages,
            residual_slots: paged.residual_slots,
            kv_lens: paged.kv_lens,
            row_starts: self.gpu.list(
                "row_starts",
                Some(&rows.row_starts),
                (Dtype::I32, 4 * (batch + 1)),
            )?,
            first_tokens: match &rows.first_tokens {
                None => DeviceAddress::NULL,
                first => self
                    .gpu
                    .list("first_tokens", first.as_ref(), (Dtype::I32, 4 * batch))?,
            },
            k_tensor_scales,
            v_tensor_scales,
            batch,
            max_tokens: rows.max_tokens,
        })
    }

    /// The append of as many new tokens to each of the plan's sequences.
    pub(super) fn append_args(
        &self,
        paged: Paged,
        [k, v]: [&Bound<'_, PyCapsule>; 2],
        rotary: Option<&RotaryArrays<'_>>,
    ) -> PyResult<AppendArgs> {
        let new = self.new_tokens(k, v)?;
        let all = new.tokens;
        let batch = self.problem.batch();
        let tokens = all.checked_div(batch).unwrap_or(0);
        if tokens.saturating_mul(batch) != all {
            return Err(errors::shape(format!(
                "k has {all} tokens for {batch} sequences; each gets as many: use append_slots for other numbers"
            )));
        }
        let [k_tensor_scales, v_tensor_scales] = paged.scales;
        let rotary = self.rotary_args(rotary, new.dtype, all)?;
        Ok(AppendArgs {
            k: new.k,
            v: new.v,
            dtype: new.dtype,
            k_token_stride: new.k_stride,
            v_token_stride: new.v_stride,
            pool: paged.pool,
            page_table: paged.page_table,
            page_table_stride: paged.page_table_stride,
            residual_pages: paged.residual_pages,
            residual_slots: paged.residual_slots,
            kv_lens: paged.kv_lens,
            k_tensor_scales,
            v_tensor_scales,
            batch,
            tokens,
            rotary,
        })
    }

    /// How an append of so many tokens rotates, if it does.
    pub(super) fn rotary_args(
        &self,
        rotary: Option<&RotaryArrays<'_>>,
        dtype: CudaDtype,
        tokens: usize,
    ) -> PyResult<Option<RotaryArgs>> {
        let shape = [tokens, self.problem.num_q_heads, self.layout.head_dim()];
        let args = rotary.map(|rotary| rotary.args(&self.gpu, dtype, shape));
        args.transpose()
    }
}
