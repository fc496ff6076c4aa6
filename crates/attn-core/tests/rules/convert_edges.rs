//! Rows of other engines at their edges: what is missing is named to the byte, and damaged pages give no rows.

use attn_core::{
    Error, KvFormat, PageLayout, StridedRows,
    convert::{Blocks, Exported, ExternalRows, Order, RowFormat, Side, dequantize, export, import},
};
use half::f16;

fn plain(format: &str) -> (RowFormat, PageLayout) {
    let format: KvFormat = format.parse().unwrap();
    let layout = PageLayout::new(format, 64, 64, 2).unwrap();
    (RowFormat::Plain(format.k), layout)
}

#[test]
fn what_rows_lack_is_counted_to_the_last_byte_of_the_last_row() {
    let (format, layout) = plain("int8-plain");
    // Rows of 64 bytes, 100 apart: three tokens of two heads end at 5 · 100 + 64.
    let external = |codes: usize, scales: usize| {
        static BYTES: [u8; 600] = [0; 600];
        static SCALES: [u16; 600] = [0; 600];
        let rows = StridedRows {
            codes: &BYTES[..codes],
            code_strides: [0, 100, 200],
            scales: &SCALES[..scales],
            scale_strides: [0, 1, 2],
        };
        ExternalRows {
            format,
            rows,
            blocks: None,
        }
    };
    let whole = external(564, 6);
    assert_eq!(import(&layout, 0, 3, &whole, &whole).unwrap().len(), 1);
    for codes in [563, 400, 384] {
        let short = external(codes, 6);
        for (k, v) in [(&short, &whole), (&whole, &short)] {
            let error = import(&layout, 0, 3, k, v).unwrap_err();
            assert!(
                matches!(error, Error::Length { what: "rows", given, needed: 564 } if given == codes),
                "{error}"
            );
        }
    }
    // Fewer bytes than the rows have: counted in rows.
    let few = external(383, 6);
    let error = import(&layout, 0, 3, &few, &whole).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Length {
                what: "rows",
                given: 5,
                needed: 6
            }
        ),
        "{error}"
    );
    let short = external(564, 5);
    let error = import(&layout, 0, 3, &short, &whole).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Length {
                what: "scales",
                given: 5,
                needed: 6
            }
        ),
        "{error}"
    );
}

#[test]
fn blocks_say_what_is_wrong_with_them() {
    let (format, layout) = plain("f16");
    let bytes = [0; 4 * 2 * 128];
    let paged = |table, tokens| ExternalRows {
        format,
        rows: StridedRows::bsnh(&bytes, &[], 2, 2, 128, 0),
        blocks: Some(Blocks { table, tokens }),
    };
    let error = |table, block_tokens, tokens| {
        let rows = paged(table, block_tokens);
        import(&layout, 0, tokens, &rows, &rows).unwrap_err()
    };
    assert!(
        matches!(error(&[0, 1], 0, 4), Error::Parameter { what: "tokens per block", given, .. } if given == "0")
    );
    // Blocks of no tokens are refused even where nothing is asked for.
    assert!(matches!(error(&[], 0, 0), Error::Parameter { .. }));
    assert!(matches!(
        error(&[1], 2, 3),
        Error::Length {
            what: "block table",
            given: 1,
            needed: 2
        }
    ));
    let last = paged(&[1, 0], 2);
    assert_eq!(import(&layout, 0, 4, &last, &last).unwrap().len(), 1);
}

#[test]
fn rows_of_another_scheme_are_named_on_either_side() {
    let (f16, layout) = plain("f16");
    let (bf16, _) = plain("bf16");
    let bytes = [0; 2 * 128];
    let of = |format| ExternalRows {
        format,
        rows: StridedRows::bsnh(&bytes, &[], 2, 1, 128, 0),
        blocks: None,
    };
    for (k, v) in [(bf16, f16), (f16, bf16)] {
        let error = import(&layout, 0, 1, &of(k), &of(v)).unwrap_err();
        assert!(matches!(error, Error::RowScheme { .. }), "{error}");
    }
    let pages = import(&layout, 0, 1, &of(f16), &of(f16)).unwrap();
    assert!(export(&layout, &pages, 1, Side::K, bf16, Order::Bnsh).is_err());
}

#[test]
fn damaged_and_missing_pages_give_no_rows_and_no_values() {
    let (format, layout) = plain("int8-plain");
    let mut pages = vec![vec![0; layout.page_bytes()]; 2];
    let out = |pages: &[Vec<u8>], tokens| {
        let rows = export(&layout, pages, tokens, Side::V, format, Order::Bsnh);
        let values = dequantize(&layout, pages, tokens, &[], &[]);
        (rows.err(), values.err())
    };
    assert!(matches!(out(&pages, 70), (None, None)));
    for (pages, tokens, name) in [
        (&pages[..1], 70, "pages"),
        (&pages[..], 64, "pages"),
        (&[pages[0].clone(), vec![0; 3]][..], 70, "page"),
    ] {
        let (rows, values) = out(pages, tokens);
        for error in [rows.unwrap(), values.unwrap()] {
            assert!(
                matches!(error, Error::Length { what, .. } if what == name),
                "{error}"
            );
        }
    }
    // A NaN among K's scales, though V's rows are asked for.
    let at = layout.k_params().start + 2 * 5;
    pages[1][at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes());
    let (rows, values) = out(&pages, 70);
    for error in [rows.unwrap(), values.unwrap()] {
        assert!(
            matches!(error, Error::BadBytes { what: "scale", .. }),
            "{error}"
        );
    }
    assert!(matches!(out(&pages, 69), (None, None)));
}

/// `[tokens, heads, dim]`: values that name their token, head, dim and side.
#[test]
fn values_come_back_by_token_head_and_side() {
    let (format, layout) = plain("f16");
    let (tokens, heads, dim) = (70, 2, 64);
    let value = |side: usize, t: usize, head: usize, d: usize| -> f32 {
        (side * 1024 + t * 8 + head * 4) as f32 + d as f32 / 16.0 - 900.0
    };
    let sides = [0, 1].map(|side| -> Exported {
        let codes = (0..heads).flat_map(|head| (0..tokens).map(move |t| (head, t)));
        let codes = codes.flat_map(|(head, t)| (0..dim).map(move |d| (head, t, d)));
        let codes =
            codes.flat_map(|(head, t, d)| f16::from_f32(value(side, t, head, d)).to_le_bytes());
        Exported {
            codes: codes.collect(),
            scales: Vec::new(),
        }
    });
    let of = |side: usize| ExternalRows {
        format,
        rows: StridedRows::bnsh(&sides[side].codes, &[], heads, tokens, 2 * dim, 0),
        blocks: None,
    };
    let pages = import(&layout, 0, tokens, &of(0), &of(1)).unwrap();
    let found = dequantize(&layout, &pages, tokens, &[], &[]).unwrap();
    for (side, found) in found.iter().enumerate() {
        assert_eq!(found.len(), tokens * heads * dim);
        for (i, x) in found.iter().enumerate() {
            let (t, head, d) = (i / dim / heads, i / dim % heads, i % dim);
            let exact = f16::from_f32(value(side, t, head, d)).to_f32();
            assert_eq!(*x, exact, "side {side}, token {t}, head {head}, dim {d}");
        }
    }
    for (side, rows) in [Side::K, Side::V].into_iter().zip(&sides) {
        let out = export(&layout, &pages, tokens, side, format, Order::Bnsh).unwrap();
        assert_eq!(&out, rows);
    }
}
