//! The query rows of one KV head (`docs/arithmetic.md`, section 2): as floats, as planes of integers, and their state.

use attn_core::{
    arithmetic::{exp2i, exponent, plane_exponent, round_13},
    format::MAX_GROUPS,
};

use crate::{
    scratch::Aligned,
    simd::{Dot, OPERAND, Simd},
};

/// All query rows of one KV head, with the state of the current segment and the intermediate values of the current tile.
pub(crate) struct QueryRows {
    pub count: usize,
    pub dim: usize,
    /// `q'`, `[row][dim]`.
    pub q: Aligned<f32>,
    /// For K of `Int4 Channel`: the largest magnitude of every four dims, `[row][fours(dim)]`, and E of the largest, `[row]`.
    pub q_largest: Aligned<f32>,
    pub q_exponent: Aligned<i32>,
    /// Query operands, `[row][dim/16][OPERAND]`.
    pub k_operands: Aligned<u8>,
    /// The codes' bias times the sum of the query's integers, `[row][MAX_GROUPS]`.
    pub k_bias: Aligned<i32>,
    /// `f32(Q_g)`, `[row][MAX_GROUPS]`.
    pub q_sums: Aligned<f32>,
    /// `2^−e`, `[row]`.
    pub unit: Aligned<f32>,
    /// The shifts' term of a sealed `Int4 Channel` page, `[row]`.
    pub offset: Aligned<f32>,
    /// Scores, then weights p, `[row][TILE]`.
    pub scores: Aligned<f32>,
    /// Weight operands, `[row][group][4][OPERAND]`.
    pub v_operands: Aligned<u8>,
    /// 8·Σ w16 for centred codes, `[row][MAX_GROUPS]`.
    pub w_sums: Aligned<i32>,
    /// The shifts' term of V, `[row][MAX_GROUPS]`.
    pub v_shifts: Aligned<f32>,
    /// α and β of the current fold, `[row]`; β is negative where the row sees nothing.
    pub alpha: Aligned<f32>,
    pub beta: Aligned<f32>,
    /// The state of the current segment.
    pub m: Aligned<f32>,
    pub l: Aligned<f32>,
    pub o: Aligned<f32>,
    /// Scratch memory for a row of integers.
    pub integers: Aligned<i32>,
    /// Scratch memory for a row of floats.
    pub floats: Aligned<f32>,
}

impl QueryRows {
    pub const fn new() -> Self {
        QueryRows {
            count: 0,
            dim: 0,
            q: Aligned::new(),
            q_largest: Aligned::new(),
            q_exponent: Aligned::new(),
            k_operands: Aligned::new(),
            k_bias: Aligned::new(),
            q_sums: Aligned::new(),
            unit: Aligned::new(),
            offset: Aligned::new(),
            scores: Aligned::new(),
            v_operands: Aligned::new(),
            w_sums: Aligned::new(),
            v_shifts: Aligned::new(),
            alpha: Aligned::new(),
            beta: Aligned::new(),
            m: Aligned::new(),
            l: Aligned::new(),
            o: Aligned::new(),
            integers: Aligned::new(),
            floats: Aligned::new(),
        }
    }

    /// Makes room for `count` rows of `dim`, and V in `v_groups` groups.
    pub fn reserve(&mut self, count: usize, dim: usize, v_groups: usize) {
        (self.count, self.dim) = (count, dim);
        self.q.reserve(count * dim);
        self.q_largest.reserve(count * fours(dim));
        self.q_exponent.reserve(count);
        self.k_operands.reserve(count * dim * 2);
        self.k_bias.reserve(count * MAX_GROUPS);
        self.q_sums.reserve(count * MAX_GROUPS);
        self.unit.reserve(count);
        self.offset.reserve(count);
        self.scores.reserve(count * 64);
        self.v_operands.reserve(count * v_groups * 128);
        self.w_sums.reserve(count * MAX_GROUPS);
        self.v_shifts.reserve(count * MAX_GROUPS);
        self.alpha.reserve(count);
        self.beta.reserve(count);
        self.m.reserve(count);
        self.l.reserve(count);
        self.o.reserve(count * dim);
        self.integers.reserve(64.max(dim));
        self.floats.reserve(dim);
    }
}

/// Calls a kernel over blocks of rows, 3 or 4 at most.
macro_rules! in_blocks {
    ($count:expr, $most:expr, |$row:ident, $block:ident| $call:expr) => {{
        let mut $row = 0;
        while $row < $count {
            let left = $count - $row;
            let block = match left {
                4 if $most == 3 => 2,
                5 | 6 | 9 => 3,
                _ => left.min($most),
            };
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
                _ if $most == 4 => {
                    const $block: usize = 4;
                    $call
                }
                _ => unreachable!("blocks have at most {} rows", $most),
            }
            $row += block;
        }
    }};
}
pub(crate) use in_blocks;

/// Number of fours in `dim` dims, rounded up to whole vectors.
pub(crate) const fn fours(dim: usize) -> usize {
    (dim / 4).next_multiple_of(16)
}

/// The largest magnitude of every four neighbours; zeros fill up the rest.
#[inline(always)]
pub(crate) fn largest_of_fours(x: &[f32], out: &mut [f32]) {
    let (full, rest) = out.split_at_mut(x.len() / 4);
    rest.fill(0.0);
    for (out, x) in full.iter_mut().zip(x.chunks_exact(4)) {
        // The bits of magnitudes have the order of the magnitudes, and comparing them needs no NaN handling.
        const MAGNITUDE: u32 = 0x7fff_ffff;
        let a = (x[0].to_bits() & MAGNITUDE).max(x[1].to_bits() & MAGNITUDE);
        let b = (x[2].to_bits() & MAGNITUDE).max(x[3].to_bits() & MAGNITUDE);
        *out = f32::from_bits(a.max(b));
    }
}

/// Rounds every row's query to 13 bits (section 2), and computes the bounds of its products with a page's scales.
#[inline(always)]
pub(crate) fn round_queries(rows: &mut QueryRows) {
    let (dim, stride) = (rows.dim, fours(rows.dim));
    for r in 0..rows.count {
        let q = &mut rows.q.as_mut_slice()[r * dim..][..dim];
        for x in q.iter_mut() {
            *x = round_13(*x);
        }
        let largest = &mut rows.q_largest.as_mut_slice()[r * stride..][..stride];
        largest_of_fours(q, largest);
        rows.q_exponent.as_mut_slice()[r] = exponent(largest.iter().copied().fold(0.0, f32::max));
    }
}

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

/// Converts a row times 2^e to integers (section 2), and those to operands.
///
/// # Safety
/// `dim` floats at `x`, room for `dim` integers at `integers` and `dim/16` operands at `out`; `dim` is a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn plane<D: Dot>(
    d: D,
    x: *const f32,
    e: i32,
    dim: usize,
    integers: *mut i32,
    out: *mut u8,
) {
    let s = d.simd();
    let scale = s.splat(exp2i(e));
    for i in (0..dim).step_by(D::S::LANES) {
        // SAFETY: i + LANES ≤ dim, as LANES divides 16.
        unsafe {
            s.i_store(
                integers.add(i).cast(),
                s.round(s.mul(s.load(x.add(i)), scale)),
            )
        };
    }
    for i in 0..dim / 16 {
        // SAFETY: 16 integers and one operand each, inside the caller's room.
        unsafe { d.k_operand(integers.add(16 * i), out.add(OPERAND * i)) };
    }
}

/// Prepares every row's operands for K without per-channel scales, in `groups` groups; `bias` is added to every code that enters the product.
#[inline(always)]
pub(crate) fn prepare<D: Dot>(d: D, rows: &mut QueryRows, groups: usize, bias: i32) {
    let (dim, each) = (rows.dim, rows.dim / 16 * OPERAND);
    for r in 0..rows.count {
        let (x, out) = (
            &rows.q.as_slice()[r * dim..][..dim],
            &mut rows.k_operands.as_mut_slice()[r * each..][..each],
        );
        let integers = &mut rows.integers.as_mut_slice()[..dim];
        // SAFETY: `dim` elements each, and dim/16 operands; HEAD_DIMS are multiples of 16.
        let e = unsafe {
            let e = plane_exponent(largest_abs(d.simd(), x.as_ptr(), dim));
            plane(
                d,
                x.as_ptr(),
                e,
                dim,
                integers.as_mut_ptr(),
                out.as_mut_ptr(),
            );
            e
        };
        rows.unit.as_mut_slice()[r] = exp2i(-e);
        rows.offset.as_mut_slice()[r] = 0.0;
        for (g, q) in integers.chunks_exact(dim / groups).enumerate() {
            let sum: i32 = q.iter().sum();
            rows.k_bias.as_mut_slice()[r * MAX_GROUPS + g] = bias * sum;
            rows.q_sums.as_mut_slice()[r * MAX_GROUPS + g] = sum as f32;
        }
    }
}
