//! Appends on the device: the jobs of the workgroups that quantize tokens into pages and make centres of K, and the commands.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use attn_core::{
    CacheConfig, Error, FirstTile, TokenWrite, WideRows,
    arithmetic::ROUND,
    cache::{check_pages, check_writes, tokens_of},
    centres::{CENTRES, centre_of},
    layout::Side,
};
use attn_kernels::wgsl::{
    append::AppendKey,
    params::{AppendParams, CentreParams},
};
use wgpu::BufferUsages;

use crate::{
    error::{WgpuError, device, no_kernel},
    gpu::Gpu,
    pipeline::{self, Pipeline},
    pool::Pool,
};

/// The kernels made so far on one device that write caches.
#[derive(Default)]
pub(crate) struct AppendPipelines(Mutex<HashMap<(&'static str, AppendKey), Pipeline>>);

impl AppendPipelines {
    /// The kernel `append` or `centre` for a pool.
    fn get(&self, name: &'static str, pool: &Pool) -> Result<Pipeline, Error> {
        let key = AppendKey {
            format: pool.layout.format(),
            head_dim: pool.layout.head_dim(),
            page_size: pool.layout.page_size(),
            pools: pool.buffers.len(),
            centres: pool.centres.is_some(),
        };
        let mut made = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(pipeline) = made.get(&(name, key)) {
            return Ok(pipeline.clone());
        }
        let text = key.text(&format!("{name}.wgsl"));
        let pipeline = pipeline::compile(&pool.gpu, name, text)?;
        made.insert((name, key), pipeline.clone());
        Ok(pipeline)
    }
}

/// Appends to the pools of one cache.
pub(crate) struct Appender {
    pipelines: Arc<AppendPipelines>,
    /// k_tensor_scale and v_tensor_scale per KV head of each layer; 1 for schemes without.
    tensor_scales: Vec<Vec<[f32; 2]>>,
    /// Buffers kept between appends from the host.
    staging: Option<Staging>,
}

/// A job of `append.wgsl`: the new tokens of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    page: u32,
    residual_page: Option<u32>,
    first: u32,
    end: u32,
    source: u32,
    /// The centre of K that its keys lack, counted through sequences, and whether its token makes it; nothing in a cache without.
    centre: (u32, bool),
}

/// Words of a job in the table of `append.wgsl`, and of a first tile in that of `centre.wgsl`.
const JOB_WORDS: usize = 8;
const TILE_WORDS: usize = 12;

/// The jobs of some writes.
fn jobs(writes: &[TokenWrite], has_centres: bool) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for write in writes {
        let (token, source) = (write.token as u32, write.source as u32);
        let centre = match has_centres {
            true => {
                let centre = CENTRES * write.sequence + centre_of(write.position);
                (centre as u32, write.position == 0)
            }
            false => (0, false),
        };
        match jobs.last_mut() {
            Some(job)
                if (job.page, job.residual_page) == (write.page, write.residual_page)
                    && job.centre == centre
                    && job.end == token
                    && job.source + (token - job.first) == source =>
            {
                job.end = token + 1;
            }
            _ => jobs.push(Job {
                page: write.page,
                residual_page: write.residual_page,
                first: token,
                end: token + 1,
                source,
                centre,
            }),
        }
    }
    jobs
}

/// Most bytes of K that one launch takes from the host.
const CHUNK_BYTES: usize = 8 << 20;

/// Device buffers for K and V of a launch whose tokens come from the host.
struct Staging {
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    capacity: u64,
}

/// Writes of one launch from the host: their own tokens alone are staged, one behind the other, however far apart they lie.
struct Chunk {
    /// The writes, from the staged rows.
    writes: Vec<TokenWrite>,
    /// The tokens that are staged.
    tokens: Vec<Range<usize>>,
}

impl Chunk {
    fn of(writes: &[TokenWrite]) -> Self {
        let mut tokens: Vec<Range<usize>> = Vec::new();
        for &TokenWrite { source, .. } in writes {
            match tokens.last_mut() {
                Some(run) if run.end == source => run.end += 1,
                _ => tokens.push(source..source + 1),
            }
        }
        let staged = writes.iter().enumerate();
        let staged = staged.map(|(row, write)| at_source(*write, row));
        Chunk {
            writes: staged.collect(),
            tokens,
        }
    }
}

/// A write of another source.
fn at_source(mut write: TokenWrite, source: usize) -> TokenWrite {
    write.source = source;
    write
}

/// Bytes of a token's K, and of its V, in f32; of latents there is no V.
fn row_bytes(pool: &Pool) -> [usize; 2] {
    let shapes = pool.layout.shapes(1);
    shapes.map(|shape| 4 * shape.iter().product::<usize>())
}

/// Refuses buffers that cannot hold `tokens` tokens of a cache, or that no kernel can bind.
pub(crate) fn check_buffers(
    pool: &Pool,
    tokens: usize,
    sources: [&wgpu::Buffer; 2],
) -> Result<(), Error> {
    let most = pool.gpu.largest_binding();
    let sides = ["k", "v"].into_iter().zip(row_bytes(pool));
    for ((what, row), buffer) in sides.zip(sources) {
        // A number that saturates is longer than any buffer.
        let bytes = (tokens as u64).saturating_mul(row as u64);
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
pub(crate) struct Launch {
    pipeline: Pipeline,
    group: wgpu::BindGroup,
    grid: [u32; 3],
}

/// Records a dispatch.
pub(crate) fn dispatch(
    gpu: &Gpu,
    encoder: &mut wgpu::CommandEncoder,
    launch: &Launch,
) -> Result<(), Error> {
    gpu.guarded("recording an append", || {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&launch.pipeline);
        pass.set_bind_group(0, &launch.group, &[]);
        let [x, y, z] = launch.grid;
        pass.dispatch_workgroups(x, y, z);
    })
}

/// The workgroups of `jobs` jobs (or first tiles) in two dimensions, if the device can count them and bind their table of `words` words each.
fn grid(gpu: &Gpu, jobs: usize, heads: usize, words: usize) -> Result<[usize; 2], Error> {
    let most = gpu.most_workgroups();
    // A number that saturates exceeds every limit.
    let groups = jobs.saturating_mul(heads);
    let grid_x = groups.min(most);
    let grid_y = groups.div_ceil(grid_x);
    let words = jobs.saturating_mul(words).saturating_add(2 * heads);
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
        let of_head = |scales: [&[f32]; 2], head: usize| {
            scales.map(|scales| scales.get(head).copied().unwrap_or(1.0))
        };
        let of_layer = |layer| {
            let (scales, heads) = (config.tensor_scales(layer), 0..config.num_kv_heads);
            heads.map(|head| of_head(scales, head)).collect()
        };
        Appender {
            pipelines,
            tensor_scales: (0..config.layers).map(of_layer).collect(),
            staging: None,
        }
    }

    /// Appends tokens from host memory, K and V, to a layer's pool, and submits the work.
    ///
    /// All memory of the device is allocated before the first write, so that an append that fails for want of it has written nothing.
    pub fn append_from_host(
        &mut self,
        pool: &Pool,
        layer: usize,
        writes: &[TokenWrite],
        [k, v]: [WideRows<'_>; 2],
    ) -> Result<(), Error> {
        let gpu = &pool.gpu;
        gpu.alive("appending")?;
        let [in_k, in_v] = row_bytes(pool);
        let row = in_k.max(in_v);
        let tokens = tokens_of(&pool.layout, [k.shape(), v.shape()])?;
        check(pool, writes, tokens)?;
        let most = CHUNK_BYTES.min(gpu.largest_binding() as usize);
        let chunks = writes.chunks((most / row).max(1));
        let chunks: Vec<_> = chunks.map(Chunk::of).collect();
        let longest = chunks.iter().map(|chunk| chunk.writes.len()).max();
        let Some(longest) = longest else {
            return Ok(());
        };
        let staging = self.staging(pool, (longest * row) as u64)?;
        let bindings = [&staging.k, &staging.v].map(wgpu::Buffer::as_entire_buffer_binding);
        let launches = chunks
            .iter()
            .map(|chunk| self.launch(pool, layer, &chunk.writes, &bindings))
            .collect::<Result<Vec<_>, _>>()?;
        for (chunk, launch) in chunks.iter().zip(&launches) {
            for side in pool.layout.format().stored_sides() {
                let (buffer, rows) = match side {
                    Side::K => (&staging.k, &k),
                    Side::V => (&staging.v, &v),
                };
                let rows = rows.gathered(&chunk.tokens)?;
                gpu.guarded("writing tokens", || {
                    gpu.queue
                        .write_buffer(buffer, 0, bytemuck::cast_slice(&rows));
                })?;
            }
            let mut encoder = gpu.device.create_command_encoder(&Default::default());
            dispatch(gpu, &mut encoder, launch)?;
            gpu.submit("appending", encoder)?;
            // Queued work keeps its staging memory, so a long append waits after each chunk.
            if chunks.len() > 1 {
                gpu.wait("appending")?;
            }
        }
        self.staging = Some(staging);
        Ok(())
    }

    /// Buffers of at least `bytes` for K and V: those of the last append if they are long enough.
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

    /// Records the appends of `writes` to a layer's pool, whose sources are among the `tokens` tokens of each of the two buffers.
    pub fn record(
        &self,
        pool: &Pool,
        layer: usize,
        encoder: &mut wgpu::CommandEncoder,
        writes: &[TokenWrite],
        tokens: usize,
        sources: [&wgpu::Buffer; 2],
    ) -> Result<(), Error> {
        check_buffers(pool, tokens, sources)?;
        check(pool, writes, tokens)?;
        let rows = row_bytes(pool);
        let first = |i: usize| pipeline::first(sources[i], (tokens * rows[i]) as u64);
        // A binding has some bytes, where nothing reads it, too.
        let of_v = if rows[1] > 0 { 1 } else { 0 };
        let sources = [first(0), first(of_v)];
        if writes.is_empty() {
            return Ok(());
        }
        let launch = self.launch(pool, layer, writes, &sources)?;
        dispatch(&pool.gpu, encoder, &launch)?;
        pool.unsubmitted.note(encoder, writes);
        Ok(())
    }

    /// The dispatch of checked writes: its grid, tables and bindings.
    fn launch(
        &self,
        pool: &Pool,
        layer: usize,
        writes: &[TokenWrite],
        sources: &[wgpu::BufferBinding<'_>; 2],
    ) -> Result<Launch, Error> {
        let pipeline = self.pipelines.get("append", pool)?;
        let jobs = jobs(writes, pool.centres.is_some());
        let gpu = &pool.gpu;
        let heads = pool.layout.num_kv_heads();
        let [grid_x, grid_y] = grid(gpu, jobs.len(), heads, JOB_WORDS)?;
        let mut table: Vec<u32> = Vec::new();
        for job in &jobs {
            let (residual_page, has_residuals) =
                (job.residual_page.unwrap_or(0), job.residual_page.is_some());
            table.extend([job.page, job.first, job.end, job.source, residual_page]);
            let (centre, makes) = job.centre;
            table.extend([u32::from(has_residuals), centre, u32::from(makes)]);
        }
        let params = AppendParams {
            num_jobs: jobs.len() as u32,
            grid_x: grid_x as u32,
            scales_at: table.len() as u32,
            num_kv_heads: heads as u32,
            pages_per_pool: pool.pages_per_buffer,
            round_up: ROUND,
            round_down: ROUND,
            zero: 0,
        };
        let scales = self.tensor_scales[layer].iter().flatten();
        table.extend(scales.map(|x| x.to_bits()));
        let grid = [grid_x as u32, grid_y as u32, 2];
        bound(pool, pipeline, &params.words(), &table, sources, grid)
    }

    /// The dispatch that makes the second centres of K of sequences whose first tiles lie in a layer's pool.
    pub fn centre(&self, pool: &Pool, tiles: &[FirstTile]) -> Result<Launch, Error> {
        let gpu = &pool.gpu;
        gpu.alive("making centres of K")?;
        check_tiles(pool, tiles)?;
        let pipeline = self.pipelines.get("centre", pool)?;
        let heads = pool.layout.num_kv_heads();
        let [grid_x, grid_y] = grid(gpu, tiles.len(), heads, TILE_WORDS)?;
        let mut table: Vec<u32> = Vec::new();
        for tile in tiles {
            table.extend([tile.sequence as u32, 0, 0, 0]);
            table.extend(tile.pages);
            table.extend(tile.residual_pages.map(|page| page.unwrap_or(0)));
        }
        let params = CentreParams {
            num_tiles: tiles.len() as u32,
            grid_x: grid_x as u32,
            num_kv_heads: heads as u32,
            pages_per_pool: pool.pages_per_buffer,
            round_up: ROUND,
            round_down: ROUND,
            zero: 0,
        };
        let grid = [grid_x as u32, grid_y as u32, 1];
        bound(pool, pipeline, &params.words(), &table, &[], grid)
    }
}

/// A dispatch over a pool: its parameters, its table and the caller's buffers are bound ahead of the pool's.
fn bound(
    pool: &Pool,
    pipeline: Pipeline,
    params: &[u32],
    table: &[u32],
    sources: &[wgpu::BufferBinding<'_>],
    grid: [u32; 3],
) -> Result<Launch, Error> {
    let gpu = &pool.gpu;
    let filled = |name, words: &[u32], usage| gpu.filled(name, bytemuck::cast_slice(words), usage);
    let params = filled("attn append parameters", params, BufferUsages::UNIFORM)?;
    let table = filled("attn append table", table, BufferUsages::STORAGE)?;
    let group = gpu.guarded("binding an append", || {
        let own = [&params, &table].map(wgpu::Buffer::as_entire_buffer_binding);
        let given = own.into_iter().chain(sources.iter().cloned());
        pipeline::bind(gpu, &pipeline, (0..).zip(given).chain(pool.bindings()))
    })?;
    Ok(Launch {
        pipeline,
        group,
        grid,
    })
}

/// Refuses writes by which the append kernel, which checks nothing, would leave the pool, its centres or the sources.
fn check(pool: &Pool, writes: &[TokenWrite], tokens: usize) -> Result<(), Error> {
    check_writes(&pool.layout, pool.num_pages, writes, tokens)?;
    pool.check_sequences(writes.iter().map(|write| write.sequence))
}

/// Refuses first tiles by which the kernel of the second centres would leave the pool or its centres.
fn check_tiles(pool: &Pool, tiles: &[FirstTile]) -> Result<(), Error> {
    let page_bytes = pool.layout.page_bytes();
    for tile in tiles {
        let residual = tile.residual_pages.iter().flatten();
        let pages: Vec<u32> = tile.pages.iter().chain(residual).copied().collect();
        check_pages(
            &pool.layout,
            pool.num_pages,
            &pages,
            pages.len() * page_bytes,
        )?;
    }
    pool.check_sequences(tiles.iter().map(|tile| tile.sequence))
}

#[cfg(test)]
mod tests {
    use attn_core::{Append, Heads};
    use attn_core::{DecodeAttention, KvFormat};
    use attn_cpu::Reference;

    use super::*;

    /// Where a cache with pages of 64 tokens puts `tokens` tokens behind `first` others.
    fn writes(format: KvFormat, first: usize, tokens: usize) -> Vec<TokenWrite> {
        let config = CacheConfig::builder(format, Heads::new(1, 1, 64))
            .unit_tensor_scales()
            .centres(false)
            .sequences(1)
            .max_len(300)
            .build();
        let mut cache = Reference::new().create_cache(&config).unwrap();
        let mut all = Vec::new();
        cache
            .append_with(
                &[Append {
                    sequence: 0,
                    tokens: first,
                }],
                |_, _| Ok(()),
            )
            .unwrap();
        cache
            .append_with(
                &[Append {
                    sequence: 0,
                    tokens,
                }],
                |_, writes| {
                    all = writes.to_vec();
                    Ok(())
                },
            )
            .unwrap();
        all
    }

    #[test]
    fn a_job_is_the_new_tokens_of_one_page() {
        let spans = |jobs: &[Job]| -> Vec<(u32, Option<u32>, [u32; 3])> {
            jobs.iter()
                .map(|job| {
                    (
                        job.page,
                        job.residual_page,
                        [job.first, job.end, job.source],
                    )
                })
                .collect()
        };
        let mut all = writes(KvFormat::INT4, 60, 72);
        let found = spans(&jobs(&all, false));
        let tokens: Vec<_> = found.iter().map(|(_, _, tokens)| *tokens).collect();
        assert_eq!(tokens, [[60, 64, 0], [0, 64, 4], [0, 4, 68]]);
        let mut pages: Vec<u32> = found
            .iter()
            .flat_map(|(page, residual, _)| [*page, residual.unwrap()])
            .collect();
        pages.sort_unstable();
        assert_eq!(pages, [0, 1, 2, 3, 4, 5]);
        all.iter_mut().for_each(|write| write.source += 1000);
        let chunk = Chunk::of(&all);
        assert_eq!(chunk.tokens, std::slice::from_ref(&(1000..1072)));
        assert_eq!(spans(&jobs(&chunk.writes, false)), found);
        let all = writes(KvFormat::INT8, 0, 64);
        assert_eq!(spans(&jobs(&all, false)), [(0, None, [0, 64, 0])]);
    }

    /// Kills staging from the first source to the last: the first tokens of new sequences are written together, and lie as far apart as their prompts are long.
    #[test]
    fn a_chunk_stages_its_own_tokens_alone() {
        let all = writes(KvFormat::INT8, 0, 5);
        let scattered: Vec<_> = [(0, 7), (3, 5000), (1, 8), (2, 9), (4, 3)]
            .map(|(i, source)| at_source(all[i], source))
            .into();
        let chunk = Chunk::of(&scattered);
        assert_eq!(chunk.tokens, [7..8, 5000..5001, 8..10, 3..4]);
        let staged: Vec<_> = chunk.writes.iter().map(|w| (w.token, w.source)).collect();
        assert_eq!(staged, [(0, 0), (3, 1), (1, 2), (2, 3), (4, 4)]);
    }

    /// Kills jobs whose keys lack different centres, which a workgroup takes for one.
    #[test]
    fn the_keys_of_a_job_lack_one_centre() {
        let all = writes(KvFormat::INT8, 0, 66);
        let jobs = jobs(&all, true);
        let found: Vec<_> = jobs
            .iter()
            .map(|job| (job.first, job.end, job.centre))
            .collect();
        assert_eq!(
            found,
            [(0, 1, (0, true)), (1, 64, (0, false)), (0, 2, (1, false))]
        );
    }
}
