//! A decode step on the device: which workgroup does what, the buffers it needs, and the commands.

use attn_core::{
    Error, Problem, Unsupported,
    arithmetic::{LOG2_E, ROUND, ROUND_WEIGHT, TILE, segment_tiles},
};
use bytemuck::Zeroable;
use wgpu::BufferUsages;

use crate::{
    error::{BACKEND, WgpuError, device},
    gpu::Gpu,
    shader::{DecodeKey, DeviceKey, Layout, Pipeline, Pipelines, bind, decode_key, split_name},
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

/// One run of segments of one sequence, never bits' concern.
struct Item {
    sequence: usize,
    first_segment: usize,
    segments: usize,
    /// Where the state of its first segment goes.
    slot: usize,
}

fn segments(kv_len: usize) -> usize {
    kv_len.div_ceil(TILE).div_ceil(segment_tiles(kv_len))
}

fn row_blocks(problem: &Problem, rows: usize) -> usize {
    (problem.heads_per_kv() * problem.q_len).div_ceil(rows)
}

/// States that a step leaves: one per segment, KV head and block of rows.
fn slots(problem: &Problem, rows: usize) -> usize {
    let lens = problem.kv_lens.iter();
    let all: usize = lens.map(|&len| segments(len)).sum();
    all * problem.num_kv_heads * row_blocks(problem, rows)
}

/// Segments that a workgroup takes. Packed products: one, as a span of them in its hands would cost workgroup memory, and with it 1.5 times
/// the time (H200, int8, ctx 8192, batch 512). Matrices: several once there are workgroups enough, as each begins with the query.
fn segments_per_item(problem: &Problem, key: &DecodeKey, most: Option<usize>) -> usize {
    if split_name(key) == "decode_split" {
        return 1;
    }
    (slots(problem, key.rows) / 4096).clamp(1, most.unwrap_or(4).max(1))
}

fn items(problem: &Problem, per_item: usize) -> Vec<Item> {
    let mut items = Vec::new();
    let mut slot = 0;
    for (sequence, &len) in problem.kv_lens.iter().enumerate() {
        let all = segments(len);
        items.extend((0..all).step_by(per_item).map(|first_segment| Item {
            sequence,
            first_segment,
            segments: per_item.min(all - first_segment),
            slot: slot + first_segment,
        }));
        slot += all;
    }
    items
}

/// Splits per (sequence, KV head) of the longest sequence, and bytes of states.
pub(crate) fn cost(problem: &Problem, key: &DecodeKey) -> (usize, usize) {
    let longest = problem.kv_lens.iter().map(|&len| segments(len)).max();
    let slots = slots(problem, key.rows);
    (
        longest.unwrap_or(0).max(1),
        slots * key.rows * (key.head_dim + 2) * 4,
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
    fn new(problem: &Problem, source: &Source<'_>, items: &[Item]) -> Self {
        let mut words: Vec<u32> = Vec::new();
        let sequences_at = 8 * items.len();
        let first_page = sequences_at + 8 * problem.batch();
        let mut pages_at = Vec::new();
        let mut next = first_page;
        for list in &source.lists[..problem.batch()] {
            pages_at.push(next);
            next += list.len();
        }
        for item in items {
            let (b, len) = (item.sequence, problem.kv_lens[item.sequence]);
            let tail = source.tail_pages.get(b).copied().flatten().unwrap_or(0) as usize;
            let item = [
                b,
                item.first_segment,
                item.segments,
                len,
                segment_tiles(len),
                pages_at[b],
                tail,
                item.slot,
            ];
            words.extend(item.map(|x| x as u32));
        }
        let mut first_slot = 0;
        for &len in &problem.kv_lens {
            words.extend([first_slot as u32, segments(len) as u32, 0, 0, 0, 0, 0, 0]);
            first_slot += segments(len);
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
        let tuning = &pipelines.tuning;
        let key = decode_key(
            problem,
            source.layout,
            DeviceKey::of(gpu, tuning),
            tuning.rows.unwrap_or(8),
        );
        let (rows, blocks) = (key.rows, row_blocks(problem, key.rows));
        let items = items(problem, segments_per_item(problem, &key, tuning.segments));
        let most = gpu.limits.max_compute_workgroups_per_dimension as usize;
        let grid_x = items.len().clamp(1, most);
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

        let tables = Tables::new(problem, source, &items);
        let slots = slots(problem, rows);
        let maxima_at = slots * rows * problem.head_dim;
        let params = Params {
            num_items: items.len() as u32,
            grid_x: grid_x as u32,
            row_blocks: blocks as u32,
            sequences_at: tables.sequences_at as u32,
            scales_at: tables.scales_at as u32,
            pages_per_pool: source.pages_per_pool,
            maxima_at: maxima_at as u32,
            ..Params::of(problem)
        };
        let states_bytes = (slots * rows * (problem.head_dim + 2) * 4) as u64;
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
                items.len().div_ceil(grid_x) as u32,
            ],
            merge_grid: [
                (problem.heads_per_kv() * problem.q_len) as u32,
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
