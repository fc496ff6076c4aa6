//! The model: its random weights, its files, and a plain forward pass in f64.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::{collections::HashMap, fs, path::PathBuf};

use attn_conformance::noise::Noise;
use attn_llm::{Error, Kv, Model, Piece, Products, Tokenizer, Wanted};
use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use serde_json::Value;
use tempfile::TempDir;

pub const LAYERS: usize = 2;
pub const HIDDEN: usize = 128;
pub const FEED_FORWARD: usize = 192;
pub const HEADS: usize = 2;
pub const KV_HEADS: usize = 1;
pub const DIM: usize = 64;
pub const VOCAB: usize = 272;
pub const CONTEXT: usize = 512;
pub const BASE: f32 = 10_000.0;
pub const EPS: f32 = 1e-5;

/// Numbers in −1..1, the same on every run.
pub struct Random(Noise);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(Noise::new(seed))
    }

    pub fn next(&mut self) -> f32 {
        self.0.unit()
    }

    pub fn vector(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * size).collect()
    }
}

/// The weights under their GGUF names, `[outputs, inputs]`, with rows of Q and K for pairs of halves.
pub type Weights = HashMap<String, (Vec<usize>, Vec<f32>)>;

pub fn weights() -> Weights {
    let mut random = Random::new(7);
    let mut all = Weights::new();
    let mut add = |name: String, shape: &[usize], size: f32, middle: f32| {
        let n = shape.iter().product();
        let values = random.vector(n, size).iter().map(|x| x + middle).collect();
        all.insert(name, (shape.to_vec(), values));
    };
    add("token_embd.weight".into(), &[VOCAB, HIDDEN], 1.0, 0.0);
    add("output_norm.weight".into(), &[HIDDEN], 0.3, 1.0);
    for i in 0..LAYERS {
        let parts = [
            ("attn_q", HEADS * DIM, HIDDEN),
            ("attn_k", KV_HEADS * DIM, HIDDEN),
            ("attn_v", KV_HEADS * DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * DIM),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ];
        for (part, outputs, inputs) in parts {
            add(
                format!("blk.{i}.{part}.weight"),
                &[outputs, inputs],
                0.2,
                0.0,
            );
        }
        for part in ["attn_norm", "ffn_norm"] {
            add(format!("blk.{i}.{part}.weight"), &[HIDDEN], 0.3, 1.0);
        }
        for (part, n) in [("attn_q", HEADS * DIM), ("attn_k", KV_HEADS * DIM)] {
            add(format!("blk.{i}.{part}.bias"), &[n], 0.5, 0.0);
        }
        for part in ["attn_q_norm", "attn_k_norm"] {
            add(format!("blk.{i}.{part}.weight"), &[DIM], 0.3, 1.0);
        }
    }
    all
}

/// The weights with the parts that a kind of model has: those above are of Qwen 3.
pub fn weights_of(kind: &str) -> Weights {
    let mut all = weights();
    if kind != "qwen3" {
        all.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    }
    if kind == "mistral" {
        all.retain(|name, _| !name.ends_with(".bias"));
    }
    if kind == "qwen2" {
        let bias = Random::new(13).vector(KV_HEADS * DIM, 0.5);
        for i in 0..LAYERS {
            let bias = (vec![bias.len()], bias.clone());
            all.insert(format!("blk.{i}.attn_v.bias"), bias);
        }
    }
    all
}

/// One token for each byte, in the alphabet of byte-level tokenizers, and special tokens after them.
pub fn tokens() -> Vec<String> {
    let mut alphabet: Vec<char> = tokenizers_alphabet();
    alphabet.sort_unstable();
    let bytes = alphabet.into_iter().map(String::from);
    let special = (256..VOCAB).map(|i| format!("<|{i}|>"));
    bytes.chain(special).collect()
}

/// Bytes that print stand for themselves; the others for characters from U+0100 on.
pub fn tokenizers_alphabet() -> Vec<char> {
    let prints = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let own = (0..=255u8).filter(prints).map(char::from);
    let hidden = (0..=255u8).filter(|b| !prints(b)).count() as u32;
    own.chain((0..hidden).filter_map(|i| char::from_u32(0x100 + i)))
        .collect()
}

pub fn metadata() -> Vec<(&'static str, gguf_file::Value)> {
    use gguf_file::Value::{Array, F32, I32, String, U32};
    let kinds = (0..VOCAB)
        .map(|i| I32(if i < 256 { 1 } else { 3 }))
        .collect();
    vec![
        ("general.architecture", String("qwen3".into())),
        ("qwen3.block_count", U32(LAYERS as u32)),
        ("qwen3.context_length", U32(CONTEXT as u32)),
        ("qwen3.embedding_length", U32(HIDDEN as u32)),
        ("qwen3.feed_forward_length", U32(FEED_FORWARD as u32)),
        ("qwen3.attention.head_count", U32(HEADS as u32)),
        ("qwen3.attention.head_count_kv", U32(KV_HEADS as u32)),
        ("qwen3.attention.layer_norm_rms_epsilon", F32(EPS)),
        ("qwen3.rope.freq_base", F32(BASE)),
        ("tokenizer.ggml.model", String("gpt2".into())),
        ("tokenizer.ggml.pre", String("gpt-2".into())),
        (
            "tokenizer.ggml.tokens",
            Array(tokens().into_iter().map(String).collect()),
        ),
        ("tokenizer.ggml.token_type", Array(kinds)),
        ("tokenizer.ggml.merges", Array(Vec::new())),
        ("tokenizer.ggml.eos_token_id", U32(256)),
    ]
}

pub fn tensor((shape, values): &(Vec<usize>, Vec<f32>)) -> Tensor {
    Tensor::from_vec(values.clone(), shape.clone(), &Device::Cpu).unwrap()
}

/// The bytes of a GGUF file.
pub fn gguf(weights: &Weights, metadata: &[(&str, gguf_file::Value)], dtype: GgmlDType) -> Vec<u8> {
    let pack = |(name, parts): (&String, &(Vec<usize>, Vec<f32>))| {
        let dtype = if parts.0.len() == 2 {
            dtype
        } else {
            GgmlDType::F32
        };
        (
            name.clone(),
            QTensor::quantize(&tensor(parts), dtype).unwrap(),
        )
    };
    let packed: Vec<_> = weights.iter().map(pack).collect();
    let tensors: Vec<_> = packed.iter().map(|(name, t)| (name.as_str(), t)).collect();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    file.into_inner()
}

pub struct Files(pub TempDir);

impl Files {
    pub fn new() -> Self {
        Files(TempDir::new().unwrap())
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    pub fn load(&self, bytes: &[u8]) -> Result<(Model, Tokenizer), Error> {
        attn_llm::load(
            &self.write("model.gguf", bytes),
            Products::F32,
            &mut |_, _| (),
        )
    }
}

pub fn model() -> (Model, Tokenizer) {
    let bytes = gguf(&weights(), &metadata(), GgmlDType::F32);
    Files::new().load(&bytes).unwrap()
}

/// `x` times a matrix of the file.
pub fn product(weights: &Weights, name: &str, x: &[f64]) -> Vec<f64> {
    let (shape, w) = &weights[&format!("{name}.weight")];
    let bias = weights.get(&format!("{name}.bias"));
    let row = |i: usize| {
        let row = w[i * shape[1]..].iter().zip(x);
        let sum: f64 = row.map(|(w, x)| f64::from(*w) * x).sum();
        sum + bias.map_or(0.0, |(_, b)| f64::from(b[i]))
    };
    (0..shape[0]).map(row).collect()
}

pub fn norm(weights: &Weights, name: &str, x: &[f64]) -> Vec<f64> {
    // Norms of heads are optional.
    let Some((_, w)) = weights.get(&format!("{name}.weight")) else {
        return x.to_vec();
    };
    let normalize = |x: &[f64]| {
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (square + f64::from(EPS)).sqrt();
        let pairs = x.iter().zip(w);
        pairs
            .map(|(x, w)| x * factor * f64::from(*w))
            .collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(normalize).collect()
}

/// What a config says beside the weights.
#[derive(Clone)]
pub struct Settings {
    /// The angle of each pair of elements at position 1.
    pub angles: Vec<f64>,
    /// What rotated Q and K are multiplied by.
    pub factor: f64,
    /// Whether pairs are neighbours, or halves of a head.
    pub is_interleaved: bool,
    /// For each layer the number of tokens that a token sees, itself among them.
    pub windows: [usize; LAYERS],
}

impl Settings {
    pub fn new() -> Self {
        let angle = |i| f64::from(BASE).powf(-2.0 * i as f64 / DIM as f64);
        Settings {
            angles: (0..DIM / 2).map(angle).collect(),
            factor: 1.0,
            is_interleaved: false,
            windows: [usize::MAX; LAYERS],
        }
    }

    fn turn(&self, x: &mut [f64], position: usize) {
        for head in x.chunks_mut(DIM) {
            for (i, angle) in self.angles.iter().enumerate() {
                let (sin, cos) = (position as f64 * angle).sin_cos();
                let [i, j] = match self.is_interleaved {
                    true => [2 * i, 2 * i + 1],
                    false => [i, i + DIM / 2],
                };
                let (a, b) = (head[i] * self.factor, head[j] * self.factor);
                head[i] = a * cos - b * sin;
                head[j] = a * sin + b * cos;
            }
        }
    }
}

/// Logits of every token, by the formulas in f64.
pub fn plain(weights: &Weights, settings: &Settings, tokens: &[u32]) -> Vec<f64> {
    let embedding = |token: &u32| {
        let row = &weights["token_embd.weight"].1[*token as usize * HIDDEN..][..HIDDEN];
        row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>()
    };
    let mut xs: Vec<Vec<f64>> = tokens.iter().map(embedding).collect();
    for (layer, window) in settings.windows.iter().enumerate() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (mut ks, mut vs) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let y = norm(weights, &name("attn_norm"), x);
            let q = product(weights, &name("attn_q"), &y);
            let k = product(weights, &name("attn_k"), &y);
            let mut q = norm(weights, &name("attn_q_norm"), &q);
            let mut k = norm(weights, &name("attn_k_norm"), &k);
            settings.turn(&mut q, position);
            settings.turn(&mut k, position);
            ks.push(k);
            vs.push(product(weights, &name("attn_v"), &y));
            let first = (position + 1).saturating_sub(*window);
            let mut out = Vec::new();
            for q in q.chunks(DIM) {
                let score = |k: &Vec<f64>| {
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                    (dot / (DIM as f64).sqrt()).exp()
                };
                let p: Vec<f64> = ks[first..].iter().map(score).collect();
                let sum: f64 = p.iter().sum();
                out.extend((0..DIM).map(|d| {
                    let pairs = p.iter().zip(&vs[first..]);
                    pairs.map(|(p, v)| p / sum * v[d]).sum::<f64>()
                }));
            }
            let out = product(weights, &name("attn_output"), &out);
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
            let y = norm(weights, &name("ffn_norm"), x);
            let gate = product(weights, &name("ffn_gate"), &y);
            let up = product(weights, &name("ffn_up"), &y);
            let pairs = gate.iter().zip(up);
            let y: Vec<f64> = pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let y = product(weights, &name("ffn_down"), &y);
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
    }
    let is_tied = !weights.contains_key("output.weight");
    let output = if is_tied { "token_embd" } else { "output" };
    let logits = |x: &Vec<f64>| product(weights, output, &norm(weights, "output_norm", x));
    xs.iter().flat_map(logits).collect()
}

/// The logits of tokens that come in chunks.
pub fn logits(model: &Model, kv: &mut dyn Kv, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let piece = Piece {
            sequence: 0,
            tokens,
        };
        all.extend(model.forward(&[piece], kv, Wanted::All).unwrap());
    }
    all
}

/// The relative L2 difference.
pub fn difference(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let pairs = || got.iter().map(|x| f64::from(*x)).zip(want);
    let error: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
    (error / want.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Tokens of bytes.
pub fn text(n: usize) -> Vec<u32> {
    let mut random = Random::new(3);
    (0..n)
        .map(|_| ((random.next() + 1.0) * 127.0) as u32)
        .collect()
}

/// The folder of a model as safetensors, with some entries of its config changed.
pub fn folder(weights: &Weights, changes: &[(&str, Value)]) -> Files {
    let files = Files::new();
    let names = [
        ("attn_norm", "input_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
    ];
    let rename = |name: &str| {
        let (stem, kind) = name.rsplit_once('.').unwrap();
        let part = stem.rsplit('.').next().unwrap();
        let new = names.iter().find(|(old, _)| *old == part).unwrap().1;
        match stem.strip_prefix("blk.") {
            Some(rest) => format!("model.layers.{}.{new}.{kind}", &rest[..1]),
            None => format!("{new}.{kind}"),
        }
    };
    let tensors: HashMap<String, Tensor> = weights
        .iter()
        .map(|(name, parts)| (rename(name), tensor(parts)))
        .collect();
    candle_core::safetensors::save(&tensors, files.0.path().join("model.safetensors")).unwrap();
    let mut config = serde_json::json!({
        "model_type": "qwen3", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": EPS, "rope_theta": BASE, "eos_token_id": 256,
        "hidden_act": "silu", "rope_scaling": null, "tie_word_embeddings": !weights.contains_key("output.weight"),
    });
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    files.write("config.json", config.to_string());
    let vocab: HashMap<String, usize> = tokens().into_iter().zip(0..).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    files.write("tokenizer.json", tokenizer.to_string());
    files
}
