//! Pages read by the text of FORMATS.md alone.

use attn_core::{Int4Scale, Int8Scale, KvFormat, Scheme};
use half::{bf16, f16};

/// What a page's bytes mean.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// KV heads.
    pub heads: usize,
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

/// Bytes of the codes and of the parameters of one part.
fn part_bytes(shape: &Shape, scheme: Scheme) -> [usize; 2] {
    let (dim, tokens) = (shape.head_dim, shape.page_size);
    match scheme {
        Scheme::F16 | Scheme::Bf16 => [2 * dim * tokens, 0],
        Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => [dim * tokens, 0],
        Scheme::Int8(Int8Scale::Token) => [dim * tokens, 2 * tokens],
        Scheme::Int8(Int8Scale::Group32) => [dim * tokens, dim / 32 * 2 * tokens],
        Scheme::Int4(Int4Scale::Groups(g)) => [dim * tokens / 2, usize::from(g) * 4 * tokens],
        Scheme::Int4(Int4Scale::Channel) => [dim * tokens / 2, 4 * dim],
    }
}

/// Bytes of one KV head's run.
pub fn run_bytes(shape: &Shape) -> usize {
    let parts = [shape.format.k, shape.format.v].map(|s| part_bytes(shape, s));
    parts.iter().flatten().sum()
}

/// Byte and shift of the code of token `t`, dim `d`, among the codes of K or V.
fn code_at(shape: &Shape, scheme: Scheme, is_k: bool, t: usize, d: usize) -> (usize, u32) {
    let (size, dim) = (shape.page_size, shape.head_dim);
    let slot = |t: usize| 4 * (t % 8 / 2) + 2 * (t / 8) + t % 2;
    let half = |i: usize| if i % 16 < 8 { 0 } else { 4 };
    let row = |i: usize| 8 * (i / 16) + i % 8;
    match (scheme, is_k) {
        (Scheme::F16 | Scheme::Bf16, _) => ((d / 8 * size + t) * 16 + d % 8 * 2, 0),
        (Scheme::Int4(_), true) => ((d / 16 * (size / 2) + row(t)) * 16 + d % 16, half(t)),
        (Scheme::Int4(_), false) => ((t / 16 * (dim / 2) + row(d)) * 16 + slot(t % 16), half(d)),
        (_, true) => ((d / 16 * size + t) * 16 + d % 16, 0),
        (_, false) => ((t / 16 * dim + d) * 16 + slot(t % 16), 0),
    }
}

/// The value of one stored element and the step of its quantization, from one run.
fn element(
    shape: &Shape,
    scheme: Scheme,
    is_k: bool,
    part: &[u8],
    [t, d]: [usize; 2],
    tensor_scale: f64,
) -> (f64, f64) {
    let (codes, params) = part.split_at(part_bytes(shape, scheme)[0]);
    let (at, shift) = code_at(shape, scheme, is_k, t, d);
    let signed = f64::from(codes[at] as i8);
    let (size, dim) = (shape.page_size, shape.head_dim);
    match scheme {
        Scheme::F16 => (f16_at(&codes[at..], 0), 0.0),
        Scheme::Bf16 => (
            bf16::from_le_bytes([codes[at], codes[at + 1]]).to_f64(),
            0.0,
        ),
        Scheme::Fp8E4m3 => (e4m3(codes[at]) * tensor_scale, tensor_scale),
        Scheme::Int8(Int8Scale::Tensor) => (signed * tensor_scale, tensor_scale),
        Scheme::Int8(scale) => {
            let group = if scale == Int8Scale::Token { 0 } else { d / 32 };
            let scale = f16_at(params, group * size + t);
            (signed * scale, scale)
        }
        Scheme::Int4(scale) => {
            let pair = match scale {
                Int4Scale::Channel => d,
                Int4Scale::Groups(g) => d / (dim / usize::from(g)) * size + t,
            };
            let (scale, low) = (f16_at(params, 2 * pair), f16_at(params, 2 * pair + 1));
            let code = f64::from(codes[at] >> shift & 15);
            (code * scale + low, scale)
        }
    }
}

/// K and V of a sequence, each `[token][head][dim]`: values, and the step between codes there.
#[derive(Debug, Clone, Default)]
pub struct Values {
    /// K and V.
    pub x: [Vec<f64>; 2],
    /// The scale of each element's code: 0 for 16-bit floats.
    pub steps: [Vec<f64>; 2],
}

/// Reads what `KvCache::read_back` gives for a sequence of `tokens`.
pub fn read(shape: &Shape, pages: &[Vec<u8>], tokens: usize, scales: [&[f32]; 2]) -> Values {
    let mut values = Values::default();
    let channel = shape.format.k == Scheme::Int4(Int4Scale::Channel);
    let tail = Shape {
        format: KvFormat {
            k: Scheme::Int8(Int8Scale::Token),
            ..shape.format
        },
        ..*shape
    };
    for t in 0..tokens {
        let (page, token) = (t / shape.page_size, t % shape.page_size);
        let open = channel && (page + 1) * shape.page_size > tokens;
        for head in 0..shape.heads {
            for d in 0..shape.head_dim {
                for (side, is_k) in [true, false].into_iter().enumerate() {
                    let (shape, page) = if open && is_k {
                        (&tail, &pages[page + 1])
                    } else {
                        (shape, &pages[page])
                    };
                    let run = &page[head * run_bytes(shape)..][..run_bytes(shape)];
                    let k_bytes = part_bytes(shape, shape.format.k).iter().sum();
                    let (scheme, part) = if is_k {
                        (shape.format.k, &run[..k_bytes])
                    } else {
                        (shape.format.v, &run[k_bytes..])
                    };
                    let scale = scales[side].get(head).copied().unwrap_or(1.0);
                    let at = [token, d];
                    let (x, step) = element(shape, scheme, is_k, part, at, f64::from(scale));
                    values.x[side].push(x);
                    values.steps[side].push(step);
                }
            }
        }
    }
    values
}
