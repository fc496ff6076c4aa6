//! The two products of the integer arithmetic of a tile for a block of query rows; `blocks.rs` goes through the blocks.
//!
//! Rows go in blocks that share each loaded vector of codes; an accumulator holds four partial sums per token (of K) or dim
//! (of V), which meet once per tile. Many rows read a tile that [`crate::lanes`] has unpacked, whose sums stay in their lanes.

use attn_core::{arithmetic::TILE, format::MAX_GROUPS};

use crate::{
    fetch::Fetch,
    lanes::{LaneCodes, Operands, products, vector},
    query::QueryRows,
    scratch::Aligned,
    simd::{Dot, Simd},
    tile::{Code, Tile},
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
        let mut run = if D::WIDENS {
            [[s.i_splat(0); V]; R]
        } else {
            acc
        };
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
                acc[r][j] = if D::WIDENS {
                    d.widen(acc[r][j], run[r][j])
                } else {
                    run[r][j]
                };
            }
        }
    }
    acc
}

/// The sums of [`k_products`] for a whole step, a token to a lane.
///
/// # Safety
/// Those of [`k_products`].
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

/// Section 4 for `R` rows from `row` on: scores of the tile's tokens before their multiplication by the row's step.
///
/// # Safety
/// The tile's places are readable (see [`Tile`]), `rows` is prepared for its K.
#[inline(always)]
pub(crate) unsafe fn scores<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if !NIBBLES && has_large_sums(d, tile) {
            scores_in_place::<D, R, NIBBLES, true>(d, tile, fetch, rows, row);
        } else {
            scores_in_place::<D, R, NIBBLES, false>(d, tile, fetch, rows, row);
        }
    }
}

/// [`scores`], of groups whose sums are `LARGE` or not ([`has_large_sums`]).
///
/// # Safety
/// Those of [`scores`].
#[inline(always)]
unsafe fn scores_in_place<D: Dot, const R: usize, const NIBBLES: bool, const LARGE: bool>(
    d: D,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let (s, dim) = (d.simd(), rows.dim.k);
    let each = dim / 16 * D::OPERAND;
    let operands = rows.k_operands.as_slice()[row * each..][..R * each].as_ptr();
    let mut out = Scores::<R, LARGE>::of(d, tile, rows, row);
    for t in (0..tile.tokens).step_by(D::S::LANES) {
        let keys = Keys {
            base: tile.k[t / 16],
            stride: tile.k_stride,
            operands,
            row: each,
        };
        fetch.step(s);
        let mut a = [s.splat(0.0); R];
        for (g, dims) in tile.k_groups.ranges().enumerate() {
            let parts = [dims.start / 16, dims.end / 16];
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

/// Scores of rows from codes that were unpacked for many rows.
///
/// # Safety
/// Those of [`scores`]; `codes` are the tile's.
#[inline(always)]
pub(crate) unsafe fn scores_of_lanes<D: Dot, const R: usize, const NIBBLES: bool>(
    d: D,
    tile: &Tile,
    codes: &LaneCodes,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if !NIBBLES && has_large_sums(d, tile) {
            scores_unpacked::<D, R, NIBBLES, true>(d, tile, codes, fetch, rows, row);
        } else {
            scores_unpacked::<D, R, NIBBLES, false>(d, tile, codes, fetch, rows, row);
        }
    }
}

/// [`scores_of_lanes`], of groups whose sums are `LARGE` or not ([`has_large_sums`]).
///
/// # Safety
/// Those of [`scores_of_lanes`].
#[inline(always)]
unsafe fn scores_unpacked<D: Dot, const R: usize, const NIBBLES: bool, const LARGE: bool>(
    d: D,
    tile: &Tile,
    codes: &LaneCodes,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    const V: usize = 2;
    let (s, dim) = (d.simd(), rows.dim.k);
    let all = dim / 16;
    let each = all * D::OPERAND;
    let operands = Operands {
        base: rows.k_operands.as_slice()[row * each..][..R * each].as_ptr(),
        row: each,
    };
    let mut out = Scores::<R, LARGE>::of(d, tile, rows, row);
    for t in (0..tile.tokens).step_by(V * D::S::LANES) {
        fetch.step(s);
        let mut a = [[s.splat(0.0); R]; V];
        for (g, dims) in tile.k_groups.ranges().enumerate() {
            let group = [dims.start / 16, dims.end / 16];
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

/// Whether sums of products with 8-bit codes exceed what f32 holds exactly while a bias is in them: those of more than 518 dims do. Without it all are exact:
/// 127² · 576 < 2^24.
#[inline(always)]
fn has_large_sums<D: Dot>(_: D, tile: &Tile) -> bool {
    D::K_BIAS != 0 && tile.k_groups.dims() > (1 << 24) / (127 * 255)
}

/// Where the scores of `R` rows go, and what makes them of sums. Numbers of rows stay in memory: an operation repeats one for all lanes at no cost,
/// and a vector of it would take a register, or a load of a whole line.
struct Scores<const R: usize, const LARGE: bool> {
    /// `Q_g`, `[row][MAX_GROUPS]`; what is taken out of `LARGE` sums for each of it as integers, and what is added to all sums as floats.
    q_sums: *const f32,
    integer_bias: i32,
    bias: f32,
    /// `ρ`, `[row]`.
    ratio: *const f32,
    out: *mut f32,
}

impl<const R: usize, const LARGE: bool> Scores<R, LARGE> {
    #[inline(always)]
    fn of<D: Dot>(_: D, tile: &Tile, rows: &mut QueryRows, row: usize) -> Self {
        let integer_bias = if LARGE { D::K_BIAS } else { 0 };
        Scores {
            q_sums: rows.q_sums.as_slice()[row * MAX_GROUPS..][..R * MAX_GROUPS].as_ptr(),
            integer_bias,
            bias: -tile.k_code.bias(D::K_BIAS - integer_bias),
            ratio: rows.ratio.as_slice()[row..][..R].as_ptr(),
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
        let mut sums = *sums;
        if LARGE {
            for r in 0..R {
                // SAFETY: group g < MAX_GROUPS of row r.
                let q_sum = unsafe { *self.q_sums.add(r * MAX_GROUPS + g) } as i32;
                sums[r] = s.i_sub(sums[r], s.i_splat(q_sum * self.integer_bias));
            }
        }
        // SAFETY: the caller's contract; k_groups ≤ MAX_GROUPS.
        let scale = unsafe { s.load(tile.k_scale[g].as_ptr().add(t)) };
        for r in 0..R {
            // SAFETY: group g < MAX_GROUPS of row r.
            let q_sum = s.splat(unsafe { *self.q_sums.add(r * MAX_GROUPS + g) });
            let sum = s.mul_add(q_sum, s.splat(self.bias), s.to_f(sums[r]));
            let mut term = s.mul(sum, scale);
            if tile.k_has_shift {
                // SAFETY: as for the scale.
                let shift = unsafe { s.load(tile.k_shift[g].as_ptr().add(t)) };
                term = s.add(term, s.mul(q_sum, shift));
            }
            if tile.k_has_parts && g == 1 {
                // SAFETY: a number for each of R rows.
                term = s.mul(term, s.splat(unsafe { *self.ratio.add(r) }));
            }
            a[r] = if g == 0 { term } else { s.add(a[r], term) };
        }
    }

    /// # Safety
    /// t + LANES ≤ TILE.
    #[inline(always)]
    unsafe fn store<S: Simd>(&mut self, s: S, t: usize, a: &[S::F; R]) {
        for r in 0..R {
            // SAFETY: R·TILE floats are writable at `out`.
            unsafe { s.store(self.out.add(r * TILE + t), a[r]) };
        }
    }
}

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
