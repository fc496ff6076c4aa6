//! The score modifiers (section 4 of docs/arithmetic.md), and the float arithmetic's weights and fold (sections 8 and 6), over vectors.

use attn_core::arithmetic::{EXP2_FLOAT, EXP2_MIN, ROUND, TILE, WEIGHT_BASE, exp2i, fold_factors};

use crate::{query::QueryRows, simd::Simd};

/// Lane numbers of a tile.
static TOKENS: [i32; TILE] = {
    let mut tokens = [0; TILE];
    let mut t = 0;
    while t < TILE {
        tokens[t] = t as i32;
        t += 1;
    }
    tokens
};

/// The score modifiers of one row and tile.
#[derive(Clone, Copy)]
pub(crate) struct Modifiers {
    /// 2/softcap and softcap·log2 e.
    pub softcap: Option<[f32; 2]>,
    /// slope·log2 e, and the tile's first token minus the row's position.
    pub alibi: Option<(f32, i32)>,
}

impl Modifiers {
    pub fn is_none(&self) -> bool {
        self.softcap.is_none() && self.alibi.is_none()
    }
}

/// `exp2f` of section 8.
#[inline(always)]
fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    let t = s.add(x, s.splat(ROUND));
    let r = s.sub(x, s.sub(t, s.splat(ROUND)));
    let mut y = s.splat(EXP2_FLOAT[0]);
    for c in &EXP2_FLOAT[1..] {
        y = s.add(s.mul(y, r), s.splat(*c));
    }
    s.of_bits(s.i_add(s.bits(y), s.i_shl::<23>(s.bits(t))))
}

/// `rcp` of section 7.
#[inline(always)]
fn rcp<S: Simd>(s: S, x: S::F) -> S::F {
    let mut y = s.of_bits(s.i_sub(s.i_splat(0x7EF3_11C7), s.bits(x)));
    for _ in 0..4 {
        y = s.mul(y, s.sub(s.splat(2.0), s.mul(x, y)));
    }
    y
}

#[inline(always)]
fn softcap<S: Simd>(s: S, x: S::F, [inverse, cap]: [f32; 2]) -> S::F {
    let sign = s.i_splat(i32::MIN);
    let x_abs = s.abs(x);
    let down = s.of_bits(s.i_xor(s.bits(s.mul(x_abs, s.splat(inverse))), sign));
    let e = exp2(s, s.max(down, s.splat(EXP2_MIN)));
    let tanh = s.mul(s.sub(s.splat(1.0), e), rcp(s, s.add(s.splat(1.0), e)));
    // tanh·cap is not negative, so the sign goes in by ^.
    let capped = s.bits(s.mul(tanh, s.splat(cap)));
    s.of_bits(s.i_xor(capped, s.i_and(s.bits(x), sign)))
}

/// Applies the score modifiers of one row to its scores, and gives tokens outside `start..end` the score −∞.
///
/// # Safety
/// `TILE` floats are readable and writable at `scores`.
#[inline(always)]
pub(crate) unsafe fn modify<S: Simd>(
    s: S,
    scores: *mut f32,
    [start, end]: [usize; 2],
    modifiers: &Modifiers,
) {
    if start == 0 && end == TILE && modifiers.is_none() {
        return;
    }
    for lane in (0..TILE).step_by(S::LANES) {
        // SAFETY: lane + LANES ≤ TILE; the caller's contract.
        let mut x = unsafe { s.load(scores.add(lane)) };
        if let Some(cap) = modifiers.softcap {
            x = softcap(s, x, cap);
        }
        if let Some((slope, first)) = modifiers.alibi {
            // SAFETY: TOKENS has TILE entries.
            let t = unsafe { s.i_load(TOKENS.as_ptr().add(lane).cast()) };
            let distance = s.to_f(s.i_add(t, s.i_splat(first)));
            x = s.add(x, s.mul(s.splat(slope), distance));
        }
        let from = |t: usize| t as i32 - lane as i32;
        x = s.keep(x, from(start), from(end), f32::NEG_INFINITY);
        // SAFETY: as above.
        unsafe { s.store(scores.add(lane), x) };
    }
}

/// One row's weights over one tile in the float arithmetic, in place of its scores: the maximum m and the sum l in units of 2^-22.
///
/// Tokens outside `start..end` get 0. `start < end ≤ TILE`.
///
/// # Safety
/// `TILE` floats are readable and writable at `scores`.
#[inline(always)]
pub(crate) unsafe fn weights<S: Simd>(
    s: S,
    scores: *mut f32,
    [start, end]: [usize; 2],
    modifiers: &Modifiers,
) -> (f32, i32) {
    // SAFETY: the caller's contract.
    unsafe { modify(s, scores, [start, end], modifiers) };
    // SAFETY: TILE floats are readable.
    let mut max = unsafe { s.load(scores) };
    for lane in (S::LANES..TILE).step_by(S::LANES) {
        // SAFETY: as above.
        max = s.max(max, unsafe { s.load(scores.add(lane)) });
    }
    let largest = s.largest(max).ceil();
    let mut l = s.i_splat(0);
    for lane in (0..TILE).step_by(S::LANES) {
        // SAFETY: as above.
        let x = unsafe { s.load(scores.add(lane)) };
        let x = s.max(s.sub(x, s.splat(largest)), s.splat(EXP2_MIN));
        let mut p = exp2(s, x);
        if start > 0 || end < TILE {
            let from = |t: usize| t as i32 - lane as i32;
            p = s.keep(p, from(start), from(end), 0.0);
        }
        l = s.i_add(l, s.bits(s.add(p, s.splat(WEIGHT_BASE))));
        // SAFETY: as above.
        unsafe { s.store(scores.add(lane), p) };
    }
    // Every lane counted the base once.
    let base = (WEIGHT_BASE.to_bits() as i32).wrapping_mul(TILE as i32);
    (largest, s.i_sum(l).wrapping_sub(base))
}

/// Folds a tile's m and l into a row's state (section 6), and leaves the factors α and β for O.
#[inline(always)]
pub(crate) fn fold_scalars(rows: &mut QueryRows, row: usize, m_tile: f32, l_tile: i32) {
    let (m, l) = (
        &mut rows.m.as_mut_slice()[row],
        &mut rows.l.as_mut_slice()[row],
    );
    let (joined, [alpha, beta]) = fold_factors(*m, m_tile);
    *l = *l * alpha + l_tile as f32 * exp2i(-22) * beta;
    *m = joined;
    rows.alpha.as_mut_slice()[row] = alpha;
    rows.beta.as_mut_slice()[row] = beta;
}
