//! How the GPU is timed: captured graphs of launches that rotate over caches larger than L2, beside a plain read of as many bytes.
//!
//! `attn bench --backend cuda` and `cargo bench -p attn-bench --bench cuda` use [`CudaTimer`]. The bits are the conformance suite's business: a pool holds one noise over and over, in pages of their own.

mod buffers;
mod contiguous;
mod pages;
mod transfer;

use std::time::{Duration, Instant};

use attn_core::{DecodeAttention, Error, Problem, centres::CENTRES};
use attn_cuda::{
    CudaBackend,
    internals::{ReadArgs, check_native, context, failed, prepare_read, product},
    native::{
        AppendArgs, CentresArgs, DecodeArgs, DeviceAddress, DeviceKv, Dtype, KvLayout, NativePlan,
        Prepared as PreparedOp,
    },
};
use cudarc::driver::{CudaGraph, CudaSlice, DriverError, sys};

pub use attn_cuda::{ExplainedKernel, Explanation};
pub use buffers::Buffers;
pub use transfer::Transfer;

use crate::{CacheLayout, Measured, Operation, Timer, Timing, Workload, noise};

/// What launches rotate over, at least: several times any L2.
const ROTATED: usize = 400 << 20;
/// No more copies of a small cache than this: a launch each.
const MOST_COPIES: usize = 200;
/// Replays of a graph that takes long end after so much time, but for the first few.
const MOST_TIME: Duration = Duration::from_secs(1);
const FEWEST_RUNS: usize = 3;
/// Copies for an append alone, which touches a small part of each.
const APPEND_COPIES: usize = 16;
/// Graph replays before the timed ones.
const WARM_UPS: usize = 3;
/// 16-bit numbers of noise for K, and as many for V.
const NOISE: usize = 4 << 20;
/// KV heads that have static scales.
const SCALES: usize = 256;

/// One GPU, and the memory that its timings share.
pub struct CudaTimer {
    gpu: CudaBackend,
    buffers: Buffers,
    read: PreparedOp<ReadArgs>,
    sink: CudaSlice<u8>,
    /// K's bf16 noise, then V's.
    noise: CudaSlice<u16>,
    /// Static scales, for formats that have them.
    scales: CudaSlice<f32>,
    arena: Option<CudaSlice<u8>>,
}

/// Everything that the launches of one workload read and write, beside the arena.
struct Step {
    plan: NativePlan,
    /// Those behind sequences, and by slots.
    append: Option<pages::Appends>,
    source: Source,
    rotation: Rotation,
    /// bf16, as engines have them.
    q: CudaSlice<u16>,
    out: CudaSlice<u16>,
    lse: CudaSlice<f32>,
    kv_lens: CudaSlice<i32>,
    /// The list of query blocks as numbers; `None` where the plan has none.
    query_blocks: Option<CudaSlice<i32>>,
    workspace: CudaSlice<u8>,
    scales: [DeviceAddress; 2],
    centres: Option<Centres>,
}

/// Centres of K of noise, for each sequence.
struct Centres {
    /// bf16 `[batch][num_kv_heads][2][head_dim]`.
    all: CudaSlice<u16>,
    /// Elements of a sequence's.
    len: usize,
}

impl Centres {
    fn new(buffers: &Buffers, problem: &Problem) -> Result<Self, Error> {
        let batch = problem.batch();
        let elements = [batch, problem.num_kv_heads, CENTRES, problem.head_dim.k];
        let elements = product("elements of centres of K", &elements)?;
        Ok(Centres {
            all: buffers.upload(&bf16(&noise(8, elements)))?,
            len: elements / batch.max(1),
        })
    }

    fn args(&self, buffers: &Buffers) -> CentresArgs {
        CentresArgs::side_by_side(buffers.address(&self.all), self.len, DeviceAddress::NULL)
    }
}

/// Where K and V of one copy lie.
enum Source {
    Pages(pages::Pages),
    Contiguous(contiguous::Contiguous),
}

/// Copies of a cache in the arena.
#[derive(Clone, Copy)]
struct Rotation {
    base: DeviceAddress,
    copy_bytes: usize,
    copies: usize,
}

impl Rotation {
    fn at(&self, i: usize) -> DeviceAddress {
        self.base.offset(i % self.copies * self.copy_bytes)
    }

    /// Launches of one graph.
    fn launches(&self) -> usize {
        self.copies.max(4)
    }
}

/// A workload whose work and whose read are captured; borrows the timer's memory.
pub struct Prepared<'a> {
    timer: &'a CudaTimer,
    work: CudaGraph,
    read: CudaGraph,
    launches: usize,
    /// Outlives the graphs' launches.
    _step: Step,
}

/// How a workload's K and V lie, as the native entry has it.
pub fn layout(workload: &Workload) -> KvLayout {
    match workload.cache {
        CacheLayout::Pages => KvLayout::Pages(workload.page_size),
        CacheLayout::Bnsh | CacheLayout::Bsnh => KvLayout::Rows,
        CacheLayout::PagedBsnh => KvLayout::PagedRows(workload.page_size),
    }
}

/// The choice of the workload's kernel on an H200.
///
/// # Errors
/// Those of [`CudaTimer::prepare`], but for the device's.
pub fn explain_on_h200(workload: &Workload) -> Result<Explanation, Error> {
    Explanation::on_h200(&workload.problem, workload.format, layout(workload))
}

/// Cut to bf16.
fn bf16(numbers: &[f32]) -> Vec<u16> {
    numbers.iter().map(|x| (x.to_bits() >> 16) as u16).collect()
}

fn driver<T>(result: Result<T, DriverError>) -> Result<T, Error> {
    result.map_err(failed("timing"))
}

impl CudaTimer {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with what is missing; [`Error::Device`].
    pub fn open() -> Result<Self, Error> {
        let gpu = CudaBackend::open()?;
        let buffers = Buffers::new(context(&gpu))?;
        let noise = bf16(&noise(3, 2 * NOISE));
        Ok(CudaTimer {
            read: prepare_read(&gpu)?,
            sink: buffers.bytes(16)?,
            noise: buffers.upload(&noise)?,
            scales: buffers.upload(&[0.02f32; SCALES])?,
            arena: None,
            buffers,
            gpu,
        })
    }

    /// The choice of the workload's kernel.
    ///
    /// # Errors
    /// Those of [`CudaTimer::prepare`], but for the device's.
    pub fn explain(&self, workload: &Workload) -> Result<Explanation, Error> {
        let Workload {
            problem, format, ..
        } = workload;
        self.gpu.explain(problem, *format, layout(workload))
    }

    /// Whether there is a kernel for the workload; loads none.
    ///
    /// # Errors
    /// Those of [`CudaTimer::prepare`], but for the device's.
    pub fn supports(&self, workload: &Workload) -> Result<(), Error> {
        let problem = &workload.problem;
        let [in_k, in_v] = problem.kv_elements();
        let row = in_k.max(in_v);
        let appended = match workload.operation {
            Operation::Decode => workload.page_size,
            _ => problem.batch().max(workload.page_size),
        };
        if row.saturating_mul(appended) > NOISE || problem.num_kv_heads > SCALES {
            return Err(Error::parameter(
                "workload to time",
                format_args!("{workload}"),
                "up to 256 KV heads and 4 Mi elements of K that an append takes at once",
            ));
        }
        if workload.operation != Operation::Decode && workload.cache != CacheLayout::Pages {
            return Err(Error::parameter(
                "place of an append",
                format_args!("a contiguous cache"),
                "pages",
            ));
        }
        if workload.operation != Operation::Decode && problem.kv_lens.contains(&0) {
            return Err(Error::parameter(
                "kv_len of an append",
                format_args!("0"),
                "1 and more: lengths count the new token",
            ));
        }
        check_native(&self.gpu, problem, workload.format, layout(workload))
    }

    /// `bytes` of the arena, which grows; contents are left over from before.
    fn reserve(&mut self, bytes: usize) -> Result<DeviceAddress, Error> {
        if self.arena.as_ref().is_none_or(|arena| arena.len() < bytes) {
            self.arena = None;
            self.arena = Some(self.buffers.bytes(bytes)?);
        }
        let arena = self.arena.as_ref().map(|a| self.buffers.address(a));
        Ok(arena.unwrap_or_default())
    }

    /// Makes as many copies of a cache of `cache_bytes` as the workload's work has to rotate over.
    fn rotate(&mut self, workload: &Workload, cache_bytes: usize) -> Result<Rotation, Error> {
        let copy_bytes = cache_bytes.max(workload.bytes()).next_multiple_of(256);
        let copies = match workload.operation {
            operation if operation.is_append_alone() => APPEND_COPIES,
            _ => workload.copies(ROTATED, MOST_COPIES),
        };
        Ok(Rotation {
            base: self.reserve(product("bytes to rotate over", &[copies, copy_bytes])?)?,
            copy_bytes,
            copies,
        })
    }

    /// Copies the first `filled` bytes of the arena's `bytes` at `start` over the rest of them.
    fn repeat(&mut self, start: usize, mut filled: usize, bytes: usize) -> Result<(), Error> {
        let Some(arena) = &mut self.arena else {
            return Ok(());
        };
        while filled < bytes {
            let more = filled.min(bytes - filled);
            let (from, mut to) = arena.split_at_mut(start + filled);
            let from = from.slice(start..start + more);
            driver(
                self.buffers
                    .stream
                    .memcpy_dtod(&from, &mut to.slice_mut(..more)),
            )?;
            filled += more;
        }
        Ok(())
    }

    /// Writes `template` over and over into the arena's `bytes` at `start`.
    fn fill(&mut self, template: &[u8], start: usize, bytes: usize) -> Result<(), Error> {
        let first = template.len().min(bytes);
        if let Some(arena) = &mut self.arena {
            let mut to = arena.slice_mut(start..start + first);
            let wait = self.buffers.wait()?;
            driver(self.buffers.stream.memcpy_htod(&template[..first], &mut to))?;
            driver(wait.finish())?;
        }
        self.repeat(start, first, bytes)
    }

    fn step(&mut self, workload: &Workload) -> Result<Step, Error> {
        self.supports(workload)?;
        let problem = &workload.problem;
        let plan = self.gpu.prepare(
            &workload.planned_problem(),
            workload.format,
            layout(workload),
        )?;
        let scale = |has: bool| {
            if has {
                self.buffers.address(&self.scales)
            } else {
                DeviceAddress::NULL
            }
        };
        let scales = [workload.format.k, workload.format.v].map(|s| scale(s.has_tensor_scale()));
        let (append, source, rotation) = if workload.cache == CacheLayout::Pages {
            let (append, pages, rotation) = pages::fill(self, workload, scales)?;
            (Some(append), Source::Pages(pages), rotation)
        } else {
            let (rows, rotation) = contiguous::fill(self, workload)?;
            (None, Source::Contiguous(rows), rotation)
        };
        let buffers = &self.buffers;
        let lens: Vec<i32> = problem.kv_lens.iter().map(|&len| len as i32).collect();
        Ok(Step {
            append,
            source,
            rotation,
            q: buffers.upload(&bf16(&noise(5, problem.q_elements())))?,
            out: buffers.upload(&vec![0u16; problem.out_elements()])?,
            lse: buffers.floats(problem.rows())?,
            kv_lens: buffers.upload(&lens)?,
            query_blocks: query_blocks(buffers, &plan)?,
            workspace: buffers.bytes(plan.workspace_bytes())?,
            plan,
            scales,
            centres: match workload.centres {
                true => Some(Centres::new(buffers, problem)?),
                false => None,
            },
        })
    }

    fn decode_args(&self, step: &Step, copy: DeviceAddress) -> DecodeArgs {
        let at = &self.buffers;
        let (lens, scales) = (at.address(&step.kv_lens), step.scales);
        DecodeArgs {
            q: at.address(&step.q),
            out: at.address(&step.out),
            lse: at.address(&step.lse),
            dtype: Dtype::Bf16,
            kv: match &step.source {
                Source::Pages(pages) => DeviceKv::Paged(pages.sequences(at, copy, lens, scales)),
                Source::Contiguous(rows) => rows.kv(at, copy, lens, scales),
            },
            query_blocks: step
                .query_blocks
                .as_ref()
                .map_or(DeviceAddress::NULL, |blocks| at.address(blocks)),
            alibi_slopes: DeviceAddress::NULL,
            sinks: DeviceAddress::NULL,
            workspace: at.address(&step.workspace),
            scratch: DeviceAddress::NULL,
        }
    }

    /// Enqueues the work of one launch, or of an append and a decode.
    fn enqueue(&self, work: Operation, step: &Step, copy: DeviceAddress) -> Result<(), Error> {
        let stream = self.buffers.raw();
        let decode = self.decode_args(step, copy);
        // `supports` has refused appends to rows.
        let (Some(append), Source::Pages(pages), DeviceKv::Paged(sequences), true) = (
            &step.append,
            &step.source,
            decode.kv,
            work != Operation::Decode,
        ) else {
            // SAFETY: `step`'s buffers and the arena were sized for the plan's problem and live until the graph is dropped; the
            // page table names pages of the copy alone; the workspace was zeroed by its allocation; every sequence has its own centres; one stream.
            return unsafe {
                match &step.centres {
                    None => self.gpu.decode_on(&step.plan, stream, &decode),
                    Some(centres) => {
                        let centres = centres.args(&self.buffers);
                        self.gpu
                            .decode_with_centres_on(&step.plan, stream, &decode, &centres)
                    }
                }
            };
        };
        let args = AppendArgs {
            batch: step.kv_lens.len(),
            ..pages.append_args(self, sequences, 1)
        };
        if work.is_by_slots() {
            let args = pages.slot_append_args(self, copy, step.scales);
            // SAFETY: as for decode; the slots are those of each sequence's last token, in pages of its own.
            return unsafe { self.gpu.enqueue(&append.by_slots, stream, &args) };
        }
        if work == Operation::Append {
            // SAFETY: as for decode; the lengths count the new token, whose page is in the table; every sequence owns its pages.
            return unsafe { self.gpu.enqueue(&append.behind, stream, &args) };
        }
        // SAFETY: as for decode and for append; nothing is enqueued between them.
        unsafe {
            self.gpu
                .append_decode_on(&append.behind, &step.plan, stream, &args, &decode)
        }
    }

    fn capture(&self, enqueue: &dyn Fn() -> Result<(), Error>) -> Result<CudaGraph, Error> {
        let stream = &self.buffers.stream;
        driver(stream.synchronize())?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        driver(stream.begin_capture(mode))?;
        let enqueued = enqueue();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = driver(stream.end_capture(flags))?;
        enqueued?;
        graph.ok_or_else(|| Error::Device {
            backend: "cuda",
            doing: "timing",
            source: "the capture gave no graph".into(),
        })
    }

    /// Microseconds per launch of each of `runs` replays of a graph of so many launches; of fewer where they take long.
    fn replay(&self, graph: &CudaGraph, launches: usize, runs: usize) -> Result<Vec<f64>, Error> {
        let stream = &self.buffers.stream;
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        (0..WARM_UPS).try_for_each(|_| driver(graph.launch()))?;
        let mut times = Vec::new();
        let begun = Instant::now();
        for run in 0..runs.max(1) {
            if run >= FEWEST_RUNS && begun.elapsed() > MOST_TIME {
                break;
            }
            let start = driver(stream.record_event(flags))?;
            driver(graph.launch())?;
            let end = driver(stream.record_event(flags))?;
            driver(stream.synchronize())?;
            let ms = f64::from(driver(start.elapsed_ms(&end))?);
            times.push(ms * 1000.0 / launches as f64);
        }
        Ok(times)
    }

    /// Fills the caches of a workload, and captures its work and its read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a kernel; [`Error::Device`], also where memory is short.
    pub fn prepare(&mut self, workload: &Workload) -> Result<Prepared<'_>, Error> {
        let step = self.step(workload)?;
        let timer = &*self;
        let rotation = step.rotation;
        let launches = rotation.launches();
        // The first launch over centres loads its kernel, which no capture allows.
        if step.centres.is_some() {
            timer.enqueue(workload.operation, &step, rotation.at(0))?;
        }
        let work = timer.capture(&|| {
            (0..launches).try_for_each(|i| timer.enqueue(workload.operation, &step, rotation.at(i)))
        })?;
        let bytes = workload.bytes() / 16 * 16;
        let read = |from| ReadArgs {
            from,
            bytes,
            sink: timer.buffers.address(&timer.sink),
        };
        let read = timer.capture(&|| {
            (0..launches).try_for_each(|i| {
                let (stream, args) = (timer.buffers.raw(), read(rotation.at(i)));
                // SAFETY: a copy holds `Workload::bytes` bytes and more; the sink holds 16.
                unsafe { timer.gpu.enqueue(&timer.read, stream, &args) }
            })
        })?;
        Ok(Prepared {
            timer,
            work,
            read,
            launches,
            _step: step,
        })
    }
}

impl Prepared<'_> {
    /// Microseconds per launch of each of `runs` replays.
    fn replay(&self, graph: &CudaGraph, runs: usize) -> Result<Vec<f64>, Error> {
        self.timer.replay(graph, self.launches, runs)
    }

    /// Times work and read.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn measure(&self, runs: usize) -> Result<Measured, Error> {
        Ok(Measured {
            step: Timing::of(self.replay(&self.work, runs)?),
            ceiling: Timing::of(self.replay(&self.read, runs)?),
        })
    }

    /// What `iters` launches of the work take, for a bench that decides their number.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn work_time(&self, iters: u64) -> Result<Duration, Error> {
        self.time(&self.work, iters)
    }

    /// The time of so many plain reads.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn read_time(&self, iters: u64) -> Result<Duration, Error> {
        self.time(&self.read, iters)
    }

    fn time(&self, graph: &CudaGraph, iters: u64) -> Result<Duration, Error> {
        let us = self.replay(graph, iters.div_ceil(self.launches as u64) as usize)?;
        let mean = us.iter().sum::<f64>() / us.len() as f64;
        Ok(Duration::from_secs_f64(mean * iters as f64 / 1e6))
    }
}

impl Timer for CudaTimer {
    fn device(&self) -> String {
        let info = self.gpu.device();
        format!("cuda: {} ({})", info.name, info.detail)
    }

    fn runs(&self) -> usize {
        15
    }

    fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
        self.prepare(workload)?.measure(runs)
    }
}

/// The plan's query blocks on the device.
fn query_blocks(buffers: &Buffers, plan: &NativePlan) -> Result<Option<CudaSlice<i32>>, Error> {
    let blocks = plan.query_blocks().iter();
    let numbers: Vec<i32> = blocks
        .flat_map(|block| [block.sequence, block.first, block.tokens, block.behind])
        .collect();
    (!numbers.is_empty())
        .then(|| buffers.upload(&numbers))
        .transpose()
}
