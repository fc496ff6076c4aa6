//! Fuzzes `convert`: rows of other engines, imported through random strides and block tables, are exported to the same bytes; their values
//! are those of an independent reading (`convert/rows.rs`); impossible rows are a typed error.

mod rows;

use arbitrary::Unstructured;
use attn_core::{
    CacheConfig, DecodeAttention, Error, HeadDim, Heads, Int8Scale, PageLayout, Scheme,
    convert::{self, ExternalRows, Order, Side},
};
use rows::{Rows, values};

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

/// Fuzzes another import in place of the library's.
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
    let schemes = shape.format.sides(shape.head_dim);
    let sides = schemes.map(|side| Rows::draw(&mut draw, shape.heads, side, (sequence, tokens)));
    let [k, v] = &sides;
    let pages = match import(&layout, sequence, tokens, &k.external(), &v.external()) {
        Ok(pages) => pages,
        Err(_) => {
            let good = sides
                .iter()
                .all(|rows| rows.expect(shape.heads, sequence, tokens).is_some());
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

/// Draws a layout, mostly a possible one; `None` if it is refused, as it must be.
fn layout(draw: &mut Draw<'_, '_>) -> Result<Option<(Shape, PageLayout)>, String> {
    let mut format = draw.format();
    // Rows of other engines are not rotated.
    if !draw.once_in(6) {
        let plain = Scheme::Int8(Int8Scale::Token);
        let unrotated = |scheme| {
            if pages::is_rotated(scheme) {
                plain
            } else {
                scheme
            }
        };
        (format.k, format.v) = (unrotated(format.k), unrotated(format.v));
    }
    let mut shape = Shape {
        format,
        head_dim: draw.head_dim(),
        page_size: draw.pick(&[16, 32, 64, 128]),
        heads: draw.range(1..=3),
    };
    match draw.range(0..=15) {
        0 if draw.once_in(2) => shape.head_dim.k = draw.size(),
        0 => shape.head_dim.v = draw.size(),
        1 => shape.page_size = draw.size(),
        2 => shape.heads = draw.size(),
        3 => shape.format.v = draw.scheme(),
        4 => shape.format.k = Scheme::Int4(draw.bits() as u8),
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
            let tokens = draw.size() >> 1;
            let want: usize = pages::saved_counts(shape.format, shape.page_size, tokens)
                .iter()
                .sum();
            let got = layout.pages_of(tokens);
            hold!(
                got == want,
                "{tokens} tokens of {shape:?} have {got} pages, not {want}"
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
    pages::is_defined(shape.format, shape.head_dim)
        && [16, 32, 64, 128].contains(&shape.page_size)
        && (1..=65536).contains(&shape.heads)
        && shape.heads * pages::run_bytes(shape) <= i32::MAX as usize
}

/// Imported rows come back as values, as rows in both orders, and through a cache.
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
        let Some(want) = rows.expect(shape.heads, sequence, tokens) else {
            return Err(format!(
                "bad rows are taken: {shape:?} {tokens} tokens {rows:?}"
            ));
        };
        let tensor = f64::from(scales[i].first().copied().unwrap_or(1.0));
        let exact = want
            .iter()
            .flat_map(|(row, scales)| values(rows.format, row, scales, tensor).unwrap_or_default());
        for (j, want) in exact.enumerate() {
            let (own, theirs) = (own[i].coarse.x[j], theirs[i][j]);
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

/// Imported pages come back from a cache that restores them.
fn through_a_cache(
    shape: &Shape,
    [k_scales, v_scales]: [Vec<f32>; 2],
    tokens: usize,
    made: &[Vec<u8>],
) -> Result<(), String> {
    let heads = Heads::new(shape.heads, shape.heads, shape.head_dim);
    let config = CacheConfig::builder(shape.format, heads)
        .centres(false)
        .page_size(shape.page_size)
        .pages(made.len() + 1)
        .tensor_scales(k_scales, v_scales)
        .build();
    let reference = attn_cpu::Reference::new();
    let mut cache = reference.create_cache(&config).map_err(|e| e.to_string())?;
    cache
        .restore_pages(0, tokens, made)
        .map_err(|e| format!("imported pages are not restored: {e}"))?;
    let back = cache.read_back(0).map_err(|e| e.to_string())?;
    hold!(
        back == made,
        "pages changed in a cache of {shape:?}, {tokens} tokens"
    );
    Ok(())
}

/// Pages of random counts, lengths and bytes give finite values or a typed error.
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
    let mut made: Vec<Vec<u8>> = (0..draw.range(0..=5))
        .map(|_| vec![if draw.once_in(4) { 0xff } else { 0x11 }; full])
        .collect();
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
        let given = [values[0].len(), values[1].len()];
        let HeadDim { k, v } = shape.head_dim;
        hold!(
            given == [k, v].map(|dim| tokens * shape.heads * dim),
            "dequantize gives {given:?} values for {tokens} tokens of {shape:?}"
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
