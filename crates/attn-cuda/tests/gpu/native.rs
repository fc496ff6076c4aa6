//! The native entry held to the CPU's bits.

use anyhow::{Context, Result, bail};
use attn_bench::cuda::Buffers;
use attn_conformance::{case::noise, check::first_difference, trials::Trials};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, Heads, Int8Scale, KvCache, KvFormat, KvSource,
    KvView, Problem, Scheme, StridedRows,
};
use attn_cpu::CpuBackend;
use attn_cuda::{
    CudaBackend, CudaError, Options,
    internals::context,
    native::{
        AppendArgs, AppendShape, DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, KvRows,
        NativePlan, PagedSequences, Pages, Prepared, SlotAppendArgs,
    },
};
use cudarc::driver::{CudaSlice, sys};
use half::f16;

use crate::{driver, numbers, passes};

pub(super) const BATCH: usize = 3;
pub(super) const HEADS: usize = 2;
pub(super) const Q_HEADS: usize = 8;
pub(super) const DIM: usize = 128;
pub(super) const PAGE: usize = 64;
const MAX_LEN: usize = 1400;
const STRIDE: usize = MAX_LEN.div_ceil(PAGE);

/// An engine's side: its own pool, page table and buffers, and the CPU's cache of the same tokens beside it.
pub(super) struct Engine<'a> {
    pub(super) gpu: &'a CudaBackend,
    pub(super) buffers: Buffers,
    pub(super) cpu: CpuBackend,
    pub(super) cache: KvCache,
    pub(super) problem: Problem,
    pub(super) plan: NativePlan,
    pub(super) append: Prepared<AppendArgs>,
    slot_append: Prepared<SlotAppendArgs>,
    /// Number format of queries and outputs.
    pub(super) dtype: Dtype,
    pub(super) num_pages: usize,
    pub(super) pool: CudaSlice<u8>,
    pub(super) page_table: CudaSlice<u32>,
    pub(super) residual_pages: CudaSlice<u32>,
    /// Residual pages of each sequence.
    pub(super) slots: usize,
    pub(super) kv_lens: CudaSlice<i32>,
    pub(super) q: CudaSlice<u8>,
    pub(super) k: CudaSlice<f32>,
    pub(super) v: CudaSlice<f32>,
    pub(super) out: CudaSlice<u8>,
    pub(super) lse: CudaSlice<f32>,
    pub(super) workspace: CudaSlice<u8>,
    pub(super) sinks: CudaSlice<f32>,
    /// Whether launches take them.
    pub(super) with_sinks: bool,
    pub(super) lens: [usize; BATCH],
    pub(super) seed: u64,
}

fn table() -> Vec<u32> {
    // Every page of the pool but those of residuals, in an order that puts no two of a sequence side by side.
    let pages = BATCH * STRIDE;
    (0..pages).map(|i| (i * 31 % pages) as u32).collect()
}

/// A sink for each query head, ordinary ones and both ends.
fn sinks() -> [f32; Q_HEADS] {
    std::array::from_fn(|h| [0.5, -2.0, 6.0, 1e6, -1e6][h % 5])
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        gpu: &'a CudaBackend,
        format: KvFormat,
        q_len: usize,
        dtype: Dtype,
    ) -> Result<Self> {
        let buffers = Buffers::new(context(gpu))?;
        let heads = Heads::new(HEADS, HEADS, DIM);
        let mut config = CacheConfig::builder(format, heads)
            .centres(false)
            .unit_tensor_scales()
            .sequences(BATCH)
            .max_len(MAX_LEN)
            .build();
        config.page_size = PAGE;
        let cpu = CpuBackend::new();
        let cache = cpu.create_cache(&config)?;
        let mut problem = Problem::new(Heads::new(Q_HEADS, HEADS, DIM), vec![MAX_LEN; BATCH]);
        problem.q_lens = vec![q_len; problem.batch()];
        problem.scores.sinks = (q_len > 1).then(|| sinks().to_vec());
        let plan = gpu.prepare(&problem, format, KvLayout::Pages(PAGE))?;
        let slots = format.residual_slots(PAGE, q_len);
        let num_pages = BATCH * (STRIDE + slots);
        let rows = q_len * BATCH * Q_HEADS;
        let row_bytes = numbers::bytes(dtype, &[0.0; DIM]).len();
        let residuals: Vec<u32> = (0..BATCH * slots.max(1))
            .map(|i| (BATCH * STRIDE + i) as u32)
            .collect();
        let shape = AppendShape {
            layout: config.layout()?,
            rotary: false,
        };
        Ok(Engine {
            append: gpu.prepare_op(shape)?,
            slot_append: gpu.prepare_op(shape)?,
            pool: buffers.upload(&vec![0xffu8; num_pages * config.layout()?.page_bytes()])?,
            page_table: buffers.upload(&table())?,
            residual_pages: buffers.upload(&residuals)?,
            slots,
            kv_lens: buffers.upload(&[0; BATCH])?,
            q: buffers.bytes(rows * row_bytes)?,
            k: buffers.floats(MAX_LEN * HEADS * DIM)?,
            v: buffers.floats(MAX_LEN * HEADS * DIM)?,
            out: buffers.bytes(rows * row_bytes)?,
            lse: buffers.floats(rows)?,
            workspace: buffers.bytes(plan.workspace_bytes())?,
            sinks: buffers.upload(&sinks())?,
            with_sinks: problem.scores.sinks.is_some(),
            lens: [0; BATCH],
            seed: 1,
            gpu,
            buffers,
            cpu,
            cache,
            problem,
            plan,
            dtype,
            num_pages,
        })
    }

    fn pages(&self) -> Pages {
        let at = self.buffers.address(&self.pool);
        Pages::new(at, self.cache.layout(), self.num_pages)
    }

    /// The slots of sequences from `first` on.
    fn residuals(&self, first: usize) -> DeviceAddress {
        let table = self.buffers.address(&self.residual_pages);
        match self.slots {
            0 => DeviceAddress::NULL,
            slots => table.offset(4 * first * slots),
        }
    }

    /// The sequences from `first` on.
    fn sequences(&self, first: usize) -> PagedSequences {
        let b = &self.buffers;
        PagedSequences {
            pool: self.pages(),
            page_table: b.address(&self.page_table).offset(first * STRIDE * 4),
            page_table_stride: STRIDE,
            residual_pages: self.residuals(first),
            residual_slots: self.slots,
            kv_lens: b.address(&self.kv_lens).offset(first * 4),
            tensor_scales: [DeviceAddress::NULL; 2],
        }
    }

    /// The rows of `k` and `v`.
    fn rows(&self) -> KvRows {
        KvRows {
            k: self.buffers.address(&self.k),
            v: self.buffers.address(&self.v),
            dtype: Dtype::F32,
            k_token_stride: HEADS * DIM,
            v_token_stride: HEADS * DIM,
        }
    }

    pub(super) fn append_args(&self, first: usize, batch: usize, tokens: usize) -> AppendArgs {
        AppendArgs {
            rows: self.rows(),
            sequences: self.sequences(first),
            batch,
            tokens,
            rotary: None,
        }
    }

    pub(super) fn decode_args(&self) -> DecodeArgs {
        let b = &self.buffers;
        DecodeArgs {
            q: b.address(&self.q),
            out: b.address(&self.out),
            dtype: self.dtype,
            lse: b.address(&self.lse),
            kv: DeviceKv::Paged(self.sequences(0)),
            query_blocks: DeviceAddress::NULL,
            alibi_slopes: DeviceAddress::NULL,
            sinks: match self.with_sinks {
                true => b.address(&self.sinks),
                false => DeviceAddress::NULL,
            },
            workspace: b.address(&self.workspace),
            scratch: DeviceAddress::NULL,
        }
    }

    fn upload_lens(&mut self) -> Result<()> {
        let lens = self.lens.map(|len| len as i32);
        Ok(self.buffers.copy(&lens, &mut self.kv_lens)?)
    }

    /// The next `tokens` of every sequence from `first` to `first + batch`, here and on the CPU.
    pub(super) fn next_tokens(
        &mut self,
        first: usize,
        batch: usize,
        tokens: usize,
        dtype: Dtype,
    ) -> Result<()> {
        let row = HEADS * DIM;
        let count = batch * tokens * row;
        self.seed += 2;
        let [k, v] = [0, 1].map(|i| numbers::rounded(dtype, &noise(self.seed + i, count)));
        for i in 0..batch {
            let of = i * tokens * row..(i + 1) * tokens * row;
            self.cache.append(first + i, &k[of.clone()], &v[of])?;
            self.lens[first + i] += tokens;
        }
        self.buffers.copy(&k, &mut self.k)?;
        self.buffers.copy(&v, &mut self.v)?;
        self.upload_lens()
    }

    /// The next tokens of all sequences, `counts` of each, in one append by slots, with a token between two sequences that is skipped.
    fn append_by_slots(&mut self, counts: [usize; BATCH], dtype: Dtype) -> Result<()> {
        let row = HEADS * DIM;
        self.seed += 2;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        let (mut slots, mut residuals) = (Vec::new(), Vec::new());
        let format = self.cache.config().format;
        let first = format.first_residual_pages(PAGE);
        for (b, count) in counts.into_iter().enumerate() {
            let [new_k, new_v] = [0, 1].map(|i| {
                numbers::rounded(dtype, &noise(self.seed + 7 * i + b as u64, count * row))
            });
            self.cache.append(b, &new_k, &new_v)?;
            for (all, new) in [(&mut k, new_k), (&mut v, new_v)] {
                all.extend(new);
                all.extend(vec![f32::NAN; row]);
            }
            let end = self.lens[b] + count;
            for at in self.lens[b]..end {
                let page = at / PAGE;
                slots
                    .push(i64::from(table()[b * STRIDE + page]) * PAGE as i64 + (at % PAGE) as i64);
                let is_kept = page < first || page + self.slots > (end - 1) / PAGE + first;
                residuals.push(match is_kept {
                    true => {
                        let slot = format.residual_slot(PAGE, self.slots, page);
                        (BATCH * STRIDE + b * self.slots + slot) as u32
                    }
                    false => u32::MAX,
                });
            }
            slots.push(-1);
            residuals.push(u32::MAX);
            self.lens[b] = end;
        }
        self.upload_lens()?;
        let b = &self.buffers;
        let [k, v] = [k, v].map(|x| b.upload(&numbers::bytes(dtype, &x)));
        let (k, v) = (k?, v?);
        let (at, of) = (b.upload(&slots)?, b.upload(&residuals)?);
        let args = SlotAppendArgs {
            rows: KvRows {
                k: b.address(&k),
                v: b.address(&v),
                dtype,
                ..self.rows()
            },
            pool: self.pages(),
            tensor_scales: [DeviceAddress::NULL; 2],
            slots: b.address(&at),
            residual_pages: match self.slots {
                0 => DeviceAddress::NULL,
                _ => b.address(&of),
            },
            tokens: slots.len(),
            rotary: None,
            centres: None,
        };
        // SAFETY: as in `prefill`; the slots are those of the sequences' own pages, in order.
        unsafe { self.gpu.enqueue(&self.slot_append, b.raw(), &args) }?;
        driver(b.stream.synchronize())
    }

    pub(super) fn prefill(&mut self, lens: [usize; BATCH]) -> Result<()> {
        for (b, len) in lens.into_iter().enumerate() {
            self.next_tokens(b, 1, len, Dtype::F32)?;
            let args = self.append_args(b, 1, len);
            // SAFETY: the buffers are this struct's, sized for MAX_LEN; lengths and pages are its own; one stream.
            unsafe { self.gpu.enqueue(&self.append, self.buffers.raw(), &args) }?;
            driver(self.buffers.stream.synchronize())?;
        }
        Ok(())
    }

    pub(super) fn new_queries(&mut self) -> Result<Vec<f32>> {
        let q = noise(self.seed + 77, self.problem.rows() * DIM);
        self.upload_queries(&q)?;
        let nan = numbers::bytes(self.dtype, &vec![f32::NAN; q.len()]);
        self.buffers.copy(&nan, &mut self.out)?;
        Ok(numbers::rounded(self.dtype, &q))
    }

    fn upload_queries(&mut self, q: &[f32]) -> Result<()> {
        let bytes = numbers::bytes(self.dtype, q);
        Ok(self.buffers.copy(&bytes, &mut self.q)?)
    }

    /// Enqueues append and decode, one after the other or as one step.
    fn enqueue(&self, append: &AppendArgs, as_one: bool) -> Result<()> {
        let (gpu, stream, decode) = (self.gpu, self.buffers.raw(), self.decode_args());
        if as_one {
            // SAFETY: as in `prefill`; the workspace is zeroed and used by this plan alone.
            unsafe { gpu.append_decode_on(&self.append, &self.plan, stream, append, &decode) }?;
        } else {
            // SAFETY: likewise.
            unsafe { gpu.enqueue(&self.append, stream, append) }?;
            // SAFETY: likewise.
            unsafe { gpu.decode_on(&self.plan, stream, &decode) }?;
        }
        Ok(())
    }

    /// Compares what lies in `out` and `lse` with the CPU.
    fn compare(&self, q: &[f32], what: &str) -> Result<()> {
        self.compare_with(&self.problem, q, what)
    }

    /// Compares the first rows of `out`, where sequences bring the query tokens of `problem`.
    pub(super) fn compare_with(&self, problem: &Problem, q: &[f32], what: &str) -> Result<()> {
        let mut problem = problem.clone();
        problem.kv_lens = self.lens.to_vec();
        let plan = self.cpu.plan(&problem, self.plan.format())?;
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
        let kv = KvSource::Cache(&self.cache);
        let mut step = DecodeStep::new(&plan, q, kv, &mut out)?.with_lse(&mut lse)?;
        self.cpu.decode(&mut step)?;
        let mut got = (
            numbers::numbers(self.dtype, &self.buffers.download(&self.out)?),
            self.buffers.download(&self.lse)?,
        );
        got.0.truncate(out.len());
        got.1.truncate(lse.len());
        let out = numbers::rounded(self.dtype, &out);
        let found =
            first_difference("out", &got.0, &out).or_else(|| first_difference("lse", &got.1, &lse));
        match found {
            None => Ok(()),
            Some(text) => bail!("{what}, lengths {:?}: {text}", self.lens),
        }
    }
}

/// A graph of append and decode, captured once, replayed while the sequences grow.
fn graph(
    gpu: &CudaBackend,
    format: KvFormat,
    tokens: usize,
    steps: usize,
    (as_one, dtype): (bool, Dtype),
) -> Result<()> {
    let mut engine = Engine::new(gpu, format, tokens, dtype)?;
    engine.prefill([1, 250, 900])?;
    let args = engine.append_args(0, BATCH, tokens);
    let stream = engine.buffers.stream.clone();
    driver(stream.synchronize())?;
    driver(stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))?;
    let enqueued = engine.enqueue(&args, as_one);
    let graph = driver(stream.end_capture(
        sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
    ))?;
    enqueued?;
    let graph = graph.context("the capture gave no graph")?;
    for step in 0..steps {
        engine.next_tokens(0, BATCH, tokens, Dtype::F32)?;
        let q = engine.new_queries()?;
        driver(graph.launch())?;
        if step % 7 == 0 || step + 1 == steps {
            engine.compare(
                &q,
                &format!("{format}, {dtype:?}, as one: {as_one}, replay {step}"),
            )?;
        }
        driver(stream.synchronize())?;
    }
    Ok(())
}

/// 16-bit inputs are appended as the f32 numbers that they are.
fn narrow(gpu: &CudaBackend, format: KvFormat, dtype: Dtype) -> Result<()> {
    let mut engine = Engine::new(gpu, format, 1, dtype)?;
    let tokens = 150;
    engine.next_tokens(0, BATCH, tokens, dtype)?;
    let narrowed = |x: &CudaSlice<f32>| -> Result<CudaSlice<u8>> {
        let bytes = numbers::bytes(dtype, &engine.buffers.download(x)?);
        Ok(engine.buffers.upload(&bytes)?)
    };
    let (k, v) = (narrowed(&engine.k)?, narrowed(&engine.v)?);
    let mut args = engine.append_args(0, BATCH, tokens);
    args.rows = KvRows {
        k: engine.buffers.address(&k),
        v: engine.buffers.address(&v),
        dtype,
        ..args.rows
    };
    let q = engine.new_queries()?;
    engine.enqueue(&args, false)?;
    engine.compare(&q, &format!("{format}, {dtype:?} inputs"))
}

/// Tokens of all sequences in one append, as an engine's step has them: the bytes are those of appends one by one.
fn by_slots(gpu: &CudaBackend, format: KvFormat, dtype: Dtype) -> Result<()> {
    let mut engine = Engine::new(gpu, format, 1, Dtype::F32)?;
    for counts in [[100, 0, 700], [1, 1, 1], [5, 64, 17], [1, 0, 9], [63, 1, 1]] {
        engine.append_by_slots(counts, dtype)?;
        if engine.lens.contains(&0) {
            continue;
        }
        let q = engine.new_queries()?;
        // SAFETY: as in `enqueue`.
        unsafe { gpu.decode_on(&engine.plan, engine.buffers.raw(), &engine.decode_args()) }?;
        engine.compare(&q, &format!("{format}, {counts:?} tokens by slots"))?;
    }
    Ok(())
}

/// A host view whose rows begin anywhere: it reaches decode through pages.
fn crooked_view(gpu: &CudaBackend) -> Result<()> {
    let lens = vec![300, 0, 129];
    let (row, capacity) = (DIM + 3, 301);
    let codes = |seed| -> Vec<u8> {
        let numbers = noise(seed, lens.len() * HEADS * capacity * row);
        numbers.iter().map(|x| (x * 20.0) as i8 as u8).collect()
    };
    let scales: Vec<u16> = (0..lens.len() * HEADS * capacity)
        .map(|i| f16::from_f32(0.01 + (i % 37) as f32 * 0.001).to_bits())
        .collect();
    let (k, v) = (codes(1), codes(2));
    let rows = |codes| StridedRows::bnsh(codes, &scales, HEADS, capacity, row, 1);
    let problem = Problem::new(Heads::new(Q_HEADS, HEADS, DIM), lens);
    let format = KvFormat::same(Scheme::Int8(Int8Scale::Token));
    let view = KvView::new(&problem, format, rows(&k), rows(&v), [&[], &[]])?;
    let q = noise(3, problem.rows() * DIM);
    let cpu = CpuBackend::new();
    let mut answers = Vec::new();
    for backend in [&cpu as &dyn DecodeAttention, gpu] {
        let plan = backend.plan(&problem, format)?;
        let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
        let kv = KvSource::View(&view);
        backend.decode(&mut DecodeStep::new(&plan, &q, kv, &mut out)?.with_lse(&mut lse)?)?;
        answers.push((out, lse));
    }
    let (want, got) = (&answers[0], &answers[1]);
    let found = first_difference("out", &got.0, &want.0)
        .or_else(|| first_difference("lse", &got.1, &want.1));
    match found {
        None => Ok(()),
        Some(text) => bail!("a view with rows of {row} bytes: {text}"),
    }
}

/// An append by slots of two tokens.
fn append_to(engine: &Engine<'_>, slots: [i64; 2]) -> Result<(), Error> {
    let b = &engine.buffers;
    let at = b.upload(&slots)?;
    let args = SlotAppendArgs {
        rows: engine.rows(),
        pool: engine.pages(),
        tensor_scales: [DeviceAddress::NULL; 2],
        slots: b.address(&at),
        residual_pages: engine.residuals(0),
        tokens: slots.len(),
        rotary: None,
        centres: None,
    };
    // SAFETY: as in `prefill`, but for the slots, which the checking launch refuses before anything is written.
    unsafe { engine.gpu.enqueue(&engine.slot_append, b.raw(), &args) }
}

/// The checking launch refuses what the contract of `decode_on` forbids, and the GPU works on.
fn checked(options: &Options) -> Result<()> {
    let gpu = &CudaBackend::with_options(options)?;
    let mut engine = Engine::new(gpu, KvFormat::INT8, 1, Dtype::F32)?;
    engine.prefill([100, 200, 300])?;
    let q = engine.new_queries()?;
    let decode = |engine: &Engine<'_>| {
        // SAFETY: the checking launch goes first and refuses what would break the contract.
        unsafe { gpu.decode_on(&engine.plan, engine.buffers.raw(), &engine.decode_args()) }
    };
    decode(&engine)?;
    engine.compare(&q, "with the checking launch")?;
    let expect = |result: Result<(), Error>, name: &str| match result {
        Err(Error::Device { source, .. }) => match source.downcast_ref() {
            Some(CudaError::Check { what, .. }) if *what == name => Ok(()),
            _ => bail!("expected a refusal of {name}, got {source}"),
        },
        other => bail!("expected a refusal of {name}, got {other:?}"),
    };
    let good = table();
    let mut bad = good.clone();
    bad[STRIDE + 2] = 1_000_000;
    engine.buffers.copy(&bad, &mut engine.page_table)?;
    expect(decode(&engine), "page_table")?;
    engine.buffers.copy(&good, &mut engine.page_table)?;
    engine
        .buffers
        .copy(&[5, MAX_LEN as i32 + 1, 5], &mut engine.kv_lens)?;
    expect(decode(&engine), "kv_lens")?;
    engine.upload_lens()?;
    let mut wild = q.clone();
    wild[DIM + 3] = f32::NAN;
    engine.upload_queries(&wild)?;
    expect(decode(&engine), "q")?;
    engine.upload_queries(&q)?;
    for (slots, name) in [
        ([3, engine.num_pages as i64 * PAGE as i64], "slots"),
        ([-1, i64::MAX], "slots"),
    ] {
        expect(append_to(&engine, slots), name)?;
    }
    // A plan of a problem without sinks takes them, too.
    let mut wild = sinks();
    wild[Q_HEADS - 1] = f32::NAN;
    engine.buffers.copy(&wild, &mut engine.sinks)?;
    engine.with_sinks = true;
    expect(decode(&engine), "sinks")?;
    engine.buffers.copy(&sinks(), &mut engine.sinks)?;
    engine.problem.scores.sinks = Some(sinks().to_vec());
    decode(&engine)?;
    engine.compare(&q, "with sinks, after refusals")?;
    (engine.with_sinks, engine.problem.scores.sinks) = (false, None);
    decode(&engine)?;
    engine.compare(&q, "after refusals")
}

/// Adds the tests of this file.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    for name in ["int8", "int4", "int4-g4"] {
        let format: KvFormat = name.parse().expect("a format's name");
        // Sixteen tokens are 64 query rows.
        for (tokens, steps) in [(1, 450), (3, 100), (16, 25)] {
            for how in [(false, Dtype::F32), (true, Dtype::Bf16), (true, Dtype::F16)] {
                let (as_one, dtype) = how;
                let step = if as_one { "one launch" } else { "two launches" };
                let name = format!(
                    "native: {name}, {tokens} tokens in {dtype:?}, {step}, a graph replayed {steps} times"
                );
                trials = trials.test(name, move |gpu| {
                    passes(graph(gpu, format, tokens, steps, how))
                });
            }
        }
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let name = format!("native: {name}, K and V in {dtype:?}, by slots");
            trials = trials.test(name, move |gpu| passes(by_slots(gpu, format, dtype)));
        }
        for dtype in [Dtype::F16, Dtype::Bf16] {
            trials = trials.test(
                format!("native: {name}, K and V in {dtype:?}"),
                move |gpu| {
                    passes(narrow(gpu, format, dtype));
                },
            );
        }
    }
    trials
        .test("native: a host view whose rows begin anywhere", |gpu| {
            passes(crooked_view(gpu));
        })
        .test("native: the checking launch refuses bad inputs", |_| {
            let options = Options::from_env().expect("the backend was opened with them");
            passes(checked(&options.check(true)));
        })
}
