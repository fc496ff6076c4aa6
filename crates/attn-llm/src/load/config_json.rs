//! The shape of a model from its `config.json`, as transformers reads it.
//!
//! Every key that may change a result is understood, or refused by its name where it does. Keys that are not known are named in a remark.

use attn::{Heads, RotaryScaling, RotaryStyle};
use serde_json::{Map, Value};

use super::{
    fields::Fields,
    kind::{Kind, Output, Presence},
    quoted,
};
use crate::config::{ModelConfig, Rope};

/// What a `config.json` says.
#[derive(Debug)]
pub(super) struct Config {
    pub model: ModelConfig,
    pub kind: Kind,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Defaults that were taken, and keys that are not known.
    pub remarks: Vec<String>,
}

/// Keys that may change results and are supported with these values alone, beside null.
const SUPPORTED: &[(&str, &[&str])] = &[
    ("partial_rotary_factor", &["1", "1.0"]),
    ("rope_interleaved", &["false"]),
    ("rope_local_base_freq", &[]),
    ("original_max_position_embeddings", &[]),
    ("no_rope_layers", &[]),
    ("no_rope_layer_interval", &[]),
    ("use_mrope", &["false"]),
    ("alibi", &["false"]),
    ("dual_chunk_attention_config", &[]),
    ("sliding_window_pattern", &[]),
    ("attention_chunk_size", &[]),
    ("attention_multiplier", &[]),
    ("embedding_multiplier", &["1", "1.0"]),
    ("residual_multiplier", &["1", "1.0"]),
    ("logits_scaling", &["1", "1.0"]),
    ("logit_scale", &["1", "1.0"]),
    ("query_pre_attn_scalar", &[]),
    ("attn_logit_softcapping", &[]),
    ("final_logit_softcapping", &[]),
    ("clip_qkv", &[]),
    ("use_qk_norm", &[]),
    ("num_experts", &["0"]),
    ("num_local_experts", &["0"]),
    ("is_encoder_decoder", &["false"]),
    ("add_cross_attention", &["false"]),
];

/// Keys of checkpoints whose weights are codes.
const QUANTIZED: &[&str] = &["quantization_config", "compression_config", "quantization"];

/// Keys that change no logits.
const HARMLESS: &[&str] = &[
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "_flash_attn_2_enabled",
    "use_cache",
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "embd_pdrop",
    "attn_pdrop",
    "resid_pdrop",
    "pretraining_tp",
    "is_llama_config",
    "unsloth_version",
    "unsloth_fixed",
    "transformers.js_config",
    "tokenizer_class",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "torchscript",
    "is_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "finetuning_task",
    "prefix",
    "model_name",
    "chunk_size_feed_forward",
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
];

/// Reads a `config.json`.
pub(super) fn read(bytes: &[u8]) -> Result<Config, String> {
    let json: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let object = json.as_object().ok_or("it holds no object")?;
    let fields = Fields::new("its", object);
    let mut remarks = Vec::new();
    let architecture = fields.needed(fields.text("model_type")?, "model_type")?;
    let kind = Kind::of(architecture).ok_or_else(|| {
        format!("its model_type is {architecture}; supported: llama, mistral, qwen2, qwen3")
    })?;
    check_supported(&fields)?;
    let kind = parts(&fields, kind)?;
    let model = shape(&fields, architecture, &mut remarks)?;
    let ends = ends(&fields)?;
    let mut unknown = fields.unread();
    unknown.retain(|key| !HARMLESS.contains(key));
    if !unknown.is_empty() {
        remarks.push(format!(
            "config.json has keys that are not known here and are not used: {}",
            quoted(&unknown)
        ));
    }
    Ok(Config {
        model,
        kind,
        ends,
        remarks,
    })
}

fn check_supported(fields: &Fields<'_>) -> Result<(), String> {
    for key in QUANTIZED {
        if let Some(value) = fields.value(key) {
            let allowed = "weights of f32, f16 or bf16 without it, or a GGUF file";
            return Err(fields.refusal(key, value, allowed));
        }
    }
    for (key, supported) in SUPPORTED {
        if let Some(value) = fields.value(key)
            && !supported.contains(&value.to_string().as_str())
        {
            let allowed = [&["null"], *supported].concat().join(", ");
            return Err(fields.refusal(key, value, &allowed));
        }
    }
    match fields.value("hidden_act") {
        Some(act) if act != "silu" => Err(fields.refusal("hidden_act", act, "\"silu\"")),
        _ => Ok(()),
    }
}

/// The kind of model with what its flags say.
fn parts(fields: &Fields<'_>, kind: Kind) -> Result<Kind, String> {
    let bias = |key: &str, presence: Presence| match (fields.flag(key)?, presence) {
        (None, presence) => Ok(presence),
        (Some(true), Presence::Optional | Presence::Required) => Ok(Presence::Required),
        (Some(false), Presence::Optional | Presence::Never) => Ok(Presence::Never),
        (Some(given), _) => Err(fields.refusal(key, &given.into(), &(!given).to_string())),
    };
    // transformers ties nothing for these kinds of models unless it is told to.
    let is_tied = fields.flag("tie_word_embeddings")? == Some(true);
    Ok(Kind {
        qkv_bias: bias("attention_bias", kind.qkv_bias)?,
        output_bias: match kind.output_bias {
            // Qwen 2's flag, where a file has it, is of Q, K and V alone.
            Presence::Never => Presence::Never,
            presence => bias("attention_bias", presence)?,
        },
        mlp_bias: bias("mlp_bias", kind.mlp_bias)?,
        output: match is_tied {
            true => Output::Tied,
            false => Output::Own,
        },
        ..kind
    })
}

fn shape(
    fields: &Fields<'_>,
    architecture: &str,
    remarks: &mut Vec<String>,
) -> Result<ModelConfig, String> {
    let must = |key: &str| fields.needed(fields.count(key)?, key);
    let mut or = |value: Option<f64>, key: &str, default: f64| {
        value.unwrap_or_else(|| {
            remarks.push(format!("config.json has no {key}; {default} is taken"));
            default
        })
    };
    let (hidden, q) = (must("hidden_size")?, must("num_attention_heads")?);
    let dim = fields.count("head_dim")?.unwrap_or(hidden / q);
    let layers = must("num_hidden_layers")?.min(1 << 16);
    let context = must("max_position_embeddings")?;
    let (theta, scaling) = rope(fields, context)?;
    let theta = or(theta, "rope_theta", 10_000.0);
    Ok(ModelConfig {
        architecture: architecture.to_owned(),
        hidden,
        feed_forward: must("intermediate_size")?,
        heads: Heads::new(q, fields.count("num_key_value_heads")?.unwrap_or(q), dim),
        vocab: must("vocab_size")?,
        context,
        norm_eps: or(fields.positive("rms_norm_eps")?, "rms_norm_eps", 1e-6) as f32,
        rope: Rope::new([dim, dim], theta, RotaryStyle::HalfSplit, &scaling)?,
        windows: windows(fields, architecture, layers)?,
    })
}

/// The tokens that end a text.
fn ends(fields: &Fields<'_>) -> Result<Vec<u32>, String> {
    let key = "eos_token_id";
    let Some(value) = fields.value(key) else {
        return Ok(Vec::new());
    };
    let ids = match value {
        Value::Array(ids) => &ids[..],
        id => std::slice::from_ref(id),
    };
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let all: Option<Vec<u32>> = ids.iter().map(id).collect();
    all.ok_or_else(|| fields.refusal(key, value, "a token, or an array of tokens"))
}

/// The kinds of layers that `layer_types` and `rope_parameters` name.
const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// The base of rotary positions, where there is one, and their scaling: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`
/// of versions before it. What is said twice must be the same.
fn rope(fields: &Fields<'_>, context: usize) -> Result<(Option<f64>, RotaryScaling), String> {
    let mut theta = fields.positive("rope_theta")?;
    let mut scaling = None;
    let mut all = Vec::new();
    for key in ["rope_parameters", "rope_scaling"] {
        if let Some(object) = fields.object(key)? {
            all.extend(of_layer_types(key, object)?);
        }
    }
    for (whose, object) in all {
        let (own_theta, own) =
            scaling_of(&Fields::new(&format!("in its {whose},"), object), context)?;
        if theta.is_some_and(|theta| own_theta.is_some_and(|own| own != theta))
            || scaling.as_ref().is_some_and(|scaling| *scaling != own)
        {
            return Err(format!(
                "its {whose} differs from other entries for rotary positions (rope_parameters, rope_scaling, rope_theta); supported: one base and one scaling for all layers"
            ));
        }
        theta = theta.or(own_theta);
        scaling = Some(own);
    }
    Ok((theta, scaling.unwrap_or_default()))
}

/// An object of a config, and the key under which it is found.
type Found<'a> = (String, &'a Map<String, Value>);

/// An object with the parameters of rotary positions, or one of them for each kind of layers.
fn of_layer_types<'a>(key: &str, object: &'a Map<String, Value>) -> Result<Vec<Found<'a>>, String> {
    if !object
        .keys()
        .any(|name| LAYER_TYPES.contains(&name.as_str()))
    {
        return Ok(vec![(key.to_owned(), object)]);
    }
    let of_type = |(name, value): (&String, &'a Value)| match value.as_object() {
        Some(object) if LAYER_TYPES.contains(&name.as_str()) => {
            Ok((format!("{key}.{name}"), object))
        }
        _ => Err(format!(
            "its {key} has {name:?} beside kinds of layers; supported: {}",
            LAYER_TYPES.join(", ")
        )),
    };
    let given = object.iter().filter(|(_, value)| !value.is_null());
    given.map(of_type).collect()
}

/// One object with the parameters of rotary positions: the base, where it has one, and the scaling.
fn scaling_of(fields: &Fields<'_>, context: usize) -> Result<(Option<f64>, RotaryScaling), String> {
    let must = |key: &str| fields.needed(fields.positive(key)?, key);
    let theta = fields.positive("rope_theta")?;
    if fields
        .positive("partial_rotary_factor")?
        .is_some_and(|part| part != 1.0)
    {
        return Err("its partial_rotary_factor is not 1, which is not supported".to_owned());
    }
    let (kind, old) = (fields.text("rope_type")?, fields.text("type")?);
    if kind.zip(old).is_some_and(|(kind, old)| kind != old) {
        return Err("its scaling of rotary positions has a type and another rope_type".to_owned());
    }
    // The context before scaling; of those that are not for long contexts, it is of no use.
    let original = fields.positive("original_max_position_embeddings")?;
    let scaling = match kind.or(old) {
        None | Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear {
            factor: must("factor")?,
        },
        Some("llama3") => {
            let [low, high] = [must("low_freq_factor")?, must("high_freq_factor")?];
            if low >= high {
                return Err(format!(
                    "its low_freq_factor is {low}; allowed: below high_freq_factor, which is {high}"
                ));
            }
            RotaryScaling::Llama3 {
                factor: must("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: fields.needed(original, "original_max_position_embeddings")?,
            }
        }
        Some("yarn") => RotaryScaling::Yarn {
            factor: must("factor")?,
            original_context: original.unwrap_or(context as f64),
            beta_fast: fields.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: fields.positive("beta_slow")?.unwrap_or(1.0),
            truncate: fields.flag("truncate")?.unwrap_or(true),
            attention_factor: fields.positive("attention_factor")?,
        },
        Some(kind) => {
            return Err(format!(
                "its rotary positions are scaled by {kind}; supported: default, linear, llama3, yarn"
            ));
        }
    };
    let unread = fields.unread();
    match unread.is_empty() {
        true => Ok((theta, scaling)),
        false => Err(format!(
            "its scaling of rotary positions, of the type {}, has keys that are not supported: {}",
            kind.or(old).unwrap_or("default"),
            quoted(&unread)
        )),
    }
}

/// For each layer, the tokens before its own that a token sees: a window of n tokens holds the token itself.
fn windows(
    fields: &Fields<'_>,
    architecture: &str,
    layers: usize,
) -> Result<Vec<Option<usize>>, String> {
    let size = fields.count("sliding_window")?;
    let is_used = fields.flag("use_sliding_window")?;
    let first = fields.value("max_window_layers");
    let first = first.map(|first| {
        let number = first.as_u64().and_then(|x| usize::try_from(x).ok());
        number.ok_or_else(|| fields.refusal("max_window_layers", first, "a whole number from 0 on"))
    });
    let first = first.transpose()?;
    let kinds = layer_types(fields, layers)?;
    // As in transformers: Llama has no windows, Mistral has one in every layer, Qwen has windows if it is told to use them.
    let left = match (architecture, size) {
        ("llama", Some(size)) => {
            return Err(format!(
                "its sliding_window is {size}, but models of the type llama have none; supported: null"
            ));
        }
        ("mistral", Some(size)) if is_used != Some(false) => Some(size - 1),
        (_, Some(size)) if is_used == Some(true) => Some(size - 1),
        _ => None,
    };
    let has_window = |layer: usize| match (&kinds, first) {
        (Some(kinds), _) => Ok(kinds[layer]),
        (None, _) if left.is_none() => Ok(false),
        (None, _) if architecture == "mistral" => Ok(true),
        (None, Some(first)) => Ok(layer >= first),
        (None, None) => Err(
            "its use_sliding_window is true, but it has neither layer_types nor max_window_layers"
                .to_owned(),
        ),
    };
    (0..layers)
        .map(|layer| match (has_window(layer)?, left) {
            (false, _) => Ok(None),
            (true, Some(left)) => Ok(Some(left)),
            (true, None) => Err(format!(
                "its layer_types has sliding_attention in layer {layer}, but no sliding_window is in use (sliding_window, use_sliding_window)"
            )),
        })
        .collect()
}

/// For each layer whether `layer_types` gives it a window; none if there is no such key.
fn layer_types(fields: &Fields<'_>, layers: usize) -> Result<Option<Vec<bool>>, String> {
    let Some(value) = fields.value("layer_types") else {
        return Ok(None);
    };
    let kind = |kind: &Value| LAYER_TYPES.iter().position(|known| kind == known);
    let kinds = value
        .as_array()
        .and_then(|kinds| kinds.iter().map(kind).collect());
    let kinds: Option<Vec<usize>> = kinds;
    let kinds = kinds.filter(|kinds| kinds.len() == layers);
    let allowed = format!("{layers} times one of {}", LAYER_TYPES.join(", "));
    let kinds = kinds.ok_or_else(|| fields.refusal("layer_types", value, &allowed))?;
    Ok(Some(kinds.into_iter().map(|kind| kind == 1).collect()))
}
