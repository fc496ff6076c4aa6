//! `attn quantize` and `attn dequantize`: K and V as pages in a safetensors file, and back.
//!
//! Per layer NAME: `NAME.pages` U8 `[pages, page_bytes]`; `NAME.residual_pages` likewise, those of the last pages where the format has a
//! window; `NAME.k_scales`, `NAME.v_scales` F32 `[num_kv_heads]` for static scales. Metadata: `attn` = `pages 2`, `kv`, `page_size`, and per NAME a JSON object with
//! `tokens`, `num_kv_heads`, `head_dim`; so no layer can be called `attn`, `kv` or `page_size`. The bytes are those of FORMATS.md.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use anyhow::{Context, Result, bail, ensure};
use attn::{CacheConfig, Heads, HostPages, KvCache, KvFormat, convert};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::{
    console::Console,
    data::{Kv, load_kv, names, parse, read},
    figures::{Difference, number},
    target::Target,
};

/// What `attn quantize` reads and writes.
#[derive(clap::Args)]
pub struct QuantizeArgs {
    /// A safetensors file with NAME.k and NAME.v, [kv_heads, seq, head_dim], f16, bf16 or f32.
    input: PathBuf,
    /// The file to write: NAME.pages, and what else FORMATS.md asks for.
    output: PathBuf,
    /// The format, `k/v` or one name.
    #[arg(long)]
    kv: KvFormat,
    /// Tokens per page: 16, 32, 64 or 128.
    #[arg(long, default_value_t = 64)]
    page_size: usize,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
}

/// What `attn dequantize` reads and writes.
#[derive(clap::Args)]
pub struct DequantizeArgs {
    /// A file that `attn quantize` wrote.
    input: PathBuf,
    /// The file to write: NAME.k and NAME.v, [kv_heads, seq, head_dim], f32.
    output: PathBuf,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
}

/// What the metadata's `attn` says.
const KIND: &str = "pages 2";

/// Keys of the metadata that are no layers.
const SETTINGS: [&str; 3] = ["attn", "kv", "page_size"];

/// Tensors to write, each with its type, shape and bytes.
type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn f32_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The bytes of a safetensors file. Equal inputs give equal bytes: `safetensors::serialize` writes metadata in the order of a hash map.
fn serialize(mut tensors: Tensors, metadata: &BTreeMap<String, String>) -> Vec<u8> {
    // Wide elements first, so that every tensor is aligned to its elements.
    tensors.sort_by(|a, b| {
        (b.1, &a.0)
            .partial_cmp(&(a.1, &b.0))
            .unwrap_or(Ordering::Equal)
    });
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    if !metadata.is_empty() {
        header.insert("__metadata__".to_owned(), json!(metadata));
    }
    for (name, dtype, shape, bytes) in &tensors {
        let offsets = [end, end + bytes.len()];
        end = offsets[1];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(size_of::<u64>()) {
        header.push(' ');
    }
    let length = (header.len() as u64).to_le_bytes();
    let mut file = [&length[..], header.as_bytes()].concat();
    for (_, _, _, bytes) in &tensors {
        file.extend_from_slice(bytes);
    }
    file
}

fn write(target: &Target, tensors: Tensors, metadata: &BTreeMap<String, String>) -> Result<u64> {
    let bytes = serialize(tensors, metadata);
    target.write(&bytes)?;
    Ok(bytes.len() as u64)
}

/// A quantized layer: what is printed of it.
struct Row {
    layer: String,
    tokens: usize,
    bytes: usize,
    k_error: f64,
    v_error: f64,
}

impl Row {
    fn line(&self) -> String {
        format!(
            "| {} | {} | {} | {:.3} % | {:.3} % |",
            self.layer,
            self.tokens,
            self.bytes,
            self.k_error * 100.0,
            self.v_error * 100.0
        )
    }

    fn value(&self) -> Value {
        json!({
            "layer": self.layer, "tokens": self.tokens, "bytes": self.bytes,
            "k_error": number(self.k_error), "v_error": number(self.v_error),
        })
    }
}

/// Quantizes K and V of every layer of the input into pages in the output.
pub fn quantize(args: &QuantizeArgs, console: &mut Console<'_>) -> Result<()> {
    let target = Target::new(&args.output, args.force, Some(&args.input))?;
    let layers = load_kv(&read(&args.input)?)?;
    for kv in &layers {
        ensure!(
            !SETTINGS.contains(&kv.name.as_str()),
            "layer {0} cannot be written: the metadata of pages has settings called {1}; rename the tensors {0}.k and {0}.v",
            kv.name,
            SETTINGS.join(", ")
        );
    }
    let (format, page_size) = (args.kv, args.page_size);
    let settings = [KIND.to_owned(), format.to_string(), page_size.to_string()];
    let mut metadata: BTreeMap<_, _> = SETTINGS
        .map(str::to_owned)
        .into_iter()
        .zip(settings)
        .collect();
    let (mut tensors, mut rows) = (Vec::new(), Vec::new());
    for kv in &layers {
        let shape =
            json!({ "tokens": kv.seq, "num_kv_heads": kv.kv_heads, "head_dim": kv.head_dim });
        metadata.insert(kv.name.clone(), shape.to_string());
        let row = quantize_layer(kv, format, page_size, &mut tensors)
            .with_context(|| format!("layer {} cannot be quantized", kv.name))?;
        rows.push(row);
    }
    let bytes = write(&target, tensors, &metadata)?;
    let file = target.path().display();
    console.table("| layer | tokens | bytes | K error | V error |\n|---|---|---|---|---|")?;
    for row in &rows {
        console.table(row.line())?;
    }
    console.table(format_args!("\n{bytes} bytes of {format} pages in {file}"))?;
    let rows: Vec<_> = rows.iter().map(Row::value).collect();
    console.value(&json!({
        "kv": format.to_string(), "file": file.to_string(), "bytes": bytes, "layers": rows,
    }))?;
    Ok(())
}

/// Adds a layer's tensors.
fn quantize_layer(
    kv: &Kv,
    format: KvFormat,
    page_size: usize,
    tensors: &mut Tensors,
) -> Result<Row> {
    let (config, pages) = pages_of(kv, format, page_size)?;
    let layout = config.layout()?;
    let [k, v] = convert::dequantize(
        &layout,
        &pages,
        kv.seq,
        &config.k_tensor_scales,
        &config.v_tensor_scales,
    )?;
    let home = kv.seq.div_ceil(page_size);
    let mut add = |suffix: &str, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
        if !bytes.is_empty() {
            tensors.push((format!("{}.{suffix}", kv.name), dtype, shape, bytes));
        }
    };
    let (home, residuals) = pages.split_at(home);
    for (suffix, pages) in [("pages", home), ("residual_pages", residuals)] {
        let shape = vec![pages.len(), layout.page_bytes()];
        add(suffix, Dtype::U8, shape, pages.concat());
    }
    for (suffix, scales) in [
        ("k_scales", &config.k_tensor_scales),
        ("v_scales", &config.v_tensor_scales),
    ] {
        add(suffix, Dtype::F32, vec![scales.len()], f32_bytes(scales));
    }
    Ok(Row {
        layer: kv.name.clone(),
        tokens: kv.seq,
        bytes: pages.iter().map(Vec::len).sum(),
        k_error: Difference::of(&k, &kv.k).relative(),
        v_error: Difference::of(&v, &kv.v).relative(),
    })
}

/// One layer's pages, as a cache reads them back.
fn pages_of(kv: &Kv, format: KvFormat, page_size: usize) -> Result<(CacheConfig, Vec<Vec<u8>>)> {
    let config = kv.cache(format).page_size(page_size).build();
    let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    cache.append(0, &kv.k, &kv.v)?;
    Ok((config, cache.read_back(0)?))
}

/// What the metadata says of all layers.
struct Settings {
    metadata: HashMap<String, String>,
    format: KvFormat,
    page_size: usize,
}

impl Settings {
    fn read(bytes: &[u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let [kind, format, page_size] = SETTINGS.map(|key| setting(&metadata, key));
        let kind = kind?;
        ensure!(
            kind == KIND,
            "the file holds `{kind}`, but this version reads `{KIND}`; make it again with `attn quantize`"
        );
        Ok(Settings {
            format: format?.parse()?,
            page_size: page_size?
                .parse()
                .context("the file's metadata `page_size` is not a number")?,
            metadata,
        })
    }
}

fn setting<'a>(metadata: &'a HashMap<String, String>, key: &str) -> Result<&'a str> {
    let value = metadata.get(key).map(String::as_str);
    value.with_context(|| {
        format!("the file's metadata has no `{key}`; make it with `attn quantize`")
    })
}

/// Writes the values of the pages in the input as f32 K and V.
pub fn dequantize(args: &DequantizeArgs, console: &mut Console<'_>) -> Result<()> {
    let target = Target::new(&args.output, args.force, Some(&args.input))?;
    let pages = read_pages(&read(&args.input)?)?;
    let (mut tensors, mut rows) = (Vec::new(), Vec::new());
    for (name, layer) in &pages.layers {
        let [tokens, heads, dim] = layer.shape;
        for (side, x) in ["k", "v"].into_iter().zip(&layer.values) {
            tensors.push((
                format!("{name}.{side}"),
                Dtype::F32,
                vec![heads, tokens, dim],
                f32_bytes(&by_head(x, heads, dim)),
            ));
        }
        rows.push(
            json!({ "layer": name, "tokens": tokens, "num_kv_heads": heads, "head_dim": dim }),
        );
    }
    let bytes = write(&target, tensors, &BTreeMap::new())?;
    let (format, file) = (pages.format, target.path().display());
    console.table(format_args!(
        "{} layers of {format} pages as f32 in {file}, {bytes} bytes",
        rows.len()
    ))?;
    console.value(&json!({
        "kv": format.to_string(), "file": file.to_string(), "bytes": bytes, "layers": rows,
    }))?;
    Ok(())
}

/// `[tokens, heads, dim]` as `[heads, tokens, dim]`.
fn by_head(x: &[f32], heads: usize, dim: usize) -> Vec<f32> {
    let of_head = |h| {
        x.chunks_exact(dim)
            .skip(h)
            .step_by(heads)
            .flatten()
            .copied()
    };
    (0..heads).flat_map(of_head).collect()
}

/// A file of pages, read and checked.
pub struct Pages {
    /// The format of every layer.
    pub format: KvFormat,
    /// Tokens per page.
    pub page_size: usize,
    /// Layers by name.
    pub layers: BTreeMap<String, Layer>,
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

/// Reads a file that `attn quantize` wrote.
pub fn read_pages(bytes: &[u8]) -> Result<Pages> {
    let file = parse(bytes)?;
    let settings = Settings::read(bytes)?;
    let mut layers = BTreeMap::new();
    for name in names(&file, ".pages") {
        let layer = layer(&file, &name, &settings, bytes.len())?;
        layers.insert(name, layer);
    }
    ensure!(
        !layers.is_empty(),
        "the file has no tensor NAME.pages; make it with `attn quantize`"
    );
    Ok(Pages {
        format: settings.format,
        page_size: settings.page_size,
        layers,
    })
}

fn layer(
    file: &SafeTensors<'_>,
    name: &str,
    settings: &Settings,
    file_bytes: usize,
) -> Result<Layer> {
    let shape: Value = serde_json::from_str(setting(&settings.metadata, name)?)
        .with_context(|| format!("the file's metadata `{name}` is not JSON"))?;
    // Nothing in a file outnumbers its bits.
    let most = file_bytes as u64 * 8;
    let number = |key: &str| match shape[key].as_u64() {
        Some(n) if (1..=most).contains(&n) => Ok(n as usize),
        Some(n) => bail!("the file's metadata `{name}` has `{key}` {n}; the file is damaged"),
        None => bail!("the file's metadata `{name}` has no number `{key}`"),
    };
    let shape = [
        number("tokens")?,
        number("num_kv_heads")?,
        number("head_dim")?,
    ];
    let [tokens, heads, dim] = shape;
    let heads = Heads {
        q: heads,
        kv: heads,
        dim,
    };
    let [k_scales, v_scales] =
        ["k_scales", "v_scales"].map(|x| scales(file, &format!("{name}.{x}")));
    let config = CacheConfig::builder(settings.format, heads)
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
        let tensor = format!("{name}.{suffix}");
        let data = file.tensor(&tensor).map_or(&[][..], |view| view.data());
        let needed = count.saturating_mul(layout.page_bytes());
        ensure!(
            data.len() == needed,
            "layer {name} is damaged: {tensor} has {} bytes, but {tokens} tokens have {needed}; make the file again with `attn quantize`",
            data.len()
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
fn scales(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>> {
    let Ok(view) = file.tensor(name) else {
        return Ok(Vec::new());
    };
    ensure!(
        view.dtype() == Dtype::F32,
        "{name} is {:?}; it must be f32",
        view.dtype()
    );
    let bytes = view.data().chunks_exact(4);
    Ok(bytes
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}
