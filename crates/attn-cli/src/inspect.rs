//! `attn inspect`: the content of a file, checked: pages of `attn quantize`, or tensors of K and V.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::{
    console::Console,
    data::{Inputs, Kv, LayerName, Layout, load_kv, parse, read},
    figures::{Difference, number},
    pages::{Pages, is_pages, read_pages},
};

/// What `attn inspect` reads.
#[derive(clap::Args)]
pub struct InspectArgs {
    /// A file that `attn quantize` wrote, or a safetensors file with NAME.k and NAME.v.
    file: PathBuf,
    /// The file that the pages were made from: adds the error of K and V.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// The order of K and V in a file whose metadata `layout` names none; tokens-first by default.
    #[arg(long)]
    layout: Option<Layout>,
}

/// Prints the content of a file, after reading all of it.
pub fn inspect(args: &InspectArgs, console: &mut Console<'_>) -> Result<()> {
    let bytes = read(&args.file)?;
    let file = parse(&bytes)?;
    if !is_pages(&bytes) {
        ensure!(
            args.against.is_none(),
            "--against compares pages, and {} holds none; make them with `attn quantize`",
            args.file.display()
        );
        return tensors(&file, &load_kv(&bytes, args.layout)?, console);
    }
    let original = args.against.as_deref();
    let original = original.map(|path| load_kv(&read(path)?, args.layout));
    let original = original.transpose()?.map(|inputs| inputs.layers);
    pages(&read_pages(&bytes)?, original.as_deref(), console)
}

/// Relative errors of K and V, each in the L2 norm.
fn errors(pages: &Pages, name: &LayerName, original: &[Kv]) -> Result<[f64; 2]> {
    let layer = &pages.layers[name];
    let kv = original.iter().find(|kv| kv.name == *name);
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
    let checked = match pages.is_verified {
        true => "their checksum is right",
        false => "without a checksum: lengths and codes are checked, values are not",
    };
    console.table(format_args!(
        "pages of {} tokens in {}; {checked}\n\n\
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
            "layer": name.raw(), "tokens": tokens, "num_kv_heads": heads, "head_dim": dim, "bytes": layer.bytes,
        });
        if let (Some([k, v]), Value::Object(row)) = (errors, &mut row) {
            row.insert("k_error".to_owned(), number(k));
            row.insert("v_error".to_owned(), number(v));
        }
        rows.push(row);
    }
    console.value(&json!({
        "kind": "pages", "kv": pages.format.to_string(), "page_size": pages.page_size,
        "is_verified": pages.is_verified, "layers": rows,
    }))?;
    Ok(())
}

fn tensors(file: &SafeTensors<'_>, inputs: &Inputs, console: &mut Console<'_>) -> Result<()> {
    console.table(format_args!(
        "K and V to quantize, read as {}\n\n\
         | layer | tokens | KV heads | head_dim | type of K | largest K | largest V | has Q |\n\
         |---|---|---|---|---|---|---|---|",
        inputs.layout
    ))?;
    let mut rows = Vec::new();
    for kv in &inputs.layers {
        let dtype = file.tensor(&kv.name.tensor("k"))?.dtype();
        let has_q = file.tensor(&kv.name.tensor("q")).is_ok();
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
            "layer": kv.name.raw(), "tokens": kv.seq, "num_kv_heads": kv.kv_heads, "head_dim": kv.head_dim,
            "dtype": format!("{dtype:?}"), "largest_k": number(k), "largest_v": number(v), "has_q": has_q,
        }));
    }
    console.value(
        &json!({ "kind": "tensors", "layout": inputs.layout.to_string(), "layers": rows }),
    )?;
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
