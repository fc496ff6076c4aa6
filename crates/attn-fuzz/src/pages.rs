//! Pages read by the text of FORMATS.md alone.

use attn_core::{HeadDim, Int8Scale, KvFormat, Scheme};
use half::{bf16, f16};

/// The elements that K or V of a head may have.
pub const HEAD_DIMS: [usize; 10] = [64, 80, 96, 128, 160, 192, 256, 320, 512, 576];

/// What a page's bytes mean.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Elements of K and of V per head.
    pub head_dim: HeadDim,
    /// Tokens per page.
    pub page_size: usize,
    /// KV heads.
    pub heads: usize,
}

/// Whether FORMATS.md defines a scheme for a head_dim.
pub fn can_be(scheme: Scheme, head_dim: usize) -> bool {
    let in_groups = |groups: u8| {
        [1, 2, 4, 8].contains(&groups) && head_dim.is_multiple_of(16 * usize::from(groups))
    };
    match scheme {
        // No scheme has more than 8 groups.
        Scheme::Int8(Int8Scale::Group32) => head_dim.is_multiple_of(32) && head_dim / 32 <= 8,
        Scheme::Int4(groups) => in_groups(groups),
        // A sum of products of half steps is an exact f32 up to 512 of them.
        Scheme::RotatedInt4 { groups, .. } => {
            in_groups(groups) && head_dim / usize::from(groups) <= 512
        }
        _ => true,
    }
}

/// Whether FORMATS.md defines latents of a scheme for these dims.
fn can_be_latents(format: KvFormat, HeadDim { k, v }: HeadDim) -> bool {
    let has_row_scales = matches!(
        format.k,
        Scheme::Int8(Int8Scale::Token) | Scheme::RotatedInt8
    );
    let is_float = matches!(format.k, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3);
    format.k == format.v
        && (has_row_scales && k <= v.saturating_mul(2) || is_float)
        && v <= k
        && (!is_rotated(format.k) || v.is_multiple_of(block(k)))
}

/// Whether FORMATS.md defines a format for these dims of K and of V.
pub fn is_defined(format: KvFormat, head_dim: HeadDim) -> bool {
    if format.latents && !can_be_latents(format, head_dim) {
        return false;
    }
    [(format.k, head_dim.k), (format.v, head_dim.v)]
        .into_iter()
        .all(|(scheme, dim)| HEAD_DIMS.contains(&dim) && can_be(scheme, dim))
}

/// Whether rows are rotated.
pub fn is_rotated(scheme: Scheme) -> bool {
    matches!(scheme, Scheme::RotatedInt8 | Scheme::RotatedInt4 { .. })
}

/// Whether K and V are both integers.
pub fn is_integer(format: KvFormat) -> bool {
    let float = |scheme| matches!(scheme, Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3);
    !float(format.k) && !float(format.v)
}

/// Tiles that a row reads with residuals, beside the first.
pub fn window(scheme: Scheme) -> usize {
    match scheme {
        Scheme::RotatedInt4 { window, .. } => match window {
            attn_core::Window::None => 0,
            attn_core::Window::Two => 2,
            attn_core::Window::Four => 4,
        },
        _ => 0,
    }
}

/// Whether a cache of the format may keep centres of K: K is rotated and, of int4, read with residuals; products with both sides are integers.
pub fn can_have_centres(format: KvFormat) -> bool {
    let of_k = match format.k {
        Scheme::RotatedInt8 => true,
        Scheme::RotatedInt4 { .. } => window(format.k) > 0,
        _ => false,
    };
    of_k && is_integer(format)
}

/// The larger window of a format's schemes.
pub fn larger_window(format: KvFormat) -> usize {
    window(format.k).max(window(format.v))
}

/// The home pages of the first 64 tokens, if there are so many and the format keeps their residuals.
pub fn first_pages(format: KvFormat, page_size: usize, home: usize) -> usize {
    match larger_window(format) {
        0 => 0,
        _ => 64usize.div_ceil(page_size).min(home),
    }
}

/// The home pages of a sequence, and how many of them have a residual page: those of the first 64 tokens, and so many last ones.
fn counts(format: KvFormat, page_size: usize, home: usize, last: usize) -> [usize; 2] {
    let first = first_pages(format, page_size, home);
    [home, first + last.min(home - first)]
}

/// The home pages of a sequence in a cache, and how many of them have a residual page there, if it was never restored.
pub fn page_counts(format: KvFormat, page_size: usize, tokens: usize) -> [usize; 2] {
    let last = match (larger_window(format), page_size) {
        (2, 128) => 3,
        (tiles, _) => 2 * 64 * tiles / page_size,
    };
    counts(format, page_size, tokens.div_ceil(page_size), last)
}

/// The home pages of a sequence outside of a cache, and how many of them have a residual page there.
pub fn saved_counts(format: KvFormat, page_size: usize, tokens: usize) -> [usize; 2] {
    let home = tokens.div_ceil(page_size);
    match larger_window(format) {
        0 => [home, 0],
        tiles => {
            let first = (tokens.saturating_sub(64) / 64 + 1).saturating_sub(tiles) * 64;
            let last = home.saturating_sub(first / page_size);
            counts(format, page_size, home, last)
        }
    }
}

/// The home pages that have residual pages, in the order of these: `kept` of them.
pub fn residual_homes(
    format: KvFormat,
    page_size: usize,
    [home, kept]: [usize; 2],
) -> impl DoubleEndedIterator<Item = usize> + Clone {
    let first = first_pages(format, page_size, home).min(kept);
    (0..first).chain(home - (kept - first)..home)
}

/// The value of an e4m3 code.
pub fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3) & 15, f64::from(code & 7));
    let size = match (exponent, code & 0x7f) {
        (_, 0x7f) => f64::NAN,
        (0, _) => mantissa / 8.0 * f64::powi(2.0, -6),
        _ => (1.0 + mantissa / 8.0) * f64::powi(2.0, exponent - 7),
    };
    if code < 128 { size } else { -size }
}

fn f16_at(bytes: &[u8], index: usize) -> f64 {
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64()
}

/// K or V of one KV head's run.
#[derive(Debug, Clone, Copy)]
struct Part {
    scheme: Scheme,
    /// Elements of a token.
    dim: usize,
    /// Elements of a token that lie there: of latents V's are the first of K's.
    stored: usize,
    /// Elements of a scale of latents; the last has what is left.
    scaled: usize,
    /// Whether codes lie as K's do.
    is_k: bool,
    page_size: usize,
}

/// K and V of a run.
fn parts(shape: &Shape) -> [Part; 2] {
    let (format, HeadDim { k, v }) = (shape.format, shape.head_dim);
    let part = |is_k, scheme, dim| {
        let stored = if format.latents { k } else { dim };
        Part {
            scheme,
            dim,
            stored,
            scaled: if format.latents { v } else { stored },
            is_k: is_k || format.latents,
            page_size: shape.page_size,
        }
    };
    [part(true, format.k, k), part(false, format.v, v)]
}

/// Bytes of one KV head's run: of latents K's alone.
pub fn run_bytes(shape: &Shape) -> usize {
    let [k, v] = parts(shape).map(Part::all_bytes);
    if shape.format.latents { k } else { k + v }
}

impl Part {
    /// Bytes of the codes and of the parameters.
    fn bytes(self) -> [usize; 2] {
        let (dim, tokens) = (self.stored, self.page_size);
        match self.scheme {
            Scheme::F16 | Scheme::Bf16 => [2 * dim * tokens, 0],
            Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => [dim * tokens, 0],
            Scheme::Int8(Int8Scale::Token) | Scheme::RotatedInt8 => {
                [dim * tokens, dim.div_ceil(self.scaled) * 2 * tokens]
            }
            Scheme::Int8(Int8Scale::Group32) => [dim * tokens, dim / 32 * 2 * tokens],
            Scheme::Int4(g) => [dim * tokens / 2, usize::from(g) * 4 * tokens],
            Scheme::RotatedInt4 { groups, .. } => {
                [dim * tokens / 2, usize::from(groups) * 2 * tokens]
            }
        }
    }

    /// Bytes of codes and parameters together.
    fn all_bytes(self) -> usize {
        self.bytes().iter().sum()
    }

    /// Byte and shift of the code of token `t`, dim `d`, among the codes.
    fn code_at(self, t: usize, d: usize) -> (usize, u32) {
        let (size, dim) = (self.page_size, self.stored);
        let slot = |t: usize| 4 * (t % 8 / 2) + 2 * (t / 8) + t % 2;
        let half = |i: usize| if i % 16 < 8 { 0 } else { 4 };
        let row = |i: usize| 8 * (i / 16) + i % 8;
        match (self.scheme, self.is_k) {
            (Scheme::F16 | Scheme::Bf16, _) => ((d / 8 * size + t) * 16 + d % 8 * 2, 0),
            (Scheme::Int4(_) | Scheme::RotatedInt4 { .. }, true) => {
                ((d / 16 * (size / 2) + row(t)) * 16 + d % 16, half(t))
            }
            (Scheme::Int4(_) | Scheme::RotatedInt4 { .. }, false) => {
                ((t / 16 * (dim / 2) + row(d)) * 16 + slot(t % 16), half(d))
            }
            (_, true) => ((d / 16 * size + t) * 16 + d % 16, 0),
            (_, false) => ((t / 16 * dim + d) * 16 + slot(t % 16), 0),
        }
    }

    /// The element of token `t`, dim `d` of these bytes; `residual` is the nibble that goes with it, where it is read with one.
    fn element(
        self,
        bytes: &[u8],
        [t, d]: [usize; 2],
        (tensor_scale, residual): (f64, Option<u8>),
    ) -> Element {
        let (codes, params) = bytes.split_at(self.bytes()[0]);
        let (at, shift) = self.code_at(t, d);
        let signed = f64::from(codes[at] as i8);
        let (size, dim) = (self.page_size, self.stored);
        let nibble = f64::from(codes[at] >> shift & 15);
        match self.scheme {
            Scheme::F16 => Element::float(f16_at(&codes[at..], 0)),
            Scheme::Bf16 => {
                Element::float(bf16::from_le_bytes([codes[at], codes[at + 1]]).to_f64())
            }
            Scheme::Fp8E4m3 => Element {
                step: tensor_scale,
                ..Element::float(e4m3(codes[at]) * tensor_scale)
            },
            Scheme::Int8(Int8Scale::Tensor) => Element::new(signed, tensor_scale),
            Scheme::Int8(Int8Scale::Token) | Scheme::RotatedInt8 => {
                Element::new(signed, f16_at(params, d / self.scaled * size + t))
            }
            Scheme::Int8(Int8Scale::Group32) => {
                Element::new(signed, f16_at(params, d / 32 * size + t))
            }
            Scheme::Int4(g) => {
                let pair = d / (dim / usize::from(g)) * size + t;
                let (step, low) = (f16_at(params, 2 * pair), f16_at(params, 2 * pair + 1));
                Element {
                    x: nibble * step + low,
                    ..Element::new(nibble - 8.0, step)
                }
            }
            Scheme::RotatedInt4 { groups, .. } => {
                let scale = f16_at(params, d / (dim / usize::from(groups)) * size + t);
                match residual {
                    None => Element::new(2.0 * nibble - 15.0, scale),
                    Some(r) => {
                        let code = 16.0 * nibble + f64::from(r);
                        Element::new(2.0 * code - 255.0, scale / 16.0)
                    }
                }
            }
        }
    }
}

/// One stored element.
struct Element {
    /// The value.
    x: f64,
    /// The factor of its code; 0 for 16-bit floats.
    step: f64,
    /// The value without the shift of a centred code.
    centred: f64,
}

impl Element {
    fn new(code: f64, step: f64) -> Self {
        let x = code * step;
        Element {
            x,
            step,
            centred: x,
        }
    }

    fn float(x: f64) -> Self {
        Element {
            x,
            step: 0.0,
            centred: x,
        }
    }
}

/// Numbers of K or V, each `[token][head][dim]`.
#[derive(Debug, Clone, Default)]
pub struct Numbers {
    /// The values.
    pub x: Vec<f64>,
    /// The values of the rows that are stored: rotated ones, if the scheme rotates.
    pub stored: Vec<f64>,
    /// The factor of each stored element's code: 0 for 16-bit floats.
    pub steps: Vec<f64>,
    /// Stored values without the shifts of centred codes.
    pub centred: Vec<f64>,
}

impl Numbers {
    fn push(&mut self, element: &Element) {
        self.stored.push(element.x);
        self.steps.push(element.step);
        self.centred.push(element.centred);
    }
}

/// K or V of a sequence.
#[derive(Debug, Clone)]
pub struct Side {
    /// How it is stored.
    pub scheme: Scheme,
    /// Elements per head.
    pub dim: usize,
    /// Elements of a block of its rotation.
    pub block: usize,
    /// Elements of K that the first part of a query meets: all, but of latents in integers.
    pub first_part: usize,
    /// The values that a row reads without residuals.
    pub coarse: Numbers,
    /// The values that a row reads with residuals; empty if the scheme has no window.
    pub fine: Numbers,
}

impl Side {
    /// What a row of a tile reads of token `t`.
    pub fn read_from(&self, own_tile: usize, t: usize) -> &Numbers {
        let window = window(self.scheme);
        if window > 0 && (t < 64 || own_tile < t / 64 + window) {
            &self.fine
        } else {
            &self.coarse
        }
    }
}

/// Elements of a block of the rotation: the largest power of two that divides the head_dim.
pub fn block(head_dim: usize) -> usize {
    (0..=9)
        .map(|log| 1 << log)
        .filter(|block| head_dim.is_multiple_of(*block))
        .max()
        .unwrap_or(1)
}

/// Multiplies the blocks of a row by Sylvester's Hadamard matrix and by `factor`.
fn hadamard(row: &mut [f64], block: usize, factor: f64) {
    for block in row.chunks_exact_mut(block) {
        let mut stride = 1;
        while stride < block.len() {
            for i in (0..block.len()).filter(|i| i & stride == 0) {
                let (a, b) = (block[i], block[i + stride]);
                (block[i], block[i + stride]) = (a + b, a - b);
            }
            stride *= 2;
        }
        block.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The row that a rotated scheme stores.
pub fn rotate(row: &mut [f64], block: usize) {
    let half = (block as f64).log2() / 2.0;
    hadamard(row, block, half.floor().exp2().recip());
}

/// The row that a stored one was; a query's rotation, too.
pub fn turn_back(row: &mut [f64], block: usize) {
    let half = (block as f64).log2() / 2.0;
    hadamard(row, block, half.ceil().exp2().recip());
}

/// The rows that stored ones stand for, in their order.
fn turned_back(part: Part, stored: &[f64]) -> Vec<f64> {
    let mut x = stored.to_vec();
    if is_rotated(part.scheme) {
        let rows = x.chunks_exact_mut(part.dim);
        rows.for_each(|row| turn_back(row, block(part.stored)));
    }
    x
}

/// Reads what `KvCache::read_back` gives for a sequence of `tokens`: K and V. A sequence that was restored with fewer residual pages than it saves has
/// fewer here.
pub fn read(shape: &Shape, pages: &[Vec<u8>], tokens: usize, scales: [&[f32]; 2]) -> [Side; 2] {
    let parts = parts(shape);
    let home = tokens.div_ceil(shape.page_size);
    let homes = residual_homes(shape.format, shape.page_size, [home, pages.len() - home]);
    // In a residual page V's nibbles follow K's, if K has any.
    let k_residuals = match window(parts[0].scheme) {
        0 => 0,
        _ => parts[0].bytes()[0],
    };
    let of_v = if shape.format.latents {
        0
    } else {
        parts[0].all_bytes()
    };
    let firsts = [[0, 0], [of_v, k_residuals]];
    [0, 1].map(|side| {
        let (part, [first, first_residual]) = (parts[side], firsts[side]);
        let (scheme, dim) = (part.scheme, part.dim);
        let [mut coarse, mut fine] = [Numbers::default(), Numbers::default()];
        for t in 0..tokens {
            let (page, token) = (t / shape.page_size, t % shape.page_size);
            let kept = homes.clone().position(|home| home == page);
            let residuals = kept.map(|i| &pages[home + i]);
            for head in 0..shape.heads {
                let run = |page: &'_ Vec<u8>| head * run_bytes(shape)..page.len();
                let bytes = &pages[page][run(&pages[page])][first..][..part.all_bytes()];
                let scale = f64::from(scales[side].get(head).copied().unwrap_or(1.0));
                for d in 0..dim {
                    let at = [token, d];
                    coarse.push(&part.element(bytes, at, (scale, None)));
                    if window(scheme) == 0 {
                        continue;
                    }
                    let residual = residuals.map(|page| {
                        let nibbles = &page[run(page)][first_residual..];
                        let (at, shift) = part.code_at(token, d);
                        nibbles[at] >> shift & 15
                    });
                    fine.push(&part.element(bytes, at, (scale, residual)));
                }
            }
        }
        for numbers in [&mut coarse, &mut fine] {
            numbers.x = turned_back(part, &numbers.stored);
        }
        Side {
            scheme,
            dim,
            block: block(part.stored),
            first_part: if is_integer(shape.format) {
                part.scaled
            } else {
                dim
            },
            coarse,
            fine,
        }
    })
}
