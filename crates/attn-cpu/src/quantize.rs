//! Vectorized quantizers of rows, with the bytes of `attn_core::quant`, which defines them in f64.
//!
//! The loops are plain arithmetic over chunks of a fixed width; the compiler makes vectors of them, once per instruction set.
//!
//! **Why f32 is exact here.** The specification rounds the real quotient x/s once, to the nearest code. An f32 quotient q rounds twice,
//! which can only matter where q is a tie: rounding to f32 is monotone and ties are f32 numbers, so q lies on the quotient's side of
//! each of them or on one. Then the remainder decides on which side the quotient lies. With s = high + low, each of 12 bits,
//! q·high and q·low are exact because a tie has at most 9 bits, and x − q·high is exact because both are within a factor of 2.
//! Half steps are rounded down, so there whole numbers take the place of ties.

use attn_core::{
    Groups, HeadDim, Int8Scale, MAX_HEAD_DIM, Scheme, TokenWrite, WideRows,
    arithmetic::ROUND,
    centres::{CENTRES, centre_of},
    format::MAX_GROUPS,
    layout::{PageLayout, Part, Side, slot},
    quant::{self, Param},
    rotation::rotate_stored,
};
use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::{float_modes, simd::Isa};

/// The width of the loops; every head_dim and every group is a multiple.
const CHUNK: usize = 16;

/// What all rows of a cache have in common.
pub(crate) struct RowWriter {
    head_dim: HeadDim,
    num_kv_heads: usize,
    page_size: usize,
    /// Those that have bytes of their own.
    stored_sides: &'static [Side],
    parts: [Part; 2],
    /// The parts of a residual page.
    residuals: [Option<Part>; 2],
    /// Static scales of K and of V, per KV head; empty without.
    tensor_scales: [Vec<f32>; 2],
    write: WriteRun,
}

/// Tokens of one page to write: their destinations, and all tokens' K and V.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub writes: &'a [TokenWrite],
    pub kv: [WideRows<'a>; 2],
    /// Centres of K of the layer, `[num_sequences, num_kv_heads, 2, head_dim.k]`; nothing in a cache without.
    pub centres: &'a [bf16],
}

/// A KV head's run of a page, and its run of the residual page, if the page has one.
pub(crate) struct Runs<'a> {
    pub home: &'a mut [u8],
    pub residual: Option<&'a mut [u8]>,
}

/// Writes tokens of one KV head into its runs of their pages.
type WriteRun = unsafe fn(&RowWriter, Tokens<'_>, usize, Runs<'_>);

impl RowWriter {
    /// For pages of this layout, on `isa`, which the caller has found available.
    pub fn new(layout: &PageLayout, tensor_scales: [Vec<f32>; 2], isa: Isa) -> Self {
        RowWriter {
            head_dim: layout.head_dim(),
            num_kv_heads: layout.num_kv_heads(),
            page_size: layout.page_size(),
            stored_sides: layout.format().stored_sides(),
            parts: [Side::K, Side::V].map(|side| layout.part(side)),
            residuals: [Side::K, Side::V].map(|side| layout.residual(side)),
            tensor_scales,
            write: match isa {
                Isa::Portable => plain,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Vnni => avx512,
                // NEON belongs to the target.
                _ => plain,
            },
        }
    }

    /// The centre of K that is taken off a token's key of one KV head; nothing in a cache without.
    #[inline(always)]
    fn centre<'a>(&self, all: &'a [bf16], write: &TokenWrite, head: usize) -> &'a [bf16] {
        if all.is_empty() {
            return all;
        }
        let of_head = write.sequence * self.num_kv_heads + head;
        let first = (of_head * CENTRES + centre_of(write.position)) * self.head_dim.k;
        &all[first..first + self.head_dim.k]
    }

    /// Writes tokens of KV head `head` into its runs of their pages.
    pub fn write(&self, tokens: Tokens<'_>, head: usize, runs: Runs<'_>) {
        // SAFETY: `new` was given an instruction set that the machine has.
        float_modes::with_default(|| unsafe { (self.write)(self, tokens, head, runs) });
    }
}

fn plain(writer: &RowWriter, tokens: Tokens<'_>, head: usize, runs: Runs<'_>) {
    write_run(writer, tokens, head, runs);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2(writer: &RowWriter, tokens: Tokens<'_>, head: usize, runs: Runs<'_>) {
    write_run(writer, tokens, head, runs);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512(writer: &RowWriter, tokens: Tokens<'_>, head: usize, runs: Runs<'_>) {
    write_run(writer, tokens, head, runs);
}

/// A row as it is stored, its codes, as bytes or as 16 bits, and its parameters.
struct Row {
    rotated: [f32; MAX_HEAD_DIM],
    bytes: [u8; MAX_HEAD_DIM],
    words: [u16; MAX_HEAD_DIM],
    /// The low halves of half-step codes, whose high halves are in `bytes`.
    residuals: [u8; MAX_HEAD_DIM],
    params: [Param; MAX_GROUPS],
}

#[inline(always)]
fn write_run(writer: &RowWriter, tokens: Tokens<'_>, head: usize, mut runs: Runs<'_>) {
    let mut row = Row {
        rotated: [0.0; MAX_HEAD_DIM],
        bytes: [0; MAX_HEAD_DIM],
        words: [0; MAX_HEAD_DIM],
        residuals: [0; MAX_HEAD_DIM],
        params: [Param::default(); MAX_GROUPS],
    };
    let page_size = writer.page_size;
    for &side in writer.stored_sides {
        let (side, part) = (side as usize, &writer.parts[side as usize]);
        let dim = part.dim();
        let scale = writer.tensor_scales[side].get(head).copied();
        let groups = part.groups();
        for write in tokens.writes {
            let x = tokens.kv[side].row(write.source, head);
            let centre = match side {
                0 => writer.centre(tokens.centres, write, head),
                _ => &[],
            };
            let x = Stored { x, centre };
            encode(part.scheme, scale.unwrap_or(1.0), x, groups, &mut row);
            let (t, codes) = (write.token, &mut runs.home[part.codes.clone()]);
            match (part.scheme.code_bits(), side) {
                (16, _) => place_words(&row.words[..dim], page_size, t, codes),
                (8, 0) => place_k(&row.bytes[..dim], page_size, t, codes),
                (8, _) => place_v(&row.bytes[..dim], t, codes),
                (_, side) => place_nibbles(side, &row.bytes[..dim], page_size, t, codes),
            }
            part.store_params(runs.home, t, &row.params[..groups.count()]);
            if let (Some(run), Some(part)) = (&mut runs.residual, &writer.residuals[side]) {
                let codes = &mut run[part.codes.clone()];
                place_nibbles(side, &row.residuals[..dim], page_size, t, codes);
            }
        }
    }
}

/// A row to store, and the centre that is taken off it where it is rotated, if any is.
struct Stored<'a> {
    x: &'a [f32],
    centre: &'a [bf16],
}

/// Quantizes a token of one KV head; see [`quant::encode`].
#[inline(always)]
fn encode(scheme: Scheme, tensor_scale: f32, of: Stored<'_>, groups: Groups, row: &mut Row) {
    let Stored { x, centre } = of;
    let x = if scheme.is_rotated() {
        let rotated = &mut row.rotated[..x.len()];
        rotated.copy_from_slice(x);
        rotate_stored(rotated);
        for (x, c) in rotated.iter_mut().zip(centre) {
            *x -= f32::from_bits(u32::from(c.to_bits()) << 16);
        }
        &*rotated
    } else {
        x
    };
    let of_groups = groups.ranges().zip(&mut row.params);
    match scheme {
        Scheme::F16 => f16_codes(x, &mut row.words),
        Scheme::Bf16 => bf16_codes(x, &mut row.words),
        Scheme::Fp8E4m3 => fp8_codes(x, tensor_scale, &mut row.bytes),
        Scheme::Int8(Int8Scale::Tensor) => {
            codes::<-127, 127>(x, 0.0, tensor_scale, &mut row.bytes);
        }
        Scheme::Int8(_) | Scheme::RotatedInt8 => {
            for (dims, param) in of_groups {
                let (x, bytes) = (&x[dims.clone()], &mut row.bytes[dims]);
                *param = quant::int8_param(magnitude(x));
                codes::<-127, 127>(x, 0.0, param.scale.to_f32(), bytes);
            }
        }
        Scheme::Int4(_) => {
            for (dims, param) in of_groups {
                let (x, bytes) = (&x[dims.clone()], &mut row.bytes[dims]);
                let [lo, hi] = extremes(x);
                *param = quant::int4_param(lo, hi);
                codes::<0, 15>(x, param.shift.to_f32(), param.scale.to_f32(), bytes);
            }
        }
        Scheme::RotatedInt4 { .. } => {
            for (dims, param) in of_groups {
                let (x, bytes) = (&x[dims.clone()], &mut row.bytes[dims]);
                *param = quant::half_step_param(magnitude(x));
                half_steps(x, param.scale.to_f32(), bytes);
            }
            for (code, residual) in row.bytes[..x.len()].iter_mut().zip(&mut row.residuals) {
                (*code, *residual) = (*code >> 4, *code & 15);
            }
        }
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

/// The largest magnitude of a row.
#[inline(always)]
fn magnitude(x: &[f32]) -> f32 {
    let mut most = [0.0f32; CHUNK];
    for x in x.as_chunks::<CHUNK>().0 {
        for i in 0..CHUNK {
            most[i] = larger(most[i], x[i].abs());
        }
    }
    most.into_iter().fold(0.0, larger)
}

/// The least and the largest number of a row; which zero is free.
#[inline(always)]
fn extremes(x: &[f32]) -> [f32; 2] {
    let (mut lo, mut hi) = ([f32::INFINITY; CHUNK], [f32::NEG_INFINITY; CHUNK]);
    for x in x.as_chunks::<CHUNK>().0 {
        for i in 0..CHUNK {
            lo[i] = smaller(lo[i], x[i]);
            hi[i] = larger(hi[i], x[i]);
        }
    }
    [
        lo.into_iter().fold(f32::INFINITY, smaller),
        hi.into_iter().fold(f32::NEG_INFINITY, larger),
    ]
}

/// A positive scale as the sum of two numbers of 12 bits.
#[inline(always)]
fn split(scale: f32) -> [f32; 2] {
    let high = f32::from_bits(scale.to_bits() & !0xfff);
    [high, scale - high]
}

/// How far the quotient x/s lies above its rounding `q`, a tie: the sign, and zero, are exact.
#[inline(always)]
fn above(x: f32, q: f32, [high, low]: [f32; 2]) -> f32 {
    (x - q * high) - q * low
}

/// The codes of `(x - shift) / scale`, rounded half to even and clamped; 0 if the scale is 0.
#[inline(always)]
fn codes<const LO: i32, const HI: i32>(x: &[f32], shift: f32, scale: f32, codes: &mut [u8]) {
    let codes = &mut codes[..x.len()];
    if scale == 0.0 {
        codes.fill(0);
        return;
    }
    let (lo, hi, mut ties) = (LO as f32, HI as f32, [0; CHUNK]);
    let chunks = codes.as_chunks_mut::<CHUNK>().0;
    for (x, codes) in x.as_chunks::<CHUNK>().0.iter().zip(chunks) {
        for i in 0..CHUNK {
            let q = smaller(larger((x[i] - shift) / scale, lo), hi);
            let sum = q + ROUND;
            // A whole number below 2^22 stands in the low bits of its sum with ROUND.
            codes[i] = sum.to_bits() as u8;
            ties[i] |= u32::from((q - (sum - ROUND)).abs() == 0.5);
        }
    }
    if ties != [0; CHUNK] {
        decide_ties([lo, hi], x, shift, scale, codes);
    }
}

/// Rounds quotients that are ties in f32 to the side on which the real quotients lie.
#[cold]
fn decide_ties([lo, hi]: [f32; 2], x: &[f32], shift: f32, scale: f32, codes: &mut [u8]) {
    let scales = split(scale);
    for (x, code) in x.iter().zip(codes) {
        let x = x - shift;
        let q = (x / scale).clamp(lo, hi);
        let above = above(x, q, scales);
        if (q - ((q + ROUND) - ROUND)).abs() == 0.5 && above != 0.0 {
            *code = (q + 0.5f32.copysign(above)) as i32 as u8;
        }
    }
}

/// The half-step codes of `x` under `scale`, `floor(8x / scale) + 128` clamped to a byte; 128 if the scale is 0.
#[inline(always)]
fn half_steps(x: &[f32], scale: f32, codes: &mut [u8]) {
    let codes = &mut codes[..x.len()];
    if scale == 0.0 {
        codes.fill(128);
        return;
    }
    let (step, mut whole) = (scale / 8.0, [0; CHUNK]);
    let chunks = codes.as_chunks_mut::<CHUNK>().0;
    for (x, codes) in x.as_chunks::<CHUNK>().0.iter().zip(chunks) {
        for i in 0..CHUNK {
            let q = smaller(larger(x[i] / step, -127.5), 127.5);
            // The nearest whole number, then the one below `q`.
            let near = (q + ROUND) - ROUND;
            let floor = near - if near > q { 1.0 } else { 0.0 };
            codes[i] = (floor + 128.0 + ROUND).to_bits() as u8;
            whole[i] |= u32::from(q == near);
        }
    }
    if whole != [0; CHUNK] {
        decide_whole(x, step, codes);
    }
}

/// Takes a half step off where the quotient is whole in f32, but the real one lies below.
#[cold]
fn decide_whole(x: &[f32], step: f32, codes: &mut [u8]) {
    let steps = split(step);
    for (x, code) in x.iter().zip(codes) {
        let q = (x / step).clamp(-127.5, 127.5);
        if q == (q + ROUND) - ROUND && above(*x, q, steps) < 0.0 {
            *code = code.saturating_sub(1);
        }
    }
}

/// The least normal e4m3 number, 2^-6.
const FP8_LEAST: f32 = 1.0 / 64.0;

/// The e4m3 codes of `x / scale`, rounded half to even, saturated.
#[inline(always)]
fn fp8_codes(x: &[f32], scale: f32, codes: &mut [u8]) {
    let (codes, mut ties) = (&mut codes[..x.len()], [0; CHUNK]);
    let chunks = codes.as_chunks_mut::<CHUNK>().0;
    for (x, codes) in x.as_chunks::<CHUNK>().0.iter().zip(chunks) {
        for i in 0..CHUNK {
            let q = smaller(x[i].abs() / scale, 448.0);
            let (even, half) = fp8_even(q);
            codes[i] = fp8_code(even, x[i]);
            ties[i] |= u32::from((q - even).abs() == half);
        }
    }
    if ties != [0; CHUNK] {
        decide_fp8_ties(x, scale, codes);
    }
}

/// A magnitude rounded to e4m3, half to even, and half the distance of e4m3 numbers there.
#[inline(always)]
fn fp8_even(q: f32) -> (f32, f32) {
    let power = larger(q, FP8_LEAST).to_bits() & 0x7f80_0000;
    // 1.5 · 2^(exponent + 20), whose last bit is worth an eighth of the power: the distance of codes.
    let round = f32::from_bits(power + (20 << 23) + (1 << 22));
    let half = f32::from_bits(power - (4 << 23));
    ((q + round) - round, half)
}

/// The code of an e4m3 magnitude with the sign of `x`.
#[inline(always)]
fn fp8_code(magnitude: f32, x: f32) -> u8 {
    // Adding the least normal number to a subnormal one leaves its multiple of 2^-9 in the mantissa.
    let is_small = magnitude < FP8_LEAST;
    let bits = (magnitude + if is_small { FP8_LEAST } else { 0.0 }).to_bits() >> 20;
    let code = bits - if is_small { 121 << 3 } else { 120 << 3 };
    (code | x.to_bits() >> 24 & 0x80) as u8
}

/// Decides ties of fp8 codes, as [`decide_ties`] does those of integers.
#[cold]
fn decide_fp8_ties(x: &[f32], scale: f32, codes: &mut [u8]) {
    let scales = split(scale);
    for (x, code) in x.iter().zip(codes) {
        let q = (x.abs() / scale).min(448.0);
        let (even, half) = fp8_even(q);
        let above = above(x.abs(), q, scales);
        if (q - even).abs() == half && above != 0.0 {
            *code = fp8_code(q + half.copysign(above), *x);
        }
    }
}

/// The f16 codes of a row, saturated.
#[inline(always)]
fn f16_codes(x: &[f32], codes: &mut [u16; MAX_HEAD_DIM]) {
    let mut clamped = [0.0f32; MAX_HEAD_DIM];
    for (clamped, x) in clamped.iter_mut().zip(x) {
        *clamped = smaller(larger(*x, -65504.0), 65504.0);
    }
    let mut halves = [f16::ZERO; MAX_HEAD_DIM];
    halves[..x.len()].convert_from_f32_slice(&clamped[..x.len()]);
    *codes = halves.map(f16::to_bits);
}

/// The bf16 codes of a row, saturated.
#[inline(always)]
fn bf16_codes(x: &[f32], codes: &mut [u16; MAX_HEAD_DIM]) {
    let max = bf16::MAX.to_f32();
    for (code, x) in codes.iter_mut().zip(x) {
        let bits = smaller(larger(*x, -max), max).to_bits();
        // Half of the last place, less one unit if the number is even: ties go to even.
        *code = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    }
}

/// Panels of 8 dims, `page_size` tokens long.
#[inline(always)]
fn place_words(row: &[u16], page_size: usize, t: usize, codes: &mut [u8]) {
    for (panel, row) in row.as_chunks::<8>().0.iter().enumerate() {
        let to = &mut codes[(panel * page_size + t) * 16..][..16];
        for (to, code) in to.as_chunks_mut::<2>().0.iter_mut().zip(row) {
            *to = code.to_le_bytes();
        }
    }
}

/// Panels of 16 dims, `page_size` tokens long.
#[inline(always)]
fn place_k(row: &[u8], page_size: usize, t: usize, codes: &mut [u8]) {
    for (panel, row) in row.as_chunks::<16>().0.iter().enumerate() {
        codes[(panel * page_size + t) * 16..][..16].copy_from_slice(row);
    }
}

/// Codes of K (side 0) or of V as nibbles.
#[inline(always)]
fn place_nibbles(side: usize, row: &[u8], page_size: usize, t: usize, codes: &mut [u8]) {
    if side == 0 {
        place_k_nibbles(row, page_size, t, codes);
    } else {
        place_v_nibbles(row, t, codes);
    }
}

/// Panels of 16 dims; tokens t and t + 8 share a byte, and the second comes later.
#[inline(always)]
fn place_k_nibbles(row: &[u8], page_size: usize, t: usize, codes: &mut [u8]) {
    let (line, is_high) = (t / 16 * 8 + t % 8, t % 16 >= 8);
    for (panel, row) in row.as_chunks::<16>().0.iter().enumerate() {
        let to = &mut codes[(panel * (page_size / 2) + line) * 16..][..16];
        if is_high {
            to.iter_mut()
                .zip(row)
                .for_each(|(to, code)| *to = *to & 15 | code << 4);
        } else {
            to.copy_from_slice(row);
        }
    }
}

/// Panels of 16 tokens, a line of 16 bytes per dim.
#[inline(always)]
fn place_v(row: &[u8], t: usize, codes: &mut [u8]) {
    let lines = row.len();
    let panel = codes[t / 16 * lines * 16..][..lines * 16].as_chunks_mut::<16>();
    for (line, code) in panel.0.iter_mut().zip(row) {
        line[slot(t % 16)] = *code;
    }
}

/// Panels of 16 tokens, a line of 16 bytes per pair of dims d and d + 8.
#[inline(always)]
fn place_v_nibbles(row: &[u8], t: usize, codes: &mut [u8]) {
    let mut pairs = [0; MAX_HEAD_DIM / 2];
    for (pairs, row) in pairs
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(row.as_chunks::<16>().0)
    {
        for i in 0..8 {
            pairs[i] = row[i] | row[i + 8] << 4;
        }
    }
    place_v(&pairs[..row.len() / 2], t, codes);
}
