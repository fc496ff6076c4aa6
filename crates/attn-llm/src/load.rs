//! Models from files: GGUF, or a folder of safetensors.
//!
//! `load/gguf.rs` and `load/safetensors.rs` read the shape of a model and its tensors; `load/parts.rs` makes a model of them.

mod gguf;
mod header;
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
