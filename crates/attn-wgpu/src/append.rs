//! Appends on the device: which workgroup quantizes which tokens into which page, and the commands.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use attn_core::{
    CacheConfig, Error, PageLayout, TokenWrite,
    arithmetic::{ROUND, ROUND_WEIGHT},
};
use attn_kernels::wgsl::{append::AppendKey, params::AppendParams};
use wgpu::BufferUsages;

use crate::{
    error::{WgpuError, device, no_kernel},
    gpu::Gpu,
    pipeline::{self, Pipeline},
    pool::Pool,
};

/// The append kernels made so far on one device.
#[derive(Default)]
pub(crate) struct AppendPipelines(Mutex<HashMap<AppendKey, Pipeline>>);

impl AppendPipelines {
    fn get(&self, pool: &Pool) -> Result<Pipeline, Error> {
        let key = AppendKey {
            format: pool.layout.format(),
            head_dim: pool.layout.head_dim(),
            page_size: pool.layout.page_size(),
            pools: pool.buffers.len(),
        };
        let mut made = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pipeline) = made.get(&key) {
            return Ok(pipeline.clone());
        }
        let pipeline = pipeline::compile(&pool.gpu, "append", key.text())?;
        made.insert(key, pipeline.clone());
        Ok(pipeline)
    }
}

/// Appends to the pools of one cache.
pub(crate) struct Appender {
    pipelines: Arc<AppendPipelines>,
    /// k_tensor_scale and v_tensor_scale per KV head; 1 for schemes without.
    tensor_scales: Vec<[f32; 2]>,
    /// Kept between appends from the host.
    staging: Option<Staging>,
}

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

/// Jobs that seal, and the others: the first read tail pages that the second write. Sources count from `base` on.
fn jobs(writes: &[TokenWrite], base: usize, page_size: usize) -> [Vec<Job>; 2] {
    let mut jobs: Vec<Job> = Vec::new();
    for write in writes {
        let (token, source) = (write.token as u32, (write.source - base) as u32);
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

/// Refuses writes that the kernel, which looks at none, would carry outside its buffers: pages that the pool lacks, tokens that a page
/// lacks, sources that k and v of `tokens` tokens lack, and a tail page too much or too few.
fn check_writes(
    layout: &PageLayout,
    num_pages: usize,
    writes: &[TokenWrite],
    tokens: usize,
) -> Result<(), Error> {
    let refuse = |what, given: String, allowed| {
        Err(Error::Parameter {
            what,
            given,
            allowed,
        })
    };
    let has_tail = layout.has_tail_page();
    for write in writes {
        let pages = [Some(write.page), write.tail_page];
        if let Some(page) = pages.iter().flatten().find(|p| **p as usize >= num_pages) {
            let given = format!("{page} of {num_pages}");
            return refuse("page to write", given, "a page of the pool");
        }
        if write.tail_page.is_some() != has_tail || write.tail_page == Some(write.page) {
            let given = format!("{:?} beside page {}", write.tail_page, write.page);
            return refuse(
                "tail page",
                given,
                "another page where K is int4-channel, else none",
            );
        }
        if write.token >= layout.page_size() {
            let given = format!("{} of {}", write.token, layout.page_size());
            return refuse("token to write", given, "a token of the page");
        }
        if write.source >= tokens {
            let given = format!("{} of {tokens}", write.source);
            return refuse("source of a token", given, "a token of k and v");
        }
    }
    Ok(())
}

/// Tokens in k and v from the host.
fn tokens_of(row: usize, k: &[f32], v: &[f32]) -> Result<usize, Error> {
    let whole = k.len().next_multiple_of(row);
    for (what, given, needed) in [("k", k.len(), whole), ("v", v.len(), k.len())] {
        if given != needed {
            return Err(Error::Length {
                what,
                given,
                needed,
            });
        }
    }
    Ok(k.len() / row)
}

/// Bytes of K that one launch takes from the host.
const CHUNK_BYTES: usize = 8 << 20;

/// K and V of a launch whose tokens come from the host.
struct Staging {
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    capacity: u64,
}

/// The sources of some writes, from the first to the last.
fn sources_of(writes: &[TokenWrite]) -> Range<usize> {
    let sources = || writes.iter().map(|write| write.source);
    sources().min().unwrap_or(0)..sources().max().map_or(0, |last| last + 1)
}

/// Refuses buffers that cannot hold `tokens` tokens of a cache, or that no kernel can bind.
pub(crate) fn check_buffers(
    pool: &Pool,
    tokens: usize,
    sources: [&wgpu::Buffer; 2],
) -> Result<(), Error> {
    let row = pool.layout.num_kv_heads() * pool.layout.head_dim();
    // What saturates is longer than any buffer.
    let bytes = (tokens as u64).saturating_mul(4 * row as u64);
    let most = pool.gpu.largest_binding();
    for (what, buffer) in ["k", "v"].into_iter().zip(sources) {
        if bytes > buffer.size().min(most) || !buffer.usage().contains(BufferUsages::STORAGE) {
            return Err(device(
                "recording an append",
                WgpuError::Buffer {
                    what,
                    given: format!("has {} bytes, usage {:?}", buffer.size(), buffer.usage()),
                    needed: format!("{bytes} bytes, at most {most}, and usage STORAGE"),
                },
            ));
        }
    }
    Ok(())
}

/// One dispatch with its tables.
struct Launch {
    pipeline: Pipeline,
    group: wgpu::BindGroup,
    grid: [u32; 2],
}

/// Records dispatches.
fn dispatch(
    gpu: &Gpu,
    encoder: &mut wgpu::CommandEncoder,
    launches: &[Launch],
) -> Result<(), Error> {
    gpu.guarded("recording an append", || {
        for launch in launches {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&launch.pipeline);
            pass.set_bind_group(0, &launch.group, &[]);
            pass.dispatch_workgroups(launch.grid[0], launch.grid[1], 2);
        }
    })
}

/// The workgroups of `jobs` jobs in two dimensions, if the device can count them and bind their table.
fn grid(gpu: &Gpu, jobs: usize, heads: usize) -> Result<[usize; 2], Error> {
    let most = gpu.most_workgroups();
    // What saturates exceeds every limit.
    let groups = jobs.saturating_mul(heads);
    let grid_x = groups.min(most);
    let grid_y = groups.div_ceil(grid_x);
    let words = jobs.saturating_mul(8).saturating_add(2 * heads);
    if grid_y > most || words as u64 > gpu.largest_binding() / 4 {
        return Err(no_kernel(
            format!("an append to {jobs} pages of {heads} KV heads"),
            format!("{most} workgroups per dimension; append fewer tokens at once"),
        ));
    }
    Ok([grid_x, grid_y])
}

impl Appender {
    pub fn new(pipelines: Arc<AppendPipelines>, config: &CacheConfig) -> Self {
        let scales = |head: usize| {
            [&config.k_tensor_scales, &config.v_tensor_scales]
                .map(|scales| scales.get(head).copied().unwrap_or(1.0))
        };
        Appender {
            pipelines,
            tensor_scales: (0..config.num_kv_heads).map(scales).collect(),
            staging: None,
        }
    }

    /// Appends tokens from host memory, and submits the work.
    ///
    /// All that asks for memory comes before the first write: a full page sealed half-way through a long append would have lost its tail page.
    pub fn append_from_host(
        &mut self,
        pool: &Pool,
        writes: &[TokenWrite],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error> {
        let gpu = &pool.gpu;
        gpu.alive("appending")?;
        let row = pool.layout.num_kv_heads() * pool.layout.head_dim();
        let tokens = tokens_of(row, k, v)?;
        check_writes(&pool.layout, pool.num_pages, writes, tokens)?;
        let chunks = writes.chunks((CHUNK_BYTES / (4 * row)).max(1));
        let chunks: Vec<_> = chunks.map(|chunk| (sources_of(chunk), chunk)).collect();
        let longest = chunks.iter().map(|(sources, _)| sources.len()).max();
        let Some(longest) = longest else {
            return Ok(());
        };
        let staging = self.staging(pool, 4 * (longest * row) as u64)?;
        let bindings = [&staging.k, &staging.v].map(wgpu::Buffer::as_entire_buffer_binding);
        let launches = chunks
            .iter()
            .map(|(sources, chunk)| self.launches(pool, chunk, sources.start, &bindings))
            .collect::<Result<Vec<_>, _>>()?;
        for ((sources, _), launches) in chunks.iter().zip(&launches) {
            let range = sources.start * row..sources.end * row;
            gpu.guarded("writing tokens", || {
                for (buffer, x) in [(&staging.k, k), (&staging.v, v)] {
                    let bytes = bytemuck::cast_slice(&x[range.clone()]);
                    gpu.queue.write_buffer(buffer, 0, bytes);
                }
            })?;
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            dispatch(gpu, &mut encoder, launches)?;
            gpu.submit("appending", encoder)?;
            // Queued work keeps its staging memory: a long append waits for its pieces.
            if chunks.len() > 1 {
                gpu.wait("appending")?;
            }
        }
        self.staging = Some(staging);
        Ok(())
    }

    /// Buffers of at least `bytes` for K and V: the last ones, if they are long enough.
    fn staging(&mut self, pool: &Pool, bytes: u64) -> Result<Staging, Error> {
        if let Some(last) = self.staging.take().filter(|last| last.capacity >= bytes) {
            return Ok(last);
        }
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
        let most = pool.gpu.largest_binding();
        if bytes > most {
            return Err(no_kernel(
                format!("an append of {bytes} bytes of k"),
                format!("bindings of {most} bytes; append fewer tokens at once"),
            ));
        }
        let capacity = bytes.next_power_of_two().min(most);
        Ok(Staging {
            k: pool.gpu.buffer("attn tokens of k", capacity, usage)?,
            v: pool.gpu.buffer("attn tokens of v", capacity, usage)?,
            capacity,
        })
    }

    /// Records the appends of `writes`, whose sources are tokens of the two buffers; `tokens` of them in each.
    pub fn record(
        &self,
        pool: &Pool,
        encoder: &mut wgpu::CommandEncoder,
        writes: &[TokenWrite],
        tokens: usize,
        sources: [&wgpu::Buffer; 2],
    ) -> Result<(), Error> {
        check_buffers(pool, tokens, sources)?;
        check_writes(&pool.layout, pool.num_pages, writes, tokens)?;
        let row = pool.layout.num_kv_heads() * pool.layout.head_dim();
        let sources = sources.map(|buffer| pipeline::first(buffer, 4 * (tokens * row) as u64));
        let launches = self.launches(pool, writes, 0, &sources)?;
        dispatch(&pool.gpu, encoder, &launches)
    }

    /// The dispatches of checked writes, in order; source `base` is the first token of the two buffers.
    fn launches(
        &self,
        pool: &Pool,
        writes: &[TokenWrite],
        base: usize,
        sources: &[wgpu::BufferBinding<'_>; 2],
    ) -> Result<Vec<Launch>, Error> {
        let pipeline = self.pipelines.get(pool)?;
        jobs(writes, base, pool.layout.page_size())
            .iter()
            .filter(|jobs| !jobs.is_empty())
            .map(|jobs| self.launch(pool, &pipeline, jobs, sources))
            .collect()
    }

    /// One dispatch: its grid, its tables, its bindings.
    fn launch(
        &self,
        pool: &Pool,
        pipeline: &Pipeline,
        jobs: &[Job],
        sources: &[wgpu::BufferBinding<'_>; 2],
    ) -> Result<Launch, Error> {
        let gpu = &pool.gpu;
        let heads = pool.layout.num_kv_heads();
        let [grid_x, grid_y] = grid(gpu, jobs.len(), heads)?;
        let mut table: Vec<u32> = Vec::new();
        for job in jobs {
            table.extend([job.page, job.tail, job.first, job.end, job.source]);
            table.extend([u32::from(job.seals), 0, 0]);
        }
        let params = AppendParams {
            num_jobs: jobs.len() as u32,
            grid_x: grid_x as u32,
            scales_at: table.len() as u32,
            num_kv_heads: heads as u32,
            pages_per_pool: pool.pages_per_buffer,
            round_up: ROUND,
            round_down: ROUND,
            weight_up: ROUND_WEIGHT,
            weight_down: ROUND_WEIGHT,
            zero: 0,
        };
        table.extend(self.tensor_scales.iter().flatten().map(|x| x.to_bits()));
        let params = params.words();
        let params = bytemuck::cast_slice(&params);
        let uniform = gpu.filled("attn append", params, BufferUsages::UNIFORM)?;
        let table = bytemuck::cast_slice(&table);
        let tables = gpu.filled("attn append jobs", table, BufferUsages::STORAGE)?;
        let group = gpu.guarded("binding an append", || {
            let own = [&uniform, &tables].into_iter();
            let own = own.map(wgpu::Buffer::as_entire_buffer_binding);
            let pages = pool.buffers.iter();
            let pages = pages.map(wgpu::Buffer::as_entire_buffer_binding);
            let buffers = own.chain(sources.iter().cloned()).chain(pages);
            pipeline::bind(gpu, pipeline, (0..).zip(buffers))
        })?;
        Ok(Launch {
            pipeline: pipeline.clone(),
            group,
            grid: [grid_x as u32, grid_y as u32],
        })
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{DecodeAttention, KvFormat};
    use attn_cpu::Reference;

    use super::*;

    /// Where a cache with pages of 64 tokens puts `tokens` tokens behind `first` others.
    fn writes(format: KvFormat, first: usize, tokens: usize) -> (PageLayout, Vec<TokenWrite>) {
        let config = CacheConfig::new(format, 1, 64, 1, 300);
        let mut cache = Reference::new().create_cache(&config).unwrap();
        let mut all = Vec::new();
        cache.append_with(&[(0, first)], |_, _| Ok(())).unwrap();
        cache
            .append_with(&[(0, tokens)], |_, writes| {
                all = writes.to_vec();
                Ok(())
            })
            .unwrap();
        (*cache.layout(), all)
    }

    #[test]
    fn a_job_is_the_new_tokens_of_one_page() {
        let spans = |jobs: &[Job]| -> Vec<[u32; 5]> {
            jobs.iter()
                .map(|job| [job.page, job.tail, job.first, job.end, job.source])
                .collect()
        };
        let (_, mut all) = writes(KvFormat::INT4, 60, 72);
        let want = [
            vec![[1, 0, 60, 64, 0], [2, 0, 0, 64, 4]],
            vec![[3, 0, 0, 4, 68]],
        ];
        assert_eq!(jobs(&all, 0, 64).map(|jobs| spans(&jobs)), want);
        all.iter_mut().for_each(|write| write.source += 1000);
        assert_eq!(jobs(&all, 1000, 64).map(|jobs| spans(&jobs)), want);
        let (_, all) = writes(KvFormat::INT8, 0, 64);
        let want = [vec![], vec![[0, 0, 0, 64, 0]]];
        assert_eq!(jobs(&all, 0, 64).map(|jobs| spans(&jobs)), want);
    }

    #[test]
    fn writes_outside_the_pool_or_the_sources_are_refused() {
        type Spoil = fn(&mut TokenWrite);
        for format in [KvFormat::INT8, KvFormat::INT4] {
            let (layout, all) = writes(format, 60, 72);
            let pages = 4;
            check_writes(&layout, pages, &all, 72).unwrap();
            let spoils: [(&str, Spoil); 9] = [
                ("page to write", |write| write.page = 4),
                ("page to write", |write| write.page = u32::MAX),
                ("page to write", |write| write.tail_page = Some(4)),
                ("tail page", |write| write.tail_page = Some(write.page)),
                ("tail page", |write| {
                    write.tail_page = match write.tail_page {
                        Some(_) => None,
                        None => Some(3 - write.page),
                    }
                }),
                ("token to write", |write| write.token = 64),
                ("token to write", |write| write.token = usize::MAX),
                ("source of a token", |write| write.source = 72),
                ("source of a token", |write| write.source = usize::MAX),
            ];
            for (i, (refused, spoil)) in spoils.into_iter().enumerate() {
                for at in [0, 40, 71] {
                    let mut all = all.clone();
                    spoil(&mut all[at]);
                    match check_writes(&layout, pages, &all, 72) {
                        Err(Error::Parameter { what, .. }) => assert_eq!(what, refused, "{i}"),
                        other => panic!("{refused} {i} of token {at}: {other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn k_and_v_from_the_host_are_whole_tokens_of_one_count() {
        assert_eq!(tokens_of(64, &[0.0; 128], &[0.0; 128]).unwrap(), 2);
        for (k, v, refused) in [(127, 127, "k"), (128, 64, "v"), (64, 128, "v")] {
            match tokens_of(64, &[0.0; 128][..k], &[0.0; 128][..v]) {
                Err(Error::Length { what, .. }) => assert_eq!(what, refused),
                other => panic!("{k}, {v}: {other:?}"),
            }
        }
    }
}
