//! Launches over the caller's device memory: pages, tables, lengths and workspace are its arrays, so a CUDA graph can capture them.

mod args;
mod places;
mod table_rows;

use std::sync::OnceLock;

use attn::{
    CacheConfig, Heads, KvFormat, PageLayout, Problem, Window,
    backends::cuda::native::{
        AppendArgs, AppendShape, CentresArgs, DeviceAddress, DeviceKv, ExportArgs, KvLayout,
        ListBlocksArgs, NativePlan, PageCentres, PlanFor, PlanKind, Prepared, SecondCentresArgs,
        SlotAppendArgs, SpansArgs, alibi_slopes_log2,
    },
    convert::Side,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyCapsule},
};

use crate::{
    arrays::{
        AttendArrays, CentreArrays, ExportArrays, PageArrays, PlanOptions, RotaryArrays, RowArrays,
        SpanArrays,
    },
    dlpack::Dtype,
    errors,
    gpu::{Gpu, stream_of},
};

/// Launches for one batch shape: what `attn.torch.Plan` is built on.
#[pyclass(frozen, module = "attn._attn", name = "NativePlan")]
pub struct Plan {
    gpu: Gpu,
    problem: Problem,
    layout: PageLayout,
    plan: NativePlan,
    /// None where pages are another engine's.
    launches: Option<Launches>,
}

/// The launches over the library's pages.
struct Launches {
    append: Prepared<AppendArgs>,
    append_slots: Prepared<SlotAppendArgs>,
    /// Of pages that have their sequences' centres of K.
    second_centres: Option<Prepared<SecondCentresArgs>>,
    /// Loaded at its first use.
    export: OnceLock<Prepared<ExportArgs>>,
}

impl Plan {
    /// The launches over the library's pages; refuses a plan for another engine's.
    fn launches(&self) -> PyResult<&Launches> {
        let others = "the plan is for another engine's pages, which are only attended, by attend_rows; make one without rows=True";
        let refused = || errors::parameter(others);
        self.launches.as_ref().ok_or_else(refused)
    }

    /// Whether pages have their sequences' centres of K.
    fn has_centres(&self) -> bool {
        self.launches
            .as_ref()
            .is_some_and(|launches| launches.second_centres.is_some())
    }

    /// Refuses what knows of no centres of K.
    fn refuse_centres(&self, what: &str) -> PyResult<()> {
        match self.has_centres() {
            true => Err(errors::parameter(format!(
                "{what} over pages with centres of K; a plan with centres=True has append_slots_now, attend and attend_into"
            ))),
            false => Ok(()),
        }
    }
}

/// K, and V where it is no part of K.
pub(super) type KvCapsules<'py> = (Bound<'py, PyCapsule>, Option<Bound<'py, PyCapsule>>);

#[pymethods]
impl Plan {
    #[new]
    fn new(py: Python<'_>, options: PlanOptions, device: &str) -> PyResult<Self> {
        let own = Gpu::open(py, device)?;
        let (gpu, _callers) = own.current()?;
        let format: KvFormat = options.format.parse().map_err(errors::of)?;
        let heads = Heads::new(
            options.heads,
            options.kv_heads,
            (options.dim, options.v_dim),
        );
        for (side, scheme, scales) in [
            (Side::K, format.k, &options.k_scales),
            (Side::V, format.v, &options.v_scales),
        ] {
            let check = |scales: &Vec<f32>| scheme.check_scales(side, scales, heads.kv);
            scales.as_ref().map_or(Ok(()), check).map_err(errors::of)?;
        }
        let lens = vec![options.max_kv_len; options.q_lens.len()];
        let problem = Problem::new(heads, lens).q_lens(options.q_lens);
        let problem = problem.scores(options.modifiers.into());
        // Launches are given static scales with their pages.
        let config = CacheConfig::builder(format, heads)
            .page_size(options.page_size)
            .unit_tensor_scales()
            .build();
        let prepare = || {
            let layout = config.layout()?;
            let shape = AppendShape {
                layout,
                rotary: options.rotary,
            };
            let (kv, launches) = match options.rows {
                true => (KvLayout::PagedRows(options.page_size), None),
                false => {
                    config.check()?;
                    let launches = Launches {
                        append: gpu.prepare_op(shape)?,
                        append_slots: gpu.prepare_op(shape)?,
                        second_centres: match options.centres {
                            true => Some(gpu.prepare_op(layout)?),
                            false => None,
                        },
                        export: OnceLock::new(),
                    };
                    (KvLayout::Pages(options.page_size), Some(launches))
                }
            };
            let plan_for = PlanFor {
                kind: match (options.spans, options.ragged) {
                    (true, _) => PlanKind::Spans,
                    (_, true) => PlanKind::Ragged,
                    _ => PlanKind::Known,
                },
                centres: options.centres && !options.spans,
            };
            let plan = gpu.prepare_for(&problem, format, kv, plan_for)?;
            Ok((plan, launches, layout))
        };
        let (plan, launches, layout) = py.detach(prepare).map_err(errors::of)?;
        Ok(Plan {
            gpu: own,
            problem,
            layout,
            plan,
            launches,
        })
    }

    #[getter]
    fn page_bytes(&self) -> PyResult<usize> {
        match self.has_centres() {
            true => PageCentres::page_bytes(&self.layout).map_err(errors::of),
            false => Ok(self.layout.page_bytes()),
        }
    }

    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    #[getter]
    fn scratch_bytes(&self) -> usize {
        self.plan.scratch_bytes()
    }

    /// Loads the kernels of all plans that are no larger.
    fn load_smaller(&self, py: Python<'_>) -> PyResult<usize> {
        let (gpu, _callers) = self.gpu.current()?;
        py.detach(|| gpu.load_smaller(&self.plan))
            .map_err(errors::of)
    }

    /// Bytes of the list of query blocks.
    #[getter]
    fn query_blocks_bytes(&self) -> usize {
        self.plan.query_blocks_bytes()
    }

    /// Lists the query blocks of sequences that begin at `cu_seqlens_q`, int32 `[sequences + 1]`, into uint8 `blocks`.
    fn list_query_blocks(
        &self,
        py: Python<'_>,
        cu_seqlens_q: &Bound<'_, PyCapsule>,
        blocks: Option<Bound<'_, PyCapsule>>,
        stream: u64,
    ) -> PyResult<()> {
        let starts = (Dtype::I32, 4 * (self.problem.batch() + 1));
        let starts = self.gpu.list("cu_seqlens_q", Some(cu_seqlens_q), starts)?;
        let bytes = (Dtype::U8, self.plan.query_blocks_bytes());
        let args = ListBlocksArgs {
            cu_seqlens_q: starts,
            to: self.gpu.list("query_blocks", blocks.as_ref(), bytes)?,
        };
        let list_blocks = self.plan.list_blocks().map_err(errors::of)?;
        // SAFETY: as for `attend`; whatever the numbers are, the launch writes the list alone, which is as long as the plan says.
        unsafe { self.gpu.enqueue(py, list_blocks, stream, &args) }
    }

    /// Entries of a row of residual pages where a step has up to `q_len` query tokens of a sequence; 0 for formats without a window.
    fn residual_slots(&self, q_len: usize) -> usize {
        let (format, page_size) = (self.layout.format(), self.layout.page_size());
        format.residual_slots(page_size, q_len)
    }

    /// Entries in front of such a row, of a sequence's first pages; 0 for formats without a window.
    #[getter]
    fn first_residual_pages(&self) -> usize {
        let (format, page_size) = (self.layout.format(), self.layout.page_size());
        format.first_residual_pages(page_size)
    }

    /// The plan's lists as bytes, to be put into device memory: query blocks, and the slopes as the kernels take them.
    fn lists<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>) {
        let words = self.plan.query_blocks().iter().flat_map(|block| {
            [block.sequence, block.first, block.tokens, block.behind]
                .into_iter()
                .flat_map(i32::to_ne_bytes)
        });
        let slopes = alibi_slopes_log2(self.problem.scores.alibi_slopes.as_deref().unwrap_or(&[]));
        let slopes: Vec<u8> = slopes
            .iter()
            .flat_map(|slope| slope.to_ne_bytes())
            .collect();
        (
            PyBytes::new(py, &words.collect::<Vec<u8>>()),
            PyBytes::new(py, &slopes),
        )
    }

    fn attend(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        arrays: AttendArrays<'_>,
        stream: u64,
    ) -> PyResult<()> {
        let (gpu, _callers) = self.gpu.current()?;
        let sequences = self.sequences(&pages)?;
        let args = self.decode_args(DeviceKv::Paged(sequences), &arrays)?;
        let centres = match self.has_centres() {
            true => {
                Some(CentresArgs::in_first_pages(&sequences, &self.layout).map_err(errors::of)?)
            }
            false => None,
        };
        // SAFETY: the device's context is current; the arrays have been compared with the plan's shapes, types and device, and lie in memory that the caller's library keeps until
        // the work enqueued on its stream has run; `attn.torch.Plan` makes the workspace, zeroed, for itself alone, and takes scratch memory for a stream. That lengths, pages and
        // queries on the device are in range is the caller's contract, which `ATTN_CUDA=check=1` checks.
        py.detach(|| unsafe {
            match &centres {
                None => gpu.decode_on(&self.plan, stream_of(stream), &args),
                Some(centres) => {
                    gpu.decode_with_centres_on(&self.plan, stream_of(stream), &args, centres)
                }
            }
        })
        .map_err(errors::of)
    }

    /// Spans of the longest sequence, at least one.
    #[getter]
    fn spans(&self) -> usize {
        self.plan.spans()
    }

    /// Attends shards, and leaves the states of their spans: float32 `max_sums` `[spans, rows, 2]` and `o` `[spans, rows, dim]`. `tokens_before`
    /// and `tokens_after`: int32 `[sequences]`, or none.
    fn attend_spans(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        arrays: AttendArrays<'_>,
        spans: SpanArrays<'_>,
        stream: u64,
    ) -> PyResult<()> {
        let (gpu, _callers) = self.gpu.current()?;
        let args = self.decode_args(DeviceKv::Paged(self.sequences(&pages)?), &arrays)?;
        let states = self.problem.rows().saturating_mul(self.plan.spans());
        let list = |what, array, count: usize| {
            self.gpu
                .list(what, Some(array), (Dtype::F32, count.saturating_mul(4)))
        };
        let elsewhere = |what, array: &Option<Bound<'_, PyCapsule>>| match array {
            None => Ok(DeviceAddress::NULL),
            array => {
                let bytes = 4 * self.problem.batch();
                self.gpu.list(what, array.as_ref(), (Dtype::I32, bytes))
            }
        };
        let dim = self.layout.head_dim().v;
        let to = SpansArgs {
            tokens_before: elsewhere("tokens_before", &spans.tokens_before)?,
            tokens_after: elsewhere("tokens_after", &spans.tokens_after)?,
            max_sums: list("max_sums", &spans.max_sums, states.saturating_mul(2))?,
            o: list("o", &spans.o, states.saturating_mul(dim))?,
        };
        // SAFETY: as for `attend`; the states' arrays are as large as the plan says.
        py.detach(|| unsafe { gpu.attend_spans_on(&self.plan, stream_of(stream), &args, &to) })
            .map_err(errors::of)
    }

    /// Attends rows of another engine's pages.
    fn attend_rows(
        &self,
        py: Python<'_>,
        rows: RowArrays<'_>,
        arrays: AttendArrays<'_>,
        stream: u64,
    ) -> PyResult<()> {
        let (gpu, _callers) = self.gpu.current()?;
        let args = self.decode_args(self.kv_of_rows(&rows)?, &arrays)?;
        // SAFETY: as for `attend`; all rows of a page lie inside its array, whose strides have been read.
        py.detach(|| unsafe { gpu.decode_on(&self.plan, stream_of(stream), &args) })
            .map_err(errors::of)
    }

    /// Writes a range of tokens of each sequence as rows: those from `first_tokens` on, as many as lie between two of `row_starts`.
    fn export(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        rows: ExportArrays<'_>,
        stream: u64,
    ) -> PyResult<()> {
        self.refuse_centres("export")?;
        let args = self.export_args(self.sequences(&pages)?, &rows)?;
        let place = &self.launches()?.export;
        let export = match place.get() {
            Some(export) => export,
            None => {
                let (gpu, _callers) = self.gpu.current()?;
                let load = || gpu.prepare_op(self.layout);
                let export = py.detach(load).map_err(errors::of)?;
                place.get_or_init(|| export)
            }
        };
        // SAFETY: as for `attend`; that ranges end inside their sequences and inside the rows is the caller's contract.
        unsafe { self.gpu.enqueue(py, export, stream, &args) }
    }

    /// `kv` are K and V.
    #[pyo3(signature = (pages, kv, slots, stream, rotary = None, centres = None))]
    #[allow(clippy::too_many_arguments, reason = "those of Python's call")]
    fn append_slots(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        kv: KvCapsules<'_>,
        slots: &Bound<'_, PyCapsule>,
        stream: u64,
        rotary: Option<RotaryArrays<'_>>,
        centres: Option<CentreArrays<'_>>,
    ) -> PyResult<()> {
        let launches = self.launches()?;
        let append = &launches.append_slots;
        if centres.is_some() != self.has_centres() {
            return Err(errors::parameter(
                "centres are for a plan with centres=True, whose appends have no others: pass first pages and positions for it alone",
            ));
        }
        let pool = self.pool(&pages.pool)?;
        let (rows, tokens) = self.kv_rows(&kv.0, kv.1.as_ref())?;
        let has_window = self.layout.format().window() != Window::None;
        let residual_bytes = if has_window { 4 * tokens } else { 0 };
        let rotary = self.rotary_args(rotary.as_ref(), rows.dtype, tokens)?;
        let args = SlotAppendArgs {
            rows,
            pool,
            tensor_scales: self.scales([&pages.k_scales, &pages.v_scales])?,
            slots: self
                .gpu
                .list("slots", Some(slots), (Dtype::I64, 8 * tokens))?,
            residual_pages: self.gpu.list(
                "residual_pages",
                pages.residual_pages.as_ref(),
                (Dtype::I32, residual_bytes),
            )?,
            tokens,
            rotary,
            centres: match &centres {
                Some(centres) => Some(self.slot_centres(&pool, centres, tokens)?),
                None => None,
            },
        };
        if let (Some(centres), Some(second)) = (centres, &launches.second_centres) {
            let (gpu, _callers) = self.gpu.current()?;
            let stream = stream_of(stream);
            // SAFETY: as for `attend`; slots, first pages and positions are the caller's contract.
            let enqueued = unsafe {
                gpu.append_with_centres_on(append, second, stream, &args, centres.one_each)
            };
            return enqueued.map_err(errors::of);
        }
        // SAFETY: as for `attend`; slots and positions are the caller's contract.
        unsafe { self.gpu.enqueue(py, append, stream, &args) }
    }

    /// Appends as many tokens to each sequence, whose places are read from `kv_lens`, and attends; `kv` are K and V.
    #[pyo3(signature = (pages, arrays, kv, stream, rotary = None))]
    fn step(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        arrays: AttendArrays<'_>,
        kv: KvCapsules<'_>,
        stream: u64,
        rotary: Option<RotaryArrays<'_>>,
    ) -> PyResult<()> {
        self.refuse_centres("step")?;
        let (gpu, _callers) = self.gpu.current()?;
        let sequences = self.sequences(&pages)?;
        let append = self.append_args(sequences, &kv, rotary.as_ref())?;
        let decode = self.decode_args(DeviceKv::Paged(sequences), &arrays)?;
        let prepared = &self.launches()?.append;
        // SAFETY: as for `attend`; that lengths count the new tokens is the caller's contract.
        py.detach(|| unsafe {
            gpu.append_decode_on(prepared, &self.plan, stream_of(stream), &append, &decode)
        })
        .map_err(errors::of)
    }
}
