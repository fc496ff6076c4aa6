//! Which schemes, head_dims and page sizes go together, and by which names.

use attn_core::{CacheConfig, Error, Heads, Int4Scale, Int8Scale, KvFormat, Scheme};
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
#[case("int4-channel", 4, 1, false, true)]
fn a_scheme_says_what_it_stores(
    #[case] name: &str,
    #[case] bits: usize,
    #[case] groups: usize,
    #[case] tensor_scale: bool,
    #[case] row_scales: bool,
) {
    let scheme: Scheme = name.parse().unwrap();
    assert_eq!(scheme.to_string(), name);
    assert_eq!((scheme.code_bits(), scheme.groups(128)), (bits, groups));
    assert_eq!(scheme.has_tensor_scale(), tensor_scale);
    assert_eq!(scheme.has_row_scales(), row_scales);
    assert_eq!(scheme.is_integer(), name.starts_with("int"));
}

#[rstest]
#[case("int8-g32", 96, 16, true)]
#[case("int8-g32", 80, 16, false)]
#[case("int4-g1", 80, 16, true)]
#[case("int4-g4", 64, 16, true)]
#[case("int4-g8", 64, 16, false)]
#[case("int4-g8", 128, 16, true)]
#[case("int4-g2", 80, 16, false)]
#[case("int4-g2", 96, 16, true)]
#[case("int4-channel/int8", 64, 64, true)]
#[case("int4-channel/int8", 64, 128, true)]
#[case("int4-channel/int8", 64, 32, false)]
#[case("int8/int4-g8", 64, 64, false)]
#[case("int8/int4-channel", 64, 64, false)]
#[case("int4-channel", 64, 64, false)]
fn pairs_that_no_page_holds_are_refused(
    #[case] name: &str,
    #[case] head_dim: usize,
    #[case] page_size: usize,
    #[case] allowed: bool,
) {
    let format: KvFormat = name.parse().unwrap();
    let found = format.check(head_dim, page_size);
    assert_eq!(found.is_ok(), allowed, "{found:?}");
}

#[test]
fn groups_of_int4_are_1_2_4_or_8() {
    for groups in 0..20 {
        let found = Scheme::Int4(Int4Scale::Groups(groups)).check(256, 64);
        assert_eq!(found.is_ok(), [1, 2, 4, 8].contains(&groups), "{groups}");
    }
}

#[test]
fn names_are_one_scheme_two_or_a_preset() {
    let int8 = Scheme::Int8(Int8Scale::Token);
    let (channel, g1) = (Int4Scale::Channel, Int4Scale::Groups(1));
    let (channel, g1) = (Scheme::Int4(channel), Scheme::Int4(g1));
    for (name, k, v) in [
        ("int8", int8, int8),
        ("int4", channel, g1),
        ("bf16", Scheme::Bf16, Scheme::Bf16),
        ("int8/int4-g1", int8, g1),
        ("int4-channel/int8", channel, int8),
        ("fp8/f16", Scheme::Fp8E4m3, Scheme::F16),
    ] {
        let format: KvFormat = name.parse().unwrap();
        assert_eq!(format, KvFormat { k, v }, "{name}");
        assert_eq!(format.has_tail_page(), k == channel);
        assert_eq!(format.is_integer(), k.is_integer() && v.is_integer());
    }
    for name in ["", "int4/int5", "int8/", "/int8", "int8/int8/int8", "INT8"] {
        let error = name.parse::<KvFormat>().unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{name}: {error}");
    }
}

#[test]
fn static_scales_are_asked_of_the_schemes_that_have_them() {
    for (name, k, v) in [
        ("fp8/int8", 3, 0),
        ("int8/int8-tensor", 0, 3),
        ("int8", 0, 0),
    ] {
        let config = CacheConfig::builder(
            name.parse().unwrap(),
            Heads {
                q: 3,
                kv: 3,
                dim: 64,
            },
        )
        .sequences(1)
        .max_len(64)
        .build();
        let found = (config.k_tensor_scales.len(), config.v_tensor_scales.len());
        assert_eq!(found, (k, v), "{name}");
    }
}
