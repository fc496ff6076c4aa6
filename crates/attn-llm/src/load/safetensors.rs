//! Folders as Hugging Face lays them out: `config.json`, `tokenizer.json`, and one or more safetensors.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Tensor, quantized::QTensor};
use serde_json::Value;

use super::{
    config_json,
    parts::{CPU, Names, Parts, Tensors},
    quoted,
};
use crate::{
    error::Error,
    files::{INDEX, WHOLE, is_inside},
    linear::Products,
    model::Model,
    tokenizer::Tokenizer,
};

/// The tensors of all files; each is handed out once.
struct Folder(HashMap<String, Tensor>);

impl Tensors for Folder {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn get(&mut self, name: &str) -> Result<Option<Tensor>, String> {
        let Some(tensor) = self.0.remove(name) else {
            return Ok(None);
        };
        // Others are codes that mean nothing without scales.
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(format!(
                "tensor {name} has elements of {}; supported: f32, f16, bf16",
                tensor.dtype().as_str()
            ));
        }
        let wide = tensor.to_dtype(DType::F32);
        wide.map(Some).map_err(|e| format!("tensor {name}: {e}"))
    }

    fn packed(&mut self, _: &str) -> Result<Option<QTensor>, String> {
        Err("products with packed weights need a GGUF file; its weights are not packed".to_owned())
    }
}

fn refused(path: &Path, reason: String) -> Error {
    Error::Model {
        path: path.to_owned(),
        reason,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
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
    let config_path = folder.join("config.json");
    let config = config_json::read(&read(&config_path)?);
    let mut config = config.map_err(|reason| refused(&config_path, reason))?;
    let checked = config.model.check();
    checked.map_err(|reason| refused(&config_path, reason))?;
    let tokenizer_path = folder.join("tokenizer.json");
    let tokenizer = Tokenizer::from_json(&read(&tokenizer_path)?, config.ends);
    let tokenizer = tokenizer.map_err(|reason| refused(&tokenizer_path, reason))?;
    let tensors = match path.is_dir() {
        true => of_folder(folder, &mut config.remarks)?,
        false => tensors(path)?,
    };
    let mut parts = Parts {
        tensors: &mut Folder(tensors),
        names: Names::Safetensors,
        kind: config.kind,
        products,
        device: products.device()?,
    };
    let model = parts.model(config.model, progress);
    let mut model = model.map_err(|reason| refused(path, reason))?;
    model.remarks = config.remarks;
    Ok((model, tokenizer))
}

/// The tensors of a file.
fn tensors(path: &Path) -> Result<HashMap<String, Tensor>, Error> {
    let loaded = candle_core::safetensors::load_buffer(&read(path)?, &CPU);
    loaded.map_err(|e| refused(path, e.to_string()))
}

/// Files with which transformers changes the weights of a folder.
const ADAPTERS: [&str; 2] = ["adapter_model.safetensors", "adapter_config.json"];

/// The tensors of a folder: those of `model.safetensors`, or of the files that the index names, or of the only safetensors file.
fn of_folder(folder: &Path, remarks: &mut Vec<String>) -> Result<HashMap<String, Tensor>, Error> {
    let present = safetensors(folder)?;
    let has_adapter = |name: &&&str| folder.join(name).exists();
    if let Some(adapter) = ADAPTERS.iter().find(|name| has_adapter(name)) {
        return Err(refused(
            folder,
            format!(
                "it has {adapter}, an adapter, which is not applied; merge it into the weights, or name the file of the weights"
            ),
        ));
    }
    let index = folder.join(INDEX);
    let (all, used) = if present.contains(WHOLE) {
        (
            tensors(&folder.join(WHOLE))?,
            BTreeSet::from([WHOLE.to_owned()]),
        )
    } else if index.exists() {
        of_index(folder, &index)?
    } else if let (Some(only), 1) = (present.first(), present.len()) {
        (tensors(&folder.join(only))?, present.clone())
    } else {
        let names: Vec<&str> = present.iter().map(String::as_str).collect();
        return Err(refused(
            folder,
            format!(
                "it has {} safetensors files and neither {WHOLE} nor {INDEX}: {}; name the file of the weights",
                names.len(),
                quoted(&names)
            ),
        ));
    };
    let others: Vec<&str> = present.difference(&used).map(String::as_str).collect();
    if !others.is_empty() {
        remarks.push(format!("not read: {}", quoted(&others)));
    }
    Ok(all)
}

/// Names of a folder's safetensors files.
fn safetensors(folder: &Path) -> Result<BTreeSet<String>, Error> {
    let unreadable = |source| Error::File {
        path: folder.to_owned(),
        source,
    };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let file = PathBuf::from(entry.map_err(unreadable)?.file_name());
        if file.extension().is_some_and(|e| e == "safetensors") {
            names.insert(file.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// The tensors of an index and the names of their files; each tensor must be in the file that the index names.
fn of_index(
    folder: &Path,
    index: &Path,
) -> Result<(HashMap<String, Tensor>, BTreeSet<String>), Error> {
    let bytes = read(index)?;
    let json: Value = serde_json::from_slice(&bytes).map_err(|e| refused(index, e.to_string()))?;
    let mut files = BTreeMap::<&str, BTreeSet<&str>>::new();
    let map = json["weight_map"].as_object();
    for (name, file) in map.into_iter().flatten() {
        let file = file.as_str().filter(|file| is_inside(file));
        let file = file.ok_or_else(|| {
            refused(
                index,
                format!("tensor {name:?} has no file inside the folder"),
            )
        })?;
        files.entry(file).or_default().insert(name);
    }
    if files.is_empty() {
        return Err(refused(
            index,
            "it has no weight_map with tensors".to_owned(),
        ));
    }
    let mut all = HashMap::new();
    for (file, wanted) in &files {
        let path = folder.join(file);
        let found = tensors(&path)?;
        let names: BTreeSet<&str> = found.keys().map(String::as_str).collect();
        if let Some(name) = names.symmetric_difference(wanted).next() {
            let has = if wanted.contains(name) {
                "lacks"
            } else {
                "has"
            };
            let says = if wanted.contains(name) {
                "has"
            } else {
                "has not"
            };
            return Err(refused(
                &path,
                format!("it {has} the tensor {name:?}, which it {says} by {INDEX}"),
            ));
        }
        all.extend(found);
    }
    Ok((all, files.into_keys().map(str::to_owned).collect()))
}
