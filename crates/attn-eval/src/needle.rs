//! `attn-eval needle`: whether a model finds numbers that are hidden in a long text, over a cache of each format.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, ensure};
use attn_cli::{console::Console, figures::number, program::Backends};
use attn_llm::{Comparison, Haystack, Recall};
use serde_json::{Value, json};

use crate::models::{CacheFormat, FORMATS, ModelArgs, bar, encoded, format};

/// What `attn-eval needle` reads.
#[derive(clap::Args)]
pub struct NeedleArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text file that numbers are hidden in.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of the text with its numbers, a question and its answer; several, a table for all.
    #[arg(long, value_delimiter = ',', default_value = "500,1000,2000,4000,8000", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    contexts: Vec<u32>,
    /// Numbers in each text, at depths spread evenly over it; each is asked for at the end.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=16))]
    needles: u32,
    /// Texts of each length, with other numbers: one part of the file after another.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 10))]
    rounds: u32,
    /// Formats, and f32: plain attention over a cache of f32, which all are compared with, products in f32.
    #[arg(long, value_delimiter = ',', default_value = FORMATS, value_parser = format)]
    kv: Vec<CacheFormat>,
    /// Store keys with their centres, also where caches take them off by default.
    #[arg(long)]
    no_centres: bool,
    /// Chooses the numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Runs a model over texts with hidden numbers in every format; whether every divergence is a number.
pub fn needle(args: &NeedleArgs, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
    let ready = args.model.open_compared(backends, console)?;
    let text = encoded(&ready.tokenizer, &args.text)?;
    let limit = ready.model.config().context;
    let haystacks: Vec<Vec<Haystack>> = args
        .contexts
        .iter()
        .map(|&context| {
            let needed = context as usize;
            if needed > limit {
                return Err(attn_llm::Error::Context { needed, limit }.into());
            }
            let of_round = |round: u32| {
                let start = round as usize * needed;
                ensure!(
                    start + needed <= text.len(),
                    "{} has {} tokens, but {} rounds of {context} are asked for; take fewer or shorter ones (--rounds, --contexts)",
                    args.text.display(),
                    text.len(),
                    args.rounds
                );
                let seed = args.seed.wrapping_add(u64::from(round));
                let needles = args.needles as usize;
                Ok(Haystack::new(&ready.tokenizer, &text[start..], needed, needles, seed)?)
            };
            (0..args.rounds).map(of_round).collect()
        })
        .collect::<Result<_>>()?;
    let formats: Vec<_> = args.kv.iter().map(|format| format.0).collect();
    let comparison = Comparison {
        model: &ready.model,
        reference: ready.reference.as_ref(),
        backend: Arc::clone(&ready.backend),
        formats: &formats,
        centres: !args.no_centres,
        k_bias: 0.0,
        chunk: args.model.file.chunk(),
    };
    console.table(&ready.device)?;
    console.table(format_args!(
        "{} texts of each length with {} numbers, products in {}: numbers found, and KL × 1000 over their digits\n",
        args.rounds, args.needles, args.model.file.products
    ))?;
    let bar = bar("searching", 0);
    let mut results = Vec::new();
    for (&context, haystacks) in args.contexts.iter().zip(&haystacks) {
        let recalls = attn_llm::recall(&comparison, haystacks, &mut |done| {
            bar.set_position(done as u64);
        })?;
        results.push((context, recalls));
    }
    bar.finish_and_clear();
    print(&results, console)?;
    let values: Vec<Value> = results.iter().map(value).collect();
    console.value(&json!({
        "device": ready.device, "products": args.model.file.products.to_string(), "needles": args.needles, "rounds": args.rounds, "seed": args.seed,
        "centres": !args.no_centres, "contexts": values,
    }))?;
    let mut all = results.iter().flat_map(|(_, recalls)| recalls);
    Ok(all.all(|recall| recall.mean_kl().is_finite()))
}

/// Contexts and what each format came to.
type Results = [(u32, Vec<Recall>)];

/// A table with formats in rows and contexts in columns.
fn print(results: &Results, console: &mut Console<'_>) -> Result<()> {
    let contexts: String = results
        .iter()
        .map(|(context, _)| format!(" {context} |"))
        .collect();
    console.table(format_args!("| K/V |{contexts}"))?;
    console.table(format_args!("|---|{}", "---|".repeat(results.len())))?;
    let formats = results.first().map_or(0, |(_, recalls)| recalls.len());
    for i in 0..formats {
        let cell = |(_, recalls): &(u32, Vec<Recall>)| {
            let recall = &recalls[i];
            format!(
                " {:.0} %, {:.2} |",
                recall.share_found() * 1e2,
                recall.mean_kl() * 1e3
            )
        };
        let cells: String = results.iter().map(cell).collect();
        console.table(format_args!("| {} |{cells}", results[0].1[i].name()))?;
    }
    Ok(())
}

/// One context in JSON; needles are in the order of the text.
fn value((context, recalls): &(u32, Vec<Recall>)) -> Value {
    let of_format = |recall: &Recall| {
        let kl = recall
            .kl
            .iter()
            .map(|kl| kl.iter().copied().map(number).collect());
        let kl: Vec<Value> = kl.collect();
        json!({
            "kv": recall.name(), "found": number(recall.share_found()), "mean_kl": number(recall.mean_kl()), "found_of_needles": recall.found,
            "kl_of_needles": kl,
        })
    };
    let formats: Vec<Value> = recalls.iter().map(of_format).collect();
    json!({ "tokens": context, "formats": formats })
}
