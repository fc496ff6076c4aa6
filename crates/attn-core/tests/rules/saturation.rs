//! Numbers beyond the range of a format: which ones they are, and how a cache counts them.

use attn_core::{
    Append, CacheConfig, Error, HeadDim, Heads, HostPages, Int8Scale, KvCache, KvFormat, Rows,
    Scheme,
};
use half::f16;
use proptest::prelude::*;
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 2,
    kv: 2,
    dim: HeadDim::same(64),
};
const ROW: usize = HEADS.kv * HEADS.dim.k;

const TENSOR: Scheme = Scheme::Int8(Int8Scale::Tensor);

/// Whether the code nearest to `x` is one that the scheme lacks, in f64, which holds the quotient of two f32 closely enough to round it.
fn saturates(scheme: Scheme, x: f32, scale: f32) -> bool {
    let quotient = f64::from(x.abs()) / f64::from(scale);
    match scheme {
        Scheme::Fp8E4m3 => quotient > 464.0,
        TENSOR => quotient.round_ties_even() > 127.0,
        Scheme::F16 => f16::from_f64(quotient).is_infinite(),
        _ => false,
    }
}

#[rstest]
#[case::fp8_ties_to_448(Scheme::Fp8E4m3, 1.0, 464.0)]
#[case::fp8_of_a_power_of_two(Scheme::Fp8E4m3, 0.03125, 14.5)]
#[case::int8_ties_to_128(TENSOR, 1.0, 127.5f32.next_down())]
#[case::f16_ties_to_infinity(Scheme::F16, 1.0, 65520.0f32.next_down())]
#[case::int8_with_scales_of_its_own(Scheme::RotatedInt8, 1.0, f32::MAX)]
#[case::bf16(Scheme::Bf16, 1.0, f32::MAX)]
fn a_range_ends_where_the_nearest_code_does(
    #[case] scheme: Scheme,
    #[case] scale: f32,
    #[case] range: f32,
) {
    assert_eq!(scheme.range(scale), range);
    assert!(!saturates(scheme, range, scale));
}

proptest! {
    #[test]
    fn ranges_are_those_of_the_rounding(scale in 1e-15f32..1e15, of in 0usize..2) {
        let scheme = [Scheme::Fp8E4m3, TENSOR][of];
        let range = scheme.range(scale);
        prop_assert!(!saturates(scheme, range, scale));
        prop_assert!(saturates(scheme, range.next_up(), scale));
        // The scale that a user finds for it takes the largest number.
        let largest = scale * scheme.largest_static_code().unwrap();
        prop_assert!(scheme.range(largest / scheme.largest_static_code().unwrap()) >= largest);
    }
}

fn cache_of(config: CacheConfig) -> KvCache {
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// A cache in which scales differ from head to head, from layer to layer, and from K to V.
fn cache(format: &str, layers: usize) -> KvCache {
    let format: KvFormat = format.parse().unwrap();
    let scales = |scheme: Scheme, first: f32| -> Vec<f32> {
        let count = if scheme.has_tensor_scale() {
            layers * HEADS.kv
        } else {
            0
        };
        (0..count).map(|i| first * (i + 1) as f32).collect()
    };
    let builder = CacheConfig::builder(format, HEADS).layers(layers);
    let builder = builder.sequences(2).max_len(200);
    cache_of(
        builder
            .tensor_scales(scales(format.k, 0.005), scales(format.v, 0.01))
            .build(),
    )
}

/// Numbers of many magnitudes; few are beyond 65504.
fn values(tokens: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| {
        let random = (i * 2_654_435_761 + seed * 40_503) % 1_000_003;
        let x = random as f32 / 250_000.0 - 2.0;
        if random.is_multiple_of(97) {
            40_000.0 * x
        } else {
            x
        }
    };
    (0..tokens * ROW).map(value).collect()
}

/// The numbers of K or of V that saturate, one by one.
fn counted(scheme: Scheme, scales: &[f32], x: &[f32]) -> u64 {
    let rows = x.chunks_exact(HEADS.dim.k).enumerate();
    let in_row = |(i, row): (usize, &[f32])| {
        let scale = scales.get(i % HEADS.kv).copied().unwrap_or(1.0);
        row.iter().filter(|x| saturates(scheme, **x, scale)).count() as u64
    };
    rows.map(in_row).sum()
}

#[rstest]
fn every_number_beyond_its_range_counts_once(
    #[values("fp8", "int8-tensor", "f16", "fp8/int8-tensor", "int8/fp8", "f16/int4")] format: &str,
    #[values(1, 3)] layers: usize,
) {
    let mut cache = cache(format, layers);
    let KvFormat {
        k: of_k, v: of_v, ..
    } = cache.config().format;
    let mut wanted = 0;
    for (sequence, tokens) in [(0, 70), (1, 1), (0, 3)] {
        cache.reserve(&[Append { sequence, tokens }]).unwrap();
        for layer in 0..layers {
            let (k, v) = (values(tokens, 2 * layer + 7), values(tokens, 2 * layer + 8));
            let [k_scales, v_scales] = cache.config().tensor_scales(layer);
            let (of_k, of_v) = (counted(of_k, k_scales, &k), counted(of_v, v_scales, &v));
            wanted += of_k + of_v;
            cache.write(layer, &k, &v).unwrap();
            assert_eq!(cache.saturated(), Some(wanted), "layer {layer}");
        }
    }
    assert!(wanted > 0, "some saturate");
    // What is taken back has been counted, and a copy has what it copies.
    let config = cache.config().clone();
    let mut copy = cache_of(config);
    copy.copy_from(&cache).unwrap();
    cache.free_sequence(0).unwrap();
    assert_eq!([cache.saturated(), copy.saturated()], [Some(wanted); 2]);
}

#[test]
fn strided_rows_and_rows_of_16_bits_are_counted_as_the_numbers_that_they_are() {
    let mut cache = cache("fp8", 1);
    let x = values(5, 3);
    let [k_scales, v_scales] = cache.config().tensor_scales(0);
    let wanted = counted(Scheme::Fp8E4m3, k_scales, &x) + counted(Scheme::Fp8E4m3, v_scales, &x);
    // Heads one behind the other, and gaps that no count may look at.
    let mut apart = vec![1e30; 2 * HEADS.kv * 5 * HEADS.dim.k];
    for (i, row) in x.chunks_exact(HEADS.dim.k).enumerate() {
        let at = (i % HEADS.kv * 5 + i / HEADS.kv) * 2 * HEADS.dim.k;
        apart[at..at + HEADS.dim.k].copy_from_slice(row);
    }
    let strides = [2 * HEADS.dim.k, 5 * 2 * HEADS.dim.k];
    let rows = Rows::strided(&apart, [5, HEADS.kv, HEADS.dim.k], strides).unwrap();
    cache.append(0, rows, rows).unwrap();
    assert_eq!(cache.saturated(), Some(wanted));
    // Both heads of K and of V end below 10.
    let tens = [f16::from_f32(10.0); ROW];
    cache.append(1, &tens, &tens).unwrap();
    assert_eq!(cache.saturated(), Some(wanted + 2 * ROW as u64));
}

#[test]
fn refused_appends_and_those_of_formats_without_an_end_count_nothing() {
    let mut ends = cache("fp8", 1);
    let mut bad = values(3, 1);
    bad[2 * ROW + 7] = f32::NAN;
    let refused = ends.append(0, &bad, &values(3, 2)).unwrap_err();
    assert!(
        matches!(refused, Error::NotFinite { what: "k", .. }),
        "{refused}"
    );
    let refused = ends
        .append(0, &values(5000, 1), &values(5000, 2))
        .unwrap_err();
    assert!(matches!(refused, Error::CacheFull { .. }), "{refused}");
    assert_eq!(ends.saturated(), Some(0));
    for format in ["int8", "bf16", "int4", "int8-g32"] {
        let mut cache = cache(format, 1);
        cache.append(0, &[1e12; ROW], &[1e12; ROW]).unwrap();
        assert_eq!(cache.saturated(), Some(0), "{format}");
    }
}

#[test]
fn numbers_that_only_a_device_sees_are_not_counted() {
    let one = [Append {
        sequence: 0,
        tokens: 1,
    }];
    for (format, counted) in [
        ("fp8", None),
        ("int8/f16", None),
        ("int8", Some(0)),
        ("bf16", Some(0)),
    ] {
        let mut cache = cache(format, 1);
        cache.append_with(&[], |_, _| Ok(())).unwrap();
        assert_eq!(cache.saturated(), Some(0), "{format}, nothing written");
        cache.append_with(&one, |_, _| Ok(())).unwrap();
        assert_eq!(cache.saturated(), counted, "{format}");
        // It stays unknown.
        cache.append(0, &[0.5; ROW], &[0.5; ROW]).unwrap();
        assert_eq!(cache.saturated(), counted, "{format}");
    }
}
