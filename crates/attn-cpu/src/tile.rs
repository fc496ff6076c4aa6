//! One tile of 64 tokens of one KV head, as the kernels read it: where its codes lie, and its parameters as floats.
//!
//! Native pages are read in place, and so is 16-bit V of views; [`crate::unpack`] converts everything else into panels that the thread owns.

mod params;

use attn_core::{Groups, HeadDim, Int8Scale, Scheme, arithmetic::TILE, format::MAX_GROUPS};

use crate::{
    reader::{PagePart, Reader, Side},
    scratch::Aligned,
    simd::Simd,
    unpack::{self, CodeRows, Scales, Unpack},
};

use params::{grid_scales, half_step_scales, params};

/// How floats are stored in panels of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F16,
    Bf16,
    F32,
    /// Not in panels: K and V as [`WideTile`](crate::wide::WideTile) has them.
    Wide,
}

impl Float {
    /// The float type as which the kernel reads a scheme: fp8 as f16 (see [`crate::unpack`]), other codes as f32.
    fn of(scheme: Scheme) -> Self {
        match scheme {
            Scheme::F16 | Scheme::Fp8E4m3 => Float::F16,
            Scheme::Bf16 => Float::Bf16,
            _ => Float::F32,
        }
    }

    /// Bytes of a panel's row.
    fn row(self) -> usize {
        if self == Float::F32 { 32 } else { 16 }
    }
}

/// How a tile's codes enter the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// 8-bit integers.
    Int8,
    /// 4-bit integers, 8 too large.
    Nibble,
    /// Half steps without residuals, 16u.
    Coarse,
    /// Half steps with residuals, as the 8-bit integers c − 128.
    Fine,
}

impl Code {
    fn of(scheme: Scheme, fine: bool) -> Code {
        match scheme {
            Scheme::Int4(_) => Code::Nibble,
            Scheme::RotatedInt4 { .. } if fine => Code::Fine,
            Scheme::RotatedInt4 { .. } => Code::Coarse,
            _ => Code::Int8,
        }
    }

    /// What has to be taken out of a sum of products for each integer that met a code, if `byte` was added to 8-bit codes. The
    /// difference is exact in f32: less than 2^24, and of half steps, whose groups have 512 dims at most, less than 2^24 halves.
    #[inline(always)]
    pub fn bias(self, byte: i32) -> f32 {
        match self {
            Code::Int8 => byte as f32,
            Code::Nibble => 8.0,
            // 2·16·(u − 7½) is 2·16u − 240; 2·(c − 127½) is 2c − 255.
            Code::Coarse => 7.5,
            Code::Fine => byte as f32 - 0.5,
        }
    }

    /// What such a difference counts in: a power of two, so that the factor that takes it in stays exact.
    #[inline(always)]
    pub fn unit(self) -> f32 {
        match self {
            Code::Int8 | Code::Nibble => 1.0,
            Code::Coarse => 32.0,
            Code::Fine => 2.0,
        }
    }
}

/// A tile; its pointers lead into the cache or into its own panels, and stay valid until the next load.
pub(crate) struct Tile {
    /// Cached tokens, 1..=64.
    pub tokens: usize,
    /// K's panel rows of each 16 tokens (of 4 bits: 8 rows); the next panel is `k_stride` on.
    pub k: [*const u8; 4],
    pub k_stride: usize,
    pub k_nibbles: bool,
    pub k_code: Code,
    pub k_float: Float,
    pub k_groups: Groups,
    /// Whether queries have a step for each of K's groups.
    pub k_has_parts: bool,
    pub k_has_shift: bool,
    /// k_scale, in which the unit of [`Code::unit`] is included.
    pub k_scale: [[f32; TILE]; MAX_GROUPS],
    pub k_shift: [[f32; TILE]; MAX_GROUPS],
    /// Integers: the panel of each 16 tokens, that of the first 16 where there are none. Floats: as for K.
    pub v: [*const u8; 4],
    pub v_stride: usize,
    /// Floats: from a token to the next.
    pub v_row: usize,
    pub v_nibbles: bool,
    pub v_float: Float,
    pub v_groups: usize,
    pub v_has_shift: bool,
    pub v_code: Code,
    /// Significant bits of the weights' step.
    pub v_step_bits: u32,
    /// v_scale on the grid (of half steps, a sixteenth of it), 0 from `tokens` on.
    pub v_scale: [[f32; TILE]; MAX_GROUPS],
    pub v_shift: [[f32; TILE]; MAX_GROUPS],
    k_panels: Aligned<u8>,
    v_panels: Aligned<u8>,
}

impl Tile {
    pub const fn new() -> Self {
        Tile {
            tokens: 0,
            k: [std::ptr::null(); 4],
            k_stride: 0,
            k_nibbles: false,
            k_code: Code::Int8,
            k_float: Float::F32,
            k_groups: Groups::NONE,
            k_has_parts: false,
            k_has_shift: false,
            k_scale: [[0.0; TILE]; MAX_GROUPS],
            k_shift: [[0.0; TILE]; MAX_GROUPS],
            v: [std::ptr::null(); 4],
            v_stride: 0,
            v_row: 0,
            v_nibbles: false,
            v_float: Float::F32,
            v_groups: 1,
            v_has_shift: false,
            v_code: Code::Int8,
            v_step_bits: 3,
            v_scale: [[0.0; TILE]; MAX_GROUPS],
            v_shift: [[0.0; TILE]; MAX_GROUPS],
            k_panels: Aligned::new(),
            v_panels: Aligned::new(),
        }
    }

    /// Loads `tokens` tokens from `t0`, a multiple of 64, for the integer arithmetic; `fine` says which sides are read with residuals.
    #[inline(always)]
    pub fn load_integer<S: Simd>(
        &mut self,
        s: S,
        reader: &Reader<'_>,
        [t0, tokens]: [usize; 2],
        dims: HeadDim,
        fine: [bool; 2],
    ) {
        self.tokens = tokens;
        let (scheme, dim) = (reader.scheme(Side::K), dims.k);
        let [k_groups, v_groups] = reader.format().groups(dims);
        self.k_groups = k_groups;
        self.k_has_parts = reader.format().query_parts(dims).count() > 1;
        self.k_has_shift = scheme.has_shifts();
        self.k_nibbles = scheme.code_bits() == 4 && !fine[0];
        self.k_code = Code::of(scheme, fine[0]);
        if !reader.is_paged() {
            self.copy_k(s, reader, t0, dim);
        } else if fine[0] {
            self.join(s, reader, Side::K, t0, dim);
        } else {
            self.place(reader, Side::K, t0, scheme.code_bits(), dim);
        }
        if scheme == Scheme::Int8(Int8Scale::Tensor) {
            self.k_scale[0] = [1.0; TILE];
        } else {
            let into = [&mut self.k_scale, &mut self.k_shift];
            params(
                s,
                reader,
                Side::K,
                [t0, tokens],
                k_groups.count(),
                8.0,
                into,
            );
        }
        let unit = self.k_code.unit() / 16.0;
        half_step_scales(s, scheme, unit, &mut self.k_scale[..k_groups.count()]);

        let (scheme, dim) = (reader.scheme(Side::V), dims.v);
        self.v_groups = v_groups.count();
        self.v_has_shift = scheme.has_shifts();
        self.v_nibbles = scheme.code_bits() == 4 && !fine[1];
        self.v_code = Code::of(scheme, fine[1]);
        self.v_step_bits = if fine[1] { 2 } else { 3 };
        if reader.order(Side::V) == Side::K || !reader.is_paged() {
            self.turn_v(s, reader, t0, dim);
        } else if fine[1] {
            self.join(s, reader, Side::V, t0, dim);
        } else {
            self.place(reader, Side::V, t0, scheme.code_bits(), dim);
        }
        if scheme == Scheme::Int8(Int8Scale::Tensor) {
            self.v_scale[0] = std::array::from_fn(|t| if t < tokens { 1.0 } else { 0.0 });
        } else {
            let into = [&mut self.v_scale, &mut self.v_shift];
            params(s, reader, Side::V, [t0, tokens], self.v_groups, 8.0, into);
            grid_scales(s, scheme, &mut self.v_scale[..self.v_groups]);
        }
    }

    /// Joins the codes of one side of rotated int4 with their residuals to int8 codes, 128 less, in panels.
    #[inline(always)]
    fn join<S: Simd>(&mut self, s: S, reader: &Reader<'_>, side: Side, t0: usize, dim: usize) {
        let panels = match side {
            Side::K => &mut self.k_panels,
            Side::V => &mut self.v_panels,
        };
        panels.reserve(TILE * dim);
        let out = panels.as_mut_slice()[..TILE * dim].as_mut_ptr();
        let mut codes = [std::ptr::null(); 4];
        let mut residuals = [std::ptr::null(); 4];
        let at = [t0, self.tokens];
        let stride = places_of(|t| reader.page(side, t), side, at, 4, dim, &mut codes);
        places_of(
            |t| reader.residual_page(side, t),
            side,
            at,
            4,
            dim,
            &mut residuals,
        );
        for i in 0..self.tokens.div_ceil(16) {
            // SAFETY: 16 tokens' codes and residuals lie there, in the layout of 4-bit codes; `out` has a panel of K or of V for them.
            unsafe {
                match side {
                    // Panels of 16 dims: 8 rows of two tokens' nibbles become 16 rows.
                    Side::K => {
                        for panel in 0..dim / 16 {
                            let at = panel * stride;
                            let to = out.add((panel * TILE + 16 * i) * 16);
                            unpack::join(s, codes[i].add(at), residuals[i].add(at), to);
                        }
                    }
                    // Rows of two dims' nibbles, 8 for each 16 dims.
                    Side::V => {
                        for block in 0..dim / 16 {
                            let at = block * 128;
                            let to = out.add((i * dim + 16 * block) * 16);
                            unpack::join(s, codes[i].add(at), residuals[i].add(at), to);
                        }
                    }
                }
            }
        }
        match side {
            Side::K => {
                self.k = std::array::from_fn(|i| out.wrapping_add(i * 256).cast_const());
                self.k_stride = TILE * 16;
            }
            Side::V => {
                self.v = std::array::from_fn(|i| out.wrapping_add(i * dim * 16).cast_const());
            }
        }
    }

    /// Loads a tile for the float arithmetic; `fine` says which sides are read with residuals.
    #[inline(always)]
    pub fn load_float<S: Simd>(
        &mut self,
        s: S,
        reader: &Reader<'_>,
        [t0, tokens]: [usize; 2],
        dims: HeadDim,
        fine: [bool; 2],
    ) {
        self.tokens = tokens;
        for side in [Side::K, Side::V] {
            let (scheme, dim) = (reader.scheme(side), dims.of(side));
            let float = Float::of(scheme);
            if side == Side::K {
                self.k_float = float;
            } else {
                (self.v_float, self.v_row) = (float, float.row());
            }
            if scheme.code_bits() != 16 {
                self.widen(s, reader, side, t0, dim, fine[side as usize]);
            } else if reader.is_paged() {
                self.place(reader, side, t0, 16, dim);
            } else if side == Side::K {
                self.copy_k(s, reader, t0, 2 * dim);
            } else {
                let lines = view_rows(reader, side, t0, tokens, 2 * dim);
                (self.v, self.v_stride, self.v_row) = (lines.places, lines.chunk, lines.row);
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
        let at = [t0, self.tokens];
        *stride = places_of(|t| reader.page(side, t), side, at, bits, dim, places);
    }

    /// K of a view, as panels of 16 bytes.
    #[inline(always)]
    fn copy_k<S: Simd>(&mut self, s: S, reader: &Reader<'_>, t0: usize, bytes: usize) {
        self.k_panels.reserve(TILE * bytes);
        let panels = &mut self.k_panels.as_mut_slice()[..TILE * bytes];
        let lines = view_rows(reader, Side::K, t0, self.tokens, bytes);
        // SAFETY: `lines` holds rows of `bytes`; `panels` is as long as all of them.
        unsafe { unpack::copy(s, &lines, self.tokens, bytes, panels.as_mut_ptr()) };
        self.k = std::array::from_fn(|i| panels[i * 256..].as_ptr());
        self.k_stride = TILE * 16;
    }

    /// 8-bit V of a view, or of latents in pages, turned into panels of 16 tokens.
    #[inline(always)]
    fn turn_v<S: Simd>(&mut self, s: S, reader: &Reader<'_>, t0: usize, dim: usize) {
        self.v_panels.reserve(TILE * dim);
        let panels = &mut self.v_panels.as_mut_slice()[..TILE * dim];
        let lines = code_rows(reader, Side::V, [t0, self.tokens], 8, dim);
        // SAFETY: `lines` holds rows of `dim` bytes; `panels` has four panels of `dim` rows of 16 bytes.
        unsafe { unpack::turn_rows(s, &lines, self.tokens, dim, panels.as_mut_ptr()) };
        self.v = std::array::from_fn(|i| panels[i * dim * 16..].as_ptr());
    }

    /// One side of 8 or 4 bits as floats in panels of 8.
    #[inline(always)]
    fn widen<S: Simd>(
        &mut self,
        s: S,
        reader: &Reader<'_>,
        side: Side,
        t0: usize,
        dim: usize,
        fine: bool,
    ) {
        let scheme = reader.scheme(side);
        let groups = scheme.groups(dim).count();
        let (tokens, row) = (self.tokens, Float::of(scheme).row());
        if scheme == Scheme::Int8(Int8Scale::Tensor) {
            self.k_scale[0] = [1.0; TILE];
        } else if scheme.is_integer() {
            let into = [&mut self.k_scale, &mut self.k_shift];
            params(s, reader, side, [t0, tokens], groups, 0.0, into);
        }
        let panels = match side {
            Side::K => &mut self.k_panels,
            Side::V => &mut self.v_panels,
        };
        panels.reserve(TILE * dim / 8 * row);
        let out = panels.as_mut_slice()[..TILE * dim / 8 * row].as_mut_ptr();
        if let Scheme::RotatedInt4 { .. } = scheme {
            // SAFETY: `out` is as long as `dim/8` panels of TILE rows of floats.
            unsafe { half_steps(reader, side, [t0, tokens], &self.k_scale, dim, fine, out) };
        } else {
            let job = Unpack {
                tokens,
                dim,
                scales: Scales {
                    scale: &self.k_scale,
                    shift: &self.k_shift,
                    groups,
                },
                out,
            };
            // SAFETY: `out` is as long as `dim/8` panels of TILE rows.
            unsafe { widen(s, reader, side, t0, scheme, &job) };
        }
        let places = [0, 1, 2, 3].map(|i| out.wrapping_add(i * 16 * row).cast_const());
        match side {
            Side::K => (self.k, self.k_stride) = (places, TILE * row),
            Side::V => (self.v, self.v_stride) = (places, TILE * row),
        }
    }
}

/// One side of a tile of half steps as floats, in panels of 8 dims of TILE rows: pairs of such a side with a float scheme are rare.
///
/// # Safety
/// `dim·TILE` floats are writable at `out`.
unsafe fn half_steps(
    reader: &Reader<'_>,
    side: Side,
    [t0, tokens]: [usize; 2],
    scales: &[[f32; TILE]; MAX_GROUPS],
    dim: usize,
    fine: bool,
    out: *mut u8,
) {
    let groups = reader.scheme(side).groups(dim);
    for t in 0..tokens {
        for d in 0..dim {
            let (u, scale) = (reader.code(side, t0 + t, d), scales[groups.of_dim(d)][t]);
            let value = if fine {
                let c = 16 * u + reader.residual(side, t0 + t, d);
                (2.0 * f32::from(c) - 255.0) * (scale / 16.0)
            } else {
                (2.0 * f32::from(u) - 15.0) * scale
            };
            // SAFETY: panel d/8, row t, element d%8: below dim·TILE.
            unsafe {
                out.cast::<f32>()
                    .add((d / 8 * TILE + t) * 8 + d % 8)
                    .write_unaligned(value)
            };
        }
    }
}

/// The rows of a view's tile, all of `bytes` bytes.
#[inline(always)]
fn view_rows(reader: &Reader<'_>, side: Side, t0: usize, tokens: usize, bytes: usize) -> CodeRows {
    let view = reader
        .rows(side)
        .expect("a reader without pages reads a view");
    let first = view.row(t0, bytes);
    // The last row lies in the view, and so do those before it.
    let last = view.row(t0 + tokens - 1, bytes);
    let row = (last.as_ptr() as usize - first.as_ptr() as usize) / (tokens - 1).max(1);
    CodeRows {
        places: [0, 1, 2, 3].map(|i| first.as_ptr().wrapping_add(16 * i * row)),
        row,
        chunk: 16,
    }
}

/// The rows of one side's tile of `dim` codes, as they lie in pages or in a view.
#[inline(always)]
fn code_rows(
    reader: &Reader<'_>,
    side: Side,
    [t0, tokens]: [usize; 2],
    bits: usize,
    dim: usize,
) -> CodeRows {
    if !reader.is_paged() {
        return view_rows(reader, side, t0, tokens, dim);
    }
    let mut places = [std::ptr::null(); 4];
    let (order, at) = (reader.order(side), [t0, tokens]);
    let chunk = places_of(|t| reader.page(side, t), order, at, bits, dim, &mut places);
    CodeRows {
        places,
        row: 16,
        chunk,
    }
}

/// Converts the codes of one side of a tile to floats, from pages or from a view.
///
/// # Safety
/// `job.out` has room for its dims in panels of the scheme's floats.
#[inline(always)]
unsafe fn widen<S: Simd>(
    s: S,
    reader: &Reader<'_>,
    side: Side,
    t0: usize,
    scheme: Scheme,
    job: &Unpack<'_>,
) {
    let (bits, fp8) = (scheme.code_bits(), scheme == Scheme::Fp8E4m3);
    let lines = code_rows(reader, side, [t0, job.tokens], bits, job.dim);
    let turned = reader.is_paged() && reader.order(side) == Side::V;
    // SAFETY: the places hold the tile's tokens, in the shape that each function requires.
    unsafe {
        match (turned, bits) {
            (true, 4) => unpack::widen_turned_pairs(s, &lines.places, job),
            (true, _) if fp8 => unpack::widen_turned::<S, { unpack::FP8 }>(s, &lines.places, job),
            (true, _) => unpack::widen_turned::<S, { unpack::INT8 }>(s, &lines.places, job),
            (false, 4) => unpack::widen_pairs(s, &lines, job),
            (false, _) if !fp8 => unpack::widen_rows::<S, { unpack::INT8 }>(s, &lines, job),
            _ if reader.is_paged() => unpack::widen_panels(s, &lines, job),
            _ => unpack::widen_rows::<S, { unpack::FP8_NAN }>(s, &lines, job),
        }
    }
}

/// Finds where each 16 of a tile's tokens lie, and returns the distance between the panels of K (and of 16-bit V).
#[inline(always)]
fn places_of<'a>(
    page_of: impl Fn(usize) -> PagePart<'a>,
    side: Side,
    [t0, tokens]: [usize; 2],
    bits: usize,
    dim: usize,
    places: &mut [*const u8; 4],
) -> usize {
    let (mut t, mut stride) = (0, 0);
    while t < tokens {
        let page = page_of(t0 + t);
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
    let given = tokens.div_ceil(16);
    let first = places[0];
    places[given..].fill(first);
    stride
}
