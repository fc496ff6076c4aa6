//! Kinds of models: positions, windows, norms of heads and tied embeddings, against formulas in f64; products of packed weights.

#[path = "tiny/model.rs"]
mod model;

use std::{f64::consts::PI, fs, path::Path};

use attn_llm::{Error, ExactKv, Products};
use candle_core::quantized::{GgmlDType, gguf_file};
use model::*;
use serde_json::{Value, json};

/// Enough tokens to show each window and each scaling.
const TOKENS: usize = 70;

/// How far the logits of a file's model are from those of the formulas.
fn error_of(path: &Path, weights: &Weights, settings: &Settings) -> f64 {
    let loaded = attn_llm::load(path, Products::F32, &mut |_, _| ());
    let (model, _) = loaded.unwrap();
    let tokens = text(TOKENS);
    let mut exact = ExactKv::new(model.config(), 1, TOKENS);
    let got = logits(&model, &mut exact, &tokens, 32);
    difference(&got, &plain(weights, settings, &tokens))
}

/// Holds a folder's model to formulas with these settings, and notices that it does not follow those without the change.
fn follows(weights: &Weights, changes: &[(&str, Value)], settings: &Settings) {
    let folder = folder(weights, changes);
    let error = error_of(folder.0.path(), weights, settings);
    assert!(error < 1e-5, "{changes:?}: {error:e}");
    let without = error_of(folder.0.path(), weights, &Settings::new());
    assert!(without > 1e-3, "{changes:?} changes nothing: {without:e}");
}

fn base_angles() -> Vec<f64> {
    Settings::new().angles
}

#[test]
fn linear_scaling_divides_positions() {
    let settings = Settings {
        angles: base_angles().iter().map(|angle| angle / 2.5).collect(),
        ..Settings::new()
    };
    let scaling = json!({"type": "linear", "factor": 2.5});
    follows(&weights(), &[("rope_scaling", scaling)], &settings);
}

#[test]
fn llama_3_scales_slow_pairs_whole_and_middle_ones_in_part() {
    let (factor, low, high, context) = (8.0, 1.0, 4.0, 50.0);
    let scaled = |angle: &f64| {
        let turns = context * angle / (2.0 * PI);
        let own = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        angle * own + angle / factor * (1.0 - own)
    };
    let settings = Settings {
        angles: base_angles().iter().map(scaled).collect(),
        ..Settings::new()
    };
    let scaling = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": context,
    });
    follows(&weights(), &[("rope_scaling", scaling)], &settings);
}

/// YaRN: pairs that turn `fast` times or more in the original context keep their angle, those that turn `slow` times or less are divided.
fn yarn(context: f64, factor: f64, [fast, slow]: [f64; 2], truncates: bool) -> Vec<f64> {
    // The pair that turns so many times in the original context.
    let pair = |turns: f64| {
        DIM as f64 * (context / (turns * 2.0 * PI)).ln() / (2.0 * f64::from(BASE).ln())
    };
    let (mut first, mut last) = (pair(fast), pair(slow));
    if truncates {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, last) = (first.max(0.0), last.min(DIM as f64 - 1.0));
    let angles = base_angles().into_iter().enumerate();
    angles
        .map(|(i, angle)| {
            let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
            angle * (1.0 - divided) + angle / factor * divided
        })
        .collect()
}

#[test]
fn yarn_divides_slow_pairs_and_sharpens_attention() {
    let settings = Settings {
        angles: yarn(CONTEXT as f64, 4.0, [32.0, 1.0], true),
        factor: 0.1 * 4f64.ln() + 1.0,
        ..Settings::new()
    };
    let scaling = json!({"rope_type": "yarn", "factor": 4.0});
    follows(&weights(), &[("rope_scaling", scaling)], &settings);
    let settings = Settings {
        angles: yarn(700.0, 4.0, [20.0, 1.0], false),
        factor: 0.9,
        ..Settings::new()
    };
    let scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 700, "beta_fast": 20,
        "truncate": false, "attention_factor": 0.9,
    });
    follows(&weights(), &[("rope_scaling", scaling)], &settings);
}

#[test]
fn windows_hide_old_tokens_in_the_layers_that_have_them() {
    let with = |windows| Settings {
        windows,
        ..Settings::new()
    };
    let all = usize::MAX;
    let window = ("sliding_window", json!(9));
    let used = ("use_sliding_window", json!(true));
    // Qwen's windows begin with a layer.
    let from = ("max_window_layers", json!(1));
    let qwen = [window.clone(), used.clone(), from.clone()];
    follows(&weights(), &qwen, &with([all, 9]));
    let types = json!(["sliding_attention", "full_attention"]);
    let named = [window.clone(), used.clone(), ("layer_types", types)];
    follows(&weights(), &named, &with([9, all]));
    let mistral = [
        window.clone(),
        from.clone(),
        ("model_type", json!("mistral")),
    ];
    follows(&weights_of("mistral"), &mistral, &with([9, 9]));
    // Qwen's windows are used only where the config says so.
    for is_used in [json!(false), Value::Null] {
        let unused = [
            window.clone(),
            from.clone(),
            ("use_sliding_window", is_used),
        ];
        let folder = folder(&weights(), &unused);
        let error = error_of(folder.0.path(), &weights(), &Settings::new());
        assert!(error < 1e-5, "{unused:?}: {error:e}");
    }
}

#[test]
fn norms_of_heads_biases_and_an_output_of_its_own_are_as_the_file_has_them() {
    let mut bare = weights();
    bare.retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    bare.retain(|name, _| !name.ends_with(".bias"));
    let files = folder(&bare, &[("model_type", json!("llama"))]);
    let error = error_of(files.0.path(), &bare, &Settings::new());
    assert!(error < 1e-5, "{error:e}");
    let mut untied = weights();
    let output = Random::new(5).vector(VOCAB * HIDDEN, 0.4);
    untied.insert("output.weight".to_owned(), (vec![VOCAB, HIDDEN], output));
    let files = folder(&untied, &[]);
    let gguf_file = files.write("own.gguf", gguf(&untied, &metadata(), GgmlDType::F32));
    for path in [files.0.path(), &gguf_file] {
        let error = error_of(path, &untied, &Settings::new());
        assert!(error < 1e-5, "{error:e}");
        let tied = error_of(path, &weights(), &Settings::new());
        assert!(tied > 0.1, "the embeddings are the output: {tied:e}");
    }
}

#[test]
fn gguf_files_without_an_output_have_tied_embeddings_in_every_architecture() {
    let files = Files::new();
    let output = Random::new(6).vector(VOCAB * HIDDEN, 0.4);
    for (architecture, is_interleaved) in [("llama", true), ("qwen2", false), ("qwen3", false)] {
        let settings = Settings {
            is_interleaved,
            ..Settings::new()
        };
        let tied = weights_of(architecture);
        assert!(!tied.contains_key("output.weight"));
        let path = files.write("tied.gguf", metadata_of(architecture, &[]));
        let error = error_of(&path, &tied, &settings);
        assert!(error < 1e-5, "{architecture}: {error:e}");
        let mut untied = tied;
        untied.insert(
            "output.weight".to_owned(),
            (vec![VOCAB, HIDDEN], output.clone()),
        );
        let error = error_of(&path, &untied, &settings);
        assert!(error > 0.1, "{architecture}, another output: {error:e}");
    }
}

/// The metadata of another architecture, and more.
fn metadata_of(architecture: &str, more: &[(&str, gguf_file::Value)]) -> Vec<u8> {
    let rename = |key: &str| key.replacen("qwen3", architecture, 1);
    let renamed = metadata().into_iter().map(|(key, value)| match key {
        "general.architecture" => {
            let name = gguf_file::Value::String(architecture.to_owned());
            (key.to_owned(), name)
        }
        key => (rename(key), value),
    });
    let more = more.iter().map(|(key, value)| (rename(key), value.clone()));
    let all: Vec<_> = renamed.chain(more).collect();
    let all: Vec<_> = all
        .iter()
        .map(|(key, v)| (key.as_str(), v.clone()))
        .collect();
    gguf(&weights_of(architecture), &all, GgmlDType::F32)
}

#[test]
fn gguf_files_have_neighbours_as_pairs_for_llama_and_windows_and_scalings_in_their_metadata() {
    use gguf_file::Value::{F32, String, U32};
    let files = Files::new();
    let error_as = |kind: &str, bytes: Vec<u8>, settings: &Settings| {
        let path = files.write("kind.gguf", bytes);
        error_of(&path, &weights_of(kind), settings)
    };
    let error = |bytes, settings: &Settings| error_as("qwen3", bytes, settings);
    let interleaved = Settings {
        is_interleaved: true,
        ..Settings::new()
    };
    let llama = metadata_of("llama", &[]);
    assert!(error_as("llama", llama.clone(), &interleaved) < 1e-5);
    assert!(error_as("llama", llama, &Settings::new()) > 1e-3);
    let window = metadata_of("qwen2", &[("qwen3.attention.sliding_window", U32(9))]);
    let settings = Settings {
        windows: [9; LAYERS],
        ..Settings::new()
    };
    assert!(error_as("qwen2", window, &settings) < 1e-5);
    let scaling = [
        ("qwen3.rope.scaling.type", String("linear".to_owned())),
        ("qwen3.rope.scaling.factor", F32(2.5)),
    ];
    let settings = Settings {
        angles: base_angles().iter().map(|angle| angle / 2.5).collect(),
        ..Settings::new()
    };
    assert!(error(metadata_of("qwen3", &scaling), &settings) < 1e-5);
    // Llama 3's factors are a tensor.
    let factors: Vec<f32> = (0..DIM / 2).map(|i| 1.0 + i as f32 / 4.0).collect();
    let settings = Settings {
        angles: base_angles()
            .iter()
            .zip(&factors)
            .map(|(angle, factor)| angle / f64::from(*factor))
            .collect(),
        ..Settings::new()
    };
    let mut scaled = weights();
    scaled.insert("rope_freqs.weight".to_owned(), (vec![DIM / 2], factors));
    assert!(error(gguf(&scaled, &metadata(), GgmlDType::F32), &settings) < 1e-5);
}

#[test]
fn packed_products_are_near_those_in_f32_with_the_same_bits_in_every_chunking() {
    let files = Files::new();
    let path = files.write(
        "packed.gguf",
        gguf(&weights(), &metadata(), GgmlDType::Q8_0),
    );
    let tokens = text(40);
    let [full, packed, cut] = [
        (Products::F32, 40),
        (Products::Packed, 40),
        (Products::Packed, 7),
    ]
    .map(|(products, chunk)| {
        let (model, _) = attn_llm::load(&path, products, &mut |_, _| ()).unwrap();
        let mut exact = ExactKv::new(model.config(), 1, 40);
        logits(&model, &mut exact, &tokens, chunk)
    });
    let wide: Vec<f64> = full.iter().map(|x| f64::from(*x)).collect();
    let error = difference(&packed, &wide);
    // Activations have 8 bits: near, and not the same.
    assert!((1e-4..0.05).contains(&error), "{error:e}");
    assert_eq!(packed, cut);
}

#[test]
fn products_that_cannot_be_had_are_refused_with_a_sentence() {
    let files = folder(&weights(), &[]);
    let refusal = |products| {
        let loaded = attn_llm::load(files.0.path(), products, &mut |_, _| ());
        loaded.err().expect("it is refused").to_string()
    };
    let text = refusal(Products::Packed);
    assert!(text.contains("need a GGUF file"), "{text}");
    if !cfg!(feature = "cuda") {
        let text = refusal(Products::Cuda);
        assert!(text.contains("feature products-cuda"), "{text}");
    }
    let text = "int9".parse::<Products>().unwrap_err().to_string();
    assert!(text.contains("f32, packed, cuda"), "{text}");
    for products in Products::ALL {
        assert_eq!(products.to_string().parse::<Products>().unwrap(), products);
    }
}

#[test]
fn damaged_tokenizers_are_refused_with_the_files_name() {
    let files = folder(&weights(), &[]);
    let whole = fs::read_to_string(files.0.path().join("tokenizer.json")).unwrap();
    for (from, to) in [
        ("BPE", "Unheard"),
        ("vocab", "words"),
        ("\"merges\":[]", "\"merges\":[[\"zz\",\"yy\"]]"),
    ] {
        assert!(whole.contains(from), "{from}");
        files.write("tokenizer.json", whole.replace(from, to));
        match attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ()) {
            Err(error @ Error::Model { .. }) => {
                assert!(error.to_string().contains("tokenizer.json"), "{error}");
            }
            Err(error) => panic!("{to}: {error}"),
            Ok(_) => panic!("{to} is no tokenizer"),
        }
    }
    // Lists of a GGUF file's vocabulary that do not fit each other.
    let with = |key: &'static str, value: gguf_file::Value| {
        let mut metadata = metadata();
        metadata.retain(|(known, _)| *known != key);
        metadata.push((key, value));
        Files::new().load(&gguf(&weights(), &metadata, GgmlDType::F32))
    };
    use gguf_file::Value::{Array, String, U32};
    let strings = |texts: &[&str]| Array(texts.iter().map(|t| String((*t).to_owned())).collect());
    let cases = [
        with("tokenizer.ggml.merges", strings(&["one"])),
        with("tokenizer.ggml.merges", strings(&["un heard"])),
        with("tokenizer.ggml.tokens", U32(7)),
        with("tokenizer.ggml.token_type", strings(&["control"])),
        with("tokenizer.ggml.scores", String("none".to_owned())),
        with("tokenizer.ggml.model", String("llama".to_owned())),
    ];
    let words = [
        "merge of one part",
        "",
        "tokens",
        "token_type",
        "scores",
        "0 scores for 272",
    ];
    for (loaded, words) in cases.into_iter().zip(words) {
        let error = loaded.err().expect(words).to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}
