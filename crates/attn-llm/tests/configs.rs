//! What `config.json` and the metadata of GGUF files may say: each key that changes results is followed, or refused by its name.

#[path = "tiny/model.rs"]
mod model;

use attn_llm::{Error, ExactKv, Products};
use candle_core::{
    DType,
    quantized::{GgmlDType, gguf_file},
};
use model::*;
use serde_json::{Value, json};

const TOKENS: usize = 40;

/// How far a folder's logits are from those of the formulas.
fn error_of(files: &Files, settings: &Settings) -> f64 {
    let loaded = attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ());
    let (model, _) = loaded.unwrap();
    let tokens = text(TOKENS);
    let mut exact = ExactKv::new(model.config(), 1, TOKENS);
    let got = logits(&model, &mut exact, &tokens, 32);
    difference(&got, &plain(&weights(), settings, &tokens))
}

/// The sentence that refuses a folder or a file.
fn refusal(files: &Files, what: &str) -> String {
    match attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ()) {
        Err(error @ Error::Model { .. }) => error.to_string(),
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what} is taken"),
    }
}

/// Angles of another base.
fn base(base: f64, factor: f64) -> Settings {
    let angle = |i| base.powf(-2.0 * i as f64 / DIM as f64) / factor;
    Settings {
        angles: (0..DIM / 2).map(angle).collect(),
        ..Settings::new()
    }
}

#[test]
fn rope_parameters_of_transformers_5_are_followed() {
    let plain = json!({"rope_theta": 100.0, "rope_type": "default"});
    let linear = json!({"rope_theta": 100.0, "rope_type": "linear", "factor": 2.5});
    let cases = [
        (json!({"rope_parameters": plain}), base(100.0, 1.0)),
        (json!({"rope_parameters": linear}), base(100.0, 2.5)),
        // Of each kind of layers, alike.
        (
            json!({"rope_parameters": {"full_attention": linear, "sliding_attention": linear}}),
            base(100.0, 2.5),
        ),
        // Said twice, alike.
        (
            json!({"rope_parameters": plain, "rope_theta": 100}),
            base(100.0, 1.0),
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_parameters": linear}),
            base(100.0, 2.5),
        ),
    ];
    for (changes, settings) in cases {
        let mut all = vec![("rope_theta", Value::Null)];
        all.extend(changes.as_object().unwrap().iter().map(|(key, value)| {
            let key: &'static str = Box::leak(key.clone().into_boxed_str());
            (key, value.clone())
        }));
        let files = folder(&weights(), &all);
        let error = error_of(&files, &settings);
        assert!(error < 1e-5, "{changes}: {error:e}");
        let old = error_of(&files, &Settings::new());
        assert!(old > 1e-3, "{changes} changes nothing: {old:e}");
    }
}

#[test]
fn values_that_are_not_understood_are_refused_by_their_keys() {
    let cases = [
        ("rope_theta", json!("100"), "rope_theta is \"100\""),
        ("rope_theta", json!(-5.0), "rope_theta is -5.0"),
        (
            "rope_parameters",
            json!({"rope_theta": 100.0, "rope_type": "default"}),
            "rope_parameters differs from other entries",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "linear", "factor": -1.0}),
            "rope_parameters, factor is -1.0",
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}),
            "rope_parameters.sliding_attention differs",
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e4}, "chunked": {}}),
            "\"chunked\" beside kinds of layers",
        ),
        (
            "rope_parameters",
            json!({"rope_typ": "linear"}),
            "not supported: \"rope_typ\"",
        ),
        (
            "rope_scaling",
            json!({"factor": 8.0}),
            "type default, has keys that are not supported: \"factor\"",
        ),
        ("rope_scaling", json!(5), "rope_scaling is 5"),
        (
            "rope_scaling",
            json!({"type": "linear"}),
            "rope_scaling, factor is missing",
        ),
        (
            "rope_scaling",
            json!({"type": 4, "factor": 8.0}),
            "rope_scaling, type is 4",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "rope_type": "default", "factor": 8.0}),
            "another rope_type",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
            "low_freq_factor is 4",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor is not 1",
        ),
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor is 0.5",
        ),
        ("rms_norm_eps", json!("x"), "rms_norm_eps is \"x\""),
        ("rms_norm_eps", json!(-1e-5), "rms_norm_eps is -"),
        ("sliding_window", json!(4.0), "sliding_window is 4.0"),
        (
            "use_sliding_window",
            json!("yes"),
            "use_sliding_window is \"yes\"",
        ),
        (
            "layer_types",
            json!(["full_attention"]),
            "layer_types is [\"full_attention\"]; supported: 2 times",
        ),
        (
            "layer_types",
            json!(["full_attention", "linear_attention"]),
            "linear_attention",
        ),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "sliding_attention in layer 1",
        ),
        ("head_dim", json!("64"), "head_dim is \"64\""),
        (
            "num_key_value_heads",
            json!(1.5),
            "num_key_value_heads is 1.5",
        ),
        (
            "tie_word_embeddings",
            json!("false"),
            "tie_word_embeddings is \"false\"",
        ),
        ("attention_bias", json!(1), "attention_bias is 1"),
        ("mlp_bias", json!(true), "mlp_bias is true"),
        ("eos_token_id", json!("256"), "eos_token_id is \"256\""),
        ("eos_token_id", json!([256, -1]), "eos_token_id is [256,-1]"),
        (
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "quantization_config is {\"quant_method\":\"fp8\"",
        ),
        (
            "quantization",
            json!({"bits": 4}),
            "quantization is {\"bits\":4}",
        ),
        (
            "final_logit_softcapping",
            json!(30.0),
            "final_logit_softcapping is 30.0; supported: null",
        ),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
    ];
    for (key, value, words) in cases {
        let files = folder(&weights(), &[(key, value.clone())]);
        let text = refusal(&files, &format!("{key}: {value}"));
        let is_said = text.contains(words) && text.contains("config.json");
        assert!(is_said, "{key}: {value}: {text}");
    }
    let epsilon = folder(&weights(), &[("rms_norm_eps", json!(1e60))]);
    assert!(refusal(&epsilon, "1e60").contains("epsilon of its RMSNorm is inf"));
    let windows = [
        ("sliding_window", json!(9)),
        ("use_sliding_window", json!(true)),
    ];
    let text = refusal(&folder(&weights(), &windows), "windows of no layers");
    assert!(text.contains("max_window_layers"), "{text}");
    let llama = [("model_type", json!("llama")), ("sliding_window", json!(9))];
    let text = refusal(&folder(&weights_of("llama"), &llama), "Llama's window");
    assert!(text.contains("its sliding_window is 9"), "{text}");
}

#[test]
fn what_is_not_known_and_what_is_taken_by_default_is_said() {
    let changes = [
        ("rope_theta", Value::Null),
        ("rms_norm_eps", Value::Null),
        ("unheard_of", json!(3)),
        ("torch_dtype", json!("bfloat16")),
        ("clip_qkv", Value::Null),
    ];
    let files = folder(&weights(), &changes);
    files.write("training.safetensors", "left aside");
    let (model, _) = attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ()).unwrap();
    let said = model.remarks().join("\n");
    for words in [
        "no rope_theta; 10000 is taken",
        "no rms_norm_eps; 0.000001 is taken",
        "not used: \"unheard_of\"",
        "not read: \"training.safetensors\"",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(model.remarks().len(), 4, "{said}");
    let files = folder(&weights(), &[]);
    let (model, _) = attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ()).unwrap();
    assert!(model.remarks().is_empty(), "{:?}", model.remarks());
}

#[test]
fn parts_that_a_config_promises_are_required_and_others_refused() {
    let untied = [("tie_word_embeddings", json!(false))];
    let text = refusal(&folder(&weights(), &untied), "no output");
    assert!(text.contains("no tensor lm_head.weight"), "{text}");
    // Tied, with a matrix of its own: the same numbers, or a contradiction.
    let mut own = weights();
    let embeddings = own["token_embd.weight"].clone();
    own.insert("output.weight".to_owned(), embeddings);
    let tied = [("tie_word_embeddings", json!(true))];
    let error = error_of(&folder(&own, &tied), &Settings::new());
    assert!(error < 1e-5, "{error:e}");
    own.get_mut("output.weight").unwrap().1[5] += 1.0;
    let text = refusal(&folder(&own, &tied), "another output");
    assert!(text.contains("lm_head.weight with other values"), "{text}");
    // Biases: of Qwen 2 all three, of others what their flag says.
    let mut bare = weights_of("qwen2");
    bare.remove("blk.1.attn_v.bias");
    let text = refusal(&folder(&bare, &[("model_type", json!("qwen2"))]), "no bias");
    let missing = "no tensor model.layers.1.self_attn.v_proj.bias";
    assert!(text.contains(missing), "{text}");
    let with = folder(&weights(), &[("attention_bias", json!(false))]);
    let text = refusal(&with, "biases without a flag");
    assert!(text.contains("self_attn.k_proj.bias"), "{text}");
    let without = folder(&weights(), &[("attention_bias", json!(true))]);
    let text = refusal(&without, "a flag without all biases");
    let missing = "no tensor model.layers.0.self_attn.o_proj.bias";
    assert!(text.contains(missing), "{text}");
    let norms = folder(&weights(), &[("model_type", json!("llama"))]);
    assert!(refusal(&norms, "norms of heads").contains("self_attn.q_norm.weight"));
}

#[test]
fn weights_of_other_types_are_refused() {
    let name = "model.layers.0.mlp.up_proj.weight";
    for (dtype, words) in [
        (DType::F8E4M3, "f8e4m3"),
        (DType::U8, "u8"),
        (DType::F64, "f64"),
    ] {
        let files = folder(&weights(), &[]);
        let path = files.0.path().join("model.safetensors");
        let device = candle_core::Device::Cpu;
        let mut tensors = candle_core::safetensors::load(&path, &device).unwrap();
        let narrow = tensors[name].to_dtype(dtype).unwrap();
        tensors.insert(name.to_owned(), narrow);
        candle_core::safetensors::save(&tensors, &path).unwrap();
        let text = refusal(&files, words);
        let says = format!("tensor {name} has elements of {words}; supported: f32, f16, bf16");
        assert!(text.contains(&says), "{text}");
    }
}

#[test]
fn a_folders_weights_are_those_that_it_names() {
    // An index decides which files are read; one that lies beside them is not.
    let files = folder(&weights(), &[]);
    let path = files.0.path().join("model.safetensors");
    let device = candle_core::Device::Cpu;
    let all = candle_core::safetensors::load(&path, &device).unwrap();
    std::fs::remove_file(path).unwrap();
    let (mut parts, mut map) = (Vec::new(), serde_json::Map::new());
    for i in 0..2 {
        let file = format!("part-{i}.safetensors");
        let mut names: Vec<&String> = all.keys().collect();
        names.sort();
        let of_part: std::collections::HashMap<String, _> = names
            .into_iter()
            .skip(i)
            .step_by(2)
            .map(|name| (name.clone(), all[name].clone()))
            .collect();
        for name in of_part.keys() {
            map.insert(name.clone(), json!(file));
        }
        candle_core::safetensors::save(&of_part, files.0.path().join(&file)).unwrap();
        parts.push(file);
    }
    let text = refusal(&files, "two files without an index");
    assert!(text.contains("part-0.safetensors\", \"part-1"), "{text}");
    let index = "model.safetensors.index.json";
    files.write(index, json!({ "weight_map": map }).to_string());
    files.write("consolidated.safetensors", "left aside");
    assert!(error_of(&files, &Settings::new()) < 1e-5);
    // A tensor that is not where the index says.
    for (name, file) in [
        ("model.norm.weight", json!("part-9.safetensors")),
        ("model.norm.weight", json!("../part-0.safetensors")),
        ("model.norn.weight", json!("part-0.safetensors")),
    ] {
        let mut wrong = map.clone();
        wrong.insert(name.to_owned(), file);
        files.write(index, json!({ "weight_map": wrong }).to_string());
        let loaded = attn_llm::load(files.0.path(), Products::F32, &mut |_, _| ());
        assert!(loaded.is_err(), "{name} is elsewhere");
    }
    let files = folder(&weights(), &[]);
    files.write("adapter_model.safetensors", "an adapter");
    let text = refusal(&files, "an adapter");
    assert!(text.contains("an adapter, which is not applied"), "{text}");
}

#[test]
fn metadata_that_may_change_results_is_followed_or_refused() {
    use gguf_file::Value::{Bool, F32, I32, String, U32};
    let files = Files::new();
    let with = |key: &'static str, value: Option<gguf_file::Value>| {
        let mut metadata = metadata();
        metadata.retain(|(known, _)| *known != key);
        metadata.extend(value.map(|value| (key, value)));
        files.load(&gguf(&weights(), &metadata, GgmlDType::F32))
    };
    let text = |text: &str| Some(String(text.to_owned()));
    for (key, value) in [
        ("qwen3.rope.freq_base", None),
        ("qwen3.rope.freq_base", Some(F32(f32::INFINITY))),
        ("qwen3.rope.scaling.factor", Some(F32(4.0))),
        ("qwen3.rope.scaling.attn_factor", Some(F32(1.5))),
        ("qwen3.attention.causal", Some(Bool(false))),
        ("qwen3.attention.head_count_kv", Some(I32(-1))),
        ("qwen3.logit_scale", Some(F32(0.5))),
        ("qwen3.attention.layer_norm_rms_epsilon", Some(F32(0.0))),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.add_bos_token", Some(U32(1))),
        ("tokenizer.ggml.add_eos_token", Some(Bool(true))),
        ("tokenizer.ggml.eos_token_id", Some(U32(VOCAB as u32))),
        ("general.type", text("adapter")),
        ("split.count", Some(U32(2))),
    ] {
        match with(key, value.clone()) {
            Err(error @ Error::Model { .. }) => {
                let error = error.to_string();
                assert!(
                    error.contains(key.trim_start_matches("qwen3.rope.scaling.")),
                    "{key}: {error}"
                );
            }
            Err(error) => panic!("{key}: {error}"),
            Ok(_) => panic!("{key}: {value:?} is taken"),
        }
    }
    let begin = with("tokenizer.ggml.add_bos_token", Some(Bool(true)));
    let error = begin.err().expect("there is no such token").to_string();
    assert!(error.contains("bos_token_id"), "{error}");
    let (model, _) = with("general.unheard_of", text("x")).unwrap();
    let said = model.remarks().join("\n");
    assert!(said.contains("\"general.unheard_of\""), "{said}");
    let (model, _) = with("general.name", text("x")).unwrap();
    assert!(model.remarks().is_empty(), "{:?}", model.remarks());
}
