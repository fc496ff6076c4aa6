//! How an adapter is timed: steps recorded back to back over caches that rotate beyond its own, beside a WGSL kernel that only
//! reads the same pages.
//!
//! `attn bench --backend wgpu` uses [`WgpuTimer`]. The clock is the GPU's
//! where the adapter has timestamp queries, else the host's around a submission.

mod products;
mod stamps;

use std::time::{Duration, Instant};

use attn_core::{Append, CacheConfig, DecodeAttention, Error, KvCache};
use attn_wgpu::{
    DevicePages, DeviceView, Prepared, SideRows, WgpuBackend, WgpuError,
    internals::{BACKEND, device, read_kernel},
};
use products::Products;
use stamps::Stamps;
use wgpu::BufferUsages as Usage;

use crate::{CacheLayout, ContiguousCache, Measured, Operation, Timer, Timing, Workload, noise};

/// What steps rotate over, at least: several times any cache.
const ROTATED: usize = 256 << 20;
/// No more copies of a small cache than this.
const MOST_COPIES: usize = 16;
/// Tokens of noise; longer sequences repeat their pages.
const NOISE_TOKENS: usize = 1024;
/// Operation before the timed runs, in so many pieces at most: clocks ramp up.
const WARM_UP: Duration = Duration::from_millis(200);
const MOST_WARM_UPS: usize = 15;
/// Timed runs at most: two timestamps each.
const MOST_RUNS: usize = 1000;
/// Pieces of products behind each workload.
const PEAK_PIECES: usize = 10;
/// Copies for an append alone, which touches a small part of each.
const APPEND_COPIES: usize = 8;
/// Appends for which a cache has room.
const APPENDS: usize = 128;
/// Grids of the reading kernel, of which the fastest counts.
const READ_GRIDS: [u32; 4] = [512, 1024, 2048, 4096];

/// One adapter, and its clock.
pub struct WgpuTimer {
    backend: WgpuBackend,
    read: wgpu::ComputePipeline,
    sums: wgpu::Buffer,
    stamps: Option<Stamps>,
    products: Products,
    /// Operations a second of [`Products`], the best so far.
    peak: f64,
}

/// Records the i-th piece of work.
pub type Record<'a> = dyn FnMut(&mut wgpu::CommandEncoder, usize) -> Result<(), Error> + 'a;

fn buffer(device: &wgpu::Device, bytes: u64, usage: Usage) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("attn bench"),
        size: bytes.max(4),
        usage,
        mapped_at_creation: false,
    })
}

/// Waits for a submission, or for all of them.
fn poll(gpu: &wgpu::Device, until: Option<wgpu::SubmissionIndex>) -> Result<(), Error> {
    let wait = wgpu::PollType::Wait {
        submission_index: until,
        timeout: None,
    };
    gpu.poll(wait)
        .map(|_| ())
        .map_err(|error| device("timing", WgpuError::Poll(error)))
}

/// What a workload's steps read and write beside their caches.
struct Ends {
    q: wgpu::Buffer,
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
    /// K and V of one token of every sequence.
    token: [wgpu::Buffer; 2],
}

/// A contiguous cache on the device: codes of K and V, and their scales.
struct DeviceCopy {
    codes: [wgpu::Buffer; 2],
    scales: [Option<wgpu::Buffer>; 2],
}

impl WgpuTimer {
    /// On the adapter that [`WgpuBackend::open`] chooses.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with what is missing; [`Error::Device`].
    pub fn open() -> Result<Self, Error> {
        Self::of(WgpuBackend::open()?)
    }

    /// On a backend that is there.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn of(backend: WgpuBackend) -> Result<Self, Error> {
        Ok(WgpuTimer {
            read: read_kernel(&backend)?,
            sums: buffer(backend.wgpu_device(), 4, Usage::STORAGE),
            stamps: Stamps::new(&backend),
            products: Products::new(&backend, backend.is_software())?,
            peak: 0.0,
            backend,
        })
    }

    /// Notes the rate of packed products alone where it is the best so far.
    fn measure_peak(&mut self) -> Result<(), Error> {
        for _ in 0..PEAK_PIECES {
            let us = self.once(1, &mut |encoder, _| {
                self.products.record(encoder);
                Ok(())
            })?;
            self.peak = self.peak.max(self.products.operations() / us * 1e6);
            self.products.fit(&self.backend, us);
        }
        Ok(())
    }

    /// Work and read of a workload.
    fn times(&self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
        if workload.cache != CacheLayout::Pages {
            return self.views(workload, runs);
        }
        let mut caches = self.caches(workload)?;
        let step = if workload.operation == Operation::Decode {
            let steps = caches.iter();
            let steps = steps.map(|cache| self.backend.prepare(&workload.problem, cache));
            self.decodes(workload, &steps.collect::<Result<Vec<_>, _>>()?, runs)?
        } else {
            self.appends(workload, &mut caches, runs)?
        };
        Ok(Measured {
            step,
            ceiling: self.read(&caches, workload.bytes(), runs)?,
        })
    }

    /// `count` pieces of work, recorded back to back, between the stamps of this run.
    fn commands(
        &self,
        count: usize,
        run: usize,
        record: &mut Record<'_>,
    ) -> Result<wgpu::CommandBuffer, Error> {
        let gpu = self.backend.wgpu_device();
        let mut encoder = gpu.create_command_encoder(&Default::default());
        let stamp = |encoder: &mut _, index: usize| {
            if let Some(stamps) = &self.stamps {
                stamps.stamp(encoder, index as u32);
            }
        };
        stamp(&mut encoder, 2 * run);
        (0..count).try_for_each(|i| record(&mut encoder, i))?;
        stamp(&mut encoder, 2 * run + 1);
        Ok(encoder.finish())
    }

    /// Microseconds of each of `count` pieces of work, in a submission of their own.
    fn once(&self, count: usize, record: &mut Record<'_>) -> Result<f64, Error> {
        let commands = self.commands(count, 0, record)?;
        let start = Instant::now();
        self.backend.wgpu_queue().submit([commands]);
        let us = if let Some(stamps) = &self.stamps {
            stamps.elapsed(&self.backend, 1)?[0]
        } else {
            poll(self.backend.wgpu_device(), None)?;
            start.elapsed().as_secs_f64() * 1e6
        };
        Ok(us / count as f64)
    }

    /// Microseconds of one of `count` pieces of work, which `record` records back to back, over `runs` submissions behind a warm-up.
    /// At most 1000 runs. The same work may be recorded in any order.
    ///
    /// # Errors
    /// [`Error::Device`], and what `record` returns.
    pub fn time(
        &self,
        count: usize,
        runs: usize,
        record: &mut Record<'_>,
    ) -> Result<Timing, Error> {
        let (gpu, queue) = (self.backend.wgpu_device(), self.backend.wgpu_queue());
        let runs = runs.clamp(1, MOST_RUNS);
        self.once(count, record)?;
        let stamped = if self.stamps.is_some() { runs } else { 0 };
        let timed = (0..stamped).map(|run| self.commands(count, run, record));
        let timed = timed.collect::<Result<Vec<_>, _>>()?;
        // The timed runs follow all at once: a GPU that waits while its host records lowers its clocks (42 µs became 170 on an H200).
        self.warm_up(count, record)?;
        let Some(stamps) = &self.stamps else {
            poll(gpu, None)?;
            return self.each(count, runs, record);
        };
        queue.submit(timed);
        let us = stamps.elapsed(&self.backend, runs)?;
        Ok(Timing::of(us.iter().map(|us| us / count as f64).collect()))
    }

    /// Keeps the device at work until that is done no faster from one while to the next: clocks rise slowly after a long idleness.
    fn warm_up(&self, count: usize, record: &mut Record<'_>) -> Result<(), Error> {
        let (gpu, queue) = (self.backend.wgpu_device(), self.backend.wgpu_queue());
        let (mut before, mut fastest) = (None, 0.0);
        for _ in 0..MOST_WARM_UPS {
            let (start, mut done) = (Instant::now(), 0);
            while start.elapsed() < WARM_UP {
                let commands = self.commands(count, 0, record)?;
                let last = before.replace(queue.submit([commands]));
                last.map_or(Ok(()), |last| poll(gpu, Some(last)))?;
                done += 1;
            }
            let rate = f64::from(done) / start.elapsed().as_secs_f64();
            if rate < 1.03 * fastest {
                break;
            }
            fastest = rate;
        }
        Ok(())
    }

    /// Times runs one after the other without a warm-up: for work that changes what it works on.
    fn each(&self, count: usize, runs: usize, record: &mut Record<'_>) -> Result<Timing, Error> {
        let times = (0..runs.max(1)).map(|_| self.once(count, record));
        Ok(Timing::of(times.collect::<Result<_, _>>()?))
    }

    /// The device that is timed.
    pub fn backend(&self) -> &WgpuBackend {
        &self.backend
    }

    /// Home pages of noise, as many as one sequence needs before they repeat, and residual pages of the last of them.
    fn pages(&self, workload: &Workload) -> Result<[Vec<Vec<u8>>; 2], Error> {
        let problem = &workload.problem;
        let config = CacheConfig::builder(workload.format, problem.heads())
            .unit_tensor_scales()
            .centres(false)
            .page_size(workload.page_size)
            .max_len(NOISE_TOKENS)
            .build();
        let mut cache = self.backend.create_cache(&config)?;
        let [in_k, in_v] = workload.appended_elements().map(|row| NOISE_TOKENS * row);
        cache.append(0, &noise(1, in_k), &noise(2, in_v))?;
        let mut home = cache.read_back(0)?;
        let residuals = home.split_off(cache.table().pages[0].len());
        Ok([home, residuals])
    }

    /// One cache whose sequences all hold the same tokens, at places of their own.
    fn cache(&self, workload: &Workload, pages: &[Vec<Vec<u8>>; 2]) -> Result<KvCache, Error> {
        let problem = &workload.problem;
        let [in_k, in_v] = workload.appended_elements();
        let (before, room) = match workload.operation {
            Operation::Decode => (0, 0),
            _ => (1, APPENDS),
        };
        let page_size = workload.page_size;
        let config = CacheConfig::builder(workload.format, problem.heads())
            .unit_tensor_scales()
            .centres(false)
            .lens(problem.kv_lens.iter().map(|len| len + room))
            .page_size(page_size)
            .max_q_len(problem.max_q_len().max(64))
            .build();
        let mut cache = self.backend.create_cache(&config)?;
        // Queries are tokens that were appended: pages keep the residuals of the newest alone.
        let queries = problem.max_q_len();
        let open = noise(3, (queries + page_size) * in_k.max(in_v));
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            let len = len - before;
            let full = len.saturating_sub(queries) / page_size;
            let rest = len - full * page_size;
            if full > 0 {
                let tokens = full * page_size;
                let kept = workload.format.residual_pages(page_size, tokens, 0);
                let [home, residuals] = pages;
                let home = home.iter().cycle().take(full);
                let residuals = residuals.iter().cycle().take(kept);
                let own: Vec<Vec<u8>> = home.chain(residuals).cloned().collect();
                cache.restore_pages(b, tokens, &own)?;
            }
            cache.append(b, &open[..rest * in_k], &open[..rest * in_v])?;
        }
        Ok(cache)
    }

    fn caches(&self, workload: &Workload) -> Result<Vec<KvCache>, Error> {
        let pages = self.pages(workload)?;
        let copies = match workload.operation {
            Operation::Append => APPEND_COPIES,
            _ => workload.copies(ROTATED, MOST_COPIES),
        };
        (0..copies).map(|_| self.cache(workload, &pages)).collect()
    }

    fn ends(&self, workload: &Workload) -> Ends {
        let problem = &workload.problem;
        let [in_k, in_v] = workload
            .appended_elements()
            .map(|row| problem.batch() * row);
        Ends {
            q: self.floats(5, problem.q_elements()),
            out: self.floats(6, problem.out_elements()),
            lse: self.floats(7, problem.rows()),
            token: [self.floats(8, in_k), self.floats(9, in_v)],
        }
    }

    /// A buffer of noise.
    fn floats(&self, seed: u32, count: usize) -> wgpu::Buffer {
        self.upload(bytemuck::cast_slice(&noise(seed, count)))
    }

    /// A buffer of these bytes, a multiple of four.
    fn upload(&self, bytes: &[u8]) -> wgpu::Buffer {
        let usage = Usage::STORAGE | Usage::COPY_DST;
        let made = buffer(self.backend.wgpu_device(), bytes.len() as u64, usage);
        self.backend.wgpu_queue().write_buffer(&made, 0, bytes);
        made
    }

    fn decodes(
        &self,
        workload: &Workload,
        steps: &[Prepared],
        runs: usize,
    ) -> Result<Timing, Error> {
        let ends = self.ends(workload);
        self.time(launches(steps.len()), runs, &mut |encoder, i| {
            let step = &steps[i % steps.len()];
            self.backend
                .record(encoder, step, &ends.q, &ends.out, &ends.lse)
        })
    }

    /// Decode steps from contiguous caches, each in buffers of its own.
    fn views(&self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
        let rows = ContiguousCache::new(workload);
        let view = rows.view()?;
        let most = self.backend.wgpu_device().limits().max_buffer_size;
        if view.k().codes.len().max(view.v().codes.len()) as u64 > most {
            return Err(Error::parameter(
                "wgpu: contiguous cache to time",
                format_args!("{} bytes of K", view.k().codes.len()),
                "what the adapter's largest buffer holds",
            ));
        }
        let both = [view.k(), view.v()];
        let copies: Vec<DeviceCopy> = (0..workload.copies(ROTATED, MOST_COPIES))
            .map(|_| DeviceCopy {
                codes: both.map(|rows| self.upload(rows.codes)),
                scales: both.map(|rows| {
                    let bytes = bytemuck::cast_slice(rows.scales);
                    (!rows.scales.is_empty()).then(|| self.upload(bytes))
                }),
            })
            .collect();
        let step = |copy: &DeviceCopy| {
            let [k, v] = [0, 1].map(|i| SideRows {
                codes: &copy.codes[i],
                codes_at: 0,
                code_strides: both[i].code_strides,
                scales: copy.scales[i].as_ref(),
                scales_at: 0,
                scale_strides: both[i].scale_strides,
            });
            let view = DeviceView {
                format: workload.format,
                k,
                v,
                k_tensor_scales: &[],
                v_tensor_scales: &[],
            };
            self.backend.prepare_view(&workload.problem, &view)
        };
        let steps: Vec<_> = copies.iter().map(step).collect::<Result<_, _>>()?;
        let buffers: Vec<Vec<_>> = copies
            .iter()
            .map(|copy| {
                let scales = copy.scales.iter().flatten();
                copy.codes.iter().chain(scales).collect()
            })
            .collect();
        Ok(Measured {
            step: self.decodes(workload, &steps, runs)?,
            ceiling: self.ceiling(workload.bytes(), &buffers, runs)?,
        })
    }

    /// One token to each sequence, and the step after it where it is asked for; the caches grow.
    fn appends(
        &self,
        workload: &Workload,
        caches: &mut [KvCache],
        runs: usize,
    ) -> Result<Timing, Error> {
        let (copies, ends) = (caches.len(), self.ends(workload));
        let count = launches(copies);
        // Every cache grows by as much in each run, the first one included.
        let most = APPENDS / count.div_ceil(copies) - 1;
        let appends: Vec<_> = (0..workload.problem.batch())
            .map(|sequence| Append {
                sequence,
                tokens: 1,
            })
            .collect();
        let mut problem = workload.problem.clone();
        let mut append = |encoder: &mut wgpu::CommandEncoder, i: usize| {
            let cache = &mut caches[i % copies];
            let [k, v] = &ends.token;
            self.backend.record_append(encoder, cache, &appends, k, v)?;
            if workload.operation == Operation::Append {
                return Ok(());
            }
            problem.kv_lens.clone_from(&cache.table().lens);
            let step = self.backend.prepare(&problem, cache)?;
            self.backend
                .record(encoder, &step, &ends.q, &ends.out, &ends.lse)
        };
        self.once(count, &mut append)?;
        self.each(count, runs.min(most), &mut append)
    }

    /// What reads one cache: a bind group per buffer.
    fn readers(&self, buffers: &[&wgpu::Buffer], bytes: usize) -> Vec<wgpu::BindGroup> {
        let mut left = bytes as u64 / 16 * 16;
        let mut groups = Vec::new();
        for data in buffers {
            let size = left.min(data.size() / 16 * 16);
            left -= size;
            let Some(size) = wgpu::BufferSize::new(size) else {
                break;
            };
            let data = wgpu::BufferBinding {
                buffer: data,
                offset: 0,
                size: Some(size),
            };
            let resources = [
                wgpu::BindingResource::Buffer(data),
                self.sums.as_entire_binding(),
            ];
            let entries: Vec<_> = (0..)
                .zip(resources)
                .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource })
                .collect();
            let gpu = self.backend.wgpu_device();
            groups.push(gpu.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &self.read.get_bind_group_layout(0),
                entries: &entries,
            }));
        }
        groups
    }

    /// Microseconds to read `bytes` of one cache's pages and nothing else, taking turns.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn read(&self, caches: &[KvCache], bytes: usize, runs: usize) -> Result<Timing, Error> {
        let buffers: Vec<_> = caches.iter().map(pools).collect();
        self.ceiling(bytes, &buffers, runs)
    }

    fn ceiling(
        &self,
        bytes: usize,
        caches: &[Vec<&wgpu::Buffer>],
        runs: usize,
    ) -> Result<Timing, Error> {
        let readers = caches.iter().map(|c| self.readers(c, bytes));
        let readers: Vec<_> = readers.collect();
        let mut best: Option<Timing> = None;
        for workgroups in READ_GRIDS {
            let timing = self.time(launches(caches.len()), runs, &mut |encoder, i| {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                pass.set_pipeline(&self.read);
                for group in &readers[i % readers.len()] {
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(workgroups, 1, 1);
                }
                Ok(())
            })?;
            if best.is_none_or(|best| timing.median < best.median) {
                best = Some(timing);
            }
        }
        Ok(best.expect("there are grids"))
    }
}

/// The buffers that a pool's pages lie in.
fn pools(cache: &KvCache) -> Vec<&wgpu::Buffer> {
    let pages = cache.store().as_any().downcast_ref::<DevicePages>();
    pages
        .map_or(&[][..], |pages| pages.buffers(0))
        .iter()
        .collect()
}

/// Pieces of work between two timestamps.
fn launches(copies: usize) -> usize {
    copies.max(4)
}

impl Timer for WgpuTimer {
    fn device(&self) -> String {
        let info = self.backend.device();
        let clock = match self.stamps {
            Some(_) => "GPU timestamps",
            None => "the host's clock",
        };
        format!("{BACKEND}: {} ({}); {clock}", info.name, info.detail)
    }

    fn runs(&self) -> usize {
        15
    }

    fn peak(&self) -> Option<f64> {
        Some(self.peak)
    }

    fn most_bytes(&self) -> usize {
        if self.backend.is_software() {
            300_000_000
        } else {
            usize::MAX
        }
    }

    fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error> {
        workload.check_for_caches()?;
        if workload.centres {
            return Err(Error::parameter(
                "cache to time",
                format_args!("one with centres of K"),
                "caches without on this backend, whose pages are filled by `restore_pages`",
            ));
        }
        let measured = self.times(workload, runs)?;
        // Behind the work, when clocks have risen.
        self.measure_peak()?;
        Ok(measured)
    }
}
