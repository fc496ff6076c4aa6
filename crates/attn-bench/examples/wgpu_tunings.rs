//! Tunings of decode on this machine's adapter, by the clock of `attn bench --backend wgpu`, whose workloads and table are for users.
//!
//! `bench [quick|sweep]`: microseconds, GB/s and the share of a plain read of the same bytes in the same run; every answer is compared
//! with the CPU's bits. `sweep` tries more tunings; `docs/wgpu.md` has what came out.

use attn_bench::{noise, wgpu::WgpuTimer};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, HostPages, KvCache, KvFormat, KvSource,
    Problem,
};
use attn_cpu::CpuBackend;
use attn_wgpu::{Prepared, Tuning, WgpuBackend, internals::record_split, wgpu};
use wgpu::BufferUsages as Usage;

type Any<T> = Result<T, Box<dyn std::error::Error>>;

const DIM: usize = 128;
const RUNS: usize = 9;

struct Case {
    format: KvFormat,
    heads: [usize; 2],
    ctx: usize,
    batch: usize,
}

impl Case {
    fn new(format: &str, heads: [usize; 2], ctx: usize, batch: usize) -> Any<Self> {
        Ok(Case {
            format: format.parse()?,
            heads,
            ctx,
            batch,
        })
    }

    fn problem(&self, batch: usize) -> Problem {
        Problem::new(
            Heads::new(self.heads[0], self.heads[1], DIM),
            vec![self.ctx; batch],
        )
    }
}

/// The CPU's cache of one sequence, its queries, answers and log-sums.
struct Sample {
    cache: KvCache,
    query: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Sample {
    fn new(work: &Case) -> Any<Self> {
        let one = CacheConfig::builder(work.format, Heads::new(work.heads[1], work.heads[1], DIM))
            .unit_tensor_scales()
            .sequences(1)
            .max_len(work.ctx)
            .build();
        let mut cache = KvCache::new(one.clone(), Box::new(HostPages::new(&one)?))?;
        let count = work.ctx * work.heads[1] * DIM;
        cache.append(0, &noise(1, count), &noise(2, count))?;
        let query = noise(3, work.heads[0] * DIM);
        let (mut out, mut lse) = (vec![0.0; query.len()], vec![0.0; work.heads[0]]);
        let (cpu, problem) = (CpuBackend::new(), work.problem(1));
        let plan = cpu.plan(&problem, work.format)?;
        let kv = KvSource::Cache(&cache);
        cpu.decode(&mut DecodeStep::new(&plan, &query, kv, &mut out)?.with_lse(&mut lse)?)?;
        Ok(Sample {
            cache,
            query,
            out,
            lse,
        })
    }

    /// Caches on the device, beyond 256 MiB together, whose sequences all hold the sample's tokens at places of their own.
    fn copies(&self, work: &Case, backend: &WgpuBackend, bytes: usize) -> Any<Vec<KvCache>> {
        let pages = self.cache.read_back(0)?;
        (0..(256usize << 20).div_ceil(bytes).clamp(1, 16))
            .map(|_| {
                let config = CacheConfig::builder(
                    work.format,
                    Heads::new(work.heads[1], work.heads[1], DIM),
                )
                .unit_tensor_scales()
                .sequences(work.batch)
                .max_len(work.ctx)
                .build();
                let mut cache = backend.create_cache(&config)?;
                for b in 0..work.batch {
                    cache.restore_pages(b, work.ctx, &pages)?;
                }
                Ok(cache)
            })
            .collect()
    }

    /// Whether all sequences have the CPU's bits.
    fn equals(&self, out: &[f32], lse: &[f32]) -> bool {
        let same = |got: &[f32], want: &[f32]| {
            got.chunks_exact(want.len())
                .flat_map(|rows| rows.iter().zip(want))
                .all(|(a, b)| a.to_bits() == b.to_bits())
        };
        same(out, &self.out) && same(lse, &self.lse)
    }
}

fn upload(backend: &WgpuBackend, values: &[f32]) -> wgpu::Buffer {
    let buffer = backend
        .wgpu_device()
        .create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4 * values.len() as u64,
            usage: Usage::STORAGE | Usage::COPY_DST,
            mapped_at_creation: false,
        });
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    backend.wgpu_queue().write_buffer(&buffer, 0, &bytes);
    buffer
}

fn run(timer: &WgpuTimer, work: &Case, tunings: &[(&str, Tuning)]) -> Any<()> {
    let backend = timer.backend();
    let sample = Sample::new(work)?;
    let config = CacheConfig::builder(work.format, Heads::new(work.heads[1], work.heads[1], DIM))
        .unit_tensor_scales()
        .sequences(1)
        .max_len(work.ctx)
        .build();
    let tokens = (work.batch * work.ctx * work.heads[1]) as f64;
    let bytes = (tokens * config.layout()?.bytes_per_token()) as usize;
    let caches = sample.copies(work, backend, bytes)?;
    let ceiling = timer.read(&caches, bytes, RUNS)?.median;
    println!(
        "\n{} ctx {} heads {}/{} D {DIM} batch {}: {:.1} MiB, read ceiling {ceiling:.1} us ({:.0} GB/s)",
        work.format,
        work.ctx,
        work.heads[0],
        work.heads[1],
        work.batch,
        bytes as f64 / 1048576.0,
        bytes as f64 / ceiling / 1000.0
    );
    let problem = work.problem(work.batch);
    let queries = sample.query.repeat(work.batch);
    let ends = [queries.len(), problem.rows()].map(|count| vec![0.0; count]);
    let q = upload(backend, &queries);
    let [out, lse] = [0, 1].map(|i| upload(backend, &ends[i]));
    let plan = backend.plan(&problem, work.format)?;
    for (name, tuning) in tunings {
        let tuned = backend.tuned(*tuning);
        let start = std::time::Instant::now();
        let steps: Vec<Prepared> = caches
            .iter()
            .map(|cache| tuned.prepare(&problem, cache))
            .collect::<Result<_, _>>()?;
        let prepared = start.elapsed().as_millis();
        let count = caches.len().max(4);
        let us = timer.time(count, RUNS, &mut |encoder, i| {
            tuned.record(encoder, &steps[i % steps.len()], &q, &out, &lse)
        })?;
        let split = timer.time(count, RUNS, &mut |encoder, i| {
            record_split(&tuned, encoder, &steps[i % steps.len()], [&q, &out, &lse])
        })?;
        let [mut got, mut got_lse] = ends.clone();
        let kv = KvSource::Cache(&caches[0]);
        let mut step = DecodeStep::new(&plan, &queries, kv, &mut got)?.with_lse(&mut got_lse)?;
        tuned.decode(&mut step)?;
        println!(
            "  {name:<28} {:8.1} us ({:.1} without the merge), {:6.0} GB/s, {:5.1} % of the ceiling, bits {} the CPU's, prepared in {prepared} ms",
            us.median,
            split.median,
            bytes as f64 / us.median / 1000.0,
            100.0 * ceiling / us.median,
            if sample.equals(&got, &got_lse) {
                "equal"
            } else {
                "DIFFER FROM"
            }
        );
    }
    Ok(())
}

/// What is compared: the kernels by themselves, and in a sweep what may be tuned about them.
fn tunings(sweep: bool) -> Vec<(&'static str, Tuning)> {
    let with = |change: &dyn Fn(&mut Tuning)| {
        let mut tuning = Tuning::default();
        change(&mut tuning);
        tuning
    };
    let mut all = vec![("as chosen", Tuning::default())];
    if sweep {
        all.extend([
            ("tile by tile", with(&|t| t.by_tiles = Some(true))),
            ("by segments", with(&|t| t.by_tiles = Some(false))),
            ("four query rows each", with(&|t| t.rows = Some(4))),
        ]);
    }
    all
}

fn main() -> Any<()> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let timer = WgpuTimer::of(WgpuBackend::open()?)?;
    let info = timer.backend().device();
    println!("{}: {}", info.name, info.detail);
    let workloads = if mode == "quick" {
        vec![
            Case::new("int8", [8, 1], 512, 2)?,
            Case::new("int4", [8, 1], 512, 2)?,
        ]
    } else {
        vec![
            Case::new("int8", [8, 1], 8192, 32)?,
            Case::new("int8", [8, 1], 8192, 512)?,
            Case::new("int4", [8, 1], 8192, 512)?,
            Case::new("int4-g1", [8, 1], 8192, 512)?,
            Case::new("int8", [32, 8], 8192, 1)?,
            Case::new("int4", [8, 1], 8192, 32)?,
        ]
    };
    for work in &workloads {
        run(&timer, work, &tunings(mode == "sweep"))?;
    }
    Ok(())
}
