//! The integer arithmetic of one tile for all query rows of its KV head: the two products, and the weights between them.
//!
//! Rows go in blocks that share each loaded vector of codes; an accumulator holds four partial sums per token (of K) or dim
//! (of V), which meet once per tile. Many rows read a tile that [`crate::lanes`] has unpacked, whose sums stay in their lanes.

use attn_core::{arithmetic::TILE, format::MAX_GROUPS};

use crate::{
    fetch::Fetch,
    lanes::{LaneCodes, Operands, products, vector},
    query::{QueryRows, in_blocks},
    simd::{Dot, Simd},
    softmax::Modifiers,
    tile::Tile,
    weights::weigh,
};

/// Where 16 tokens of K lie, and the operands of the rows, `row` bytes apart.
struct Keys {
    base: *const u8,
    stride: usize,
    operands: *const u8,
    row: usize,
}

/// Products of `V` vectors of tokens, from `FIRST` of the 16 on, with `R` rows, over the parts `from..to` of the dims.
///
/// # Safety
/// K has those parts, and so have the operands; four vectors cover LANES of the 16 tokens, whose nibbles lie in 8 rows.
#[inline(always)]
unsafe fn k_products<
    D: Dot,
    const R: usize,
    const V: usize,
    const NIBBLES: bool,
    const FIRST: usize,
>(
    d: D,
    keys: &Keys,
    [from, to]: [usize; 2],
    vectors: [usize; V],
) -> [[<D::S as Simd>::I; V]; R] {
    let s = d.simd();
    let mut acc = [[s.i_splat(0); V]; R];
    // SAFETY: the caller's contract: row `row` of part `part`, and operand `part` of row r.
    let load =
        |part: usize, row: usize| unsafe { s.i_load(keys.base.add(part * keys.stride + row * 16)) };
    let operand_at =
        |part: usize, r: usize| keys.operands.wrapping_add(r * keys.row + part * D::OPERAND);
    if !NIBBLES {
        for part in from..to {
            let mut codes = [d.none(); V];
            for j in 0..V {
                codes[j] = d.k_bytes(load(part, FIRST + vectors[j] * D::S::ROWS));
            }
            for r in 0..R {
                // SAFETY: as above.
                let operand = unsafe { d.operand(operand_at(part, r)) };
                for j in 0..V {
                    acc[r][j] = d.k_dot(acc[r][j], codes[j], operand);
                }
            }
        }
        return acc;
    }
    for start in (from..to).step_by(D::RUN) {
        let mut run = [[s.i_splat(0); V]; R];
        for part in start..to.min(start + D::RUN) {
            let mut codes = [d.no_nibbles(); V];
            for j in 0..V {
                let token = FIRST + vectors[j] * D::S::ROWS;
                let raw = load(part, token % 8);
                codes[j] = if token < 8 { d.low(raw) } else { d.high(raw) };
            }
            for r in 0..R {
                // SAFETY: as above.
                let operand = unsafe { d.nibble_operand(operand_at(part, r)) };
                for j in 0..V {
                    run[r][j] = d.k_nibbles(run[r][j], codes[j], operand);
                }
            }
        }
        for r in 0..R {
            for j in 0..V {
                acc[r][j] = d.widen(acc[r][j], run[r][j]);
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
unsafe fn k_sums<D: Dot, const R: usize, const NIBBLES: bool, const FIRST: usize>(
    d: D,
    keys: &Keys,
    parts: [usize; 2],
) -> [<D::S as Simd>::I; R] {
    let s = d.simd();
    let mut sums = [s.i_splat(0); R];
    // SAFETY: the caller's contract, throughout.
    unsafe {
        if R <= D::AT_ONCE {
            let acc = k_products::<D, R, 4, NIBBLES, FIRST>(d, keys, parts, [0, 1, 2, 3]);
            for r in 0..R {
                let [a, b, c, e] = acc[r];
                sums[r] = s.i_rows([a, b, c, e]);
            }
            return sums;
        }
        let acc = k_products::<D, R, 2, NIBBLES, FIRST>(d, keys, parts, [0, 1]);
        for r in 0..R {
            sums[r] = s.i_pairs(acc[r][0], acc[r][1]);
        }
        let acc = k_products::<D, R, 2, NIBBLES, FIRST>(d, keys, parts, [2, 3]);
        for r in 0..R {
            let second = s.i_pairs(acc[r][0], acc[r][1]);
            sums[r] = s.i_join(sums[r], second);
        }
    }
    sums
}

/// Section 4 for `R` rows from `row` on: scores of the tile's tokens.
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
    let each = dim / 16 * D::OPERAND;
    let operands = rows.k_operands.as_slice()[row * each..][..R * each].as_ptr();
    let mut out = Scores::<R>::of(d, tile, rows, row);
    for t in (0..tile.tokens).step_by(D::S::LANES) {
        let keys = Keys {
            base: tile.k[t / 16],
            stride: tile.k_stride,
            operands,
            row: each,
        };
        fetch.step(s);
        let mut a = [s.splat(0.0); R];
        for g in 0..tile.k_groups {
            let parts = [g * parts, (g + 1) * parts];
            // SAFETY: the tile's K and the rows' operands have dim/16 parts.
            let sums = unsafe {
                if D::S::LANES == 16 || t % 16 == 0 {
                    k_sums::<D, R, NIBBLES, 0>(d, &keys, parts)
                } else {
                    k_sums::<D, R, NIBBLES, 8>(d, &keys, parts)
                }
            };
            // SAFETY: t + LANES ≤ TILE; g < k_groups.
            unsafe { out.add(s, tile, g, t, &sums, &mut a) };
        }
        // SAFETY: t + LANES ≤ TILE.
        unsafe { out.store(s, t, &a) };
    }
}

/// The same from codes that were unpacked for many rows.
///
/// # Safety
/// As for [`scores`]; `codes` are the tile's.
#[inline(always)]
unsafe fn scores_of_lanes<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    codes: &LaneCodes,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    const V: usize = 2;
    let (s, dim) = (d.simd(), rows.dim);
    let (all, parts) = (dim / 16, dim / 16 / tile.k_groups);
    let each = all * D::OPERAND;
    let operands = Operands {
        base: rows.k_operands.as_slice()[row * each..][..R * each].as_ptr(),
        row: each,
    };
    let mut out = Scores::<R>::of(d, tile, rows, row);
    for t in (0..tile.tokens).step_by(V * D::S::LANES) {
        fetch.step(s);
        let mut a = [[s.splat(0.0); R]; V];
        for g in 0..tile.k_groups {
            let group = [g * parts, (g + 1) * parts];
            // SAFETY: all tokens' vectors have `dim/16` parts, and so have the operands.
            let acc = unsafe {
                let codes = vector::<D, NIBBLES>(&codes.k, t / D::S::LANES, all);
                products::<D, R, V, NIBBLES, false>(d, codes, operands, all, group)
            };
            for j in 0..V {
                let mut sums = [s.i_splat(0); R];
                for r in 0..R {
                    sums[r] = acc[r][j];
                }
                // SAFETY: V·LANES divides TILE; g < k_groups.
                unsafe { out.add(s, tile, g, t + j * D::S::LANES, &sums, &mut a[j]) };
            }
        }
        for j in 0..V {
            // SAFETY: as above.
            unsafe { out.store(s, t + j * D::S::LANES, &a[j]) };
        }
    }
}

/// Where the scores of `R` rows go, and what makes them of sums.
struct Scores<const R: usize> {
    q_sums: [[i32; MAX_GROUPS]; R],
    step: [f32; R],
    bias: i32,
    out: *mut f32,
}

impl<const R: usize> Scores<R> {
    #[inline(always)]
    fn of<D: Dot>(_: D, tile: &Tile, rows: &mut QueryRows, row: usize) -> Self {
        let (mut q_sums, mut step) = ([[0; MAX_GROUPS]; R], [0.0; R]);
        for r in 0..R {
            let from = &rows.q_sums.as_slice()[(row + r) * MAX_GROUPS..][..MAX_GROUPS];
            q_sums[r].copy_from_slice(from);
            step[r] = rows.step.as_slice()[row + r];
        }
        Scores {
            q_sums,
            step,
            bias: tile.k_code.bias(D::K_BIAS),
            out: rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr(),
        }
    }

    /// Adds the term of group g to the scores `a` of the tokens from t on.
    ///
    /// # Safety
    /// t + LANES ≤ TILE; g < k_groups.
    #[inline(always)]
    unsafe fn add<S: Simd>(
        &self,
        s: S,
        tile: &Tile,
        g: usize,
        t: usize,
        sums: &[S::I; R],
        a: &mut [S::F; R],
    ) {
        // SAFETY: the caller's contract; k_groups ≤ MAX_GROUPS.
        let scale = unsafe { s.load(tile.k_scale[g].as_ptr().add(t)) };
        for r in 0..R {
            let q_sum = self.q_sums[r][g];
            let sum = s.i_sub(
                tile.k_code.of_sums(s, sums[r]),
                s.i_splat(self.bias * q_sum),
            );
            let term = s.mul(s.to_f(sum), scale);
            if tile.k_has_shift {
                // SAFETY: as for the scale.
                let shift = unsafe { s.load(tile.k_shift[g].as_ptr().add(t)) };
                let shift = s.mul(s.splat(q_sum as f32), shift);
                a[r] = if g == 0 {
                    s.add(term, shift)
                } else {
                    s.add(a[r], s.add(term, shift))
                };
            } else {
                a[r] = if g == 0 { term } else { s.add(a[r], term) };
            }
        }
    }

    /// # Safety
    /// t + LANES ≤ TILE.
    #[inline(always)]
    unsafe fn store<S: Simd>(&mut self, s: S, t: usize, a: &[S::F; R]) {
        for r in 0..R {
            let x = s.mul(a[r], s.splat(self.step[r]));
            // SAFETY: R·TILE floats are writable at `out`.
            unsafe { s.store(self.out.add(r * TILE + t), x) };
        }
    }
}

/// The operands of a group's weights, of rows `row` bytes apart.
struct Weights {
    operands: *const u8,
    row: usize,
}

/// Products of `V` vectors of the dims from `dim0` on, `FIRST` behind a multiple of 16, with `R` rows.
///
/// # Safety
/// The tile's V and the operands have as many panels as there are tokens; `dim0` and the LANES dims from there lie in V.
#[inline(always)]
unsafe fn v_products<
    D: Dot,
    const R: usize,
    const V: usize,
    const NIBBLES: bool,
    const FIRST: usize,
>(
    d: D,
    tile: &Tile,
    weights: &Weights,
    dim0: usize,
    vectors: [usize; V],
) -> [[<D::S as Simd>::I; V]; R] {
    let s = d.simd();
    let mut acc = [[s.i_splat(0); V]; R];
    let panels = tile.tokens.div_ceil(16);
    // SAFETY: a panel has dim rows of 16 bytes, or half as many rows of nibbles; and operand `panel` of row r.
    let load = |panel: usize, row: usize| unsafe { s.i_load(tile.v[panel].add(row * 16)) };
    let operand_at = |panel: usize, r: usize| {
        weights
            .operands
            .wrapping_add(r * weights.row + panel * D::OPERAND)
    };
    for panel in 0..panels {
        if NIBBLES {
            let mut codes = [d.no_nibbles(); V];
            for j in 0..V {
                let dim = FIRST + vectors[j] * D::S::ROWS;
                let raw = load(panel, dim0 / 16 * 8 + dim % 8);
                codes[j] = if dim < 8 { d.low(raw) } else { d.high(raw) };
            }
            for r in 0..R {
                // SAFETY: as above.
                let operand = unsafe { d.nibble_operand(operand_at(panel, r)) };
                for j in 0..V {
                    acc[r][j] = d.v_nibbles(acc[r][j], codes[j], operand);
                }
            }
        } else {
            let mut codes = [d.none(); V];
            for j in 0..V {
                codes[j] = d.v_bytes(load(panel, dim0 + vectors[j] * D::S::ROWS));
            }
            for r in 0..R {
                // SAFETY: as above.
                let operand = unsafe { d.operand(operand_at(panel, r)) };
                for j in 0..V {
                    acc[r][j] = d.v_dot(acc[r][j], codes[j], operand);
                }
            }
        }
    }
    if NIBBLES {
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
/// As for [`v_products`].
#[inline(always)]
unsafe fn v_sums<D: Dot, const R: usize, const NIBBLES: bool, const FIRST: usize>(
    d: D,
    tile: &Tile,
    weights: &Weights,
    dim0: usize,
) -> [<D::S as Simd>::I; R] {
    let s = d.simd();
    let mut sums = [s.i_splat(0); R];
    // SAFETY: the caller's contract, throughout.
    unsafe {
        if R <= D::AT_ONCE {
            let acc = v_products::<D, R, 4, NIBBLES, FIRST>(d, tile, weights, dim0, [0, 1, 2, 3]);
            for r in 0..R {
                sums[r] = s.i_rows(acc[r]);
            }
            return sums;
        }
        let first = v_products::<D, R, 2, NIBBLES, FIRST>(d, tile, weights, dim0, [0, 1]);
        for r in 0..R {
            sums[r] = s.i_pairs(first[r][0], first[r][1]);
        }
        let second = v_products::<D, R, 2, NIBBLES, FIRST>(d, tile, weights, dim0, [2, 3]);
        for r in 0..R {
            sums[r] = s.i_join(sums[r], s.i_pairs(second[r][0], second[r][1]));
        }
    }
    sums
}

/// Section 5's product with V for `R` rows, folded into their states (section 6).
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
    let (group_dims, stride) = (dim / tile.v_groups, tile.v_groups * 4 * D::OPERAND);
    let operands = rows.v_operands.as_slice()[row * stride..][..R * stride].as_ptr();
    for dim0 in (0..dim).step_by(D::S::LANES) {
        let g = dim0 / group_dims;
        fetch.step(s);
        let weights = Weights {
            // SAFETY: group g of v_groups.
            operands: unsafe { operands.add(g * 4 * D::OPERAND) },
            row: stride,
        };
        // SAFETY: the tile's V and the operands have the tile's panels; dim0 + LANES ≤ dim.
        let sums = unsafe {
            if D::S::LANES == 16 || dim0 % 16 == 0 {
                v_sums::<D, R, NIBBLES, 0>(d, tile, &weights, dim0)
            } else {
                v_sums::<D, R, NIBBLES, 8>(d, tile, &weights, dim0)
            }
        };
        // SAFETY: dim0 + LANES ≤ dim.
        unsafe { fold_sums(s, tile, rows, row, [g, dim0], &sums) };
    }
}

/// The same from codes that were unpacked for many rows, `V` vectors of dims at once.
///
/// # Safety
/// As for [`values`]; `codes` are the tile's, and `V` vectors divide a group's dims.
#[inline(always)]
unsafe fn values_of_lanes<D: Dot, const R: usize, const V: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    codes: &LaneCodes,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let (s, dim) = (d.simd(), rows.dim);
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
        for j in 0..V {
            let mut sums = [s.i_splat(0); R];
            for r in 0..R {
                sums[r] = acc[r][j];
            }
            // SAFETY: V·LANES divides the dims of a group.
            unsafe { fold_sums(s, tile, rows, row, [g, dim0 + j * D::S::LANES], &sums) };
        }
    }
}

/// Folds the sums of `R` rows over a tile into the dims from `dim0` on, of group g.
///
/// # Safety
/// `dim0 + LANES ≤ dim`; `weigh` has run for these rows.
#[inline(always)]
unsafe fn fold_sums<S: Simd, const R: usize>(
    s: S,
    tile: &Tile,
    rows: &mut QueryRows,
    row: usize,
    [g, dim0]: [usize; 2],
    sums: &[S::I; R],
) {
    let dim = rows.dim;
    let w_sums = &rows.w_sums.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let steps = &rows.w_steps.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let shifts = &rows.v_shifts.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS];
    let (alpha, beta) = (
        &rows.alpha.as_slice()[row..][..R],
        &rows.beta.as_slice()[row..][..R],
    );
    let o = rows.o.as_mut_slice()[row * dim..][..R * dim].as_mut_ptr();
    for r in 0..R {
        if beta[r] < 0.0 {
            continue;
        }
        let at = r * MAX_GROUPS + g;
        let bias = s.i_splat(tile.v_code.bias(0) * w_sums[at]);
        let n = s.to_f(s.i_sub(tile.v_code.of_sums(s, sums[r]), bias));
        let value = if tile.v_has_shift {
            let t = s.add(s.mul(n, s.splat(steps[at])), s.splat(shifts[at]));
            s.mul(t, s.splat(beta[r]))
        } else {
            s.mul(s.mul(n, s.splat(steps[at])), s.splat(beta[r]))
        };
        // SAFETY: R·dim floats at o.
        unsafe {
            let o = o.add(r * dim + dim0);
            let old = s.ftz(s.mul(s.load(o), s.splat(alpha[r])));
            s.store(o, s.add(old, value));
        }
    }
}

/// Folds one tile into the state of every row that sees some of it; `seen` and `modifiers` are per row.
///
/// # Safety
/// The tile's places are readable, `rows` is prepared for its K; `codes`, if there are any, are the tile's.
#[inline(always)]
pub(crate) unsafe fn fold_tile<D: Dot>(
    d: D,
    tile: &Tile,
    codes: Option<&LaneCodes>,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    seen: impl Fn(usize) -> [usize; 2],
    modifiers: impl Fn(usize) -> Modifiers,
) {
    let vectors = tile.tokens.div_ceil(D::S::LANES) + rows.dim / D::S::LANES;
    // Unpacked codes are read two vectors at a time.
    let steps = if codes.is_some() {
        vectors / 2
    } else {
        vectors
    };
    fetch.spread(rows.count.div_ceil(D::BLOCK) * steps);
    // SAFETY: the caller's contract, throughout.
    unsafe {
        if tile.k_nibbles {
            all_scores::<D, true>(d, tile, codes, fetch, rows);
        } else {
            all_scores::<D, false>(d, tile, codes, fetch, rows);
        }
        for first in (0..rows.count).step_by(D::S::LANES) {
            let block = first..rows.count.min(first + D::S::LANES);
            weigh(d, tile, rows, block, &seen, &modifiers);
        }
        if tile.v_nibbles {
            all_values::<D, true>(d, tile, codes, fetch, rows);
        } else {
            all_values::<D, false>(d, tile, codes, fetch, rows);
        }
    }
}

/// Scores of all rows.
///
/// # Safety
/// As for [`fold_tile`].
#[inline(always)]
unsafe fn all_scores<D: Dot, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    codes: Option<&LaneCodes>,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
) {
    let of_lanes = rows_of_lanes(codes.is_some(), rows);
    // SAFETY: the caller's contract.
    unsafe {
        if let Some(codes) = codes {
            for row in (0..of_lanes).step_by(LANE_ROWS) {
                scores_of_lanes::<D, LANE_ROWS, NIBBLES>(d, tile, codes, fetch, rows, row);
            }
        }
        in_blocks!(of_lanes, rows.count, D::BLOCK, |row, R| scores::<
            D,
            R,
            NIBBLES,
        >(
            d, tile, fetch, rows, row
        ));
    }
}

/// Rows of a block that reads unpacked codes. One size alone: each is as much code as all else of an instruction set and format.
const LANE_ROWS: usize = 4;

/// The rows that read unpacked codes, if there are any: the others, fewer than a block, read the cache in place.
fn rows_of_lanes(are_unpacked: bool, rows: &QueryRows) -> usize {
    if are_unpacked {
        rows.count / LANE_ROWS * LANE_ROWS
    } else {
        0
    }
}

/// Products with V of all rows, folded into their states.
///
/// # Safety
/// As for [`fold_tile`]; `weigh` has run.
#[inline(always)]
unsafe fn all_values<D: Dot, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    codes: Option<&LaneCodes>,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
) {
    let in_twos = (rows.dim / tile.v_groups).is_multiple_of(2 * D::S::LANES);
    let codes = codes.filter(|_| in_twos);
    let of_lanes = rows_of_lanes(codes.is_some(), rows);
    // SAFETY: the caller's contract.
    unsafe {
        if let Some(codes) = codes {
            for row in (0..of_lanes).step_by(LANE_ROWS) {
                values_of_lanes::<D, LANE_ROWS, 2, NIBBLES>(d, tile, codes, fetch, rows, row);
            }
        }
        in_blocks!(of_lanes, rows.count, D::BLOCK, |row, R| values::<
            D,
            R,
            NIBBLES,
        >(
            d, tile, fetch, rows, row
        ));
    }
}
