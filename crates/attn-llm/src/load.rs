//! Models from files: GGUF, or a folder of safetensors.
//!
//! `load/gguf.rs` (over `load/header.rs`, `load/metadata.rs`) and `load/safetensors.rs` (over `load/config_json.rs`, `load/fields.rs`) read the
//! shape of a model and its tensors; `load/kind.rs` says which tensors a kind of model has, and `load/parts.rs` makes a model of them.
//!
//! A key or a tensor that may change results is understood, or refused by its name; what is not known at all is named in [`Model::remarks`].

mod config_json;
mod fields;
mod gguf;
mod header;
mod kind;
mod metadata;
mod parts;
mod safetensors;

use std::path::Path;

use crate::{error::Error, linear::Products, model::Model, tokenizer::Tokenizer};

/// Reads a model and its tokenizer: a GGUF file, or a folder with `config.json`, `tokenizer.json` and safetensors.
///
/// `progress` gets the number of layers read so far, and of all layers.
///
/// # Errors
/// [`Error::File`]; [`Error::Model`] with the reason, for files that are damaged, for kinds of models that are not supported, and for
/// [`Products::Packed`] of safetensors; [`Error::Request`] for products that this build lacks; candle's, if it opens no device.
pub fn load(
    path: &Path,
    products: Products,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Model, Tokenizer), Error> {
    let is_folder = path.is_dir() || path.extension().is_some_and(|e| e == "safetensors");
    if is_folder {
        safetensors::load(path, products, progress)
    } else {
        gguf::load(path, products, progress)
    }
}

/// The most names in a sentence.
const MAX_NAMES: usize = 16;

/// Names for a sentence: quoted, without control characters.
fn quoted(names: &[&str]) -> String {
    let first = names.iter().take(MAX_NAMES);
    let first: Vec<_> = first.map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(MAX_NAMES) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
