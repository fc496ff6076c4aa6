//! The integer arithmetic's weights of a tile: section 5 of docs/arithmetic.md between the two products of `integer.rs`.

use std::ops::Range;

use attn_core::{
    arithmetic::{TILE, shift_sum, threshold, weight_step},
    format::MAX_GROUPS,
};

use crate::{
    query::QueryRows,
    simd::{Dot, Simd},
    softmax::{Modifiers, fold_scalars, rcp, weights},
    tile::Tile,
};

/// Section 5 for up to LANES rows: weights, their operands for V, and the sums that go with them. Rows take each stage in turn, so that the
/// next row's instructions fill the waits of a stage's chain.
///
/// # Safety
/// The tile's places are readable, and `rows` has the scores of its tokens.
#[inline(always)]
pub(crate) unsafe fn weigh<D: Dot>(
    d: D,
    tile: &Tile,
    rows: &mut QueryRows,
    block: Range<usize>,
    seen: &impl Fn(usize) -> [usize; 2],
    modifiers: &impl Fn(usize) -> Modifiers,
) {
    let s = d.simd();
    for row in block.clone() {
        let range = seen(row);
        if range[0] >= range[1] {
            rows.beta.as_mut_slice()[row] = -1.0;
            continue;
        }
        let p = rows.scores.as_mut_slice()[row * TILE..][..TILE].as_mut_ptr();
        // SAFETY: TILE floats at p.
        let (m, l) = unsafe { weights::<D::S, true>(s, p, range, &modifiers(row)) };
        fold_scalars(rows, row, m, l);
    }
    for g in 0..tile.v_groups {
        let mut steps = [1.0; MOST_LANES];
        for (row, step) in block.clone().zip(&mut steps) {
            if rows.beta.as_slice()[row] < 0.0 {
                continue;
            }
            let p = rows.scores.as_slice()[row * TILE..][..TILE].as_ptr();
            let scales = tile.v_scale[g].as_ptr();
            let mut largest = s.splat(0.0);
            for t in (0..TILE).step_by(D::S::LANES) {
                // SAFETY: t + LANES ≤ TILE.
                unsafe {
                    largest = s.max(largest, s.mul(s.load(p.add(t)), s.load(scales.add(t))));
                }
            }
            *step = weight_step(s.largest(largest), tile.v_step_bits);
            rows.w_steps.as_mut_slice()[row * MAX_GROUPS + g] = *step;
        }
        let mut inverses = [0.0; MOST_LANES];
        // SAFETY: LANES floats each.
        unsafe { s.store(inverses.as_mut_ptr(), rcp(s, s.load(steps.as_ptr()))) };
        for (i, row) in block.clone().enumerate() {
            if rows.beta.as_slice()[row] >= 0.0 {
                let inverse = if steps[i] == 0.0 { 0.0 } else { inverses[i] };
                // SAFETY: the row has its weights.
                unsafe { weight_bytes(d, tile, rows, [row, g], inverse) };
            }
        }
    }
}

/// Most lanes of a vector.
const MOST_LANES: usize = 16;

/// The operands of one row's weights for group g of V, and their sums; `inverse` is 1/κ.
///
/// # Safety
/// The row has its weights in place of its scores.
#[inline(always)]
unsafe fn weight_bytes<D: Dot>(
    d: D,
    tile: &Tile,
    rows: &mut QueryRows,
    [row, g]: [usize; 2],
    inverse: f32,
) {
    let s = d.simd();
    let p = rows.scores.as_slice()[row * TILE..][..TILE].as_ptr();
    let w = rows.integers.as_mut_slice()[..TILE].as_mut_ptr();
    let (scales, inverse) = (tile.v_scale[g].as_ptr(), s.splat(inverse));
    let mut w_sum = s.i_splat(0);
    for t in (0..TILE).step_by(D::S::LANES) {
        // SAFETY: t + LANES ≤ TILE.
        unsafe {
            let x = s.mul(s.load(p.add(t)), s.load(scales.add(t)));
            let rounded = s.add(s.mul(x, inverse), s.load(THRESHOLDS.as_ptr().add(t)));
            let w8 = s.i_and(s.i_shr::<8>(s.bits(rounded)), s.i_splat(255));
            s.i_store(w.add(t).cast(), w8);
            w_sum = s.i_add(w_sum, w8);
        }
    }
    let at = (row * tile.v_groups + g) * 4 * D::OPERAND;
    let out = rows.v_operands.as_mut_slice()[at..][..4 * D::OPERAND].as_mut_ptr();
    // SAFETY: TILE integers, four operands.
    unsafe { d.v_operands(w, out) };
    rows.w_sums.as_mut_slice()[row * MAX_GROUPS + g] = s.i_sum(w_sum);
    if tile.v_has_shift {
        // SAFETY: TILE floats each.
        let z = unsafe { shift_term(s, p, tile.v_shift[g].as_ptr()) };
        rows.v_shifts.as_mut_slice()[row * MAX_GROUPS + g] = z;
    }
}

/// θ of the tile's tokens.
static THRESHOLDS: [f32; TILE] = {
    let mut all = [0.0; TILE];
    let mut t = 0;
    while t < TILE {
        all[t] = threshold(t);
        t += 1;
    }
    all
};

/// `z` of section 5: eight partial sums, token t in sum t mod 8.
///
/// # Safety
/// TILE floats are readable at each.
#[inline(always)]
unsafe fn shift_term<S: Simd>(s: S, p: *const f32, shifts: *const f32) -> f32 {
    let mut products = [0.0f32; TILE];
    for t in (0..TILE).step_by(S::LANES) {
        // SAFETY: t + LANES ≤ TILE.
        unsafe {
            let product = s.mul(s.load(p.add(t)), s.load(shifts.add(t)));
            s.store(products.as_mut_ptr().add(t), product);
        }
    }
    shift_sum(products.into_iter())
}
