//! The sizes that a cache's configuration gives and takes.

use attn_core::{CacheConfig, Error, Heads, HostPages, KvCache, KvFormat};
use rstest::rstest;

#[rstest]
#[case(KvFormat::INT8, 0, 0)]
#[case(KvFormat::INT8, 1, 1)]
#[case(KvFormat::INT8, 64, 1)]
#[case(KvFormat::INT8, 65, 2)]
#[case(KvFormat::INT4, 0, 0)]
#[case(KvFormat::INT4, 1, 2)]
#[case(KvFormat::INT4, 64, 2)]
#[case(KvFormat::INT4, 65, 4)]
#[case(KvFormat::INT4, 256, 8)]
#[case(KvFormat::INT4, 257, 10)]
#[case(KvFormat::INT8_INT4, 1000, 21)]
fn a_sequence_takes_whole_pages_and_those_of_its_residuals(
    #[case] format: KvFormat,
    #[case] tokens: usize,
    #[case] pages: usize,
) {
    let config = CacheConfig::builder(format, Heads::new(2, 2, 64))
        .sequences(3)
        .max_len(tokens)
        .build();
    assert_eq!((config.page_size, config.num_sequences), (64, 3));
    assert_eq!(config.pages_for(tokens), pages);
    assert_eq!(config.num_pages, 3 * pages);
    let bytes = config.layout().unwrap().page_bytes();
    assert_eq!(config.pool_bytes().unwrap(), 3 * pages * bytes);
}

#[test]
fn each_sequence_has_room_for_its_own_length() {
    let heads = Heads::new(4, 2, 64);
    let builder = || CacheConfig::builder(KvFormat::INT4, heads).page_size(16);
    let config = builder().lens([0, 17, 300]).build();
    let of = |len| builder().max_len(len).build().num_pages;
    assert_eq!(config.num_sequences, 3);
    assert_eq!(config.num_pages, of(17) + of(300));
    assert_eq!(builder().lens([5, 5]).pages(9).build().num_pages, 9);
    // What is said last holds.
    let config = builder().lens([17]).sequences(2).max_len(300).build();
    assert_eq!((config.num_sequences, config.num_pages), (2, 2 * of(300)));
    let most = builder().lens([usize::MAX, usize::MAX]).page_size(16);
    let most = most.build().num_pages as u128;
    assert!(most >= 2 * (usize::MAX as u128 / 16), "{most}");
    assert_eq!(
        builder().lens([usize::MAX; 40]).build().num_pages,
        usize::MAX
    );
}

#[test]
fn a_longer_sequence_than_any_cache_has_is_not_made_room_for() {
    let heads = Heads::new(1, 1, 64);
    let builder = || CacheConfig::builder(KvFormat::INT8, heads);
    let most = 1 << 20;
    builder().max_len(most).build().check().unwrap();
    builder().lens([3, most]).build().check().unwrap();
    // More pages than one sequence can have are those of sequences to come.
    builder().pages(most).build().check().unwrap();
    for config in [
        builder().max_len(most + 1).build(),
        builder().max_len(most + 1).pages(4).build(),
        builder().lens([most + 1, 3]).build(),
    ] {
        let error = config.check().unwrap_err();
        let found =
            matches!(&error, Error::Parameter { what: "max_len", given, .. } if given == "1048577");
        assert!(found, "{error}");
    }
}

#[test]
fn a_static_scale_is_given_or_asked_for_by_name() {
    let heads = Heads::new(3, 3, 64);
    let builder = |format: &str| {
        let builder = CacheConfig::builder(format.parse().unwrap(), heads);
        builder.layers(2).max_len(64)
    };
    for (format, side) in [
        ("fp8", "k_scales"),
        ("int8-tensor", "k_scales"),
        ("int8-tensor/int8", "k_scales"),
        ("int8/fp8", "v_scales"),
        ("bf16/int8-tensor", "v_scales"),
    ] {
        let config = builder(format).build();
        let all = [
            config.check().err(),
            config.pool_bytes().err(),
            HostPages::new(&config).err(),
        ];
        for error in all {
            let found = matches!(&error, Some(Error::MissingScales { what, needed: 6, .. }) if *what == side);
            assert!(found, "{format}: {error:?}");
        }
        builder(format)
            .unit_tensor_scales()
            .build()
            .check()
            .unwrap();
    }
    let config = builder("fp8/int8").unit_tensor_scales().build();
    assert_eq!(
        (config.k_tensor_scales, config.v_tensor_scales),
        (vec![1.0; 6], vec![])
    );
    for (format, k, v, said) in [
        (
            "fp8",
            3,
            2,
            "v_scales has 2 scales, but fp8 needs 6, one for each KV head of each layer",
        ),
        (
            "int8",
            0,
            1,
            "v_scales has 1 scale, but int8 has no static ones; leave them out",
        ),
        (
            "fp8/int8",
            6,
            3,
            "v_scales has 6 scales, but int8 has no static ones; leave them out",
        ),
    ] {
        let config = builder(format)
            .tensor_scales(vec![0.5; k], vec![0.5; v])
            .build();
        assert_eq!(config.check().unwrap_err().to_string(), said);
    }
}

#[test]
fn pages_and_sequences_end_where_the_text_says() {
    let with = |pages: usize, sequences: usize| {
        let mut config = CacheConfig::builder(KvFormat::INT8, Heads::new(1, 1, 64))
            .sequences(1)
            .max_len(1)
            .build();
        (config.num_pages, config.num_sequences) = (pages, sequences);
        config.check()
    };
    with(u32::MAX as usize, 1 << 24).unwrap();
    with(0, 0).unwrap();
    for (pages, sequences, name) in [
        (1 << 32, 1, "num_pages"),
        (1, (1 << 24) + 1, "num_sequences"),
    ] {
        let error = with(pages, sequences).unwrap_err();
        assert!(
            matches!(error, Error::Parameter { what, .. } if what == name),
            "{error}"
        );
    }
}

#[test]
fn a_cache_checks_its_own_configuration_whatever_its_store_was_made_from() {
    let good = CacheConfig::builder("fp8".parse().unwrap(), Heads::new(2, 2, 64))
        .unit_tensor_scales()
        .sequences(1)
        .max_len(64)
        .build();
    for scales in [vec![1.0], vec![1.0, f32::NAN], vec![1.0, 0.0]] {
        let store = HostPages::new(&good).unwrap();
        let mut config = good.clone();
        config.v_tensor_scales = scales;
        assert!(KvCache::new(config, Box::new(store)).is_err());
    }
}

#[test]
fn query_heads_that_no_step_can_have_are_refused_where_the_cache_is_described() {
    let config = |q, kv| {
        let dim = 64;
        CacheConfig::builder(KvFormat::INT8, Heads::new(q, kv, dim)).build()
    };
    for (q, kv) in [(1, 1), (128, 1), (32, 8), (1024, 8)] {
        config(q, kv).check().unwrap();
    }
    for (q, kv, said) in [
        (129, 1, "heads_per_kv is 129; allowed: 1 to 128"),
        (9, 2, "num_q_heads/num_kv_heads is 9/2"),
        (0, 2, "num_q_heads/num_kv_heads is 0/2"),
    ] {
        let refusal = config(q, kv).check().unwrap_err().to_string();
        assert!(refusal.starts_with(said), "{refusal}");
    }
}
