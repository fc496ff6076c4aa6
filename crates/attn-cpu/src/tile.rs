//! One tile of 64 tokens of one KV head, as the kernels want it: where its codes lie, and its parameters as floats.
//!
//! Native pages are read where they lie. Row-major views, fp8, and pairs of an integer and a float scheme are first packed into
//! panels of this thread's own: a slower path, with the same bits.

use std::sync::LazyLock;

use attn_core::{
    Int4Scale, Int8Scale, Scheme,
    arithmetic::{TILE, exp2i, exponent},
    layout::slot,
    quant,
};

use crate::{
    reader::{Reader, Side},
    scratch::{Aligned, GROUPS},
    simd::Simd,
};

/// How floats are stored in panels of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F16,
    Bf16,
    F32,
}

/// What will be read next, asked for while the current tile is worked on: into L2, line by line in the order of addresses,
/// spread over the tile's work. `docs/performance.md` has what else was tried.
pub(crate) struct Fetch {
    runs: [(*const u8, usize); 4],
    count: usize,
    run: usize,
    offset: usize,
    per_step: usize,
}

impl Fetch {
    const CHUNK: usize = 256;

    pub const fn new() -> Self {
        Fetch {
            runs: [(std::ptr::null(), 0); 4],
            count: 0,
            run: 0,
            offset: 0,
            per_step: 0,
        }
    }

    /// Takes up the pages of the tile at `t0`, if there are pages.
    #[inline(always)]
    pub fn aim(&mut self, reader: &Reader<'_>, t0: usize, tokens: usize) {
        (self.count, self.run, self.offset) = (0, 0, 0);
        let page_size = reader.page_end(0);
        // The second half of a page of 128 has come with the first.
        if !reader.is_paged() || t0 & (page_size - 1) != 0 {
            return;
        }
        for t in (t0..t0 + tokens).step_by(page_size) {
            let run = reader.run(t);
            self.runs[self.count] = (run.as_ptr(), run.len());
            self.count += 1;
        }
    }

    /// Nothing to take up.
    pub fn idle(&mut self) {
        (self.count, self.run, self.offset) = (0, 0, 0);
    }

    /// Spreads what is to be fetched over so many steps.
    #[inline(always)]
    pub fn spread(&mut self, steps: usize) {
        let chunks: usize = self.runs[..self.count]
            .iter()
            .map(|(_, len)| len.div_ceil(Self::CHUNK))
            .sum();
        self.per_step = chunks.div_ceil(steps.max(1));
    }

    #[inline(always)]
    pub fn step<S: Simd>(&mut self, s: S) {
        for _ in 0..self.per_step {
            if self.run == self.count {
                return;
            }
            let (run, len) = self.runs[self.run];
            for line in 0..4 {
                s.prefetch(run.wrapping_add(self.offset + 64 * line));
            }
            self.offset += Self::CHUNK;
            if self.offset >= len {
                (self.run, self.offset) = (self.run + 1, 0);
            }
        }
    }
}

/// A tile; its places are pointers into the cache or into its own panels, good until the next load.
pub(crate) struct Tile {
    /// Cached tokens, 1..=64.
    pub tokens: usize,
    /// K's panel rows of each 16 tokens (of 4 bits: 8 rows); the next panel is `k_stride` on.
    pub k: [*const u8; 4],
    pub k_stride: usize,
    pub k_nibbles: bool,
    pub k_float: Float,
    pub k_groups: usize,
    pub k_has_shift: bool,
    pub k_scale: [[f32; TILE]; GROUPS],
    pub k_shift: [[f32; TILE]; GROUPS],
    /// Integers: the panel of each 16 tokens. Floats: as for K.
    pub v: [*const u8; 4],
    pub v_stride: usize,
    pub v_nibbles: bool,
    pub v_float: Float,
    pub v_groups: usize,
    pub v_has_shift: bool,
    /// v_scale·2^f, 0 from `tokens` on.
    pub v_scale: [[f32; TILE]; GROUPS],
    /// 2^−f.
    pub v_unit: [f32; GROUPS],
    v_shift: [[f32; TILE]; GROUPS],
    /// `sh` in two planes.
    pub v_shift_hi: [[i32; TILE]; GROUPS],
    pub v_shift_lo: [[i32; TILE]; GROUPS],
    /// 2^(−14−h).
    pub v_shift_unit: [f32; GROUPS],
    /// Scales and centred shifts of a sealed `Int4 Channel` page, `[dim]`.
    pub channel_scale: Aligned<f32>,
    pub channel_shift: Aligned<f32>,
    k_panels: Aligned<u8>,
    v_panels: Aligned<u8>,
    codes: Vec<u16>,
}

impl Tile {
    pub const fn new() -> Self {
        Tile {
            tokens: 0,
            k: [std::ptr::null(); 4],
            k_stride: 0,
            k_nibbles: false,
            k_float: Float::F32,
            k_groups: 1,
            k_has_shift: false,
            k_scale: [[0.0; TILE]; GROUPS],
            k_shift: [[0.0; TILE]; GROUPS],
            v: [std::ptr::null(); 4],
            v_stride: 0,
            v_nibbles: false,
            v_float: Float::F32,
            v_groups: 1,
            v_has_shift: false,
            v_scale: [[0.0; TILE]; GROUPS],
            v_unit: [0.0; GROUPS],
            v_shift: [[0.0; TILE]; GROUPS],
            v_shift_hi: [[0; TILE]; GROUPS],
            v_shift_lo: [[0; TILE]; GROUPS],
            v_shift_unit: [0.0; GROUPS],
            channel_scale: Aligned::new(),
            channel_shift: Aligned::new(),
            k_panels: Aligned::new(),
            v_panels: Aligned::new(),
            codes: Vec::new(),
        }
    }

    /// Loads `tokens` tokens from `t0`, a multiple of 64, for the integer arithmetic.
    #[inline(always)]
    pub fn load_integer<S: Simd>(
        &mut self,
        s: S,
        reader: &Reader<'_>,
        t0: usize,
        tokens: usize,
        dim: usize,
    ) {
        self.tokens = tokens;
        let scheme = reader.scheme(Side::K, t0);
        let channel = scheme == Scheme::Int4(Int4Scale::Channel);
        self.k_groups = scheme.groups(dim);
        self.k_has_shift = matches!(scheme, Scheme::Int4(Int4Scale::Groups(_)));
        self.k_nibbles = scheme.code_bits() == 4;
        if reader.is_paged() {
            self.place(reader, Side::K, t0, scheme.code_bits(), dim);
        } else {
            self.pack_k(reader, t0, dim);
        }
        if channel {
            self.channel(s, reader, t0, dim);
        }
        if channel || scheme == Scheme::Int8(Int8Scale::Tensor) {
            self.k_scale[0] = [1.0; TILE];
        } else {
            params(
                s,
                reader,
                Side::K,
                t0,
                tokens,
                self.k_groups,
                &mut self.k_scale,
                &mut self.k_shift,
            );
        }

        let scheme = reader.scheme(Side::V, t0);
        self.v_groups = scheme.groups(dim);
        self.v_has_shift = matches!(scheme, Scheme::Int4(_));
        self.v_nibbles = scheme.code_bits() == 4;
        if reader.is_paged() {
            self.place(reader, Side::V, t0, scheme.code_bits(), dim);
        } else {
            self.pack_v(reader, t0, dim);
        }
        if scheme == Scheme::Int8(Int8Scale::Tensor) {
            self.v_scale[0] = std::array::from_fn(|t| if t < tokens { 1.0 } else { 0.0 });
        } else {
            params(
                s,
                reader,
                Side::V,
                t0,
                tokens,
                self.v_groups,
                &mut self.v_scale,
                &mut self.v_shift,
            );
        }
        for g in 0..self.v_groups {
            let largest = largest(s, &self.v_scale[g]);
            let f = if largest == 0.0 {
                0
            } else {
                14 - exponent(largest)
            };
            self.v_unit[g] = exp2i(-f);
            for t in (0..TILE).step_by(S::LANES) {
                // SAFETY: t + LANES ≤ TILE.
                unsafe {
                    let p = self.v_scale[g].as_mut_ptr().add(t);
                    s.store(p, s.mul(s.load(p), s.splat(exp2i(f))));
                }
            }
            if self.v_has_shift {
                let largest = largest_abs(s, &self.v_shift[g]);
                let h = if largest == 0.0 {
                    0
                } else {
                    14 - exponent(largest)
                };
                self.v_shift_unit[g] = exp2i(-14 - h);
                for t in (0..TILE).step_by(S::LANES) {
                    // SAFETY: t + LANES ≤ TILE.
                    unsafe {
                        let sh = s.round(
                            s.mul(s.load(self.v_shift[g].as_ptr().add(t)), s.splat(exp2i(h))),
                        );
                        s.i_store(
                            self.v_shift_hi[g].as_mut_ptr().add(t).cast(),
                            s.i_sar::<8>(sh),
                        );
                        let low = s.i_and(sh, s.i_splat(255));
                        s.i_store(self.v_shift_lo[g].as_mut_ptr().add(t).cast(), low);
                    }
                }
            }
        }
    }

    /// Loads a tile for the float arithmetic.
    pub fn load_float(&mut self, reader: &Reader<'_>, t0: usize, tokens: usize, dim: usize) {
        self.tokens = tokens;
        for side in [Side::K, Side::V] {
            let scheme = reader.scheme(side, t0);
            let float = match scheme {
                Scheme::F16 => Float::F16,
                Scheme::Bf16 => Float::Bf16,
                _ => Float::F32,
            };
            if float != Float::F32 && reader.is_paged() {
                self.place(reader, side, t0, 16, dim);
            } else {
                self.dequantize(reader, side, t0, scheme, dim);
            }
            let stored = if reader.is_paged() { float } else { Float::F32 };
            if side == Side::K {
                self.k_float = stored;
            } else {
                self.v_float = stored;
            }
        }
    }

    /// Points to pages.
    #[inline(always)]
    fn place(&mut self, reader: &Reader<'_>, side: Side, t0: usize, bits: usize, dim: usize) {
        let (places, stride) = match side {
            Side::K => (&mut self.k, &mut self.k_stride),
            Side::V => (&mut self.v, &mut self.v_stride),
        };
        *stride = places_of(reader, side, t0, self.tokens, bits, dim, places);
    }

    /// K of a view as panels of 16 dims.
    fn pack_k(&mut self, reader: &Reader<'_>, t0: usize, dim: usize) {
        self.k_panels.reserve(TILE * dim);
        let panels = self.k_panels.as_mut_slice();
        let view = reader.rows(Side::K).expect("only views have rows to pack");
        for t in 0..self.tokens {
            for (panel, row) in view.row(t0 + t, dim).chunks_exact(16).enumerate() {
                panels[(panel * TILE + t) * 16..][..16].copy_from_slice(row);
            }
        }
        self.k = std::array::from_fn(|i| panels[i * 256..].as_ptr());
        self.k_stride = TILE * 16;
    }

    /// V of a view, transposed into panels of 16 tokens.
    fn pack_v(&mut self, reader: &Reader<'_>, t0: usize, dim: usize) {
        self.v_panels.reserve(TILE * dim);
        let panels = self.v_panels.as_mut_slice();
        let view = reader.rows(Side::V).expect("only views have rows to pack");
        for t in 0..self.tokens {
            let panel = &mut panels[t / 16 * dim * 16 + slot(t % 16)..];
            for (d, code) in view.row(t0 + t, dim).iter().enumerate() {
                panel[d * 16] = *code;
            }
        }
        self.v = std::array::from_fn(|i| panels[i * dim * 16..].as_ptr());
    }

    /// One side as f32 in panels of 8.
    fn dequantize(
        &mut self,
        reader: &Reader<'_>,
        side: Side,
        t0: usize,
        scheme: Scheme,
        dim: usize,
    ) {
        let panels = if side == Side::K {
            &mut self.k_panels
        } else {
            &mut self.v_panels
        };
        panels.reserve(TILE * dim * 4);
        let bytes = panels.as_mut_slice();
        let channel = scheme == Scheme::Int4(Int4Scale::Channel);
        let group_dims = if channel { 1 } else { dim / scheme.groups(dim) };
        self.codes.resize(TILE * dim, 0);
        reader.codes_of_tile(side, t0, self.tokens, dim, &mut self.codes);
        static FP8: LazyLock<[f32; 256]> =
            LazyLock::new(|| std::array::from_fn(|code| quant::from_fp8(code as u8)));
        let fp8: &[f32; 256] = &FP8;
        for t in 0..self.tokens {
            let (mut scale, mut shift) = (0.0, 0.0);
            for (d, &code) in self.codes[t * dim..][..dim].iter().enumerate() {
                if scheme.is_integer() && d % group_dims == 0 {
                    let param = reader.param(side, t0 + t, d / group_dims);
                    (scale, shift) = (param.scale.to_f32(), param.shift.to_f32());
                }
                // `quant::decode`, its parameters converted once per group.
                let x = match scheme {
                    Scheme::Fp8E4m3 => fp8[usize::from(code as u8)],
                    Scheme::Int8(_) => f32::from(code as u8 as i8) * scale,
                    Scheme::Int4(_) => f32::from(code) * scale + shift,
                    _ => quant::decode(scheme, code, quant::Param::default(), 1.0),
                };
                let at = ((d / 8 * TILE + t) * 8 + d % 8) * 4;
                bytes[at..at + 4].copy_from_slice(&x.to_ne_bytes());
            }
        }
        let places = std::array::from_fn(|i| bytes[i * 16 * 32..].as_ptr());
        if side == Side::K {
            (self.k, self.k_stride) = (places, TILE * 32);
        } else {
            (self.v, self.v_stride) = (places, TILE * 32);
        }
    }

    /// Scales and centred shifts of a sealed page.
    #[inline(always)]
    fn channel<S: Simd>(&mut self, s: S, reader: &Reader<'_>, t0: usize, dim: usize) {
        self.channel_scale.reserve(dim);
        self.channel_shift.reserve(dim);
        let params = &reader.page(Side::K, t0).params[..dim * 4];
        let (scale, shift) = (
            &mut self.channel_scale.as_mut_slice()[..dim],
            &mut self.channel_shift.as_mut_slice()[..dim],
        );
        for d in (0..dim).step_by(S::LANES) {
            // SAFETY: d + LANES ≤ dim, the number of pairs in params and of floats in scale and shift.
            unsafe {
                let (a, b) = pair(s, params.as_ptr().add(d * 4));
                s.store(scale.as_mut_ptr().add(d), a);
                s.store(shift.as_mut_ptr().add(d), b);
            }
        }
    }
}

/// Where each 16 of a tile's tokens lie; K's (and 16-bit V's) distance between panels comes back.
#[inline(always)]
fn places_of(
    reader: &Reader<'_>,
    side: Side,
    t0: usize,
    tokens: usize,
    bits: usize,
    dim: usize,
    places: &mut [*const u8; 4],
) -> usize {
    let (mut t, mut stride) = (0, 0);
    while t < tokens {
        let page = reader.page(side, t0 + t);
        let mut first = (t0 + t) & (page.page_size - 1);
        // A row of 4-bit K is two tokens.
        let k_row = if bits == 4 { 8 } else { 16 };
        stride = page.page_size * k_row;
        while first < page.page_size && t < TILE {
            // The formulas of FORMATS.md for the first of 16 tokens; all stay inside the part.
            let at = match (side, bits) {
                (Side::K, _) | (Side::V, 16) => first * k_row,
                (Side::V, 8) => first * dim,
                (Side::V, _) => first * dim / 2,
            };
            places[t / 16] = page.codes[at..].as_ptr();
            (t, first) = (t + 16, first + 16);
        }
    }
    stride
}

/// Scales and centred shifts from `{scale, shift}` pairs of f16.
///
/// # Safety
/// `4·LANES` bytes are readable at `p`.
#[inline(always)]
unsafe fn pair<S: Simd>(s: S, p: *const u8) -> (S::F, S::F) {
    // SAFETY: the caller's contract.
    let raw = unsafe { s.i_load(p) };
    let scale = s.f16_to_f(s.i_and(raw, s.i_splat(0xffff)));
    let shift = s.f16_to_f(s.i_shr::<16>(raw));
    (scale, s.add(shift, s.mul(scale, s.splat(8.0))))
}

#[inline(always)]
fn largest<S: Simd>(s: S, x: &[f32; TILE]) -> f32 {
    let mut m = s.splat(0.0);
    for t in (0..TILE).step_by(S::LANES) {
        // SAFETY: t + LANES ≤ TILE.
        m = s.max(m, unsafe { s.load(x.as_ptr().add(t)) });
    }
    s.largest(m)
}

#[inline(always)]
fn largest_abs<S: Simd>(s: S, x: &[f32; TILE]) -> f32 {
    let mut m = s.splat(0.0);
    for t in (0..TILE).step_by(S::LANES) {
        // SAFETY: t + LANES ≤ TILE.
        m = s.max(m, s.abs(unsafe { s.load(x.as_ptr().add(t)) }));
    }
    s.largest(m)
}

/// Parameters per token as floats, `[group][token]`, 0 from `tokens` on.
#[allow(
    clippy::too_many_arguments,
    reason = "one call per side; a struct would only rename them"
)]
#[inline(always)]
fn params<S: Simd>(
    s: S,
    reader: &Reader<'_>,
    side: Side,
    t0: usize,
    tokens: usize,
    groups: usize,
    scale: &mut [[f32; TILE]; GROUPS],
    shift: &mut [[f32; TILE]; GROUPS],
) {
    if !reader.is_paged() {
        for g in 0..groups {
            for t in 0..TILE {
                scale[g][t] = match t < tokens {
                    true => reader.param(side, t0 + t, g).scale.to_f32(),
                    false => 0.0,
                };
            }
        }
        return;
    }
    let shifted = matches!(reader.scheme(side, t0), Scheme::Int4(_));
    let width = if shifted { 4 } else { 2 };
    if tokens < TILE {
        scale[..groups].fill([0.0; TILE]);
        shift[..groups].fill([0.0; TILE]);
    }
    let mut t = 0;
    while t < tokens {
        let page = reader.page(side, t0 + t);
        let mut first = (t0 + t) & (page.page_size - 1);
        while first < page.page_size && t < tokens {
            for g in 0..groups {
                let at = &page.params[(g * page.page_size + first) * width..][..S::LANES * width];
                let rest = tokens as i32 - t as i32;
                // SAFETY: `at` holds LANES parameters; t + LANES ≤ TILE.
                unsafe {
                    let (mut a, mut b) = if shifted {
                        pair(s, at.as_ptr())
                    } else {
                        (s.f16_to_f(s.i_load_u16(at.as_ptr())), s.splat(0.0))
                    };
                    if rest < S::LANES as i32 {
                        (a, b) = (s.keep(a, 0, rest, 0.0), s.keep(b, 0, rest, 0.0));
                    }
                    s.store(scale[g].as_mut_ptr().add(t), a);
                    if shifted {
                        s.store(shift[g].as_mut_ptr().add(t), b);
                    }
                }
            }
            (t, first) = (t + S::LANES, first + S::LANES);
        }
    }
}
