//! Scores: the products of queries with the codes of K.

use attn_core::{arithmetic::TILE, format::MAX_GROUPS};

use crate::{
    fetch::Fetch,
    lanes::{LaneCodes, Operands, begin_run, end_run, products, vector},
    query::QueryRows,
    simd::{Dot, Simd},
    tile::Tile,
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
        let mut run = begin_run(d, &acc);
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
        end_run(d, &mut acc, &run);
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

/// Section 4 for `R` rows from `row` on: scores of the tile's tokens before their multiplication by the row's step; `codes`: the tile's where many rows have unpacked
/// them.
///
/// # Safety
/// The tile's places are readable (see [`Tile`]), `rows` is prepared for its K.
#[inline(always)]
pub(crate) unsafe fn scores<D: Dot, const R: usize>(
    d: D,
    tile: &Tile,
    codes: Option<&LaneCodes>,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match (codes, tile.k_nibbles, has_large_sums(d, tile)) {
            (None, true, _) => scores_in_place::<D, R, true, false>(d, tile, fetch, rows, row),
            (None, false, false) => {
                scores_in_place::<D, R, false, false>(d, tile, fetch, rows, row)
            }
            (None, false, true) => scores_in_place::<D, R, false, true>(d, tile, fetch, rows, row),
            (Some(codes), true, _) => {
                scores_unpacked::<D, R, true, false>(d, tile, codes, fetch, rows, row)
            }
            (Some(codes), false, false) => {
                scores_unpacked::<D, R, false, false>(d, tile, codes, fetch, rows, row)
            }
            (Some(codes), false, true) => {
                scores_unpacked::<D, R, false, true>(d, tile, codes, fetch, rows, row)
            }
        }
    }
}

/// [`scores`] from codes of 4 bits (`NIBBLES`) or 8 where they lie, of groups whose sums are `LARGE` or not ([`has_large_sums`]).
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

/// The same from codes that were unpacked for many rows.
///
/// # Safety
/// Those of [`scores`]; `codes` are the tile's.
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
