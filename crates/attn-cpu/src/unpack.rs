//! Converts codes that the kernels cannot read in place, 16 bytes at a time, into panels that the thread owns.
//!
//! A view's rows become panels. The float arithmetic sums over tokens in order, so it needs V of 8 and 4 bits transposed, and all codes as
//! floats. fp8 becomes f16 that is too small by 2^8; the other factor of the product, a query or a weight, is scaled by 2^8, so every product
//! is the same real number. Other codes become f32.

use attn_core::{arithmetic::TILE, format::MAX_GROUPS, layout::slot};

use crate::simd::Simd;

/// Conversion of fp8 to f16, as a const parameter.
pub(crate) const FP8: u8 = 0;
/// Conversion of fp8 that may hold NaN, as views may.
pub(crate) const FP8_NAN: u8 = 1;
/// Conversion to code·scale.
pub(crate) const INT8: u8 = 2;
/// Conversion to code·scale + shift.
pub(crate) const INT4: u8 = 3;

/// The factor by which fp8 as f16 is too small.
pub(crate) const FP8_UNIT: f32 = 256.0;

/// Tokens whose codes are side by side.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows {
    /// The first row of each 16 tokens.
    pub places: [*const u8; 4],
    /// From a row to the next.
    pub row: usize,
    /// From 16 bytes of a row to the next 16.
    pub chunk: usize,
}

/// Scales and shifts of codes that become f32.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    /// By group and token.
    pub scale: &'a [[f32; TILE]; MAX_GROUPS],
    pub shift: &'a [[f32; TILE]; MAX_GROUPS],
    pub groups: usize,
}

/// The conversion of one side of a tile into panels of 8 dims, `TILE` rows each, 2 or 4 bytes an element.
#[derive(Clone, Copy)]
pub(crate) struct Unpack<'a> {
    pub tokens: usize,
    pub dim: usize,
    pub scales: Scales<'a>,
    pub out: *mut u8,
}

/// Copies `bytes` bytes of each token, 16 to a panel of `TILE` rows.
///
/// # Safety
/// `bytes` are readable in each of `tokens` rows, a multiple of 16 and 64 at least; `bytes·TILE` are writable at `out`.
#[inline(always)]
pub(crate) unsafe fn copy<S: Simd>(
    s: S,
    lines: &CodeRows,
    tokens: usize,
    bytes: usize,
    out: *mut u8,
) {
    for t in 0..tokens {
        for at in (0..bytes / 16).step_by(S::ROWS) {
            // The last vector overlaps the one before it if need be.
            let at = at.min(bytes / 16 - S::ROWS);
            // SAFETY: chunks at..at + ROWS of the row, and as many panels.
            unsafe {
                let codes = s.i_load_rows(chunks(lines, t, at));
                let to = out.wrapping_add((at * TILE + t) * 16);
                s.i_store_rows(four(to, TILE * 16), codes);
            }
        }
    }
}

/// Joins 8 rows of 4-bit codes with as many of residuals: 16 rows of the 8-bit integers `16·code + residual − 128`, low nibbles first.
///
/// # Safety
/// 128 bytes are readable at `codes` and at `residuals`, 256 writable at `out`.
#[inline(always)]
pub(crate) unsafe fn join<S: Simd>(s: S, codes: *const u8, residuals: *const u8, out: *mut u8) {
    let (low, high, sign) = (
        s.i_splat(0x0f0f_0f0f),
        s.i_splat(0xf0f0_f0f0u32 as i32),
        s.i_splat(0x8080_8080u32 as i32),
    );
    for row in (0..8).step_by(S::ROWS) {
        // SAFETY: rows `row..row + ROWS` of 8, and the same of the 8 behind them.
        unsafe {
            let (u, r) = (
                s.i_load(codes.add(16 * row)),
                s.i_load(residuals.add(16 * row)),
            );
            let first = s.i_xor(s.i_and(s.h_shl::<4>(u), high), s.i_and(r, low));
            let second = s.i_xor(s.i_and(u, high), s.i_and(s.h_shr::<4>(r), low));
            s.i_store(out.add(16 * row), s.i_xor(first, sign));
            s.i_store(out.add(16 * (row + 8)), s.i_xor(second, sign));
        }
    }
}

/// Turns 8-bit rows of V into panels of 16 tokens in the order of `slot`.
///
/// # Safety
/// Those of [`copy`]; what stands for tokens from `tokens` on is any of the others.
#[inline(always)]
pub(crate) unsafe fn turn_rows<S: Simd>(
    s: S,
    lines: &CodeRows,
    tokens: usize,
    dim: usize,
    out: *mut u8,
) {
    for t0 in (0..tokens).step_by(16) {
        for at in (0..dim / 16).step_by(S::ROWS) {
            let at = at.min(dim / 16 - S::ROWS);
            let mut x = [s.i_splat(0); 16];
            for t in 0..16 {
                // SAFETY: chunks at..at + ROWS of a token that there is.
                x[slot(t)] = unsafe { s.i_load_rows(chunks(lines, (t0 + t).min(tokens - 1), at)) };
            }
            x = turn(s, x);
            for (i, x) in x.iter().enumerate() {
                let to = out.wrapping_add(t0 * dim + (at * 16 + i) * 16);
                // SAFETY: row i of the panel's rows for each of ROWS·16 dims.
                unsafe { s.i_store_rows(four(to, 256), *x) };
            }
        }
    }
}

/// 8-bit codes side by side (K of pages, views) as floats.
///
/// # Safety
/// `dim` bytes are readable in each of `tokens` rows; `out` has room.
#[inline(always)]
pub(crate) unsafe fn widen_rows<S: Simd, const KIND: u8>(s: S, lines: &CodeRows, job: &Unpack<'_>) {
    for t in 0..job.tokens {
        for at in (0..job.dim / 16).step_by(S::ROWS) {
            let at = at.min(job.dim / 16 - S::ROWS);
            // SAFETY: chunks at..at + ROWS of token t.
            unsafe {
                let codes = s.i_load_rows(chunks(lines, t, at));
                emit::<S, KIND>(s, job, t, [at, at + 1, at + 2, at + 3], codes);
            }
        }
    }
}

/// fp8 K of pages, whose rows are neighbours: a vector is as many tokens as it has rows, and so is what becomes of it.
///
/// # Safety
/// `dim/16` panels of as many rows as `tokens` rounded up to 16; `out` has room.
#[inline(always)]
pub(crate) unsafe fn widen_panels<S: Simd>(s: S, lines: &CodeRows, job: &Unpack<'_>) {
    for t in (0..job.tokens).step_by(S::ROWS) {
        let first = lines.places[t / 16].wrapping_add(t % 16 * 16);
        for block in 0..job.dim / 16 {
            // SAFETY: ROWS rows of panel `block`, and of panels 2·block and 2·block + 1 of `out`.
            unsafe {
                let codes = s.i_load(first.add(block * lines.chunk));
                let [even, odd] = s.zip_8(s.i_splat(0), codes);
                let to = job.out.add((2 * block * TILE + t) * 16);
                s.i_store(to, half_of_fp8(s, even));
                s.i_store(to.add(TILE * 16), half_of_fp8(s, odd));
            }
        }
    }
}

/// f16 of fp8 in the high bytes: the sign stays, exponent and mantissa move below f16's highest exponent bit.
#[inline(always)]
fn half_of_fp8<S: Simd>(s: S, x: S::I) -> S::I {
    s.i_and(s.h_sar::<1>(x), s.i_splat(0xbf80_bf80_u32 as i32))
}

/// K of 4 bits: a row holds tokens i and i + 8 of each 16.
///
/// # Safety
/// 8 rows for each 16 tokens; else as for [`widen_rows`].
#[inline(always)]
pub(crate) unsafe fn widen_pairs<S: Simd>(s: S, lines: &CodeRows, job: &Unpack<'_>) {
    let mask = s.i_splat(0x0f0f_0f0f);
    for t0 in (0..job.tokens).step_by(16) {
        for i in 0..8 {
            for at in (0..job.dim / 16).step_by(S::ROWS) {
                let at = at.min(job.dim / 16 - S::ROWS);
                let blocks = [at, at + 1, at + 2, at + 3];
                // SAFETY: chunks at..at + ROWS of row i, which is that of tokens t0 + i and t0 + 8 + i.
                unsafe {
                    let codes = s.i_load_rows(chunks(lines, t0 + i, at));
                    let high = s.i_and(s.h_shr::<4>(codes), mask);
                    emit::<S, INT4>(s, job, t0 + i, blocks, s.i_and(codes, mask));
                    emit::<S, INT4>(s, job, t0 + 8 + i, blocks, high);
                }
            }
        }
    }
}

/// V of 8 bits, turned: 16 tokens in the order of `slot` to a row, dim after dim.
///
/// # Safety
/// `dim` rows of 16 bytes at each of `places` that has tokens; `out` has room.
#[inline(always)]
pub(crate) unsafe fn widen_turned<S: Simd, const KIND: u8>(
    s: S,
    places: &[*const u8; 4],
    job: &Unpack<'_>,
) {
    for t0 in (0..job.tokens).step_by(16) {
        for at in (0..job.dim / 16).step_by(S::ROWS) {
            let at = at.min(job.dim / 16 - S::ROWS);
            let (blocks, first) = ([at, at + 1, at + 2, at + 3], at * 256);
            // SAFETY: rows of blocks at..at + ROWS of 16 dims; `emit` gets the blocks of 16 tokens.
            unsafe {
                let starts = [first, first + 256, first + 512, first + 768];
                let x = turned(s, places[t0 / 16], starts);
                for t in 0..16 {
                    emit::<S, KIND>(s, job, t0 + t, blocks, x[slot(t)]);
                }
            }
        }
    }
}

/// V of 4 bits, turned: a row holds dims i and i + 8 of each 16.
///
/// # Safety
/// Those of [`widen_turned`], with `dim/2` rows.
#[inline(always)]
pub(crate) unsafe fn widen_turned_pairs<S: Simd>(s: S, places: &[*const u8; 4], job: &Unpack<'_>) {
    let (mask, blocks) = (s.i_splat(0x0f0f_0f0f), job.dim / 16);
    for t0 in (0..job.tokens).step_by(16) {
        // 16 rows are two blocks of 16 dims; the last two overlap others if need be.
        for pair in (0..blocks.div_ceil(2)).step_by(S::ROWS) {
            let at = |r: usize| (2 * (pair + r)).min(blocks - 2);
            let (low, place) = ([at(0), at(1), at(2), at(3)], places[t0 / 16]);
            let high = [low[0] + 1, low[1] + 1, low[2] + 1, low[3] + 1];
            // SAFETY: 8 rows of each of two blocks of dims; `emit` gets those.
            unsafe {
                let x = turned(
                    s,
                    place,
                    [low[0] * 128, low[1] * 128, low[2] * 128, low[3] * 128],
                );
                for t in 0..16 {
                    let codes = x[slot(t)];
                    let (even, odd) = (s.i_and(codes, mask), s.i_and(s.h_shr::<4>(codes), mask));
                    let [first, second] = s.zip_64(even, odd);
                    emit::<S, INT4>(s, job, t0 + t, low, first);
                    emit::<S, INT4>(s, job, t0 + t, high, second);
                }
            }
        }
    }
}

/// Chunks `at..at + 4` of token `t`.
#[inline(always)]
fn chunks(lines: &CodeRows, t: usize, at: usize) -> [*const u8; 4] {
    let first = lines.places[t / 16].wrapping_add(t % 16 * lines.row + at * lines.chunk);
    [
        first,
        first.wrapping_add(lines.chunk),
        first.wrapping_add(2 * lines.chunk),
        first.wrapping_add(3 * lines.chunk),
    ]
}

/// Four places `stride` apart.
#[inline(always)]
fn four(p: *mut u8, stride: usize) -> [*mut u8; 4] {
    [
        p,
        p.wrapping_add(stride),
        p.wrapping_add(2 * stride),
        p.wrapping_add(3 * stride),
    ]
}

/// Turns 16 by 16 bytes, as many at once as a vector has rows: byte i of a row of `x[j]` goes to byte j of that row of vector i.
#[inline(always)]
fn turn<S: Simd>(s: S, x: [S::I; 16]) -> [S::I; 16] {
    // Each round turns the eight bits of a byte's place, vector and byte in its row, by one.
    zip_halves(s, zip_halves(s, zip_halves(s, zip_halves(s, x))))
}

/// Without a loop, which would keep the vectors in memory.
#[inline(always)]
fn zip_halves<S: Simd>(s: S, x: [S::I; 16]) -> [S::I; 16] {
    let [a, b] = s.zip_8(x[0], x[8]);
    let [c, d] = s.zip_8(x[1], x[9]);
    let [e, f] = s.zip_8(x[2], x[10]);
    let [g, h] = s.zip_8(x[3], x[11]);
    let [i, j] = s.zip_8(x[4], x[12]);
    let [k, l] = s.zip_8(x[5], x[13]);
    let [m, n] = s.zip_8(x[6], x[14]);
    let [o, p] = s.zip_8(x[7], x[15]);
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// 16 rows of 16 bytes from each of `starts` on, turned.
///
/// # Safety
/// 256 bytes are readable at the first `ROWS` of them.
#[inline(always)]
unsafe fn turned<S: Simd>(s: S, place: *const u8, starts: [usize; 4]) -> [S::I; 16] {
    let mut x = [s.i_splat(0); 16];
    for (i, x) in x.iter_mut().enumerate() {
        let at = place.wrapping_add(i * 16);
        let rows = [
            at.wrapping_add(starts[0]),
            at.wrapping_add(starts[1]),
            at.wrapping_add(starts[2]),
            at.wrapping_add(starts[3]),
        ];
        // SAFETY: the caller's contract.
        *x = unsafe { s.i_load_rows(rows) };
    }
    turn(s, x)
}

/// Writes token `t`'s dims of `blocks` of 16 as floats; each row of `codes` is one block.
///
/// # Safety
/// `t < TILE`, and the first `ROWS` blocks lie below dim/16.
#[inline(always)]
unsafe fn emit<S: Simd, const KIND: u8>(
    s: S,
    job: &Unpack<'_>,
    t: usize,
    blocks: [usize; 4],
    codes: S::I,
) {
    // Codes in the high byte of 16 bits: even panels of 8 dims, then odd ones.
    let halves = s.zip_8(s.i_splat(0), codes);
    let [mut scale, mut shift] = [s.splat(0.0); 2];
    for half in 0..2 {
        if KIND == FP8 || KIND == FP8_NAN {
            let mut x = half_of_fp8(s, halves[half]);
            if KIND == FP8_NAN {
                // 0x7f and 0xff alone carry into bit 15, and become NaN by that highest bit.
                let carried = s.i_add(
                    s.i_and(halves[half], s.i_splat(0x7f00_7f00)),
                    s.i_splat(0x0100_0100),
                );
                let nan = s.i_and(carried, s.i_splat(0x8000_8000_u32 as i32));
                x = s.i_xor(x, s.h_shr::<1>(nan));
            }
            // SAFETY: row t of panels 2·block + half, of dim/8.
            unsafe { s.i_store_rows(panel_rows(job, t, blocks, half, 16), x) };
            continue;
        }
        let quarters = s.zip_16(s.i_splat(0), halves[half]);
        for quarter in 0..2 {
            let x = s.to_f(s.i_sar::<24>(quarters[quarter]));
            // SAFETY: the caller's contract; half a row of the panel.
            unsafe {
                if half + quarter == 0 {
                    [scale, shift] = factors(s, job, t, blocks);
                }
                let mut x = s.mul(x, scale);
                if KIND == INT4 {
                    x = s.add(x, shift);
                }
                let [a, b, c, d] = panel_rows(job, t, blocks, half, 32);
                let at = quarter * 16;
                let rows = [
                    a.wrapping_add(at),
                    b.wrapping_add(at),
                    c.wrapping_add(at),
                    d.wrapping_add(at),
                ];
                s.i_store_rows(rows, s.bits(x));
            }
        }
    }
}

/// Row `t` of the even (`half` 0) or odd panels of `blocks`; a row has `width` bytes.
#[inline(always)]
fn panel_rows(
    job: &Unpack<'_>,
    t: usize,
    blocks: [usize; 4],
    half: usize,
    width: usize,
) -> [*mut u8; 4] {
    let first = job.out.wrapping_add((half * TILE + t) * width);
    [
        first.wrapping_add(blocks[0] * 2 * TILE * width),
        first.wrapping_add(blocks[1] * 2 * TILE * width),
        first.wrapping_add(blocks[2] * 2 * TILE * width),
        first.wrapping_add(blocks[3] * 2 * TILE * width),
    ]
}

/// Scale and shift of token `t` in each block.
///
/// # Safety
/// The first `ROWS` blocks lie below dim/16.
#[inline(always)]
unsafe fn factors<S: Simd>(s: S, job: &Unpack<'_>, t: usize, blocks: [usize; 4]) -> [S::F; 2] {
    let of = &job.scales;
    if of.groups == 1 {
        return [s.splat(of.scale[0][t]), s.splat(of.shift[0][t])];
    }
    // Four times each group's, for the rows that lie in it.
    let (mut scale, mut shift) = ([[0.0f32; 4]; MAX_GROUPS], [[0.0f32; 4]; MAX_GROUPS]);
    for g in 0..of.groups {
        scale[g] = [of.scale[g][t]; 4];
        shift[g] = [of.shift[g][t]; 4];
    }
    let blocks_per_group = job.dim / 16 / of.groups;
    let rows = |x: &[[f32; 4]; MAX_GROUPS]| {
        let at = |r: usize| {
            x[(blocks[r] / blocks_per_group).min(MAX_GROUPS - 1)]
                .as_ptr()
                .cast()
        };
        [at(0), at(1), at(2), at(3)]
    };
    // SAFETY: four floats each.
    unsafe {
        [
            s.of_bits(s.i_load_rows(rows(&scale))),
            s.of_bits(s.i_load_rows(rows(&shift))),
        ]
    }
}
