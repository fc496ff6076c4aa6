//! The query rows of one KV head (`docs/arithmetic.md`, sections 2 and 3): as floats, in 8 bits, and their state.

use attn_core::{
    Groups, HeadDim, Scheme,
    arithmetic::{QueryParts, query_parts},
    centres::{CENTRES, score_base},
    format::MAX_GROUPS,
    grid::SCORE_BASE,
};
use half::bf16;

use crate::{
    scratch::Aligned,
    simd::{Dot, Simd},
};

/// All query rows of one KV head, with the state of the current segment and the intermediate values of the current tile.
pub(crate) struct QueryRows {
    pub count: usize,
    pub dim: HeadDim,
    /// `q'`, `[row][dim.k]`.
    pub q: Aligned<f32>,
    /// Query operands, `[row][dim/16][OPERAND]`.
    pub k_operands: Aligned<u8>,
    /// `Q_g`, `[row][MAX_GROUPS]`.
    pub q_sums: Aligned<f32>,
    /// `σ`, `[row]`.
    pub step: Aligned<f32>,
    /// `ρ` of rows with two parts, `[row]`.
    pub ratio: Aligned<f32>,
    /// `G` of section 12, `[centre][row]`: what scores are added to on the grid.
    pub bases: Aligned<f32>,
    /// The centre of the current tile's keys.
    pub centre: usize,
    /// Scores (of integers, before their multiplication by σ), then weights p, `[row][TILE]`.
    pub scores: Aligned<f32>,
    /// Weight operands, `[row][group][4][OPERAND]`.
    pub v_operands: Aligned<u8>,
    /// What is taken out of the sums with V, κ (times β where V has no shifts), and the shifts' term of V: `[group]`[[`stride`](QueryRows::stride)].
    pub w_biases: Aligned<f32>,
    pub w_steps: Aligned<f32>,
    pub v_shifts: Aligned<f32>,
    /// α and β of the current fold, `[row]`; β is negative where the row sees nothing.
    pub alpha: Aligned<f32>,
    pub beta: Aligned<f32>,
    /// m and l of four rows before the current fold.
    pub before: [[f32; 4]; 2],
    /// The state of the current segment.
    pub m: Aligned<f32>,
    pub l: Aligned<f32>,
    pub o: Aligned<f32>,
    /// Scratch memory for a row of integers.
    pub integers: Aligned<i32>,
    /// Where a row that sees nothing of a tile is folded.
    pub unseen_o: Aligned<f32>,
}

impl QueryRows {
    pub const fn new() -> Self {
        QueryRows {
            count: 0,
            dim: HeadDim::same(0),
            q: Aligned::new(),
            k_operands: Aligned::new(),
            q_sums: Aligned::new(),
            step: Aligned::new(),
            ratio: Aligned::new(),
            bases: Aligned::new(),
            centre: 0,
            scores: Aligned::new(),
            v_operands: Aligned::new(),
            w_biases: Aligned::new(),
            w_steps: Aligned::new(),
            v_shifts: Aligned::new(),
            alpha: Aligned::new(),
            beta: Aligned::new(),
            before: [[0.0; 4]; 2],
            m: Aligned::new(),
            l: Aligned::new(),
            o: Aligned::new(),
            integers: Aligned::new(),
            unseen_o: Aligned::new(),
        }
    }

    /// Makes room for `count` rows over heads of `dim`, and V of a scheme.
    pub fn reserve(&mut self, count: usize, dim: HeadDim, v: Scheme) {
        let v_groups = v.groups(dim.v).count();
        (self.count, self.dim) = (count, dim);
        self.q.reserve(count * dim.k);
        self.k_operands.reserve(count * dim.k / 16 * MOST_OPERAND);
        self.q_sums.reserve(count * MAX_GROUPS);
        self.step.reserve(count);
        self.ratio.reserve(count);
        self.bases.reserve(CENTRES * count);
        self.scores.reserve(count * 64);
        // Numbers of rows are read by fours.
        let stride = self.stride();
        self.v_operands.reserve(count * v_groups * 4 * MOST_OPERAND);
        self.w_biases.reserve(v_groups * stride);
        self.w_steps.reserve(v_groups * stride);
        self.v_shifts.reserve(v_groups * stride);
        self.alpha.reserve(stride);
        self.beta.reserve(stride);
        self.m.reserve(stride);
        self.l.reserve(stride);
        self.o.reserve(count * dim.v);
        self.integers.reserve(64.max(dim.k));
        self.unseen_o.reserve(dim.v);
    }

    /// From a group's numbers of rows to the next group's.
    pub fn stride(&self) -> usize {
        self.count + 3
    }
}

/// Most bytes of a [`Dot`]'s operand.
const MOST_OPERAND: usize = 48;

/// Rows of the next block, 4 at most, where so many are left.
#[inline(always)]
pub(crate) fn block_of(left: usize) -> usize {
    match left {
        5 | 6 | 9 => 3,
        _ => left.min(4),
    }
}

/// Calls a kernel over blocks of a range of rows.
macro_rules! in_blocks {
    ($first:expr, $end:expr, |$row:ident, $block:ident| $call:expr) => {{
        let mut $row = $first;
        while $row < $end {
            let block = $crate::query::block_of($end - $row);
            match block {
                1 => {
                    const $block: usize = 1;
                    $call
                }
                2 => {
                    const $block: usize = 2;
                    $call
                }
                3 => {
                    const $block: usize = 3;
                    $call
                }
                _ => {
                    const $block: usize = 4;
                    $call
                }
            }
            $row += block;
        }
    }};
}
pub(crate) use in_blocks;

/// The largest magnitude of `dim` floats.
///
/// # Safety
/// They are readable at `x`; `dim` is a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn largest_abs<S: Simd>(s: S, x: *const f32, dim: usize) -> f32 {
    let mut largest = s.splat(0.0);
    for i in (0..dim).step_by(S::LANES) {
        // SAFETY: i + LANES ≤ dim, as LANES divides 16.
        largest = s.max(largest, s.abs(unsafe { s.load(x.add(i)) }));
    }
    s.largest(largest)
}

/// Finds what every row's scores are added to on the grid, with the centres that the row's keys lack.
#[inline(always)]
pub(crate) fn prepare_bases(rows: &mut QueryRows, centres: Option<[&[bf16]; CENTRES]>) {
    let (count, dim) = (rows.count, rows.dim.k);
    let bases = &mut rows.bases.as_mut_slice()[..CENTRES * count];
    let Some(centres) = centres else {
        bases.fill(SCORE_BASE);
        return;
    };
    for (bases, centre) in bases.chunks_exact_mut(count.max(1)).zip(centres) {
        let queries = rows.q.as_slice().chunks_exact(dim);
        for (base, q) in bases.iter_mut().zip(queries) {
            *base = score_base(q, centre);
        }
    }
}

/// Prepares every row's operands for K in `groups`, with a step for each of the `parts` (section 3).
#[inline(always)]
pub(crate) fn prepare<D: Dot>(d: D, rows: &mut QueryRows, groups: Groups, parts: Groups) {
    const { assert!(D::OPERAND <= MOST_OPERAND) };
    let (s, dim, each) = (d.simd(), rows.dim.k, rows.dim.k / 16 * D::OPERAND);
    for r in 0..rows.count {
        let x = rows.q.as_slice()[r * dim..][..dim].as_ptr();
        let out = rows.k_operands.as_mut_slice()[r * each..][..each].as_mut_ptr();
        let integers = rows.integers.as_mut_slice()[..dim].as_mut_ptr();
        // SAFETY: `dim` elements each, and dim/16 operands; HEAD_DIMS are multiples of 16.
        unsafe {
            let [first, second] = [parts.range(0), parts.dims()..dim];
            let largest = [
                largest_abs(s, x, first.len()),
                largest_abs(s, x.add(second.start), second.len()),
            ];
            let steps = match parts.count() {
                2 => query_parts(largest),
                _ => QueryParts::whole(largest[0]),
            };
            rows.step.as_mut_slice()[r] = steps.step;
            rows.ratio.as_mut_slice()[r] = steps.ratio;
            for (dims, inverse) in [first, second].into_iter().zip(steps.inverse) {
                let inverse = s.splat(inverse);
                for i in dims.step_by(D::S::LANES) {
                    // No product exceeds 127 by half: nothing is left to clamp.
                    let y = s.mul(s.load(x.add(i)), inverse);
                    s.i_store(integers.add(i).cast(), s.round(y));
                }
            }
            for i in 0..dim / 16 {
                d.k_operand(integers.add(16 * i).cast_const(), out.add(D::OPERAND * i));
            }
        }
        for (g, dims) in groups.ranges().enumerate() {
            let sum = rows.integers.as_slice()[dims].iter().sum::<i32>();
            rows.q_sums.as_mut_slice()[r * MAX_GROUPS + g] = sum as f32;
        }
    }
}
