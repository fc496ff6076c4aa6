//! Rows of other engines in memory: drawn, and read independently of `attn_core::convert`.

use attn_core::{
    Int8Scale, Scheme, StridedRows,
    convert::{Blocks, ExternalRows, RowFormat},
};
use half::f16;

use crate::{draw::Draw, pages};

/// Rows of one side in an engine's memory.
#[derive(Debug)]
pub(super) struct Rows {
    pub format: RowFormat,
    /// The pages' scheme, and the elements of a row.
    of: (Scheme, usize),
    codes: Vec<u8>,
    code_strides: [usize; 3],
    scales: Vec<u16>,
    scale_strides: [usize; 3],
    blocks: Option<(Vec<u32>, usize)>,
}

/// Bytes of a row, and f16 scales beside it.
fn row_size(format: RowFormat, dim: usize) -> (usize, usize) {
    match format {
        RowFormat::Plain(Scheme::F16 | Scheme::Bf16) => (2 * dim, 0),
        RowFormat::Plain(Scheme::Int8(Int8Scale::Token)) => (dim, 1),
        RowFormat::Plain(Scheme::Int8(Int8Scale::Group32)) => (dim, dim / 32),
        RowFormat::Plain(_) => (dim, 0),
        RowFormat::FbgemmInt4(groups) => (4 * usize::from(groups) + dim / 2, 0),
        RowFormat::Q8_0 => (dim / 32 * 34, 0),
        RowFormat::Q4_0 => (dim / 32 * 18, 0),
    }
}

/// Whether rows of the format become pages of the scheme.
fn becomes(format: RowFormat, scheme: Scheme, dim: usize) -> bool {
    match format {
        RowFormat::Plain(Scheme::Int4(_)) => false,
        RowFormat::Plain(plain) if pages::is_rotated(plain) => false,
        RowFormat::Plain(plain) => plain == scheme,
        RowFormat::FbgemmInt4(g) => scheme == Scheme::Int4(g),
        RowFormat::Q8_0 => scheme == Scheme::Int8(Int8Scale::Group32),
        RowFormat::Q4_0 => {
            [64, 128, 256].contains(&dim) && scheme == Scheme::Int4((dim / 32) as u8)
        }
    }
}

impl Rows {
    /// Draws rows for pages of a scheme and its dims: mostly good ones of the tokens and the sequence, in any strides or blocks.
    pub(super) fn draw(
        draw: &mut Draw<'_, '_>,
        heads: usize,
        (scheme, dim): (Scheme, usize),
        (sequence, tokens): (usize, usize),
    ) -> Rows {
        let format = Rows::format(draw, scheme);
        let (row, groups) = row_size(format, dim);
        // The memory holds at most so many tokens and sequences; beyond them rows are missing.
        let (tokens, batch) = (tokens.min(300), sequence.min(3) + 1);
        let mut strides = |row: usize| match draw.range(0..=7) {
            0 => [draw.size(), draw.size(), draw.size()],
            1 => [draw.range(0..=99), draw.range(0..=99), draw.range(0..=row)],
            2..=4 => [heads * tokens * row, tokens * row, row],
            _ => [heads * tokens * row, row, heads * row],
        };
        let (mut code_strides, mut scale_strides) = (strides(row), strides(groups));
        let mut blocks = None;
        if draw.once_in(3) {
            let per = if draw.once_in(8) {
                draw.size()
            } else {
                draw.range(1..=16)
            };
            let count = tokens.checked_div(per).unwrap_or(0) + usize::from(!draw.once_in(6));
            let inside = per.min(300);
            code_strides = [heads * inside * row, inside * row, row];
            scale_strides = [heads * inside * groups, inside * groups, groups];
            let far = draw.once_in(8);
            let table = (0..count)
                .map(|_| {
                    if far {
                        draw.bits() as u32
                    } else {
                        draw.range(0..=count) as u32
                    }
                })
                .collect();
            blocks = Some((table, per));
        }
        let room = heads * (tokens + 33) * batch;
        let mut rows = Rows {
            format,
            of: (scheme, dim),
            codes: draw.bytes((room * row).min(1 << 20)),
            code_strides,
            scales: vec![0x3555; (room * groups).min(1 << 18)],
            scale_strides,
            blocks,
        };
        rows.clean(draw);
        if draw.once_in(4) {
            rows.cut(draw);
        }
        rows
    }

    /// Draws a format of rows, mostly one that becomes pages of the scheme.
    pub(super) fn format(draw: &mut Draw<'_, '_>, scheme: Scheme) -> RowFormat {
        if draw.once_in(10) {
            let groups = draw.bits() as u8;
            let any = draw.scheme();
            return draw.pick(&[
                RowFormat::Plain(any),
                RowFormat::FbgemmInt4(groups),
                RowFormat::Q8_0,
                RowFormat::Q4_0,
            ]);
        }
        match scheme {
            Scheme::Int8(Int8Scale::Group32) if draw.once_in(2) => RowFormat::Q8_0,
            Scheme::Int4(2 | 4 | 8) if draw.once_in(2) => RowFormat::Q4_0,
            Scheme::Int4(groups) => RowFormat::FbgemmInt4(groups),
            scheme => RowFormat::Plain(scheme),
        }
    }

    /// Replaces codes and scales that are no numbers, in contiguous rows; then, sometimes, damages a byte.
    fn clean(&mut self, draw: &mut Draw<'_, '_>) {
        let dim = self.of.1;
        let (row, _) = row_size(self.format, dim);
        let scheme = match self.format {
            RowFormat::Plain(scheme) => scheme,
            RowFormat::FbgemmInt4(groups) => Scheme::Int4(groups),
            RowFormat::Q8_0 => Scheme::Int8(Int8Scale::Group32),
            RowFormat::Q4_0 => Scheme::Int4(1),
        };
        for bytes in self.codes.chunks_exact_mut(row.max(1)) {
            let heads: Vec<usize> = match self.format {
                RowFormat::FbgemmInt4(g) => (0..2 * usize::from(g)).map(|i| 2 * i).collect(),
                RowFormat::Q8_0 => (0..dim / 32).map(|i| 34 * i).collect(),
                RowFormat::Q4_0 => (0..dim / 32).map(|i| 18 * i).collect(),
                RowFormat::Plain(_) => Vec::new(),
            };
            match scheme {
                Scheme::F16 => bytes.iter_mut().skip(1).step_by(2).for_each(|b| *b &= 0xbb),
                Scheme::Bf16 => bytes.iter_mut().skip(1).step_by(2).for_each(|b| *b &= 0xbf),
                Scheme::Fp8E4m3 => bytes.iter_mut().for_each(|b| *b &= 0xbf),
                Scheme::Int8(_) => bytes
                    .iter_mut()
                    .filter(|b| **b == 0x80)
                    .for_each(|b| *b = 0),
                _ => {}
            }
            for (i, at) in heads.into_iter().enumerate() {
                // Scales are not negative; FBGEMM's shifts and q4_0's d may be.
                let sign = match self.format {
                    RowFormat::Q8_0 => 0x3b,
                    RowFormat::FbgemmInt4(_) if i % 2 == 0 => 0x3b,
                    _ => 0xbb,
                };
                bytes[at + 1] &= sign;
            }
        }
        if draw.once_in(5) && !self.codes.is_empty() {
            let at = draw.range(0..=self.codes.len() - 1);
            self.codes[at] = draw.pick(&[0x80, 0x7f, 0xff, 0x7c, 0xfc]);
        }
        if draw.once_in(5) && !self.scales.is_empty() {
            let at = draw.range(0..=self.scales.len() - 1);
            self.scales[at] = draw.pick(&[0x8000, 0x7c00, 0x7e00, 0xb555, 0x0001, 0x7bff]);
        }
    }

    /// Shortens the memory.
    fn cut(&mut self, draw: &mut Draw<'_, '_>) {
        let left = draw.range(0..=self.codes.len());
        self.codes.truncate(left);
        if draw.once_in(2) {
            let left = draw.range(0..=self.scales.len());
            self.scales.truncate(left);
        }
    }

    pub(super) fn external(&self) -> ExternalRows<'_> {
        ExternalRows {
            format: self.format,
            rows: StridedRows {
                codes: &self.codes,
                code_strides: self.code_strides,
                scales: &self.scales,
                scale_strides: self.scale_strides,
            },
            blocks: self.blocks.as_ref().map(|(table, tokens)| Blocks {
                table,
                tokens: *tokens,
            }),
        }
    }

    /// Row and scales of (sequence, head, token), if the memory has them.
    fn row(&self, sequence: usize, head: usize, t: usize) -> Option<(&[u8], &[u16])> {
        let (row, groups) = row_size(self.format, self.of.1);
        let at = match &self.blocks {
            None => [sequence, head, t],
            Some((table, per)) => [*table.get(t.checked_div(*per)?)? as usize, head, t % per],
        };
        let start = |strides: [usize; 3]| {
            let terms = at.iter().zip(strides).map(|(i, s)| *i as u128 * s as u128);
            usize::try_from(terms.sum::<u128>()).ok()
        };
        let take = start(self.code_strides)?;
        let codes = self.codes.get(take..take.checked_add(row)?)?;
        if groups == 0 {
            return Some((codes, &[]));
        }
        let take = start(self.scale_strides)?;
        let scales = self.scales.get(take..take.checked_add(groups)?)?;
        Some((codes, scales))
    }

    /// All rows as `[token][head]`, if an import must accept them.
    pub(super) fn expect(
        &self,
        heads: usize,
        sequence: usize,
        tokens: usize,
    ) -> Option<Vec<(&[u8], &[u16])>> {
        let (scheme, dim) = self.of;
        if !becomes(self.format, scheme, dim) {
            return None;
        }
        if self.blocks.as_ref().is_some_and(|(_, per)| *per == 0) {
            return None;
        }
        // Overlapping rows are refused if the memory could not hold as many rows side by side.
        let (row, _) = row_size(self.format, dim);
        if tokens.saturating_mul(heads) > self.codes.len() / row {
            return None;
        }
        let mut rows = Vec::new();
        for t in 0..tokens {
            for head in 0..heads {
                let row = self.row(sequence, head, t)?;
                values(self.format, row.0, row.1, 1.0)?;
                rows.push(row);
            }
        }
        Some(rows)
    }
}

/// The values of one row; `None` if a code or a scale is no number.
pub(super) fn values(
    format: RowFormat,
    row: &[u8],
    scales: &[u16],
    tensor: f64,
) -> Option<Vec<f64>> {
    let scale = |bits: u16| (bits <= 0x7bff).then(|| f16::from_bits(bits).to_f64());
    let finite = |bits: u16| {
        f16::from_bits(bits)
            .is_finite()
            .then(|| f16::from_bits(bits).to_f64())
    };
    let word = |at: usize| u16::from_le_bytes([row[at], row[at + 1]]);
    let signed = |byte: u8| (byte != 0x80).then(|| f64::from(byte as i8));
    match format {
        RowFormat::Plain(Scheme::F16) => (0..row.len() / 2).map(|i| finite(word(2 * i))).collect(),
        RowFormat::Plain(Scheme::Bf16) => (0..row.len() / 2)
            .map(|i| {
                let x = half::bf16::from_bits(word(2 * i));
                (x.to_f64().abs() <= f64::powi(2.0, 50)).then(|| x.to_f64())
            })
            .collect(),
        RowFormat::Plain(Scheme::Fp8E4m3) => row
            .iter()
            .map(|code| (code & 0x7f != 0x7f).then(|| pages::e4m3(*code) * tensor))
            .collect(),
        RowFormat::Plain(Scheme::Int8(Int8Scale::Tensor)) => row
            .iter()
            .map(|code| Some(signed(*code)? * tensor))
            .collect(),
        RowFormat::Plain(_) => {
            let width = row.len() / scales.len();
            let scales: Vec<f64> = scales.iter().map(|s| scale(*s)).collect::<Option<_>>()?;
            row.iter()
                .enumerate()
                .map(|(d, code)| Some(signed(*code)? * scales[d / width]))
                .collect()
        }
        RowFormat::FbgemmInt4(groups) => {
            let (g, body) = (usize::from(groups), &row[4 * usize::from(groups)..]);
            let pairs: Vec<(f64, f64)> = (0..g)
                .map(|i| Some((scale(word(4 * i))?, finite(word(4 * i + 2))?)))
                .collect::<Option<_>>()?;
            let width = body.len() * 2 / g;
            let codes = body.iter().flat_map(|byte| [byte & 15, byte >> 4]);
            let shifted = codes.enumerate().map(|(d, code)| {
                let (scale, shift) = pairs[d / width];
                f64::from(code) * scale + shift
            });
            Some(shifted.collect())
        }
        RowFormat::Q8_0 => {
            let groups = row.chunks_exact(34).map(|group| {
                let d = scale(u16::from_le_bytes([group[0], group[1]]))?;
                group[2..]
                    .iter()
                    .map(|code| Some(signed(*code)? * d))
                    .collect()
            });
            Some(groups.collect::<Option<Vec<Vec<f64>>>>()?.concat())
        }
        RowFormat::Q4_0 => {
            let groups = row.chunks_exact(18).map(|group| {
                let d = finite(u16::from_le_bytes([group[0], group[1]]))?;
                // A negative d becomes a positive scale, whose shift is rounded to f16.
                let shift = if d < 0.0 { 7.0 * d } else { -8.0 * d };
                if shift < -65504.0 {
                    return None;
                }
                let shift = f16::from_f64(shift).to_f64();
                let low = group[2..].iter().map(|byte| byte & 15);
                let codes = low
                    .chain(group[2..].iter().map(|byte| byte >> 4))
                    .map(f64::from);
                let value = |u: f64| {
                    if d < 0.0 {
                        (15.0 - u) * -d + shift
                    } else {
                        u * d + shift
                    }
                };
                Some(codes.map(value).collect())
            });
            Some(groups.collect::<Option<Vec<Vec<f64>>>>()?.concat())
        }
    }
}
