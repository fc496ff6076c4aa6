//! A tile of floats for many query rows: widened once, with a token of K in each lane, and V's rows as they are summed.
//!
//! Few rows widen in registers instead, block by block (`float.rs`), and sum lanes for each token.

use attn_core::{HeadDim, arithmetic::TILE};

use crate::{
    fetch::Fetch,
    lanes::lanes_of,
    query::QueryRows,
    scratch::Aligned,
    simd::Simd,
    tile::{Float, Tile},
    widen::{BF16, F16, F32, widen_panels},
};

/// Both sides of a tile in f32.
pub(crate) struct WideTile {
    /// `[vector of tokens][dim % 8][dim / 8][token]`: the dims of one of the 16 partial sums of a score follow each other in every other place.
    k: Aligned<f32>,
    /// `[token][dim]`.
    v: Aligned<f32>,
}

impl WideTile {
    pub const fn new() -> Self {
        WideTile {
            k: Aligned::new(),
            v: Aligned::new(),
        }
    }

    /// Widens a tile of heads of `dim`, and points it here.
    ///
    /// # Safety
    /// The tile's places are readable.
    #[inline(always)]
    pub unsafe fn widen<S: Simd>(&mut self, s: S, tile: &mut Tile, dim: HeadDim) {
        let HeadDim { k: k_dim, v: v_dim } = dim;
        self.k.reserve(TILE * k_dim);
        self.v.reserve(TILE * v_dim);
        let k = self.k.as_mut_slice()[..TILE * k_dim].as_mut_ptr();
        let v = self.v.as_mut_slice()[..TILE * v_dim].as_mut_ptr();
        // SAFETY: `k` and `v` hold a tile; the caller's contract.
        unsafe {
            match tile.k_float {
                Float::F16 => widen_k::<S, F16>(s, tile, k_dim, k),
                Float::Bf16 => widen_k::<S, BF16>(s, tile, k_dim, k),
                Float::F32 | Float::Wide => widen_k::<S, F32>(s, tile, k_dim, k),
            }
            match tile.v_float {
                Float::F16 => widen_v::<S, F16>(s, tile, v_dim, v),
                Float::Bf16 => widen_v::<S, BF16>(s, tile, v_dim, v),
                Float::F32 | Float::Wide => widen_v::<S, F32>(s, tile, v_dim, v),
            }
        }
        (tile.k_float, tile.v_float) = (Float::Wide, Float::Wide);
        tile.k = std::array::from_fn(|i| k.wrapping_add(16 * i * k_dim).cast_const().cast());
        tile.v = std::array::from_fn(|i| v.wrapping_add(16 * i * v_dim).cast_const().cast());
        // Panels of 8 dims are neighbours.
        (tile.v_row, tile.v_stride) = (4 * v_dim, 32);
    }
}

/// # Safety
/// The tile's places are readable, with rows of `KIND`; `TILE·dim` floats are writable at `out`.
#[inline(always)]
unsafe fn widen_k<S: Simd, const KIND: u8>(s: S, tile: &Tile, dim: usize, out: *mut f32) {
    let row = if KIND == F32 { 32 } else { 16 };
    for t in (0..tile.tokens).step_by(S::LANES) {
        for panel in 0..dim / 8 {
            // SAFETY: LANES of 16 tokens lie in their place, in each panel; a vector for each dim lies in `out`.
            unsafe {
                let from = tile.k[t / 16].add(t % 16 * row + panel * tile.k_stride);
                let dims = dims_of::<S, KIND>(s, from);
                for (d, x) in dims.into_iter().enumerate() {
                    let place = d * (dim / 8) + panel;
                    s.store(out.add(t * dim + place * S::LANES), x);
                }
            }
        }
    }
}

/// The 8 dims of a panel, with a token in each lane.
///
/// # Safety
/// `LANES` rows of `KIND` are readable at `p`.
#[inline(always)]
unsafe fn dims_of<S: Simd, const KIND: u8>(s: S, p: *const u8) -> [S::F; 8] {
    let mut dims = [s.splat(0.0); 8];
    // SAFETY: the caller's contract; a row of f32 is twice as long.
    unsafe {
        if KIND == F32 {
            let (low, high) = (lanes_of::<S, 32>(s, p), lanes_of::<S, 32>(s, p.add(16)));
            for i in 0..4 {
                (dims[i], dims[4 + i]) = (s.of_bits(low[i]), s.of_bits(high[i]));
            }
            return dims;
        }
        let pairs = lanes_of::<S, 16>(s, p);
        for (i, pair) in pairs.into_iter().enumerate() {
            [dims[2 * i], dims[2 * i + 1]] = if KIND == F16 {
                let low = s.i_and(pair, s.i_splat(0xffff));
                [s.f16_to_f(low), s.f16_to_f(s.i_shr::<16>(pair))]
            } else {
                let high = s.i_and(pair, s.i_splat(0xffff_0000_u32 as i32));
                [s.of_bits(s.i_shl::<16>(pair)), s.of_bits(high)]
            };
        }
    }
    dims
}

/// # Safety
/// The tile's places are readable, with rows of `KIND`; `TILE·dim` floats are writable at `out`.
#[inline(always)]
unsafe fn widen_v<S: Simd, const KIND: u8>(s: S, tile: &Tile, dim: usize, out: *mut f32) {
    for t in 0..tile.tokens {
        for dim0 in (0..dim).step_by(S::LANES) {
            // SAFETY: token t lies in the place of its 16; the panels from dim0/8 on are below dim/8.
            unsafe {
                let at = tile.v[t / 16].add(t % 16 * tile.v_row + dim0 / 8 * tile.v_stride);
                let x = widen_panels::<S, KIND>(s, at, tile.v_stride);
                s.store(out.add(t * dim + dim0), x);
            }
        }
    }
}

/// Scores of `R` rows from `row` on with a widened K (section 8): the 16 partial sums of each, two at a time, and their sum.
///
/// # Safety
/// [`WideTile::widen`] has run for the tile.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, const R: usize>(
    s: S,
    tile: &Tile,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    row: usize,
) {
    let dim = rows.dim.k;
    let q = rows.q.as_slice()[row * dim..][..R * dim].as_ptr();
    let out = rows.scores.as_mut_slice()[row * TILE..][..R * TILE].as_mut_ptr();
    for t in (0..tile.tokens).step_by(S::LANES) {
        let k: *const f32 = tile.k[t / 16].cast();
        let k = k.wrapping_add(t % 16 * dim);
        // Of partial sums j and j + 8.
        let mut halves = [[s.splat(0.0); R]; 8];
        for (j, halves) in halves.iter_mut().enumerate() {
            if j % 2 == 0 {
                fetch.step(s);
            }
            let mut acc = [[s.splat(0.0); R]; 2];
            for i in 0..dim / 16 {
                for (half, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: dim 16i + 8·half + j of LANES tokens, and of R rows.
                    unsafe {
                        let place = j * (dim / 8) + 2 * i + half;
                        let k = s.load(k.add(place * S::LANES));
                        for (r, acc) in acc.iter_mut().enumerate() {
                            let q = s.splat(*q.add(r * dim + 16 * i + 8 * half + j));
                            *acc = s.add(*acc, s.mul(q, k));
                        }
                    }
                }
            }
            for r in 0..R {
                halves[r] = s.add(acc[0][r], acc[1][r]);
            }
        }
        for r in 0..R {
            let quarter = [
                s.add(halves[0][r], halves[4][r]),
                s.add(halves[1][r], halves[5][r]),
                s.add(halves[2][r], halves[6][r]),
                s.add(halves[3][r], halves[7][r]),
            ];
            let pairs = [s.add(quarter[0], quarter[2]), s.add(quarter[1], quarter[3])];
            // SAFETY: R·TILE floats at `out`.
            unsafe { s.store(out.add(r * TILE + t), s.add(pairs[0], pairs[1])) };
        }
    }
}
