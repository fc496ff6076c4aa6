//! One step: cut into splits of one span (or one segment) of one KV head, which any thread attends, and merged in one fixed order.

use std::{cell::RefCell, ops::Range};

use attn_core::{
    Error, KvSource, Problem, Scheme, StepInputs, StepOutputs,
    arithmetic::LOG2_E,
    rotation::{rotate_back, rotate_output},
    segments::{SEGMENT, SPAN, TILE, num_segments, num_spans},
};
use rayon::prelude::*;

use crate::{
    float, integer,
    merge::{RowEnd, States, merge},
    query::{self, QueryRows},
    reader::Reader,
    simd::{Dot, Dot16, Isa, Simd, portable::Portable, scalar::Scalar},
    softmax::Modifiers,
    tile::{Fetch, Tile},
    unpack::FP8_UNIT,
};

/// A run of whole segments of one KV head of one sequence.
#[derive(Debug, Clone)]
struct Split {
    b: usize,
    g: usize,
    segments: Range<usize>,
}

/// Memory that a step needs beside its inputs, kept for the next step.
#[derive(Default)]
pub(crate) struct Workspace {
    splits: Vec<Split>,
    /// Index of the first split of each sequence.
    starts: Vec<usize>,
    states: Vec<f32>,
    /// Log-sum-exps that the caller did not ask for.
    unasked_lse: Vec<f32>,
}

/// A thread's own memory.
struct Scratch {
    rows: QueryRows,
    tile: Tile,
    fetch: Fetch,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const {
        RefCell::new(Scratch { rows: QueryRows::new(), tile: Tile::new(), fetch: Fetch::new() })
    };
}

/// Attends the first of the splits, and fetches for the second: writes one state per row to `states`, `[row][dim + 2]`, m and l last.
type Attend = unsafe fn(&StepInputs<'_>, &[Split], &mut Scratch, &mut [f32]) -> Result<(), Error>;

/// Makes one instruction set's kernels: functions that enable its features, one for each arithmetic.
macro_rules! kernels {
    ($(#[$when:meta])* $name:ident, [$($features:literal)?], $dot:expr) => {
        $(#[$when])*
        mod $name {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub fn integer(
                step: &StepInputs<'_>,
                splits: &[Split],
                scratch: &mut Scratch,
                states: &mut [f32],
            ) -> Result<(), Error> {
                attend::<_, true>($dot, step, splits, scratch, states)
            }

            $(#[target_feature(enable = $features)])?
            pub fn float(
                step: &StepInputs<'_>,
                splits: &[Split],
                scratch: &mut Scratch,
                states: &mut [f32],
            ) -> Result<(), Error> {
                attend::<_, false>($dot, step, splits, scratch, states)
            }

            $(#[target_feature(enable = $features)])?
            pub fn epilogue(states: &States<'_>, span: usize, end: RowEnd, out: &mut [f32]) -> f32 {
                crate::merge::epilogue($dot.simd(), states, span, end, out)
            }
        }
    };
}

kernels!(scalar, [], Dot16(Scalar));
kernels!(portable, [], Dot16(Portable));
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    ["avx2,f16c"],
    // SAFETY: the function's own features, which its caller has checked; so below.
    unsafe { crate::simd::avx2::Dot8::new() }
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    ["avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"],
    // SAFETY: as above.
    Dot16(unsafe { crate::simd::avx512::Avx512::new() })
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx512vnni,
    ["avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"],
    // SAFETY: as above.
    unsafe { crate::simd::avx512::Vnni::new() }
);
kernels!(
    #[cfg(target_arch = "aarch64")]
    neon,
    ["neon"],
    // SAFETY: as above.
    Dot16(unsafe { crate::simd::neon::Neon::new() })
);

/// Merges a row's states in spans of so many, writes the output and returns the log-sum-exp.
type Epilogue = unsafe fn(&States<'_>, usize, RowEnd, &mut [f32]) -> f32;

fn kernels(isa: Isa, integer: bool) -> (Attend, Epilogue) {
    macro_rules! of {
        ($name:ident) => {
            match integer {
                true => ($name::integer, $name::epilogue),
                false => ($name::float, $name::epilogue),
            }
        };
    }
    match isa {
        Isa::Scalar => of!(scalar),
        Isa::Portable => of!(portable),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => of!(avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => of!(avx512),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => of!(avx512vnni),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => of!(neon),
        #[allow(unreachable_patterns, reason = "the target decides which sets exist")]
        _ => of!(portable),
    }
}

impl Workspace {
    /// Cuts a problem into splits of `per_split` segments each.
    fn cut(&mut self, problem: &Problem, per_split: usize) {
        self.splits.clear();
        self.starts.clear();
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            self.starts.push(self.splits.len());
            let count = num_segments(len);
            for first in (0..count).step_by(per_split) {
                let segments = first..count.min(first + per_split);
                let splits = (0..problem.num_kv_heads).map(|g| Split {
                    b,
                    g,
                    segments: segments.clone(),
                });
                self.splits.extend(splits);
            }
        }
    }
}

/// Whether a step takes less time on one thread than by waking others, which takes 13 to 40 µs on a virtual machine: so many products
/// for K, and as many for V, take one thread 20 to 50 µs.
pub(crate) fn is_small(problem: &Problem) -> bool {
    const SMALL: usize = 1 << 19;
    let tokens: usize = problem.kv_lens.iter().sum();
    tokens * problem.num_q_heads * problem.q_len * problem.head_dim < SMALL
}

/// Attends a whole step on `isa`, which the caller has found available, and on the `threads` of the rayon pool that it is called in;
/// with one thread rayon has no part in it.
pub(crate) fn decode(
    isa: Isa,
    threads: usize,
    step: &StepInputs<'_>,
    workspace: &mut Workspace,
    StepOutputs { out, lse, .. }: StepOutputs<'_>,
) -> Result<(), Error> {
    let problem = step.problem();
    if problem.batch() > 0 {
        // Refuses another backend's cache before any output is touched.
        Reader::new(step.kv(), 0, 0)?;
    }
    let heads = problem.num_kv_heads;
    let lens = problem.kv_lens.iter();
    let spans: usize = lens.map(|&len| num_spans(len)).sum();
    let per_split = if spans * heads < 4 * threads { 1 } else { SPAN };
    workspace.cut(problem, per_split);
    let chunk = problem.q_len * problem.heads_per_kv() * (problem.head_dim + 2);
    let needed = workspace.splits.len() * chunk;
    if workspace.states.len() < needed {
        workspace.states.resize(needed, 0.0);
    }
    let (attend, epilogue) = kernels(isa, step.plan().format().is_integer());
    let (splits, states) = (&workspace.splits[..], &mut workspace.states[..needed]);
    let run = |(index, states): (usize, &mut [f32])| {
        let splits = &splits[index..];
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the machine has `isa`: `CpuBackend` holds no other.
            unsafe { attend(step, splits, scratch, states) }
        })
    };
    if threads == 1 || splits.len() == 1 {
        let mut chunks = states.chunks_exact_mut(chunk).enumerate();
        chunks.try_for_each(run)?;
    } else {
        let chunks = states.par_chunks_exact_mut(chunk).with_max_len(1);
        chunks.enumerate().try_for_each(run)?;
    }
    // A split of one span has merged its segments.
    let span = if per_split == 1 { SPAN } else { 1 };
    let epilogue = |states: &States<'_>, end: RowEnd, out: &mut [f32]| {
        // SAFETY: as above.
        unsafe { epilogue(states, span, end, out) }
    };
    let mut unasked = std::mem::take(&mut workspace.unasked_lse);
    let lse = match lse {
        Some(lse) => lse,
        None => {
            unasked.resize(problem.rows(), 0.0);
            &mut unasked[..]
        }
    };
    write_rows(step, threads, workspace, epilogue, out, lse);
    workspace.unasked_lse = unasked;
    Ok(())
}

/// Writes every row's output from its states.
fn write_rows(
    step: &StepInputs<'_>,
    threads: usize,
    workspace: &Workspace,
    epilogue: impl Fn(&States<'_>, RowEnd, &mut [f32]) -> f32 + Sync,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let problem = step.problem();
    let (dim, heads, per) = (
        problem.head_dim,
        problem.num_kv_heads,
        problem.heads_per_kv(),
    );
    let (splits, stride) = (workspace.splits.len(), dim + 2);
    let chunk = problem.q_len * per * stride;
    let rotated = step.plan().format().v.is_rotated();
    let row = |row: usize, out: &mut [f32], lse: &mut f32| {
        let (bi, q_head) = (row / problem.num_q_heads, row % problem.num_q_heads);
        let (b, i) = (bi / problem.q_len, bi % problem.q_len);
        let (g, h) = (q_head / per, q_head % per);
        let first = workspace.starts[b];
        let end = workspace.starts.get(b + 1).copied().unwrap_or(splits);
        let states = States {
            all: &workspace.states,
            first: (first + g) * chunk + (i * per + h) * stride,
            step: heads * chunk,
            count: (end - first) / heads,
        };
        let end = RowEnd {
            v_scale: v_scale(step, g),
            sink: problem.sinks.as_ref().map(|sinks| sinks[q_head]),
        };
        *lse = epilogue(&states, end, out);
        if rotated {
            rotate_output(out);
        }
    };
    // Merging is worth threads only where many states meet.
    if threads == 1 || splits * chunk < 1 << 16 {
        for (i, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            row(i, out, lse);
        }
    } else {
        let rows = out.par_chunks_exact_mut(dim).zip(lse).with_min_len(4);
        rows.enumerate()
            .for_each(|(i, (out, lse))| row(i, out, lse));
    }
}

fn v_scale(step: &StepInputs<'_>, g: usize) -> f32 {
    let scales = match step.kv() {
        KvSource::Cache(cache) => &cache.config().v_tensor_scales[..],
        KvSource::View(view) => view.v_tensor_scales(),
    };
    scales.get(g).copied().unwrap_or(1.0)
}

/// One split's inputs: a KV head of a sequence, and what its query rows see of it.
struct SplitInputs<'a> {
    problem: &'a Problem,
    split: &'a Split,
    reader: Reader<'a>,
    kv_len: usize,
    /// The tokens that any query row sees.
    seen: Range<usize>,
    /// 2/softcap and softcap · log2 e.
    softcap: Option<[f32; 2]>,
    /// Tiles of K's and of V's window.
    windows: [usize; 2],
}

/// Query tokens that read a tile alike.
struct Pass {
    queries: Range<usize>,
    /// Whether K, V are read with residuals.
    fine: [bool; 2],
}

/// A tile of a split: its first token, and how many it has.
#[derive(Clone, Copy)]
struct TilePlace {
    t0: usize,
    tokens: usize,
}

impl<'a> SplitInputs<'a> {
    #[inline(always)]
    fn new(step: &StepInputs<'a>, split: &'a Split) -> Result<Self, Error> {
        let (problem, format) = (step.problem(), step.plan().format());
        let seen = (0..problem.q_len)
            .map(|i| problem.visible(split.b, i))
            .filter(|seen| !seen.is_empty())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
            .unwrap_or(0..0);
        Ok(SplitInputs {
            problem,
            split,
            reader: Reader::new(step.kv(), split.b, split.g)?,
            kv_len: problem.kv_lens[split.b],
            seen,
            softcap: problem.softcap.map(|cap| [2.0 / cap, cap * LOG2_E]),
            windows: [format.k, format.v].map(|scheme| scheme.window().tiles()),
        })
    }

    /// The tiles of a segment that any query row sees.
    #[inline(always)]
    fn tiles(&self, segment: usize) -> impl Iterator<Item = TilePlace> {
        let (kv_len, seen) = (self.kv_len, &self.seen);
        let segment_tokens = SEGMENT * TILE;
        let tokens = segment * segment_tokens..kv_len.min((segment + 1) * segment_tokens);
        tokens
            .step_by(TILE)
            .map(move |t0| TilePlace {
                t0,
                tokens: TILE.min(kv_len - t0),
            })
            .filter(|tile| tile.t0 < seen.end && tile.t0 + tile.tokens > seen.start)
    }

    /// The tokens of a tile that a query row of a pass sees, counted from the tile's first one; none for other rows.
    #[inline(always)]
    fn seen_in(&self, tile: TilePlace, pass: &Pass) -> impl Fn(usize) -> [usize; 2] {
        let (problem, b, per) = (self.problem, self.split.b, self.problem.heads_per_kv());
        let TilePlace { t0, tokens } = tile;
        let queries = pass.queries.clone();
        move |row| {
            if !queries.contains(&(row / per)) {
                return [0, 0];
            }
            let seen = problem.visible(b, row / per);
            [
                seen.start.max(t0) - t0,
                seen.end.min(t0 + tokens).max(t0) - t0,
            ]
        }
    }

    /// The query tokens that read a tile alike, with and without residuals of K and V: query tokens of one step may lie in several tiles.
    #[inline(always)]
    fn passes(&self, tile: TilePlace) -> impl Iterator<Item = Pass> {
        let windows = self.windows;
        let (q_len, first) = (
            self.problem.q_len,
            self.kv_len as isize - self.problem.q_len as isize,
        );
        let (causal, t0) = (self.problem.causal, tile.t0 / TILE);
        let fine = move |i: usize| {
            let i = if causal { i } else { q_len - 1 };
            let position = (first + i as isize).max(0) as usize;
            windows.map(|tiles| tiles > 0 && position / TILE < t0 + tiles)
        };
        let mut next = 0;
        std::iter::from_fn(move || {
            if next == q_len {
                return None;
            }
            let (start, fine_here) = (next, fine(next));
            while next < q_len && fine(next) == fine_here {
                next += 1;
            }
            Some(Pass {
                queries: start..next,
                fine: fine_here,
            })
        })
    }

    /// Whether any query token of a pass sees any token of the tile.
    #[inline(always)]
    fn sees(&self, tile: TilePlace, pass: &Pass) -> bool {
        let mut seen = pass
            .queries
            .clone()
            .map(|i| self.problem.visible(self.split.b, i));
        seen.any(|seen| seen.start < tile.t0 + tile.tokens && seen.end > tile.t0)
    }

    /// The score modifiers of a query row in a tile.
    #[inline(always)]
    fn modifiers_in(&self, tile: TilePlace) -> impl Fn(usize) -> Modifiers {
        let (problem, per) = (self.problem, self.problem.heads_per_kv());
        let (softcap, kv_len, first_row) = (self.softcap, self.kv_len, self.split.g * per);
        move |row| Modifiers {
            softcap,
            alibi: problem.alibi_slopes.as_ref().map(|slopes| {
                let position = kv_len as i32 - problem.q_len as i32 + (row / per) as i32;
                (
                    slopes[first_row + row % per] * LOG2_E,
                    tile.t0 as i32 - position,
                )
            }),
        }
    }
}

/// Where the thread reads next, for prefetching: the tiles of its split, then the first tile of the split after it, which the same
/// thread most likely takes.
struct Ahead<'a> {
    /// The end of this split's tokens that any query row sees.
    last: usize,
    kv_len: usize,
    following: Option<(Reader<'a>, TilePlace)>,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn new(step: &StepInputs<'a>, inputs: &SplitInputs<'_>, next: Option<&Split>) -> Self {
        let segment_tokens = SEGMENT * TILE;
        let following = next.and_then(|next| {
            let reader = Reader::new(step.kv(), next.b, next.g).ok()?;
            let kv_len = inputs.problem.kv_lens[next.b];
            let t0 = next.segments.start * SEGMENT * TILE;
            let tokens = TILE.min(kv_len - t0);
            Some((reader, TilePlace { t0, tokens }))
        });
        Ahead {
            last: inputs
                .seen
                .end
                .min(inputs.split.segments.end * segment_tokens),
            kv_len: inputs.kv_len,
            following,
        }
    }

    /// Aims the prefetches at the tile behind `tile`.
    #[inline(always)]
    fn aim(&self, fetch: &mut Fetch, reader: &Reader<'_>, tile: TilePlace) {
        let t0 = tile.t0 + TILE;
        match &self.following {
            _ if t0 < self.last => fetch.aim(reader, t0, TILE.min(self.kv_len - t0)),
            Some((reader, tile)) => fetch.aim(reader, tile.t0, tile.tokens),
            None => fetch.idle(),
        }
    }
}

/// Attends the first of the splits; see [`Attend`].
#[inline(always)]
fn attend<D: Dot, const INTEGER: bool>(
    d: D,
    step: &StepInputs<'_>,
    splits: &[Split],
    scratch: &mut Scratch,
    states: &mut [f32],
) -> Result<(), Error> {
    let s = d.simd();
    let inputs = SplitInputs::new(step, &splits[0])?;
    let ahead = Ahead::new(step, &inputs, splits.get(1));
    load_queries::<_, INTEGER>(s, step, &inputs, &mut scratch.rows);
    let v_unit = float_unit(step.plan().format().v);
    if INTEGER {
        let groups = step.plan().format().k.groups(scratch.rows.dim);
        query::prepare(d, &mut scratch.rows, groups);
    }
    for (n, segment) in inputs.split.segments.clone().enumerate() {
        clear_state(&mut scratch.rows);
        for tile in inputs.tiles(segment) {
            for pass in inputs.passes(tile) {
                if !inputs.sees(tile, &pass) {
                    continue;
                }
                if INTEGER {
                    fold_integer_tile(d, &inputs, &ahead, tile, &pass, scratch);
                } else {
                    fold_float_tile(s, &inputs, &ahead, tile, &pass, scratch, v_unit);
                }
            }
        }
        merge_segment(s, &scratch.rows, n == 0, states);
    }
    Ok(())
}

/// The factor by which the float arithmetic reads a scheme's values too small (`unpack`).
#[inline(always)]
fn float_unit(scheme: Scheme) -> f32 {
    match scheme {
        Scheme::Fp8E4m3 => FP8_UNIT,
        _ => 1.0,
    }
}

/// Sets the rows to `q'` of section 3, `[q_len · heads_per_kv][dim]`.
#[inline(always)]
fn load_queries<S: Simd, const INTEGER: bool>(
    _: S,
    step: &StepInputs<'_>,
    inputs: &SplitInputs<'_>,
    rows: &mut QueryRows,
) {
    let (problem, split, format) = (inputs.problem, inputs.split, step.plan().format());
    let (dim, per) = (problem.head_dim, problem.heads_per_kv());
    let count = problem.q_len * per;
    rows.reserve(count, dim, format.v.groups(dim));
    let c = (problem.softmax_scale * LOG2_E) * inputs.reader.tensor_scales[0];
    let out = &mut rows.q.as_mut_slice()[..count * dim];
    for (i, out) in out.chunks_exact_mut(per * dim).enumerate() {
        let from = ((split.b * problem.q_len + i) * problem.num_q_heads + split.g * per) * dim;
        let rows = &step.q()[from..][..per * dim];
        out.iter_mut().zip(rows).for_each(|(out, q)| *out = q * c);
    }
    let k_unit = float_unit(format.k);
    if !INTEGER && k_unit != 1.0 {
        out.iter_mut().for_each(|q| *q *= k_unit);
    }
    if format.k.is_rotated() {
        out.chunks_exact_mut(dim).for_each(rotate_back);
    }
}

/// Empties the rows' states.
#[inline(always)]
fn clear_state(rows: &mut QueryRows) {
    let (count, dim) = (rows.count, rows.dim);
    rows.m.as_mut_slice()[..count].fill(f32::NEG_INFINITY);
    rows.l.as_mut_slice()[..count].fill(0.0);
    rows.o.as_mut_slice()[..count * dim].fill(0.0);
}

/// Folds a tile into the states of a pass's rows in the float arithmetic.
#[inline(always)]
fn fold_float_tile<S: Simd>(
    s: S,
    inputs: &SplitInputs<'_>,
    ahead: &Ahead<'_>,
    place: TilePlace,
    pass: &Pass,
    Scratch { rows, tile, fetch }: &mut Scratch,
    v_unit: f32,
) {
    let at = [place.t0, place.tokens];
    tile.load_float(s, &inputs.reader, at, rows.dim, pass.fine);
    ahead.aim(fetch, &inputs.reader, place);
    let (seen, modifiers) = (inputs.seen_in(place, pass), inputs.modifiers_in(place));
    // SAFETY: `load_float` has pointed the tile to as many readable tokens as it has.
    unsafe { float::fold_tile(s, tile, fetch, rows, seen, modifiers, v_unit) };
}

/// Folds a tile into the states of a pass's rows in the integer arithmetic.
#[inline(always)]
fn fold_integer_tile<D: Dot>(
    d: D,
    inputs: &SplitInputs<'_>,
    ahead: &Ahead<'_>,
    place: TilePlace,
    pass: &Pass,
    Scratch { rows, tile, fetch }: &mut Scratch,
) {
    let at = [place.t0, place.tokens];
    tile.load_integer(d.simd(), &inputs.reader, at, rows.dim, pass.fine);
    ahead.aim(fetch, &inputs.reader, place);
    let (seen, modifiers) = (inputs.seen_in(place, pass), inputs.modifiers_in(place));
    // SAFETY: `load_integer` has pointed the tile to as many readable tokens as it has; the rows are prepared for its K.
    unsafe { integer::fold_tile(d, tile, fetch, rows, seen, modifiers) };
}

/// Merges the rows' states of a segment into the split's `states`, which the first segment sets.
#[inline(always)]
fn merge_segment<S: Simd>(s: S, rows: &QueryRows, is_first: bool, states: &mut [f32]) {
    let dim = rows.dim;
    let (m, l, o) = (rows.m.as_slice(), rows.l.as_slice(), rows.o.as_slice());
    for (r, state) in states.chunks_exact_mut(dim + 2).enumerate() {
        let (state_o, ml) = state.split_at_mut(dim);
        let (right, right_o) = ([m[r], l[r]], &o[r * dim..][..dim]);
        if is_first {
            state_o.copy_from_slice(right_o);
            ml.copy_from_slice(&right);
        } else {
            let mut left = [ml[0], ml[1]];
            merge(s, &mut left, state_o, right, right_o);
            ml.copy_from_slice(&left);
        }
    }
}
