//! `attn inspect`: the content of a file, checked: pages of `attn quantize`, or tensors of K and V.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::{
    console::Console,
    data::{Kv, load_kv, names, parse, read},
    figures::{Difference, number},
    quantize::{Pages, read_pages},
};

/// What `attn inspect` reads.
#[derive(clap::Args)]
pub struct InspectArgs {
    /// A file that `attn quantize` wrote, or a safetensors file with NAME.k and NAME.v.
    file: PathBuf,
    /// The file that the pages were made from: adds the error of K and V.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// Prints the content of a file, after reading all of it.
pub fn inspect(args: &InspectArgs, console: &mut Console<'_>) -> Result<()> {
    let bytes = read(&args.file)?;
    let file = parse(&bytes)?;
    if names(&file, ".pages").is_empty() {
        ensure!(
            args.against.is_none(),
            "--against compares pages, and {} holds none; make them with `attn quantize`",
            args.file.display()
        );
        return tensors(&file, &load_kv(&bytes)?, console);
    }
    let original = args.against.as_deref().map(|path| load_kv(&read(path)?));
    pages(
        &read_pages(&bytes)?,
        original.transpose()?.as_deref(),
        console,
    )
}

/// Relative errors of K and V, each in the L2 norm.
fn errors(pages: &Pages, name: &str, original: &[Kv]) -> Result<[f64; 2]> {
    let layer = &pages.layers[name];
    let kv = original.iter().find(|kv| kv.name == name);
    let kv = kv.with_context(|| format!("the file of --against has no layer {name}"))?;
    let shape = [kv.seq, kv.kv_heads, kv.head_dim];
    ensure!(
        shape == layer.shape,
        "layer {name} has {:?} tokens, KV heads and dims, but {shape:?} in the file of --against",
        layer.shape
    );
    let [k, v] = &layer.values;
    Ok([(k, &kv.k), (v, &kv.v)].map(|(got, want)| Difference::of(got, want).relative()))
}

fn pages(pages: &Pages, original: Option<&[Kv]>, console: &mut Console<'_>) -> Result<()> {
    console.table(format_args!(
        "pages of {} tokens in {}\n\n\
         | layer | tokens | KV heads | head_dim | bytes | bytes per token and head | K error | V error |\n\
         |---|---|---|---|---|---|---|---|",
        pages.page_size, pages.format
    ))?;
    let mut rows = Vec::new();
    for (name, layer) in &pages.layers {
        let [tokens, heads, dim] = layer.shape;
        let errors = original
            .map(|original| errors(pages, name, original))
            .transpose()?;
        let per_token = layer.bytes as f64 / (tokens * heads) as f64;
        let text = |i: usize| errors.map_or("–".into(), |e| format!("{:.3} %", e[i] * 100.0));
        console.table(format_args!(
            "| {name} | {tokens} | {heads} | {dim} | {} | {per_token:.1} | {} | {} |",
            layer.bytes,
            text(0),
            text(1)
        ))?;
        let mut row = json!({
            "layer": name, "tokens": tokens, "num_kv_heads": heads, "head_dim": dim, "bytes": layer.bytes,
        });
        if let (Some([k, v]), Value::Object(row)) = (errors, &mut row) {
            row.insert("k_error".to_owned(), number(k));
            row.insert("v_error".to_owned(), number(v));
        }
        rows.push(row);
    }
    console.value(&json!({
        "kind": "pages", "kv": pages.format.to_string(), "page_size": pages.page_size, "layers": rows,
    }))?;
    Ok(())
}

fn tensors(file: &SafeTensors<'_>, layers: &[Kv], console: &mut Console<'_>) -> Result<()> {
    console.table(
        "K and V to quantize\n\n\
         | layer | tokens | KV heads | head_dim | type of K | largest K | largest V | has Q |\n\
         |---|---|---|---|---|---|---|---|",
    )?;
    let mut rows = Vec::new();
    for kv in layers {
        let dtype = file.tensor(&format!("{}.k", kv.name))?.dtype();
        let has_q = file.tensor(&format!("{}.q", kv.name)).is_ok();
        let [k, v] = [&kv.k, &kv.v].map(|x| largest(x));
        console.table(format_args!(
            "| {} | {} | {} | {} | {dtype:?} | {k:.3} | {v:.3} | {} |",
            kv.name,
            kv.seq,
            kv.kv_heads,
            kv.head_dim,
            if has_q { "yes" } else { "no" }
        ))?;
        rows.push(json!({
            "layer": kv.name, "tokens": kv.seq, "num_kv_heads": kv.kv_heads, "head_dim": kv.head_dim,
            "dtype": format!("{dtype:?}"), "largest_k": number(k), "largest_v": number(v), "has_q": has_q,
        }));
    }
    console.value(&json!({ "kind": "tensors", "layers": rows }))?;
    Ok(())
}

/// The largest magnitude; NaN if there is one.
fn largest(x: &[f32]) -> f64 {
    let abs = x.iter().map(|x| f64::from(x.abs()));
    abs.fold(0.0, crate::figures::greater)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitude_is_that_of_either_sign_and_nan_is_kept() {
        assert_eq!(largest(&[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(largest(&[0.25, -0.5]), 0.5);
        assert!(largest(&[1.0, f32::NAN, 2.0]).is_nan());
    }
}
