//! A decode step on the device: which workgroup does what, the buffers it needs, and the commands.

use std::sync::Arc;

use attn_core::{
    Error, Problem, Unsupported,
    arithmetic::{LOG2_E, ROUND, ROUND_WEIGHT, SPAN, TILE, segment_tiles},
};
use bytemuck::Zeroable;
use wgpu::BufferUsages;

use crate::{
    error::{BACKEND, WgpuError, device},
    gpu::Gpu,
    shader::{DecodeKey, Layout, Pipeline, Pipelines, bind, first},
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

    /// Workgroups, and states of as many rows: of all sequences, KV heads and blocks of rows. What saturates exceeds every limit.
    fn all(self, problem: &Problem, rows: usize) -> usize {
        self.count(problem)
            .saturating_mul(problem.num_kv_heads)
            .saturating_mul(row_blocks(problem, rows))
    }
}

/// Bytes of the states that a step leaves between its kernels; what saturates exceeds every limit.
fn states_bytes(problem: &Problem, key: &DecodeKey) -> usize {
    let of_item = key.rows * (key.head_dim + 2) * 4;
    key.item.all(problem, key.rows).saturating_mul(of_item)
}

/// Splits per (sequence, KV head) of the longest sequence, and bytes of states.
pub(crate) fn cost(problem: &Problem, key: &DecodeKey) -> (usize, usize) {
    let longest = problem.kv_lens.iter().map(|&len| key.item.of_sequence(len));
    (
        longest.max().unwrap_or(0).max(1),
        states_bytes(problem, key),
    )
}

/// A step that is ready to be recorded: its tables and workspace lie on the device.
///
/// Valid until the cache it was prepared on is appended to, freed from or dropped.
pub struct Prepared {
    gpu: Arc<Gpu>,
    pipelines: [Pipeline; 2],
    params: wgpu::Buffer,
    tables: wgpu::Buffer,
    states: wgpu::Buffer,
    /// What is read, from binding 4 on.
    stored: Vec<Stored>,
    split_grid: [u32; 3],
    merge_grid: [u32; 3],
    pub(crate) out_elems: u64,
    pub(crate) lse_elems: u64,
}

/// What is read of a buffer, and where a kernel binds it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub binding: u32,
    pub buffer: wgpu::Buffer,
    pub bytes: u64,
}

/// What a step reads, beside the queries.
pub(crate) struct Source<'a> {
    pub layout: Layout,
    /// Buffers and their bindings.
    pub stored: Vec<Stored>,
    pub pages_per_pool: u32,
    /// Pages of the pool; none for a view.
    pub num_pages: Option<usize>,
    /// Of each sequence its pages, or where a view's rows lie (`view.wgsl`).
    pub lists: &'a [Vec<u32>],
    pub tail_pages: &'a [Option<u32>],
    pub k_tensor_scales: &'a [f32],
    pub v_tensor_scales: &'a [f32],
}

impl Source<'_> {
    /// Refuses lists that would lead the kernels, which look at no page, outside the pool.
    fn check(&self, problem: &Problem) -> Result<(), Error> {
        let Some(num_pages) = self.num_pages else {
            return Ok(());
        };
        let outside = |page: &u32| *page as usize >= num_pages;
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            let needed = len.div_ceil(self.layout.page_size);
            let list = self.lists.get(b).map_or(&[][..], |list| list);
            let tail = self.tail_pages.get(b).copied().flatten();
            if list.len() < needed {
                return Err(Error::Length {
                    what: "pages of a sequence",
                    given: list.len(),
                    needed,
                });
            }
            if let Some(page) = list.iter().chain(&tail).find(|page| outside(page)) {
                return Err(Error::Parameter {
                    what: "page",
                    given: format!("{page} of {num_pages}"),
                    allowed: "a page of the pool",
                });
            }
        }
        Ok(())
    }
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

/// The grids of both kernels, if they, the states, the tables and the queries are within the device's limits: before anything is
/// allocated. What saturates exceeds every limit.
fn check_sizes(
    gpu: &Gpu,
    problem: &Problem,
    key: &DecodeKey,
    source: &Source<'_>,
) -> Result<[[u32; 3]; 2], Error> {
    let (heads, batch) = (problem.num_kv_heads, problem.batch());
    let most = gpu.most_workgroups();
    let items = key.item.count(problem);
    let grid_x = items.clamp(1, most);
    let of_head = heads.saturating_mul(row_blocks(problem, key.rows));
    let merges = problem.heads_per_kv() * problem.q_len * key.item.merge_parts(problem);
    let split = [grid_x, of_head, items.div_ceil(grid_x)];
    let merge = [merges, heads, batch];
    if split
        .iter()
        .chain(&merge)
        .any(|workgroups| *workgroups > most)
    {
        return Err(refuse(
            format!("{heads} KV heads, {batch} sequences, {items} items"),
            format!("{most} workgroups per dimension; attend fewer at once"),
        ));
    }
    let rows = batch
        .saturating_mul(problem.q_len)
        .saturating_mul(problem.num_q_heads);
    let slopes = problem.alibi_slopes.as_ref().map_or(0, Vec::len);
    let lists = source.lists.iter().take(batch).map(Vec::len);
    let words = [items.saturating_mul(8), 8 * batch, 2 * heads, slopes];
    let words = lists.chain(words).fold(0, usize::saturating_add);
    let largest = gpu.largest_binding();
    for (what, bytes) in [
        ("states", states_bytes(problem, key)),
        ("page tables", words.saturating_mul(4)),
        ("queries", rows.saturating_mul(4 * problem.head_dim)),
    ] {
        if bytes as u64 > largest {
            return Err(refuse(
                format!("{what} of {bytes} bytes"),
                format!("bindings of {largest} bytes; attend fewer sequences at once"),
            ));
        }
    }
    Ok([split, merge].map(|grid| grid.map(|workgroups| workgroups as u32)))
}

impl Prepared {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        pipelines: &Pipelines,
        problem: &Problem,
        source: &Source<'_>,
    ) -> Result<Self, Error> {
        source.check(problem)?;
        let key = pipelines.key(gpu, problem, source.layout);
        let (rows, blocks) = (key.rows, row_blocks(problem, key.rows));
        let items = key.item.count(problem);
        let grids = check_sizes(gpu, problem, &key, source)?;
        let tables = Tables::new(problem, source, key.item);
        let states = key.item.all(problem, rows) * rows;
        let params = Params {
            num_items: items as u32,
            grid_x: grids[0][0],
            row_blocks: blocks as u32,
            sequences_at: tables.sequences_at as u32,
            scales_at: tables.scales_at as u32,
            pages_per_pool: source.pages_per_pool,
            maxima_at: (states * problem.head_dim) as u32,
            ..Params::of(problem)
        };
        let states_bytes = states_bytes(problem, &key) as u64;
        let pipelines = pipelines.decode(gpu, &key)?;
        let params = bytemuck::bytes_of(&params);
        let words = bytemuck::cast_slice(&tables.words);
        Ok(Prepared {
            gpu: gpu.clone(),
            pipelines,
            params: gpu.filled("attn params", params, BufferUsages::UNIFORM)?,
            tables: gpu.filled("attn tables", words, BufferUsages::STORAGE)?,
            states: gpu.buffer("attn states", states_bytes, BufferUsages::STORAGE)?,
            stored: source.stored.clone(),
            split_grid: grids[0],
            merge_grid: grids[1],
            out_elems: (problem.rows() * problem.head_dim) as u64,
            lse_elems: problem.rows() as u64,
        })
    }

    /// Records both kernels, or the first alone for a bench; `q`, `out` and `lse` are the caller's storage buffers.
    pub(crate) fn record(
        &self,
        gpu: &Arc<Gpu>,
        encoder: &mut wgpu::CommandEncoder,
        [q, out, lse]: [&wgpu::Buffer; 3],
        merges: bool,
    ) -> Result<(), Error> {
        gpu.alive("recording a step")?;
        if !Arc::ptr_eq(&self.gpu, gpu) {
            return Err(Error::Foreign {
                backend: BACKEND,
                what: "prepared step",
            });
        }
        let most = gpu.largest_binding();
        for (what, buffer, elems) in [
            ("q", q, self.out_elems),
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
            let (out_bytes, lse_bytes) = (4 * self.out_elems, 4 * self.lse_elems);
            let (params, tables, states) =
                (own(&self.params), own(&self.tables), own(&self.states));
            let stored = self.stored.iter();
            let stored = stored.map(|s| (s.binding, first(&s.buffer, s.bytes)));
            let given = [
                params.clone(),
                tables.clone(),
                first(q, out_bytes),
                states.clone(),
            ];
            let split_group = bind(gpu, split, (0..).zip(given).chain(stored));
            let results = [first(out, out_bytes), first(lse, lse_bytes)];
            let given = [params, tables, states].into_iter().chain(results);
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
    use attn_core::KvFormat;

    use super::*;

    #[test]
    fn lists_that_lead_outside_the_pool_are_refused() {
        let problem = Problem::new(1, 1, 64, vec![100, 0, 64]);
        let check = |lists: [&[u32]; 3], tails: [Option<u32>; 3], num_pages| {
            Source {
                layout: Layout {
                    format: KvFormat::INT4,
                    page_size: 64,
                    pools: 1,
                    view: false,
                },
                stored: Vec::new(),
                pages_per_pool: 4,
                num_pages,
                lists: &lists.map(<[u32]>::to_vec),
                tail_pages: &tails,
                k_tensor_scales: &[],
                v_tensor_scales: &[],
            }
            .check(&problem)
        };
        let (good, tails) = ([&[0, 2][..], &[], &[3]], [Some(1), None, None]);
        check(good, tails, Some(4)).unwrap();
        for (lists, tails) in [
            ([&[0, 4][..], &[], &[3]], tails),
            ([&[0, 2][..], &[], &[u32::MAX]], tails),
            ([&[0, 2][..], &[], &[3]], [Some(4), None, None]),
            ([&[0][..], &[], &[3]], tails),
            ([&[0, 2][..], &[], &[]], tails),
        ] {
            assert!(check(lists, tails, Some(4)).is_err(), "{lists:?} {tails:?}");
        }
        check([&[9; 12]; 3], tails, None).unwrap();
    }

    #[test]
    fn a_window_of_any_length_is_the_cores() {
        let mut problem = Problem::new(1, 1, 64, vec![1 << 20]);
        for (window, passed) in [
            (None, -1),
            (Some(0), 0),
            (Some(5), 5),
            (Some(1 << 30), 1 << 30),
            (Some(1 << 31), 1 << 30),
            (Some(1 << 63), 1 << 30),
            (Some(usize::MAX), 1 << 30),
        ] {
            problem.window_left = window;
            assert_eq!(Params::of(&problem).window_left, passed);
            let first = match passed {
                -1 => 0,
                seen => ((1 << 20) - 1 - seen as i64).max(0) as usize,
            };
            assert_eq!(problem.visible(0, 0), first..1 << 20, "{window:?}");
        }
    }

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
