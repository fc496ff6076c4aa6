//! Folders as Hugging Face lays them out: `config.json`, `tokenizer.json`, and one or more safetensors.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use attn::{Heads, RotaryScaling, RotaryStyle};
use candle_core::{DType, Tensor, quantized::QTensor};
use serde_json::Value;

use super::parts::{CPU, Names, Parts, Tensors};
use crate::{
    config::{ModelConfig, Rope},
    error::Error,
    linear::Products,
    model::Model,
    tokenizer::Tokenizer,
};

/// The tensors of all files; each is handed out once.
struct Folder(HashMap<String, Tensor>);

impl Tensors for Folder {
    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String> {
        let Some(tensor) = self.0.remove(name) else {
            return Ok(None);
        };
        let wide = tensor.to_dtype(DType::F32);
        wide.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }

    fn packed(&mut self, _: &str) -> Result<Option<QTensor>, String> {
        Err("products with packed weights need a GGUF file; its weights are not packed".to_owned())
    }
}

/// Reads a folder's model and tokenizer; `path` is the folder, or its one safetensors file.
pub(super) fn load(
    path: &Path,
    products: Products,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Model, Tokenizer), Error> {
    let folder = match path.is_dir() {
        true => path,
        false => path.parent().unwrap_or(Path::new(".")),
    };
    let read = |path: PathBuf| match fs::read(&path) {
        Ok(bytes) => Ok((path, bytes)),
        Err(source) => Err(Error::File { path, source }),
    };
    let (config_path, bytes) = read(folder.join("config.json"))?;
    let refused = |reason| Error::Model {
        path: config_path.clone(),
        reason,
    };
    let json: Value = serde_json::from_slice(&bytes).map_err(|e| refused(e.to_string()))?;
    let config = config(&json).map_err(refused)?;
    config.check().map_err(refused)?;
    let (tokenizer_path, bytes) = read(folder.join("tokenizer.json"))?;
    let tokenizer = Tokenizer::from_json(&bytes, ends(&json)).map_err(|reason| Error::Model {
        path: tokenizer_path,
        reason,
    })?;
    let mut tensors = HashMap::new();
    for file in files(path, folder)? {
        let (file, bytes) = read(file)?;
        let loaded = candle_core::safetensors::load_buffer(&bytes, &CPU);
        tensors.extend(loaded.map_err(|e| Error::Model {
            path: file,
            reason: e.to_string(),
        })?);
    }
    let mut parts = Parts {
        tensors: &mut Folder(tensors),
        names: Names::Safetensors,
        products,
        device: products.device()?,
    };
    let model = parts.model(config, progress);
    Ok((
        model.map_err(|reason| Error::Model {
            path: path.to_owned(),
            reason,
        })?,
        tokenizer,
    ))
}

/// The safetensors of a folder in order of their names, or the one that was named.
fn files(path: &Path, folder: &Path) -> Result<Vec<PathBuf>, Error> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let unreadable = |source| Error::File {
        path: folder.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        if file.extension().is_some_and(|e| e == "safetensors") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// The tokens that end a text.
fn ends(json: &Value) -> Vec<u32> {
    let ids = match &json["eos_token_id"] {
        Value::Array(ids) => ids.clone(),
        id => vec![id.clone()],
    };
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    ids.iter().filter_map(id).collect()
}

/// The model's shape.
fn config(json: &Value) -> Result<ModelConfig, String> {
    let integer = |key: &str| {
        let number = json[key].as_u64().and_then(|x| usize::try_from(x).ok());
        number.ok_or_else(|| format!("it has no whole number {key}"))
    };
    let architecture = json["model_type"].as_str().unwrap_or("missing");
    if !matches!(architecture, "llama" | "mistral" | "qwen2" | "qwen3") {
        return Err(format!(
            "its model_type is {architecture}; supported: llama, mistral, qwen2, qwen3"
        ));
    }
    match json["hidden_act"].as_str() {
        None | Some("silu") => {}
        Some(act) => return Err(format!("its hidden_act is {act}; supported: silu")),
    }
    let (hidden, q) = (integer("hidden_size")?, integer("num_attention_heads")?);
    let dim = integer("head_dim").unwrap_or(hidden / q.max(1));
    let layers = integer("num_hidden_layers")?.min(1 << 16);
    Ok(ModelConfig {
        architecture: architecture.to_owned(),
        hidden,
        feed_forward: integer("intermediate_size")?,
        heads: Heads {
            q,
            kv: integer("num_key_value_heads").unwrap_or(q),
            dim,
        },
        vocab: integer("vocab_size")?,
        context: integer("max_position_embeddings")?,
        norm_eps: json["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
        rope: Rope::new(
            [dim, dim],
            json["rope_theta"].as_f64().unwrap_or(10_000.0),
            RotaryStyle::HalfSplit,
            &scaling(json)?,
        )?,
        windows: windows(json, layers),
    })
}

/// `rope_scaling` of a config, as transformers reads it.
fn scaling(config: &Value) -> Result<RotaryScaling, String> {
    let json = &config["rope_scaling"];
    let kind = json["rope_type"].as_str().or(json["type"].as_str());
    let number = |key: &str| {
        let number = json[key].as_f64();
        number.ok_or_else(|| format!("its rope_scaling has no number {key}"))
    };
    let original = "original_max_position_embeddings";
    match kind {
        None | Some("default") => Ok(RotaryScaling::None),
        Some("linear") => Ok(RotaryScaling::Linear {
            factor: number("factor")?,
        }),
        Some("llama3") => Ok(RotaryScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_context: number(original)?,
        }),
        Some("yarn") if !json["mscale"].is_null() => {
            Err("its rope_scaling has mscale, which is not supported".to_owned())
        }
        Some("yarn") => Ok(RotaryScaling::Yarn {
            factor: number("factor")?,
            original_context: number(original)
                .or_else(|reason| config["max_position_embeddings"].as_f64().ok_or(reason))?,
            beta_fast: json["beta_fast"].as_f64().unwrap_or(32.0),
            beta_slow: json["beta_slow"].as_f64().unwrap_or(1.0),
            truncate: json["truncate"].as_bool().unwrap_or(true),
            attention_factor: json["attention_factor"].as_f64(),
        }),
        Some(kind) => Err(format!(
            "its rope_scaling is {kind}; supported: default, linear, llama3, yarn"
        )),
    }
}

/// For each layer, the tokens before its own that a token sees: a window of n tokens holds the token itself.
fn windows(json: &Value, layers: usize) -> Vec<Option<usize>> {
    let size = json["sliding_window"].as_u64().filter(|size| *size > 0);
    let is_used = json["use_sliding_window"].as_bool() != Some(false);
    let left = size.filter(|_| is_used).map(|size| size as usize - 1);
    let kinds = json["layer_types"].as_array();
    // Qwen2 has a window in its layers from this one on.
    let first = match json["model_type"].as_str() {
        Some("mistral") => 0,
        _ => json["max_window_layers"].as_u64().unwrap_or(0) as usize,
    };
    let has_window = |layer: usize| match kinds.and_then(|kinds| kinds.get(layer)) {
        Some(kind) => kind == "sliding_attention",
        None => layer >= first,
    };
    let of = |layer: usize| left.filter(|_| has_window(layer));
    (0..layers).map(of).collect()
}
