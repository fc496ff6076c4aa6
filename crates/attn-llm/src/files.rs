//! The files of a model as Hugging Face names them.

use std::path::{Component, Path};

/// The list of a model's safetensors, where they are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The safetensors of a model that has one file.
pub(crate) const WHOLE: &str = "model.safetensors";

/// Whether a name of a list of files, which may come from the network, lies in the list's own folder.
pub(crate) fn is_inside(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    !file.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
}
