//! Fuzzes `convert`: rows of other engines through random strides and block tables come back to the byte, their values are
//! those of an own reading, and what cannot be is a typed error.

use arbitrary::Unstructured;
use attn_core::{
    CacheConfig, DecodeAttention, Error, Int4Scale, Int8Scale, KvFormat, PageLayout, Scheme,
    StridedRows,
    convert::{self, Blocks, ExternalRows, Order, RowFormat, Side},
};
use half::f16;

use crate::{
    draw::Draw,
    hold,
    pages::{self, Shape},
};

/// The import under test.
pub type Import = fn(
    &PageLayout,
    usize,
    usize,
    &ExternalRows<'_>,
    &ExternalRows<'_>,
) -> Result<Vec<Vec<u8>>, Error>;

/// Draws rows; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_import(u, convert::import)
}

/// The same for another import.
///
/// # Errors
/// What does not hold.
pub fn fuzz_import(u: &mut Unstructured<'_>, import: Import) -> Result<(), String> {
    let mut draw = Draw(u);
    let Some((shape, layout)) = layout(&mut draw)? else {
        return Ok(());
    };
    if draw.once_in(6) {
        return damaged_pages(&mut draw, &shape, &layout);
    }
    let tokens = match draw.range(0..=7) {
        0 => draw.size(),
        1 => draw.range(0..=2 * shape.page_size + 3),
        _ => draw.range(0..=20),
    };
    let sequence = if draw.once_in(8) {
        draw.size()
    } else {
        draw.range(0..=2)
    };
    let sides = [shape.format.k, shape.format.v]
        .map(|scheme| Rows::draw(&mut draw, &shape, scheme, sequence, tokens));
    let [k, v] = &sides;
    let pages = match import(&layout, sequence, tokens, &k.external(), &v.external()) {
        Ok(pages) => pages,
        Err(_) => {
            let good = [(k, shape.format.k), (v, shape.format.v)]
                .into_iter()
                .all(|(rows, scheme)| rows.expect(&shape, scheme, sequence, tokens).is_some());
            hold!(
                !good,
                "good rows are refused: {shape:?} {tokens} tokens {k:?} {v:?}"
            );
            return Ok(());
        }
    };
    round_trip(
        &mut draw,
        &shape,
        &layout,
        (sequence, tokens),
        &sides,
        &pages,
    )
}

/// A layout, mostly one that can be.
fn layout(draw: &mut Draw<'_, '_>) -> Result<Option<(Shape, PageLayout)>, String> {
    let mut shape = Shape {
        format: draw.format(),
        head_dim: draw.pick(&[64, 64, 80, 96, 128, 192, 256]),
        page_size: draw.pick(&[16, 32, 64, 128]),
        heads: draw.range(1..=3),
    };
    match draw.range(0..=15) {
        0 => shape.head_dim = draw.size(),
        1 => shape.page_size = draw.size(),
        2 => shape.heads = draw.size(),
        3 => shape.format.v = draw.scheme(),
        4 => shape.format.k = Scheme::Int4(Int4Scale::Groups(draw.bits() as u8)),
        _ => {}
    }
    let made = PageLayout::new(shape.format, shape.head_dim, shape.page_size, shape.heads);
    let can_be = can_be(&shape);
    match made {
        Ok(layout) => {
            hold!(can_be, "a page of {shape:?} is taken");
            let want = shape.heads * pages::run_bytes(&shape);
            let got = layout.page_bytes();
            hold!(
                got == want,
                "a page of {shape:?} has {got} bytes, not {want}"
            );
            Ok(Some((shape, layout)))
        }
        Err(error) => {
            hold!(!can_be, "{shape:?} is refused: {error}");
            Ok(None)
        }
    }
}

/// The rules of FORMATS.md, and the limits of a page.
fn can_be(shape: &Shape) -> bool {
    let scheme = |scheme: Scheme| match scheme {
        Scheme::Int8(Int8Scale::Group32) => shape.head_dim.is_multiple_of(32),
        Scheme::Int4(Int4Scale::Groups(g)) => {
            [1, 2, 4, 8].contains(&g) && shape.head_dim.is_multiple_of(16 * usize::from(g))
        }
        Scheme::Int4(Int4Scale::Channel) => shape.page_size >= 64,
        _ => true,
    };
    [64, 80, 96, 128, 192, 256].contains(&shape.head_dim)
        && [16, 32, 64, 128].contains(&shape.page_size)
        && (1..=65536).contains(&shape.heads)
        && scheme(shape.format.k)
        && scheme(shape.format.v)
        && shape.format.v != Scheme::Int4(Int4Scale::Channel)
        && shape.heads * pages::run_bytes(shape) <= i32::MAX as usize
}

/// Rows of one side in an engine's memory.
#[derive(Debug)]
struct Rows {
    format: RowFormat,
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
        RowFormat::Plain(plain) => plain == scheme,
        RowFormat::FbgemmInt4(g) => scheme == Scheme::Int4(Int4Scale::Groups(g)),
        RowFormat::Q8_0 => scheme == Scheme::Int8(Int8Scale::Group32),
        RowFormat::Q4_0 => {
            [64, 128, 256].contains(&dim)
                && scheme == Scheme::Int4(Int4Scale::Groups((dim / 32) as u8))
        }
    }
}

impl Rows {
    fn draw(
        draw: &mut Draw<'_, '_>,
        shape: &Shape,
        scheme: Scheme,
        sequence: usize,
        tokens: usize,
    ) -> Rows {
        let format = Rows::format(draw, scheme);
        let (row, groups) = row_size(format, shape.head_dim);
        // What is laid out cleanly; more tokens or sequences than that are missing.
        let (tokens, batch) = (tokens.min(300), sequence.min(3) + 1);
        let mut strides = |row: usize| match draw.range(0..=7) {
            0 => [draw.size(), draw.size(), draw.size()],
            1 => [draw.range(0..=99), draw.range(0..=99), draw.range(0..=row)],
            2..=4 => [shape.heads * tokens * row, tokens * row, row],
            _ => [shape.heads * tokens * row, row, shape.heads * row],
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
            code_strides = [shape.heads * inside * row, inside * row, row];
            scale_strides = [shape.heads * inside * groups, inside * groups, groups];
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
        let room = shape.heads * (tokens + 33) * batch;
        let mut rows = Rows {
            format,
            codes: draw.bytes((room * row).min(1 << 20)),
            code_strides,
            scales: vec![0x3555; (room * groups).min(1 << 18)],
            scale_strides,
            blocks,
        };
        rows.clean(draw, shape.head_dim);
        if draw.once_in(4) {
            rows.cut(draw);
        }
        rows
    }

    fn format(draw: &mut Draw<'_, '_>, scheme: Scheme) -> RowFormat {
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
            Scheme::Int4(Int4Scale::Groups(2 | 4 | 8)) if draw.once_in(2) => RowFormat::Q4_0,
            Scheme::Int4(Int4Scale::Groups(groups)) => RowFormat::FbgemmInt4(groups),
            scheme => RowFormat::Plain(scheme),
        }
    }

    /// Replaces what means nothing in rows that lie one behind the other; then, sometimes, damages a byte.
    fn clean(&mut self, draw: &mut Draw<'_, '_>, dim: usize) {
        let (row, _) = row_size(self.format, dim);
        let scheme = match self.format {
            RowFormat::Plain(scheme) => scheme,
            RowFormat::FbgemmInt4(groups) => Scheme::Int4(Int4Scale::Groups(groups)),
            RowFormat::Q8_0 => Scheme::Int8(Int8Scale::Group32),
            RowFormat::Q4_0 => Scheme::Int4(Int4Scale::Channel),
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
                Scheme::Int4(_) => {}
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

    fn external(&self) -> ExternalRows<'_> {
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
    fn row(&self, dim: usize, sequence: usize, head: usize, t: usize) -> Option<(&[u8], &[u16])> {
        let (row, groups) = row_size(self.format, dim);
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

    /// All rows as `[token][head]`, if an import must take them.
    fn expect(
        &self,
        shape: &Shape,
        scheme: Scheme,
        sequence: usize,
        tokens: usize,
    ) -> Option<Vec<(&[u8], &[u16])>> {
        if !becomes(self.format, scheme, shape.head_dim) {
            return None;
        }
        if self.blocks.as_ref().is_some_and(|(_, per)| *per == 0) {
            return None;
        }
        // Rows that lie on one another are refused where the memory could not hold as many side by side.
        let (row, _) = row_size(self.format, shape.head_dim);
        if tokens.saturating_mul(shape.heads) > self.codes.len() / row {
            return None;
        }
        let mut rows = Vec::new();
        for t in 0..tokens {
            for head in 0..shape.heads {
                let row = self.row(shape.head_dim, sequence, head, t)?;
                values(self.format, row.0, row.1, 1.0)?;
                rows.push(row);
            }
        }
        Some(rows)
    }
}

/// The values of one row; none if something in it means nothing.
fn values(format: RowFormat, row: &[u8], scales: &[u16], tensor: f64) -> Option<Vec<f64>> {
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

/// What was taken comes back: as values, as rows in both orders, through a cache.
fn round_trip(
    draw: &mut Draw<'_, '_>,
    shape: &Shape,
    layout: &PageLayout,
    (sequence, tokens): (usize, usize),
    sides: &[Rows; 2],
    made: &[Vec<u8>],
) -> Result<(), String> {
    let scale = draw.pick(&[1.0f32, 0.05, 3.0]);
    let tensor = |scheme: Scheme| {
        let has = matches!(scheme, Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor));
        vec![scale; if has { shape.heads } else { 0 }]
    };
    let scales = [shape.format.k, shape.format.v].map(tensor);
    let own = pages::read(shape, made, tokens, [&scales[0], &scales[1]]);
    let theirs = convert::dequantize(layout, made, tokens, &scales[0], &scales[1])
        .map_err(|e| format!("imported pages are refused: {e}"))?;
    for (i, side) in [Side::K, Side::V].into_iter().enumerate() {
        let rows = &sides[i];
        let scheme = if i == 0 {
            shape.format.k
        } else {
            shape.format.v
        };
        let Some(want) = rows.expect(shape, scheme, sequence, tokens) else {
            return Err(format!(
                "bad rows are taken: {shape:?} {tokens} tokens {rows:?}"
            ));
        };
        let tensor = f64::from(scales[i].first().copied().unwrap_or(1.0));
        let exact = want
            .iter()
            .flat_map(|(row, scales)| values(rows.format, row, scales, tensor).unwrap_or_default());
        for (j, want) in exact.enumerate() {
            let (own, theirs) = (own.x[i][j], theirs[i][j]);
            hold!(
                own == want,
                "{side:?}[{j}] of {shape:?} is {own} in its page, not {want}"
            );
            hold!(
                theirs == want as f32,
                "{side:?}[{j}] of {shape:?} is {theirs}, not {want}"
            );
        }
        for order in [Order::Bsnh, Order::Bnsh] {
            let back = convert::export(layout, made, tokens, side, rows.format, order)
                .map_err(|e| format!("imported rows are not exported: {e}"))?;
            let (mut codes, mut f16s) = (Vec::new(), Vec::new());
            for at in 0..tokens * shape.heads {
                let index = match order {
                    Order::Bsnh => at,
                    Order::Bnsh => at % tokens * shape.heads + at / tokens,
                };
                codes.extend_from_slice(want[index].0);
                f16s.extend_from_slice(want[index].1);
            }
            hold!(
                back.codes == codes,
                "{:?} codes changed in {order:?}",
                rows.format
            );
            hold!(
                back.scales == f16s,
                "{:?} scales changed in {order:?}",
                rows.format
            );
        }
    }
    through_a_cache(shape, scales, tokens, made)
}

fn through_a_cache(
    shape: &Shape,
    [k_scales, v_scales]: [Vec<f32>; 2],
    tokens: usize,
    made: &[Vec<u8>],
) -> Result<(), String> {
    let mut config = CacheConfig::new(shape.format, shape.heads, shape.head_dim, 1, 0);
    config.page_size = shape.page_size;
    config.num_pages = made.len() + 1;
    (config.k_tensor_scales, config.v_tensor_scales) = (k_scales, v_scales);
    let reference = attn_cpu::Reference::new();
    let mut cache = reference.create_cache(&config).map_err(|e| e.to_string())?;
    cache
        .restore(0, tokens, made)
        .map_err(|e| format!("imported pages are not restored: {e}"))?;
    let back = cache.read_back(0).map_err(|e| e.to_string())?;
    hold!(
        back == made,
        "pages changed in a cache of {shape:?}, {tokens} tokens"
    );
    Ok(())
}

/// Pages of random counts, lengths and bytes: values that are finite, or a typed error.
fn damaged_pages(
    draw: &mut Draw<'_, '_>,
    shape: &Shape,
    layout: &PageLayout,
) -> Result<(), String> {
    let tokens = if draw.once_in(2) {
        draw.size()
    } else {
        draw.range(0..=shape.page_size * 2)
    };
    let full = layout.page_bytes().min(1 << 20);
    let tail = KvFormat {
        k: Scheme::Int8(Int8Scale::Token),
        ..shape.format
    };
    let tail = shape.heads
        * pages::run_bytes(&Shape {
            format: tail,
            ..*shape
        });
    let mut made: Vec<Vec<u8>> = (0..draw.range(0..=3))
        .map(|_| vec![if draw.once_in(4) { 0xff } else { 0x11 }; full])
        .collect();
    if let (Some(last), true) = (made.last_mut(), draw.once_in(3)) {
        last.resize(tail.min(1 << 20), 0x22);
    }
    if let (Some(last), true) = (made.last_mut(), draw.once_in(6)) {
        let len = draw.range(0..=full);
        last.truncate(len);
    }
    let mut bytes = draw.bytes(full);
    let _ = layout.canonical(&mut bytes, draw.size(), draw.once_in(2));
    let format = Rows::format(draw, shape.format.v);
    let side = draw.pick(&[Side::K, Side::V]);
    let order = draw.pick(&[Order::Bnsh, Order::Bsnh]);
    let _ = convert::export(layout, &made, tokens, side, format, order);
    let scales = vec![draw.float(); draw.range(0..=3)];
    if let Ok(values) = convert::dequantize(layout, &made, tokens, &[], &[]) {
        hold!(
            values
                .iter()
                .all(|x| x.len() == tokens * shape.heads * shape.head_dim),
            "dequantize gives {} values for {tokens} tokens",
            values[0].len()
        );
        hold!(
            values.iter().flatten().all(|x| x.is_finite()),
            "values of {shape:?} are not finite"
        );
    }
    if let Ok(values) = convert::dequantize(layout, &made, tokens, &scales, &scales) {
        hold!(
            values.iter().flatten().all(|x| x.is_finite()),
            "values of {shape:?} with scales {scales:?} are not finite"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(import: Import) -> bool {
        crate::finds(500, fuzz, |u| fuzz_import(u, import))
    }

    #[test]
    fn a_flipped_bit_in_a_page_is_found() {
        assert!(finds(|layout, sequence, tokens, k, v| {
            let mut pages = convert::import(layout, sequence, tokens, k, v)?;
            if let Some(page) = pages.last_mut() {
                page[0] ^= 1;
            }
            Ok(pages)
        }));
    }

    #[test]
    fn another_sequences_rows_are_found() {
        assert!(finds(|layout, _, tokens, k, v| convert::import(
            layout, 0, tokens, k, v
        )));
    }
}
