//! What each format costs on real data: `attn run`'s figures, held to each format's limits.

use attn_conformance::oracle::{self, Queries};
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

/// Limits of the output error against f64 attention over the file's tensors, and of the arithmetic error against f64 attention over the same
/// cache, both over all layers. That of int8 is the project's target; the others are 1.2 times what was measured, so that int4
/// whose first tile is read without residuals (2.9 % and 4.2 % in the presets) is beyond them.
#[rstest]
#[case("int8", 0.0145, 0.012)]
#[case("int8/int4", 0.019, 0.012)]
#[case("int4", 0.0346, 0.012)]
#[case("int4-r2", 0.0336, 0.012)]
#[case("int4-w4", 0.0291, 0.012)]
#[case("int4-w0", 0.20, 0.012)]
#[case("int8-plain", 0.023, 0.016)]
#[case("int8-g32", 0.021, 0.016)]
#[case("int8/int4-g1", 0.086, 0.012)]
#[case("int4-g4", 0.141, 0.016)]
#[case("int4-g1", 0.211, 0.016)]
#[case("bf16", 0.006, 2e-6)]
#[case("f16", 1e-5, 2e-6)]
fn real_layers_stay_within_the_formats_error(
    #[case] format: &str,
    #[case] limit: f64,
    #[case] arithmetic_limit: f64,
) {
    let format: KvFormat = format.parse().unwrap();
    let (mut pairs, mut arithmetic) = (Vec::new(), Vec::new());
    for layer in layers() {
        let (problem, cache, out, _) = decode(&CpuBackend::new(), format, &layer);
        let (exact, _) = oracle::attend(&problem, &cache, &layer.q, Queries::Exact);
        let of_cache: Vec<_> = out.iter().map(|x| f64::from(*x)).zip(exact).collect();
        let of_layer = relative(of_cache.iter().copied());
        println!("{format}, layer {}: {of_layer:.2e}", layer.name);
        arithmetic.extend(of_cache);
        let of_file = layer.out.into_iter().map(f64::from);
        pairs.extend(out.into_iter().map(f64::from).zip(of_file));
    }
    let [error, arithmetic] = [pairs, arithmetic].map(|pairs| relative(pairs.into_iter()));
    println!("{format}: output error {error:.5}, of the arithmetic {arithmetic:.2e}");
    assert!(error <= limit, "{format}: {error} > {limit}");
    assert!(
        arithmetic <= arithmetic_limit,
        "{format}: arithmetic error {arithmetic:e} > {arithmetic_limit:e}"
    );
}

/// Logits eight times as large make queries of 8 bits err by as much more.
#[rstest]
#[case("int8", 0.016)]
#[case("int4", 0.015)]
#[case("int8-plain", 0.048)]
fn logits_times_eight_stay_within_their_error(#[case] format: &str, #[case] limit: f64) {
    let format: KvFormat = format.parse().unwrap();
    let mut pairs = Vec::new();
    for mut layer in layers() {
        layer.q.iter_mut().for_each(|x| *x *= 8.0);
        let (problem, cache, out, _) = decode(&CpuBackend::new(), format, &layer);
        let (exact, _) = oracle::attend(&problem, &cache, &layer.q, Queries::Exact);
        pairs.extend(out.into_iter().map(f64::from).zip(exact));
    }
    let error = relative(pairs.into_iter());
    println!("{format}, logits times 8: arithmetic error {error:.2e}");
    assert!(error <= limit, "{format}: {error:e} > {limit:e}");
}
