//! A small random model as a GGUF file, written by its definition (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).

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

/// Name, shape with the innermost dimension last, and how large random elements are around what middle.
type Tensor = (String, Vec<usize>, f32, f32);

fn tensors() -> Vec<Tensor> {
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
    all
}

/// The file.
pub fn gguf() -> Vec<u8> {
    let tensors = tensors();
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
    file.u64(numbers.len() + 6);
    file.key("general.architecture", 8);
    file.string("qwen2");
    for (name, number) in numbers {
        file.key(&format!("qwen2.{name}"), 4);
        file.u32(number);
    }
    file.key("qwen2.attention.layer_norm_rms_epsilon", 6);
    file.u32(1e-5f32.to_bits());
    file.key("tokenizer.ggml.model", 8);
    file.string("gpt2");
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
        file.string(&format!("{name}.weight"));
        file.u32(shape.len() as u32);
        shape.iter().rev().for_each(|n| file.u64(*n));
        file.u32(0);
        file.u64(offset);
        // All have whole multiples of the alignment, 32 bytes.
        offset += shape.iter().product::<usize>() * 4;
    }
    file.0.resize(file.0.len().next_multiple_of(32), 0);
    let mut random = 7u64;
    for (_, shape, size, middle) in &tensors {
        for _ in 0..shape.iter().product() {
            random = random.wrapping_mul(6_364_136_223_846_793_005);
            random = random.wrapping_add(1);
            let unit = (random >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            file.u32((middle + size * unit).to_bits());
        }
    }
    file.0
}
