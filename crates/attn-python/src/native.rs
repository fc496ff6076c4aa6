//! Launches over the caller's device memory: pages, tables, lengths and workspace are its arrays, so a CUDA graph can capture them.

use attn::{
    CacheConfig, Heads, Int8Scale, KvFormat, PageLayout, Problem, Scheme, Window,
    backends::cuda::native::{
        AppendArgs, DecodeArgs, DeviceAddress, DeviceKv, DeviceRows, Dtype as CudaDtype,
        ExportArgs, KvLayout, NativeAppend, NativeExport, NativePlan, Pages, RotaryArgs,
        SlotAppendArgs, SpansArgs, alibi_slopes_log2,
    },
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyCapsule},
};

use crate::{
    arrays::{AttendArrays, ExportArrays, PageArrays, PlanOptions, RowArrays, SpanArrays},
    dlpack::{Array, Dtype},
    errors,
    gpu::{Gpu, OnDevice, stream_of},
    rotary::RotaryArrays,
};

/// Launches for one batch shape: what `attn.torch.Plan` is built on.
#[pyclass(frozen, module = "attn._attn", name = "NativePlan")]
pub struct Plan {
    gpu: Gpu,
    problem: Problem,
    layout: PageLayout,
    plan: NativePlan,
    /// None where pages are another engine's.
    append: Option<NativeAppend>,
    export: Option<NativeExport>,
}

const OTHERS: &str =
    "the plan is for another engine's pages, which are only attended; make one without rows=True";

/// K and V of a launch: where they lie, the lengths, the static scales.
struct Kv {
    kv: DeviceKv,
    kv_lens: DeviceAddress,
    scales: [DeviceAddress; 2],
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

    /// The pool: whole pages side by side, or pages along its first dim that lie apart.
    fn pool(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<Pages> {
        let array = Array::new("pool", capsule)?;
        let page = self.layout.page_bytes();
        let of_first = array.shape.iter().skip(1).product::<usize>();
        let lie_apart = array.shape.len() > 1 && of_first == page;
        let memory = self
            .gpu
            .memory(&array, &[Dtype::U8], usize::from(lie_apart))?;
        if !memory.bytes.is_multiple_of(page) || !array.address().is_multiple_of(256) {
            return Err(errors::shape(format!(
                "pool has {} bytes at {:#x}; needed: whole pages of {page} bytes, from a multiple of 256 on",
                memory.bytes,
                array.address()
            )));
        }
        let num_pages = memory.bytes / page;
        let mut pages = Pages::new(memory.address, &self.layout, num_pages);
        if lie_apart && num_pages > 1 {
            pages.stride = usize::try_from(array.strides[0]).unwrap_or(0);
        }
        Ok(pages)
    }

    /// The static scales of K and V.
    fn scales(&self, [k, v]: [&Option<Bound<'_, PyCapsule>>; 2]) -> PyResult<[DeviceAddress; 2]> {
        let needed = |has: bool| {
            let heads = if has { self.layout.num_kv_heads() } else { 0 };
            (Dtype::F32, 4 * heads)
        };
        let format = self.layout.format();
        Ok([
            self.gpu
                .list("k_scales", k.as_ref(), needed(format.k.has_tensor_scale()))?,
            self.gpu
                .list("v_scales", v.as_ref(), needed(format.v.has_tensor_scale()))?,
        ])
    }

    /// The table of pages or of residual pages: its address, and entries per sequence.
    fn table(
        &self,
        what: &'static str,
        capsule: &Bound<'_, PyCapsule>,
    ) -> PyResult<(DeviceAddress, usize)> {
        let array = Array::new(what, capsule)?;
        array.check_rank(2, "[sequences, pages]")?;
        let memory = self.gpu.memory(&array, &[Dtype::I32], 1)?;
        if array.shape[0] < self.problem.batch() {
            return Err(errors::shape(format!(
                "{what} has {} rows, but the plan has {} sequences",
                array.shape[0],
                self.problem.batch()
            )));
        }
        let stride = usize::try_from(array.strides[0]).unwrap_or(0);
        Ok((memory.address, stride.max(array.shape[1])))
    }

    fn kv_lens(&self, kv_lens: &Bound<'_, PyCapsule>) -> PyResult<DeviceAddress> {
        let bytes = 4 * self.problem.batch();
        self.gpu.list("kv_lens", Some(kv_lens), (Dtype::I32, bytes))
    }

    /// The table of an attention: its address, and entries per sequence, which reach the longest length.
    fn full_table(&self, capsule: &Bound<'_, PyCapsule>) -> PyResult<(DeviceAddress, usize)> {
        let (table, stride) = self.table("page_table", capsule)?;
        if stride.saturating_mul(self.layout.page_size()) < self.plan.max_kv_len() {
            return Err(errors::shape(format!(
                "page_table has {stride} pages per sequence, but the plan's longest length, {}, needs more",
                self.plan.max_kv_len()
            )));
        }
        Ok((table, stride))
    }

    fn kv_of_pages(&self, pages: &PageArrays<'_>) -> PyResult<Kv> {
        let pool = self.pool(&pages.pool)?;
        let (page_table, page_table_stride) = self.full_table(&pages.page_table)?;
        let (residual_pages, residual_slots) = self.residuals(pages)?;
        Ok(Kv {
            kv: DeviceKv::Paged {
                pool,
                page_table,
                page_table_stride,
                residual_pages,
                residual_slots,
            },
            kv_lens: self.kv_lens(&pages.kv_lens)?,
            scales: self.scales([&pages.k_scales, &pages.v_scales])?,
        })
    }

    /// Rows of K or V in pages: their address, strides in bytes, number of pages.
    fn paged_rows(
        &self,
        (what, scheme): (&'static str, Scheme),
        capsule: &Bound<'_, PyCapsule>,
    ) -> PyResult<(DeviceAddress, [usize; 3], usize)> {
        let dtype = match scheme {
            Scheme::F16 => Dtype::F16,
            Scheme::Bf16 => Dtype::Bf16,
            Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => Dtype::U8,
            _ => {
                return Err(errors::parameter(format!(
                    "format is {scheme}; another engine's pages are bf16, f16, fp8 or int8-tensor"
                )));
            }
        };
        let array = Array::new(what, capsule)?;
        let (tokens, heads) = (self.layout.page_size(), self.layout.num_kv_heads());
        let row = [tokens, heads, self.layout.head_dim()];
        let shape = format!("[pages, {}, {}, {}]", row[0], row[1], row[2]);
        array.check_rank(4, &shape)?;
        if array.shape[1..] != row {
            return Err(errors::shape(format!(
                "{what} has the shape {:?}; needed: {shape}",
                array.shape
            )));
        }
        let memory = self.gpu.memory(&array, &[dtype], 3)?;
        let bytes = |stride: i64| usize::try_from(stride).unwrap_or(0) * dtype.bytes();
        let [page, token, head] = [0, 1, 2].map(|i| bytes(array.strides[i]));
        Ok((memory.address, [page, head, token], array.shape[0]))
    }

    fn kv_of_rows(&self, rows: &RowArrays<'_>) -> PyResult<Kv> {
        let format = self.layout.format();
        let (k, k_strides, num_pages) = self.paged_rows(("k_cache", format.k), &rows.k_cache)?;
        let (v, v_strides, v_pages) = self.paged_rows(("v_cache", format.v), &rows.v_cache)?;
        if num_pages != v_pages {
            return Err(errors::shape(format!(
                "k_cache has {num_pages} pages, and v_cache {v_pages}; pass as many of both"
            )));
        }
        let (page_table, page_table_stride) = self.full_table(&rows.page_table)?;
        Ok(Kv {
            kv: DeviceKv::PagedRows {
                rows: DeviceRows {
                    k: [k, DeviceAddress::NULL],
                    v: [v, DeviceAddress::NULL],
                    code_strides: [k_strides, v_strides],
                    scale_strides: [[0; 3]; 2],
                },
                num_pages,
                page_table,
                page_table_stride,
            },
            kv_lens: self.kv_lens(&rows.kv_lens)?,
            scales: self.scales([&rows.k_scales, &rows.v_scales])?,
        })
    }

    /// The launch of appends; refuses a plan for another engine's pages.
    fn append(&self) -> PyResult<&NativeAppend> {
        let none = "the plan is for another engine's pages, which it does not write; make one without rows=True";
        self.append
            .as_ref()
            .ok_or_else(|| errors::parameter(none.to_owned()))
    }

    /// Residual pages and their slots per sequence; null for formats without a window.
    fn residuals(&self, pages: &PageArrays<'_>) -> PyResult<(DeviceAddress, usize)> {
        if self.layout.format().window() == Window::None {
            return Ok((DeviceAddress::NULL, 0));
        }
        let capsule = pages.residual_pages.as_ref();
        let missing = || {
            errors::shape(format!(
                "residual_pages is missing; {} keeps residuals of the newest tokens",
                self.layout.format()
            ))
        };
        self.table("residual_pages", capsule.ok_or_else(missing)?)
    }

    fn decode_args(&self, kv: Kv, arrays: &AttendArrays<'_>) -> PyResult<DecodeArgs> {
        let heads = self.problem.num_q_heads;
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

    /// New K and V: their memory, type, strides between tokens, and number.
    #[allow(
        clippy::type_complexity,
        reason = "used by two functions, at once taken apart"
    )]
    fn new_tokens(
        &self,
        k: &Bound<'_, PyCapsule>,
        v: &Bound<'_, PyCapsule>,
    ) -> PyResult<([DeviceAddress; 2], CudaDtype, [usize; 2], usize)> {
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
        let strides = [stride(&k), stride(&v)];
        Ok(([k_memory.address, v_memory.address], dtype, strides, tokens))
    }

    /// The export of a range of tokens of each of the plan's sequences.
    fn export_args(&self, pages: &PageArrays<'_>, rows: &ExportArrays<'_>) -> PyResult<ExportArgs> {
        let Kv {
            kv:
                DeviceKv::Paged {
                    pool,
                    page_table,
                    page_table_stride,
                    residual_pages,
                    residual_slots,
                    ..
                },
            kv_lens,
            scales: [k_tensor_scales, v_tensor_scales],
        } = self.kv_of_pages(pages)?
        else {
            return Err(errors::parameter(OTHERS.to_owned()));
        };
        let ([k, v], dtype, [k_token_stride, v_token_stride], _) =
            self.new_tokens(&rows.k, &rows.v)?;
        let batch = self.problem.batch();
        Ok(ExportArgs {
            k,
            v,
            dtype,
            k_token_stride,
            v_token_stride,
            pool,
            page_table,
            page_table_stride,
            residual_pages,
            residual_slots,
            kv_lens,
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
    fn append_args(
        &self,
        pages: &PageArrays<'_>,
        [k, v]: [&Bound<'_, PyCapsule>; 2],
        rotary: Option<&RotaryArrays<'_>>,
    ) -> PyResult<AppendArgs> {
        let pool = self.pool(&pages.pool)?;
        let (page_table, page_table_stride) = self.table("page_table", &pages.page_table)?;
        let (residual_pages, residual_slots) = self.residuals(pages)?;
        let ([k, v], dtype, [k_token_stride, v_token_stride], all) = self.new_tokens(k, v)?;
        let batch = self.problem.batch();
        let tokens = all.checked_div(batch).unwrap_or(0);
        if tokens.saturating_mul(batch) != all {
            return Err(errors::shape(format!(
                "k has {all} tokens for {batch} sequences; each gets as many: use append_slots for other numbers"
            )));
        }
        let [k_tensor_scales, v_tensor_scales] = self.scales([&pages.k_scales, &pages.v_scales])?;
        let rotary = self.rotary_args(rotary, dtype, all)?;
        Ok(AppendArgs {
            k,
            v,
            dtype,
            k_token_stride,
            v_token_stride,
            pool,
            page_table,
            page_table_stride,
            residual_pages,
            residual_slots,
            kv_lens: self.kv_lens(&pages.kv_lens)?,
            k_tensor_scales,
            v_tensor_scales,
            batch,
            tokens,
            rotary,
        })
    }

    /// How an append of so many tokens rotates, if it does.
    fn rotary_args(
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

#[pymethods]
impl Plan {
    #[new]
    fn new(py: Python<'_>, options: PlanOptions, device: &str) -> PyResult<Self> {
        let own = Gpu::open(py, device)?;
        let gpu = own.cuda()?;
        let format: KvFormat = options.format.parse().map_err(errors::of)?;
        let heads = Heads {
            q: options.heads,
            kv: options.kv_heads,
            dim: options.dim,
        };
        let lens = vec![options.max_kv_len; options.q_lens.len()];
        let problem = Problem::new(heads, lens).q_lens(options.q_lens);
        let problem = options.modifiers.of(problem);
        let config = CacheConfig::builder(format, heads)
            .page_size(options.page_size)
            .build();
        let prepare = || {
            let layout = config.layout()?;
            let (kv, append, export) = match options.rows {
                true => (KvLayout::PagedRows(options.page_size), None, None),
                false => (
                    KvLayout::Pages(options.page_size),
                    Some(match options.rotary {
                        true => gpu.prepare_append_rotary(&config)?,
                        false => gpu.prepare_append(&config)?,
                    }),
                    Some(gpu.prepare_export(layout)?),
                ),
            };
            let plan = match (options.ragged, options.spans) {
                (_, true) => gpu.prepare_spans(&problem, format, kv)?,
                (true, _) => gpu.prepare_ragged(&problem, format, kv)?,
                _ => gpu.prepare(&problem, format, kv)?,
            };
            Ok((plan, (append, export), layout))
        };
        let (plan, (append, export), layout) = py.detach(prepare).map_err(errors::of)?;
        Ok(Plan {
            gpu: own,
            problem,
            layout,
            plan,
            append,
            export,
        })
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.layout.page_bytes()
    }

    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
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
        let gpu = self.gpu.cuda()?;
        let starts = (Dtype::I32, 4 * (self.problem.batch() + 1));
        let starts = self.gpu.list("cu_seqlens_q", Some(cu_seqlens_q), starts)?;
        let bytes = (Dtype::U8, self.plan.query_blocks_bytes());
        let to = self.gpu.list("query_blocks", blocks.as_ref(), bytes)?;
        // SAFETY: as for `attend`; whatever the numbers are, the launch writes the list alone, which is as long as the plan says.
        py.detach(|| unsafe { gpu.query_blocks_on(&self.plan, stream_of(stream), starts, to) })
            .map_err(errors::of)
    }

    /// Entries of a row of residual pages where a step has up to `q_len` query tokens of a sequence; 0 for formats without a window.
    fn residual_slots(&self, q_len: usize) -> usize {
        let (format, page_size) = (self.layout.format(), self.layout.page_size());
        format.residual_slots(page_size, q_len)
    }

    /// The plan's lists as bytes, to be put into device memory: query blocks, and the slopes as the kernels take them.
    fn lists<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>) {
        let words = self.plan.query_blocks().iter().flat_map(|block| {
            [block.sequence, block.first, block.tokens, block.behind]
                .into_iter()
                .flat_map(i32::to_ne_bytes)
        });
        let slopes = alibi_slopes_log2(self.problem.alibi_slopes.as_deref().unwrap_or(&[]));
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
        let gpu = self.gpu.cuda()?;
        let args = self.decode_args(self.kv_of_pages(&pages)?, &arrays)?;
        // SAFETY: the arrays have been compared with the plan's shapes, types and device, and lie in memory that the caller's library keeps until
        // the work enqueued on its stream has run; `attn.torch.Plan` makes the workspace, zeroed, for itself alone. That lengths, pages and
        // queries on the device are in range is the caller's contract, which `ATTN_CHECK=1` checks.
        py.detach(|| unsafe { gpu.decode_on(&self.plan, stream_of(stream), &args) })
            .map_err(errors::of)
    }

    /// Spans of the longest sequence, at least one.
    #[getter]
    fn spans(&self) -> usize {
        self.plan.spans()
    }

    /// Attends shards, and leaves the states of their spans: float32 `max_sums` `[spans, rows, 2]` and `o` `[spans, rows, dim]`. `tokens_after`:
    /// int32 `[sequences]`, or none.
    fn attend_spans(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        arrays: AttendArrays<'_>,
        spans: SpanArrays<'_>,
        stream: u64,
    ) -> PyResult<()> {
        let (max_sums, o, tokens_after) = spans;
        let gpu = self.gpu.cuda()?;
        let args = self.decode_args(self.kv_of_pages(&pages)?, &arrays)?;
        let states = self.problem.rows().saturating_mul(self.plan.spans());
        let list = |what, array, count: usize| {
            self.gpu
                .list(what, Some(array), (Dtype::F32, count.saturating_mul(4)))
        };
        let dim = self.layout.head_dim();
        let to = SpansArgs {
            tokens_after: match &tokens_after {
                None => DeviceAddress::NULL,
                after => {
                    let bytes = 4 * self.problem.batch();
                    self.gpu
                        .list("tokens_after", after.as_ref(), (Dtype::I32, bytes))?
                }
            },
            max_sums: list("max_sums", &max_sums, states.saturating_mul(2))?,
            o: list("o", &o, states.saturating_mul(dim))?,
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
        let gpu = self.gpu.cuda()?;
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
        let gpu = self.gpu.cuda()?;
        let args = self.export_args(&pages, &rows)?;
        let export = self
            .export
            .as_ref()
            .ok_or_else(|| errors::parameter(OTHERS.to_owned()))?;
        // SAFETY: as for `attend`; that ranges end inside their sequences and inside the rows is the caller's contract.
        py.detach(|| unsafe { gpu.export_on(export, stream_of(stream), &args) })
            .map_err(errors::of)
    }

    /// `kv` are K and V.
    #[pyo3(signature = (pages, kv, slots, stream, rotary = None))]
    fn append_slots(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        kv: (Bound<'_, PyCapsule>, Bound<'_, PyCapsule>),
        slots: &Bound<'_, PyCapsule>,
        stream: u64,
        rotary: Option<RotaryArrays<'_>>,
    ) -> PyResult<()> {
        let gpu = self.gpu.cuda()?;
        let pool = self.pool(&pages.pool)?;
        let ([k, v], dtype, [k_token_stride, v_token_stride], tokens) =
            self.new_tokens(&kv.0, &kv.1)?;
        let has_window = self.layout.format().window() != Window::None;
        let residual_bytes = if has_window { 4 * tokens } else { 0 };
        let [k_tensor_scales, v_tensor_scales] = self.scales([&pages.k_scales, &pages.v_scales])?;
        let append = self.append()?;
        let rotary = self.rotary_args(rotary.as_ref(), dtype, tokens)?;
        let args = SlotAppendArgs {
            k,
            v,
            dtype,
            k_token_stride,
            v_token_stride,
            pool,
            slots: self
                .gpu
                .list("slots", Some(slots), (Dtype::I64, 8 * tokens))?,
            residual_pages: self.gpu.list(
                "residual_pages",
                pages.residual_pages.as_ref(),
                (Dtype::I32, residual_bytes),
            )?,
            k_tensor_scales,
            v_tensor_scales,
            tokens,
            rotary,
        };
        // SAFETY: as for `attend`; slots and positions are the caller's contract.
        py.detach(|| unsafe { gpu.append_slots_on(append, stream_of(stream), &args) })
            .map_err(errors::of)
    }

    /// Appends as many tokens to each sequence, whose places are read from `kv_lens`, and attends; `kv` are K and V.
    #[pyo3(signature = (pages, arrays, kv, stream, rotary = None))]
    fn step(
        &self,
        py: Python<'_>,
        pages: PageArrays<'_>,
        arrays: AttendArrays<'_>,
        kv: (Bound<'_, PyCapsule>, Bound<'_, PyCapsule>),
        stream: u64,
        rotary: Option<RotaryArrays<'_>>,
    ) -> PyResult<()> {
        let gpu = self.gpu.cuda()?;
        let append = self.append_args(&pages, [&kv.0, &kv.1], rotary.as_ref())?;
        let decode = self.decode_args(self.kv_of_pages(&pages)?, &arrays)?;
        let prepared = self.append()?;
        // SAFETY: as for `attend`; that lengths count the new tokens is the caller's contract.
        py.detach(|| unsafe {
            gpu.append_decode_on(prepared, &self.plan, stream_of(stream), &append, &decode)
        })
        .map_err(errors::of)
    }
}
