//! `attn quantize` and `attn dequantize`: K and V as pages in a safetensors file (`pages.rs` says how), and back.

use std::{cmp::Ordering, collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result, ensure};
use attn::{CacheConfig, HostPages, KvCache, KvFormat, convert};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::{
    console::Console,
    data::{Inputs, Kv, LayerName, Layout, load_kv, read},
    figures::{Difference, number},
    pages::{CHECKSUM, KIND, SETTINGS, checksum, read_pages},
    progress::bar,
    target::Target,
};

/// What `attn quantize` reads and writes.
#[derive(clap::Args)]
pub struct QuantizeArgs {
    /// A safetensors file with NAME.k and NAME.v, [seq, kv_heads, head_dim] or in the order that its metadata `layout` names, f16, bf16 or f32.
    input: PathBuf,
    /// The file to write: NAME.pages, and what else FORMATS.md asks for.
    output: PathBuf,
    /// The format, `k/v` or one name.
    #[arg(long)]
    kv: KvFormat,
    /// Tokens per page: 16, 32, 64 or 128.
    #[arg(long, default_value_t = 64)]
    page_size: usize,
    /// The order of K and V in a file whose metadata `layout` names none; tokens-first by default.
    #[arg(long)]
    layout: Option<Layout>,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
}

/// What `attn dequantize` reads and writes.
#[derive(clap::Args)]
pub struct DequantizeArgs {
    /// A file that `attn quantize` wrote.
    input: PathBuf,
    /// The file to write: NAME.k and NAME.v, [seq, kv_heads, head_dim], f32.
    output: PathBuf,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
}

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
    layer: LayerName,
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
            "layer": self.layer.raw(), "tokens": self.tokens, "bytes": self.bytes,
            "k_error": number(self.k_error), "v_error": number(self.v_error),
        })
    }
}

/// Quantizes K and V of every layer of the input into pages in the output.
pub fn quantize(args: &QuantizeArgs, console: &mut Console<'_>) -> Result<()> {
    let target = Target::new(&args.output, args.force, std::slice::from_ref(&args.input))?;
    let Inputs { layout, layers } = load_kv(&read(&args.input)?, args.layout)?;
    for kv in &layers {
        ensure!(
            !SETTINGS.contains(&kv.name.raw()),
            "layer {0} cannot be written: the metadata of pages has settings called {1}; rename the tensors {0}.k and {0}.v",
            kv.name,
            SETTINGS.join(", ")
        );
    }
    let (format, page_size) = (args.kv, args.page_size);
    let mut metadata = BTreeMap::from([
        ("attn".to_owned(), KIND.to_owned()),
        ("kv".to_owned(), format.to_string()),
        ("page_size".to_owned(), page_size.to_string()),
    ]);
    let (mut tensors, mut rows) = (Tensors::new(), Vec::new());
    let bar = bar(layers.len());
    for kv in &layers {
        bar.set_message(kv.name.to_string());
        let shape =
            json!({ "tokens": kv.seq, "num_kv_heads": kv.kv_heads, "head_dim": kv.head_dim });
        metadata.insert(kv.name.raw().to_owned(), shape.to_string());
        let row = quantize_layer(kv, format, page_size, &mut tensors)
            .with_context(|| format!("layer {} cannot be quantized", kv.name))?;
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let content = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (&**name, *dtype, &shape[..], &bytes[..]));
    let sum = checksum(&metadata, content.collect());
    metadata.insert(CHECKSUM.to_owned(), sum);
    let bytes = write(&target, tensors, &metadata)?;
    let file = target.path().display();
    console.table("| layer | tokens | bytes | K error | V error |\n|---|---|---|---|---|")?;
    for row in &rows {
        console.table(row.line())?;
    }
    console.table(format_args!("\nK and V read as {layout}"))?;
    console.table(format_args!("{bytes} bytes of {format} pages in {file}"))?;
    let rows: Vec<_> = rows.iter().map(Row::value).collect();
    console.value(&json!({
        "kv": format.to_string(), "file": file.to_string(), "bytes": bytes, "layout": layout.to_string(),
        "layers": rows,
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
            tensors.push((kv.name.tensor(suffix), dtype, shape, bytes));
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

/// One layer's pages, as a cache reads them back: without centres of K, for which the file has no place.
fn pages_of(kv: &Kv, format: KvFormat, page_size: usize) -> Result<(CacheConfig, Vec<Vec<u8>>)> {
    let config = kv.cache(format).page_size(page_size).centres(false).build();
    let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    cache.append(0, &kv.k, &kv.v)?;
    Ok((config, cache.read_back(0)?))
}

/// Writes the values of the pages in the input as f32 K and V.
pub fn dequantize(args: &DequantizeArgs, console: &mut Console<'_>) -> Result<()> {
    let target = Target::new(&args.output, args.force, std::slice::from_ref(&args.input))?;
    let pages = read_pages(&read(&args.input)?)?;
    if !pages.is_verified {
        console.remark(format_args!(
            "{} has no checksum: its lengths and codes are checked, its values are not",
            args.input.display()
        ));
    }
    let (mut tensors, mut rows) = (Vec::new(), Vec::new());
    for (name, layer) in &pages.layers {
        let [tokens, heads, dim] = layer.shape;
        for (side, x) in ["k", "v"].into_iter().zip(&layer.values) {
            tensors.push((
                name.tensor(side),
                Dtype::F32,
                vec![tokens, heads, dim],
                f32_bytes(x),
            ));
        }
        rows.push(
            json!({ "layer": name.raw(), "tokens": tokens, "num_kv_heads": heads, "head_dim": dim }),
        );
    }
    let layout = BTreeMap::from([("layout".to_owned(), Layout::TokensFirst.words())]);
    let bytes = write(&target, tensors, &layout)?;
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
