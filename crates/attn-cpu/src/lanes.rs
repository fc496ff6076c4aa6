//! A tile's codes for the integer arithmetic of many query rows: unpacked once, with a token (of K) or a dim (of V) to each lane.
//!
//! A lane of 32 bits holds four neighbouring codes of its token or dim, so that the products of a step, with four values of a row in every
//! lane, add up inside their lane. Few rows read the cache in place instead (`integer`), and sum lanes once per tile and row.

use attn_core::{HeadDim, arithmetic::TILE};

use crate::{
    scratch::Aligned,
    simd::{Dot, Simd},
    tile::Tile,
};

/// Query rows from which unpacking a tile once takes less time than each block of rows unpacking it in registers.
pub(crate) const MANY_ROWS: usize = 12;

/// Both sides of a tile, as [`Dot::Codes`] or [`Dot::Nibbles`]: `[vector of lanes][part][4]`, where a part is 16 dims of K or tokens of V.
pub(crate) struct LaneCodes {
    pub k: Aligned<u8>,
    pub v: Aligned<u8>,
}

impl LaneCodes {
    pub const fn new() -> Self {
        LaneCodes {
            k: Aligned::new(),
            v: Aligned::new(),
        }
    }

    /// Unpacks a tile of heads of `dim`.
    ///
    /// # Safety
    /// The tile's places are readable.
    #[inline(always)]
    pub unsafe fn unpack<D: Dot>(&mut self, d: D, tile: &Tile, dim: HeadDim) {
        let of = |dim: usize| {
            TILE * dim / 4 * (size_of::<D::Codes>().max(size_of::<D::Nibbles>()) / D::S::LANES)
        };
        self.k.reserve(of(dim.k));
        self.v.reserve(of(dim.v));
        let (k, v) = (
            self.k.as_mut_slice().as_mut_ptr(),
            self.v.as_mut_slice().as_mut_ptr(),
        );
        // SAFETY: `k` and `v` hold a step for each four codes of each vector; the caller's contract.
        unsafe {
            if tile.k_nibbles {
                unpack_k::<D, true>(d, tile, dim.k / 16, k);
            } else {
                unpack_k::<D, false>(d, tile, dim.k / 16, k);
            }
            if tile.v_nibbles {
                unpack_v::<D, true>(d, tile, dim.v, v);
            } else {
                unpack_v::<D, false>(d, tile, dim.v, v);
            }
        }
    }
}

/// # Safety
/// K has `parts` panels; a vector of `out` has as many parts, for all tokens.
#[inline(always)]
unsafe fn unpack_k<D: Dot, const NIBBLES: bool>(d: D, tile: &Tile, parts: usize, out: *mut u8) {
    for t16 in (0..tile.tokens).step_by(16) {
        for part in 0..parts {
            // SAFETY: 16 tokens lie in each place; the caller's contract.
            unsafe {
                let from = tile.k[t16 / 16].add(part * tile.k_stride);
                let to = Steps {
                    vector: t16 / D::S::LANES,
                    parts,
                    part,
                };
                unpack_16::<D, NIBBLES, true>(d, from, to, out);
            }
        }
    }
}

/// # Safety
/// V has a panel for each 16 tokens; a vector of `out` has four parts, for all `dim` dims.
#[inline(always)]
unsafe fn unpack_v<D: Dot, const NIBBLES: bool>(d: D, tile: &Tile, dim: usize, out: *mut u8) {
    let row = if NIBBLES { 8 } else { 16 };
    for part in 0..tile.tokens.div_ceil(16) {
        for dim0 in (0..dim).step_by(16) {
            // SAFETY: 16 dims lie in 16 rows, or 8 rows of nibbles; the caller's contract.
            unsafe {
                let from = tile.v[part].add(dim0 * row);
                let to = Steps {
                    vector: dim0 / D::S::LANES,
                    parts: 4,
                    part,
                };
                unpack_16::<D, NIBBLES, false>(d, from, to, out);
            }
        }
    }
}

/// A place among [`LaneCodes`].
#[derive(Clone, Copy)]
struct Steps {
    vector: usize,
    parts: usize,
    part: usize,
}

impl Steps {
    /// The offset of vector `vector + further`, counted in steps.
    #[inline(always)]
    fn at(self, further: usize) -> usize {
        ((self.vector + further) * self.parts + self.part) * 4
    }
}

/// Unpacks 16 rows of 16 codes, a row to a lane.
///
/// # Safety
/// 16 rows of 16 bytes, or 8 of nibbles, are readable at `from`; the steps of 16 lanes lie in `out`.
#[inline(always)]
unsafe fn unpack_16<D: Dot, const NIBBLES: bool, const K: bool>(
    d: D,
    from: *const u8,
    to: Steps,
    out: *mut u8,
) {
    let s = d.simd();
    let mut bytes = Bytes([0; 256]);
    let mut rows = from;
    if NIBBLES {
        // Low nibbles are the first eight rows, high ones the others.
        let low = s.i_splat(0x0f0f_0f0f);
        for row in (0..8).step_by(D::S::ROWS) {
            // SAFETY: eight rows at `from`, 16 in `bytes`.
            unsafe {
                let raw = s.i_load(from.add(16 * row));
                let bytes = bytes.0.as_mut_ptr();
                s.i_store(bytes.add(16 * row), s.i_and(raw, low));
                s.i_store(bytes.add(16 * (row + 8)), s.i_and(s.h_shr::<4>(raw), low));
            }
        }
        rows = bytes.0.as_ptr();
    }
    for vector in 0..16 / D::S::LANES {
        // SAFETY: LANES rows of 16, and the steps of as many lanes.
        unsafe {
            let steps = lanes_of::<_, 16>(s, rows.add(16 * D::S::LANES * vector));
            for (i, step) in steps.into_iter().enumerate() {
                if NIBBLES {
                    let out = out.cast::<D::Nibbles>().add(to.at(vector) + i);
                    out.write(d.low(step));
                } else {
                    let out = out.cast::<D::Codes>().add(to.at(vector) + i);
                    out.write(if K { d.k_bytes(step) } else { d.v_bytes(step) });
                }
            }
        }
    }
}

#[repr(align(64))]
struct Bytes([u8; 256]);

/// The first 16 bytes of `LANES` rows of `ROW`, with four neighbours of row i in lane i of each vector.
///
/// # Safety
/// They are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn lanes_of<S: Simd, const ROW: usize>(s: S, p: *const u8) -> [S::I; 4] {
    let mut v = [s.i_splat(0); 4];
    for (j, v) in v.iter_mut().enumerate() {
        let row = |r: usize| p.wrapping_add(ROW * (4 * r + j));
        // SAFETY: rows j, 4 + j … of which the first ROWS count.
        *v = unsafe { s.i_load_rows([row(0), row(1), row(2), row(3)]) };
    }
    let ([a, b], [c, e]) = (s.zip_32(v[0], v[1]), s.zip_32(v[2], v[3]));
    let ([x, y], [z, w]) = (s.zip_64(a, c), s.zip_64(b, e));
    [x, y, z, w]
}

/// Where vector `vector` of one side of [`LaneCodes`] begins, whose vectors have so many parts.
#[inline(always)]
pub(crate) fn vector<D: Dot, const NIBBLES: bool>(
    side: &Aligned<u8>,
    vector: usize,
    parts: usize,
) -> *const u8 {
    let step = if NIBBLES {
        size_of::<D::Nibbles>()
    } else {
        size_of::<D::Codes>()
    };
    side.as_slice()[vector * parts * 4 * step..].as_ptr()
}

/// The operands of a block's rows, `row` bytes apart.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub base: *const u8,
    pub row: usize,
}

/// What a run of products of nibbles is added to: the sums before it, or nothing where a run's sums are narrower and are widened at its end.
#[inline(always)]
pub(crate) fn begin_run<D: Dot, const R: usize, const V: usize>(
    d: D,
    acc: &[[<D::S as Simd>::I; V]; R],
) -> [[<D::S as Simd>::I; V]; R] {
    match D::WIDENS {
        true => [[d.simd().i_splat(0); V]; R],
        false => *acc,
    }
}

/// The sums behind a run, which began with [`begin_run`].
#[inline(always)]
pub(crate) fn end_run<D: Dot, const R: usize, const V: usize>(
    d: D,
    acc: &mut [[<D::S as Simd>::I; V]; R],
    run: &[[<D::S as Simd>::I; V]; R],
) {
    for r in 0..R {
        for j in 0..V {
            acc[r][j] = match D::WIDENS {
                true => d.widen(acc[r][j], run[r][j]),
                false => run[r][j],
            };
        }
    }
}

/// Products of `V` vectors of lanes, the first of them at `codes` and each of `parts` parts, with `R` rows, over the parts `from..to`: of K with
/// queries or (`WEIGHTS`) of V with weights.
///
/// # Safety
/// The vectors and the operands have those parts.
#[inline(always)]
pub(crate) unsafe fn products<
    D: Dot,
    const R: usize,
    const V: usize,
    const NIBBLES: bool,
    const WEIGHTS: bool,
>(
    d: D,
    codes: *const u8,
    operands: Operands,
    parts: usize,
    [from, to]: [usize; 2],
) -> [[<D::S as Simd>::I; V]; R] {
    let s = d.simd();
    let mut acc = [[s.i_splat(0); V]; R];
    let operand_at = |part: usize, r: usize| {
        operands
            .base
            .wrapping_add(r * operands.row + part * D::OPERAND)
    };
    if !NIBBLES {
        let codes = codes.cast::<D::Codes>();
        for part in from..to {
            for i in 0..4 {
                let mut lanes = [d.none(); V];
                for j in 0..V {
                    // SAFETY: the caller's contract.
                    lanes[j] = unsafe { codes.add(4 * (parts * j + part) + i).read() };
                }
                for r in 0..R {
                    // SAFETY: as above.
                    let operand = unsafe { d.lane_operand(operand_at(part, r), i) };
                    for j in 0..V {
                        acc[r][j] = if WEIGHTS {
                            d.v_dot(acc[r][j], lanes[j], operand)
                        } else {
                            d.k_dot(acc[r][j], lanes[j], operand)
                        };
                    }
                }
            }
        }
        return acc;
    }
    // Four weights of a byte fill a run, as do twice as many values of a query.
    const { assert!(D::RUN >= 8) };
    let run_parts = if WEIGHTS { 1 } else { D::RUN / 4 };
    let codes = codes.cast::<D::Nibbles>();
    for start in (from..to).step_by(run_parts) {
        let mut run = begin_run(d, &acc);
        for part in start..to.min(start + run_parts) {
            for i in 0..4 {
                let mut lanes = [d.no_nibbles(); V];
                for j in 0..V {
                    // SAFETY: the caller's contract.
                    lanes[j] = unsafe { codes.add(4 * (parts * j + part) + i).read() };
                }
                for r in 0..R {
                    // SAFETY: as above.
                    let operand = unsafe { d.lane_nibble_operand(operand_at(part, r), i) };
                    for j in 0..V {
                        run[r][j] = if WEIGHTS {
                            d.v_nibbles(run[r][j], lanes[j], operand)
                        } else {
                            d.k_nibbles(run[r][j], lanes[j], operand)
                        };
                    }
                }
            }
        }
        end_run(d, &mut acc, &run);
    }
    acc
}
