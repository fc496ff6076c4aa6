//! The bundled layers of a model, and one decode of each.

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, Problem,
};
use half::f16;
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

/// One layer of the bundled tensors: 2048 tokens of 3 KV heads, 8 query tokens of 9 heads, head_dim 64.
pub struct Layer {
    pub name: &'static str,
    pub q: Vec<f32>,
    /// `[tokens, num_kv_heads, head_dim]`, as the next.
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub out: Vec<f32>,
}

pub fn layers() -> impl Iterator<Item = Layer> {
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
pub fn decode(
    backend: &dyn DecodeAttention,
    format: KvFormat,
    layer: &Layer,
) -> (Problem, KvCache, Vec<f32>, Vec<f32>) {
    let mut cache = backend
        .create_cache(
            &CacheConfig::builder(format, Heads::new(3, 3, 64))
                .unit_tensor_scales()
                .sequences(1)
                .max_len(2048)
                .build(),
        )
        .unwrap();
    cache.append(0, &layer.k, &layer.v).unwrap();
    let mut problem = Problem::new(Heads::new(9, 3, 64), vec![2048]);
    problem.q_lens = vec![8; problem.batch()];
    let plan = backend.plan(&problem, format).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; layer.out.len()], vec![f32::NAN; 72]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &layer.q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    (problem, cache, out, lse)
}
