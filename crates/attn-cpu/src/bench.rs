//! The shapes that benches measure, by name, and how the CPU is timed: cold caches, and a pure read of as many bytes beside it.
//!
//! `cargo bench -p attn-cpu` and `attn bench` use the same names. A [`Shape`] says nothing of a backend; other backends time it
//! with their own clocks.

use std::{hint::black_box, time::Instant};

use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, Error, KvCache, KvFormat, KvSource,
    Plan, Problem, Scheme, arithmetic::TILE,
};
use rayon::prelude::*;

/// One thing to measure.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Its family.
    pub family: &'static str,
    /// Its own name, unique inside the family.
    pub name: String,
    /// What is stored.
    pub format: KvFormat,
    /// What is attended to.
    pub problem: Problem,
    /// Whether a backend without a GPU should run it by default: the others take gigabytes.
    pub fits_a_cpu: bool,
}

impl Shape {
    /// Bytes of codes and parameters that a step reads: those of whole pages of 64 tokens, once.
    pub fn bytes(&self) -> usize {
        let problem = &self.problem;
        let config = CacheConfig::new(self.format, problem.num_kv_heads, problem.head_dim, 1, TILE);
        let pages: usize = problem.kv_lens.iter().map(|len| len.div_ceil(TILE)).sum();
        pages * config.layout().page_bytes()
    }
}

fn shape(
    family: &'static str,
    name: String,
    format: KvFormat,
    [q_heads, kv_heads, head_dim]: [usize; 3],
    kv_lens: Vec<usize>,
) -> Shape {
    Shape {
        family,
        name: format!("{name}/{format}"),
        format,
        problem: Problem::new(q_heads, kv_heads, head_dim, kv_lens),
        fits_a_cpu: true,
    }
}

fn named(name: &str) -> KvFormat {
    name.parse().expect("the presets name formats that exist")
}

/// Sequences of `ctx` tokens so that `bytes` of cache are read.
fn batch_for(
    bytes: usize,
    format: KvFormat,
    kv_heads: usize,
    head_dim: usize,
    ctx: usize,
) -> usize {
    let per_page = CacheConfig::new(format, kv_heads, head_dim, 1, TILE)
        .layout()
        .page_bytes();
    (bytes / (ctx / TILE * per_page)).max(1)
}

/// Every shape, family by family.
pub fn shapes() -> Vec<Shape> {
    let (int8, int4) = (KvFormat::INT8, KvFormat::INT4);
    let bf16 = KvFormat::same(Scheme::Bf16);
    let mib = 1 << 20;
    let mut all = Vec::new();
    // One sequence with four query heads per KV head: what a CPU or a latency-bound server runs.
    for (ctx, formats) in [
        (1024, "int8,int4,bf16"),
        (
            8192,
            "int8,int4,int4-g1,int4-g4,int8-g32,int8-tensor,fp8,bf16,f16",
        ),
        (32768, "int8,int4,bf16"),
        (131_072, "int8"),
    ] {
        for format in formats.split(',').map(named) {
            all.push(shape(
                "single",
                format!("32-8-ctx{ctx}"),
                format,
                [32, 8, 128],
                vec![ctx],
            ));
        }
    }
    for format in [int8, int4] {
        all.push(shape(
            "single",
            "8-1-ctx131072".into(),
            format,
            [8, 1, 128],
            vec![131_072],
        ));
    }
    all.push(shape(
        "single",
        "9-3-d64-ctx2048".into(),
        int8,
        [9, 3, 64],
        vec![2048],
    ));
    for format in [int8, int4, bf16] {
        all.push(shape(
            "batch",
            "32-8-ctx4096-batch8".into(),
            format,
            [32, 8, 128],
            vec![4096; 8],
        ));
    }
    for ctx in [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20] {
        let mut s = shape(
            "context",
            format!("8-2-ctx{ctx}"),
            int8,
            [8, 2, 128],
            vec![ctx],
        );
        s.fits_a_cpu = ctx <= 1 << 18;
        all.push(s);
    }
    // One KV head, eight query heads: the shape of published 4-bit kernels.
    for batch in [512, 256, 128, 64, 32] {
        for format in ["int4-g1", "int4-g4", "int4", "int8", "fp8", "bf16"].map(named) {
            let lens = vec![8192; batch];
            let mut s = shape("gqa8", format!("batch{batch}"), format, [8, 1, 128], lens);
            s.fits_a_cpu = batch <= 32;
            all.push(s);
        }
    }
    for q_len in [3, 1] {
        for log in 10..18 {
            let ctx = 1 << log;
            let batch = batch_for(64 * mib, int8, 1, 128, ctx).next_power_of_two();
            let (family, name) = (
                if q_len == 3 { "rows48" } else { "rows16" },
                format!("ctx{ctx}"),
            );
            let mut s = shape(family, name, int8, [16, 1, 128], vec![ctx; batch]);
            s.problem.q_len = q_len;
            all.push(s);
        }
    }
    let f16 = KvFormat::same(Scheme::F16);
    for ctx in [128, 256, 512, 1024, 2048, 4096, 8192] {
        all.push(shape(
            "mha",
            format!("ctx{ctx}"),
            f16,
            [32, 32, 128],
            vec![ctx],
        ));
    }
    for batch in [1, 2, 4, 8, 16, 32, 64, 128] {
        all.push(shape(
            "mha",
            format!("ctx128-batch{batch}"),
            f16,
            [32, 32, 128],
            vec![128; batch],
        ));
    }
    // Log-uniform from 64 to 131072 in a fixed, mixed order.
    let ragged: Vec<usize> = (0..256)
        .map(|i| (64.0 * 2048f64.powf(f64::from(i * 77 % 256) / 255.0)) as usize)
        .collect();
    for format in [int8, int4] {
        let mut s = shape("ragged", "256".into(), format, [8, 1, 128], ragged.clone());
        s.fits_a_cpu = false;
        all.push(s);
    }
    for heads in [3, 5, 6, 7, 12, 16, 32, 64] {
        let lens = vec![8192; batch_for(256 * mib, int8, 1, 128, 8192)];
        all.push(shape(
            "heads",
            format!("per-kv{heads}"),
            int8,
            [heads, 1, 128],
            lens,
        ));
    }
    for dim in [64, 80, 96, 128, 192, 256] {
        let lens = vec![8192; batch_for(256 * mib, int8, 1, dim, 8192)];
        all.push(shape("dims", format!("d{dim}"), int8, [8, 1, dim], lens));
    }
    all
}

/// Microseconds of a run, over several.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The fastest.
    pub min: f64,
    /// The middle one.
    pub median: f64,
}

impl Timing {
    /// From microseconds.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        Timing {
            min: us[0],
            median: us[us.len() / 2],
        }
    }
}

/// What one shape took, and the pure read of as many bytes by the same threads in the same minutes.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// The decode step.
    pub step: Timing,
    /// The best of several ways to read.
    pub ceiling: Timing,
}

/// A shape with a filled cache, ready to be attended to on a backend in host memory.
pub struct Prepared {
    plan: Plan,
    cache: KvCache,
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Prepared {
    /// Fills a cache with noise; the pages of a sequence are scattered over the pool.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn new(backend: &dyn DecodeAttention, shape: &Shape) -> Result<Self, Error> {
        let problem = &shape.problem;
        let (heads, dim) = (problem.num_kv_heads, problem.head_dim);
        let mut config = CacheConfig::new(shape.format, heads, dim, problem.batch(), 0);
        config.num_pages = problem
            .kv_lens
            .iter()
            .map(|&len| config.pages_for(len))
            .sum();
        for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
            scales.fill(1.0 / 64.0);
        }
        let mut cache = backend.create_cache(&config)?;
        let mut state = 1u32;
        let mut noise = |n: usize| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                (state >> 8) as f32 * (1.0 / (1 << 23) as f32) - 1.0
            };
            (0..n).map(|_| next() + next()).collect()
        };
        // Whole pages of one noise, shifted from page to page: making fresh noise would take longer than everything else.
        let (k, v) = (
            noise((4 * TILE + 61) * heads * dim),
            noise((4 * TILE + 61) * heads * dim),
        );
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            for (page, t) in (0..len).step_by(4 * TILE).enumerate() {
                let from = (page * 7 + b * 3) % 61 * heads * dim;
                let n = (len - t).min(4 * TILE) * heads * dim;
                cache.append(b, &k[from..from + n], &v[from..from + n])?;
            }
        }
        let q = noise(problem.rows() * dim);
        Ok(Prepared {
            plan: backend.plan(problem, shape.format)?,
            cache,
            out: vec![0.0; q.len()],
            lse: vec![0.0; problem.rows()],
            q,
        })
    }

    /// One decode step.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn step(&mut self, backend: &dyn DecodeAttention) -> Result<(), Error> {
        let step = DecodeStep::new(&self.plan, black_box(&self.q), KvSource::Cache(&self.cache))?;
        let mut output = DecodeOutput::new(&self.plan.problem, &mut self.out, &mut self.lse)?;
        backend.decode(&step, &mut output)?;
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
    let mut prepared = Prepared::new(backend, shape)?;
    let bytes = shape.bytes();
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
