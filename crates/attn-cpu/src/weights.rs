//! The integer arithmetic's weights of a tile: section 5 of docs/arithmetic.md between the two products of `integer`, and the fold of m and l.
//!
//! One vector holds what belongs to up to four query rows, that of query row r in lane r of each of the vector's rows.

use attn_core::{
    arithmetic::{LARGEST_GROWTH, ROUND, TILE, exp2i},
    grid::{
        GRID, NEAR_END, NEAR_START, SCORE_BASE, SMALLEST_POINT, TO_STEP, WEIGHT_SHIFT, grid_score,
        is_near, threshold,
    },
};

use crate::{
    grid::{power, step_inverse},
    query::QueryRows,
    scratch::Aligned,
    simd::{Dot, Simd},
    softmax::{Modifiers, modify},
    tile::Tile,
};

/// Weights of 2^-96 and less are this one, also those of tokens that are not seen. It adds 0 to the sum of f16 numbers, and with the largest scale, 2^16,
/// it is below the smallest step's 2^-58 by more than any threshold lacks; with the smallest, 2^-28, it stays normal.
const LOWEST: f32 = SCORE_BASE - 96.0;

/// Section 5 for `R` rows, four at most, from `row` on: weights, their operands for V, and what goes with them. O is ready for the tile's values
/// afterwards: whatever α it has to be multiplied by, it has been.
///
/// # Safety
/// The tile's places are readable, and `rows` has the scores of its tokens.
#[inline(always)]
pub(crate) unsafe fn weigh<D: Dot, const R: usize>(
    d: D,
    tile: &Tile,
    rows: &mut QueryRows,
    row: usize,
    seen: &impl Fn(usize) -> [usize; 2],
    modifiers: &impl Fn(usize) -> Modifiers,
) {
    let s = d.simd();
    let (mut ranges, mut grids) = ([[0, TILE]; R], [Grid::default(); R]);
    let bases = &rows.bases.as_slice()[rows.centre * rows.count + row..][..R];
    for r in 0..R {
        ranges[r] = seen(row + r);
        grids[r] = Grid {
            step: rows.step.as_slice()[row + r],
            base: bases[r],
        };
    }
    let scores = rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr();
    // SAFETY: R·TILE floats at `scores`; the caller's contract.
    unsafe {
        for r in 0..R {
            let of_row = scores.add(r * TILE);
            grids[r] = settle(s, of_row, grids[r], ranges[r], &modifiers(row + r));
        }
        let [base, m] = exponents::<D::S, R>(s, scores, ranges, &mut grids);
        let l = weights::<D::S, R>(s, scores, base, &grids);
        let moves = fold_scalars::<D::S, R>(s, rows, row, [m, l]);
        for (r, [start, end]) in ranges.into_iter().enumerate() {
            if start >= end {
                keep_state(rows, row, r);
            }
        }
        if moves {
            move_state::<D::S, R>(s, rows, row);
        }
        for g in 0..tile.v_groups {
            weight_bytes::<D, R>(d, tile, rows, row, g);
        }
    }
}

/// How a row's scores come on the grid: multiplied by its step, and added to a base.
#[derive(Clone, Copy, Default)]
struct Grid {
    step: f32,
    base: f32,
}

/// Makes a row's scores such that they only have to be put on the grid that comes back: applies score modifiers, and gives tokens that the row does not
/// see −∞.
///
/// # Safety
/// TILE floats are readable and writable at `scores`.
#[inline(always)]
unsafe fn settle<S: Simd>(
    s: S,
    scores: *mut f32,
    grid: Grid,
    range: [usize; 2],
    modifiers: &Modifiers,
) -> Grid {
    if range == [0, TILE] && modifiers.is_none() {
        return grid;
    }
    let (step, mut left) = (grid.step, grid);
    // A step of 0 times −∞ is no number.
    if step == 0.0 || !modifiers.is_none() {
        for t in (0..TILE).step_by(S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let at = scores.add(t);
                s.store(at, s.mul(s.load(at), s.splat(step)));
            }
        }
        left.step = 1.0;
    }
    if !modifiers.is_none() && grid.base != SCORE_BASE {
        let of_centre = s.splat(grid.base - SCORE_BASE);
        for t in (0..TILE).step_by(S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let at = scores.add(t);
                s.store(at, s.add(s.load(at), of_centre));
            }
        }
        left.base = SCORE_BASE;
    }
    // SAFETY: the caller's contract.
    unsafe { modify(s, scores, range, modifiers) };
    left
}

/// The exponents of `R` rows: what puts a score on the grid, as the point of its weight, and m. A row whose scores leave the grid's range gets others,
/// which count from their largest, with a step of 1. A row whose range is empty gets numbers that serve for nothing.
///
/// # Safety
/// `R·TILE` floats are readable and writable at `scores`.
#[inline(always)]
unsafe fn exponents<S: Simd, const R: usize>(
    s: S,
    scores: *mut f32,
    ranges: [[usize; 2]; R],
    grids: &mut [Grid; R],
) -> [S::F; 2] {
    let mut largest = [s.splat(SCORE_BASE); 4];
    let mut bases = [SCORE_BASE; 4];
    for r in 0..R {
        let [start, end] = ranges[r];
        if start < end {
            let (step, base) = (s.splat(grids[r].step), s.splat(grids[r].base));
            bases[r] = grids[r].base;
            // SAFETY: row r's TILE floats.
            unsafe {
                let row = scores.add(r * TILE);
                largest[r] = s.grid_sum(s.load(row), step, base);
                for t in (S::LANES..TILE).step_by(S::LANES) {
                    let y = s.grid_sum(s.load(row.add(t)), step, base);
                    largest[r] = s.max(largest[r], y);
                }
            }
        }
    }
    let top = s.maxima(largest);
    let up = s.i_and(s.i_add(s.bits(top), s.i_splat(63)), s.i_splat(!63));
    let ceil = s.of_bits(up);
    let mut exponent = s.sub(ceil, s.splat(SCORE_BASE));
    // What is added to the bases, so that points count from M. The sum is exact but for bases far from the grid's middle.
    let down = s.sub(s.splat(SCORE_BASE - WEIGHT_SHIFT), ceil);
    // SAFETY: four floats.
    let bases = unsafe { s.load_four(bases.as_ptr()) };
    let mut base = s.add(bases, down);
    let is_exact = s.sub(bases, s.sub(base, down));
    let is_exact = s.i_sub(s.i_splat(0), s.i_and(s.bits(is_exact), s.i_splat(i32::MAX)));
    // At most one of the differences is negative, so that ^ finds either.
    let last = f32::from_bits(NEAR_END.to_bits() - 1);
    let (below, above) = (s.sub(top, s.splat(NEAR_START)), s.sub(s.splat(last), top));
    let is_far = s.i_xor(s.bits(below), s.bits(above));
    if s.any_negative(is_far) || s.any_negative(is_exact) {
        let [mut tops, mut ceils, mut exponents, mut new] = [[0.0; 4]; 4];
        // SAFETY: four floats each; R rows of TILE scores, to which nothing else refers.
        unsafe {
            s.store_first::<4>(tops.as_mut_ptr(), top);
            s.store_first::<4>(ceils.as_mut_ptr(), ceil);
            s.store_first::<4>(exponents.as_mut_ptr(), exponent);
            s.store_first::<4>(new.as_mut_ptr(), base);
            for r in 0..R {
                let down = (SCORE_BASE - WEIGHT_SHIFT) - ceils[r];
                let is_near = is_near(tops[r]);
                if is_near && new[r] - down == grids[r].base {
                    continue;
                }
                let scores = std::slice::from_raw_parts_mut(scores.add(r * TILE), TILE);
                if is_near {
                    count_from_ceil(scores, grids[r], ceils[r]);
                } else {
                    exponents[r] = count_from_largest(scores, grids[r]);
                }
                grids[r].step = 1.0;
                new[r] = SCORE_BASE - WEIGHT_SHIFT;
            }
            exponent = s.load_four(exponents.as_ptr());
            base = s.load_four(new.as_ptr());
        }
    }
    [base, s.add(exponent, s.splat(WEIGHT_SHIFT))]
}

/// Replaces a row's scores by their differences from the largest, rounded up, which comes back.
#[cold]
#[inline(never)]
fn count_from_largest(scores: &mut [f32], Grid { step, base }: Grid) -> f32 {
    let of_centre = base - SCORE_BASE;
    scores.iter_mut().for_each(|a| *a = *a * step + of_centre);
    let largest = scores.iter().fold(f32::NEG_INFINITY, |m, s| m.max(*s));
    let largest = largest.ceil();
    for s in scores {
        *s = (*s - largest).max(-65536.0);
    }
    largest
}

/// Replaces a row's scores, put on the grid, by their differences from M.
#[cold]
#[inline(never)]
fn count_from_ceil(scores: &mut [f32], Grid { step, base }: Grid, ceil: f32) {
    for s in scores {
        *s = (grid_score(*s, step, base) - ceil).max(-65536.0);
    }
}

/// The weights of `R` rows over one tile, in place of their scores, and the rows' sums l.
///
/// # Safety
/// `R·TILE` floats are readable and writable at `scores`.
#[inline(always)]
unsafe fn weights<S: Simd, const R: usize>(
    s: S,
    scores: *mut f32,
    base: S::F,
    grids: &[Grid; R],
) -> S::F {
    let mut sums = [s.splat(0.0); 4];
    for r in 0..R {
        let (base, step) = (s.lane(base, r), s.splat(grids[r].step));
        for t in (0..TILE).step_by(S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let at = scores.add(r * TILE + t);
                // The bases differ by an integer: the rounding to a 64th is that of the maximum's y.
                let y = s.grid_sum(s.load(at), step, base);
                let p = power(s, s.max(y, s.splat(LOWEST)));
                sums[r] = s.add(sums[r], s.to_half(p));
                s.store(at, p);
            }
        }
    }
    s.exact_sums(sums)
}

/// `pow2` of section 6 for whole numbers up to [`LARGEST_GROWTH`], −∞ among them.
#[inline(always)]
fn pow2<S: Simd>(s: S, k: S::F) -> S::F {
    let exponent = s.i_shl::<23>(s.bits(s.add(k, s.splat(ROUND))));
    let power = s.i_add(exponent, s.i_splat(1.0f32.to_bits() as i32));
    let is_small = s.i_sar::<31>(s.bits(s.add(k, s.splat(64.0))));
    s.of_bits(s.i_and(power, s.i_xor(is_small, s.i_splat(-1))))
}

/// Lanes of `a` where `mask` has all bits, of `b` where it has none.
#[inline(always)]
fn select<S: Simd>(s: S, mask: S::I, a: S::F, b: S::F) -> S::F {
    let (a, b) = (s.bits(a), s.bits(b));
    s.of_bits(s.i_xor(b, s.i_and(s.i_xor(a, b), mask)))
}

/// Folds a tile's m and l into the states of `R` rows (section 6), and leaves the factors α and β for O; whether some α may differ from 1. What the rows
/// had stays in `rows.before`, for rows that see nothing.
#[inline(always)]
fn fold_scalars<S: Simd, const R: usize>(
    s: S,
    rows: &mut QueryRows,
    row: usize,
    [m, l]: [S::F; 2],
) -> bool {
    let four = |list: &mut Aligned<f32>| list.as_mut_slice()[row..][..4].as_mut_ptr();
    let (m_at, l_at) = (four(&mut rows.m), four(&mut rows.l));
    // SAFETY: four floats each.
    unsafe {
        let (m_old, l_old) = (s.load_four(m_at), s.load_four(l_at));
        s.store_first::<4>(rows.before[0].as_mut_ptr(), m_old);
        s.store_first::<4>(rows.before[1].as_mut_ptr(), l_old);
        let growth = s.sub(m, m_old);
        let moves = s.i_sar::<31>(s.bits(s.sub(s.splat(LARGEST_GROWTH), growth)));
        let negated = s.i_xor(s.bits(growth), s.i_splat(i32::MIN));
        let factor = pow2(s, select(s, moves, s.of_bits(negated), growth));
        let one = s.splat(1.0);
        let (alpha, beta) = (select(s, moves, factor, one), select(s, moves, one, factor));
        s.store_first::<R>(m_at, select(s, moves, m, m_old));
        s.store_first::<R>(l_at, s.add(s.mul(l_old, alpha), s.mul(l, beta)));
        s.store_first::<R>(four(&mut rows.alpha), alpha);
        s.store_first::<R>(four(&mut rows.beta), beta);
        s.any_negative(moves)
    }
}

/// Gives row `row + r`, which sees nothing of the tile, back what it had.
fn keep_state(rows: &mut QueryRows, row: usize, r: usize) {
    rows.m.as_mut_slice()[row + r] = rows.before[0][r];
    rows.l.as_mut_slice()[row + r] = rows.before[1][r];
    rows.alpha.as_mut_slice()[row + r] = 1.0;
    rows.beta.as_mut_slice()[row + r] = -1.0;
}

/// Multiplies the O of those of `R` rows by their α whose α is not 1. The others' O stays as it is: inside a segment it is normal, or 0. So does the O of
/// an empty state, which is 0.
///
/// # Safety
/// The rows have O.
#[inline(always)]
unsafe fn move_state<S: Simd, const R: usize>(s: S, rows: &mut QueryRows, row: usize) {
    for r in 0..R {
        let alpha = rows.alpha.as_slice()[row + r];
        if alpha == 1.0 || rows.before[0][r] == f32::NEG_INFINITY {
            continue;
        }
        let o = &mut rows.o.as_mut_slice()[(row + r) * rows.dim.v..][..rows.dim.v];
        for o in o.chunks_exact_mut(S::LANES) {
            // SAFETY: LANES floats.
            unsafe {
                let old = s.mul(s.load(o.as_ptr()), s.splat(alpha));
                s.store(o.as_mut_ptr(), s.ftz(old));
            }
        }
    }
}

/// The operands of the weights of `R` rows for group g of V, and what their sums with V are made to values by.
///
/// # Safety
/// The rows have their weights in place of their scores.
#[inline(always)]
unsafe fn weight_bytes<D: Dot, const R: usize>(
    d: D,
    tile: &Tile,
    rows: &mut QueryRows,
    row: usize,
    g: usize,
) {
    let s = d.simd();
    let p = rows.scores.as_slice()[row * TILE..][..R * TILE].as_ptr();
    let scales = tile.v_scale[g].as_ptr();
    let mut largest = [s.splat(0.0); 4];
    for r in 0..R {
        for t in (0..TILE).step_by(D::S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let x = s.mul(s.load(p.add(r * TILE + t)), s.load(scales.add(t)));
                largest[r] = s.max(largest[r], x);
            }
        }
    }
    let step = steps(s, s.maxima(largest), tile.v_step_bits);
    let inverse = step_inverse(s, step);
    let each = tile.v_groups * 4 * D::OPERAND;
    let out = &mut rows.v_operands.as_mut_slice()[row * each + g * 4 * D::OPERAND..];
    let out = out[..(R - 1) * each + 4 * D::OPERAND].as_mut_ptr();
    let mut sums = [s.i_splat(0); 4];
    for r in 0..R {
        let (inverse, mut numbers) = (s.lane(inverse, r), Numbers([0.0; TILE]));
        for t in (0..TILE).step_by(D::S::LANES) {
            // SAFETY: as above.
            unsafe {
                let x = s.mul(s.load(p.add(r * TILE + t)), s.load(scales.add(t)));
                let rounded = s.mul_add(x, inverse, s.load(THRESHOLDS.0.as_ptr().add(t)));
                s.store(numbers.0.as_mut_ptr().add(t), rounded);
            }
        }
        // SAFETY: TILE numbers; four operands of row r.
        sums[r] = unsafe { d.v_operands(numbers.0.as_mut_ptr(), out.add(r * each)) };
    }
    let (bias, unit) = (tile.v_code.bias(0), tile.v_code.unit());
    let at = g * rows.stride() + row;
    // SAFETY: R floats each; β has room for four.
    unsafe {
        let biases = s.mul(s.to_f(s.i_sums(sums)), s.splat(bias));
        let to = rows.w_biases.as_mut_slice()[at..][..R].as_mut_ptr();
        s.store_first::<R>(to, biases);
        let mut factor = s.splat(unit);
        if tile.v_has_shift {
            for r in 0..R {
                let z = shift_term(s, p.add(r * TILE), tile.v_shift[g].as_ptr());
                rows.v_shifts.as_mut_slice()[at + r] = z;
            }
        } else {
            let beta = s.load_four(rows.beta.as_slice()[row..][..4].as_ptr());
            factor = s.mul(factor, beta);
        }
        let to = rows.w_steps.as_mut_slice()[at..][..R].as_mut_ptr();
        s.store_first::<R>(to, s.mul(step, factor));
    }
}

/// κ of the largest scaled weights.
#[inline(always)]
fn steps<S: Simd>(s: S, largest: S::F, bits: u32) -> S::F {
    let low = (1 << (24 - bits)) - 1;
    let largest = s.max(largest, s.splat(exp2i(SMALLEST_POINT / GRID)));
    let step = s.bits(s.mul(largest, s.splat(TO_STEP)));
    s.of_bits(s.i_and(s.i_add(step, s.i_splat(low)), s.i_splat(!low)))
}

/// A tile's numbers, on a cache line.
#[repr(align(64))]
struct Numbers([f32; TILE]);

/// θ of the tile's tokens.
static THRESHOLDS: Numbers = {
    let mut all = [0.0; TILE];
    let mut t = 0;
    while t < TILE {
        all[t] = threshold(t);
        t += 1;
    }
    Numbers(all)
};

/// `z` of section 5: eight partial sums, token t in sum t mod 8.
///
/// # Safety
/// TILE floats are readable at each.
#[inline(always)]
unsafe fn shift_term<S: Simd>(s: S, p: *const f32, shifts: *const f32) -> f32 {
    let mut sums = s.splat(0.0);
    for t in (0..TILE).step_by(S::LANES) {
        // SAFETY: t + LANES ≤ TILE.
        let product = unsafe { s.mul(s.to_half(s.load(p.add(t))), s.load(shifts.add(t))) };
        sums = s.add(sums, product);
        if S::ROWS == 4 {
            // The next eight tokens; what the other half of the lanes sums up is nothing.
            let next = s.of_bits(s.i_exchange(s.bits(product), 2));
            sums = s.add(sums, next);
        }
    }
    let mut z = [0.0f32; 16];
    // SAFETY: `z` has room for any vector.
    unsafe { s.store(z.as_mut_ptr(), sums) };
    ((z[0] + z[1]) + (z[2] + z[3])) + ((z[4] + z[5]) + (z[6] + z[7]))
}
