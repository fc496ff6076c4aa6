//! Median times of captured graphs that rotate over pools larger than L2, beside the read ceiling of the same bytes.

use anyhow::{Context, Result};
use attn_conformance::case::noise;
use attn_core::{CacheConfig, DecodeAttention, KvFormat, Problem};
use attn_cuda::{
    CudaBackend,
    instance::covered,
    native::{AppendArgs, DecodeArgs, DeviceKv, Dtype},
};
use cudarc::driver::{CudaGraph, sys};

use crate::{buffers::Buffers, driver};

/// Pools are copied until they hold as much: several times any L2.
const ROTATED: usize = 400 << 20;
const REPLAYS: usize = 15;
const PAGE: usize = 64;

/// One line of the table.
pub struct Workload {
    name: &'static str,
    /// What is stored.
    pub format: KvFormat,
    heads: [usize; 2],
    q_len: usize,
    batch: usize,
    kv_len: usize,
}

impl Workload {
    /// The step.
    pub fn problem(&self) -> Problem {
        let [q, kv] = self.heads;
        let mut problem = Problem::new(q, kv, 128, vec![self.kv_len; self.batch]);
        problem.q_len = self.q_len;
        problem
    }
}

/// The design's measured shapes, in every format of note.
pub fn workloads() -> Vec<Workload> {
    let shapes: [(&str, [usize; 2], usize, usize, usize); 10] = [
        ("8/1 heads, ctx 8192, batch 512", [8, 1], 1, 512, 8192),
        ("8/1 heads, ctx 8192, batch 32", [8, 1], 1, 32, 8192),
        (
            "16/1 heads, q_len 3, ctx 1024, batch 256",
            [16, 1],
            3,
            256,
            1024,
        ),
        (
            "16/1 heads, q_len 3, ctx 8192, batch 32",
            [16, 1],
            3,
            32,
            8192,
        ),
        (
            "16/1 heads, q_len 3, ctx 131072, batch 2",
            [16, 1],
            3,
            2,
            131_072,
        ),
        ("32/8 heads, ctx 1024, batch 1", [32, 8], 1, 1, 1024),
        ("32/8 heads, ctx 8192, batch 1", [32, 8], 1, 1, 8192),
        ("32/8 heads, ctx 32768, batch 1", [32, 8], 1, 1, 32_768),
        ("32/8 heads, ctx 131072, batch 1", [32, 8], 1, 1, 131_072),
        ("32/8 heads, ctx 4096, batch 64", [32, 8], 1, 64, 4096),
    ];
    let mut all = Vec::new();
    for format in [
        "int8",
        "int4",
        "int4-g1",
        "int4-g4",
        "int8/int4-g1",
        "bf16",
        "fp8",
    ] {
        for (name, heads, q_len, batch, kv_len) in shapes {
            all.push(Workload {
                name,
                format: format.parse().expect("a format's name"),
                heads,
                q_len,
                batch,
                kv_len,
            });
        }
    }
    all
}

fn median(mut x: Vec<f32>) -> f32 {
    x.sort_by(f32::total_cmp);
    x[x.len() / 2]
}

/// Median microseconds per launch of a captured graph of `launches`.
fn replay(buffers: &Buffers, graph: &CudaGraph, launches: usize) -> Result<f32> {
    let stream = &buffers.stream;
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    for _ in 0..3 {
        driver(graph.launch())?;
    }
    let mut times = Vec::new();
    for _ in 0..REPLAYS {
        let start = driver(stream.record_event(flags))?;
        driver(graph.launch())?;
        let end = driver(stream.record_event(flags))?;
        driver(stream.synchronize())?;
        times.push(driver(start.elapsed_ms(&end))? * 1000.0 / launches as f32);
    }
    Ok(median(times))
}

fn capture(buffers: &Buffers, enqueue: &dyn Fn() -> Result<()>) -> Result<CudaGraph> {
    driver(buffers.stream.synchronize())?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    driver(buffers.stream.begin_capture(mode))?;
    let enqueued = enqueue();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = driver(buffers.stream.end_capture(flags))?;
    enqueued?;
    graph.context("the capture gave no graph")
}

/// Microseconds of decode, of the read ceiling, and the bytes of one launch.
fn measure(gpu: &CudaBackend, work: &Workload) -> Result<(f32, f32, usize)> {
    let problem = work.problem();
    let plan = gpu.prepare(&problem, work.format, PAGE)?;
    let heads = work.heads[1];
    let mut config = CacheConfig::new(work.format, heads, 128, work.batch, work.kv_len);
    config.page_size = PAGE;
    let layout = config.layout();
    let append = gpu.prepare_append(&config)?;
    let buffers = Buffers::new(gpu.context())?;
    let pages = work.kv_len / PAGE;
    let tails = usize::from(layout.has_tail_page());
    let num_pages = work.batch * (pages + tails);
    let bytes = work.batch * pages * layout.page_bytes();
    let copies = (ROTATED / bytes).clamp(1, 64);
    // The pages of a sequence lie scattered, as in an engine.
    let total = work.batch * pages;
    let stride = [7919, 7907, 7901]
        .into_iter()
        .find(|p| !total.is_multiple_of(*p))
        .unwrap_or(1);
    let table: Vec<u32> = (0..total).map(|i| (i * stride % total) as u32).collect();
    let page_table = buffers.upload(&table)?;
    let tail_table: Vec<u32> = (0..work.batch)
        .map(|b| (total + b % (tails * work.batch).max(1)) as u32)
        .collect();
    let tail_pages = buffers.upload(&tail_table)?;
    let kv_lens = buffers.upload(&vec![work.kv_len as i32; work.batch])?;
    // One sequence's tokens serve all: bits are the suite's business. Appended in chunks.
    let chunk = work.kv_len.min(8192);
    let k = buffers.upload(&noise(3, chunk * heads * 128))?;
    let v = buffers.upload(&noise(4, chunk * heads * 128))?;
    let chunk_lens: Vec<i32> = (1..=work.kv_len / chunk)
        .map(|i| (i * chunk) as i32)
        .collect();
    let chunk_lens = buffers.upload(&chunk_lens)?;
    let scales = buffers.upload(&vec![0.2f32; heads])?;
    let scale = |has: bool| if has { buffers.address(&scales) } else { 0 };
    let k_tensor_scales = scale(work.format.k.has_tensor_scale());
    let v_tensor_scales = scale(work.format.v.has_tensor_scale());
    let pools = (0..copies)
        .map(|_| buffers.bytes(num_pages * layout.page_bytes()))
        .collect::<Result<Vec<_>>>()?;
    for pool in &pools {
        for b in 0..work.batch {
            for i in 0..work.kv_len / chunk {
                let args = AppendArgs {
                    k: buffers.address(&k),
                    v: buffers.address(&v),
                    dtype: Dtype::F32,
                    k_token_stride: heads * 128,
                    v_token_stride: heads * 128,
                    pool: buffers.address(pool),
                    num_pages,
                    page_table: buffers.address(&page_table) + (b * pages * 4) as u64,
                    page_table_stride: pages,
                    tail_pages: buffers.address(&tail_pages) + (b * 4) as u64,
                    kv_lens: buffers.address(&chunk_lens) + (i * 4) as u64,
                    k_tensor_scales,
                    v_tensor_scales,
                    batch: 1,
                    tokens: chunk,
                };
                // SAFETY: buffers of this function, sized for these lengths; pages below `num_pages`; one stream.
                unsafe { gpu.append_on(&append, buffers.raw(), &args) }?;
            }
        }
    }
    let rows = problem.rows();
    let q = buffers.upload(&noise(5, rows * 128))?;
    let (out, lse) = (buffers.floats(rows * 128)?, buffers.floats(rows)?);
    let workspace = buffers.bytes(plan.workspace_bytes())?;
    let sink = buffers.bytes(16)?;
    let launches = copies.max(4);
    let decode = capture(&buffers, &|| {
        for i in 0..launches {
            let args = DecodeArgs {
                q: buffers.address(&q),
                out: buffers.address(&out),
                lse: buffers.address(&lse),
                kv: DeviceKv::Paged {
                    pool: buffers.address(&pools[i % copies]),
                    num_pages,
                    page_table: buffers.address(&page_table),
                    page_table_stride: pages,
                    tail_pages: buffers.address(&tail_pages),
                },
                kv_lens: buffers.address(&kv_lens),
                k_tensor_scales,
                v_tensor_scales,
                alibi_slopes: 0,
                workspace: buffers.address(&workspace),
            };
            // SAFETY: as above; the workspace was zeroed by its allocation.
            unsafe { gpu.decode_on(&plan, buffers.raw(), &args) }?;
        }
        Ok(())
    })?;
    let read = gpu.prepare_read()?;
    let reading = capture(&buffers, &|| {
        for i in 0..launches {
            let from = buffers.address(&pools[i % copies]);
            // SAFETY: the pool holds `bytes` bytes and more.
            unsafe { gpu.read_on(&read, buffers.raw(), from, bytes, buffers.address(&sink)) }?;
        }
        Ok(())
    })?;
    Ok((
        replay(&buffers, &decode, launches)?,
        replay(&buffers, &reading, launches)?,
        bytes,
    ))
}

/// Prints the table.
pub fn run(filter: &str) -> Result<()> {
    let gpu = CudaBackend::open()?;
    println!("{} ({})\n", gpu.device().name, gpu.device().detail);
    println!("| K/V | work, head_dim 128 | MiB | decode µs | read µs | of the ceiling | TB/s |");
    println!("|---|---|---|---|---|---|---|");
    for work in workloads() {
        let name = format!("{} {}", work.format, work.name);
        if !name.contains(filter) || covered(work.format, PAGE).is_err() {
            continue;
        }
        match measure(&gpu, &work) {
            Ok((decode, read, bytes)) => println!(
                "| {} | {} | {} | {decode:.1} | {read:.1} | {:.0} % | {:.2} |",
                work.format,
                work.name,
                bytes >> 20,
                read / decode * 100.0,
                bytes as f32 / decode / 1e6
            ),
            Err(error) => println!("| {} | {} | failed: {error:#} |", work.format, work.name),
        }
    }
    Ok(())
}
