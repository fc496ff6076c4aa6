//! `attn-eval layers`: Q, K and V of a model's layers over a text, as the safetensors file that `attn run` reads.

use std::{collections::HashMap, path::PathBuf};

use anyhow::{Result, ensure};
use attn_cli::{console::Console, target::Target};
use attn_llm::LayerRows;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::models::{FileArgs, bar, encoded};

/// What `attn-eval layers` reads and writes.
#[derive(clap::Args)]
pub struct LayersArgs {
    #[command(flatten)]
    model: FileArgs,
    /// A text file.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Layers, counted from 0.
    #[arg(long, required = true, value_delimiter = ',')]
    layers: Vec<usize>,
    /// Tokens of the text, from its begin or from the token `--first` on.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// The first token that is taken.
    #[arg(long, default_value_t = 0)]
    first: u32,
    /// The last tokens whose queries are kept: those that `attn run` lets attend.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    queries: u32,
    /// The file to write: layers.N.{q,k,v} in f32, behind the rotary positions.
    out: PathBuf,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
}

/// Runs a model over a text, and writes its layers.
pub fn layers(args: &LayersArgs, console: &mut Console<'_>) -> Result<()> {
    let inputs = [args.model.inputs()?, vec![args.text.clone()]].concat();
    let target = Target::new(&args.out, args.force, &inputs)?;
    let (model, tokenizer) = args.model.open(console)?;
    let text = encoded(&tokenizer, &args.text)?;
    let (first, needed) = (args.first as usize, args.tokens as usize);
    let limit = model.config().context;
    if needed > limit {
        return Err(attn_llm::Error::Context { needed, limit }.into());
    }
    ensure!(
        first + needed <= text.len(),
        "{} has {} tokens, but those from {first} to {} are asked for; take fewer (--tokens, --first)",
        args.text.display(),
        text.len(),
        first + needed
    );
    let bar = bar("computing", needed as u64);
    let rows = attn_llm::rows(
        &model,
        &text[first..first + needed],
        &args.layers,
        args.model.chunk(),
        &mut |done| bar.set_position(done as u64),
    )?;
    bar.finish_and_clear();
    let queries = needed.min(args.queries as usize);
    let heads = model.config().heads;
    // No model that is read has values of another length than keys.
    let dim = heads.dim.k;
    let shapes = [
        ("q", vec![queries, heads.q, dim]),
        ("k", vec![needed, heads.kv, dim]),
        ("v", vec![needed, heads.kv, dim]),
    ];
    let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut tensors = Vec::new();
    for LayerRows { layer, q, k, v, .. } in &rows {
        let q = &q[(needed - queries) * heads.q * dim..];
        for ((side, shape), x) in shapes.iter().zip([q, k, v]) {
            tensors.push((format!("layers.{layer}.{side}"), shape.clone(), bytes(x)));
        }
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes)?;
        Ok((name.as_str(), view))
    });
    let views: Vec<_> = views.collect::<Result<_>>()?;
    let scale = (dim as f32).sqrt().recip().to_string();
    let metadata = HashMap::from([
        (
            "layout",
            "k,v [seq, kv_heads, head_dim]; q [q_len, q_heads, head_dim]".to_owned(),
        ),
        ("scale", scale),
        ("model", name(&args.model.model)),
        ("text", name(&args.text)),
    ]);
    let metadata = metadata
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value));
    let file = safetensors::serialize(views, Some(metadata.collect()))?;
    target.write(&file)?;
    console.table(format_args!(
        "{}: {} layers of {needed} tokens, the queries of the last {queries}, {:.1} MB",
        args.out.display(),
        rows.len(),
        file.len() as f64 / 1e6
    ))?;
    console.value(&json!({
        "file": args.out, "layers": args.layers, "tokens": needed, "queries": queries, "bytes": file.len(),
    }))?;
    Ok(())
}

/// The last part of a path.
fn name(path: &std::path::Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}
