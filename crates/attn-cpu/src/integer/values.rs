//! Values: the products of weights with the codes of V, folded into the rows' states.

use crate::{
    fetch::Fetch,
    lanes::{LaneCodes, Operands, products, vector},
    query::QueryRows,
    scratch::Aligned,
    simd::{Dot, Simd},
    tile::{Code, Tile},
};

/// The operands of the weights of `R` rows for one group of V, one for each 16 tokens.
#[derive(Clone, Copy)]
struct Weights<D: Dot, const R: usize, const NIBBLES: bool> {
    bytes: [[D::Operand; 4]; R],
    nibbles: [[D::NibbleOperand; 4]; R],
}

impl<D: Dot, const R: usize, const NIBBLES: bool> Weights<D, R, NIBBLES> {
    /// # Safety
    /// Four operands are readable at `p` and at each `row` bytes from there on.
    #[inline(always)]
    unsafe fn load(d: D, p: *const u8, row: usize) -> Self {
        // SAFETY: the caller's contract, throughout.
        unsafe {
            let mut weights = Weights {
                bytes: [[d.operand(p); 4]; R],
                nibbles: [[d.nibble_operand(p); 4]; R],
            };
            for r in 0..R {
                for panel in 0..4 {
                    let at = p.add(r * row + panel * D::OPERAND);
                    if NIBBLES {
                        weights.nibbles[r][panel] = d.nibble_operand(at);
                    } else {
                        weights.bytes[r][panel] = d.operand(at);
                    }
                }
            }
            weights
        }
    }
}

/// Products of two vectors of the dims from `dim0` on, `FIRST` behind a multiple of 16, with `R` rows.
///
/// # Safety
/// Each 16 tokens have a panel at `panels`; `dim0` and the LANES dims from there lie in V.
#[inline(always)]
unsafe fn v_products<D: Dot, const R: usize, const NIBBLES: bool, const FIRST: usize>(
    d: D,
    panels: &[*const u8; 4],
    weights: &Weights<D, R, NIBBLES>,
    dim0: usize,
    vectors: [usize; 2],
) -> [[<D::S as Simd>::I; 2]; R] {
    let s = d.simd();
    let mut acc = [[s.i_splat(0); 2]; R];
    for panel in 0..4 {
        // SAFETY: a panel has dim rows of 16 bytes, or half as many rows of nibbles.
        let load = |row: usize| unsafe { s.i_load(panels[panel].add(row * 16)) };
        for j in 0..2 {
            if NIBBLES {
                let dim = FIRST + vectors[j] * D::S::ROWS;
                let raw = load(dim0 / 16 * 8 + dim % 8);
                let codes = if dim < 8 { d.low(raw) } else { d.high(raw) };
                for r in 0..R {
                    acc[r][j] = d.v_nibbles(acc[r][j], codes, weights.nibbles[r][panel]);
                }
            } else {
                let codes = d.v_bytes(load(dim0 + vectors[j] * D::S::ROWS));
                for r in 0..R {
                    acc[r][j] = d.v_dot(acc[r][j], codes, weights.bytes[r][panel]);
                }
            }
        }
    }
    if NIBBLES && D::WIDENS {
        // The four panels of a tile are one run.
        const { assert!(D::RUN >= 4) };
        for row in &mut acc {
            for sums in row {
                *sums = d.widen(s.i_splat(0), *sums);
            }
        }
    }
    acc
}

/// The sums of [`v_products`] for a whole step, a dim to a lane.
///
/// # Safety
/// Those of [`v_products`].
#[inline(always)]
unsafe fn v_sums<D: Dot, const R: usize, const NIBBLES: bool, const FIRST: usize>(
    d: D,
    panels: &[*const u8; 4],
    weights: &Weights<D, R, NIBBLES>,
    dim0: usize,
) -> [<D::S as Simd>::I; R] {
    let s = d.simd();
    let mut sums = [s.i_splat(0); R];
    // SAFETY: the caller's contract.
    unsafe {
        let first = v_products::<D, R, NIBBLES, FIRST>(d, panels, weights, dim0, [0, 1]);
        for r in 0..R {
            sums[r] = s.i_pairs(first[r][0], first[r][1]);
        }
        let second = v_products::<D, R, NIBBLES, FIRST>(d, panels, weights, dim0, [2, 3]);
        for r in 0..R {
            sums[r] = s.i_join(sums[r], s.i_pairs(second[r][0], second[r][1]));
        }
    }
    sums
}

/// Section 5's product with V for `R` rows, folded into their states (section 6).
///
/// # Safety
/// Those of [`scores`]; [`weigh`](crate::weights::weigh) has run for these rows.
#[inline(always)]
pub(crate) unsafe fn values<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let s = d.simd();
    let (group_dims, stride) = (rows.dim.v / tile.v_groups, tile.v_groups * 4 * D::OPERAND);
    let panels = tile.v;
    for g in 0..tile.v_groups {
        let operands = &rows.v_operands.as_slice()[row * stride + g * 4 * D::OPERAND..];
        let operands = operands[..(R - 1) * stride + 4 * D::OPERAND].as_ptr();
        // SAFETY: four operands of each row.
        let weights = unsafe { Weights::<D, R, NIBBLES>::load(d, operands, stride) };
        let fold = Fold::<R>::of(tile, rows, row, g);
        for dim0 in (g * group_dims..(g + 1) * group_dims).step_by(D::S::LANES) {
            fetch.step(s);
            // SAFETY: all of the tile's places have a panel of V; dim0 + LANES ≤ dim.
            unsafe {
                let sums = if D::S::LANES == 16 || dim0 % 16 == 0 {
                    v_sums::<D, R, NIBBLES, 0>(d, &panels, &weights, dim0)
                } else {
                    v_sums::<D, R, NIBBLES, 8>(d, &panels, &weights, dim0)
                };
                fold.add(s, dim0, &sums);
            }
        }
    }
}

/// Values of rows from codes that were unpacked for many rows, `V` vectors of dims at once.
///
/// # Safety
/// Those of [`values`]; `codes` are the tile's, and `V` vectors divide a group's dims.
#[inline(always)]
pub(crate) unsafe fn values_of_lanes<
    D: Dot,
    const R: usize,
    const V: usize,
    const NIBBLES: bool,
>(
    d: D,
    tile: &Tile,
    codes: &LaneCodes,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let (s, dim) = (d.simd(), rows.dim.v);
    let (group_dims, stride) = (dim / tile.v_groups, tile.v_groups * 4 * D::OPERAND);
    let panels = [0, tile.tokens.div_ceil(16)];
    for dim0 in (0..dim).step_by(V * D::S::LANES) {
        let g = dim0 / group_dims;
        fetch.step(s);
        let operands = &rows.v_operands.as_slice()[row * stride..][..R * stride];
        let operands = Operands {
            base: operands[g * 4 * D::OPERAND..].as_ptr(),
            row: stride,
        };
        // SAFETY: all dims' vectors have four parts, of which the tile's tokens fill `panels`; so have the operands.
        let acc = unsafe {
            let codes = vector::<D, NIBBLES>(&codes.v, dim0 / D::S::LANES, 4);
            products::<D, R, V, NIBBLES, true>(d, codes, operands, 4, panels)
        };
        let fold = Fold::<R>::of(tile, rows, row, g);
        for j in 0..V {
            let mut sums = [s.i_splat(0); R];
            for r in 0..R {
                sums[r] = acc[r][j];
            }
            // SAFETY: V·LANES divides the dims of a group.
            unsafe { fold.add(s, dim0 + j * D::S::LANES, &sums) };
        }
    }
}

/// What makes values of the sums of `R` rows with one group of V, and where they are folded: all products are exact. Without shifts, a row's step has its β in
/// it. Numbers stay in memory, as for [`Scores`].
struct Fold<const R: usize> {
    biases: *const f32,
    steps: *const f32,
    shifts: *const f32,
    is_biased: bool,
    has_shift: bool,
    beta: *const f32,
    o: [*mut f32; R],
}

impl<const R: usize> Fold<R> {
    /// How rows are folded for which `weigh` has run; a row that sees nothing is folded into a place that is never read.
    #[inline(always)]
    fn of(tile: &Tile, rows: &mut QueryRows, row: usize, g: usize) -> Self {
        let (dim, at) = (rows.dim.v, g * rows.stride() + row);
        let numbers = |list: &Aligned<f32>, at: usize| list.as_slice()[at..][..R].as_ptr();
        let beta = &rows.beta.as_slice()[row..][..R];
        let o = rows.o.as_mut_slice()[row * dim..][..R * dim].as_mut_ptr();
        let unseen = rows.unseen_o.as_mut_slice()[..dim].as_mut_ptr();
        let mut places = [unseen; R];
        for r in 0..R {
            if beta[r] >= 0.0 {
                places[r] = o.wrapping_add(r * dim);
            }
        }
        Fold {
            biases: numbers(&rows.w_biases, at),
            steps: numbers(&rows.w_steps, at),
            shifts: numbers(&rows.v_shifts, at),
            is_biased: tile.v_code != Code::Int8,
            has_shift: tile.v_has_shift,
            beta: beta.as_ptr(),
            o: places,
        }
    }

    /// Folds the sums over a tile into the dims from `dim0` on.
    ///
    /// # Safety
    /// `dim0 + LANES ≤ dim`; nobody else refers to the rows' O.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, s: S, dim0: usize, sums: &[S::I; R]) {
        for r in 0..R {
            // SAFETY: R numbers in each list, LANES floats in O.
            unsafe {
                let mut value = s.to_f(sums[r]);
                if self.is_biased {
                    value = s.sub(value, s.splat(*self.biases.add(r)));
                }
                let (o, step) = (self.o[r].add(dim0), s.splat(*self.steps.add(r)));
                let mut factor = step;
                if self.has_shift {
                    value = s.mul_add(value, step, s.splat(*self.shifts.add(r)));
                    factor = s.splat(*self.beta.add(r));
                }
                s.store(o, s.mul_add(value, factor, s.load(o)));
            }
        }
    }
}
