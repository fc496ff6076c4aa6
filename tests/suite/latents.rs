//! Latents, whose V is the first elements of K: against caches that store both, and against attention in f64 over the rows themselves.

use attn_conformance::{noise::uniform, oracle};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvFormat, KvSource, Problem,
};
use attn_cpu::CpuBackend;
use rstest::rstest;

const TOKENS: usize = 300;

/// Outputs of one step over a cache of `k` and `v`, and the bytes of a token.
fn attend(heads: Heads, format: KvFormat, [k, v, q]: [&[f32]; 3]) -> (Vec<f32>, f64) {
    let backend = CpuBackend::new();
    let config = CacheConfig::builder(format, heads)
        .max_len(TOKENS)
        .unit_tensor_scales();
    let mut cache = backend
        .create_cache(&config.centres(false).build())
        .unwrap();
    cache.append(0, k, v).unwrap();
    let plan = backend
        .plan(&Problem::new(heads, [TOKENS]), format)
        .unwrap();
    let mut out = vec![0.0; heads.q * heads.dim.v];
    let mut step = DecodeStep::new(&plan, q, KvSource::Cache(&cache), &mut out).unwrap();
    backend.decode(&mut step).unwrap();
    (out, cache.layout().bytes_per_token())
}

/// The first elements of each row.
fn firsts(k: &[f32], dim: HeadDim) -> Vec<f32> {
    k.chunks_exact(dim.k)
        .flat_map(|row| &row[..dim.v])
        .copied()
        .collect()
}

/// Where V is all of K, both caches have the same codes, scales and rotation. Kills V's codes at another place, scales of another token, and outputs turned back by
/// other blocks.
#[rstest]
fn whole_rows_have_the_bits_of_two_copies(
    #[values("int8", "int8-plain", "bf16", "fp8")] scheme: &str,
    #[values(64, 80, 128, 512)] dim: usize,
) {
    let heads = Heads::new(6, 2, dim);
    let [k, q] = [(1, TOKENS * 2 * dim), (2, 6 * dim)].map(|(seed, n)| uniform(seed, 0..n));
    let both = attend(heads, scheme.parse().unwrap(), [&k, &k, &q]);
    let latents = format!("{scheme}-latents").parse().unwrap();
    let once = attend(heads, latents, [&k, &[], &q]);
    let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&both.0), bits(&once.0));
    assert_eq!(2.0 * once.1, both.1);
}

/// Widths of latents of models; the error is that of 8 bits.
#[rstest]
fn parts_of_rows_are_values(
    #[values("int8-latents", "int8-plain-latents", "bf16-latents", "fp8-latents")] format: KvFormat,
    #[values((576, 512), (320, 256), (192, 128))] dim: (usize, usize),
) {
    let heads = Heads::new(16, 1, dim);
    let [k, q] = [(3, TOKENS * dim.0), (4, 16 * dim.0)].map(|(seed, n)| uniform(seed, 0..n));
    let (out, bytes) = attend(heads, format, [&k, &[], &q]);
    let v = firsts(&k, heads.dim);
    let (exact, _) = oracle::attend_rows(&Problem::new(heads, [TOKENS]), &q, &k, &v);
    let pairs = out.iter().map(|x| f64::from(*x)).zip(exact);
    let (off, all) = pairs.fold((0.0, 0.0), |(off, all), (got, want)| {
        (off + (got - want).powi(2), all + want * want)
    });
    let error = (off / all).sqrt();
    assert!(error < 0.03, "{error}");
    // Two scales beside codes of 8 bits.
    let want = dim.0 * format.k.code_bits() / 8 + if format.is_integer() { 4 } else { 0 };
    assert_eq!(bytes, want as f64);
}

/// What no latents have is refused by name, before anything is made.
#[rstest]
#[case::values_are_wider("int8-latents", (128, 192))]
#[case::values_are_a_part_of_a_block("int8-latents", (256, 64))]
#[case::keys_are_more_than_twice_as_wide("int8-plain-latents", (192, 64))]
#[case::values_of_floats_are_wider("bf16-latents", (64, 128))]
fn dims_that_no_part_has_are_refused(#[case] format: KvFormat, #[case] dim: (usize, usize)) {
    let config = CacheConfig::builder(format, Heads::new(4, 1, dim)).build();
    let error = CpuBackend::new().create_cache(&config).err().unwrap();
    assert!(matches!(error, Error::Parameter { .. }), "{error}");
    assert!(error.to_string().contains("latents"), "{error}");
}

/// A format that no name gives is refused as those are that one could have; and so are scales of V's own, by which codes of K would be read.
#[test]
fn formats_and_scales_that_latents_have_not_are_refused() {
    let heads = Heads::new(4, 1, (192, 128));
    let refused = |format: KvFormat| {
        let config = CacheConfig::builder(format, heads).build();
        let error = CpuBackend::new().create_cache(&config).err().unwrap();
        assert!(error.to_string().contains("latents"), "{error}");
    };
    for (k, v) in [("int4", "int4"), ("int8-g32", "int8-g32"), ("bf16", "f16")] {
        let [k, v] = [k, v].map(|name| name.parse().unwrap());
        refused(KvFormat {
            k,
            v,
            latents: true,
        });
    }
    let fp8 = CacheConfig::builder("fp8-latents".parse().unwrap(), heads);
    let config = fp8.tensor_scales([0.5], [0.25]).build();
    let error = CpuBackend::new().create_cache(&config).err().unwrap();
    assert!(error.to_string().starts_with("v_scales is 0.25"), "{error}");
}

/// Schemes whose V is not made of K's bytes have no latents, and no tokens of V are taken beside those of K.
#[test]
fn other_formats_and_values_are_refused() {
    for name in [
        "int8-g32-latents",
        "int4-latents",
        "int8-tensor-latents",
        "int8-latents/int8",
    ] {
        assert!(name.parse::<KvFormat>().is_err(), "{name}");
    }
    let heads = Heads::new(4, 1, (576, 512));
    let config = CacheConfig::builder(KvFormat::INT8_LATENTS, heads).build();
    let mut cache = CpuBackend::new().create_cache(&config).unwrap();
    let error = cache
        .append(0, &[0.0; 576][..], &[0.0; 512][..])
        .unwrap_err();
    assert!(matches!(error, Error::Parameter { .. }), "{error}");
    assert!(error.to_string().contains("none beside latents"), "{error}");
    assert_eq!(cache.table().lens, [0]);
}
