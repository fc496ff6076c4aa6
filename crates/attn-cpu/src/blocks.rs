//! A tile of the integer arithmetic for all query rows of its KV head, block by block: products with K, weights, products with V.

use crate::{
    fetch::Fetch,
    integer::{scores, values, values_of_lanes},
    lanes::LaneCodes,
    query::{QueryRows, block_of},
    simd::{Dot, Simd},
    softmax::Modifiers,
    tile::Tile,
    weights::weigh,
};

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
    let vectors = tile.tokens.div_ceil(D::S::LANES) + rows.dim.v / D::S::LANES;
    // Unpacked codes are read two vectors at a time.
    let steps = if codes.is_some() {
        vectors / 2
    } else {
        vectors
    };
    fetch.spread(rows.count.div_ceil(4) * steps);
    // SAFETY: the caller's contract, throughout.
    unsafe {
        let mut row = 0;
        if let Some(codes) = codes {
            let lanes = Lanes { d, tile, codes };
            let blocks = rows.count / LANE_ROWS;
            fold_blocks::<_, LANE_ROWS>(lanes, fetch, rows, [row, blocks], &seen, &modifiers);
            row = blocks * LANE_ROWS;
        }
        let places = Places { d, tile };
        while row < rows.count {
            let left = rows.count - row;
            let block = block_of(left);
            let at = [row, left / block];
            row += left / block * block;
            match block {
                1 => fold_blocks::<_, 1>(places, fetch, rows, at, &seen, &modifiers),
                2 => fold_blocks::<_, 2>(places, fetch, rows, at, &seen, &modifiers),
                3 => fold_blocks::<_, 3>(places, fetch, rows, at, &seen, &modifiers),
                _ => fold_blocks::<_, 4>(places, fetch, rows, at, &seen, &modifiers),
            }
        }
    }
}

/// Rows of a block that reads unpacked codes. One size alone: each is as much code as all else of an instruction set and format.
const LANE_ROWS: usize = 4;

/// The two products of blocks of rows with a tile.
trait Products: Copy {
    type D: Dot;

    fn dot(self) -> Self::D;
    fn tile(&self) -> &Tile;

    /// Section 4 for `R` rows from `row` on.
    ///
    /// # Safety
    /// Those of [`fold_tile`].
    unsafe fn scores<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize);

    /// Section 5's product with V of `R` rows from `row` on, folded into their states.
    ///
    /// # Safety
    /// Those of [`fold_tile`]; `weigh` has run for the rows.
    unsafe fn values<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize);
}

/// Codes where the cache has them.
#[derive(Clone, Copy)]
struct Places<'a, D> {
    d: D,
    tile: &'a Tile,
}

/// Codes that were unpacked for many rows.
#[derive(Clone, Copy)]
struct Lanes<'a, D> {
    d: D,
    tile: &'a Tile,
    codes: &'a LaneCodes,
}

impl<D: Dot> Products for Places<'_, D> {
    type D = D;

    #[inline(always)]
    fn dot(self) -> D {
        self.d
    }

    #[inline(always)]
    fn tile(&self) -> &Tile {
        self.tile
    }

    #[inline(always)]
    unsafe fn scores<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize) {
        // SAFETY: the caller's contract.
        unsafe { scores::<D, R>(self.d, self.tile, None, fetch, rows, row) };
    }

    #[inline(always)]
    unsafe fn values<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            if self.tile.v_nibbles {
                values::<D, R, true>(self.d, self.tile, fetch, rows, row);
            } else {
                values::<D, R, false>(self.d, self.tile, fetch, rows, row);
            }
        }
    }
}

impl<D: Dot> Products for Lanes<'_, D> {
    type D = D;

    #[inline(always)]
    fn dot(self) -> D {
        self.d
    }

    #[inline(always)]
    fn tile(&self) -> &Tile {
        self.tile
    }

    #[inline(always)]
    unsafe fn scores<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize) {
        let Lanes { d, tile, codes } = self;
        // SAFETY: the caller's contract.
        unsafe { scores::<D, R>(d, tile, Some(codes), fetch, rows, row) };
    }

    #[inline(always)]
    unsafe fn values<const R: usize>(self, fetch: &mut Fetch, rows: &mut QueryRows, row: usize) {
        let Lanes { d, tile, codes } = self;
        let in_twos = (rows.dim.v / tile.v_groups).is_multiple_of(2 * D::S::LANES);
        // SAFETY: the caller's contract; two vectors divide a group's dims, or one does.
        unsafe {
            match (in_twos, tile.v_nibbles) {
                (true, true) => values_of_lanes::<D, R, 2, true>(d, tile, codes, fetch, rows, row),
                (true, false) => {
                    values_of_lanes::<D, R, 2, false>(d, tile, codes, fetch, rows, row)
                }
                (false, true) => values_of_lanes::<D, R, 1, true>(d, tile, codes, fetch, rows, row),
                (false, false) => {
                    values_of_lanes::<D, R, 1, false>(d, tile, codes, fetch, rows, row)
                }
            }
        }
    }
}

/// Folds a tile into the states of so many blocks of `R` rows from `row` on. The next block's scores come before a block's weights: the core has
/// products to do while it waits for the weights' chains, and what a block leaves for the next stage stays in the first-level cache.
///
/// # Safety
/// Those of [`fold_tile`].
#[inline(always)]
unsafe fn fold_blocks<P: Products, const R: usize>(
    products: P,
    fetch: &mut Fetch,
    rows: &mut QueryRows,
    [row, blocks]: [usize; 2],
    seen: &impl Fn(usize) -> [usize; 2],
    modifiers: &impl Fn(usize) -> Modifiers,
) {
    for block in 0..=blocks {
        // SAFETY: the caller's contract.
        unsafe {
            if block < blocks {
                products.scores::<R>(fetch, rows, row + block * R);
            }
            if block > 0 {
                let row = row + (block - 1) * R;
                weigh::<P::D, R>(products.dot(), products.tile(), rows, row, seen, modifiers);
                products.values::<R>(fetch, rows, row);
            }
        }
    }
}
