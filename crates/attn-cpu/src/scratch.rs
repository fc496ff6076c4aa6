//! What one thread keeps between calls, so that a step allocates nothing once it has run: aligned arrays, grown on demand.

use std::marker::PhantomData;

use crate::channels::fours;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "only its address is used")] [u8; 64]);

/// An array of plain numbers that starts on a cache line.
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    of: PhantomData<T>,
}

/// Numbers for which every bit pattern is a value.
pub(crate) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for f32 {}

impl<T: Plain> Aligned<T> {
    pub const fn new() -> Self {
        Aligned {
            lines: Vec::new(),
            of: PhantomData,
        }
    }

    /// Makes room for at least `len` elements; the old ones stay.
    pub fn reserve(&mut self, len: usize) {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 64]));
        }
    }

    pub fn as_slice(&self) -> &[T] {
        let len = self.lines.len() * (64 / size_of::<T>());
        // SAFETY: the lines are initialized bytes, aligned for any `T: Plain`, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        let len = self.lines.len() * (64 / size_of::<T>());
        // SAFETY: as in `as_slice`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }
}

/// All query rows of one KV head, and the state that the current tile and segment leave.
pub(crate) struct Rows {
    pub count: usize,
    pub dim: usize,
    /// `q'`, `[row][dim]`.
    pub q: Aligned<f32>,
    /// For K of `Int4 Channel`: of every four, the largest magnitude, `[row][fours(dim)]`, and E of the largest, `[row]`.
    pub q_largest: Aligned<f32>,
    pub q_exponent: Aligned<i32>,
    /// Query operands, `[row][dim/16][OPERAND]`.
    pub k_operands: Aligned<u8>,
    /// What the codes' bias adds to a sum, `[row][GROUPS]`.
    pub k_bias: Aligned<i32>,
    /// `f32(Q_g)`, `[row][GROUPS]`.
    pub q_sums: Aligned<f32>,
    /// `2^−e`, `[row]`.
    pub unit: Aligned<f32>,
    /// The shifts' term of a sealed `Int4 Channel` page, `[row]`.
    pub offset: Aligned<f32>,
    /// Scores, then weights p, `[row][TILE]`.
    pub scores: Aligned<f32>,
    /// Weight operands, `[row][group][4][OPERAND]`.
    pub v_operands: Aligned<u8>,
    /// 8·Σ w16 for centred codes, `[row][GROUPS]`.
    pub w_sums: Aligned<i32>,
    /// The shifts' term of V, `[row][GROUPS]`.
    pub v_shifts: Aligned<f32>,
    /// α and β of the fold under way, `[row]`; β is negative where the row sees nothing.
    pub alpha: Aligned<f32>,
    pub beta: Aligned<f32>,
    /// The segment's state.
    pub m: Aligned<f32>,
    pub l: Aligned<f32>,
    pub o: Aligned<f32>,
    /// 64 integers on their way.
    pub integers: Aligned<i32>,
    /// One row of floats on its way.
    pub floats: Aligned<f32>,
}

/// Most groups of a scheme, `Int4 Channel` apart.
pub(crate) const GROUPS: usize = 8;

impl Rows {
    pub const fn new() -> Self {
        Rows {
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
        self.k_bias.reserve(count * GROUPS);
        self.q_sums.reserve(count * GROUPS);
        self.unit.reserve(count);
        self.offset.reserve(count);
        self.scores.reserve(count * 64);
        self.v_operands.reserve(count * v_groups * 128);
        self.w_sums.reserve(count * GROUPS);
        self.v_shifts.reserve(count * GROUPS);
        self.alpha.reserve(count);
        self.beta.reserve(count);
        self.m.reserve(count);
        self.l.reserve(count);
        self.o.reserve(count * dim);
        self.integers.reserve(64.max(dim));
        self.floats.reserve(dim);
    }
}
