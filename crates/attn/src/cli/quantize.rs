//! `attn quantize` and `attn dequantize`: K and V as pages in a safetensors file, and back.
//!
//! Per layer NAME: `NAME.pages` U8 `[pages, page_bytes]`; `NAME.tail` U8, the tail page of an open int4-channel page; `NAME.k_scales`,
//! `NAME.v_scales` F32 `[num_kv_heads]` for static scales. Metadata: `attn` = `pages 1`, `kv`, `page_size`, and per NAME a JSON object with
//! `tokens`, `num_kv_heads`, `head_dim`. The bytes are those of FORMATS.md.

use std::{collections::HashMap, path::Path};

use anyhow::{Context, Result, bail, ensure};
use attn::{CacheConfig, HostPages, KvCache, KvFormat, convert};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use crate::data::{Kv, load_kv, names, parse, read, tensor_scales};

/// What the metadata's `attn` says.
const KIND: &str = "pages 1";

/// Tensors to write, each with its type, shape and bytes.
type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn f32_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn write(path: &Path, tensors: Tensors, metadata: HashMap<String, String>) -> Result<u64> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let bytes = safetensors::serialize(views, Some(metadata))?;
    std::fs::write(path, &bytes).with_context(|| {
        format!(
            "cannot write {}; check that its folder exists and is writable",
            path.display()
        )
    })?;
    Ok(bytes.len() as u64)
}

fn refuse_same(input: &Path, output: &Path) -> Result<()> {
    let same = input.canonicalize().ok().zip(output.canonicalize().ok());
    ensure!(
        same.is_none_or(|(a, b)| a != b),
        "{} is both input and output; write to another file",
        input.display()
    );
    Ok(())
}

/// Relative L2 difference.
fn relative(got: &[f32], want: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in got.iter().zip(want) {
        error += f64::from(a - b).powi(2);
        norm += f64::from(*b).powi(2);
    }
    if norm == 0.0 {
        error.sqrt()
    } else {
        (error / norm).sqrt()
    }
}

/// Quantizes K and V of every layer of `input` into pages in `output`.
pub fn quantize(
    input: &Path,
    output: &Path,
    format: KvFormat,
    page_size: usize,
    as_json: bool,
) -> Result<()> {
    refuse_same(input, output)?;
    let layers = load_kv(&read(input)?)?;
    let mut metadata = HashMap::from([
        ("attn".to_owned(), KIND.to_owned()),
        ("kv".to_owned(), format.to_string()),
        ("page_size".to_owned(), page_size.to_string()),
    ]);
    let (mut tensors, mut rows) = (Vec::new(), Vec::new());
    for kv in &layers {
        let (config, pages) = pages_of(kv, format, page_size)
            .with_context(|| format!("layer {} cannot be quantized", kv.name))?;
        let layout = config.layout()?;
        let [k, v] = convert::dequantize(
            &layout,
            &pages,
            kv.seq,
            &config.k_tensor_scales,
            &config.v_tensor_scales,
        )?;
        let shape =
            json!({ "tokens": kv.seq, "num_kv_heads": kv.kv_heads, "head_dim": kv.head_dim });
        metadata.insert(kv.name.clone(), shape.to_string());
        let home = kv.seq.div_ceil(page_size);
        let mut add = |suffix: &str, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
            if !bytes.is_empty() {
                tensors.push((format!("{}.{suffix}", kv.name), dtype, shape, bytes));
            }
        };
        add(
            "pages",
            Dtype::U8,
            vec![home, layout.page_bytes()],
            pages[..home].concat(),
        );
        let tail = pages[home..].concat();
        add("tail", Dtype::U8, vec![tail.len()], tail);
        for (suffix, scales) in [
            ("k_scales", &config.k_tensor_scales),
            ("v_scales", &config.v_tensor_scales),
        ] {
            add(suffix, Dtype::F32, vec![scales.len()], f32_bytes(scales));
        }
        rows.push(json!({
            "layer": kv.name, "tokens": kv.seq, "bytes": pages.concat().len(),
            "k_error": relative(&k, &kv.k), "v_error": relative(&v, &kv.v),
        }));
    }
    let bytes = write(output, tensors, metadata)?;
    if as_json {
        let file = output.display().to_string();
        println!(
            "{}",
            json!({ "kv": format.to_string(), "file": file, "bytes": bytes, "layers": rows })
        );
        return Ok(());
    }
    println!("| layer | tokens | bytes | K error | V error |");
    println!("|---|---|---|---|---|");
    for row in &rows {
        let percent = |key: &str| row[key].as_f64().unwrap_or(f64::NAN) * 100.0;
        println!(
            "| {} | {} | {} | {:.3} % | {:.3} % |",
            row["layer"].as_str().unwrap_or(""),
            row["tokens"],
            row["bytes"],
            percent("k_error"),
            percent("v_error")
        );
    }
    println!("\n{bytes} bytes of {format} pages in {}", output.display());
    Ok(())
}

/// One layer's pages, as a cache reads them back.
fn pages_of(kv: &Kv, format: KvFormat, page_size: usize) -> Result<(CacheConfig, Vec<Vec<u8>>)> {
    let mut config = CacheConfig::new(format, kv.kv_heads, kv.head_dim, 1, 0);
    config.page_size = page_size;
    config.num_pages = config.pages_for(kv.seq);
    config.k_tensor_scales = tensor_scales(format.k, &kv.k, kv.kv_heads, kv.head_dim);
    config.v_tensor_scales = tensor_scales(format.v, &kv.v, kv.kv_heads, kv.head_dim);
    let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    cache.append(0, &kv.k, &kv.v)?;
    Ok((config, cache.read_back(0)?))
}

/// Writes the values of the pages in `input` as f32 K and V.
pub fn dequantize(input: &Path, output: &Path, as_json: bool) -> Result<()> {
    refuse_same(input, output)?;
    let bytes = read(input)?;
    let file = parse(&bytes)?;
    let (_, header) = SafeTensors::read_metadata(&bytes)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let setting = |key: &str| {
        metadata.get(key).with_context(|| {
            format!("the file's metadata has no `{key}`; make it with `attn quantize`")
        })
    };
    let kind = setting("attn")?;
    ensure!(
        kind == KIND,
        "the file holds `{kind}`, but this version reads `{KIND}`; make it again with `attn quantize`"
    );
    let format: KvFormat = setting("kv")?.parse()?;
    let page_size = setting("page_size")?
        .parse()
        .context("the file's metadata `page_size` is not a number")?;
    let (mut tensors, mut rows) = (Vec::new(), Vec::new());
    for name in names(&file, ".pages") {
        let shape: Value = serde_json::from_str(setting(&name)?)
            .with_context(|| format!("the file's metadata `{name}` is not JSON"))?;
        let number = |key: &str| match shape[key].as_u64() {
            Some(n) => Ok(n as usize),
            None => bail!("the file's metadata `{name}` has no number `{key}`"),
        };
        let (tokens, heads, dim) = (
            number("tokens")?,
            number("num_kv_heads")?,
            number("head_dim")?,
        );
        let mut config = CacheConfig::new(format, heads, dim, 1, 0);
        config.page_size = page_size;
        config.k_tensor_scales = scales(&file, &format!("{name}.k_scales"))?;
        config.v_tensor_scales = scales(&file, &format!("{name}.v_scales"))?;
        config
            .check()
            .with_context(|| format!("layer {name} is damaged"))?;
        let layout = config.layout()?;
        let mut pages: Vec<Vec<u8>> = file
            .tensor(&format!("{name}.pages"))?
            .data()
            .chunks(layout.page_bytes())
            .map(<[u8]>::to_vec)
            .collect();
        if let Ok(tail) = file.tensor(&format!("{name}.tail")) {
            pages.push(tail.data().to_vec());
        }
        let values = convert::dequantize(
            &layout,
            &pages,
            tokens,
            &config.k_tensor_scales,
            &config.v_tensor_scales,
        )
        .with_context(|| format!("layer {name} is damaged"))?;
        for (side, x) in ["k", "v"].into_iter().zip(values) {
            let by_head: Vec<f32> = (0..heads)
                .flat_map(|h| {
                    x.chunks_exact(dim)
                        .skip(h)
                        .step_by(heads)
                        .flatten()
                        .copied()
                })
                .collect();
            tensors.push((
                format!("{name}.{side}"),
                Dtype::F32,
                vec![heads, tokens, dim],
                f32_bytes(&by_head),
            ));
        }
        rows.push(
            json!({ "layer": name, "tokens": tokens, "num_kv_heads": heads, "head_dim": dim }),
        );
    }
    ensure!(
        !rows.is_empty(),
        "the file has no tensor NAME.pages; make it with `attn quantize`"
    );
    let bytes = write(output, tensors, HashMap::new())?;
    let target = output.display().to_string();
    if as_json {
        println!(
            "{}",
            json!({ "kv": format.to_string(), "file": target, "bytes": bytes, "layers": rows })
        );
    } else {
        println!(
            "{} layers of {format} pages as f32 in {target}, {bytes} bytes",
            rows.len()
        );
    }
    Ok(())
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
