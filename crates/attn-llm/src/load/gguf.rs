//! GGUF files: the model's shape and vocabulary from the metadata, tensors dequantized to f32.

use std::{fs::File, io::BufReader, path::Path};

use attn::{Heads, RotaryScaling, RotaryStyle};
use candle_core::{
    Tensor,
    quantized::{
        QTensor,
        gguf_file::{Content, Value},
    },
};

use super::{
    header,
    parts::{CPU, Names, Parts, Tensors, values},
};
use crate::{
    config::{ModelConfig, Rope},
    error::Error,
    linear::Products,
    model::Model,
    tokenizer::{GgufVocabulary, Tokenizer},
};

type Reader = BufReader<File>;

/// A file and its header.
struct Gguf {
    content: Content,
    file: Reader,
    len: u64,
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
    let opened = File::open(path).map_err(file)?;
    let len = opened.metadata().map_err(file)?.len();
    let mut reader = BufReader::new(opened);
    header::check(&mut reader).map_err(model)?;
    let content = Content::read(&mut reader).map_err(|e| model(e.to_string()))?;
    let mut gguf = Gguf {
        content,
        file: reader,
        len,
    };
    let config = gguf.config().map_err(model)?;
    config.check().map_err(model)?;
    let tokenizer = gguf.vocabulary().and_then(GgufVocabulary::tokenizer);
    let tokenizer = tokenizer.map_err(model)?;
    let mut parts = Parts {
        tensors: &mut gguf,
        names: Names::Gguf,
        products,
        device: products.device()?,
    };
    let built = parts.model(config, progress).map_err(model)?;
    Ok((built, tokenizer))
}

impl Tensors for Gguf {
    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String> {
        let Some(packed) = self.packed(name)? else {
            return Ok(None);
        };
        let tensor = packed.dequantize(&CPU);
        tensor.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }

    fn packed(&mut self, name: &str) -> Result<Option<QTensor>, String> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Ok(None);
        };
        // `header::check` bounds the elements.
        let (elements, block) = (info.shape.elem_count(), info.ggml_dtype.block_size());
        let bytes = (elements / block * info.ggml_dtype.type_size()) as u64;
        let end = self.content.tensor_data_offset.checked_add(info.offset);
        let end = end.and_then(|start| start.checked_add(bytes));
        let row = info.shape.dims().last().copied().unwrap_or(0);
        if !row.is_multiple_of(block) || end.is_none_or(|end| end > self.len) {
            return Err(format!(
                "tensor {name} lies beyond the end of the file, or has rows of no whole blocks"
            ));
        }
        let packed = self.content.tensor(&mut self.file, name, &CPU);
        packed.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }
}

impl Gguf {
    fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    fn required(&self, key: &str) -> Result<&Value, String> {
        self.value(key)
            .ok_or_else(|| format!("its metadata has no {key}"))
    }

    fn text(&self, key: &str) -> Result<&str, String> {
        let text = self.required(key)?.to_string();
        text.map(String::as_str)
            .map_err(|_| format!("{key} is no string"))
    }

    /// A number, whatever its type; none if the key is missing.
    fn integer(&self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let number = match value {
            Value::U8(x) => Some(u64::from(*x)),
            Value::U16(x) => Some(u64::from(*x)),
            Value::U32(x) => Some(u64::from(*x)),
            Value::U64(x) => Some(*x),
            Value::I32(x) => u64::try_from(*x).ok(),
            Value::I64(x) => u64::try_from(*x).ok(),
            _ => None,
        };
        let number = number.and_then(|x| usize::try_from(x).ok());
        number
            .map(Some)
            .ok_or_else(|| format!("{key} is no whole number, or one for each layer"))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, String> {
        let value = self.value(key).map(|value| value.to_f32());
        value
            .transpose()
            .map_err(|_| format!("{key} is no number of type f32"))
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.value(key).and_then(|value| value.to_bool().ok())
    }

    fn config(&mut self) -> Result<ModelConfig, String> {
        let architecture = self.text("general.architecture")?.to_owned();
        let style = match architecture.as_str() {
            "llama" => RotaryStyle::Interleaved,
            "qwen2" | "qwen3" => RotaryStyle::HalfSplit,
            _ => {
                return Err(format!(
                    "its architecture is {architecture}; supported: llama (SmolLM2 and Mistral, too), qwen2, qwen3"
                ));
            }
        };
        let scaling = self.scaling(&architecture)?;
        let key = |name: &str| format!("{architecture}.{name}");
        let integer = |name: &str| self.integer(&key(name));
        let needed = |name: &str| {
            let number = integer(name)?;
            number.ok_or_else(|| format!("its metadata has no {}", key(name)))
        };
        if integer("expert_count")?.is_some_and(|experts| experts > 0) {
            return Err("it is a mixture of experts, which is not supported".to_owned());
        }
        let hidden = needed("embedding_length")?;
        let layers = needed("block_count")?.min(1 << 16);
        let q = needed("attention.head_count")?;
        let dim = integer("attention.key_length")?.unwrap_or(hidden / q.max(1));
        if integer("attention.value_length")?.is_some_and(|value| value != dim) {
            return Err("its heads of K and V differ in length, which is not supported".to_owned());
        }
        let embeddings = self.content.tensor_infos.get(Names::Gguf.embeddings());
        // A window of n tokens holds the token itself.
        let window = integer("attention.sliding_window")?.filter(|window| *window > 0);
        Ok(ModelConfig {
            hidden,
            feed_forward: needed("feed_forward_length")?,
            heads: Heads {
                q,
                kv: integer("attention.head_count_kv")?.unwrap_or(q),
                dim,
            },
            vocab: embeddings
                .and_then(|info| info.shape.dims().first().copied())
                .unwrap_or(0),
            context: needed("context_length")?,
            norm_eps: self
                .float(&key("attention.layer_norm_rms_epsilon"))?
                .ok_or("its metadata has no epsilon of RMSNorm")?,
            rope: Rope::new(
                [integer("rope.dimension_count")?.unwrap_or(dim), dim],
                f64::from(self.float(&key("rope.freq_base"))?.unwrap_or(10_000.0)),
                style,
                &scaling,
            )?,
            windows: vec![window.map(|window| window - 1); layers],
            architecture,
        })
    }

    fn scaling(&mut self, architecture: &str) -> Result<RotaryScaling, String> {
        if let Some(factors) = self.get("rope_freqs.weight")? {
            return Ok(RotaryScaling::Factors {
                factors: values(&factors)?.into_iter().map(f64::from).collect(),
                attention_factor: 1.0,
            });
        }
        let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
        if self.value(&key("type")).is_none() {
            return Ok(RotaryScaling::None);
        }
        match (self.text(&key("type"))?, self.float(&key("factor"))?) {
            ("none", _) => Ok(RotaryScaling::None),
            ("linear", Some(factor)) => Ok(RotaryScaling::Linear {
                factor: f64::from(factor),
            }),
            (kind, _) => Err(format!(
                "its rotary positions are scaled by {kind}; supported: none, linear, and Llama 3's factors"
            )),
        }
    }

    fn strings(&self, key: &str) -> Result<Vec<String>, String> {
        let strings = self.required(key)?.to_vec().and_then(|values| {
            let strings = values.iter().map(|value| value.to_string().cloned());
            strings.collect()
        });
        strings.map_err(|_| format!("{key} is no list of strings"))
    }

    fn vocabulary(&self) -> Result<GgufVocabulary, String> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let optional = |name: &str| self.value(&key(name));
        let not_a_list = |name: &str| format!("{} is no list of numbers", key(name));
        let kinds = match optional("token_type") {
            None => Vec::new(),
            Some(kinds) => kinds
                .to_vec()
                .and_then(|kinds| kinds.iter().map(Value::to_i32).collect())
                .map_err(|_| not_a_list("token_type"))?,
        };
        let scores = match optional("scores") {
            None => Vec::new(),
            Some(scores) => scores
                .to_vec()
                .and_then(|scores| scores.iter().map(Value::to_f32).collect())
                .map_err(|_| not_a_list("scores"))?,
        };
        let merges = optional("merges").map(|_| self.strings(&key("merges")));
        let token = |name: &str| {
            let id = self.integer(&key(name))?;
            Ok::<_, String>(id.and_then(|id| u32::try_from(id).ok()))
        };
        let mut ends = Vec::new();
        for name in ["eos_token_id", "eot_token_id"] {
            ends.extend(token(name)?);
        }
        let model = self.text(&key("model"))?.to_owned();
        let is_pieces = model == "llama";
        Ok(GgufVocabulary {
            tokens: self.strings(&key("tokens"))?,
            kinds,
            scores,
            merges: merges.transpose()?.unwrap_or_default(),
            split: self.text(&key("pre")).unwrap_or("default").to_owned(),
            begin: token("bos_token_id")?,
            adds_begin: self.flag(&key("add_bos_token")).unwrap_or(is_pieces),
            adds_space: self.flag(&key("add_space_prefix")).unwrap_or(true),
            ends,
            model,
        })
    }
}
