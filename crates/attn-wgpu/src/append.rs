//! Appends on the device: which workgroup quantizes which tokens into which page, and the commands.

use std::collections::HashMap;
use std::sync::Mutex;

use attn_core::{
    CacheConfig, Error, KvFormat, PageLayout, TokenWrite,
    arithmetic::{ROUND, ROUND_WEIGHT},
};
use wgpu::BufferUsages;

use crate::{
    error::{WgpuError, device},
    gpu::Gpu,
    launch::refuse,
    shader::{self, Pipeline},
    specialise::{Constants, SpecialiseError},
    store::DevicePages,
};

/// Everything that chooses constants of the append kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AppendKey {
    pub format: KvFormat,
    pub head_dim: usize,
    pub page_size: usize,
    /// Storage buffers that the pool lies in.
    pub pools: usize,
}

impl AppendKey {
    fn of(pages: &DevicePages) -> Self {
        AppendKey {
            format: pages.layout.format(),
            head_dim: pages.layout.head_dim(),
            page_size: pages.layout.page_size(),
            pools: pages.buffers.len(),
        }
    }

    fn constants(&self) -> Constants {
        let layout = shader::one_head(self.format, self.head_dim, self.page_size);
        let mut constants = shader::layout_constants(&layout);
        let groups = [self.format.k, self.format.v].map(|scheme| scheme.groups(self.head_dim));
        constants.insert("AG".to_owned(), groups[0].max(groups[1]) as i64);
        constants.insert("POOLS".to_owned(), self.pools as i64);
        constants
    }

    /// The kernel's text.
    pub fn text(&self) -> Result<String, SpecialiseError> {
        shader::kernel_text("append.wgsl", &self.constants())
    }
}

/// The kernels made so far on one device.
#[derive(Default)]
pub(crate) struct Appends(Mutex<HashMap<AppendKey, Pipeline>>);

impl Appends {
    fn get(&self, gpu: &Gpu, key: AppendKey) -> Result<Pipeline, Error> {
        let mut made = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pipeline) = made.get(&key) {
            return Ok(pipeline.clone());
        }
        let text = key
            .text()
            .map_err(|e| device("specialising a kernel", WgpuError::from(e)))?;
        let pipeline = shader::compile(gpu, "append", text)?;
        made.insert(key, pipeline.clone());
        Ok(pipeline)
    }
}

/// `Params` of `append.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    num_jobs: u32,
    grid_x: u32,
    scales_at: u32,
    num_kv_heads: u32,
    pages_per_pool: u32,
    round_up: f32,
    round_down: f32,
    weight_up: f32,
    weight_down: f32,
    zero: u32,
}

const _: () = assert!(
    size_of::<Params>() == 40,
    "append.wgsl's Params has 10 words"
);

/// The new tokens of one page; a job of `append.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    page: u32,
    tail: u32,
    first: u32,
    end: u32,
    source: u32,
    seals: bool,
}

/// Jobs that seal, and the others: the first read tail pages that the second write.
fn jobs(writes: &[TokenWrite], page_size: usize) -> [Vec<Job>; 2] {
    let mut jobs: Vec<Job> = Vec::new();
    for write in writes {
        let (token, source) = (write.token as u32, write.source as u32);
        let seals = write.tail_page.is_some() && write.fills(page_size);
        match jobs.last_mut() {
            Some(job)
                if job.page == write.page
                    && job.end == token
                    && job.source + (token - job.first) == source =>
            {
                job.end = token + 1;
                job.seals = seals;
            }
            _ => jobs.push(Job {
                page: write.page,
                tail: write.tail_page.unwrap_or(0),
                first: token,
                end: token + 1,
                source,
                seals,
            }),
        }
    }
    let (sealing, open) = jobs.into_iter().partition(|job| job.seals);
    [sealing, open]
}

/// Bytes of K that one launch takes from the host.
const CHUNK_BYTES: usize = 8 << 20;

/// K and V of a launch whose tokens come from the host.
pub(crate) struct Staging {
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    capacity: u64,
}

/// Appends tokens from host memory, and submits that.
pub(crate) fn from_host(
    pages: &mut DevicePages,
    writes: &[TokenWrite],
    k: &[f32],
    v: &[f32],
) -> Result<(), Error> {
    let row = pages.layout.num_kv_heads() * pages.layout.head_dim();
    for chunk in writes.chunks((CHUNK_BYTES / (4 * row)).max(1)) {
        let Some(first) = chunk.iter().map(|write| write.source).min() else {
            continue;
        };
        let end = chunk.iter().map(|write| write.source + 1).max();
        let range = first * row..end.unwrap_or(first) * row;
        let mut moved = chunk.to_vec();
        moved.iter_mut().for_each(|write| write.source -= first);
        let staging = staging(pages, 4 * range.len() as u64)?;
        let gpu = pages.gpu.clone();
        gpu.guarded("writing tokens", || {
            gpu.queue
                .write_buffer(&staging.k, 0, bytemuck::cast_slice(&k[range.clone()]));
            gpu.queue
                .write_buffer(&staging.v, 0, bytemuck::cast_slice(&v[range]));
        })?;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        record(pages, &mut encoder, &moved, [&staging.k, &staging.v])?;
        gpu.submit("appending", encoder)?;
        // Queued work keeps its staging memory: a long append waits for its pieces.
        if writes.len() > chunk.len() {
            gpu.wait("appending")?;
        }
        pages.staging = Some(staging);
    }
    Ok(())
}

/// Buffers of at least `bytes` for K and V: the last ones, if they are long enough.
fn staging(pages: &mut DevicePages, bytes: u64) -> Result<Staging, Error> {
    if let Some(last) = pages.staging.take().filter(|last| last.capacity >= bytes) {
        return Ok(last);
    }
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
    let capacity = bytes.next_power_of_two();
    Ok(Staging {
        k: pages.gpu.buffer("attn tokens of k", capacity, usage)?,
        v: pages.gpu.buffer("attn tokens of v", capacity, usage)?,
        capacity,
    })
}

/// Refuses buffers that cannot hold `tokens` tokens of a cache.
pub(crate) fn check_buffers(
    layout: &PageLayout,
    tokens: usize,
    sources: [&wgpu::Buffer; 2],
) -> Result<(), Error> {
    let bytes = 4 * (tokens * layout.num_kv_heads() * layout.head_dim()) as u64;
    for (what, buffer) in ["k", "v"].into_iter().zip(sources) {
        if buffer.size() < bytes || !buffer.usage().contains(BufferUsages::STORAGE) {
            return Err(device(
                "recording an append",
                WgpuError::Buffer {
                    what,
                    given: format!("has {} bytes, usage {:?}", buffer.size(), buffer.usage()),
                    needed: format!("{bytes} bytes and usage STORAGE"),
                },
            ));
        }
    }
    Ok(())
}

/// Records the appends of `writes`, whose sources are tokens of the two buffers; their sizes are checked.
pub(crate) fn record(
    pages: &DevicePages,
    encoder: &mut wgpu::CommandEncoder,
    writes: &[TokenWrite],
    sources: [&wgpu::Buffer; 2],
) -> Result<(), Error> {
    let gpu = &pages.gpu;
    let pipeline = gpu.appends.get(gpu, AppendKey::of(pages))?;
    for jobs in jobs(writes, pages.layout.page_size()) {
        if !jobs.is_empty() {
            launch(pages, encoder, &pipeline, &jobs, sources)?;
        }
    }
    Ok(())
}

/// Records one dispatch.
fn launch(
    pages: &DevicePages,
    encoder: &mut wgpu::CommandEncoder,
    pipeline: &Pipeline,
    jobs: &[Job],
    sources: [&wgpu::Buffer; 2],
) -> Result<(), Error> {
    let gpu = &pages.gpu;
    let heads = pages.layout.num_kv_heads();
    let most = gpu.limits.max_compute_workgroups_per_dimension as usize;
    let grid_x = (jobs.len() * heads).min(most);
    let grid_y = (jobs.len() * heads).div_ceil(grid_x);
    if grid_y > most {
        return Err(refuse(
            format!("an append to {} pages of {heads} KV heads", jobs.len()),
            format!("{most} workgroups per dimension; append fewer tokens at once"),
        ));
    }
    let mut table: Vec<u32> = Vec::new();
    for job in jobs {
        table.extend([job.page, job.tail, job.first, job.end, job.source]);
        table.extend([u32::from(job.seals), 0, 0]);
    }
    let params = Params {
        num_jobs: jobs.len() as u32,
        grid_x: grid_x as u32,
        scales_at: table.len() as u32,
        num_kv_heads: heads as u32,
        pages_per_pool: pages.pages_per_buffer,
        round_up: ROUND,
        round_down: ROUND,
        weight_up: ROUND_WEIGHT,
        weight_down: ROUND_WEIGHT,
        zero: 0,
    };
    table.extend(pages.tensor_scales.iter().flatten().map(|x| x.to_bits()));
    let params = bytemuck::bytes_of(&params);
    let uniform = gpu.filled("attn append", params, BufferUsages::UNIFORM)?;
    let table = bytemuck::cast_slice(&table);
    let tables = gpu.filled("attn append jobs", table, BufferUsages::STORAGE)?;
    gpu.guarded("recording an append", || {
        let buffers = [&uniform, &tables, sources[0], sources[1]];
        let buffers = buffers.into_iter().chain(&pages.buffers);
        let group = shader::bind(gpu, pipeline, (0..).zip(buffers));
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(grid_x as u32, grid_y as u32, 2);
    })
}

/// k_tensor_scale and v_tensor_scale per KV head; 1 for schemes without.
pub(crate) fn tensor_scales(config: &CacheConfig) -> Vec<[f32; 2]> {
    (0..config.num_kv_heads)
        .map(|head| {
            [&config.k_tensor_scales, &config.v_tensor_scales]
                .map(|scales| scales.get(head).copied().unwrap_or(1.0))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use attn_core::{HostPages, KvCache, PageStore};

    use super::*;

    /// Where `tokens` tokens behind the `first` ones go, on pages of 64 tokens.
    fn writes(format: KvFormat, first: usize, tokens: usize) -> Vec<TokenWrite> {
        let config = CacheConfig::new(format, 1, 64, 1, first + tokens);
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        cache.append_with(&[(0, first)], |_, _| Ok(())).unwrap();
        let mut all = Vec::new();
        let write = |_: &dyn PageStore, writes: &[TokenWrite]| {
            all = writes.to_vec();
            Ok(())
        };
        cache.append_with(&[(0, tokens)], write).unwrap();
        all
    }

    #[test]
    fn a_job_is_the_new_tokens_of_one_page() {
        let sealed = writes(KvFormat::INT4, 60, 72);
        let pages: Vec<u32> = [0, 10, 70].map(|i| sealed[i].page).into();
        let [sealing, open] = jobs(&sealed, 64);
        let spans = |jobs: &[Job]| -> Vec<[u32; 4]> {
            jobs.iter()
                .map(|job| [job.page, job.first, job.end, job.source])
                .collect()
        };
        assert_eq!(
            spans(&sealing),
            [[pages[0], 60, 64, 0], [pages[1], 0, 64, 4]]
        );
        assert_eq!(spans(&open), [[pages[2], 0, 4, 68]]);
        let [sealing, open] = jobs(&writes(KvFormat::INT8, 0, 64), 64);
        assert_eq!((sealing.len(), spans(&open)), (0, vec![[0, 0, 64, 0]]));
    }
}
