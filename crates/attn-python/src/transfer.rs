//! Launches over pages and results that belong to no plan: copies of pages, merges of shards' results and of their spans' states.

use attn::backends::cuda::native::{
    CopyPagesArgs, DeviceAddress, MergeSpansArgs, MergeStatesArgs, Pages, Prepared,
};
use attn::{KvFormat, Scheme, layout::Side};
use pyo3::{prelude::*, types::PyCapsule};

use crate::{
    arrays::{MergeArrays, SpanMergeArrays},
    dlpack::{Array, Dtype},
    errors,
    gpu::{Gpu, elements},
};

/// What `attn.torch.copy_pages` and `attn.torch.merge` are built on.
#[pyclass(frozen, module = "attn._attn", name = "NativeTransfer")]
pub struct Transfer {
    gpu: Gpu,
    copy_pages: Prepared<CopyPagesArgs>,
    merge: Prepared<MergeStatesArgs>,
}

impl Transfer {
    /// A pool `[pages, page_bytes]` on the device, or in pinned host memory.
    fn pages(
        &self,
        what: &'static str,
        capsule: &Bound<'_, PyCapsule>,
    ) -> PyResult<(Pages, usize)> {
        let array = Array::new(what, capsule)?;
        array.check_rank(2, "[pages, page_bytes]")?;
        let memory = match array.cuda {
            Some(_) => self.gpu.memory(&array, &[Dtype::U8], 1),
            None => elements(&array, &[Dtype::U8], 1),
        }?;
        let pages = Pages {
            at: memory.address,
            stride: usize::try_from(array.strides[0]).unwrap_or(0),
            num_pages: array.shape[0],
        };
        Ok((pages, array.shape[1]))
    }
}

#[pymethods]
impl Transfer {
    #[new]
    fn new(py: Python<'_>, device: &str) -> PyResult<Self> {
        let gpu = Gpu::open(py, device)?;
        let (cuda, callers) = gpu.current()?;
        let prepare = || Ok((cuda.prepare_op(())?, cuda.prepare_op(())?));
        let (copy_pages, merge) = py.detach(prepare).map_err(errors::of)?;
        drop(callers);
        Ok(Transfer {
            gpu,
            copy_pages,
            merge,
        })
    }

    /// Copies the page of `source` that each of `pairs`, int64 `[pairs, 2]`, names first to the page of `target` that it names second.
    fn copy_pages(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyCapsule>,
        target: &Bound<'_, PyCapsule>,
        pairs: &Bound<'_, PyCapsule>,
        stream: u64,
    ) -> PyResult<()> {
        let (from, page_bytes) = self.pages("source", source)?;
        let (to, target_bytes) = self.pages("target", target)?;
        if page_bytes != target_bytes {
            return Err(errors::shape(format!(
                "source has pages of {page_bytes} bytes, and target of {target_bytes}; pages are copied whole, as they are"
            )));
        }
        let pairs = Array::new("pairs", pairs)?;
        pairs.check_rank(2, "[pairs, 2]")?;
        if pairs.shape[1] != 2 {
            return Err(errors::shape(format!(
                "pairs has the shape {:?}; needed: [pairs, 2]",
                pairs.shape
            )));
        }
        let args = CopyPagesArgs {
            from,
            to,
            page_bytes,
            pairs: self.gpu.memory(&pairs, &[Dtype::I64], 0)?.address,
            num_pairs: pairs.shape[0],
        };
        // SAFETY: the arrays' memory is as large as `Pages` says and lives until the stream's work has run, by their library; host memory is
        // pinned, as `attn.torch.copy_pages` checks, so that the device addresses it as the host does; pages outside are skipped. That no page is written that another pair reads or writes is the caller's contract.
        unsafe { self.gpu.enqueue(py, &self.copy_pages, stream, &args) }
    }

    /// Merges `outs` `[shards, rows, dim]` and `lses` float32 `[shards, rows]` into `out` `[rows, dim]` and `lse` `[rows]`.
    fn merge(&self, py: Python<'_>, arrays: MergeArrays<'_>, stream: u64) -> PyResult<()> {
        let outs = Array::new("outs", &arrays.outs)?;
        let out = Array::new("out", &arrays.out)?;
        outs.check_rank(3, "[shards, rows, dim]")?;
        if out.shape != outs.shape[1..] {
            return Err(errors::shape(format!(
                "out has the shape {:?}, and outs {:?}; needed: [rows, dim] and [shards, rows, dim]",
                out.shape, outs.shape
            )));
        }
        let [states, rows, head_dim] = [0, 1, 2].map(|i| outs.shape[i]);
        let (from, in_dtype) = self.gpu.floats(&outs, 0)?;
        let (to, out_dtype) = self.gpu.floats(&out, 0)?;
        let lse_of = |what, capsule, count: usize| {
            self.gpu
                .list(what, Some(capsule), (Dtype::F32, count.saturating_mul(4)))
        };
        let args = MergeStatesArgs {
            outs: from.address,
            lses: lse_of("lses", &arrays.lses, states.saturating_mul(rows))?,
            out_stride: rows.saturating_mul(head_dim),
            lse_stride: rows,
            in_dtype,
            out: to.address,
            out_dtype,
            lse: lse_of("lse", &arrays.lse, rows)?,
            states,
            rows,
            head_dim,
        };
        // SAFETY: the arrays have these shapes and lie on the device, and `attn.torch.merge` allocates the outputs, so that they overlap nothing.
        unsafe { self.gpu.enqueue(py, &self.merge, stream, &args) }
    }
}

/// What `attn.torch.merge_spans` is built on: the merge for one format and head_dim.
#[pyclass(frozen, module = "attn._attn", name = "NativeMergeSpans")]
pub struct MergeSpans {
    gpu: Gpu,
    dim: usize,
    v: Scheme,
    merge: Prepared<MergeSpansArgs>,
}

#[pymethods]
impl MergeSpans {
    #[new]
    fn new(py: Python<'_>, format: &str, dim: usize, device: &str) -> PyResult<Self> {
        let gpu = Gpu::open(py, device)?;
        let (cuda, callers) = gpu.current()?;
        let format: KvFormat = format.parse().map_err(errors::of)?;
        let prepare = || cuda.prepare_op((format, dim));
        let merge = py.detach(prepare).map_err(errors::of)?;
        drop(callers);
        Ok(MergeSpans {
            gpu,
            dim,
            v: format.v,
            merge,
        })
    }

    /// Merges and finishes.
    fn merge(&self, py: Python<'_>, arrays: SpanMergeArrays<'_>, stream: u64) -> PyResult<()> {
        let o = Array::new("o", &arrays.o)?;
        let out = Array::new("out", &arrays.out)?;
        let shape = format!("[states, query tokens, heads, {}]", self.dim);
        o.check_rank(4, &shape)?;
        if o.shape[3] != self.dim || out.shape != o.shape[1..] {
            return Err(errors::shape(format!(
                "o has the shape {:?}, and out {:?}; needed: {shape} and its last three dims",
                o.shape, out.shape
            )));
        }
        let [states, tokens, heads] = [0, 1, 2].map(|i| o.shape[i]);
        let rows = tokens.saturating_mul(heads);
        let list = |what, array: Option<&Bound<'_, PyCapsule>>, count: usize| {
            self.gpu
                .list(what, array, (Dtype::F32, count.saturating_mul(4)))
        };
        let (to, dtype) = self.gpu.floats(&out, 0)?;
        let all = states.saturating_mul(rows);
        let args = MergeSpansArgs {
            max_sums: list("max_sums", Some(&arrays.max_sums), all.saturating_mul(2))?,
            o: self.gpu.memory(&o, &[Dtype::F32], 0)?.address,
            states,
            rows_apart: rows,
            rows,
            num_q_heads: heads,
            num_kv_heads: arrays.kv_heads,
            out: to.address,
            dtype,
            lse: list("lse", Some(&arrays.lse), rows)?,
            sinks: match &arrays.sinks {
                None => DeviceAddress::NULL,
                sinks => list("sinks", sinks.as_ref(), heads)?,
            },
            v_tensor_scales: self.gpu.scales(
                (Side::V, self.v),
                arrays.v_scales.as_ref(),
                arrays.kv_heads,
            )?,
        };
        // SAFETY: the arrays have these shapes and lie on the device, and `attn.torch.merge_spans` allocates the outputs, so that they overlap nothing.
        unsafe { self.gpu.enqueue(py, &self.merge, stream, &args) }
    }
}
