//! Other engines' caches go in and come out unchanged, and mean what they meant.

use attn_conformance::noise::Noise;
use attn_core::{
    CacheConfig, Error, Heads, HostPages, Int8Scale, KvCache, KvFormat, PageLayout, Scheme,
    StridedRows,
    convert::{
        Blocks, Exported, ExternalRows, Order, RowFormat, Side, dequantize, export, import,
        rows::{fbgemm_int4_row, q4_0_row, q8_0_row},
    },
};
use half::f16;
use proptest::prelude::*;

const HEADS: usize = 2;

fn config(scheme: Scheme, head_dim: usize, tokens: usize) -> CacheConfig {
    let mut config =
        CacheConfig::builder(KvFormat::same(scheme), Heads::new(HEADS, HEADS, head_dim))
            .centres(false)
            .unit_tensor_scales()
            .sequences(1)
            .max_len(tokens)
            .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.iter_mut().for_each(|s| *s = 0.25);
    }
    config
}

/// Rows side by side in one order, for one sequence.
fn external(
    format: RowFormat,
    rows: &Exported,
    order: Order,
    dim: usize,
    tokens: usize,
) -> ExternalRows<'_> {
    let groups = rows.scales.len() / (tokens * HEADS).max(1);
    let make = match order {
        Order::Bnsh => StridedRows::bnsh,
        Order::Bsnh => StridedRows::bsnh,
    };
    let rows = make(
        &rows.codes,
        &rows.scales,
        HEADS,
        tokens,
        format.row_bytes(dim),
        groups,
    );
    ExternalRows {
        format,
        rows,
        blocks: None,
    }
}

/// In, out again, and into a cache and back: the same bytes each time. Returns the pages' K values.
fn round_trip(format: RowFormat, dim: usize, tokens: usize, rows: &Exported) -> Vec<f32> {
    let config = config(format.scheme(dim).unwrap(), dim, tokens);
    let layout = config.layout().unwrap();
    let mut values = Vec::new();
    for order in [Order::Bnsh, Order::Bsnh] {
        let theirs = external(format, rows, order, dim, tokens);
        let pages = import(&layout, 0, tokens, &theirs, &theirs).unwrap();
        for side in [Side::K, Side::V] {
            let out = export(&layout, &pages, tokens, side, format, order).unwrap();
            assert_eq!(&out, rows, "{format:?} {order:?} {side:?}");
        }
        let mut cache =
            KvCache::new(config.clone(), Box::new(HostPages::new(&config).unwrap())).unwrap();
        cache.restore_pages(0, tokens, &pages).unwrap();
        assert_eq!(cache.read_back(0).unwrap(), pages);
        let [k, v] = dequantize(
            &layout,
            &pages,
            tokens,
            &config.k_tensor_scales,
            &config.v_tensor_scales,
        )
        .unwrap();
        assert_eq!(k, v);
        values = k;
    }
    values
}

fn numbers(n: usize) -> impl Strategy<Value = Vec<f32>> {
    let number = prop_oneof![8 => -9f32..9.0, 1 => Just(0.0), 1 => -4e4f32..4e4, 1 => Just(1e-40)];
    prop::collection::vec(number, n)
}

fn rows_of(
    x: &[f32],
    dim: usize,
    format: RowFormat,
    quantize: impl Fn(&[f32], &mut [u8]),
) -> Exported {
    let mut codes = vec![0; x.len() / dim * format.row_bytes(dim)];
    for (x, row) in x
        .chunks_exact(dim)
        .zip(codes.chunks_exact_mut(format.row_bytes(dim)))
    {
        quantize(x, row);
    }
    Exported {
        codes,
        scales: Vec::new(),
    }
}

/// Largest and smallest of a slice.
fn extremes(x: &[f32]) -> (f32, f32) {
    x.iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), v| {
            (a.min(*v), b.max(*v))
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fbgemm_rows_come_back_and_stay_near_their_values(
        x in numbers(6 * 128),
        groups in prop::sample::select(vec![1u8, 2, 4, 8]),
    ) {
        let format = RowFormat::FbgemmInt4(groups);
        let rows = rows_of(&x, 128, format, |x, row| fbgemm_int4_row(x, groups, row).unwrap());
        prop_assert_eq!(rows.codes.len(), 6 * (64 + 4 * groups as usize));
        // BSNH order is the order of the values.
        let values = round_trip(format, 128, 3, &rows);
        let len = 128 / groups as usize;
        for (x, back) in x.chunks_exact(len).zip(values.chunks_exact(len)) {
            let (lo, hi) = extremes(x);
            // Half a step, 15 steps of a scale rounded to f16, a shift rounded to f16 (or below its least).
            let scale = (hi - lo) / 15.0;
            let slack = scale * (0.5 + 15.0 / 2048.0) + lo.abs() / 2048.0 + 16.0 * 3e-8;
            for (x, back) in x.iter().zip(back) {
                prop_assert!((x - back).abs() <= slack * 1.0001, "{} {} {}", x, back, slack);
            }
        }
    }

    #[test]
    fn q8_0_rows_come_back_and_stay_near_their_values(x in numbers(6 * 64)) {
        let rows = rows_of(&x, 64, RowFormat::Q8_0, |x, row| q8_0_row(x, row).unwrap());
        let values = round_trip(RowFormat::Q8_0, 64, 3, &rows);
        for (x, back) in x.chunks_exact(32).zip(values.chunks_exact(32)) {
            let (lo, hi) = extremes(x);
            let d = hi.max(-lo) / 127.0;
            let slack = d * (0.5 + 127.0 / 2048.0) + 127.0 * 3e-8;
            for (x, back) in x.iter().zip(back) {
                prop_assert!((x - back).abs() <= slack * 1.0001, "{} {} {}", x, back, slack);
            }
        }
    }

    #[test]
    fn q4_0_rows_come_back_and_mean_what_they_meant(x in numbers(6 * 128)) {
        let rows = rows_of(&x, 128, RowFormat::Q4_0, |x, row| q4_0_row(x, row).unwrap());
        let values = round_trip(RowFormat::Q4_0, 128, 3, &rows);
        for (row, back) in rows.codes.chunks_exact(18).zip(values.chunks_exact(32)) {
            let d = f16::from_le_bytes([row[0], row[1]]).to_f32();
            for (j, back) in back.iter().enumerate() {
                let byte = row[2 + j % 16];
                let u = if j < 16 { byte & 15 } else { byte >> 4 };
                let meant = d * (f32::from(u) - 8.0);
                let moved = if d < 0.0 { 7.0 * d.abs() / 2048.0 + 3e-8 } else { 0.0 };
                prop_assert!((meant - back).abs() <= moved, "{} {} {}", d, meant, back);
            }
        }
    }

    /// Any bytes that pass as rows come back as they were; d and scale of either sign and size.
    #[test]
    fn arbitrary_q4_0_bytes_come_back_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 72)) {
        let rows = Exported { codes: [&bytes[..], &bytes].concat(), scales: Vec::new() };
        let format = RowFormat::Q4_0;
        let layout = config(format.scheme(128).unwrap(), 128, 1)
            .layout()
            .unwrap();
        let theirs = external(format, &rows, Order::Bsnh, 128, 1);
        match import(&layout, 0, 1, &theirs, &theirs) {
            Ok(pages) => {
                let out = export(&layout, &pages, 1, Side::K, format, Order::Bsnh).unwrap();
                prop_assert_eq!(out, rows);
            }
            Err(Error::BadBytes { .. }) => {
                let beyond = bytes.chunks_exact(18).any(|row| {
                    let d = f16::from_le_bytes([row[0], row[1]]).to_f32();
                    !d.is_finite() || 8.0 * d > 65504.0 || -7.0 * d > 65504.0
                });
                prop_assert!(beyond);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn plain_rows_come_back(seed in any::<u64>(), which in 0usize..6, dim in prop::sample::select(vec![64usize, 96, 128])) {
        let scheme = Scheme::ALL[which];
        let format = RowFormat::Plain(scheme);
        let (tokens, row) = (70, format.row_bytes(dim));
        let mut noise = Noise::new(seed);
        let mut next = || noise.bits();
        let codes = match scheme {
            // Finite: exponents below the largest.
            Scheme::F16 | Scheme::Bf16 => (0..tokens * HEADS * dim).flat_map(|_| (next() as u16 & 0xbbff).to_le_bytes()).collect(),
            Scheme::Fp8E4m3 => (0..tokens * HEADS * row).map(|_| next() as u8 & 0xbf).collect(),
            _ => (0..tokens * HEADS * row).map(|_| ((next() % 255) as i64 - 127) as i8 as u8).collect(),
        };
        let groups = if format.scales_outside() { scheme.groups(dim).count() } else { 0 };
        let scales = (0..tokens * HEADS * groups).map(|_| (next() % 0x7c00) as u16).collect();
        round_trip(format, dim, tokens, &Exported { codes, scales });
    }
}

#[test]
fn a_block_table_gives_the_pages_of_a_contiguous_cache() {
    // vLLM's per-tensor fp8: [block, token, head, dim] in blocks of 16, block 3 first.
    let (dim, tokens, format) = (64, 40, RowFormat::Plain(Scheme::Fp8E4m3));
    let table = [3u32, 0, 2];
    let row = HEADS * dim;
    let code = |t: usize, i: usize| ((t * 31 + i * 7) % 0x7f) as u8;
    let straight: Vec<u8> = (0..tokens * row).map(|n| code(n / row, n % row)).collect();
    let mut blocks = vec![0xff; 4 * 16 * row];
    for (t, bytes) in straight.chunks_exact(row).enumerate() {
        let at = (table[t / 16] as usize * 16 + t % 16) * row;
        blocks[at..at + row].copy_from_slice(bytes);
    }
    let config = config(Scheme::Fp8E4m3, dim, tokens);
    let plain = Exported {
        codes: straight,
        scales: Vec::new(),
    };
    let want = external(format, &plain, Order::Bsnh, dim, tokens);
    let paged = ExternalRows {
        format,
        rows: StridedRows::bsnh(&blocks, &[], HEADS, 16, dim, 0),
        blocks: Some(Blocks {
            table: &table,
            tokens: 16,
        }),
    };
    let layout = config.layout().unwrap();
    let pages = import(&layout, 0, tokens, &paged, &paged).unwrap();
    assert_eq!(pages, import(&layout, 0, tokens, &want, &want).unwrap());
    let paged = ExternalRows {
        blocks: Some(Blocks {
            table: &table[..2],
            tokens: 16,
        }),
        ..paged
    };
    let short = import(&layout, 0, tokens, &paged, &paged).unwrap_err();
    assert!(
        matches!(
            short,
            Error::Length {
                what: "block table",
                given: 2,
                needed: 3
            }
        ),
        "{short}"
    );
}

#[test]
fn damaged_pages_are_refused_and_nothing_changes() {
    let scheme = Scheme::Int8(Int8Scale::Token);
    let config = config(scheme, 64, 10);
    let layout = config.layout().unwrap();
    let mut cache =
        KvCache::new(config.clone(), Box::new(HostPages::new(&config).unwrap())).unwrap();
    let mut pages = vec![vec![0u8; layout.page_bytes()]];
    let scale = layout.k_params().start + 2 * 9;
    // Minus one, NaN, infinity; and a code of -128.
    for bits in [0xbc00u16, 0x7e00, 0x7c00] {
        pages[0][scale..scale + 2].copy_from_slice(&bits.to_le_bytes());
        let error = cache.restore_pages(0, 10, &pages).unwrap_err();
        assert!(
            matches!(error, Error::BadBytes { what: "scale", .. }),
            "{error}"
        );
        // The tenth token's scale is not among the first nine's.
        layout.check_pages(&pages, 9).unwrap();
    }
    pages[0][scale..scale + 2].fill(0);
    pages[0][layout.v_codes().start] = 0x80;
    let error = cache.restore_pages(0, 10, &pages).unwrap_err();
    assert!(
        matches!(error, Error::BadBytes { what: "code", .. }),
        "{error}"
    );
    let error = cache.restore_pages(0, 65, &pages).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Length {
                what: "pages",
                given: 1,
                needed: 2
            }
        ),
        "{error}"
    );
    assert_eq!((cache.table().lens[0], cache.free_pages()), (0, 1));
}

#[test]
fn formats_without_a_counterpart_are_named() {
    for (format, dim) in [
        (RowFormat::Q4_0, 96),
        (RowFormat::Q8_0, 80),
        (RowFormat::FbgemmInt4(3), 96),
        (RowFormat::Plain(Scheme::Int4(1)), 64),
        (RowFormat::Plain(Scheme::RotatedInt8), 64),
        (RowFormat::Plain(KvFormat::INT4.k), 64),
    ] {
        assert!(
            matches!(format.scheme(dim), Err(Error::Parameter { .. })),
            "{format:?}"
        );
    }
    // A group whose shift is neither -8 nor -7 scales.
    let mut row = vec![0; RowFormat::FbgemmInt4(2).row_bytes(64)];
    fbgemm_int4_row(&(0..64).map(|i| i as f32).collect::<Vec<_>>(), 2, &mut row).unwrap();
    let rows = Exported {
        codes: [&row[..], &row].concat(),
        scales: Vec::new(),
    };
    let layout = config(Scheme::Int4(2), 64, 1).layout().unwrap();
    let theirs = external(RowFormat::FbgemmInt4(2), &rows, Order::Bsnh, 64, 1);
    let pages = import(&layout, 0, 1, &theirs, &theirs).unwrap();
    let error = export(&layout, &pages, 1, Side::V, RowFormat::Q4_0, Order::Bsnh).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Parameter {
                what: "int4 group",
                ..
            }
        ),
        "{error}"
    );
    let error = export(&layout, &pages, 1, Side::V, RowFormat::Q8_0, Order::Bsnh).unwrap_err();
    assert!(matches!(error, Error::RowScheme { .. }), "{error}");
}

#[test]
fn magnitudes_beyond_f16_are_refused_by_the_row_quantizers() {
    let x = [2e9f32; 32];
    let mut row = [0; 34];
    assert!(matches!(
        q8_0_row(&x, &mut row),
        Err(Error::Parameter { what: "d", .. })
    ));
    assert!(matches!(
        q4_0_row(&x, &mut row[..18]),
        Err(Error::Parameter { what: "d", .. })
    ));
    let x = [1e5f32; 64];
    let mut row = [0; 36];
    assert!(matches!(
        fbgemm_int4_row(&x, 1, &mut row),
        Err(Error::Parameter { what: "shift", .. })
    ));
    assert!(matches!(
        fbgemm_int4_row(&[f32::NAN; 64], 1, &mut row),
        Err(Error::NotFinite { .. })
    ));
    assert!(matches!(
        q8_0_row(&x[..32], &mut row[..10]),
        Err(Error::Length { .. })
    ));
}

#[test]
fn rows_that_are_not_there_are_refused_before_pages_are_made() {
    let format = RowFormat::Plain(Scheme::F16);
    let layout = config(Scheme::F16, 64, 1).layout().unwrap();
    let bytes = vec![0u8; 3 * HEADS * 128];
    let plain = |token_stride: usize| ExternalRows {
        format,
        rows: StridedRows {
            codes: &bytes,
            code_strides: [0, 128, token_stride],
            scales: &[],
            scale_strides: [0; 3],
        },
        blocks: None,
    };
    for tokens in [4, 1 << 32, 1 << 53, usize::MAX] {
        // Side by side, one row for all, and strides whose products wrap.
        for stride in [HEADS * 128, 0, 1 << 62, usize::MAX] {
            let rows = plain(stride);
            let error = import(&layout, 0, tokens, &rows, &rows).unwrap_err();
            assert!(
                matches!(error, Error::Length { what: "rows", .. }),
                "{error}"
            );
        }
    }
    let rows = plain(HEADS * 128);
    assert_eq!(import(&layout, 0, 3, &rows, &rows).unwrap().len(), 1);
    assert!(import(&layout, 0, 0, &rows, &rows).unwrap().is_empty());
    // The first stride is 0, so any sequence is the first.
    assert!(import(&layout, usize::MAX, 3, &rows, &rows).is_ok());
}

#[test]
fn blocks_without_tokens_and_short_tables_are_refused() {
    let format = RowFormat::Plain(Scheme::F16);
    let layout = config(Scheme::F16, 64, 1).layout().unwrap();
    let bytes = vec![0u8; 4 * HEADS * 128];
    let paged = |table, tokens| ExternalRows {
        format,
        rows: StridedRows {
            codes: &bytes,
            code_strides: [2 * HEADS * 128, 128, HEADS * 128],
            scales: &[],
            scale_strides: [0; 3],
        },
        blocks: Some(Blocks { table, tokens }),
    };
    let import = |table, block_tokens, tokens| {
        let rows = paged(table, block_tokens);
        import(&layout, 0, tokens, &rows, &rows)
    };
    assert!(import(&[1, 0], 2, 4).is_ok());
    for (table, block_tokens, name) in [
        (&[1, 0][..], 0, "tokens per block"),
        (&[1][..], 2, "block table"),
        (&[1, 2][..], 2, "rows"),
        (&[u32::MAX, 0][..], 2, "rows"),
    ] {
        let error = import(table, block_tokens, 4).unwrap_err();
        assert!(
            matches!(&error, Error::Parameter { what, .. } | Error::Length { what, .. } if *what == name),
            "{name}: {error}"
        );
    }
}

#[test]
fn layouts_are_made_of_what_pages_can_hold() {
    let new = PageLayout::new;
    let format = KvFormat::INT8;
    for page_size in [0, 15, 48, 256, usize::MAX] {
        assert!(new(format, 64, page_size, 1).is_err(), "{page_size}");
    }
    for head_dim in [0, 1, 63, 72, 504, usize::MAX] {
        assert!(new(format, head_dim, 64, 1).is_err(), "{head_dim}");
    }
    for heads in [0, 65537, usize::MAX] {
        assert!(new(format, 64, 64, heads).is_err(), "{heads}");
    }
    // 128 tokens of 256 dims in bf16 are 2^17 bytes a head: 2^14 heads are one byte too many.
    let bf16 = KvFormat::same(Scheme::Bf16);
    assert!(new(bf16, 256, 128, 1 << 14).is_err());
    let largest = new(bf16, 256, 128, (1 << 14) - 1).unwrap();
    assert_eq!(largest.page_bytes(), (1 << 31) - (1 << 17));
}

#[test]
fn static_scales_of_other_heads_are_refused() {
    let config = config(Scheme::Fp8E4m3, 64, 1);
    let layout = config.layout().unwrap();
    let pages = vec![vec![0; layout.page_bytes()]];
    let good = [0.25; HEADS];
    for bad in [
        &[0.25; 1][..],
        &[0.25; 3],
        &[0.0; 2],
        &[f32::NAN; 2],
        &[1e16; 2],
    ] {
        assert!(dequantize(&layout, &pages, 1, bad, &good).is_err());
        assert!(dequantize(&layout, &pages, 1, &good, bad).is_err());
    }
    assert!(dequantize(&layout, &pages, 1, &good, &good).is_ok());
}

#[test]
fn rows_that_are_no_whole_groups_are_refused() {
    for len in [0, 1, 31, 33, 40, 63] {
        let x = vec![1.0; len];
        for quantize in [q8_0_row, q4_0_row] {
            let mut row = vec![7; 68];
            let error = quantize(&x, &mut row).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Parameter {
                        what: "the length of a row",
                        ..
                    }
                ),
                "{error}"
            );
            assert!(row.iter().all(|b| *b == 7));
        }
        for groups in [0, 1, 2, 3, 255] {
            assert!(fbgemm_int4_row(&x, groups, &mut [0; 68]).is_err());
        }
    }
}

#[test]
fn rows_of_rotated_schemes_go_neither_in_nor_out() {
    let plain = RowFormat::Plain(Scheme::Int8(Int8Scale::Token));
    let fbgemm = RowFormat::FbgemmInt4(1);
    for name in [
        "int8",
        "int4",
        "int8/int4",
        "int8-plain/int4-w0",
        "int4/int8-plain",
    ] {
        let layout = PageLayout::new(name.parse().unwrap(), 64, 64, HEADS).unwrap();
        let pages = vec![vec![0; layout.page_bytes()]; layout.pages_of(1)];
        for (side, scheme) in [(Side::K, layout.format().k), (Side::V, layout.format().v)] {
            if !scheme.is_rotated() {
                assert!(export(&layout, &pages, 1, side, plain, Order::Bnsh).is_ok());
                continue;
            }
            for format in [plain, fbgemm, RowFormat::Plain(scheme)] {
                let error = export(&layout, &pages, 1, side, format, Order::Bnsh).unwrap_err();
                let text = error.to_string();
                assert!(text.contains("not rotated"), "{name}: {text}");
            }
        }
        let rows = Exported {
            codes: vec![0; HEADS * 64],
            scales: vec![0; HEADS],
        };
        let rows = external(plain, &rows, Order::Bnsh, 64, 1);
        let text = import(&layout, 0, 1, &rows, &rows).unwrap_err().to_string();
        assert!(
            text.contains("not rotated, such as int8-plain"),
            "{name}: {text}"
        );
    }
}
