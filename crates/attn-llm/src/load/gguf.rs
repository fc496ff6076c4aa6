//! GGUF files: the model's shape and vocabulary from the metadata, tensors dequantized to f32.

use std::{fs::File, io::BufReader, path::Path};

use attn::{Heads, RotaryScaling, RotaryStyle};
use candle_core::{
    Shape, Tensor,
    quantized::{QTensor, gguf_file::TensorInfo},
};

use super::{
    header::{self, Header},
    kind::Kind,
    metadata::{Metadata, needed},
    parts::{CPU, Names, Parts, ROPE_FACTORS, Tensors, values},
    quoted,
};
use crate::{
    config::{ModelConfig, Rope},
    error::Error,
    linear::Products,
    model::Model,
    tokenizer::{GgufVocabulary, Tokenizer},
};

/// A file and its header.
struct Gguf {
    header: Header,
    file: BufReader<File>,
}

/// Reads a file's model and tokenizer.
pub(super) fn load(
    path: &Path,
    products: Products,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Model, Tokenizer), Error> {
    let file = |source| Error::File {
        path: path.to_owned(),
        source,
    };
    let model = |reason| Error::Model {
        path: path.to_owned(),
        reason,
    };
    let mut file = BufReader::new(File::open(path).map_err(file)?);
    let header = header::read(&mut file).map_err(model)?;
    let mut gguf = Gguf { header, file };
    let mut remarks = Vec::new();
    let (config, kind) = gguf.config(&mut remarks).map_err(model)?;
    config.check().map_err(model)?;
    let vocabulary = gguf.vocabulary(config.vocab, &mut remarks);
    check_keys(&gguf.header.metadata, &config.architecture, &mut remarks).map_err(model)?;
    let tokenizer = vocabulary.and_then(GgufVocabulary::tokenizer);
    let tokenizer = tokenizer.map_err(model)?;
    let mut parts = Parts {
        tensors: &mut gguf,
        names: Names::Gguf,
        kind,
        products,
        device: products.device()?,
    };
    let mut built = parts.model(config, progress).map_err(model)?;
    built.remarks = remarks;
    Ok((built, tokenizer))
}

impl Tensors for Gguf {
    fn names(&self) -> Vec<String> {
        self.header.tensors.keys().cloned().collect()
    }

    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String> {
        let Some(packed) = self.packed(name)? else {
            return Ok(None);
        };
        let tensor = packed.dequantize(&CPU);
        tensor.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }

    fn packed(&mut self, name: &str) -> Result<Option<QTensor>, String> {
        let Some(place) = self.header.tensors.get(name) else {
            return Ok(None);
        };
        let info = TensorInfo {
            ggml_dtype: place.dtype,
            shape: Shape::from(place.shape.clone()),
            offset: place.start,
        };
        // The place is counted from the file's first byte.
        let packed = info.read(&mut self.file, 0, &CPU);
        packed.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }
}

/// What a kind of model has, and which elements of its heads are turned together.
fn kind(architecture: &str) -> Result<(Kind, RotaryStyle), String> {
    let style = match architecture {
        "llama" => Some(RotaryStyle::Interleaved),
        "qwen2" | "qwen3" => Some(RotaryStyle::HalfSplit),
        _ => None,
    };
    let both = Kind::of(architecture).zip(style);
    both.ok_or_else(|| {
        format!(
            "its architecture is {architecture}; supported: llama (SmolLM2 and Mistral, too), qwen2, qwen3"
        )
    })
}

impl Gguf {
    fn config(&mut self, remarks: &mut Vec<String>) -> Result<(ModelConfig, Kind), String> {
        let key = "general.architecture";
        let architecture = needed(self.header.metadata.text(key)?, key)?;
        let (kind, style) = kind(&architecture)?;
        let scaling = self.scaling(&architecture)?;
        let metadata = &self.header.metadata;
        let key = |name: &str| format!("{architecture}.{name}");
        let count = |name: &str| metadata.count(&key(name));
        let must = |name: &str| needed(count(name)?, &key(name));
        if count("expert_count")?.is_some_and(|experts| experts > 0) {
            return Err("it is a mixture of experts, which is not supported".to_owned());
        }
        let hidden = must("embedding_length")?;
        let layers = must("block_count")?.min(1 << 16);
        let q = must("attention.head_count")?;
        let dim = count("attention.key_length")?.unwrap_or(hidden / q.max(1));
        if count("attention.value_length")?.is_some_and(|value| value != dim) {
            return Err("its heads of K and V differ in length, which is not supported".to_owned());
        }
        let embeddings = self.header.tensors.get(Names::Gguf.embeddings());
        let vocab = embeddings.and_then(|place| place.shape.first().copied());
        // A window of n tokens holds the token itself; one of 0 tokens is none.
        let window = count("attention.sliding_window")?.filter(|window| *window > 0);
        let eps = "attention.layer_norm_rms_epsilon";
        let eps = needed(metadata.positive(&key(eps))?, &key(eps))? as f32;
        let base = metadata.positive(&key("rope.freq_base"))?;
        // Files of Llama 1 and 2 have none.
        if architecture == "llama" && base.is_none() {
            remarks.push(format!(
                "its metadata has no {}; 10000 is taken",
                key("rope.freq_base")
            ));
        }
        let base = match (architecture.as_str(), base) {
            ("llama", None) => 10_000.0,
            (_, base) => needed(base, &key("rope.freq_base"))?,
        };
        let config = ModelConfig {
            hidden,
            feed_forward: must("feed_forward_length")?,
            heads: Heads::new(q, count("attention.head_count_kv")?.unwrap_or(q), dim),
            vocab: vocab.unwrap_or(0),
            context: must("context_length")?,
            norm_eps: eps,
            rope: Rope::new(
                [count("rope.dimension_count")?.unwrap_or(dim), dim],
                base,
                style,
                &scaling,
            )?,
            windows: vec![window.map(|window| window - 1); layers],
            architecture,
        };
        Ok((config, kind))
    }

    fn scaling(&mut self, architecture: &str) -> Result<RotaryScaling, String> {
        let factors = self.get(ROPE_FACTORS)?;
        let metadata = &self.header.metadata;
        let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
        let kind = metadata.text(&key("type"))?;
        let factor = metadata.positive(&key("factor"))?;
        match (kind.as_deref(), factor, factors) {
            (None | Some("none"), None, Some(factors)) => Ok(RotaryScaling::Factors {
                factors: positive(&factors)?,
                attention_factor: 1.0,
            }),
            (Some("none"), _, None) | (None, None, None) => Ok(RotaryScaling::None),
            (Some("linear"), Some(factor), None) => Ok(RotaryScaling::Linear { factor }),
            (kind, ..) => Err(format!(
                "its rotary positions are scaled by {}; supported: none, linear with its factor, or Llama 3's factors ({ROPE_FACTORS}) alone",
                kind.unwrap_or("a factor without a type")
            )),
        }
    }

    fn vocabulary(
        &self,
        vocab: usize,
        remarks: &mut Vec<String>,
    ) -> Result<GgufVocabulary, String> {
        let metadata = &self.header.metadata;
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let tokens = needed(metadata.texts(&key("tokens"))?, &key("tokens"))?;
        if tokens.len() != vocab {
            return Err(format!(
                "{} has {} tokens, but its embeddings are of {vocab}",
                key("tokens"),
                tokens.len()
            ));
        }
        let token = |name: &str| match metadata.count(&key(name))? {
            Some(id) if id >= vocab => Err(format!(
                "{} is {id}; allowed: 0 to {}",
                key(name),
                vocab - 1
            )),
            id => Ok(id.map(|id| id as u32)),
        };
        let mut ends = Vec::new();
        for name in ["eos_token_id", "eot_token_id"] {
            ends.extend(token(name)?);
        }
        if ends.is_empty() {
            remarks.push("its metadata names no token that ends a text".to_owned());
        }
        let model = needed(metadata.text(&key("model"))?, &key("model"))?;
        let is_pieces = model == "llama";
        let merges = metadata.texts(&key("merges"))?;
        let split = metadata.text(&key("pre"))?;
        if !is_pieces && split.is_none() {
            let pre = key("pre");
            remarks.push(format!(
                "its metadata has no {pre}; text is split as GPT-2 does"
            ));
        }
        let adds_begin = metadata.flag(&key("add_bos_token"))?.unwrap_or(is_pieces);
        let begin = token("bos_token_id")?;
        Ok(GgufVocabulary {
            kinds: metadata.integers(&key("token_type"))?.unwrap_or_default(),
            scores: metadata.floats(&key("scores"))?.unwrap_or_default(),
            merges: match is_pieces {
                true => merges.unwrap_or_default(),
                false => needed(merges, &key("merges"))?,
            },
            split: split.unwrap_or_else(|| "gpt-2".to_owned()),
            begin,
            adds_begin,
            adds_space: metadata.flag(&key("add_space_prefix"))?.unwrap_or(true),
            ends,
            tokens,
            model,
        })
    }
}

/// Divisors of frequencies.
fn positive(factors: &Tensor) -> Result<Vec<f64>, String> {
    let factors: Vec<f64> = values(factors)?.into_iter().map(f64::from).collect();
    match factors.iter().find(|factor| !(**factor > 0.0)) {
        None => Ok(factors),
        Some(wrong) => Err(format!(
            "{ROPE_FACTORS} has the factor {wrong}; allowed: above 0"
        )),
    }
}

/// Keys of the architecture that change no result of the models that are read here; some files of Qwen 2 say that it has a parallel residual,
/// which it has not.
const HARMLESS_OF_ARCHITECTURE: &[&str] = &[
    "vocab_size",
    "expert_used_count",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "attention.layer_norm_epsilon",
    "use_parallel_residual",
];

/// Other keys that change no result, in full or, with a dot or an underscore at the end, by their beginning.
const HARMLESS: &[&str] = &[
    "general.name",
    "general.author",
    "general.version",
    "general.organization",
    "general.description",
    "general.license",
    "general.license.",
    "general.url",
    "general.doi",
    "general.uuid",
    "general.repo_url",
    "general.source.",
    "general.base_model.",
    "general.dataset.",
    "general.datasets",
    "general.tags",
    "general.languages",
    "general.file_type",
    "general.quantization_version",
    "general.quantized_by",
    "general.size_label",
    "general.finetune",
    "general.basename",
    "general.sampling.",
    "general.parameter_count",
    "quantize.imatrix.",
    "split.no",
    "split.tensors.count",
    "tokenizer.chat_template",
    "tokenizer.chat_template.",
    "tokenizer.chat_templates",
    "tokenizer.huggingface.json",
    "tokenizer.ggml.token_type_count",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.separator_token_id",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.ggml.mask_token_id",
    "tokenizer.ggml.add_sep_token",
    "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.ggml.fim_",
    "tokenizer.ggml.added_tokens",
    "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.eog_token_ids",
];

/// Refuses keys of the architecture that nothing has read and that may change results, and names those of others in a remark.
fn check_keys(
    metadata: &Metadata,
    architecture: &str,
    remarks: &mut Vec<String>,
) -> Result<(), String> {
    let end = "tokenizer.ggml.add_eos_token";
    if metadata.flag(end)? == Some(true) {
        return Err(format!("{end} is true; supported: false"));
    }
    match metadata.text("general.type")?.as_deref() {
        None | Some("model") => {}
        Some(kind) => return Err(format!("general.type is {kind:?}; supported: \"model\"")),
    }
    if let Some(parts) = metadata.count("split.count")?.filter(|parts| *parts > 1) {
        return Err(format!(
            "it is one of the {parts} files of a model (split.count); merge them into one"
        ));
    }
    let (mut refused, mut unknown) = (Vec::new(), Vec::new());
    for key in metadata.unread() {
        let of_architecture = key.strip_prefix(architecture);
        let of_architecture = of_architecture.and_then(|key| key.strip_prefix('.'));
        let is_harmless =
            |known: &&str| key == *known || known.ends_with(['.', '_']) && key.starts_with(known);
        match of_architecture {
            Some(name) if HARMLESS_OF_ARCHITECTURE.contains(&name) => {}
            Some(_) => refused.push(key),
            None if HARMLESS.iter().any(is_harmless) => {}
            None => unknown.push(key),
        }
    }
    if !refused.is_empty() {
        return Err(format!(
            "its metadata has keys that may change its results and are not supported: {}",
            quoted(&refused)
        ));
    }
    if !unknown.is_empty() {
        remarks.push(format!(
            "its metadata has keys that are not known here and are not used: {}",
            quoted(&unknown)
        ));
    }
    Ok(())
}
