//! What each format costs on real data: `attn run`'s figures, held to `tests/data`'s limits.

use attn_conformance::oracle;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, KvFormat, KvSource, Problem,
};
use attn_cpu::CpuBackend;
use half::f16;
use rstest::rstest;
use safetensors::SafeTensors;

fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap();
    match view.dtype() {
        safetensors::Dtype::F16 => view
            .data()
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        _ => view
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
    }
}

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
    let bytes = include_bytes!("../data/smollm2-decode.safetensors");
    let file = SafeTensors::deserialize(bytes).unwrap();
    let format: KvFormat = format.parse().unwrap();
    let backend = CpuBackend::new();
    let mut pairs = Vec::new();
    for layer in ["00", "01", "07", "15", "22", "29"] {
        let get = |what: &str| tensor(&file, &format!("layer{layer}.{what}"));
        let by_token = |x: Vec<f32>| -> Vec<f32> {
            (0..2048)
                .flat_map(|t| {
                    (0..3)
                        .flat_map(|h| x[(h * 2048 + t) * 64..][..64].to_vec())
                        .collect::<Vec<_>>()
                })
                .collect()
        };
        let mut cache = backend
            .create_cache(&CacheConfig::new(format, 3, 64, 1, 2048))
            .unwrap();
        cache
            .append(0, &by_token(get("k")), &by_token(get("v")))
            .unwrap();
        let mut problem = Problem::new(9, 3, 64, vec![2048]);
        problem.q_len = 8;
        let (q, want) = (get("q"), get("out"));
        let plan = backend.plan(&problem, format).unwrap();
        let (mut out, mut lse) = (vec![f32::NAN; want.len()], vec![f32::NAN; 72]);
        let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache)).unwrap();
        backend
            .decode(
                &step,
                &mut DecodeOutput::new(&problem, &mut out, &mut lse).unwrap(),
            )
            .unwrap();
        let (exact, _) = oracle::attend(&problem, &cache, &q);
        let arithmetic = relative(out.iter().zip(&exact).map(|(a, b)| (f64::from(*a), *b)));
        let allowed = if format.is_integer() { 3e-4 } else { 2e-6 };
        println!("layer {layer} {format}: arithmetic error {arithmetic:.2e}");
        assert!(
            arithmetic <= allowed,
            "{format} layer {layer}: arithmetic error {arithmetic:e} > {allowed:e}"
        );
        pairs.extend(out.into_iter().zip(want));
    }
    let error = relative(pairs.iter().map(|(a, b)| (f64::from(*a), f64::from(*b))));
    println!("{format}: output error {:.3} %", error * 100.0);
    assert!(error <= limit, "{format}: {error} > {limit}");
}
