//! A small random model as a GGUF file, written by its definition (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), and as Hugging
//! Face has models.

use attn_conformance::noise::Noise;

/// Elements of a token's state; one KV head, two query heads of 64.
const HIDDEN: usize = 128;
const FEED_FORWARD: usize = 64;
const LAYERS: usize = 2;
/// A token for each byte, and one that ends texts.
const VOCAB: usize = 257;
/// The most tokens that the model takes.
pub const CONTEXT: u32 = 512;

struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    fn u64(&mut self, x: usize) {
        self.0.extend((x as u64).to_le_bytes());
    }

    fn string(&mut self, text: &str) {
        self.u64(text.len());
        self.0.extend(text.as_bytes());
    }

    /// A value of the metadata: its key, and the number of its type.
    fn key(&mut self, key: &str, kind: u32) {
        self.string(key);
        self.u32(kind);
    }
}

/// Bytes that print stand for themselves; the others for characters from U+0100 on, as in every byte-level vocabulary.
fn vocabulary() -> Vec<String> {
    let prints = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let own = (0..=255u8).filter(prints).map(char::from);
    let hidden = (0x100..).filter_map(char::from_u32);
    let all = own.chain(hidden).map(String::from);
    all.take(256).chain(["<end>".to_owned()]).collect()
}

/// Name, shape with the innermost dimension last, and elements.
type Tensor = (String, Vec<usize>, Vec<f32>);

/// The weights under their GGUF names.
fn tensors() -> Vec<Tensor> {
    let mut noise = Noise::new(3);
    let filled = |(name, shape, size, middle): (String, Vec<usize>, f32, f32)| {
        let n = shape.iter().product();
        let values = (0..n).map(|_| middle + size * noise.unit()).collect();
        (name, shape, values)
    };
    shapes().into_iter().map(filled).collect()
}

/// Name, shape, and how large random elements are around what middle.
fn shapes() -> Vec<(String, Vec<usize>, f32, f32)> {
    let mut all = vec![
        ("token_embd".to_owned(), vec![VOCAB, HIDDEN], 1.0, 0.0),
        ("output_norm".to_owned(), vec![HIDDEN], 0.3, 1.0),
    ];
    for i in 0..LAYERS {
        let matrices = [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", 64, HIDDEN),
            ("attn_v", 64, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ];
        let matrix = |(name, outputs, inputs): (&str, usize, usize)| {
            (format!("blk.{i}.{name}"), vec![outputs, inputs], 0.25, 0.0)
        };
        all.extend(matrices.map(matrix));
        let norm = |name: &str| (format!("blk.{i}.{name}"), vec![HIDDEN], 0.3, 1.0);
        all.extend(["attn_norm", "ffn_norm"].map(norm));
    }
    all.iter_mut()
        .for_each(|(name, ..)| name.push_str(".weight"));
    for i in 0..LAYERS {
        let biases = [("attn_q", HIDDEN), ("attn_k", 64), ("attn_v", 64)];
        all.extend(biases.map(|(name, n)| (format!("blk.{i}.{name}.bias"), vec![n], 0.0, 0.0)));
    }
    all
}

/// The file.
pub fn gguf() -> Vec<u8> {
    gguf_of("qwen2", tensors())
}

/// The file of a model of the architecture `llama`, without biases.
pub fn gguf_without_biases() -> Vec<u8> {
    let mut tensors = tensors();
    tensors.retain(|(name, ..)| !name.ends_with(".bias"));
    gguf_of("llama", tensors)
}

fn gguf_of(architecture: &str, tensors: Vec<Tensor>) -> Vec<u8> {
    let numbers = [
        ("block_count", LAYERS as u32),
        ("context_length", CONTEXT),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", FEED_FORWARD as u32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ];
    let mut file = Bytes(b"GGUF".to_vec());
    file.u32(3);
    file.u64(tensors.len());
    file.u64(numbers.len() + 8);
    file.key("general.architecture", 8);
    file.string(architecture);
    for (name, number) in numbers {
        file.key(&format!("{architecture}.{name}"), 4);
        file.u32(number);
    }
    for (name, number) in [
        ("attention.layer_norm_rms_epsilon", 1e-5f32),
        ("rope.freq_base", 1e4),
    ] {
        file.key(&format!("{architecture}.{name}"), 6);
        file.u32(number.to_bits());
    }
    file.key("tokenizer.ggml.model", 8);
    file.string("gpt2");
    file.key("tokenizer.ggml.pre", 8);
    file.string("gpt-2");
    file.key("tokenizer.ggml.eos_token_id", 4);
    file.u32(256);
    for (name, texts) in [("tokens", vocabulary()), ("merges", Vec::new())] {
        file.key(&format!("tokenizer.ggml.{name}"), 9);
        file.u32(8);
        file.u64(texts.len());
        texts.iter().for_each(|text| file.string(text));
    }
    let mut offset = 0;
    for (name, shape, ..) in &tensors {
        file.string(name);
        file.u32(shape.len() as u32);
        shape.iter().rev().for_each(|n| file.u64(*n));
        file.u32(0);
        file.u64(offset);
        // All have whole multiples of the alignment, 32 bytes.
        offset += shape.iter().product::<usize>() * 4;
    }
    file.0.resize(file.0.len().next_multiple_of(32), 0);
    let values = tensors.iter().flat_map(|(.., values)| values);
    values.for_each(|x| file.u32(x.to_bits()));
    file.0
}

/// The model's files as huggingface.co has them, with safetensors in parts.
#[cfg(feature = "hub")]
pub fn safetensors() -> std::collections::HashMap<String, Vec<u8>> {
    use safetensors::{Dtype, tensor::TensorView};
    let names = [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    let renamed = |name: &str| {
        let (layer, part) = match name.strip_prefix("blk.") {
            Some(rest) => (format!("model.layers.{}.", &rest[..1]), &rest[2..]),
            None => (String::new(), name),
        };
        let (part, kind) = part.rsplit_once('.').expect("a weight or a bias");
        let known = names.iter().find(|(gguf, _)| *gguf == part);
        format!("{layer}{}.{kind}", known.expect("a known part").1)
    };
    let mut files = std::collections::HashMap::new();
    let mut weight_map = serde_json::Map::new();
    for (i, part) in tensors().chunks(9).enumerate() {
        let file = format!("model-{i}.safetensors");
        let bytes = |x: &Vec<f32>| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let data: Vec<_> = part.iter().map(|(.., values)| bytes(values)).collect();
        let views = part.iter().zip(&data).map(|((name, shape, _), data)| {
            weight_map.insert(renamed(name), file.clone().into());
            let view = TensorView::new(Dtype::F32, shape.clone(), data);
            (renamed(name), view.expect("as many bytes as the shape has"))
        });
        let bytes = safetensors::serialize(views, None).expect("a legal file");
        files.insert(file, bytes);
    }
    let vocab: serde_json::Map<_, _> = vocabulary()
        .into_iter()
        .enumerate()
        .map(|(i, token)| (token, i.into()))
        .collect();
    let split = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let texts = [
        (
            "config.json",
            serde_json::json!({
                "model_type": "qwen2", "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1,
                "num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD, "vocab_size": VOCAB,
                "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true,
                "eos_token_id": 256,
            }),
        ),
        (
            "tokenizer.json",
            serde_json::json!({
                "version": "1.0", "added_tokens": [], "pre_tokenizer": split, "decoder": split,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            }),
        ),
        (
            "model.safetensors.index.json",
            serde_json::json!({ "weight_map": weight_map }),
        ),
    ];
    let texts = texts.map(|(name, json)| (name.to_owned(), json.to_string().into_bytes()));
    files.extend(texts);
    files
}
