//! Rows of other engines, byte by byte: their quantizers where formulas branch, and values that no row may have.

use attn_core::{
    ElementIndex, Error, KvFormat, PageLayout, Scheme, StridedRows,
    convert::{
        ExternalRows, Order, RowFormat, Side, export, import,
        rows::{fbgemm_int4_row, q4_0_row, q8_0_row},
    },
};
use half::f16;
use rstest::rstest;

/// One token of one head, as K and V.
fn import_row(
    format: RowFormat,
    dim: usize,
    row: &[u8],
    scales: &[u16],
) -> Result<(PageLayout, Vec<Vec<u8>>), Error> {
    let scheme = format.scheme(dim)?;
    let layout = PageLayout::new(KvFormat::same(scheme), dim, 64, 1)?;
    let rows = StridedRows::bsnh(row, scales, 1, 1, row.len(), scales.len());
    let external = ExternalRows {
        format,
        rows,
        blocks: None,
    };
    Ok((layout, import(&layout, 0, 1, &external, &external)?))
}

fn bad(found: Result<(PageLayout, Vec<Vec<u8>>), Error>) -> Option<&'static str> {
    match found {
        Ok(_) => None,
        Err(Error::BadBytes { what, .. }) => Some(what),
        Err(other) => panic!("{other}"),
    }
}

#[rstest]
#[case("f16", &[0x0000, 0x7bff, 0xfbff, 0x0400, 0x3c01], &[0x7c00, 0x7c01, 0xfc00, 0x7e00, 0xffff])]
#[case("bf16", &[0x0000, 0x5880, 0xd880, 0x0001], &[0x5881, 0xd881, 0x7f80, 0x7fc0, 0xff80])]
#[case("fp8", &[0x00, 0x7e, 0xfe, 0x80, 0x78], &[0x7f, 0xff])]
#[case("int8-plain", &[0x00, 0x7f, 0x81, 0xff], &[0x80])]
fn codes_that_no_quantizer_writes_are_refused(
    #[case] name: &str,
    #[case] good: &[u16],
    #[case] refused: &[u16],
) {
    let scheme: Scheme = name.parse().unwrap();
    let format = RowFormat::Plain(scheme);
    let width = scheme.code_bits() / 8;
    let scales: &[u16] = if format.scales_outside() {
        &[0x7bff]
    } else {
        &[]
    };
    for (codes, expected) in [(good, None), (refused, Some("code"))] {
        for code in codes {
            let mut row = vec![0; 64 * width];
            row[63 * width..].copy_from_slice(&code.to_le_bytes()[..width]);
            let found = bad(import_row(format, 64, &row, scales));
            assert_eq!(found, expected, "{name} {code:#x}");
        }
    }
}

#[test]
fn parameters_that_no_quantizer_writes_are_refused() {
    let row = [1; 64];
    let int8 = RowFormat::Plain("int8-plain".parse().unwrap());
    for (scale, expected) in [
        (0x0000, None),
        (0x7bff, None),
        (0x7c00, Some("scale")),
        (0x7e00, Some("scale")),
        (0x8000, Some("scale")),
        (0xbc00, Some("scale")),
    ] {
        assert_eq!(
            bad(import_row(int8, 64, &row, &[scale])),
            expected,
            "{scale:#x}"
        );
    }
    for (scale, shift, expected) in [
        (0x3c00u16, 0xfbffu16, None),
        (0x3c00, 0x7c00, Some("shift")),
        (0x3c00, 0xfe00, Some("shift")),
        (0x7c00, 0x0000, Some("scale")),
    ] {
        let mut row = [0x21; 36];
        row[..2].copy_from_slice(&scale.to_le_bytes());
        row[2..4].copy_from_slice(&shift.to_le_bytes());
        let found = bad(import_row(RowFormat::FbgemmInt4(1), 64, &row, &[]));
        assert_eq!(found, expected, "{scale:#x} {shift:#x}");
        // One of two groups is enough.
        let row = [&[0; 4], &row[..]].concat();
        let found = bad(import_row(RowFormat::FbgemmInt4(2), 64, &row, &[]));
        assert_eq!(found, expected, "{scale:#x} {shift:#x}");
    }
}

#[test]
fn q4_0_has_the_head_dims_whose_groups_int4_has() {
    for (dim, groups) in [
        (64, Some(2)),
        (128, Some(4)),
        (256, Some(8)),
        (96, None),
        (192, None),
    ] {
        let found = RowFormat::Q4_0.scheme(dim);
        let name = groups.map(|groups| format!("int4-g{groups}"));
        assert_eq!(found.ok().map(|scheme| scheme.to_string()), name, "{dim}");
    }
}

/// d is 0 of either sign, and as large as a shift of f16 allows; further ones are refused.
#[test]
fn q4_0_scales_of_every_sign_and_size_come_back_or_are_refused() {
    let row = |d: f16| -> Vec<u8> {
        let group = |first: u8| {
            let codes = (0..16u8).map(move |i| first.wrapping_add(i.wrapping_mul(37)));
            d.to_le_bytes().into_iter().chain(codes)
        };
        group(3).chain(group(200)).collect()
    };
    for d in [0.0, -0.0, 1.0, -1.0, 8188.0, -9352.0, 6e-8, -6e-8] {
        let bytes = row(f16::from_f32(d));
        let (layout, pages) = import_row(RowFormat::Q4_0, 64, &bytes, &[]).unwrap();
        let out = export(&layout, &pages, 1, Side::V, RowFormat::Q4_0, Order::Bnsh).unwrap();
        assert_eq!(out.codes, bytes, "{d}");
    }
    for d in [8192.0, -9360.0, 65504.0, -65504.0, f32::INFINITY, f32::NAN] {
        let found = import_row(RowFormat::Q4_0, 64, &row(f16::from_f32(d)), &[]);
        assert_eq!(bad(found), Some("d"), "{d}");
    }
}

#[test]
fn fbgemm_rows_are_of_known_dims_and_groups() {
    for (len, groups, name) in [
        (0, 1, "head_dim"),
        (72, 1, "head_dim"),
        (64, 0, "format"),
        (64, 3, "format"),
        (80, 2, "format"),
    ] {
        let mut row = vec![7; 4 * groups as usize + len / 2];
        let error = fbgemm_int4_row(&vec![1.0; len], groups, &mut row).unwrap_err();
        assert!(
            matches!(error, Error::Parameter { what, .. } if what == name),
            "{error}"
        );
        assert!(row.iter().all(|byte| *byte == 7));
    }
}

/// `15 / (15·scale + 1e-8)`: where the span is as small as that, it decides the codes.
#[test]
fn fbgemm_divides_by_a_little_more_than_the_span() {
    let x: Vec<f32> = (0..64).map(|i| i as f32 * 1e-9).collect();
    let mut row = [0; 36];
    fbgemm_int4_row(&x, 1, &mut row).unwrap();
    for (i, x) in x.iter().enumerate() {
        let code = row[4 + i / 2] >> (i % 2 * 4) & 15;
        let exact = f64::from(*x) * 15.0 / (63e-9 + 1e-8);
        assert!(
            (f64::from(code) - exact).abs() <= 0.501,
            "{i}: {code}, {exact}"
        );
    }
    assert_eq!(row[35] >> 4, 13);
}

#[test]
fn q8_0_codes_are_whole_numbers_of_d() {
    let code_of = |x: [f32; 2]| {
        let mut values = [0.0; 32];
        (values[4], values[31]) = (x[0], x[1]);
        let mut row = [0x55; 34];
        q8_0_row(&values, &mut row).unwrap();
        let d = f16::from_le_bytes([row[0], row[1]]);
        (d.to_f32(), row[2 + 4] as i8, row[2 + 31] as i8)
    };
    assert_eq!(code_of([127.0, -3.5]), (1.0, 127, -4));
    assert_eq!(code_of([2.5, -254.0]), (2.0, 1, -127));
    assert_eq!(code_of([0.0, 0.0]), (0.0, 0, 0));
    // d underflows, and so do the values.
    assert_eq!(code_of([1e-45, -1e-45]), (0.0, 0, 0));
}

#[test]
fn q4_0_takes_its_sign_from_the_first_of_the_largest() {
    let row_of = |x: [f32; 2]| {
        let mut values = [0.0; 32];
        (values[0], values[16]) = (x[0], x[1]);
        let mut row = [0x55; 18];
        q4_0_row(&values, &mut row).unwrap();
        let d = f16::from_le_bytes([row[0], row[1]]).to_f32();
        (d, row[2] & 15, row[2] >> 4)
    };
    assert_eq!(row_of([8.0, -8.0]), (-1.0, 0, 15));
    assert_eq!(row_of([-8.0, 8.0]), (1.0, 0, 15));
    assert_eq!(row_of([-8.0, 3.0]), (1.0, 0, 11));
    assert_eq!(row_of([1.0, 16.0]), (-2.0, 8, 0));
    let (d, low, high) = row_of([0.0, 0.0]);
    assert_eq!((d, d.is_sign_negative(), low, high), (0.0, true, 8, 8));
    // Smaller than any d.
    assert_eq!(row_of([-1e-45, 0.0]).1, 8);
}

type Quantize = fn(&[f32], &mut [u8]) -> Result<(), Error>;

#[test]
fn rows_of_other_lengths_and_values_are_named() {
    let quantizers: [(Quantize, usize); 3] = [
        (|x, row| fbgemm_int4_row(x, 1, row), 36),
        (q8_0_row, 68),
        (q4_0_row, 36),
    ];
    for (quantize, bytes) in quantizers {
        let mut x = [1.0; 64];
        for given in [0, bytes - 1, bytes + 1, 2 * bytes] {
            let mut row = vec![7; given];
            let error = quantize(&x, &mut row).unwrap_err();
            assert!(
                matches!(error, Error::Length { what: "row", given: g, needed } if g == given && needed == bytes),
                "{error}"
            );
            assert!(row.iter().all(|byte| *byte == 7));
        }
        x[40] = f32::NAN;
        let error = quantize(&x, &mut vec![0; bytes]).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NotFinite {
                    what: "x",
                    at: ElementIndex::Flat(40),
                    ..
                }
            ),
            "{error}"
        );
        x[40] = 1.0;
        quantize(&x, &mut vec![0; bytes]).unwrap();
    }
}

/// Kills rows that are written group by group, up to the one that is refused.
#[test]
fn a_row_of_which_one_group_is_refused_is_left_as_it_was() {
    let quantizers: [(Quantize, usize); 3] = [
        (|x, row| fbgemm_int4_row(x, 2, row), 40),
        (q8_0_row, 68),
        (q4_0_row, 36),
    ];
    for (quantize, bytes) in quantizers {
        let mut x = [1.0; 64];
        x[40] = 1e30;
        let mut row = vec![7; bytes];
        let error = quantize(&x, &mut row).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{error}");
        assert_eq!(row, vec![7; bytes]);
        x[40] = 1.0;
        quantize(&x, &mut row).unwrap();
    }
}
