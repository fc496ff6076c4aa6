//! Files of pages: what `attn quantize` writes, and how it is read and checked.
//!
//! A safetensors file. Per layer NAME: `NAME.pages` U8 `[pages, page_bytes]`; `NAME.residual_pages` likewise, those of its first tile and of its last pages where
//! the format has a window; `NAME.k_scales`, `NAME.v_scales` F32 `[num_kv_heads]` for static scales. Metadata: `attn` = `pages 3`, `kv`, `page_size`,
//! `checksum`, and per NAME a JSON object with `tokens`, `num_kv_heads`, `head_dim`; so no layer can have the name of a setting. The bytes are
//! those of FORMATS.md.
//!
//! `checksum` is `blake3 ` and the hash, in hexadecimal digits, of: the number of the metadata's other entries, each entry's key and value in
//! order of the keys, the number of tensors, and each tensor's name, type as safetensors writes it, number of dimensions, dimensions and bytes
//! in order of the names. Numbers are u64, little-endian; before each text and before a tensor's bytes stands their length. A file without
//! one is read, too; its values are not known to be those that were written.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use attn::{CacheConfig, Heads, KvFormat, convert};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::data::{LayerName, parse};

/// What the metadata's `attn` says.
pub const KIND: &str = "pages 3";

/// Keys of the metadata that are no layers.
pub const SETTINGS: [&str; 4] = ["attn", "kv", "page_size", CHECKSUM];

/// The key of the checksum.
pub const CHECKSUM: &str = "checksum";

/// What tensors belong to a layer.
const SUFFIXES: [&str; 4] = ["pages", "residual_pages", "k_scales", "v_scales"];

/// A tensor's name, type, shape and bytes.
type Tensor<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

/// The checksum of a file's content; see the module.
pub fn checksum(metadata: &BTreeMap<String, String>, mut tensors: Vec<Tensor<'_>>) -> String {
    let mut hasher = blake3::Hasher::new();
    let number = |hasher: &mut blake3::Hasher, x: usize| {
        hasher.update(&(x as u64).to_le_bytes());
    };
    let text = |hasher: &mut blake3::Hasher, bytes: &[u8]| {
        number(hasher, bytes.len());
        hasher.update(bytes);
    };
    let others: Vec<_> = metadata
        .iter()
        .filter(|(key, _)| *key != CHECKSUM)
        .collect();
    number(&mut hasher, others.len());
    for (key, value) in others {
        text(&mut hasher, key.as_bytes());
        text(&mut hasher, value.as_bytes());
    }
    tensors.sort_by_key(|(name, ..)| *name);
    number(&mut hasher, tensors.len());
    for (name, dtype, shape, bytes) in tensors {
        text(&mut hasher, name.as_bytes());
        text(&mut hasher, dtype.to_string().as_bytes());
        number(&mut hasher, shape.len());
        shape.iter().for_each(|dim| number(&mut hasher, *dim));
        text(&mut hasher, bytes);
    }
    format!("blake3 {}", hasher.finalize().to_hex())
}

/// What the metadata says of all layers.
struct Settings {
    metadata: BTreeMap<String, String>,
    format: KvFormat,
    page_size: usize,
}

impl Settings {
    fn read(bytes: &[u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let metadata: BTreeMap<_, _> = metadata.into_iter().collect();
        let [kind, format, page_size] =
            ["attn", "kv", "page_size"].map(|key| setting(&metadata, key));
        let kind = kind?;
        ensure!(
            kind == KIND,
            "the file holds `{}`, but this version reads `{KIND}`; make it again with `attn quantize`",
            kind.escape_debug()
        );
        Ok(Settings {
            format: format?.parse()?,
            page_size: page_size?
                .parse()
                .context("the file's metadata `page_size` is not a number")?,
            metadata,
        })
    }

    /// Compares the file with its checksum; whether it has one.
    fn verify(&self, file: &SafeTensors<'_>) -> Result<bool> {
        let Some(stored) = self.metadata.get(CHECKSUM) else {
            return Ok(false);
        };
        let views = file.tensors();
        let tensors = views
            .iter()
            .map(|(name, view)| (&**name, view.dtype(), view.shape(), view.data()));
        let found = checksum(&self.metadata, tensors.collect());
        ensure!(
            *stored == found,
            "the file is damaged: its checksum is `{}`, but its content has `{found}`; make it again with `attn quantize`",
            stored.escape_debug()
        );
        Ok(true)
    }

    /// The layers that the metadata names.
    fn layers(&self) -> Vec<LayerName> {
        let keys = self.metadata.keys().map(String::as_str);
        keys.filter(|key| !SETTINGS.contains(key))
            .map(LayerName::new)
            .collect()
    }
}

fn setting<'a>(metadata: &'a BTreeMap<String, String>, key: &str) -> Result<&'a str> {
    let value = metadata.get(key).map(String::as_str);
    value.with_context(|| {
        format!("the file's metadata has no `{key}`; make it with `attn quantize`")
    })
}

/// A file of pages, read and checked.
pub struct Pages {
    /// The format of every layer.
    pub format: KvFormat,
    /// Tokens per page.
    pub page_size: usize,
    /// Layers by name.
    pub layers: BTreeMap<LayerName, Layer>,
    /// Whether the file has a checksum, which its content has, too.
    pub is_verified: bool,
}

/// A layer read from pages.
pub struct Layer {
    /// Tokens, KV heads, dims.
    pub shape: [usize; 3],
    /// K and V, each `[tokens, heads, dim]`.
    pub values: [Vec<f32>; 2],
    /// Bytes of its pages.
    pub bytes: usize,
}

/// Whether a file says that it holds pages.
pub fn is_pages(bytes: &[u8]) -> bool {
    let header = SafeTensors::read_metadata(bytes);
    header.is_ok_and(|(_, header)| {
        let metadata = header.metadata().as_ref();
        metadata.is_some_and(|metadata| metadata.contains_key("attn"))
    })
}

/// Reads a file that `attn quantize` wrote. Its checksum is compared, where it has one; every layer that its metadata names has pages, and every
/// tensor belongs to such a layer.
pub fn read_pages(bytes: &[u8]) -> Result<Pages> {
    let file = parse(bytes)?;
    let settings = Settings::read(bytes)?;
    let is_verified = settings.verify(&file)?;
    let names = settings.layers();
    ensure!(
        !names.is_empty(),
        "the file's metadata names no layer; make it with `attn quantize`"
    );
    let own: HashSet<&str> = names.iter().map(LayerName::raw).collect();
    for tensor in file.names() {
        let layer = tensor.rsplit_once('.');
        ensure!(
            layer.is_some_and(|(name, suffix)| own.contains(name) && SUFFIXES.contains(&suffix)),
            "the file is damaged: its tensor {tensor:?} belongs to no layer of its metadata; make it again with `attn quantize`"
        );
    }
    let mut layers = BTreeMap::new();
    for name in names {
        let layer = layer(&file, &name, &settings, bytes.len())?;
        layers.insert(name, layer);
    }
    Ok(Pages {
        format: settings.format,
        page_size: settings.page_size,
        layers,
        is_verified,
    })
}

/// Tokens, KV heads and dims of a layer, by the metadata.
fn shape(name: &LayerName, settings: &Settings, file_bytes: usize) -> Result<[usize; 3]> {
    let shape: Value = serde_json::from_str(setting(&settings.metadata, name.raw())?)
        .with_context(|| format!("the file's metadata `{name}` is not JSON"))?;
    // Nothing in a file outnumbers its bits.
    let most = file_bytes as u64 * 8;
    let number = |key: &str| match shape[key].as_u64() {
        Some(n) if (1..=most).contains(&n) => Ok(n as usize),
        Some(n) => bail!("the file's metadata `{name}` has `{key}` {n}; the file is damaged"),
        None => bail!("the file's metadata `{name}` has no number `{key}`"),
    };
    Ok([
        number("tokens")?,
        number("num_kv_heads")?,
        number("head_dim")?,
    ])
}

fn layer(
    file: &SafeTensors<'_>,
    name: &LayerName,
    settings: &Settings,
    file_bytes: usize,
) -> Result<Layer> {
    let shape = shape(name, settings, file_bytes)?;
    let [tokens, heads, dim] = shape;
    let heads = Heads::new(heads, heads, dim);
    let [k_scales, v_scales] = ["k_scales", "v_scales"].map(|suffix| scales(file, name, suffix));
    let config = CacheConfig::builder(settings.format, heads)
        .centres(false)
        .page_size(settings.page_size)
        .tensor_scales(k_scales?, v_scales?)
        .build();
    let damaged = || format!("layer {name} is damaged");
    config.check().with_context(damaged)?;
    let layout = config.layout()?;
    let home = tokens.div_ceil(settings.page_size);
    let residuals = layout.pages_of(tokens) - home;
    let mut pages = Vec::new();
    for (suffix, count) in [("pages", home), ("residual_pages", residuals)] {
        let view = file.tensor(&name.tensor(suffix)).ok();
        let data = view.as_ref().map_or(&[][..], |view| view.data());
        let needed = count.saturating_mul(layout.page_bytes());
        ensure!(
            data.len() == needed,
            "layer {name} is damaged: {name}.{suffix} has {} bytes, but {tokens} tokens have {needed}; make the file again with `attn quantize`",
            data.len()
        );
        let shape = [count, layout.page_bytes()];
        ensure!(
            view.is_none_or(|view| view.dtype() == Dtype::U8 && view.shape() == shape),
            "layer {name} is damaged: {name}.{suffix} is not U8 {shape:?}; make the file again with `attn quantize`"
        );
        pages.extend(data.chunks(layout.page_bytes()).map(<[u8]>::to_vec));
    }
    let (k_scales, v_scales) = (&config.k_tensor_scales, &config.v_tensor_scales);
    let values = convert::dequantize(&layout, &pages, tokens, k_scales, v_scales);
    Ok(Layer {
        shape,
        values: values.with_context(damaged)?,
        bytes: pages.iter().map(Vec::len).sum(),
    })
}

/// A tensor of static scales; none if the file has none.
fn scales(file: &SafeTensors<'_>, name: &LayerName, suffix: &str) -> Result<Vec<f32>> {
    let Ok(view) = file.tensor(&name.tensor(suffix)) else {
        return Ok(Vec::new());
    };
    ensure!(
        view.dtype() == Dtype::F32,
        "{name}.{suffix} is {:?}; it must be f32",
        view.dtype()
    );
    let bytes = view.data().chunks_exact(4);
    Ok(bytes
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}
