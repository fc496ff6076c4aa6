//! How the CPU is timed: cold caches, and a pure read of as many bytes by the same threads in the same minutes.
//!
//! The shapes are [`attn_core::bench`]'s; `attn bench --backend cpu` and `cargo bench -p attn-cpu` are made of this.

use std::{hint::black_box, time::Instant};

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, KvCache, KvSource, Plan,
    arithmetic::TILE,
    bench::{Measured, Place, Rows, Shape, Timer, Timing, Work, noise},
};
use rayon::prelude::*;

use crate::CpuBackend;

/// A shape with a filled cache, ready to be attended to on a backend in host memory.
pub struct Prepared {
    plan: Plan,
    work: Work,
    kv: Kv,
    /// One token of every sequence, to append.
    token: [Vec<f32>; 2],
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// What is attended to.
enum Kv {
    Pages(KvCache),
    Rows(Rows),
}

/// Steps of an append for which a cache has room.
const APPENDS: usize = 128;

/// A cache of noise as it is before the work; the pages of a sequence are scattered over the pool.
fn filled(backend: &dyn DecodeAttention, shape: &Shape) -> Result<KvCache, Error> {
    let problem = &shape.problem;
    let (heads, dim) = (problem.num_kv_heads, problem.head_dim);
    let (before, room) = match shape.work {
        Work::Decode => (0, 0),
        _ => (1, APPENDS),
    };
    let mut config = CacheConfig::new(shape.format, heads, dim, problem.batch(), 0);
    let pages = problem
        .kv_lens
        .iter()
        .map(|&len| config.pages_for(len + room));
    config.num_pages = pages.sum();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(1.0 / 64.0);
    }
    let mut cache = backend.create_cache(&config)?;
    // Whole pages of one noise, shifted from page to page: making fresh noise would take longer than everything else.
    let count = (4 * TILE + 61) * heads * dim;
    let (k, v) = (noise(1, count), noise(2, count));
    for (b, &len) in problem.kv_lens.iter().enumerate() {
        let len = len - before;
        for (page, t) in (0..len).step_by(4 * TILE).enumerate() {
            let from = (page * 7 + b * 3) % 61 * heads * dim;
            let n = (len - t).min(4 * TILE) * heads * dim;
            cache.append(b, &k[from..from + n], &v[from..from + n])?;
        }
    }
    Ok(cache)
}

impl Prepared {
    /// Fills a cache with noise.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn new(backend: &dyn DecodeAttention, shape: &Shape) -> Result<Self, Error> {
        let problem = &shape.problem;
        let row = problem.num_kv_heads * problem.head_dim;
        let q = noise(3, problem.rows() * problem.head_dim);
        Ok(Prepared {
            plan: backend.plan(problem, shape.format)?,
            work: shape.work,
            kv: match shape.place {
                Place::Pages => Kv::Pages(filled(backend, shape)?),
                _ => Kv::Rows(Rows::new(shape)),
            },
            token: [noise(4, row), noise(5, row)],
            out: vec![0.0; q.len()],
            lse: vec![0.0; problem.rows()],
            q,
        })
    }

    /// The shape's work, once.
    ///
    /// # Errors
    /// What the backend refuses; [`Error::CacheFull`] after too many appends.
    pub fn step(&mut self, backend: &dyn DecodeAttention) -> Result<(), Error> {
        if let (Work::Append | Work::AppendDecode, Kv::Pages(cache)) = (self.work, &mut self.kv) {
            for b in 0..self.plan.problem.batch() {
                cache.append(b, &self.token[0], &self.token[1])?;
            }
            if self.work == Work::Append {
                return Ok(());
            }
            let mut problem = self.plan.problem.clone();
            problem.kv_lens.clone_from(&cache.table().lens);
            self.plan = backend.plan(&problem, self.plan.format)?;
        }
        let view;
        let source = match &self.kv {
            Kv::Pages(cache) => KvSource::Cache(cache),
            Kv::Rows(rows) => {
                view = rows.view()?;
                KvSource::View(&view)
            }
        };
        let (q, out, lse) = (black_box(&self.q), &mut self.out, &mut self.lse);
        backend.decode(&mut DecodeStep::new(&self.plan, q, source, out, lse)?)?;
        black_box(&self.out);
        Ok(())
    }
}

type Line = [u64; 8];

/// Memory to read: once to measure how fast it can be, and once more to push other data out of the caches.
pub struct Ceiling {
    lines: Vec<Line>,
}

/// More than the last-level cache of the machines at hand, twice over.
const EVICT: usize = 192 << 20;

impl Ceiling {
    /// Memory for reads of up to `bytes`.
    pub fn new(bytes: usize) -> Self {
        Ceiling {
            lines: vec![[1; 8]; (bytes + EVICT).div_ceil(64)],
        }
    }

    /// Pushes everything else out of the caches of this pool's threads.
    pub fn evict(&self) {
        read(&self.lines[..EVICT / 64], 4);
    }

    /// Reads `bytes` by as many streams in each thread of the pool.
    pub fn read(&self, bytes: usize, streams: usize) {
        read(&self.lines[EVICT / 64..][..bytes / 64], streams);
    }

    /// The best of 1, 2, 4 and 8 streams.
    pub const STREAMS: [usize; 4] = [1, 2, 4, 8];
}

fn read(lines: &[Line], streams: usize) {
    let threads = rayon::current_num_threads();
    let pieces = lines.par_chunks(lines.len().div_ceil(4 * threads).max(1));
    pieces.with_max_len(1).for_each(|piece| match streams {
        1 => read_streams::<1>(piece),
        2 => read_streams::<2>(piece),
        4 => read_streams::<4>(piece),
        _ => read_streams::<8>(piece),
    });
}

fn read_streams<const N: usize>(lines: &[Line]) {
    let each = lines.len() / N;
    let streams: [&[Line]; N] = std::array::from_fn(|i| &lines[i * each..][..each]);
    let mut sums = [[0u64; 8]; 2];
    for i in (0..each).step_by(4) {
        for stream in streams {
            for (n, line) in stream[i..each.min(i + 4)].iter().enumerate() {
                for (sum, x) in sums[n % 2].iter_mut().zip(line) {
                    *sum ^= x;
                }
            }
        }
    }
    black_box(sums);
}

/// Times a shape on the caller's rayon pool: `runs` cold steps, between them as many cold reads per number of streams.
///
/// # Errors
/// What the backend refuses.
pub fn measure(
    backend: &dyn DecodeAttention,
    shape: &Shape,
    runs: usize,
) -> Result<Measured, Error> {
    shape.check_growing()?;
    let mut prepared = Prepared::new(backend, shape)?;
    let bytes = shape.bytes();
    let runs = match shape.work {
        Work::Decode => runs,
        _ => runs.min(APPENDS - 1),
    };
    let ceiling = Ceiling::new(bytes);
    let time = |f: &mut dyn FnMut() -> Result<(), Error>| -> Result<f64, Error> {
        ceiling.evict();
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
                ceiling.read(bytes, streams);
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

/// Runs `f` on a pool of so many threads.
///
/// # Panics
/// If the system gives no threads.
pub fn with_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads for a pool").install(f)
}

/// The CPU on a pool of so many threads.
pub struct CpuTimer {
    backend: CpuBackend,
    threads: usize,
}

impl CpuTimer {
    /// With the instruction set that [`CpuBackend::open`] chooses.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `ATTN_CPU_ISA` names one that is not here.
    pub fn open(threads: usize) -> Result<Self, Error> {
        Ok(CpuTimer {
            backend: CpuBackend::open()?,
            threads,
        })
    }
}

impl Timer for CpuTimer {
    fn device(&self) -> String {
        let s = if self.threads == 1 { "" } else { "s" };
        format!("cpu: {}, {} thread{s}", self.backend.isa(), self.threads)
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

    fn measure(&mut self, shape: &Shape, runs: usize) -> Result<Measured, Error> {
        with_threads(self.threads, || measure(&self.backend, shape, runs))
    }
}
