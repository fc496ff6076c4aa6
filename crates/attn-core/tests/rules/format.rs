//! Which schemes, head_dims and page sizes go together, and by which names.

use attn_core::{CacheConfig, Error, Heads, Int8Scale, KvFormat, Scheme, Window};
use rstest::rstest;

#[rstest]
#[case("f16", 16, 1, false, false)]
#[case("bf16", 16, 1, false, false)]
#[case("fp8", 8, 1, true, false)]
#[case("int8", 8, 1, false, true)]
#[case("int8-g32", 8, 4, false, true)]
#[case("int8-tensor", 8, 1, true, false)]
#[case("int4-g1", 4, 1, false, true)]
#[case("int4-g2", 4, 2, false, true)]
#[case("int4-g8", 4, 8, false, true)]
#[case("int8-plain", 8, 1, false, true)]
#[case("int4", 4, 1, false, true)]
#[case("int4-r2", 4, 2, false, true)]
#[case("int4-r8-w4", 4, 8, false, true)]
#[case("int4-w0", 4, 1, false, true)]
fn a_scheme_says_what_it_stores(
    #[case] name: &str,
    #[case] bits: usize,
    #[case] groups: usize,
    #[case] tensor_scale: bool,
    #[case] row_scales: bool,
) {
    let scheme: Scheme = name.parse().unwrap();
    assert_eq!(scheme.to_string(), name);
    assert_eq!(
        (scheme.code_bits(), scheme.groups(128).count()),
        (bits, groups)
    );
    assert_eq!(scheme.has_tensor_scale(), tensor_scale);
    assert_eq!(scheme.has_row_scales(), row_scales);
    assert_eq!(scheme.is_integer(), name.starts_with("int"));
}

#[rstest]
#[case("int8-g32", 96, true)]
#[case("int8-g32", 80, false)]
#[case("int4-g1", 80, true)]
#[case("int4-g4", 64, true)]
#[case("int4-g8", 64, false)]
#[case("int4-g8", 128, true)]
#[case("int4-g2", 80, false)]
#[case("int4-g2", 96, true)]
#[case("int4", 64, true)]
#[case("int4", 80, true)]
#[case("int4-r4", 64, true)]
#[case("int4-r8-w0", 64, false)]
#[case("int4-r2", 80, false)]
#[case("int8/int4-g8", 64, false)]
#[case("int4-r8/int8", 64, false)]
fn pairs_that_no_page_holds_are_refused(
    #[case] name: &str,
    #[case] head_dim: usize,
    #[case] allowed: bool,
) {
    let format: KvFormat = name.parse().unwrap();
    let found = format.check(head_dim);
    assert_eq!(found.is_ok(), allowed, "{found:?}");
}

#[test]
fn groups_of_int4_are_1_2_4_or_8() {
    for groups in 0..20 {
        for scheme in [Scheme::Int4(groups), rotated(groups, Window::Two)] {
            let found = scheme.check(256);
            assert_eq!(found.is_ok(), [1, 2, 4, 8].contains(&groups), "{groups}");
        }
    }
}

fn rotated(groups: u8, window: Window) -> Scheme {
    Scheme::RotatedInt4 { groups, window }
}

#[test]
fn names_are_one_scheme_or_two() {
    let (int8, int4) = (Scheme::RotatedInt8, rotated(1, Window::Two));
    let (plain, g1) = (Scheme::Int8(Int8Scale::Token), Scheme::Int4(1));
    for (name, k, v) in [
        ("int8", int8, int8),
        ("int4", int4, int4),
        ("int8/int4", int8, int4),
        ("int8-plain", plain, plain),
        ("bf16", Scheme::Bf16, Scheme::Bf16),
        ("int8-plain/int4-g1", plain, g1),
        (
            "int4-r2-w4/int4-w0",
            rotated(2, Window::Four),
            rotated(1, Window::None),
        ),
        (
            "int4-r8/int4-r4",
            rotated(8, Window::Two),
            rotated(4, Window::Two),
        ),
        ("fp8/f16", Scheme::Fp8E4m3, Scheme::F16),
    ] {
        let format: KvFormat = name.parse().unwrap();
        assert_eq!(format, KvFormat::new(k, v), "{name}");
        assert_eq!(format.to_string(), name);
        assert_eq!(format.is_integer(), k.is_integer() && v.is_integer());
    }
    let presets = [KvFormat::INT8, KvFormat::INT8_INT4, KvFormat::INT4];
    assert_eq!(
        presets.map(|f| f.to_string()),
        ["int8", "int8/int4", "int4"]
    );
    for name in [
        "",
        "int4/int5",
        "int8/",
        "/int8",
        "int8/int8/int8",
        "INT8",
        "int4-r1",
        "int4-r3",
        "int4-w2",
        "int4-w4-r2",
        "int4-channel",
        "int4-g3",
    ] {
        let error = name.parse::<KvFormat>().unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{name}: {error}");
    }
}

#[test]
fn every_scheme_has_a_name_of_its_own() {
    let mut names: Vec<String> = Scheme::ALL.iter().map(Scheme::to_string).collect();
    for (name, scheme) in names.iter().zip(Scheme::ALL) {
        assert_eq!(name.parse::<Scheme>().unwrap(), scheme);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), Scheme::ALL.len());
}

#[rstest]
#[case("int8", [false, true, false], 0)]
#[case("int8-plain", [false, false, false], 0)]
#[case("int4-g2", [true, false, false], 0)]
#[case("int4", [false, true, true], 2)]
#[case("int4-w0", [false, true, false], 0)]
#[case("int4-r4-w4", [false, true, true], 4)]
#[case("bf16", [false, false, false], 0)]
fn rotation_shifts_and_windows_belong_to_their_schemes(
    #[case] name: &str,
    #[case] flags: [bool; 3],
    #[case] tiles: usize,
) {
    let scheme: Scheme = name.parse().unwrap();
    let has_window = scheme.window() != Window::None;
    assert_eq!(
        [scheme.has_shifts(), scheme.is_rotated(), has_window],
        flags
    );
    assert_eq!(scheme.window().tiles(), tiles);
}

/// Tokens whose residuals are kept are the first 64, and twice the larger window, in whole pages, of which the last one may be open; of pages of 128 tokens a third
/// one where the window has two tiles, since two tiles of drafts and two of the window can lie in three.
#[rstest]
#[case("int8", 64, &[(1, 0), (1000, 0)])]
#[case("int4-w0", 64, &[(1, 0), (1000, 0)])]
#[case("int4", 16, &[(0, 0), (1, 1), (16, 1), (17, 2), (256, 16), (257, 17), (320, 20), (321, 20), (5000, 20)])]
#[case("int4", 64, &[(0, 0), (1, 1), (192, 3), (193, 4), (257, 5), (5000, 5)])]
#[case("int4", 128, &[(0, 0), (128, 1), (129, 2), (257, 3), (385, 4), (5000, 4)])]
#[case("int8/int4", 64, &[(64, 1), (5000, 5)])]
#[case("int4/int8", 64, &[(64, 1), (5000, 5)])]
#[case("int4/int4-w4", 64, &[(448, 7), (449, 8), (5000, 9)])]
#[case("int4-w4/int4", 32, &[(449, 15), (5000, 18)])]
#[case("int4-w4/int4-w0", 128, &[(5000, 5)])]
fn residual_pages_hold_the_first_tile_and_twice_the_larger_window(
    #[case] name: &str,
    #[case] page_size: usize,
    #[case] expected: &[(usize, usize)],
) {
    let format: KvFormat = name.parse().unwrap();
    for (tokens, pages) in expected {
        assert_eq!(
            format.residual_pages(page_size, *tokens, 0),
            *pages,
            "{tokens}"
        );
    }
}

/// Behind the pages of the first tile, the first home page whose residuals a sequence has, in a cache or outside of one.
fn first_page(page_size: usize, len: usize, residuals: usize) -> usize {
    let pages = len.div_ceil(page_size);
    let first = 64usize.div_ceil(page_size).min(pages);
    assert!(residuals >= first);
    pages - (residuals - first)
}

/// Whatever drafts are taken back, the residuals that an image has are there.
#[rstest]
fn an_images_residuals_are_there_whatever_goes_back(
    #[values("int4", "int8/int4-w4", "int4-r2-w4/int4")] name: &str,
    #[values(16, 32, 64, 128)] page_size: usize,
) {
    let format: KvFormat = name.parse().unwrap();
    let saved = |len| first_page(page_size, len, format.saved_residual_pages(page_size, len));
    for (max_q_len, len) in [1, 64, 65, 200]
        .into_iter()
        .flat_map(|q| (0..500).map(move |len| (q, len)))
    {
        // The newest 64 tokens can be queries, or be taken back.
        let read = format.first_residual_token(usize::saturating_sub(len, 64)) / page_size;
        let read = read.max(64usize.div_ceil(page_size));
        assert_eq!(saved(len), read.min(len.div_ceil(page_size)), "{len}");
        for drafts in [1, 2, 5, 63, 64, 65, 130, 200] {
            let (all, q_len) = (len + drafts, drafts.min(max_q_len));
            let residuals = format.residual_pages(page_size, all, q_len);
            let held = first_page(page_size, all, residuals);
            assert!(
                residuals <= format.max_residual_pages(page_size, max_q_len),
                "{all}"
            );
            let back = if drafts <= max_q_len.max(64) {
                drafts
            } else {
                64.min(all)
            };
            for left in all - back..=all {
                let is_short = left <= page_size.max(64);
                let is_held = is_short || held <= saved(left);
                assert!(is_held, "{len} + {drafts} - {}", all - left);
            }
        }
    }
}

/// The rule of `docs/arithmetic.md`, section 4. Kills one that leaves out the first tile, reads it so in other shards, or in schemes without a window.
#[test]
fn the_first_tile_and_the_window_are_read_fine() {
    for (name, tiles) in [
        ("int4", 2),
        ("int4-r4-w4", 4),
        ("int4-w0", 0),
        ("int8", 0),
        ("int4-g1", 0),
    ] {
        let scheme: Scheme = name.parse().unwrap();
        for (row, tile) in (0..9).flat_map(|row| (0..=row).map(move |tile| (row, tile))) {
            for before in [0, 1024] {
                let is_first = tile == 0 && before == 0 && tiles > 0;
                let fine = scheme.reads_fine(tile, row, before);
                assert_eq!(fine, is_first || row - tile < tiles, "{name} {row} {tile}");
            }
        }
    }
}

/// The first pages have slots of their own, the others share a ring whose length is a power of two. Kills a ring that takes in the first pages.
#[rstest]
#[case("int4", 16, 1, 4, 16)]
#[case("int4", 32, 64, 2, 8)]
#[case("int4", 64, 1, 1, 4)]
#[case("int4", 64, 300, 1, 16)]
#[case("int8/int4-w4", 128, 1, 1, 4)]
#[case("int4", 128, 1, 1, 4)]
fn slots_are_those_of_the_first_pages_and_a_ring(
    #[case] name: &str,
    #[case] page_size: usize,
    #[case] q_len: usize,
    #[case] first: usize,
    #[case] ring: usize,
) {
    let format: KvFormat = name.parse().unwrap();
    assert_eq!(format.first_residual_pages(page_size), first);
    let slots = format.residual_slots(page_size, q_len);
    assert_eq!(slots, first + ring);
    for page in 0..100 {
        let slot = format.residual_slot(page_size, slots, page);
        let expected = if page < first {
            page
        } else {
            first + page % ring
        };
        assert_eq!(slot, expected, "{page}");
    }
    let most = format.max_residual_pages(page_size, q_len) - first;
    let taken: std::collections::HashSet<usize> = (100..100 + most)
        .map(|page| format.residual_slot(page_size, slots, page))
        .collect();
    assert_eq!(taken.len(), most, "two of the last pages share a slot");
    for none in ["int8", "int4-w0", "bf16"] {
        let format: KvFormat = none.parse().unwrap();
        assert_eq!(format.first_residual_pages(page_size), 0);
        assert_eq!(format.residual_slots(page_size, q_len), 0);
    }
}

#[test]
fn unit_scales_are_set_for_the_schemes_that_have_static_ones() {
    for (name, k, v) in [
        ("fp8/int8", 3, 0),
        ("int8/int8-tensor", 0, 3),
        ("int8", 0, 0),
    ] {
        let config = CacheConfig::builder(name.parse().unwrap(), Heads::new(3, 3, 64))
            .unit_tensor_scales()
            .sequences(1)
            .max_len(64)
            .build();
        let found = (config.k_tensor_scales.len(), config.v_tensor_scales.len());
        assert_eq!(found, (k, v), "{name}");
        config.check().unwrap();
    }
}
