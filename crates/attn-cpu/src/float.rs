//! The float arithmetic of one tile (section 7): 16-bit floats are widened in registers, once for a block of rows.
//!
//! Lanes hold dims in the order in which the arithmetic sums them, so the fixed order costs nothing: even panels of 8 dims are
//! accumulators 0..8, odd ones 8..16, and section 7 adds the halves.

use std::ops::Range;

use attn_core::arithmetic::TILE;

use crate::{
    fetch::Fetch,
    query::{QueryRows, in_blocks},
    simd::Simd,
    softmax::{Modifiers, fold_scalars, weights},
    tile::{Float, Tile},
    wide,
    widen::{BF16, F16, F32, WIDE, widen, widen_panels},
};

/// The halves' sum (section 8) of the scores of `R` rows for `U` vectors of tokens, the first of which is `first` vectors behind `base`; `ROWS/2`
/// tokens to a vector, 8 partial sums each.
///
/// # Safety
/// The tokens lie in their place; `R` rows of `dim` floats are readable at `q`.
#[inline(always)]
unsafe fn halves<S: Simd, const R: usize, const U: usize, const KIND: u8>(
    s: S,
    tile: &Tile,
    base: *const u8,
    first: usize,
    q: *const f32,
    dim: usize,
) -> [[S::F; U]; R] {
    let width = if KIND == F32 { 32 } else { 16 };
    let mut acc = [[[s.splat(0.0); U]; 2]; R];
    for i in 0..dim / 16 {
        for half in 0..2 {
            let mut k = [s.splat(0.0); U];
            for u in 0..U {
                let at = (2 * i + half) * tile.k_stride + (first + u) * (S::ROWS / 2) * width;
                // SAFETY: panels 2i and 2i + 1 of dim/8.
                k[u] = unsafe { widen::<S, KIND>(s, base.add(at)) };
            }
            for r in 0..R {
                // SAFETY: 8 of row r's dims.
                let q = unsafe { s.load_8(q.add(r * dim + 16 * i + 8 * half)) };
                for u in 0..U {
                    acc[r][half][u] = s.add(acc[r][half][u], s.mul(q, k[u]));
                }
            }
        }
    }
    let mut sums = [[s.splat(0.0); U]; R];
    for r in 0..R {
        for u in 0..U {
            sums[r][u] = s.add(acc[r][0][u], acc[r][1][u]);
        }
    }
    sums
}

/// Scores of `R` rows from `row` on.
///
/// # Safety
/// The tile's places are readable.
#[inline(always)]
unsafe fn scores<S: Simd, const R: usize, const KIND: u8>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let dim = rows.dim.k;
    let width = if KIND == F32 { 32 } else { 16 };
    let q = rows.q.as_slice()[row * dim..][..R * dim].as_ptr();
    let out = rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr();
    for t0 in (0..tile.tokens).step_by(S::LANES) {
        let mut sums = [[s.splat(0.0); 4]; R];
        for c in 0..4 {
            let t = t0 + c * S::ROWS;
            fetch.step(s);
            // SAFETY: t < 64; ROWS tokens from t on, two vectors, lie in the place of their 16.
            unsafe {
                let base = tile.k[t / 16].add(t % 16 * width);
                if S::ROWS == 2 {
                    // 16 registers hold the sums of four rows for one vector.
                    let low = halves::<S, R, 1, KIND>(s, tile, base, 0, q, dim);
                    let high = halves::<S, R, 1, KIND>(s, tile, base, 1, q, dim);
                    for r in 0..R {
                        sums[r][c] = s.row_pairs(low[r][0], high[r][0]);
                    }
                } else {
                    let both = halves::<S, R, 2, KIND>(s, tile, base, 0, q, dim);
                    for r in 0..R {
                        sums[r][c] = s.row_pairs(both[r][0], both[r][1]);
                    }
                }
            }
        }
        for r in 0..R {
            // SAFETY: R·TILE floats at `out`.
            unsafe { s.store(out.add(r * TILE + t0), s.rows(sums[r])) };
        }
    }
}

/// `Σ p·v` of `R` rows over the tokens `start..end`, and `U` vectors of dims, folded into their states.
///
/// # Safety
/// The tile's places are readable, `weights` has run for these rows, and `dim0 + U·LANES ≤ dim`.
#[allow(clippy::too_many_arguments, reason = "all of them vary by call")]
#[inline(always)]
unsafe fn values<S: Simd, const R: usize, const U: usize, const KIND: u8>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
    [start, end]: [usize; 2],
    dim0: usize,
) {
    let dim = rows.dim.v;
    let p = rows.scores.as_slice()[row * TILE..][..R * TILE].as_ptr();
    let mut acc = [[s.splat(0.0); U]; R];
    for t in start..end {
        let mut v = [s.splat(0.0); U];
        for (u, v) in v.iter_mut().enumerate() {
            // SAFETY: token t < 64 lies in the place of its 16; panels dim0/8.. of dim/8.
            *v = unsafe {
                let panel = dim0 / 8 + u * (S::ROWS / 2);
                let at = tile.v[t / 16].add(t % 16 * tile.v_row + panel * tile.v_stride);
                widen_panels::<S, KIND>(s, at, tile.v_stride)
            };
        }
        if t % 16 == 0 {
            fetch.step(s);
        }
        for r in 0..R {
            // SAFETY: R·TILE floats at p.
            let weight = s.splat(unsafe { *p.add(r * TILE + t) });
            for u in 0..U {
                acc[r][u] = s.add(acc[r][u], s.mul(weight, v[u]));
            }
        }
    }
    for r in 0..R {
        let (alpha, beta) = (
            rows.alpha.as_slice()[row + r],
            rows.beta.as_slice()[row + r],
        );
        let o = rows.o.as_mut_slice()[(row + r) * dim + dim0..][..U * S::LANES].as_mut_ptr();
        for u in 0..U {
            // SAFETY: U·LANES floats at o.
            unsafe {
                let o = o.add(u * S::LANES);
                let old = s.ftz(s.mul(s.load(o), s.splat(alpha)));
                s.store(o, s.add(old, s.mul(acc[r][u], s.splat(beta))));
            }
        }
    }
}

/// All dims of `R` rows.
///
/// # Safety
/// Those of [`values`].
#[inline(always)]
unsafe fn all_values<S: Simd, const R: usize, const KIND: u8>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
    seen: [usize; 2],
) {
    let mut dim0 = 0;
    while dim0 < rows.dim.v {
        let left = (rows.dim.v - dim0) / S::LANES;
        // SAFETY: the caller's contract; at most `left` vectors.
        unsafe {
            if left >= 4 && S::ROWS == 4 {
                values::<S, R, 4, KIND>(s, tile, fetch, rows, row, seen, dim0);
                dim0 += 4 * S::LANES;
            } else if left >= 2 {
                values::<S, R, 2, KIND>(s, tile, fetch, rows, row, seen, dim0);
                dim0 += 2 * S::LANES;
            } else {
                values::<S, R, 1, KIND>(s, tile, fetch, rows, row, seen, dim0);
                dim0 += S::LANES;
            }
        }
    }
}

/// All dims of the rows of a run. A token that a row does not see has the weight 0, which adds nothing: a block goes over the tokens that any of its
/// rows sees.
///
/// # Safety
/// Those of [`fold_tile`]; every row of the run sees some token.
#[inline(always)]
unsafe fn fold_values<S: Simd, const KIND: u8>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    run: Range<usize>,
    seen: impl Fn(usize) -> [usize; 2],
) {
    let hull = |[a, b]: [usize; 2], [c, d]: [usize; 2]| [a.min(c), b.max(d)];
    // SAFETY: the caller's contract.
    unsafe {
        in_blocks!(run.start, run.end, |row, R| all_values::<S, R, KIND>(
            s,
            tile,
            fetch,
            rows,
            row,
            (row + 1..row + R).map(&seen).fold(seen(row), hull)
        ));
    }
}

/// The first neighbouring rows from `first` on that see some token of a tile.
#[inline(always)]
fn next_run(
    count: usize,
    first: usize,
    seen: impl Fn(usize) -> [usize; 2],
) -> Option<Range<usize>> {
    let sees = |row: &usize| {
        let [start, end] = seen(*row);
        start < end
    };
    let first = (first..count).find(sees)?;
    let end = (first..count).find(|row| !sees(row)).unwrap_or(count);
    Some(first..end)
}

/// Folds one tile into the state of every row that sees some of it. V is too small by the factor `v_unit`.
///
/// # Safety
/// The tile's places are readable.
#[inline(always)]
pub(crate) unsafe fn fold_tile<S: Simd>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    seen: impl Fn(usize) -> [usize; 2],
    modifiers: impl Fn(usize) -> Modifiers,
    v_unit: f32,
) {
    let (blocks, tokens) = (rows.count.div_ceil(4), tile.tokens.div_ceil(S::LANES));
    fetch.spread(blocks * 4 * (tokens + rows.dim.v.div_ceil(4 * S::LANES)));
    let mut done = 0;
    while let Some(run) = next_run(rows.count, done, &seen) {
        done = run.end;
        // SAFETY: the caller's contract.
        unsafe { fold_run(s, tile, fetch, rows, run, &seen, &modifiers, v_unit) };
    }
}

/// Folds one tile into the states of a run of rows, all of which see some of it.
///
/// # Safety
/// Those of [`fold_tile`].
#[allow(
    clippy::too_many_arguments,
    reason = "those of `fold_tile`, and the run"
)]
#[inline(always)]
unsafe fn fold_run<S: Simd>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    run: Range<usize>,
    seen: impl Fn(usize) -> [usize; 2],
    modifiers: impl Fn(usize) -> Modifiers,
    v_unit: f32,
) {
    let Range { start, end } = run.clone();
    // SAFETY: the caller's contract, throughout.
    unsafe {
        match tile.k_float {
            Float::F16 => in_blocks!(start, end, |row, R| scores::<S, R, F16>(
                s, tile, fetch, rows, row
            )),
            Float::Bf16 => in_blocks!(start, end, |row, R| scores::<S, R, BF16>(
                s, tile, fetch, rows, row
            )),
            Float::F32 => in_blocks!(start, end, |row, R| scores::<S, R, F32>(
                s, tile, fetch, rows, row
            )),
            Float::Wide => in_blocks!(start, end, |row, R| wide::scores::<S, R>(
                s, tile, fetch, rows, row
            )),
        }
        for row in run.clone() {
            let p = rows.scores.as_mut_slice()[row * TILE..][..TILE].as_mut_ptr();
            let (m, l) = weights(s, p, seen(row), &modifiers(row));
            fold_scalars(rows, row, m, l);
            if v_unit != 1.0 {
                let p = rows.scores.as_mut_slice()[row * TILE..][..TILE].as_mut_ptr();
                for t in (0..TILE).step_by(S::LANES) {
                    s.store(p.add(t), s.mul(s.load(p.add(t)), s.splat(v_unit)));
                }
            }
        }
        match tile.v_float {
            Float::F16 => fold_values::<S, F16>(s, tile, fetch, rows, run, seen),
            Float::Bf16 => fold_values::<S, BF16>(s, tile, fetch, rows, run, seen),
            Float::F32 => fold_values::<S, F32>(s, tile, fetch, rows, run, seen),
            Float::Wide => fold_values::<S, WIDE>(s, tile, fetch, rows, run, seen),
        }
    }
}
