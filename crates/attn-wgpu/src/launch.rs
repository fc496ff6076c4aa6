//! A decode step on the device: which workgroup does what, the buffers it needs, and the commands.

use attn_core::{
    Error, Problem, Unsupported,
    arithmetic::{LOG2_E, ROUND, ROUND_WEIGHT, SPAN, TILE, segment_tiles},
};
use bytemuck::Zeroable;
use wgpu::BufferUsages;

use crate::{
    error::{BACKEND, WgpuError, device},
    gpu::Gpu,
    shader::{DecodeKey, Layout, Pipeline, Pipelines, bind},
};

/// `Params` of `pages.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    num_items: u32,
    grid_x: u32,
    row_blocks: u32,
    items_at: u32,
    sequences_at: u32,
    scales_at: u32,
    num_q_heads: u32,
    num_kv_heads: u32,
    heads_per_kv: u32,
    q_len: u32,
    causal: u32,
    window_left: i32,
    pages_per_pool: u32,
    unused: u32,
    maxima_at: u32,
    log2_scale: f32,
    softcap_inner: f32,
    softcap_outer: f32,
    batch: u32,
    round_up: f32,
    round_down: f32,
    weight_up: f32,
    weight_down: f32,
    zero: u32,
}

const _: () = assert!(
    size_of::<Params>() == 96,
    "pages.wgsl's Params has 24 words"
);

impl Params {
    /// What follows from the problem alone.
    fn of(problem: &Problem) -> Self {
        let softcap = problem.softcap.unwrap_or(1.0);
        Params {
            num_q_heads: problem.num_q_heads as u32,
            num_kv_heads: problem.num_kv_heads as u32,
            heads_per_kv: problem.heads_per_kv() as u32,
            q_len: problem.q_len as u32,
            causal: u32::from(problem.causal),
            // A window longer than any sequence is none.
            window_left: problem.window_left.map_or(-1, |w| w.min(1 << 30) as i32),
            log2_scale: problem.softmax_scale * LOG2_E,
            softcap_inner: 2.0 / softcap,
            softcap_outer: softcap * LOG2_E,
            batch: problem.batch() as u32,
            round_up: ROUND,
            round_down: ROUND,
            weight_up: ROUND_WEIGHT,
            weight_down: ROUND_WEIGHT,
            ..Zeroable::zeroed()
        }
    }
}

fn row_blocks(problem: &Problem, rows: usize) -> usize {
    (problem.heads_per_kv() * problem.q_len).div_ceil(rows)
}

/// Workgroups below which each takes a tile instead of a segment: they are what a GPU runs at once and waits for.
const FEW_WORKGROUPS: usize = 512;

/// What a workgroup attends: a segment, or a tile that `decode_merge` folds into its segment; never bits' concern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Item {
    Segment,
    Tile,
}

impl Item {
    /// What is asked for, or faster; tiles only where a segment has no more than `decode_merge` folds.
    pub fn choose(problem: &Problem, rows: usize, asked: Option<Item>) -> Self {
        let few = Item::Segment.all(problem, rows) < FEW_WORKGROUPS;
        let short = |&len: &usize| segment_tiles(len) == SPAN;
        match asked.unwrap_or(if few { Item::Tile } else { Item::Segment }) {
            Item::Tile if problem.kv_lens.iter().all(short) => Item::Tile,
            _ => Item::Segment,
        }
    }

    fn tiles(self, kv_len: usize) -> usize {
        match self {
            Item::Segment => segment_tiles(kv_len),
            Item::Tile => 1,
        }
    }

    pub fn per_segment(self) -> usize {
        match self {
            Item::Segment => 1,
            Item::Tile => SPAN,
        }
    }

    /// Workgroups of `decode_merge` for a row.
    fn merge_parts(self, problem: &Problem) -> usize {
        match self {
            Item::Segment => 1,
            Item::Tile => problem.head_dim.div_ceil(32),
        }
    }

    fn of_sequence(self, kv_len: usize) -> usize {
        kv_len.div_ceil(TILE).div_ceil(self.tiles(kv_len))
    }

    /// Of all sequences.
    fn count(self, problem: &Problem) -> usize {
        let lens = problem.kv_lens.iter();
        lens.map(|&len| self.of_sequence(len)).sum()
    }

    /// Workgroups, and states of as many rows: of all sequences, KV heads and blocks of rows.
    fn all(self, problem: &Problem, rows: usize) -> usize {
        self.count(problem) * problem.num_kv_heads * row_blocks(problem, rows)
    }
}

/// Splits per (sequence, KV head) of the longest sequence, and bytes of states.
pub(crate) fn cost(problem: &Problem, key: &DecodeKey) -> (usize, usize) {
    let longest = problem.kv_lens.iter().map(|&len| key.item.of_sequence(len));
    (
        longest.max().unwrap_or(0).max(1),
        key.item.all(problem, key.rows) * key.rows * (key.head_dim + 2) * 4,
    )
}

/// A step that is ready to be recorded: its tables and workspace lie on the device.
///
/// Valid until the cache it was prepared on is appended to, freed from or dropped.
pub struct Prepared {
    pipelines: [Pipeline; 2],
    params: wgpu::Buffer,
    tables: wgpu::Buffer,
    states: wgpu::Buffer,
    /// What is read, from binding 4 on.
    stored: Vec<(u32, wgpu::Buffer)>,
    split_grid: [u32; 3],
    merge_grid: [u32; 3],
    pub(crate) out_elems: u64,
    pub(crate) lse_elems: u64,
}

/// What a step reads, beside the queries.
pub(crate) struct Source<'a> {
    pub layout: Layout,
    /// Buffers and their bindings.
    pub stored: Vec<(u32, wgpu::Buffer)>,
    pub pages_per_pool: u32,
    /// Of each sequence its pages, or where a view's rows lie (`view.wgsl`).
    pub lists: &'a [Vec<u32>],
    pub tail_pages: &'a [Option<u32>],
    pub k_tensor_scales: &'a [f32],
    pub v_tensor_scales: &'a [f32],
}

/// The refusal of what no kernel can take.
pub(crate) fn refuse(what: String, built: String) -> Error {
    Unsupported::NoKernel {
        backend: BACKEND,
        what,
        built,
    }
    .into()
}

/// What the kernels look up: items, sequences, their pages (or rows), scales and slopes, as `pages.wgsl` says.
struct Tables {
    words: Vec<u32>,
    sequences_at: usize,
    scales_at: usize,
}

impl Tables {
    fn new(problem: &Problem, source: &Source<'_>, item: Item) -> Self {
        let mut words: Vec<u32> = Vec::new();
        let sequences_at = 8 * item.count(problem);
        let first_page = sequences_at + 8 * problem.batch();
        let mut pages_at = Vec::new();
        let mut next = first_page;
        for list in &source.lists[..problem.batch()] {
            pages_at.push(next);
            next += list.len();
        }
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            let tail = source.tail_pages.get(b).copied().flatten().unwrap_or(0) as usize;
            for index in 0..item.of_sequence(len) {
                let about = [b, index, len, item.tiles(len), pages_at[b], tail, 0, 0];
                words.extend(about.map(|x| x as u32));
            }
        }
        let mut first_item = 0;
        for &len in &problem.kv_lens {
            let items = item.of_sequence(len);
            words.extend([first_item as u32, items as u32, 0, 0, 0, 0, 0, 0]);
            first_item += items;
        }
        for list in &source.lists[..problem.batch()] {
            words.extend(list);
        }
        let scales_at = words.len();
        let scale = |scales: &[f32], g: usize| scales.get(g).copied().unwrap_or(1.0).to_bits();
        for g in 0..problem.num_kv_heads {
            words.push(scale(source.k_tensor_scales, g));
            words.push(scale(source.v_tensor_scales, g));
        }
        let slopes = problem.alibi_slopes.iter().flatten();
        words.extend(slopes.map(|slope| (slope * LOG2_E).to_bits()));
        Tables {
            words,
            sequences_at,
            scales_at,
        }
    }
}

impl Prepared {
    pub(crate) fn new(
        gpu: &Gpu,
        pipelines: &Pipelines,
        problem: &Problem,
        source: &Source<'_>,
    ) -> Result<Self, Error> {
        let key = pipelines.key(gpu, problem, source.layout);
        let (rows, blocks) = (key.rows, row_blocks(problem, key.rows));
        let items = key.item.count(problem);
        let most = gpu.limits.max_compute_workgroups_per_dimension as usize;
        let grid_x = items.clamp(1, most);
        if problem.num_kv_heads * blocks > most || problem.batch() > most {
            return Err(refuse(
                format!(
                    "{} KV heads, {} sequences",
                    problem.num_kv_heads,
                    problem.batch()
                ),
                format!("{most} workgroups per dimension; attend fewer at once"),
            ));
        }

        let tables = Tables::new(problem, source, key.item);
        let states = key.item.all(problem, rows) * rows;
        let maxima_at = states * problem.head_dim;
        let params = Params {
            num_items: items as u32,
            grid_x: grid_x as u32,
            row_blocks: blocks as u32,
            sequences_at: tables.sequences_at as u32,
            scales_at: tables.scales_at as u32,
            pages_per_pool: source.pages_per_pool,
            maxima_at: maxima_at as u32,
            ..Params::of(problem)
        };
        let states_bytes = (states * (problem.head_dim + 2) * 4) as u64;
        let largest = gpu.limits.max_storage_buffer_binding_size;
        for (what, bytes) in [
            ("states", states_bytes),
            ("page tables", 4 * tables.words.len() as u64),
            ("queries", (problem.rows() * problem.head_dim * 4) as u64),
        ] {
            if bytes > largest {
                return Err(refuse(
                    format!("{what} of {bytes} bytes"),
                    format!("bindings of {largest} bytes; attend fewer sequences at once"),
                ));
            }
        }
        let pipelines = pipelines.decode(gpu, &key)?;
        let params = bytemuck::bytes_of(&params);
        let words = bytemuck::cast_slice(&tables.words);
        Ok(Prepared {
            pipelines,
            params: gpu.filled("attn params", params, BufferUsages::UNIFORM)?,
            tables: gpu.filled("attn tables", words, BufferUsages::STORAGE)?,
            states: gpu.buffer("attn states", states_bytes, BufferUsages::STORAGE)?,
            stored: source.stored.clone(),
            split_grid: [
                grid_x as u32,
                (problem.num_kv_heads * blocks) as u32,
                items.div_ceil(grid_x) as u32,
            ],
            merge_grid: [
                (problem.heads_per_kv() * problem.q_len * key.item.merge_parts(problem)) as u32,
                problem.num_kv_heads as u32,
                problem.batch() as u32,
            ],
            out_elems: (problem.rows() * problem.head_dim) as u64,
            lse_elems: problem.rows() as u64,
        })
    }

    /// Records both kernels, or the first alone for a bench; `q`, `out` and `lse` are the caller's storage buffers.
    pub(crate) fn record(
        &self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        q: &wgpu::Buffer,
        out: &wgpu::Buffer,
        lse: &wgpu::Buffer,
        merges: bool,
    ) -> Result<(), Error> {
        for (what, buffer, elems) in [
            ("q", q, self.out_elems),
            ("out", out, self.out_elems),
            ("lse", lse, self.lse_elems),
        ] {
            if buffer.size() < 4 * elems || !buffer.usage().contains(BufferUsages::STORAGE) {
                return Err(device(
                    "recording a step",
                    WgpuError::Buffer {
                        what,
                        given: format!("has {} bytes, usage {:?}", buffer.size(), buffer.usage()),
                        needed: format!("{} bytes and usage STORAGE", 4 * elems),
                    },
                ));
            }
        }
        if self.lse_elems == 0 {
            return Ok(());
        }
        gpu.guarded("recording a step", || {
            let [split, merge] = &self.pipelines;
            let given = (0..).zip([&self.params, &self.tables, q, &self.states]);
            let stored = self.stored.iter().map(|(at, buffer)| (*at, buffer));
            let split_group = bind(gpu, split, given.chain(stored));
            let given = [&self.params, &self.tables, &self.states, out, lse];
            let merge_group = bind(gpu, merge, (0..).zip(given));
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(split);
            pass.set_bind_group(0, &split_group, &[]);
            pass.dispatch_workgroups(self.split_grid[0], self.split_grid[1], self.split_grid[2]);
            if !merges {
                return;
            }
            pass.set_pipeline(merge);
            pass.set_bind_group(0, &merge_group, &[]);
            pass.dispatch_workgroups(self.merge_grid[0], self.merge_grid[1], self.merge_grid[2]);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_workgroups_take_tiles_where_segments_are_short() {
        let item = |kv_lens: &[usize], asked| {
            let problem = Problem::new(32, 8, 128, kv_lens.to_vec());
            Item::choose(&problem, 4, asked)
        };
        for (kv_lens, want) in [
            (&[1][..], Item::Tile),
            (&[8192], Item::Tile),
            (&[8192, 8192], Item::Segment), // 512 workgroups
            (&[1, 65_537], Item::Segment),  // segments of eight tiles
        ] {
            assert_eq!(item(kv_lens, None), want, "{kv_lens:?}");
        }
        assert_eq!(item(&[1], Some(Item::Segment)), Item::Segment);
        assert_eq!(item(&[8192; 64], Some(Item::Tile)), Item::Tile);
        assert_eq!(item(&[65_537], Some(Item::Tile)), Item::Segment);
    }
}
