//! Decode on this machine's adapter by GPU timestamps, beside a WGSL kernel that only reads as many bytes in the same run.
//!
//! `bench [quick|sweep]`: prints microseconds, GB/s and the share of the read ceiling; `sweep` also tries tunings. Caches rotate
//! so that each step finds its bytes outside the caches of the GPU.

use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, HostPages, KvCache, KvFormat, KvSource,
    Problem,
};
use attn_cpu::CpuBackend;
use attn_wgpu::{Prepared, Tuning, WgpuBackend, wgpu};
use wgpu::BufferUsages as Usage;

type Any<T> = Result<T, Box<dyn std::error::Error>>;

/// Times stretches of a command encoder.
struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    read: wgpu::Buffer,
}

const STAMPS: u32 = 256;

struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    clock: Clock,
}

impl Gpu {
    fn open() -> Any<(Self, WgpuBackend)> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
        let wanted = std::env::var("ATTN_WGPU_ADAPTER").unwrap_or_default();
        let adapter = adapters
            .into_iter()
            .filter(|a| a.get_info().name.contains(&wanted))
            .min_by_key(|a| a.get_info().device_type != wgpu::DeviceType::DiscreteGpu)
            .ok_or("no adapter")?;
        let stamps =
            wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS;
        let useful = wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_F16
            | wgpu::Features::SHADER_I16
            | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        let (device, queue) =
            pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
                required_features: stamps | (adapter.features() & useful),
                required_limits: adapter.limits(),
                // SAFETY: the backend's kernels alone use cooperative matrices, as `gpu.rs` says.
                experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
                ..Default::default()
            }))?;
        let buffer = |usage| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: u64::from(STAMPS) * 8,
                usage,
                mapped_at_creation: false,
            })
        };
        let clock = Clock {
            queries: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: STAMPS,
            }),
            resolved: buffer(Usage::QUERY_RESOLVE | Usage::COPY_SRC),
            read: buffer(Usage::COPY_DST | Usage::MAP_READ),
        };
        let backend = WgpuBackend::with_device(device.clone(), queue.clone())?;
        let gpu = Gpu {
            device,
            queue,
            clock,
        };
        Ok((gpu, backend))
    }

    /// Keeps the GPU busy for a third of a second: clocks ramp up.
    fn warm_up(
        &self,
        mut record: impl FnMut(&mut wgpu::CommandEncoder, usize) -> Any<()>,
    ) -> Any<()> {
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < 150 {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            for i in 0..100 {
                record(&mut encoder, i)?;
            }
            self.queue.submit([encoder.finish()]);
            self.device.poll(wgpu::PollType::wait_indefinitely())?;
        }
        Ok(())
    }

    /// Microseconds of each of `count` pieces of work, recorded one after the other, and their mean back to back.
    fn time(
        &self,
        count: usize,
        mut record: impl FnMut(&mut wgpu::CommandEncoder, usize) -> Any<()>,
    ) -> Any<(Vec<f64>, f64)> {
        self.warm_up(&mut record)?;
        let period = f64::from(self.queue.get_timestamp_period()) / 1000.0;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder, 0)?;
        for i in 0..count {
            encoder.write_timestamp(&self.clock.queries, i as u32);
            record(&mut encoder, i)?;
        }
        encoder.write_timestamp(&self.clock.queries, count as u32);
        encoder.resolve_query_set(
            &self.clock.queries,
            0..count as u32 + 1,
            &self.clock.resolved,
            0,
        );
        let each = self.stamps(encoder, count + 1)?;
        let singles = each
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64 * period)
            .collect();

        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder, 0)?;
        encoder.write_timestamp(&self.clock.queries, 0);
        for i in 0..count {
            record(&mut encoder, i)?;
        }
        encoder.write_timestamp(&self.clock.queries, 1);
        encoder.resolve_query_set(&self.clock.queries, 0..2, &self.clock.resolved, 0);
        let ends = self.stamps(encoder, 2)?;
        Ok((singles, (ends[1] - ends[0]) as f64 * period / count as f64))
    }

    fn stamps(&self, mut encoder: wgpu::CommandEncoder, count: usize) -> Any<Vec<u64>> {
        encoder.copy_buffer_to_buffer(
            &self.clock.resolved,
            0,
            &self.clock.read,
            0,
            count as u64 * 8,
        );
        self.queue.submit([encoder.finish()]);
        self.clock
            .read
            .map_async(wgpu::MapMode::Read, .., |outcome| {
                if let Err(error) = outcome {
                    eprintln!("{error}");
                }
            });
        self.device.poll(wgpu::PollType::wait_indefinitely())?;
        let stamps = self
            .clock
            .read
            .get_mapped_range(..count as u64 * 8)?
            .chunks_exact(8)
            .map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")))
            .collect();
        self.clock.read.unmap();
        Ok(stamps)
    }

    fn storage(&self, bytes: u64, usage: Usage) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: Usage::STORAGE | usage,
            mapped_at_creation: false,
        })
    }
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

/// Microseconds to read `bytes` from one of several buffers in turn: the best of some grids.
fn ceiling(gpu: &Gpu, backend: &WgpuBackend, bytes: u64) -> Any<f64> {
    let pipeline = backend.read_kernel()?;
    let copies = copies(bytes);
    let sums = gpu.storage(4, Usage::empty());
    let groups: Vec<_> = (0..copies)
        .map(|_| {
            let data = gpu.storage(bytes, Usage::COPY_DST);
            gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[&data, &sums]
                    .into_iter()
                    .enumerate()
                    .map(|(binding, buffer)| wgpu::BindGroupEntry {
                        binding: binding as u32,
                        resource: buffer.as_entire_binding(),
                    })
                    .collect::<Vec<_>>(),
            })
        })
        .collect();
    let mut best = f64::INFINITY;
    for workgroups in [512, 1024, 2048, 4096] {
        let (singles, mean) = gpu.time(24, |encoder, i| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &groups[i % copies], &[]);
            pass.dispatch_workgroups(workgroups, 1, 1);
            Ok(())
        })?;
        best = best.min(median(singles)).min(mean.max(0.0));
    }
    Ok(best)
}

/// Caches to rotate over: beyond 256 MiB together.
fn copies(bytes: u64) -> usize {
    (256u64 << 20).div_ceil(bytes).clamp(1, 16) as usize
}

/// Deterministic numbers in -1..1.
fn noise(n: usize) -> Vec<f32> {
    let mut x = 12345u32;
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

struct Work {
    format: KvFormat,
    heads: [usize; 2],
    ctx: usize,
    batch: usize,
}

const DIM: usize = 128;

/// One cache on the device whose sequences all hold the same tokens, at places of their own.
fn fill(backend: &WgpuBackend, work: &Work, pages: &[Vec<u8>]) -> Any<KvCache> {
    let config = CacheConfig::new(work.format, work.heads[1], DIM, work.batch, work.ctx);
    let mut cache = backend.create_cache(&config)?;
    for b in 0..work.batch {
        cache.restore(b, work.ctx, pages)?;
    }
    Ok(cache)
}

fn run(gpu: &Gpu, backend: &WgpuBackend, work: &Work, tunings: &[(&str, Tuning)]) -> Any<()> {
    let cpu = CpuBackend::new();
    let one = CacheConfig::new(work.format, work.heads[1], DIM, 1, work.ctx);
    let mut sample = KvCache::new(one.clone(), Box::new(HostPages::new(&one)?))?;
    let values = noise(work.ctx * work.heads[1] * DIM);
    sample.append(
        0,
        &values,
        &values.iter().map(|x| x * 0.7).collect::<Vec<_>>(),
    )?;
    let pages = sample.read_back(0)?;

    let bytes = (work.batch * work.ctx * work.heads[1]) as f64 * one.layout().bytes_per_token();
    let ceiling = ceiling(gpu, backend, bytes as u64 / 256 * 256)?;
    println!(
        "\n{} ctx {} heads {}/{} D {DIM} batch {}: {:.1} MiB, read ceiling {ceiling:.1} us ({:.0} GB/s)",
        work.format,
        work.ctx,
        work.heads[0],
        work.heads[1],
        work.batch,
        bytes / 1048576.0,
        bytes / ceiling / 1000.0
    );
    let caches = (0..copies(bytes as u64))
        .map(|_| fill(backend, work, &pages))
        .collect::<Any<Vec<_>>>()?;
    let problem = Problem::new(
        work.heads[0],
        work.heads[1],
        DIM,
        vec![work.ctx; work.batch],
    );
    let elems = problem.rows() * DIM;
    let row = noise(work.heads[0] * DIM);
    let queries: Vec<f32> = (0..work.batch).flat_map(|_| row.iter().copied()).collect();
    let q = gpu.storage(4 * elems as u64, Usage::COPY_DST);
    gpu.queue.write_buffer(
        &q,
        0,
        &queries
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<_>>(),
    );
    let out = gpu.storage(4 * elems as u64, Usage::COPY_SRC);
    let lse = gpu.storage(4 * problem.rows() as u64, Usage::COPY_SRC);

    // The CPU's bits, of the one sequence that all are.
    let single = Problem::new(work.heads[0], work.heads[1], DIM, vec![work.ctx]);
    let (mut want, mut want_lse) = (vec![0.0; row.len()], vec![0.0; work.heads[0]]);
    let plan = cpu.plan(&single, work.format)?;
    let step = DecodeStep::new(&plan, &row, KvSource::Cache(&sample))?;
    cpu.decode(
        &step,
        &mut DecodeOutput::new(&single, &mut want, &mut want_lse)?,
    )?;
    let plan = backend.plan(&problem, work.format)?;
    for (name, tuning) in tunings {
        let tuned = backend.tuned(*tuning);
        let start = std::time::Instant::now();
        let steps: Vec<Prepared> = caches
            .iter()
            .map(|cache| tuned.prepare(&problem, cache))
            .collect::<Result<_, _>>()?;
        let compiled = start.elapsed().as_millis();
        let (singles, mean) = gpu.time(48, |encoder, i| {
            Ok(tuned.record(encoder, &steps[i % steps.len()], &q, &out, &lse)?)
        })?;
        let (_, split) = gpu.time(24, |encoder, i| {
            Ok(tuned.record_split(encoder, &steps[i % steps.len()], [&q, &out, &lse])?)
        })?;
        let (mut got, mut got_lse) = (vec![0.0; elems], vec![0.0; problem.rows()]);
        let step = DecodeStep::new(&plan, &queries, KvSource::Cache(&caches[0]))?;
        tuned.decode(
            &step,
            &mut DecodeOutput::new(&problem, &mut got, &mut got_lse)?,
        )?;
        let equal = got.chunks_exact(want.len()).all(|rows| {
            rows.iter()
                .zip(&want)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        }) && got_lse.chunks_exact(want_lse.len()).all(|rows| {
            rows.iter()
                .zip(&want_lse)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        });
        let us = median(singles);
        println!(
            "  {name:<28} {us:8.1} us alone, {mean:8.1} us back to back ({split:.1} without the merge), {:6.0} GB/s, {:5.1} % of the ceiling, bits {} the CPU's, prepared in {compiled} ms",
            bytes / mean / 1000.0,
            100.0 * ceiling / mean,
            if equal { "equal" } else { "DIFFER FROM" }
        );
    }
    Ok(())
}

const DOTS: &str = "
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
@compute @workgroup_size(256)
fn dots(@builtin(local_invocation_index) tid: u32) {
    let a = x[tid];
    var s = vec4<i32>(i32(tid));
    for (var i = 0u; i < x[1024]; i++) {
        let b = a + i;
        for (var n = 0u; n < 16u; n++) {
            s.x = dot4I8Packed(a, b) + dot4I8Packed(u32(s.x), a);
            s.y = dot4I8Packed(a, b + 1u) + dot4I8Packed(u32(s.y), a);
            s.z = dot4I8Packed(a, b + 2u) + dot4I8Packed(u32(s.z), a);
            s.w = dot4I8Packed(a, b + 3u) + dot4I8Packed(u32(s.w), a);
        }
    }
    x[tid] = u32(s.x ^ s.y ^ s.z ^ s.w);
}
";

/// Packed dot products per second, which is what binds where rows are many.
fn dots(gpu: &Gpu) -> Any<()> {
    let module = gpu
        .device
        .create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(DOTS.into()),
        });
    let pipeline = gpu
        .device
        .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: Default::default(),
            cache: None,
        });
    let x = gpu.storage(4100, Usage::COPY_DST);
    gpu.queue.write_buffer(&x, 4096, &64u32.to_le_bytes());
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry {
            binding: 0,
            resource: x.as_entire_binding(),
        }],
    });
    let workgroups = 2048;
    let (_, us) = gpu.time(16, |encoder, _| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(workgroups, 1, 1);
        Ok(())
    })?;
    // The products that depend on the accumulators; the others may be shared between steps.
    let dots = f64::from(workgroups) * 256.0 * 64.0 * 16.0 * 4.0;
    println!("packed dot products: {:.2}e12 per second", dots / us / 1e6);
    Ok(())
}

fn main() -> Any<()> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let (gpu, backend) = Gpu::open()?;
    println!("{}: {}", backend.device().name, backend.device().detail);
    if mode != "quick" {
        dots(&gpu)?;
    }
    let mut tunings = vec![("default", Tuning::default())];
    let mut subgroups = Tuning::default();
    subgroups.subgroups = Some(true);
    tunings.push(("subgroups", subgroups));
    let mut dots = Tuning::default();
    dots.matrix = Some(true);
    tunings.push(("cooperative matrices", dots));
    if mode == "sweep" {
        let (none, both) = (Some([false; 2]), Some([true; 2]));
        for (name, together, ahead, [subgroups, matrix]) in [
            ("two rows together", 2, both, [false, false]),
            ("nothing ahead", 1, none, [false, false]),
            ("matrices, subgroups", 1, both, [true, true]),
            ("matrices, two rows together", 2, both, [false, true]),
            ("matrices, K ahead", 1, Some([true, false]), [false, true]),
            ("matrices, nothing ahead", 1, none, [false, true]),
        ] {
            let mut tuning = Tuning::default();
            (tuning.together, tuning.ahead) = (Some(together), ahead);
            (tuning.subgroups, tuning.matrix) = (Some(subgroups), Some(matrix));
            tunings.push((name, tuning));
        }
    }
    let work = |format, heads, ctx, batch| Work {
        format,
        heads,
        ctx,
        batch,
    };
    let (int8, int4) = (KvFormat::INT8, KvFormat::INT4);
    let rows4: KvFormat = "int4-g1".parse()?;
    let all = if mode == "quick" {
        vec![work(int8, [8, 1], 512, 2), work(int4, [8, 1], 512, 2)]
    } else {
        vec![
            work(int8, [8, 1], 8192, 32),
            work(int8, [8, 1], 8192, 512),
            work(int4, [8, 1], 8192, 512),
            work(int8, [32, 8], 8192, 1),
            work(int4, [8, 1], 8192, 32),
            work(rows4, [8, 1], 8192, 512),
        ]
    };
    for (i, work) in all.iter().enumerate() {
        // A sweep's answers hold for the later ones, too.
        let tunings = if i < 3 { &tunings[..] } else { &tunings[..3] };
        run(&gpu, &backend, work, tunings)?;
    }
    Ok(())
}
