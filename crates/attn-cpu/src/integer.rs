//! The integer arithmetic of one tile for all query rows of its KV head: the two products, and the weights between them.
//!
//! Rows go in blocks that share each loaded vector of codes; an accumulator holds four partial sums per token (of K) or dim
//! (of V), which meet once per tile. Cost on AVX-512 VNNI, per row and 64 bytes of codes: two `vpdpbusd` for int8, four for int4.

use attn_core::{
    arithmetic::{TILE, WEIGHT_BASE},
    format::MAX_GROUPS,
};

use crate::{
    query::{QueryRows, in_blocks},
    simd::{Dot, OPERAND, Simd},
    softmax::{Modifiers, fold_scalars, weights},
    tile::{Fetch, Tile},
};

/// Where 16 tokens of K lie, from which of them a step begins, and the operands of its rows, `row` bytes apart.
struct Keys {
    base: *const u8,
    stride: usize,
    first: usize,
    operands: *const u8,
    row: usize,
}

/// Products of `V` vectors of tokens with `R` rows, over the parts `from..to` of the dims.
///
/// # Safety
/// K has those parts, and so have the operands; four vectors cover LANES of the 16 tokens, whose nibbles lie in 8 rows.
#[inline(always)]
unsafe fn k_products<D: Dot, const R: usize, const V: usize, const NIBBLES: bool>(
    d: D,
    keys: &Keys,
    [from, to]: [usize; 2],
    vectors: [usize; V],
) -> [[D::KAcc; V]; R] {
    let s = d.simd();
    let mut acc = [[d.k_zero(); V]; R];
    for part in from..to {
        let mut codes = [d.k_none(); V];
        for j in 0..V {
            let token = keys.first + vectors[j] * D::S::ROWS;
            let row = if NIBBLES { token % 8 } else { token };
            // SAFETY: the caller's contract.
            let raw = unsafe { s.i_load(keys.base.add(part * keys.stride + row * 16)) };
            codes[j] = match NIBBLES {
                false => d.k_bytes(raw),
                true if token < 8 => d.k_low(raw),
                true => d.k_high(raw),
            };
        }
        for r in 0..R {
            // SAFETY: operand `part` of row r.
            let operand = unsafe {
                let at = keys.operands.add(r * keys.row + part * OPERAND);
                [s.i_row(at), s.i_row(at.add(16))]
            };
            for j in 0..V {
                acc[r][j] = d.k_dot(acc[r][j], codes[j], operand);
            }
        }
    }
    acc
}

/// The sums of [`k_products`] for a whole step, a token to a lane.
///
/// # Safety
/// As for [`k_products`].
#[inline(always)]
unsafe fn k_sums<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    keys: &Keys,
    parts: [usize; 2],
) -> [<D::S as Simd>::I; R] {
    let s = d.simd();
    let mut sums = [s.i_splat(0); R];
    // SAFETY: the caller's contract, throughout.
    unsafe {
        if R <= D::AT_ONCE {
            let acc = k_products::<D, R, 4, NIBBLES>(d, keys, parts, [0, 1, 2, 3]);
            for r in 0..R {
                let [a, b, c, e] = acc[r];
                sums[r] = s.i_rows([d.k_sum(a), d.k_sum(b), d.k_sum(c), d.k_sum(e)]);
            }
            return sums;
        }
        let acc = k_products::<D, R, 2, NIBBLES>(d, keys, parts, [0, 1]);
        for r in 0..R {
            sums[r] = s.i_pairs(d.k_sum(acc[r][0]), d.k_sum(acc[r][1]));
        }
        let acc = k_products::<D, R, 2, NIBBLES>(d, keys, parts, [2, 3]);
        for r in 0..R {
            let second = s.i_pairs(d.k_sum(acc[r][0]), d.k_sum(acc[r][1]));
            sums[r] = s.i_join(sums[r], second);
        }
    }
    sums
}

/// Section 3 for `R` rows from `row` on: scores of the tile's tokens.
///
/// # Safety
/// The tile's places are readable (see [`Tile`]), `rows` is prepared for its K.
#[inline(always)]
unsafe fn scores<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let (s, dim) = (d.simd(), rows.dim);
    let parts = dim / 16 / tile.k_groups;
    let each = dim / 16 * OPERAND;
    let operands = rows.k_operands.as_slice()[row * each..][..R * each].as_ptr();
    let bias = &rows.k_bias.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let q_sums = &rows.q_sums.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let (unit, offset) = (
        &rows.unit.as_slice()[row..][..R],
        &rows.offset.as_slice()[row..][..R],
    );
    let out = rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr();
    for t in (0..tile.tokens).step_by(D::S::LANES) {
        let keys = Keys {
            base: tile.k[t / 16],
            stride: tile.k_stride,
            first: if D::S::LANES == 16 { 0 } else { t % 16 },
            operands,
            row: each,
        };
        fetch.step(s);
        let mut a = [s.splat(0.0); R];
        for g in 0..tile.k_groups {
            // SAFETY: the tile's K and the rows' operands have dim/16 parts.
            let sums = unsafe { k_sums::<D, R, NIBBLES>(d, &keys, [g * parts, (g + 1) * parts]) };
            // SAFETY: t + LANES ≤ TILE; g < k_groups ≤ MAX_GROUPS.
            let scale = unsafe { s.load(tile.k_scale[g].as_ptr().add(t)) };
            for r in 0..R {
                let sum = s.i_sub(sums[r], s.i_splat(bias[r * MAX_GROUPS + g]));
                let term = s.mul(s.to_f(sum), scale);
                a[r] = if g == 0 { term } else { s.add(a[r], term) };
                if tile.k_has_shift {
                    // SAFETY: as for the scale.
                    let shift = unsafe { s.load(tile.k_shift[g].as_ptr().add(t)) };
                    a[r] = s.add(a[r], s.mul(s.splat(q_sums[r * MAX_GROUPS + g]), shift));
                }
            }
        }
        for r in 0..R {
            let x = s.add(s.mul(a[r], s.splat(unit[r])), s.splat(offset[r]));
            // SAFETY: R·TILE floats are writable at `out`.
            unsafe { s.store(out.add(r * TILE + t), x) };
        }
    }
}

/// Section 4 for one row: weights, their operands for V, and the sums that go with them.
///
/// # Safety
/// As for [`scores`], which has run.
#[inline(always)]
unsafe fn weigh<D: Dot>(
    d: D,
    tile: &Tile,
    rows: &mut QueryRows,
    row: usize,
    seen: [usize; 2],
    modifiers: &Modifiers,
) -> (f32, i32) {
    let s = d.simd();
    let p = rows.scores.as_mut_slice()[row * TILE..][..TILE].as_mut_ptr();
    // SAFETY: TILE floats at p.
    let (m, l) = unsafe { weights::<D::S, true>(s, p, seen, modifiers) };
    let w = rows.integers.as_mut_slice()[..TILE].as_mut_ptr();
    for g in 0..tile.v_groups {
        let mut w_sum = s.i_splat(0);
        for t in (0..TILE).step_by(D::S::LANES) {
            // SAFETY: t + LANES ≤ TILE.
            unsafe {
                let scaled = s.mul(s.load(p.add(t)), s.load(tile.v_scale[g].as_ptr().add(t)));
                // Adding 2^23 rounds; the integer is in the low bits.
                let bits = s.bits(s.add(scaled, s.splat(8_388_608.0)));
                let w16 = s.i_and(bits, s.i_splat(0xffff));
                s.i_store(w.add(t).cast(), w16);
                w_sum = s.i_add(w_sum, w16);
            }
        }
        let at = (row * tile.v_groups + g) * 4 * OPERAND;
        let out = rows.v_operands.as_mut_slice()[at..][..4 * OPERAND].as_mut_ptr();
        // SAFETY: TILE integers, four operands.
        unsafe { d.v_operands(w, out) };
        if tile.v_has_shift {
            rows.w_sums.as_mut_slice()[row * MAX_GROUPS + g] = 8 * s.i_sum(w_sum);
            let (mut hi, mut lo) = (s.i_splat(0), s.i_splat(0));
            for t in (0..TILE).step_by(D::S::LANES) {
                // SAFETY: t + LANES ≤ TILE.
                unsafe {
                    let bits = s.bits(s.add(s.load(p.add(t)), s.splat(WEIGHT_BASE)));
                    // (p22 + 128) >> 8, as the base holds those 128.
                    let p14 = s.i_and(s.i_shr::<8>(bits), s.i_splat(0xffff));
                    let plane = |x: &[i32; TILE]| s.i_mul(p14, s.i_load(x.as_ptr().add(t).cast()));
                    hi = s.i_add(hi, plane(&tile.v_shift_hi[g]));
                    lo = s.i_add(lo, plane(&tile.v_shift_lo[g]));
                }
            }
            let z = s.i_sum(hi) as f32 * 256.0 + s.i_sum(lo) as f32;
            rows.v_shifts.as_mut_slice()[row * MAX_GROUPS + g] = z * tile.v_shift_unit[g];
        }
    }
    (m, l)
}

/// The operands of a group's weights, of rows `row` bytes apart.
struct Weights {
    operands: *const u8,
    row: usize,
}

/// The results for `V` vectors of dims: products with `R` rows, and the codes' own sums where `V_BIAS` asks for them.
type VProducts<D, const R: usize, const V: usize> =
    ([[<D as Dot>::VAcc; V]; R], [<D as Dot>::VAcc; V]);

/// Products of `V` vectors of the dims from `dim0` on with `R` rows.
///
/// # Safety
/// The tile's V and the operands have as many panels as there are tokens; `dim0` and the LANES dims from there lie in V.
#[inline(always)]
unsafe fn v_products<D: Dot, const R: usize, const V: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    weights: &Weights,
    dim0: usize,
    vectors: [usize; V],
) -> VProducts<D, R, V> {
    let s = d.simd();
    let first = if D::S::LANES == 16 { 0 } else { dim0 % 16 };
    let mut acc = [[d.v_zero(); V]; R];
    let mut count = [d.v_zero(); V];
    for panel in 0..tile.tokens.div_ceil(16) {
        let mut codes = [d.v_none(); V];
        for j in 0..V {
            let dim = first + vectors[j] * D::S::ROWS;
            let row = match NIBBLES {
                false => dim0 + vectors[j] * D::S::ROWS,
                true => dim0 / 16 * 8 + dim % 8,
            };
            // SAFETY: a panel has dim rows of 16 bytes, or half as many rows of nibbles.
            let raw = unsafe { s.i_load(tile.v[panel].add(row * 16)) };
            codes[j] = match NIBBLES {
                false => d.v_bytes(raw),
                true if dim < 8 => d.v_low(raw),
                true => d.v_high(raw),
            };
            if D::V_BIAS != 0 {
                count[j] = d.v_count(count[j], codes[j]);
            }
        }
        for r in 0..R {
            // SAFETY: operand `panel` of row r.
            let operand = unsafe {
                let at = weights.operands.add(r * weights.row + panel * OPERAND);
                [s.i_row(at), s.i_row(at.add(16))]
            };
            for j in 0..V {
                acc[r][j] = d.v_dot(acc[r][j], codes[j], operand);
            }
        }
    }
    (acc, count)
}

/// The sums of [`v_products`] for a whole step, a dim to a lane.
///
/// # Safety
/// As for [`v_products`].
#[inline(always)]
unsafe fn v_sums<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    weights: &Weights,
    dim0: usize,
) -> [<D::S as Simd>::I; R] {
    let s = d.simd();
    let mut sums = [s.i_splat(0); R];
    let mut count = s.i_splat(0);
    // SAFETY: the caller's contract, throughout.
    unsafe {
        if R <= D::AT_ONCE {
            let (acc, counts) =
                v_products::<D, R, 4, NIBBLES>(d, tile, weights, dim0, [0, 1, 2, 3]);
            for r in 0..R {
                let [a, b, c, e] = acc[r];
                sums[r] = s.i_rows([d.v_sum(a), d.v_sum(b), d.v_sum(c), d.v_sum(e)]);
            }
            if D::V_BIAS != 0 {
                let [a, b, c, e] = counts;
                count = s.i_rows([d.v_sum(a), d.v_sum(b), d.v_sum(c), d.v_sum(e)]);
            }
        } else {
            let vectors = [0, 1];
            let (acc, counts) = v_products::<D, R, 2, NIBBLES>(d, tile, weights, dim0, vectors);
            for r in 0..R {
                sums[r] = s.i_pairs(d.v_sum(acc[r][0]), d.v_sum(acc[r][1]));
            }
            let first = s.i_pairs(d.v_sum(counts[0]), d.v_sum(counts[1]));
            let vectors = [2, 3];
            let (acc, counts) = v_products::<D, R, 2, NIBBLES>(d, tile, weights, dim0, vectors);
            for r in 0..R {
                let second = s.i_pairs(d.v_sum(acc[r][0]), d.v_sum(acc[r][1]));
                sums[r] = s.i_join(sums[r], second);
            }
            if D::V_BIAS != 0 {
                let second = s.i_pairs(d.v_sum(counts[0]), d.v_sum(counts[1]));
                count = s.i_join(first, second);
            }
        }
    }
    if D::V_BIAS != 0 {
        let back = s.i_mul(count, s.i_splat(D::V_BIAS));
        for r in 0..R {
            sums[r] = s.i_add(sums[r], back);
        }
    }
    sums
}

/// Section 4's product with V for `R` rows, folded into their states (section 5).
///
/// # Safety
/// As for [`weigh`], which has run for these rows.
#[inline(always)]
unsafe fn values<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let (s, dim) = (d.simd(), rows.dim);
    let (group_dims, stride) = (dim / tile.v_groups, tile.v_groups * 4 * OPERAND);
    let operands = rows.v_operands.as_slice()[row * stride..][..R * stride].as_ptr();
    let w_sums = &rows.w_sums.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let shifts = &rows.v_shifts.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let (alpha, beta) = (
        &rows.alpha.as_slice()[row..][..R],
        &rows.beta.as_slice()[row..][..R],
    );
    let o = rows.o.as_mut_slice()[row * dim..][..R * dim].as_mut_ptr();
    for dim0 in (0..dim).step_by(D::S::LANES) {
        let g = dim0 / group_dims;
        fetch.step(s);
        let weights = Weights {
            // SAFETY: group g of v_groups.
            operands: unsafe { operands.add(g * 4 * OPERAND) },
            row: stride,
        };
        // SAFETY: the tile's V and the operands have the tile's panels; dim0 + LANES ≤ dim.
        let sums = unsafe { v_sums::<D, R, NIBBLES>(d, tile, &weights, dim0) };
        let unit = tile.v_unit[g];
        for r in 0..R {
            if beta[r] < 0.0 {
                continue;
            }
            let mut sum = sums[r];
            let value = if tile.v_has_shift {
                if NIBBLES {
                    sum = s.i_sub(sum, s.i_splat(w_sums[r * MAX_GROUPS + g]));
                }
                let t = s.add(
                    s.mul(s.to_f(sum), s.splat(unit)),
                    s.splat(shifts[r * MAX_GROUPS + g]),
                );
                s.mul(t, s.splat(beta[r]))
            } else {
                // Both are powers of two of at least 2^-102 together, or β is 0: one exact product.
                s.mul(s.to_f(sum), s.splat(unit * beta[r]))
            };
            // SAFETY: R·dim floats at o.
            unsafe {
                let o = o.add(r * dim + dim0);
                let old = s.ftz(s.mul(s.load(o), s.splat(alpha[r])));
                s.store(o, s.add(old, value));
            }
        }
    }
}

/// Folds one tile into the state of every row that sees some of it; `seen` and `modifiers` are per row.
///
/// # Safety
/// The tile's places are readable, `rows` is prepared for its K.
#[inline(always)]
pub(crate) unsafe fn fold_tile<D: Dot>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    seen: impl Fn(usize) -> [usize; 2],
    modifiers: impl Fn(usize) -> Modifiers,
) {
    let tokens = tile.tokens.div_ceil(D::S::LANES);
    fetch.spread(rows.count.div_ceil(D::BLOCK) * (tokens + rows.dim / D::S::LANES));
    // SAFETY: the caller's contract, in all three.
    unsafe {
        if tile.k_nibbles {
            in_blocks!(rows.count, D::BLOCK, |row, R| scores::<D, R, true>(
                d, tile, fetch, rows, row
            ));
        } else {
            in_blocks!(rows.count, D::BLOCK, |row, R| scores::<D, R, false>(
                d, tile, fetch, rows, row
            ));
        }
        for row in 0..rows.count {
            let range = seen(row);
            if range[0] >= range[1] {
                rows.beta.as_mut_slice()[row] = -1.0;
                continue;
            }
            let (m, l) = weigh(d, tile, rows, row, range, &modifiers(row));
            fold_scalars(rows, row, m, l);
        }
        if tile.v_nibbles {
            in_blocks!(rows.count, D::BLOCK, |row, R| values::<D, R, true>(
                d, tile, fetch, rows, row
            ));
        } else {
            in_blocks!(rows.count, D::BLOCK, |row, R| values::<D, R, false>(
                d, tile, fetch, rows, row
            ));
        }
    }
}
