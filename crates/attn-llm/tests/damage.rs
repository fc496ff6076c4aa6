//! Damaged files of models: no flipped bit of a name gives another model without a word, no count costs more than the file, and tokenizers
//! that would panic are refused.

#[path = "tiny/model.rs"]
mod model;

use std::{
    fs::{self, OpenOptions},
    io::{Seek, SeekFrom, Write},
    path::Path,
    time::{Duration, Instant},
};

use attn_llm::{Error, Products, Tokenizer};
use candle_core::quantized::{GgmlDType, gguf_file};
use model::*;
use serde_json::{Value, json};

/// Weights with every optional tensor.
fn whole_weights() -> Weights {
    let mut all = weights();
    let mut random = Random::new(21);
    let output = random.vector(VOCAB * HIDDEN, 0.4);
    all.insert("output.weight".to_owned(), (vec![VOCAB, HIDDEN], output));
    for i in 0..LAYERS {
        for (part, n) in [("attn_v", KV_HEADS * DIM), ("attn_output", HIDDEN)] {
            let bias = (vec![n], random.vector(n, 0.5));
            all.insert(format!("blk.{i}.{part}.bias"), bias);
        }
    }
    all
}

/// Where a text begins in a file, at all of its places.
fn places(bytes: &[u8], text: &str) -> Vec<usize> {
    let all = bytes.windows(text.len()).enumerate();
    let found = all.filter(|(_, window)| *window == text.as_bytes());
    found.map(|(at, _)| at).collect()
}

/// Flips each bit of a text in a file, and gives what `load` says of each.
fn flipped<T>(path: &Path, text: &str, mut load: impl FnMut() -> T) -> Vec<T> {
    let bytes = fs::read(path).unwrap();
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    let mut put = |at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte]).unwrap();
    };
    let mut all = Vec::new();
    for at in places(&bytes, text) {
        for bit in 0..text.len() * 8 {
            let at = at + bit / 8;
            put(at, bytes[at] ^ 1 << (bit % 8));
            all.push(load());
            put(at, bytes[at]);
        }
    }
    assert!(!all.is_empty(), "{text} is not in the file");
    all
}

#[test]
fn a_flipped_bit_in_a_tensors_name_is_refused() {
    let files = Files::new();
    let mut weights = whole_weights();
    let factors = (0..DIM / 2).map(|i| 1.0 + i as f32 / 4.0).collect();
    weights.insert("rope_freqs.weight".to_owned(), (vec![DIM / 2], factors));
    let path = files.write("model.gguf", gguf(&weights, &metadata(), GgmlDType::F32));
    let load = || attn_llm::load(&path, Products::F32, &mut |_, _| ());
    load().expect("the whole file is a model");
    // The layers are alike.
    for name in weights.keys().filter(|name| !name.contains(".1.")) {
        for loaded in flipped(&path, name, load) {
            assert!(
                matches!(loaded, Err(Error::Model { .. })),
                "{name} is taken"
            );
        }
    }
    let files = folder(&whole_weights(), &[]);
    let load = || attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ());
    load().expect("the whole folder is a model");
    let path = files.0.path().join("model.safetensors");
    let names = safetensors_names(&fs::read(&path).unwrap());
    assert_eq!(names.len(), whole_weights().len());
    for name in names.iter().filter(|name| !name.contains(".1.")) {
        let name = format!("\"{name}\"");
        for loaded in flipped(&path, &name, load) {
            assert!(
                matches!(loaded, Err(Error::Model { .. })),
                "{name} is taken"
            );
        }
    }
}

fn safetensors_names(bytes: &[u8]) -> Vec<String> {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    header.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn a_flipped_bit_in_a_key_of_the_metadata_is_refused_or_said() {
    use gguf_file::Value::{Bool, F32, String, U32};
    let files = Files::new();
    let mut metadata = metadata();
    metadata.extend([
        ("qwen3.attention.key_length", U32(DIM as u32)),
        ("qwen3.attention.sliding_window", U32(9)),
        ("qwen3.rope.dimension_count", U32(DIM as u32)),
        ("qwen3.rope.scaling.type", String("linear".into())),
        ("qwen3.rope.scaling.factor", F32(2.0)),
        ("tokenizer.ggml.bos_token_id", U32(257)),
        ("tokenizer.ggml.add_bos_token", Bool(true)),
        ("general.alignment", U32(32)),
    ]);
    let whole = gguf(&weights(), &metadata, GgmlDType::F32);
    let path = files.write("model.gguf", whole);
    let load = || attn_llm::load(&path, Products::F32, &mut |_, _| ());
    let (model, _) = load().expect("the whole file is a model");
    assert!(model.remarks().is_empty(), "{:?}", model.remarks());
    let (mut refused, mut said) = (0, 0);
    for (key, _) in &metadata {
        for loaded in flipped(&path, key, load) {
            match loaded {
                Err(Error::Model { .. }) => refused += 1,
                Err(error) => panic!("{key}: {error}"),
                Ok((model, _)) => {
                    let all = model.remarks().join("\n");
                    assert!(all.contains("not known here"), "{key} is taken: {all}");
                    said += 1;
                }
            }
        }
    }
    assert!(refused > said && said > 0, "{refused} refused, {said} said");
}

#[test]
fn a_flipped_bit_in_an_arrays_count_costs_no_more_than_the_file() {
    let files = Files::new();
    let whole = gguf(&weights(), &metadata(), GgmlDType::F32);
    let start = Instant::now();
    for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"] {
        // Behind the key: the types of the value and of its elements.
        let at = places(&whole, key)[0] + key.len() + 8;
        let count = u64::from_le_bytes(whole[at..at + 8].try_into().unwrap());
        assert_eq!(count, VOCAB as u64, "{key}");
        for bit in 0..64 {
            let mut bytes = whole.clone();
            bytes[at + bit / 8] ^= 1 << (bit % 8);
            let path = files.write("model.gguf", bytes);
            // Zeros behind it, which take no room on a disk.
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(1 << 32).unwrap();
            let loaded = attn_llm::load(&path, Products::F32, &mut |_, _| ());
            assert!(
                matches!(loaded, Err(Error::Model { .. })),
                "{key}, bit {bit}"
            );
        }
    }
    // A system call for each element took a minute for one of them.
    assert!(
        start.elapsed() < Duration::from_secs(40),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn keys_and_pieces_that_no_file_has_are_refused() {
    use gguf_file::Value::{Array, F32, String, U32};
    let files = Files::new();
    let refusal = |metadata: &[(&str, gguf_file::Value)]| {
        let loaded = files.load(&gguf(&weights(), metadata, GgmlDType::F32));
        match loaded {
            Err(error @ Error::Model { .. }) => error.to_string(),
            _ => panic!("it is damaged"),
        }
    };
    let mut zero = metadata();
    zero.push(("general.alignment\0", U32(0)));
    assert!(refusal(&zero).contains("alignment is 0"));
    let mut twice = metadata();
    twice.push(("qwen3.rope.freq_base", F32(100.0)));
    assert!(refusal(&twice).contains("\"qwen3.rope.freq_base\" twice"));
    let mut long = metadata();
    let mut pieces = tokens();
    pieces[7] = "a".repeat(200_000);
    long.retain(|(key, _)| !matches!(*key, "tokenizer.ggml.model" | "tokenizer.ggml.tokens"));
    long.push(("tokenizer.ggml.model", String("llama".into())));
    long.push(("tokenizer.ggml.bos_token_id", U32(256)));
    long.push((
        "tokenizer.ggml.tokens",
        Array(pieces.into_iter().map(String).collect()),
    ));
    let scores = (0..VOCAB).map(|_| F32(0.0)).collect();
    long.push(("tokenizer.ggml.scores", Array(scores)));
    assert!(refusal(&long).contains("piece of 200000 bytes"));
}

/// A folder with another entry in its tokenizer.json.
fn with_tokenizer(key: &str, value: Value) -> Result<Tokenizer, Error> {
    let files = folder(&weights(), &[]);
    let path = files.0.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    match key.split_once('.') {
        Some((part, key)) => json[part][key] = value,
        None => json[key] = value,
    }
    files.write("tokenizer.json", json.to_string());
    let loaded = attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ());
    loaded.map(|(_, tokenizer)| tokenizer)
}

#[test]
fn truncation_and_padding_of_a_tokenizer_are_left_out() {
    let prompt = "nine of it";
    let plain = with_tokenizer("version", json!("1.0")).unwrap();
    let want = plain.encode(prompt).unwrap();
    assert_eq!(want.len(), prompt.len());
    let truncation =
        json!({"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
    let padding = |size: u64| {
        json!({"strategy": {"Fixed": size}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!"})
    };
    for (key, value) in [
        ("truncation", truncation),
        ("padding", padding(40)),
        ("padding", padding(1 << 40)),
    ] {
        let tokenizer = with_tokenizer(key, value.clone()).unwrap();
        assert_eq!(tokenizer.encode(prompt).unwrap(), want, "{value}");
    }
}

#[test]
fn tokenizers_that_panic_or_take_all_memory_are_errors() {
    let template = |piece: Value| json!({"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}});
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
    let nested = json!({"type": "Sequence", "normalizers": [precompiled]});
    let replace = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
    for (key, value) in [
        ("normalizer", precompiled),
        ("normalizer", nested),
        ("normalizer", replace),
        ("normalizer", json!({"type": "Prepend", "prepend": ""})),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("decoder", json!("damaged")),
        (
            "post_processor",
            template(json!({"Sequence": {"id": "B", "type_id": 0}})),
        ),
        (
            "post_processor",
            template(json!({"SpecialToken": {"id": "unheard", "type_id": 0}})),
        ),
        (
            "truncation",
            json!({"max_length": 4, "strategy": "LongestFirst", "stride": 9, "direction": "Right"}),
        ),
        ("model.dropout", json!(0.5)),
    ] {
        // Where the file is taken, what it is asked for is an error or tokens.
        match with_tokenizer(key, value.clone()) {
            Err(Error::Model { path, .. }) => assert!(path.ends_with("tokenizer.json")),
            Err(error) => panic!("{key}: {value}: {error}"),
            Ok(tokenizer) => {
                assert!(
                    key == "truncation"
                        || matches!(tokenizer.encode("ab"), Err(Error::Tokenizer(_))),
                    "{key}: {value}"
                );
            }
        }
    }
    // Strip looks for what follows the end of a token.
    let strip = json!({"type": "Strip", "content": "a", "start": 0, "stop": 9});
    let tokenizer = with_tokenizer("decoder", strip).unwrap();
    let tokens = tokenizer.encode("aa").unwrap();
    assert!(matches!(
        tokenizer.decode(&tokens),
        Err(Error::Tokenizer(_))
    ));
}
