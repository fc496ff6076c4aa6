//! One step: cut into splits of one span (or one segment) of one KV head, which any thread attends, and merged in one fixed order.

use std::{cell::RefCell, ops::Range};

use attn_core::{
    Error, Int4Scale, KvSource, Problem, Scheme, StepInputs, StepOutputs,
    arithmetic::LOG2_E,
    segments::{self, SPAN, TILE, num_segments, num_spans},
};
use rayon::prelude::*;

use crate::{
    channels, float, integer,
    merge::{States, merge},
    query::{self, QueryRows},
    reader::{Reader, Side},
    scratch::Aligned,
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
            pub fn epilogue(states: &States<'_>, span: usize, v_scale: f32, out: &mut [f32]) -> f32 {
                crate::merge::epilogue($dot.simd(), states, span, v_scale, out)
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
    Dot16(unsafe { crate::simd::avx2::Avx2::new() })
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
type Epilogue = unsafe fn(&States<'_>, usize, f32, &mut [f32]) -> f32;

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

/// Attends a whole step on `isa`, which the caller has found available.
pub(crate) fn decode(
    isa: Isa,
    step: &StepInputs<'_>,
    workspace: &mut Workspace,
    StepOutputs { out, lse, .. }: StepOutputs<'_>,
) -> Result<(), Error> {
    let problem = step.problem();
    if problem.batch() > 0 {
        // Refuses another backend's cache before any output is touched.
        Reader::new(step.kv(), 0, 0)?;
    }
    let (heads, threads) = (problem.num_kv_heads, rayon::current_num_threads());
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
    let epilogue = |states: &States<'_>, v_scale: f32, out: &mut [f32]| {
        // SAFETY: as above.
        unsafe { epilogue(states, span, v_scale, out) }
    };
    let mut unasked = std::mem::take(&mut workspace.unasked_lse);
    let lse = match lse {
        Some(lse) => lse,
        None => {
            unasked.resize(problem.rows(), 0.0);
            &mut unasked[..]
        }
    };
    write_rows(step, workspace, epilogue, out, lse);
    workspace.unasked_lse = unasked;
    Ok(())
}

/// Writes every row's output from its states.
fn write_rows(
    step: &StepInputs<'_>,
    workspace: &Workspace,
    epilogue: impl Fn(&States<'_>, f32, &mut [f32]) -> f32 + Sync,
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
        *lse = epilogue(&states, v_scale(step, g), out);
    };
    // Merging is worth threads only where many states meet.
    if rayon::current_num_threads() == 1 || splits * chunk < 1 << 16 {
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

/// The codes that the rows' operands were last prepared for.
#[derive(PartialEq)]
enum PreparedFor {
    Nothing,
    Plain(Scheme),
    Page(usize),
}

#[inline(always)]
fn attend<D: Dot, const INTEGER: bool>(
    d: D,
    step: &StepInputs<'_>,
    splits: &[Split],
    scratch: &mut Scratch,
    states: &mut [f32],
) -> Result<(), Error> {
    let (split, next) = (&splits[0], splits.get(1));
    let (format, s) = (step.plan().format(), d.simd());
    let problem = step.problem();
    let (dim, per, kv_len) = (
        problem.head_dim,
        problem.heads_per_kv(),
        problem.kv_lens[split.b],
    );
    let reader = Reader::new(step.kv(), split.b, split.g)?;
    let (rows, tile, fetch) = (&mut scratch.rows, &mut scratch.tile, &mut scratch.fetch);
    let count = problem.q_len * per;
    rows.reserve(count, dim, format.v.groups(dim));
    load_queries(s, step, split, reader.tensor_scales[0], &mut rows.q);
    // The float arithmetic reads fp8 too small by this factor (`unpack`).
    let unit = |scheme| match scheme {
        Scheme::Fp8E4m3 => FP8_UNIT,
        _ => 1.0,
    };
    let (k_unit, v_unit) = (unit(format.k), unit(format.v));
    if !INTEGER && k_unit != 1.0 {
        rows.q.as_mut_slice()[..count * dim]
            .iter_mut()
            .for_each(|q| *q *= k_unit);
    }

    let seen = (0..problem.q_len)
        .map(|i| problem.visible(split.b, i))
        .filter(|seen| !seen.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0);
    let caps = problem.softcap.map(|cap| [2.0 / cap, cap * LOG2_E]);
    let page_tokens = reader.page_end(0);
    let segment_tokens = segments::segment_tokens(kv_len);
    let mut prepared = PreparedFor::Nothing;
    if INTEGER && format.k == Scheme::Int4(Int4Scale::Channel) {
        query::round_queries(rows);
    }
    let last = seen.end.min(split.segments.end * segment_tokens);
    // The tile that comes after this one: of this split, or the first of the next, which this thread most likely takes.
    let following = next.and_then(|next| {
        let reader = Reader::new(step.kv(), next.b, next.g).ok()?;
        let kv_len = problem.kv_lens[next.b];
        let t0 = next.segments.start * segments::segment_tokens(kv_len);
        Some((reader, t0, TILE.min(kv_len - t0)))
    });
    let aim = |fetch: &mut Fetch, reader: &Reader<'_>, t0: usize| match &following {
        _ if t0 < last => fetch.aim(reader, t0, TILE.min(kv_len - t0)),
        Some((reader, t0, tokens)) => fetch.aim(reader, *t0, *tokens),
        None => fetch.idle(),
    };
    for (n, segment) in split.segments.clone().enumerate() {
        rows.m.as_mut_slice()[..count].fill(f32::NEG_INFINITY);
        rows.l.as_mut_slice()[..count].fill(0.0);
        rows.o.as_mut_slice()[..count * dim].fill(0.0);
        let tokens = segment * segment_tokens..kv_len.min((segment + 1) * segment_tokens);
        for t0 in tokens.step_by(TILE) {
            let len = TILE.min(kv_len - t0);
            if t0 >= seen.end || t0 + len <= seen.start {
                continue;
            }
            let in_tile = |row: usize| {
                let seen = problem.visible(split.b, row / per);
                [seen.start.max(t0) - t0, seen.end.min(t0 + len).max(t0) - t0]
            };
            let modifiers = |row: usize| Modifiers {
                softcap: caps,
                alibi: problem.alibi_slopes.as_ref().map(|slopes| {
                    let position = kv_len as i32 - problem.q_len as i32 + (row / per) as i32;
                    (
                        slopes[split.g * per + row % per] * LOG2_E,
                        t0 as i32 - position,
                    )
                }),
            };
            if !INTEGER {
                tile.load_float(s, &reader, t0, len, dim);
                aim(fetch, &reader, t0 + TILE);
                // SAFETY: `load_float` has pointed the tile to `len` readable tokens.
                unsafe { float::fold_tile(s, tile, fetch, rows, in_tile, modifiers, v_unit) };
                continue;
            }
            tile.load_integer(s, &reader, t0, len, dim);
            aim(fetch, &reader, t0 + TILE);
            let scheme = reader.scheme(Side::K, t0);
            let bias = if tile.k_nibbles { 8 } else { D::K_BIAS };
            if scheme == Scheme::Int4(Int4Scale::Channel) {
                let page = PreparedFor::Page(t0 / page_tokens);
                if prepared != page {
                    channels::prepare(d, rows, &tile.channels, bias);
                    prepared = page;
                }
            } else if prepared != PreparedFor::Plain(scheme) {
                query::prepare(d, rows, tile.k_groups, bias);
                prepared = PreparedFor::Plain(scheme);
            }
            // SAFETY: `load_integer` has pointed the tile to `len` readable tokens; the rows are prepared for its K.
            unsafe { integer::fold_tile(d, tile, fetch, rows, in_tile, modifiers) };
        }
        let (m, l, o) = (rows.m.as_slice(), rows.l.as_slice(), rows.o.as_slice());
        for (r, state) in states.chunks_exact_mut(dim + 2).enumerate() {
            let (state_o, ml) = state.split_at_mut(dim);
            let (right, right_o) = ([m[r], l[r]], &o[r * dim..][..dim]);
            if n == 0 {
                state_o.copy_from_slice(right_o);
                ml.copy_from_slice(&right);
            } else {
                let mut left = [ml[0], ml[1]];
                merge(s, &mut left, state_o, right, right_o);
                ml.copy_from_slice(&left);
            }
        }
    }
    Ok(())
}

/// `q'` of section 2 for every row, `[q_len · heads_per_kv][dim]`.
#[inline(always)]
fn load_queries<S: Simd>(
    _: S,
    step: &StepInputs<'_>,
    split: &Split,
    k_tensor_scale: f32,
    out: &mut Aligned<f32>,
) {
    let problem = step.problem();
    let (dim, per) = (problem.head_dim, problem.heads_per_kv());
    let c = (problem.softmax_scale * LOG2_E) * k_tensor_scale;
    for i in 0..problem.q_len {
        let from = ((split.b * problem.q_len + i) * problem.num_q_heads + split.g * per) * dim;
        let rows = &step.q()[from..][..per * dim];
        let out = &mut out.as_mut_slice()[i * per * dim..][..per * dim];
        out.iter_mut().zip(rows).for_each(|(out, q)| *out = q * c);
    }
}
