//! How the CPU is timed: cold caches, and a pure read of as many bytes by the same threads in the same minutes.
//!
//! `attn bench --backend cpu` and `cargo bench -p attn-bench --bench cpu` use it.

use std::{hint::black_box, time::Instant};

use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Error, KvCache, KvSource, Plan,
    arithmetic::TILE,
};
pub use attn_cpu::MOST_THREADS;
use attn_cpu::{CpuBackend, Options};
use rayon::prelude::*;

use crate::{CacheLayout, ContiguousCache, Measured, Operation, Timer, Timing, Workload, noise};

/// A workload with a filled cache, ready to be attended to on a backend in host memory.
pub struct Prepared {
    plan: Plan,
    operation: Operation,
    kv: Kv,
    /// One token of every sequence, to append.
    token: [Vec<f32>; 2],
    appends: Vec<Append>,
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// What is attended to.
enum Kv {
    Pages(Box<KvCache>),
    Contiguous(Box<ContiguousCache>),
}

/// Steps of an append for which a cache has room.
const APPENDS: usize = 128;

/// A cache of noise as it is before the work; the pages of a sequence are scattered over the pool.
fn filled(backend: &dyn DecodeAttention, workload: &Workload) -> Result<KvCache, Error> {
    let problem = &workload.problem;
    let (before, room) = match workload.operation {
        Operation::Decode => (0, 0),
        _ => (1, APPENDS),
    };
    let mut config = CacheConfig::builder(workload.format, problem.heads())
        .unit_tensor_scales()
        .centres(workload.centres)
        .lens(problem.kv_lens.iter().map(|len| len + room))
        .page_size(workload.page_size)
        .max_q_len(problem.max_q_len().max(64))
        .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(1.0 / 64.0);
    }
    let mut cache = backend.create_cache(&config)?;
    // Whole pages of one noise, shifted from page to page: making fresh noise would take longer than everything else.
    // The query tokens come last, in one append.
    let tokens = problem.max_q_len().max(4 * TILE) + 61;
    let [in_k, in_v] = workload.appended_elements();
    let (k, v) = (noise(1, tokens * in_k), noise(2, tokens * in_v));
    for (b, &len) in problem.kv_lens.iter().enumerate() {
        let len = len - before;
        let prefix = match workload.operation {
            Operation::Decode => len.saturating_sub(problem.q_lens[b]),
            _ => len,
        };
        let mut add = |page: usize, tokens: usize| {
            let from = (page * 7 + b * 3) % 61;
            let of = |x: &[f32], row: usize| x[from * row..(from + tokens) * row].to_vec();
            cache.append(b, &of(&k, in_k), &of(&v, in_v))
        };
        for (page, t) in (0..prefix).step_by(4 * TILE).enumerate() {
            add(page, (prefix - t).min(4 * TILE))?;
        }
        if prefix < len {
            add(prefix / (4 * TILE), len - prefix)?;
        }
    }
    Ok(cache)
}

impl Prepared {
    /// Fills a cache with noise.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn new(backend: &dyn DecodeAttention, workload: &Workload) -> Result<Self, Error> {
        let problem = &workload.problem;
        let [in_k, in_v] = workload.appended_elements();
        let q = noise(3, problem.q_elements());
        Ok(Prepared {
            plan: backend.plan(problem, workload.format)?,
            operation: workload.operation,
            kv: match workload.cache {
                CacheLayout::Pages => Kv::Pages(Box::new(filled(backend, workload)?)),
                _ => Kv::Contiguous(Box::new(ContiguousCache::new(workload))),
            },
            token: [(4, in_k), (5, in_v)].map(|(seed, row)| noise(seed, problem.batch() * row)),
            appends: (0..problem.batch())
                .map(|sequence| Append {
                    sequence,
                    tokens: 1,
                })
                .collect(),
            out: vec![0.0; problem.out_elements()],
            lse: vec![0.0; problem.rows()],
            q,
        })
    }

    /// The workload's work, once.
    ///
    /// # Errors
    /// What the backend refuses; [`Error::CacheFull`] after too many appends.
    pub fn step(&mut self, backend: &dyn DecodeAttention) -> Result<(), Error> {
        if let (Operation::Append | Operation::AppendDecode, Kv::Pages(cache)) =
            (self.operation, &mut self.kv)
        {
            cache.append_batch(&self.appends, &self.token[0], &self.token[1])?;
            if self.operation == Operation::Append {
                return Ok(());
            }
            let mut problem = self.plan.problem().clone();
            problem.kv_lens.clone_from(&cache.table().lens);
            self.plan = backend.plan(&problem, self.plan.format())?;
        }
        let view;
        let source = match &self.kv {
            Kv::Pages(cache) => KvSource::Cache(cache),
            Kv::Contiguous(rows) => {
                view = rows.view()?;
                KvSource::View(&view)
            }
        };
        let (q, out, lse) = (black_box(&self.q), &mut self.out, &mut self.lse);
        backend.decode(&mut DecodeStep::new(&self.plan, q, source, out)?.with_lse(lse)?)?;
        black_box(&self.out);
        Ok(())
    }
}

type Line = [u64; 8];
const LINE_BYTES: usize = size_of::<Line>();

/// Memory to read: once to measure how fast it can be, and once more to push other data out of the caches.
pub struct Ceiling {
    lines: Vec<Line>,
}

/// What line `i` holds: numbers whose exclusive or over a range shows whether all of it was read.
fn line(i: usize) -> Line {
    [(i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15); 8]
}

/// More than the last-level cache of the machines at hand, twice over.
const EVICT: usize = 192 << 20;

impl Ceiling {
    /// Memory for reads of up to `bytes`.
    pub fn new(bytes: usize) -> Self {
        Ceiling {
            lines: (0..(bytes + EVICT).div_ceil(LINE_BYTES))
                .map(line)
                .collect(),
        }
    }

    /// Pushes everything else out of the caches of this pool's threads; the exclusive or of all lines read.
    pub fn evict(&self) -> [u64; 8] {
        read(&self.lines[..EVICT / LINE_BYTES], 4)
    }

    /// Reads `bytes` by as many streams in each thread of the pool; the exclusive or of all lines read.
    pub fn read(&self, bytes: usize, streams: usize) -> [u64; 8] {
        read(
            &self.lines[EVICT / LINE_BYTES..][..bytes / LINE_BYTES],
            streams,
        )
    }

    /// The best of 1, 2, 4 and 8 streams.
    pub const STREAMS: [usize; 4] = [1, 2, 4, 8];
}

fn xor(mut a: Line, b: &Line) -> Line {
    for (a, b) in a.iter_mut().zip(b) {
        *a ^= b;
    }
    a
}

fn read(lines: &[Line], streams: usize) -> Line {
    let threads = rayon::current_num_threads();
    let pieces = lines.par_chunks(lines.len().div_ceil(4 * threads).max(1));
    let sums = pieces.with_max_len(1).map(|piece| match streams {
        1 => read_streams::<1>(piece),
        2 => read_streams::<2>(piece),
        4 => read_streams::<4>(piece),
        _ => read_streams::<8>(piece),
    });
    sums.reduce(Line::default, |a, b| xor(a, &b))
}

fn read_streams<const N: usize>(lines: &[Line]) -> Line {
    let each = lines.len() / N;
    let streams: [&[Line]; N] = std::array::from_fn(|i| &lines[i * each..][..each]);
    let mut sums = [Line::default(); 2];
    for i in (0..each).step_by(4) {
        for stream in streams {
            for (n, line) in stream[i..each.min(i + 4)].iter().enumerate() {
                sums[n % 2] = xor(sums[n % 2], line);
            }
        }
    }
    let rest = &lines[N * each..];
    black_box(rest.iter().fold(xor(sums[0], &sums[1]), xor))
}

/// Memory beside the work that is timed.
trait Memory {
    /// Pushes everything else out of the caches; what was read for it.
    fn evict(&self) -> Line;

    /// Reads so many bytes by so many streams; what was read.
    fn read(&self, bytes: usize, streams: usize) -> Line;
}

impl Memory for Ceiling {
    fn evict(&self) -> Line {
        Ceiling::evict(self)
    }

    fn read(&self, bytes: usize, streams: usize) -> Line {
        Ceiling::read(self, bytes, streams)
    }
}

/// Times a workload on the caller's rayon pool: `runs` cold steps, between them as many cold reads per number of streams.
///
/// # Errors
/// What the backend refuses.
pub fn measure(
    backend: &dyn DecodeAttention,
    workload: &Workload,
    runs: usize,
) -> Result<Measured, Error> {
    measure_beside(&Ceiling::new(workload.bytes()), backend, workload, runs)
}

fn measure_beside(
    memory: &dyn Memory,
    backend: &dyn DecodeAttention,
    workload: &Workload,
    runs: usize,
) -> Result<Measured, Error> {
    workload.check_for_caches()?;
    let mut prepared = Prepared::new(backend, workload)?;
    let runs = match workload.operation {
        Operation::Decode => runs,
        _ => runs.min(APPENDS - 1),
    };
    let time = |f: &mut dyn FnMut() -> Result<(), Error>| -> Result<f64, Error> {
        black_box(memory.evict());
        let start = Instant::now();
        f()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    prepared.step(backend)?;
    let mut steps = Vec::new();
    let mut reads = Ceiling::STREAMS.map(|_| Vec::new());
    for _ in 0..runs.max(1) {
        steps.push(time(&mut || prepared.step(backend))?);
        for (reads, streams) in reads.iter_mut().zip(Ceiling::STREAMS) {
            reads.push(time(&mut || {
                black_box(memory.read(workload.bytes(), streams));
                Ok(())
            })?);
        }
    }
    let best = reads
        .map(Timing::of)
        .into_iter()
        .min_by(|a, b| a.min.total_cmp(&b.min));
    Ok(Measured {
        step: Timing::of(steps),
        ceiling: best.expect("several ways to read"),
    })
}

/// Refuses a number of threads that no machine should start.
///
/// # Errors
/// [`Error::Parameter`] if it is 0 or above [`MOST_THREADS`].
pub fn check_threads(threads: usize) -> Result<(), Error> {
    if (1..=MOST_THREADS).contains(&threads) {
        return Ok(());
    }
    Err(Error::parameter(
        "threads",
        threads,
        "1 to 1024; one per core is the fastest",
    ))
}

/// The CPU on a pool of so many threads, in which steps and reads run.
pub struct CpuTimer {
    backend: CpuBackend,
    /// Rounds of [`CpuBackend::multiply`] that take about [`PEAK_US`], and the best rate so far.
    rounds: usize,
    peak: f64,
}

/// Microseconds of a piece of the peak's work: longer than threads take to start, short enough to lie between disturbances.
const PEAK_US: f64 = 2000.0;

/// Pieces before each workload and behind it.
const PEAK_PIECES: usize = 10;

impl CpuTimer {
    /// With the options that the environment sets, and so many threads.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a number of threads that [`check_threads`] refuses; [`Error::Unsupported`] for an option that the machine
    /// lacks, or if the system does not start as many threads.
    pub fn open(threads: usize) -> Result<Self, Error> {
        check_threads(threads)?;
        let options = Options::from_env()?.threads(threads);
        let backend = CpuBackend::with_options(&options)?;
        let timer = CpuTimer {
            backend,
            rounds: 100,
            peak: 0.0,
        };
        let us = timer.multiply().1;
        Ok(CpuTimer {
            rounds: (100.0 * PEAK_US / us).clamp(1.0, 1e6) as usize,
            ..timer
        })
    }

    /// A piece of the peak's work on all threads at once: operations, and microseconds.
    fn multiply(&self) -> (f64, f64) {
        let (backend, rounds) = (&self.backend, self.rounds);
        let start = Instant::now();
        let products = backend.install(|| rayon::broadcast(|_| backend.multiply(rounds)));
        let us = start.elapsed().as_secs_f64() * 1e6;
        (2.0 * products.iter().sum::<usize>() as f64, us)
    }

    fn measure_peak(&mut self) {
        for _ in 0..PEAK_PIECES {
            let (operations, us) = self.multiply();
            self.peak = self.peak.max(operations / us * 1e6);
        }
    }
}

impl Timer for CpuTimer {
    fn device(&self) -> String {
        let threads = self.backend.threads();
        let s = if threads == 1 { "" } else { "s" };
        format!("cpu: {}, {threads} thread{s}", self.backend.isa())
    }

    fn runs(&self) -> usize {
        30
    }

    fn by_median(&self) -> bool {
        false
    }

    fn most_bytes(&self) -> usize {
        300_000_000
    }

    fn peak(&self) -> Option<f64> {
        Some(self.peak)
    }

    fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
        self.measure_peak();
        let measured = self
            .backend
            .install(|| measure(&self.backend, workload, runs));
        self.measure_peak();
        measured
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        thread::sleep,
        time::Duration,
    };

    use attn_conformance::fake::FakeBackend;
    use attn_core::{Heads, KvFormat, Problem};

    use super::*;
    use crate::workloads;

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Event {
        Evict,
        Decode,
        Read(usize, usize),
    }

    /// What was asked of a backend and of memory, in order.
    #[derive(Clone, Default)]
    struct Events(Arc<Mutex<Vec<Event>>>);

    impl Events {
        fn note(&self, event: Event) {
            self.0.lock().unwrap().push(event);
        }
    }

    /// Memory that notes what is asked of it. Reads by four streams are the fastest.
    impl Memory for Events {
        fn evict(&self) -> Line {
            self.note(Event::Evict);
            Line::default()
        }

        fn read(&self, bytes: usize, streams: usize) -> Line {
            self.note(Event::Read(bytes, streams));
            sleep(Duration::from_millis(if streams == 4 { 30 } else { 90 }));
            Line::default()
        }
    }

    fn workload(name: &str) -> Workload {
        let found = workloads().into_iter().find(|s| s.to_string() == name);
        found.expect("a preset")
    }

    #[test]
    fn every_timed_step_and_every_read_of_the_shapes_bytes_follows_an_eviction() {
        let events = Events::default();
        let steps = events.clone();
        let backend = FakeBackend::of(CpuBackend::open().unwrap());
        let backend = backend.with_execute(move |cpu, step| {
            steps.note(Event::Decode);
            cpu.execute(step)
        });
        let workload = workload("context/8-2-ctx1024/int8");
        let measured = measure_beside(&events, &backend, &workload, 2).unwrap();
        // 1024 tokens on 2 KV heads, of 128 codes and an f16 scale for K and for V.
        let bytes = 1024 * 2 * 2 * (128 + 2);
        let mut round = vec![Event::Evict, Event::Decode];
        for streams in [1, 2, 4, 8] {
            round.extend([Event::Evict, Event::Read(bytes, streams)]);
        }
        let want = [vec![Event::Decode], round.clone(), round].concat();
        assert_eq!(*events.0.lock().unwrap(), want);
        // The step took less than a read, and the read is the fastest of the four.
        let (step, read) = (measured.step.min, measured.ceiling.min);
        assert!(step < 30e3 && (30e3..90e3).contains(&read), "{measured:?}");
        assert!(measured.step.min <= measured.step.median);
    }

    #[test]
    fn evictions_and_reads_touch_every_line_of_their_own_memory() {
        let bytes = (1 << 20) + 3 * LINE_BYTES;
        let memory: &dyn Memory = &Ceiling::new(bytes);
        let all = |lines: std::ops::Range<usize>| {
            let sum = lines.map(line).fold(Line::default(), |a, b| xor(a, &b));
            assert_ne!(sum, Line::default(), "nothing read must not look like all");
            sum
        };
        let evicted = EVICT / LINE_BYTES;
        const { assert!(EVICT >= 128 << 20, "fewer bytes leave caches as they are") };
        assert_eq!(memory.evict(), all(0..evicted));
        for streams in Ceiling::STREAMS {
            let lines = evicted..evicted + bytes / LINE_BYTES;
            assert_eq!(memory.read(bytes, streams), all(lines), "{streams}");
        }
    }

    #[test]
    fn prompts_are_attended_in_formats_with_a_window() {
        let cpu = CpuBackend::open().unwrap();
        let heads = Heads::new(2, 1, 64);
        // A prefix of two appends, then more query tokens than a config has by default.
        let problem = Problem::new(heads, [500]).q_len(200);
        let workload = Workload::custom(problem, KvFormat::INT4, 64).unwrap();
        let mut prepared = Prepared::new(&cpu, &workload).unwrap();
        prepared.step(&cpu).unwrap();
        assert!(prepared.out.iter().all(|x| x.is_finite()));
        assert!(prepared.lse.iter().all(|x| *x != 0.0));
    }

    #[test]
    fn the_peak_is_the_best_rate_of_the_products_alone() {
        let mut timer = CpuTimer::open(1).unwrap();
        assert_eq!(timer.peak(), Some(0.0));
        let measured = timer.measure(&workload("context/8-2-ctx1024/int8"), 1);
        let peak = timer.peak().unwrap();
        let flops = workload("context/8-2-ctx1024/int8").decode_flops();
        // A step multiplies and does more beside it.
        assert!(peak > flops / measured.unwrap().step.median * 1e6, "{peak}");
    }

    #[test]
    fn numbers_of_threads_beyond_any_machine_are_refused() {
        for threads in [0, MOST_THREADS + 1, usize::MAX] {
            let error = CpuTimer::open(threads).err().expect("refused").to_string();
            assert!(error.contains("1 to 1024"), "{error}");
        }
        let three = CpuTimer::open(3).unwrap().backend;
        assert_eq!(three.install(rayon::current_num_threads), 3);
    }
}
