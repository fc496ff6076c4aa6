//! What each format costs on real data: `attn run`'s figures, held to each format's limits.

use attn_conformance::oracle;
use attn_core::KvFormat;
use attn_cpu::CpuBackend;
use rstest::rstest;

use crate::layers::{decode, layers};

fn relative(error: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (e, n) = error.fold((0.0, 0.0), |(e, n), (got, want)| {
        (e + (got - want).powi(2), n + want * want)
    });
    (e / n).sqrt()
}

/// Limits: 1.2 times the worst of seven equally valid quantizers of the format on these tensors, over the layers.
#[rstest]
#[case("int8", 0.019)]
#[case("int8-g32", 0.015)]
#[case("int8/int4-g1", 0.086)]
#[case("int4", 0.121)]
#[case("int4-g4", 0.141)]
#[case("int4-g1", 0.211)]
#[case("bf16", 0.006)]
#[case("f16", 1e-5)]
fn real_layers_stay_within_the_formats_error(#[case] format: &str, #[case] limit: f64) {
    let format: KvFormat = format.parse().unwrap();
    let mut pairs = Vec::new();
    for layer in layers() {
        let (problem, cache, out, _) = decode(&CpuBackend::new(), format, &layer);
        let (exact, _) = oracle::attend(&problem, &cache, &layer.q);
        let arithmetic = relative(out.iter().zip(&exact).map(|(a, b)| (f64::from(*a), *b)));
        let allowed = if format.is_integer() { 3.1e-4 } else { 2e-6 };
        println!(
            "layer {} {format}: arithmetic error {arithmetic:.2e}",
            layer.name
        );
        assert!(
            arithmetic <= allowed,
            "{format} layer {}: arithmetic error {arithmetic:e} > {allowed:e}",
            layer.name
        );
        pairs.extend(out.into_iter().zip(layer.out));
    }
    let error = relative(pairs.iter().map(|(a, b)| (f64::from(*a), f64::from(*b))));
    println!("{format}: output error {:.3} %", error * 100.0);
    assert!(error <= limit, "{format}: {error} > {limit}");
}
