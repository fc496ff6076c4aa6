//! What each format costs on real data: `attn run`'s figures, held to each format's limits.

use attn_conformance::oracle;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, Problem,
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

/// One layer of the bundled tensors: 2048 tokens of 3 KV heads, 8 query tokens of 9 heads, head_dim 64.
struct Layer {
    name: &'static str,
    q: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim]`, as the next.
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

fn layers() -> impl Iterator<Item = Layer> {
    let bytes = include_bytes!("../../crates/attn-cli/data/smollm2-decode.safetensors");
    let file = SafeTensors::deserialize(bytes).unwrap();
    ["00", "01", "07", "15", "22", "29"]
        .into_iter()
        .map(move |name| {
            let get = |what: &str| tensor(&file, &format!("layer{name}.{what}"));
            let by_token = |x: Vec<f32>| -> Vec<f32> {
                (0..2048)
                    .flat_map(|t| {
                        (0..3)
                            .flat_map(|h| x[(h * 2048 + t) * 64..][..64].to_vec())
                            .collect::<Vec<_>>()
                    })
                    .collect()
            };
            Layer {
                name,
                q: get("q"),
                k: by_token(get("k")),
                v: by_token(get("v")),
                out: get("out"),
            }
        })
}

/// One layer on one backend: its cache, the output and the log-sum-exps.
fn decode(
    backend: &dyn DecodeAttention,
    format: KvFormat,
    layer: &Layer,
) -> (Problem, KvCache, Vec<f32>, Vec<f32>) {
    let mut cache = backend
        .create_cache(
            &CacheConfig::builder(
                format,
                Heads {
                    q: 3,
                    kv: 3,
                    dim: 64,
                },
            )
            .sequences(1)
            .max_len(2048)
            .build(),
        )
        .unwrap();
    cache.append(0, &layer.k, &layer.v).unwrap();
    let mut problem = Problem::new(
        Heads {
            q: 9,
            kv: 3,
            dim: 64,
        },
        vec![2048],
    );
    problem.q_len = 8;
    let plan = backend.plan(&problem, format).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; layer.out.len()], vec![f32::NAN; 72]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &layer.q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    (problem, cache, out, lse)
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

/// What `attn run` decodes, on the other backends: pages and answers are the CPU's, byte for byte and bit for bit.
#[rstest]
fn real_layers_have_the_cpus_bits_elsewhere(
    #[values("cuda", "wgpu")] name: &str,
    #[values("int8", "int8-g32", "int8/int4-g1", "int4", "int4-g4")] format: &str,
) {
    let Some(backend) = crate::open_or_skip(name) else {
        return;
    };
    let format: KvFormat = format.parse().unwrap();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for layer in layers() {
        let (_, cache, out, lse) = decode(&CpuBackend::new(), format, &layer);
        let (_, theirs, their_out, their_lse) = decode(&*backend, format, &layer);
        let at = format!("{name}, {format}, layer {}", layer.name);
        assert!(
            cache.read_back(0).unwrap() == theirs.read_back(0).unwrap(),
            "{at}: pages"
        );
        assert!(bits(&out) == bits(&their_out), "{at}: out");
        assert!(bits(&lse) == bits(&their_lse), "{at}: lse");
    }
}
