//! The integer arithmetic's weights of a tile: section 5 of docs/arithmetic.md between the two products of `integer.rs`.
//!
//! One vector holds what belongs to up to four query rows, that of query row r in lane r of each of the vector's rows.

use attn_core::arithmetic::{
    EXP2_WEIGHT, ROUND, ROUND_WEIGHT, SMALLEST_WEIGHT, TILE, WEIGHT_BASE, WEIGHT_MAX, exp2i,
    threshold,
};

use crate::{
    query::QueryRows,
    scratch::Aligned,
    simd::{Dot, Simd},
    softmax::{Modifiers, exp2, modify, rcp},
    tile::Tile,
};

/// Section 5 for `R` rows, four at most, from `row` on: weights, their operands for V, and what goes with them.
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
    let mut ranges = [[0, TILE]; R];
    for r in 0..R {
        ranges[r] = seen(row + r);
    }
    let p = rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr();
    // SAFETY: R·TILE floats at p; the caller's contract.
    unsafe {
        let (m, l) = weights::<D::S, R>(s, p, ranges, |r| modifiers(row + r));
        fold_scalars::<D::S, R>(s, rows, row, [m, s.to_f(l)]);
        for (r, [start, end]) in ranges.into_iter().enumerate() {
            if start >= end {
                keep_state(rows, row, r);
            }
        }
        for g in 0..tile.v_groups {
            weight_bytes::<D, R>(d, tile, rows, row, g);
        }
    }
}

/// The weights of `R` rows over one tile, in place of their scores: the maxima m, and the sums l in units of 2^-22.
///
/// Tokens outside a row's range get 0; of a row whose range is empty, nothing that comes back is a number.
///
/// # Safety
/// `R·TILE` floats are readable and writable at `scores`.
#[inline(always)]
unsafe fn weights<S: Simd, const R: usize>(
    s: S,
    scores: *mut f32,
    ranges: [[usize; 2]; R],
    modifiers: impl Fn(usize) -> Modifiers,
) -> (S::F, S::I) {
    let mut largest = [s.splat(0.0); 4];
    for r in 0..R {
        // SAFETY: row r's TILE floats.
        unsafe {
            let row = scores.add(r * TILE);
            modify(s, row, ranges[r], &modifiers(r));
            let mut max = s.load(row);
            for lane in (S::LANES..TILE).step_by(S::LANES) {
                max = s.max(max, s.load(row.add(lane)));
            }
            largest[r] = max;
        }
    }
    let top = s.ceil(s.maxima(largest));
    let mut sums = [s.i_splat(0); 4];
    for r in 0..R {
        let ([start, end], top) = (ranges[r], s.lane(top, r));
        for lane in (0..TILE).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let at = scores.add(r * TILE + lane);
                // −d: the arithmetic's d with its sign changed gives the same bits.
                let x = s.max(s.sub(s.load(at), top), s.splat(-WEIGHT_MAX));
                let mut p = exp2(s, x, ROUND_WEIGHT, &EXP2_WEIGHT);
                if start > 0 || end < TILE {
                    let from = |t: usize| t as i32 - lane as i32;
                    p = s.keep(p, from(start), from(end), 0.0);
                }
                sums[r] = s.i_add(sums[r], s.bits(s.add(p, s.splat(WEIGHT_BASE))));
                s.store(at, p);
            }
        }
    }
    // Every lane counted the base once.
    let base = (WEIGHT_BASE.to_bits() as i32).wrapping_mul(TILE as i32);
    let l = s.i_sub(s.i_sums(sums), s.i_splat(base));
    (s.sub(top, s.splat(1.0)), l)
}

/// `pow2` of section 6 for distances of 0 and more, infinity among them.
#[inline(always)]
fn pow2<S: Simd>(s: S, distance: S::F) -> S::F {
    let one = s.i_splat(1.0f32.to_bits() as i32);
    let exponent = s.i_shl::<23>(s.bits(s.add(distance, s.splat(ROUND))));
    let far = s.i_sub(s.i_splat(64.0f32.to_bits() as i32), s.bits(distance));
    s.of_bits(unless(s, far, s.i_sub(one, exponent)))
}

/// `x`, or 0 in lanes where `sign` is negative.
#[inline(always)]
fn unless<S: Simd>(s: S, sign: S::I, x: S::I) -> S::I {
    s.i_and(x, s.i_xor(s.i_sar::<31>(sign), s.i_splat(-1)))
}

/// Folds a tile's m and l, in units of 2^-22, into the states of `R` rows (section 6), and leaves the factors α and β for O. What the rows had
/// stays in `rows.before`, for rows that see nothing.
#[inline(always)]
fn fold_scalars<S: Simd, const R: usize>(
    s: S,
    rows: &mut QueryRows,
    row: usize,
    [m, l]: [S::F; 2],
) {
    let four = |list: &mut Aligned<f32>| list.as_mut_slice()[row..][..4].as_mut_ptr();
    let (m_at, l_at) = (four(&mut rows.m), four(&mut rows.l));
    // SAFETY: four floats each.
    unsafe {
        let (m_old, l_old) = (s.load_four(m_at), s.load_four(l_at));
        s.store_first::<4>(rows.before[0].as_mut_ptr(), m_old);
        s.store_first::<4>(rows.before[1].as_mut_ptr(), l_old);
        let top = s.max(m_old, m);
        let (alpha, beta) = (pow2(s, s.sub(top, m_old)), pow2(s, s.sub(top, m)));
        let l = s.mul(s.mul(l, s.splat(exp2i(-22))), beta);
        s.store_first::<R>(m_at, top);
        s.store_first::<R>(l_at, s.add(s.mul(l_old, alpha), l));
        s.store_first::<R>(four(&mut rows.alpha), alpha);
        s.store_first::<R>(four(&mut rows.beta), beta);
    }
}

/// Gives row `row + r`, which sees nothing of the tile, back what it had.
fn keep_state(rows: &mut QueryRows, row: usize, r: usize) {
    rows.m.as_mut_slice()[row + r] = rows.before[0][r];
    rows.l.as_mut_slice()[row + r] = rows.before[1][r];
    rows.beta.as_mut_slice()[row + r] = -1.0;
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
    let [step, inverse] = weight_steps(s, s.maxima(largest), tile.v_step_bits);
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
                let rounded = s.add(s.mul(x, inverse), s.load(THRESHOLDS.0.as_ptr().add(t)));
                s.store(numbers.0.as_mut_ptr().add(t), rounded);
            }
        }
        // SAFETY: TILE numbers; four operands of row r.
        sums[r] = unsafe { d.v_operands(numbers.0.as_mut_ptr(), out.add(r * each)) };
    }
    let (bias, unit) = (tile.v_code.bias(0), tile.v_code.unit());
    let at = g * rows.stride() + row;
    // SAFETY: R floats each.
    unsafe {
        let biases = s.mul(s.to_f(s.i_sums(sums)), s.splat(bias));
        let to = rows.w_biases.as_mut_slice()[at..][..R].as_mut_ptr();
        s.store_first::<R>(to, biases);
        let to = rows.w_steps.as_mut_slice()[at..][..R].as_mut_ptr();
        s.store_first::<R>(to, s.mul(step, s.splat(unit)));
        if tile.v_has_shift {
            for r in 0..R {
                let z = shift_term(s, p.add(r * TILE), tile.v_shift[g].as_ptr());
                rows.v_shifts.as_mut_slice()[at + r] = z;
            }
        }
    }
}

/// κ of the largest weights, and 1/κ; both 0 where the weights are too small to count.
#[inline(always)]
fn weight_steps<S: Simd>(s: S, largest: S::F, bits: u32) -> [S::F; 2] {
    let low = (1 << (24 - bits)) - 1;
    let step = s.mul(largest, s.splat(f32::from_bits(0x3B80_8081)));
    let step = s.i_and(s.i_add(s.bits(step), s.i_splat(low)), s.i_splat(!low));
    let small = s.i_sub(s.bits(largest), s.i_splat(SMALLEST_WEIGHT.to_bits() as i32));
    let inverse = s.bits(rcp(s, s.of_bits(step)));
    [
        s.of_bits(unless(s, small, step)),
        s.of_bits(unless(s, small, inverse)),
    ]
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
        let product = unsafe { s.mul(s.load(p.add(t)), s.load(shifts.add(t))) };
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
