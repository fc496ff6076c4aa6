//! A decode step on the device: its tables, buffers and grids, and the commands.

use std::sync::Arc;

use attn_core::{
    Error, PageTable, Problem, QueryBlock,
    arithmetic::{LOG2_E, ROUND, sink_state},
    problem::FEW_TOKENS,
};
use attn_kernels::wgsl::{
    decode::{DecodeKey, KvLayout},
    params::DecodeParams,
    split::{Split, row_blocks},
};
use wgpu::BufferUsages;

use crate::{
    error::{BACKEND, WgpuError, device, no_kernel},
    gpu::Gpu,
    pipeline::{Pipeline, Pipelines, Stored, bind, first},
};

/// The parameters that follow from the problem alone.
fn problem_params(problem: &Problem) -> DecodeParams {
    let softcap = problem.scores.softcap.unwrap_or(1.0);
    let [window_left, chunk] = problem.scores.kernel_masks();
    DecodeParams {
        num_q_heads: problem.num_q_heads as u32,
        num_kv_heads: problem.num_kv_heads as u32,
        heads_per_kv: problem.heads_per_kv() as u32,
        causal: u32::from(problem.scores.causal),
        window_left,
        chunk,
        log2_scale: problem.score_scale() * LOG2_E,
        softcap_inner: 2.0 / softcap,
        softcap_outer: softcap * LOG2_E,
        round_up: ROUND,
        round_down: ROUND,
        ..DecodeParams::default()
    }
}

/// Bytes of the partials that a step leaves between its kernels; a number that saturates exceeds every limit.
fn partials_bytes(problem: &Problem, key: &DecodeKey) -> usize {
    let of_split = key.rows * (key.head_dim.v + 2) * 4;
    key.split
        .partials(problem, key.rows)
        .saturating_mul(of_split)
}

/// A step that is ready to be recorded: its tables and workspace lie on the device.
///
/// Valid until the cache it was prepared on is appended to, freed from or dropped.
pub struct Prepared {
    gpu: Arc<Gpu>,
    pipelines: [Pipeline; 2],
    launches: Vec<LaunchOfBlocks>,
    partials: wgpu::Buffer,
    /// The cache's buffers, from binding 4 on.
    stored: Vec<Stored>,
    pub(crate) q_elems: u64,
    pub(crate) out_elems: u64,
    pub(crate) lse_elems: u64,
}

/// The cache that a step reads: its layout, buffers, pages and scales.
pub(crate) struct KvTables<'a> {
    pub layout: KvLayout,
    /// The cache's buffers and their bindings.
    pub stored: Vec<Stored>,
    pub pages_per_pool: u32,
    /// The sequences' pages, and the number of pages in the pool; none for a view.
    pub pages: Option<(&'a PageTable, usize)>,
    /// The pages of each sequence, or the places of a view's rows (`view.wgsl`).
    pub lists: &'a [Vec<u32>],
    /// Slots of the residual pages of a sequence: those of its first tile, and the ring of later ones.
    pub residual_slots: usize,
    pub k_tensor_scales: &'a [f32],
    pub v_tensor_scales: &'a [f32],
}

impl KvTables<'_> {
    /// Refuses pages that would lead the kernels, which check none, outside the pool.
    fn check(&self, problem: &Problem) -> Result<(), Error> {
        let KvLayout {
            format, page_size, ..
        } = self.layout;
        self.pages.map_or(Ok(()), |(table, num_pages)| {
            table.check(problem, format, page_size, num_pages)
        })
    }

    /// The sequence of the cache that sequence `b` is, whose centres of K it has.
    fn sequence(&self, b: usize) -> usize {
        let table = self.pages.map(|(table, _)| table);
        let sequence = table.and_then(|table| table.sequences.get(b));
        sequence.copied().unwrap_or(0)
    }

    /// Slots of later tiles' residual pages, which lie behind those of the first tile.
    fn residual_ring(&self) -> usize {
        let KvLayout {
            format, page_size, ..
        } = self.layout;
        self.residual_slots - format.first_residual_pages(page_size)
    }

    /// The residual pages of sequence `b` in their slots.
    fn residual_slots_of(&self, b: usize) -> Vec<u32> {
        let mut slots = vec![0; self.residual_slots];
        if let Some((table, _)) = self.pages {
            table.fill_residual_slots(b, &mut slots);
        }
        slots
    }
}

/// The tables of the kernels: splits, query blocks, the pages (or rows) and residual pages, scales, slopes and sinks, in the form that `decode_split.wgsl` describes.
struct Tables {
    words: Vec<u32>,
    blocks_at: usize,
    scales_at: usize,
    /// 0 without sinks.
    sinks_at: usize,
}

impl Tables {
    fn new(problem: &Problem, blocks: &[QueryBlock], source: &KvTables<'_>, split: Split) -> Self {
        let mut words: Vec<u32> = Vec::new();
        let splits_of = |block: &QueryBlock| split.of_sequence(block.seen_len(problem));
        let blocks_at = 8 * blocks.iter().map(splits_of).sum::<usize>();
        let first_page = blocks_at + 8 * blocks.len();
        let mut pages_at = Vec::new();
        let mut next = first_page;
        for list in &source.lists[..problem.batch()] {
            pages_at.push(next);
            next += list.len();
        }
        let slots = source.residual_slots;
        for (n, block) in blocks.iter().enumerate() {
            let b = block.sequence;
            let (kv_len, behind) = match problem.scores.causal {
                true => (block.seen_len(problem), 0),
                false => (problem.kv_lens[b], block.behind),
            };
            for index in 0..splits_of(block) {
                let about = [n, index, kv_len, pages_at[b], next + b * slots];
                words.extend(about.map(|x| x as u32));
                words.extend([block.first, block.tokens, behind].map(|x| x as u32));
            }
        }
        let mut first_split = 0;
        for block in blocks {
            let splits = splits_of(block);
            let sequence = source.sequence(block.sequence);
            let about = [
                first_split,
                splits,
                block.first,
                block.tokens,
                sequence,
                0,
                0,
                0,
            ];
            words.extend(about.map(|x| x as u32));
            first_split += splits;
        }
        for list in &source.lists[..problem.batch()] {
            words.extend(list);
        }
        for b in 0..problem.batch() {
            words.extend(source.residual_slots_of(b));
        }
        let scales_at = words.len();
        let scale = |scales: &[f32], g: usize| scales.get(g).copied().unwrap_or(1.0).to_bits();
        for g in 0..problem.num_kv_heads {
            words.push(scale(source.k_tensor_scales, g));
            words.push(scale(source.v_tensor_scales, g));
        }
        let slopes = problem.scores.alibi_slopes.iter().flatten();
        words.extend(slopes.map(|slope| (slope * LOG2_E).to_bits()));
        let sinks_at = problem.scores.sinks.as_ref().map_or(0, |_| words.len());
        let sinks = problem.scores.sinks.iter().flatten();
        words.extend(sinks.flat_map(|sink| sink_state(*sink)).map(f32::to_bits));
        Tables {
            words,
            blocks_at,
            scales_at,
            sinks_at,
        }
    }
}

/// What needs a larger binding than the device has.
fn too_large(what: &str, bytes: usize, gpu: &Gpu) -> Error {
    no_kernel(
        format!("{what} of {bytes} bytes"),
        format!(
            "bindings of {} bytes; attend fewer sequences at once",
            gpu.largest_binding()
        ),
    )
}

/// The grids of both kernels. Grids, partials and tables beyond the device's limits are refused before anything is allocated;
/// numbers that saturate exceed every limit.
fn check_sizes(
    gpu: &Gpu,
    problem: &Problem,
    key: &DecodeKey,
    source: &KvTables<'_>,
) -> Result<[[u32; 3]; 2], Error> {
    // Of a problem whose sequences are query blocks.
    let (heads, batch) = (problem.num_kv_heads, problem.batch());
    let most = gpu.most_workgroups();
    let splits = key.split.count(problem);
    let grid_x = splits.clamp(1, most);
    let of_head = heads.saturating_mul(row_blocks(problem, key.rows));
    let merges = problem.heads_per_kv() * problem.max_q_len() * key.merge_parts();
    let split_grid = [grid_x, of_head, splits.div_ceil(grid_x)];
    let merge_grid = [merges, heads, batch];
    if split_grid
        .iter()
        .chain(&merge_grid)
        .any(|workgroups| *workgroups > most)
    {
        return Err(no_kernel(
            format!("{heads} KV heads, {batch} sequences, {splits} splits"),
            format!("{most} workgroups per dimension; attend fewer at once"),
        ));
    }
    let slopes = problem.scores.alibi_slopes.as_ref().map_or(0, Vec::len);
    let sinks = problem.scores.sinks.as_ref().map_or(0, Vec::len);
    let lists = source.lists.iter().map(Vec::len);
    let words = [
        splits.saturating_mul(8),
        8 * batch,
        source.lists.len().saturating_mul(source.residual_slots),
        2 * heads,
        slopes,
        2 * sinks,
    ];
    let words = lists.chain(words).fold(0, usize::saturating_add);
    let largest = gpu.largest_binding();
    for (what, bytes) in [
        ("partials", partials_bytes(problem, key)),
        ("page tables", words.saturating_mul(4)),
    ] {
        if bytes as u64 > largest {
            return Err(too_large(what, bytes, gpu));
        }
    }
    Ok([split_grid, merge_grid].map(|grid| grid.map(|workgroups| workgroups as u32)))
}

/// Most bytes of partials between the kernels of one launch, unless a single query block has more.
const MOST_PARTIALS: usize = 128 << 20;

/// Query tokens of a block: all of a sequence where they are few, else as many as a workgroup has rows for.
fn block_tokens(problem: &Problem) -> usize {
    match problem.max_q_len() {
        0..=FEW_TOKENS => FEW_TOKENS,
        _ => 8 / problem.heads_per_kv().clamp(1, 8),
    }
}

/// Query blocks that one launch attends.
fn most_blocks(gpu: &Gpu, problem: &Problem, blocks: &[QueryBlock], key: &DecodeKey) -> usize {
    if problem.max_q_len() <= FEW_TOKENS {
        return blocks.len().max(1);
    }
    let longest = blocks.iter().max_by_key(|block| block.seen_len(problem));
    let alone = longest.map_or(0, |block| {
        partials_bytes(&problem.of_blocks(std::slice::from_ref(block)), key)
    });
    (MOST_PARTIALS.min(gpu.largest_binding() as usize) / alone.max(1))
        .clamp(1, gpu.most_workgroups())
}

/// The kernels' launch for some query blocks.
struct LaunchOfBlocks {
    params: wgpu::Buffer,
    tables: wgpu::Buffer,
    split_grid: [u32; 3],
    merge_grid: [u32; 3],
}

impl LaunchOfBlocks {
    /// The launch, and the bytes of its partials.
    fn new(
        gpu: &Gpu,
        problem: &Problem,
        blocks: &[QueryBlock],
        key: &DecodeKey,
        source: &KvTables<'_>,
    ) -> Result<(Self, usize), Error> {
        let launched = problem.of_blocks(blocks);
        let grids = check_sizes(gpu, &launched, key, source)?;
        let tables = Tables::new(problem, blocks, source, key.split);
        let partials = key.split.partials(&launched, key.rows) * key.rows;
        let params = DecodeParams {
            num_splits: key.split.count(&launched) as u32,
            grid_x: grids[0][0],
            row_blocks: row_blocks(&launched, key.rows) as u32,
            blocks_at: tables.blocks_at as u32,
            num_blocks: blocks.len() as u32,
            scales_at: tables.scales_at as u32,
            sinks_at: tables.sinks_at as u32,
            pages_per_pool: source.pages_per_pool,
            residual_ring: source.residual_ring() as u32,
            maxima_at: (partials * problem.head_dim.v) as u32,
            ..problem_params(problem)
        };
        let params = params.words();
        let params = bytemuck::cast_slice(&params);
        let words = bytemuck::cast_slice(&tables.words);
        let launch = LaunchOfBlocks {
            params: gpu.filled("attn params", params, BufferUsages::UNIFORM)?,
            tables: gpu.filled("attn tables", words, BufferUsages::STORAGE)?,
            split_grid: grids[0],
            merge_grid: grids[1],
        };
        Ok((launch, partials_bytes(&launched, key)))
    }
}

impl Prepared {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        pipelines: &Pipelines,
        problem: &Problem,
        source: &KvTables<'_>,
    ) -> Result<Self, Error> {
        source.check(problem)?;
        // Before a list of their blocks is made.
        let sizes = [problem.q_elements(), problem.out_elements()];
        for (what, elements) in ["queries", "outputs"].into_iter().zip(sizes) {
            let bytes = elements.saturating_mul(4);
            if bytes as u64 > gpu.largest_binding() {
                return Err(too_large(what, bytes, gpu));
            }
        }
        let blocks: Vec<QueryBlock> = problem.query_blocks(block_tokens(problem)).collect();
        let key = pipelines.key(gpu, &problem.of_blocks(&blocks), source.layout);
        let most = most_blocks(gpu, problem, &blocks, &key);
        let mut launches = Vec::new();
        let mut largest = 0;
        for blocks in blocks.chunks(most) {
            let (launch, partials) = LaunchOfBlocks::new(gpu, problem, blocks, &key, source)?;
            launches.push(launch);
            largest = largest.max(partials);
        }
        Ok(Prepared {
            gpu: gpu.clone(),
            pipelines: pipelines.decode(gpu, &key)?,
            launches,
            partials: gpu.buffer("attn partials", largest as u64, BufferUsages::STORAGE)?,
            stored: source.stored.clone(),
            q_elems: problem.q_elements() as u64,
            out_elems: problem.out_elements() as u64,
            lse_elems: problem.rows() as u64,
        })
    }

    /// Records both kernels, or only the split kernel for benchmarks; `q`, `out` and `lse` are the caller's storage buffers.
    pub(crate) fn record(
        &self,
        gpu: &Arc<Gpu>,
        encoder: &mut wgpu::CommandEncoder,
        [q, out, lse]: [&wgpu::Buffer; 3],
        merges: bool,
    ) -> Result<(), Error> {
        gpu.alive("recording a step")?;
        if !Arc::ptr_eq(&self.gpu, gpu) {
            return Err(Error::WrongBackend {
                backend: BACKEND,
                what: "prepared step",
            });
        }
        let most = gpu.largest_binding();
        for (what, buffer, elems) in [
            ("q", q, self.q_elems),
            ("out", out, self.out_elems),
            ("lse", lse, self.lse_elems),
        ] {
            if 4 * elems > buffer.size().min(most)
                || !buffer.usage().contains(BufferUsages::STORAGE)
            {
                return Err(device(
                    "recording a step",
                    WgpuError::Buffer {
                        what,
                        given: format!("has {} bytes, usage {:?}", buffer.size(), buffer.usage()),
                        needed: format!("{} bytes, at most {most}, and usage STORAGE", 4 * elems),
                    },
                ));
            }
        }
        if self.lse_elems == 0 {
            return Ok(());
        }
        gpu.guarded("recording a step", || {
            let [split, merge] = &self.pipelines;
            let own = wgpu::Buffer::as_entire_buffer_binding;
            let [q_bytes, out_bytes, lse_bytes] =
                [self.q_elems, self.out_elems, self.lse_elems].map(|elems| 4 * elems);
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for launch in &self.launches {
                let (params, tables, partials) = (
                    own(&launch.params),
                    own(&launch.tables),
                    own(&self.partials),
                );
                let stored = self.stored.iter();
                let stored = stored.map(|s| (s.binding, first(&s.buffer, s.bytes)));
                let given = [
                    params.clone(),
                    tables.clone(),
                    first(q, q_bytes),
                    partials.clone(),
                ];
                let split_group = bind(gpu, split, (0..).zip(given).chain(stored));
                let results = [first(out, out_bytes), first(lse, lse_bytes)];
                let given = [params, tables, partials].into_iter().chain(results);
                let merge_group = bind(gpu, merge, (0..).zip(given));
                let mut dispatch = |pipeline, group, [x, y, z]: [u32; 3]| {
                    pass.set_pipeline(pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.dispatch_workgroups(x, y, z);
                };
                dispatch(split, &split_group, launch.split_grid);
                if merges {
                    dispatch(merge, &merge_group, launch.merge_grid);
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use attn_core::Heads;

    use super::*;

    #[test]
    fn a_window_of_any_length_is_the_cores() {
        let mut problem = Problem::new(Heads::new(1, 1, 64), vec![1 << 20]);
        for (window, passed) in [
            (None, -1),
            (Some(0), 0),
            (Some(5), 5),
            (Some(1 << 30), 1 << 30),
            (Some(1 << 31), 1 << 30),
            (Some(1 << 63), 1 << 30),
            (Some(usize::MAX), 1 << 30),
        ] {
            problem.scores.window_left = window;
            assert_eq!(problem_params(&problem).window_left, passed);
            let first = match passed {
                -1 => 0,
                seen => ((1 << 20) - 1 - seen as i64).max(0) as usize,
            };
            assert_eq!(problem.visible(0, 0), first..1 << 20, "{window:?}");
        }
    }
}
