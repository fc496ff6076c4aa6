//! One step: cut into splits, which any thread attends, and merged in one fixed order. A split is a block of query tokens against one KV head:
//! against one span of it, or one segment where there is little work, or all of it where there are many query tokens.

mod workspace;

use std::cell::RefCell;

use attn_core::{
    Error, HeadDim, KvMemory, Problem, QueryBlock, Scheme, SpanStates, StepInputs, StepOutputs,
    WideRowsMut, arithmetic::LOG2_E, centres::centre_of, row_state::RowEnd, segments::SPAN,
};
use rayon::prelude::*;

pub(crate) use self::workspace::Workspace;
use self::workspace::grow;
use crate::{
    blocks,
    fetch::{Ahead, Fetch},
    float, float_modes,
    grid::Operations,
    lanes::{LaneCodes, MANY_ROWS},
    merge::{States, merge},
    query::{self, QueryRows},
    reader::Reader,
    rotation::rotate,
    shared::Shared,
    simd::{Dot, Dot16, Isa, Simd, portable::Portable},
    split::{Pass, Split, SplitInputs, TilePlace},
    tile::Tile,
    unpack::FP8_UNIT,
    wide::WideTile,
};

/// A thread's own memory.
struct Scratch {
    rows: QueryRows,
    tile: Tile,
    codes: LaneCodes,
    wide: WideTile,
    fetch: Fetch,
    /// States of a span, of a split that has several: as the split's own.
    span: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const {
        RefCell::new(Scratch {
            rows: QueryRows::new(),
            tile: Tile::new(),
            codes: LaneCodes::new(),
            wide: WideTile::new(),
            fetch: Fetch::new(),
            span: Vec::new(),
        })
    };
}

/// Attends the first of the splits, and fetches for the second: writes one state per row to `states`, `[row][dim + 2]`, m and l last.
type Attend = unsafe fn(&StepInputs<'_>, &[Split], &mut Scratch, &mut [f32]) -> Result<(), Error>;

/// An instruction set's kernels of integers: functions that enable its features.
macro_rules! integers {
    ([$($features:literal)?], $dot:expr) => {
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
        pub fn products(rounds: usize) -> usize {
            crate::peak::products($dot, rounds)
        }
    };
}

/// The others, of its vectors alone.
macro_rules! floats {
    ([$($features:literal)?], $dot:expr) => {
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

        $(#[target_feature(enable = $features)])?
        pub fn operations(inputs: &[[f32; 16]; 3]) -> Operations {
            crate::grid::operations($dot.simd(), inputs)
        }
    };
}

/// Makes one instruction set's kernels; those of floats are another one's where both have the same vectors.
macro_rules! kernels {
    ($(#[$when:meta])* $name:ident, $features:tt, $dot:expr) => {
        $(#[$when])*
        mod $name {
            use super::*;

            integers!($features, $dot);
            floats!($features, $dot);
        }
    };
    ($(#[$when:meta])* $name:ident, $features:tt, $dot:expr, vectors of $other:ident) => {
        $(#[$when])*
        mod $name {
            use super::*;
            pub use super::$other::{epilogue, float, operations};

            integers!($features, $dot);
        }
    };
}

kernels!(portable, [], Dot16(Portable));
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    ["avx2,fma,f16c"],
    // SAFETY: the function's own features, which its caller has checked; so below.
    unsafe { crate::simd::avx2::Dot8::new() }
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    ["avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"],
    // SAFETY: as above.
    Dot16(unsafe { crate::simd::avx512::Avx512::new() })
);
kernels!(
    #[cfg(target_arch = "x86_64")]
    avx512vnni,
    ["avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"],
    // SAFETY: as above.
    unsafe { crate::simd::avx512::Vnni::new() },
    vectors of avx512
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

/// A function of an instruction set's kernels.
macro_rules! of_isa {
    ($isa:expr, $function:ident) => {
        match $isa {
            Isa::Portable => portable::$function,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::$function,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::$function,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => avx512vnni::$function,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::$function,
            #[allow(unreachable_patterns, reason = "the target decides which sets exist")]
            _ => portable::$function,
        }
    };
}

fn kernels(isa: Isa, integer: bool) -> (Attend, Epilogue) {
    let attend: Attend = if integer {
        of_isa!(isa, integer)
    } else {
        of_isa!(isa, float)
    };
    (attend, of_isa!(isa, epilogue))
}

/// Computes `rounds` rounds of products of 8-bit integers as the integer kernels do, and returns how many products a round has.
pub(crate) fn products(isa: Isa, rounds: usize) -> usize {
    let products: unsafe fn(usize) -> usize = of_isa!(isa, products);
    // SAFETY: the machine has `isa`: `CpuBackend` holds no other.
    unsafe { products(rounds) }
}

/// The operations of the grid on `isa`, for tests.
///
/// # Panics
/// If the machine has no `isa`.
#[must_use]
pub fn grid_operations(isa: Isa, inputs: &[[f32; 16]; 3]) -> Operations {
    assert!(isa.is_available(), "this machine has no {isa}");
    let operations: unsafe fn(&[[f32; 16]; 3]) -> Operations = of_isa!(isa, operations);
    // SAFETY: the machine has `isa`.
    float_modes::with_default(|| unsafe { operations(inputs) })
}

/// Whether a step takes less time on one thread than by waking others, which takes 13 to 40 µs on a virtual machine: so many products
/// for K, and as many for V, take one thread 20 to 50 µs.
pub(crate) fn is_small(problem: &Problem) -> bool {
    const SMALL: usize = 1 << 19;
    let lens = problem.kv_lens.iter().zip(&problem.q_lens);
    let pairs = lens.fold(0usize, |n, (kv_len, q_len)| {
        n.saturating_add(kv_len.saturating_mul(*q_len))
    });
    let HeadDim { k, v } = problem.head_dim;
    pairs.saturating_mul(problem.num_q_heads * (k + v) / 2) < SMALL
}

/// Attends all splits of a step on `isa`, which the caller has found available, and on the `threads` of the rayon pool that it is called in;
/// with one thread rayon has no part in it. Leaves states in the workspace, and returns how many of a row make up a span.
fn attend_splits(
    isa: Isa,
    threads: usize,
    step: &StepInputs<'_>,
    workspace: &mut Workspace,
    by_spans: bool,
) -> Result<usize, Error> {
    let problem = step.problem();
    if problem.batch() > 0 {
        // Refuses another backend's cache before any output is touched.
        Reader::new(step.kv(), 0, 0)?;
    }
    let (span, needed) = workspace.cut(problem, threads, by_spans);
    grow("the states of a step", &mut workspace.states, needed)?;
    let (attend, _) = kernels(isa, step.plan().format().is_integer());
    let splits = &workspace.splits[..];
    let states = Shared::new(&mut workspace.states);
    let row = problem.heads_per_kv() * (problem.head_dim.v + 2);
    let run = |index: usize| {
        let splits = &splits[index..];
        let first = splits[0].states;
        // SAFETY: `cut` gives each split states of its own, one after the other; each split is run once.
        let states = unsafe { states.part(first..first + splits[0].block.tokens * row) };
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the machine has `isa`: `CpuBackend` holds no other.
            float_modes::with_default(|| unsafe { attend(step, splits, scratch, states) })
        })
    };
    if threads == 1 || splits.len() == 1 {
        (0..splits.len()).try_for_each(run)?;
    } else {
        let indices = (0..splits.len()).into_par_iter().with_max_len(1);
        indices.try_for_each(run)?;
    }
    Ok(span)
}

/// The states of a step's spans; see [`attend_splits`].
pub(crate) fn spans(
    isa: Isa,
    threads: usize,
    step: &StepInputs<'_>,
    workspace: &mut Workspace,
) -> Result<SpanStates, Error> {
    attend_splits(isa, threads, step, workspace, true)?;
    let problem = step.problem();
    let (dim, per) = (problem.head_dim.v, problem.heads_per_kv());
    let mut all = SpanStates::unseen(problem)?;
    for split in &workspace.splits {
        let span = split.segments.start / SPAN;
        let states = workspace.states[split.states..].chunks_exact(dim + 2);
        for (i, state) in states.take(split.block.tokens * per).enumerate() {
            let (o, ml) = state.split_at(dim);
            let token = split.block.first + i / per;
            let row = token * problem.num_q_heads + split.g * per + i % per;
            all.set(span, row, [ml[0], ml[1]], o);
        }
    }
    Ok(all)
}

/// Attends a whole step; see [`attend_splits`].
pub(crate) fn decode(
    isa: Isa,
    threads: usize,
    step: &StepInputs<'_>,
    workspace: &mut Workspace,
    StepOutputs { out, lse, .. }: StepOutputs<'_>,
) -> Result<(), Error> {
    let problem = step.problem();
    let span = attend_splits(isa, threads, step, workspace, false)?;
    let (_, epilogue) = kernels(isa, step.plan().format().is_integer());
    let epilogue = |states: &States<'_>, end: RowEnd, out: &mut [f32]| {
        // SAFETY: as above.
        float_modes::with_default(|| unsafe { epilogue(states, span, end, out) })
    };
    let mut unasked = std::mem::take(&mut workspace.unasked_lse);
    let lse = match lse {
        Some(lse) => lse,
        None => {
            grow("log-sum-exps", &mut unasked, problem.rows())?;
            &mut unasked[..problem.rows()]
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
    out: WideRowsMut<'_>,
    lse: &mut [f32],
) {
    let problem = step.problem();
    let (dim, heads, per) = (
        problem.head_dim.v,
        problem.num_kv_heads,
        problem.heads_per_kv(),
    );
    let (splits, stride) = (&workspace.splits[..], dim + 2);
    let [_, rotated] = step.plan().format().rotated_blocks(problem.head_dim);
    let row = |row: usize, out: &mut [f32], lse: &mut f32| {
        let (token, q_head) = (row / problem.num_q_heads, row % problem.num_q_heads);
        let (g, h) = (q_head / per, q_head % per);
        let behind = |(block, _): &(QueryBlock, usize)| block.first <= token;
        let at = workspace.blocks.partition_point(behind) - 1;
        let (block, first) = workspace.blocks[at];
        let end = workspace.blocks.get(at + 1).map_or(splits.len(), |b| b.1);
        let states = States {
            all: &workspace.states,
            first: splits.get(first + g).map_or(0, |split| split.states)
                + ((token - block.first) * per + h) * stride,
            step: heads * block.tokens * per * stride,
            count: (end - first) / heads,
        };
        let end = RowEnd {
            v_tensor_scale: v_scale(step, g),
            sink: problem.scores.sinks.as_ref().map(|sinks| sinks[q_head]),
            rotated,
        };
        *lse = epilogue(&states, end, out);
    };
    let (out, places) = out.into_parts();
    let out = Shared::new(out);
    let row = |(i, lse): (usize, &mut f32)| {
        let place = places.of(i / problem.num_q_heads, i % problem.num_q_heads);
        // SAFETY: the rows' places lie in the slice and share no element, and each row is written once.
        row(i, unsafe { out.part(place) }, lse);
    };
    // Merging is worth threads only where many states meet.
    if threads == 1 || problem.rows().max(splits.len()) * stride < 1 << 16 {
        lse.iter_mut().enumerate().for_each(row);
    } else {
        let rows = lse.par_iter_mut().with_min_len(4);
        rows.enumerate().for_each(row);
    }
}

fn v_scale(step: &StepInputs<'_>, g: usize) -> f32 {
    let scales = match step.kv().memory() {
        KvMemory::Pages(layer, _) => layer.tensor_scales()[1],
        KvMemory::View(view) => view.v_tensor_scales(),
        KvMemory::Pool(_) => &[],
    };
    scales.get(g).copied().unwrap_or(1.0)
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
        let (format, dim) = (step.plan().format(), scratch.rows.dim);
        let parts = format.query_parts(dim);
        query::prepare(d, &mut scratch.rows, format.groups(dim)[0], parts);
        query::prepare_bases(&mut scratch.rows, inputs.reader.centres);
    }
    let all = inputs.split.segments.clone();
    let has_spans = all.len() > SPAN;
    if has_spans && scratch.span.len() < states.len() {
        scratch.span.resize(states.len(), 0.0);
    }
    for segment in all.clone() {
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
        let is_first = segment == all.start || segment % SPAN == 0;
        if !has_spans {
            merge_segment(s, &scratch.rows, is_first, states);
            continue;
        }
        let span = &mut scratch.span[..states.len()];
        merge_segment(s, &scratch.rows, is_first, span);
        if (segment + 1) % SPAN == 0 || segment + 1 == all.end {
            merge_span(s, span, segment < SPAN, states, scratch.rows.dim.v);
        }
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

/// Sets the rows to `q'` of section 3, `[block's tokens · heads_per_kv][dim]`.
#[inline(always)]
fn load_queries<S: Simd, const INTEGER: bool>(
    s: S,
    step: &StepInputs<'_>,
    inputs: &SplitInputs<'_>,
    rows: &mut QueryRows,
) {
    let (problem, split, format) = (inputs.problem, inputs.split, step.plan().format());
    let (dim, per) = (problem.head_dim.k, problem.heads_per_kv());
    let count = split.block.tokens * per;
    rows.reserve(count, problem.head_dim, format.v);
    let c = (problem.score_scale() * LOG2_E) * inputs.reader.tensor_scales[0];
    let out = &mut rows.q.as_mut_slice()[..count * dim];
    for (i, out) in out.chunks_exact_mut(dim).enumerate() {
        let row = step
            .q()
            .row(split.block.first + i / per, split.g * per + i % per);
        out.iter_mut().zip(row).for_each(|(out, q)| *out = q * c);
    }
    let k_unit = float_unit(format.k);
    if !INTEGER && k_unit != 1.0 {
        out.iter_mut().for_each(|q| *q *= k_unit);
    }
    if let [Some(block), _] = format.rotated_blocks(problem.head_dim) {
        for row in out.chunks_exact_mut(dim) {
            rotate::<S, false>(s, row, block);
        }
    }
}

/// Empties the rows' states.
#[inline(always)]
fn clear_state(rows: &mut QueryRows) {
    let (count, dim) = (rows.count, rows.dim.v);
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
    Scratch {
        rows,
        tile,
        wide,
        fetch,
        ..
    }: &mut Scratch,
    v_unit: f32,
) {
    let at = [place.t0, place.tokens];
    tile.load_float(s, &inputs.reader, at, rows.dim, pass.fine);
    ahead.aim(fetch, &inputs.reader, place);
    let (seen, modifiers) = (inputs.seen_in(place, pass), inputs.modifiers_in(place));
    // SAFETY: `load_float` has pointed the tile to as many readable tokens as it has.
    unsafe {
        if rows.count >= MANY_ROWS {
            wide.widen(s, tile, rows.dim);
        }
        float::fold_tile(s, tile, fetch, rows, seen, modifiers, v_unit);
    }
}

/// Folds a tile into the states of a pass's rows in the integer arithmetic.
#[inline(always)]
fn fold_integer_tile<D: Dot>(
    d: D,
    inputs: &SplitInputs<'_>,
    ahead: &Ahead<'_>,
    place: TilePlace,
    pass: &Pass,
    Scratch {
        rows,
        tile,
        codes,
        fetch,
        ..
    }: &mut Scratch,
) {
    let at = [place.t0, place.tokens];
    tile.load_integer(d.simd(), &inputs.reader, at, rows.dim, pass.fine);
    rows.centre = centre_of(place.t0);
    ahead.aim(fetch, &inputs.reader, place);
    let (seen, modifiers) = (inputs.seen_in(place, pass), inputs.modifiers_in(place));
    // SAFETY: `load_integer` has pointed the tile to as many readable tokens as it has; the rows are prepared for its K.
    unsafe {
        let codes = if rows.count >= MANY_ROWS {
            codes.unpack(d, tile, rows.dim);
            Some(&*codes)
        } else {
            None
        };
        blocks::fold_tile(d, tile, codes, fetch, rows, seen, modifiers);
    }
}

/// Merges the rows' states of a segment into the split's `states`, which the first segment sets.
#[inline(always)]
fn merge_segment<S: Simd>(s: S, rows: &QueryRows, is_first: bool, states: &mut [f32]) {
    let dim = rows.dim.v;
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

/// Merges a span's states into those of the spans before it, or copies the first one's.
#[inline(always)]
fn merge_span<S: Simd>(s: S, span: &[f32], is_first: bool, states: &mut [f32], dim: usize) {
    if is_first {
        states.copy_from_slice(span);
        return;
    }
    let rows = states.chunks_exact_mut(dim + 2);
    for (state, right) in rows.zip(span.chunks_exact(dim + 2)) {
        let (state_o, ml) = state.split_at_mut(dim);
        let mut left = [ml[0], ml[1]];
        merge(
            s,
            &mut left,
            state_o,
            [right[dim], right[dim + 1]],
            &right[..dim],
        );
        ml.copy_from_slice(&left);
    }
}
