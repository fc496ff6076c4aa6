//! Fuzzes views of other engines' caches through random strides, scales and codes: what is taken has a finite answer, the same
//! bits on every backend, near that of f64; what is refused is so by FORMATS.md or by the length of a slice.

use arbitrary::Unstructured;
use attn_conformance::noise::Noise;
use attn_core::{Int8Scale, KvFormat, KvSource, KvView, Problem, Scheme, StridedRows};
use half::f16;

use crate::{
    backends::{Backends, CPU, problem},
    draw::Draw,
    oracle,
    pages::{self, Numbers},
};

/// Draws a view; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_backends(u, &CPU)
}

/// Fuzzes other backends in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_backends(u: &mut Unstructured<'_>, backends: &Backends) -> Result<(), String> {
    let mut draw = Draw(u);
    let mut format = draw.format();
    if !draw.once_in(16) {
        let (k, v) = (draw.pick(&SCHEMES), draw.pick(&SCHEMES));
        format = KvFormat::new(k, if draw.once_in(2) { k } else { v });
    }
    let (heads, dim) = (draw.range(1..=2), draw.head_dim());
    let most = if draw.once_in(3) { 200 } else { 20 };
    let lens: Vec<usize> = (0..draw.range(0..=3))
        .map(|_| draw.range(0..=most))
        .collect();
    let problem = problem(&mut draw, heads, dim, &lens);
    let [k, v] = format
        .sides(dim)
        .map(|(scheme, dim)| Side::draw(&mut draw, &problem, scheme, dim));
    let [k_scales, v_scales] = [&k, &v].map(|side| &side.tensor_scales[..]);
    let view = KvView::new(&problem, format, k.rows(), v.rows(), [k_scales, v_scales]);
    let values = k.values(&problem).zip(v.values(&problem));
    let text = || format!("{format} {problem:?} K {k:?} V {v:?}");
    let (view, [k_values, v_values]) = match (view, values) {
        (Ok(view), Some((k, v))) => (view, [k, v]),
        (Err(_), None) => {
            trusted(&mut draw, backends, &problem, format, &k, &v);
            return Ok(());
        }
        (Ok(_), None) => return Err(format!("a bad view is taken: {}", text())),
        (Err(error), Some(_)) => {
            return Err(format!("a good view is refused: {error}: {}", text()));
        }
    };
    let size = draw.pick(&[1.0, 0.1, 4.0, 1e12]);
    let mut q = draw.noise(problem.rows() * dim.k, size);
    if let (Some(x), true) = (q.first_mut(), draw.once_in(8)) {
        *x = draw.float();
    }
    let rows = backends
        .decode(&mut draw, &problem, format, &q, KvSource::View(&view))
        .map_err(|error| format!("{error}: {}", text()))?;
    let Some(rows) = rows else {
        return Ok(());
    };
    let kv: Vec<_> = k_values
        .into_iter()
        .zip(v_values)
        .map(|(in_k, in_v)| [side_of(&k, in_k), side_of(&v, in_v)])
        .collect();
    let integer = pages::is_integer(format);
    let exact = oracle::attend(&problem, integer, &q, &kv);
    oracle::compare(&problem, integer, &rows, &exact).map_err(|e| format!("{e}: {}", text()))
}

/// One sequence's numbers as the oracle takes them: no scheme of a view is rotated, shifted, or read in two ways.
fn side_of(side: &Side, numbers: Numbers) -> pages::Side {
    pages::Side {
        scheme: side.scheme,
        dim: side.dim,
        block: pages::block(side.dim),
        first_part: side.dim,
        coarse: numbers,
        fine: Numbers::default(),
    }
}

/// Schemes that lie row by row.
const SCHEMES: [Scheme; 6] = [
    Scheme::F16,
    Scheme::Bf16,
    Scheme::Fp8E4m3,
    Scheme::Int8(Int8Scale::Token),
    Scheme::Int8(Int8Scale::Group32),
    Scheme::Int8(Int8Scale::Tensor),
];

/// What is taken on trust has any answer, but no panic.
fn trusted(
    draw: &mut Draw<'_, '_>,
    backends: &Backends,
    problem: &Problem,
    format: KvFormat,
    k: &Side,
    v: &Side,
) {
    let scales = [&k.tensor_scales[..], &v.tensor_scales[..]];
    let view = KvView::with_trusted_values(problem, format, k.rows(), v.rows(), scales);
    let Ok(view) = view else { return };
    let q = draw.noise(problem.rows() * problem.head_dim.k, 1.0);
    for backend in [&backends.reference]
        .into_iter()
        .chain(backends.others.iter().map(|b| &b.1))
    {
        let _ = crate::backends::decode(&**backend, problem, format, &q, KvSource::View(&view));
    }
}

/// One of K, V in memory.
struct Side {
    scheme: Scheme,
    /// Elements per head.
    dim: usize,
    codes: Vec<u8>,
    code_strides: [usize; 3],
    scales: Vec<u16>,
    scale_strides: [usize; 3],
    tensor_scales: Vec<f32>,
}

impl std::fmt::Debug for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} bytes by {:?}, {} scales by {:?}, {:?}",
            self.codes.len(),
            self.code_strides,
            self.scales.len(),
            self.scale_strides,
            self.tensor_scales
        )
    }
}

/// The numbers of each sequence.
type Batch = Vec<Numbers>;

/// Bytes of a row, and f16 scales that belong to it.
fn row_size(scheme: Scheme, dim: usize) -> (usize, usize) {
    match scheme {
        Scheme::F16 | Scheme::Bf16 => (2 * dim, 0),
        Scheme::Int8(Int8Scale::Token) => (dim, 1),
        Scheme::Int8(Int8Scale::Group32) => (dim, dim / 32),
        _ => (dim, 0),
    }
}

impl Side {
    fn draw(draw: &mut Draw<'_, '_>, problem: &Problem, scheme: Scheme, dim: usize) -> Side {
        let (row, groups) = row_size(scheme, dim);
        let heads = problem.num_kv_heads;
        let longest = problem.kv_lens.iter().copied().max().unwrap_or(0);
        let capacity = longest + draw.range(0..=3);
        let pad = if draw.once_in(3) {
            draw.range(0..=40)
        } else {
            0
        };
        let mut strides = |row: usize, pad: usize| match draw.range(0..=11) {
            0 => [draw.size(), draw.size(), draw.size()],
            1 => [
                draw.range(0..=200),
                draw.range(0..=200),
                draw.range(0..=row + 1),
            ],
            2..=6 => {
                let row = row + pad;
                [heads * capacity * row, capacity * row, row]
            }
            _ => {
                let row = row + pad;
                [heads * capacity * row, row, heads * row]
            }
        };
        let (code_strides, scale_strides) = (strides(row, pad), strides(groups, pad % 3));
        let has_tensor = matches!(scheme, Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor));
        let mut side = Side {
            scheme,
            dim,
            codes: Vec::new(),
            code_strides,
            scales: Vec::new(),
            scale_strides,
            tensor_scales: vec![draw.pick(&[0.05, 1.0]); if has_tensor { heads } else { 0 }],
        };
        let most = problem.kv_lens.len() * heads * capacity;
        let room = |strides: [usize; 3], row: usize, limit: usize| {
            side_reach(problem, strides, row).map_or(limit.min(most * row), |n| n.min(limit))
        };
        let bytes = room(code_strides, row, 1 << 20);
        side.codes = draw.bytes(bytes);
        side.clean();
        side.scales = vec![0; room(scale_strides, groups, 1 << 18)];
        let mut noise = Noise::new(draw.bits());
        for scale in &mut side.scales {
            // 2^-9 to 2^-5: values of ordinary size.
            *scale = 0x1800 + (noise.bits() as u16 & 0x0fff);
        }
        side.damage(draw);
        side
    }

    /// Makes every code one of ordinary size.
    fn clean(&mut self) {
        for (i, byte) in self.codes.iter_mut().enumerate() {
            match self.scheme {
                Scheme::F16 if i % 2 == 1 => *byte &= 0xbf,
                Scheme::Bf16 if i % 2 == 1 => *byte = *byte & 0x80 | 0x3f,
                Scheme::Fp8E4m3 => *byte &= 0xbf,
                _ => {}
            }
        }
    }

    /// Sometimes another code, scale, tensor scale, or a shorter slice.
    fn damage(&mut self, draw: &mut Draw<'_, '_>) {
        if draw.once_in(5) && !self.codes.is_empty() {
            let at = draw.range(0..=self.codes.len() - 1);
            self.codes[at] = draw.pick(&[0x80, 0x7f, 0xff, 0x7c, 0xfc, 0x58, 0x59, 0xd8]);
        }
        if draw.once_in(5) && !self.scales.is_empty() {
            let at = draw.range(0..=self.scales.len() - 1);
            self.scales[at] = draw.pick(&[0x8000, 0x7c00, 0x7e00, 0xb555, 0x0001, 0x7bff, 0]);
        }
        if draw.once_in(12) {
            let left = draw.range(0..=self.codes.len());
            self.codes.truncate(left);
        }
        if draw.once_in(12) {
            let left = draw.range(0..=self.scales.len());
            self.scales.truncate(left);
        }
        if draw.once_in(16) {
            let x = draw.float();
            match self.tensor_scales.last_mut() {
                Some(last) if draw.once_in(2) => *last = x,
                _ => self.tensor_scales.push(x),
            }
        }
    }

    fn rows(&self) -> StridedRows<'_> {
        StridedRows {
            codes: &self.codes,
            code_strides: self.code_strides,
            scales: &self.scales,
            scale_strides: self.scale_strides,
        }
    }

    /// Values of every cached token; None if the view must be refused.
    fn values(&self, problem: &Problem) -> Option<Batch> {
        let (row, groups) = row_size(self.scheme, self.dim);
        let heads = problem.num_kv_heads;
        let allowed = match self.scheme {
            Scheme::Int4(_) | Scheme::RotatedInt4 { .. } | Scheme::RotatedInt8 => false,
            scheme => pages::can_be(scheme, self.dim),
        };
        let has_tensor = matches!(
            self.scheme,
            Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor)
        );
        let count = if has_tensor { heads } else { 0 };
        let good = self
            .tensor_scales
            .iter()
            .all(|s| (1e-15..=1e15).contains(s));
        if !allowed || !good || self.tensor_scales.len() != count {
            return None;
        }
        let mut batch = Vec::new();
        for (b, len) in problem.kv_lens.iter().enumerate() {
            let mut numbers = Numbers::default();
            for t in 0..*len {
                for head in 0..heads {
                    let at = [b, head, t];
                    let codes = slice(&self.codes, self.code_strides, at, row)?;
                    let scales = match groups {
                        0 => &[][..],
                        _ => slice(&self.scales, self.scale_strides, at, groups)?,
                    };
                    let tensor = self.tensor_scales.get(head).map_or(1.0, |s| f64::from(*s));
                    for d in 0..self.dim {
                        let (x, step) = self.value(codes, scales, d, tensor)?;
                        numbers.stored.push(x);
                        numbers.steps.push(step);
                    }
                }
            }
            numbers.x = numbers.stored.clone();
            numbers.centred = numbers.stored.clone();
            batch.push(numbers);
        }
        Some(batch)
    }

    /// An element's value, and the factor of its code: 0 for floats.
    fn value(&self, codes: &[u8], scales: &[u16], d: usize, tensor: f64) -> Option<(f64, f64)> {
        let word = || u16::from_le_bytes([codes[2 * d], codes[2 * d + 1]]);
        let signed = f64::from(codes[d] as i8);
        let scaled = |bits: u16| {
            let scale = (bits <= 0x7bff).then(|| f16::from_bits(bits).to_f64())?;
            Some((signed * scale, scale))
        };
        let float = |x: f64| Some((x, 0.0));
        match self.scheme {
            Scheme::F16 => float(f16::from_bits(word()).to_f64()).filter(|x| x.0.is_finite()),
            Scheme::Bf16 => float(half::bf16::from_bits(word()).to_f64())
                .filter(|x| x.0.abs() <= f64::powi(2.0, 50)),
            Scheme::Fp8E4m3 => float(pages::e4m3(codes[d]) * tensor).filter(|x| x.0.is_finite()),
            Scheme::Int8(Int8Scale::Tensor) => Some((signed * tensor, tensor)),
            Scheme::Int8(Int8Scale::Token) => scaled(scales[0]),
            _ => scaled(scales[d / 32]),
        }
    }
}

fn start(strides: [usize; 3], at: [usize; 3]) -> Option<usize> {
    let terms = at.iter().zip(strides).map(|(i, s)| *i as u128 * s as u128);
    usize::try_from(terms.sum::<u128>()).ok()
}

fn slice<T>(x: &[T], strides: [usize; 3], at: [usize; 3], len: usize) -> Option<&[T]> {
    let start = start(strides, at)?;
    x.get(start..start.checked_add(len)?)
}

/// Elements that the problem's last rows end at.
fn side_reach(problem: &Problem, strides: [usize; 3], row: usize) -> Option<usize> {
    let mut most = 0;
    for (b, len) in problem
        .kv_lens
        .iter()
        .enumerate()
        .filter(|(_, len)| **len > 0)
    {
        let end = start(strides, [b, problem.num_kv_heads - 1, len - 1])?.checked_add(row)?;
        most = most.max(end);
    }
    Some(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faulty;

    fn finds(backends: &Backends) -> bool {
        crate::finds(400, fuzz, |u| fuzz_backends(u, backends))
    }

    #[test]
    fn a_backend_with_one_wrong_bit_is_found() {
        assert!(finds(&faulty::one_wrong_bit()));
    }

    #[test]
    fn an_error_that_the_reference_shares_is_found() {
        assert!(finds(&faulty::all_wrong()));
    }
}
