//! `cargo xtask mutants`: changes one expression at a time, and sees whether a test fails.
//!
//! All mutants are compiled into one copy of the workspace, in `target/mutants`; the environment variable `ATTN_MUTANT` chooses
//! one at run time. A first run of each test notes which mutants it reaches; a mutant is tried with those tests alone.
//! What has mutants, and which are left out for which reason, is `crates/xtask/mutants.toml`.

mod build;
mod list;
mod render;
mod sites;
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::{Value, json};

use build::{Mutant, Tree};
use tests::Verdict;

/// Changes one expression at a time, and sees whether a test fails.
#[derive(Parser)]
#[command(name = "cargo xtask mutants")]
struct Args {
    /// Print the mutants, and stop.
    #[arg(long)]
    list: bool,
    /// Only files that match; `*` stands for any text.
    #[arg(long)]
    files: Option<String>,
    /// Only so many mutants, chosen by the seed.
    #[arg(long)]
    sample: Option<usize>,
    /// What the sample is chosen by.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mutants at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Write every verdict to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Only mutants that this file, written by an earlier run, says were not noticed.
    #[arg(long)]
    again: Option<PathBuf>,
    /// The least share, in percent, that must be noticed.
    #[arg(long, default_value_t = 95.0)]
    least: f64,
}

/// What tells a mutant from the others of its file, whatever the lines before it: with a number where the rest is equal.
type Key = (String, String, String, String, u64);

fn keys(all: &[Mutant]) -> Vec<Key> {
    let mut seen = BTreeMap::new();
    let key = |m: &Mutant| {
        let [file, function, from, to] = [&m.file, &m.function, &m.from, &m.to].map(Clone::clone);
        let count = seen
            .entry((file.clone(), function.clone(), from.clone(), to.clone()))
            .or_insert(0);
        *count += 1;
        (file, function, from, to, *count)
    };
    all.iter().map(key).collect()
}

/// Runs the command.
///
/// # Errors
/// If something cannot be built or run, or if less than the least share was noticed.
pub fn main(arguments: &[String]) -> Result<()> {
    let name = "cargo xtask mutants".to_owned();
    let args = Args::parse_from(std::iter::once(&name).chain(arguments));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()?;
    let list = list::read(&root)?;
    let mut files = list.files.clone();
    if let Some(pattern) = &args.files {
        files.retain(|file| list::matches(pattern, file));
        ensure!(
            !files.is_empty(),
            "no file of mutants.toml matches {pattern}"
        );
    }
    let (sources, all) = build::mutants(&root, &files)?;
    let skipped = skipped(&list, &files, &all)?;
    if args.list {
        for (m, skip) in all.iter().zip(&skipped) {
            let skip = skip.map_or(String::new(), |reason| format!(" [left out: {reason}]"));
            println!("{}{skip}", line(m));
        }
        return Ok(());
    }
    let mut live: Vec<bool> = skipped.iter().map(Option::is_none).collect();
    let left_out = live.iter().filter(|live| !**live).count();
    println!(
        "{} mutants in {} files; {left_out} left out by mutants.toml",
        all.len(),
        files.len()
    );
    let programs = Tree::new(&root).build(&list, &sources, &keys(&all), &mut live)?;
    let compiled = live.iter().filter(|live| **live).count();
    println!(
        "{compiled} compile; {} do not, for their types",
        all.len() - left_out - compiled
    );
    let reach = tests::reach(
        &programs,
        &list,
        &root.join("target/mutants/reached"),
        args.jobs,
    )?;
    println!("{} tests pass without a mutant", reach.tests.len());
    let ids = chosen(&args, &all, &live)?;
    let progress = |done: usize, id: u32, verdict: &Verdict| {
        if !verdict.noticed() {
            println!(
                "[{done}/{}] {verdict:?}: {}",
                ids.len(),
                line(&all[id as usize])
            );
        } else if done.is_multiple_of(100) {
            println!("[{done}/{}]", ids.len());
        }
    };
    let verdicts = tests::try_all(&programs, &reach, (&all, &ids), args.jobs, &progress)?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report(&all, &verdicts))?;
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    conclude(&files, &all, &verdicts, args.least)
}

fn line(m: &Mutant) -> String {
    format!(
        "{}:{} {}: {} -> {}",
        m.file, m.line, m.function, m.from, m.to
    )
}

/// The reason for which each mutant is left out.
fn skipped<'a>(
    list: &'a list::List,
    files: &[String],
    all: &[Mutant],
) -> Result<Vec<Option<&'a str>>> {
    let (mut reasons, keys) = (vec![None; all.len()], keys(all));
    for skip in list.skip.iter().filter(|skip| files.contains(&skip.file)) {
        let mut found = false;
        for (key, reason) in keys.iter().zip(&mut reasons) {
            if skip.covers(key) {
                (*reason, found) = (Some(&*skip.reason), true);
            }
        }
        ensure!(
            found,
            "mutants.toml: no mutant of {} in {} contains {:?}; remove the skip",
            skip.function,
            skip.file,
            skip.text
        );
    }
    Ok(reasons)
}

/// The mutants to try.
fn chosen(args: &Args, all: &[Mutant], live: &[bool]) -> Result<Vec<u32>> {
    let mut ids: Vec<u32> = (0..all.len() as u32)
        .filter(|id| live[*id as usize])
        .collect();
    if let Some(path) = &args.again {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let before: Value = serde_json::from_str(&text)?;
        let text = |m: &Value, name: &str| m[name].as_str().unwrap_or_default().to_owned();
        let unnoticed: BTreeSet<Key> = before
            .as_array()
            .context("the file has no list of mutants")?
            .iter()
            .filter(|m| m["noticed"] == false)
            .map(|m| {
                let [file, function, from, to] =
                    ["file", "function", "from", "to"].map(|name| text(m, name));
                (file, function, from, to, m["nth"].as_u64().unwrap_or(1))
            })
            .collect();
        let keys = keys(all);
        ids.retain(|id| unnoticed.contains(&keys[*id as usize]));
    }
    if let Some(sample) = args.sample {
        let mixed = |id: &u32| {
            let x = (u64::from(*id) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ (args.seed << 17));
            (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
        };
        ids.sort_by_key(mixed);
        ids.truncate(sample);
        ids.sort_unstable();
    }
    Ok(ids)
}

fn report(all: &[Mutant], verdicts: &BTreeMap<u32, Verdict>) -> Value {
    let keys = keys(all);
    let one = |(id, verdict): (&u32, &Verdict)| {
        let m = &all[*id as usize];
        json!({
            "file": m.file, "line": m.line, "function": m.function, "from": m.from, "to": m.to,
            "nth": keys[*id as usize].4, "noticed": verdict.noticed(), "verdict": format!("{verdict:?}"),
        })
    };
    Value::Array(verdicts.iter().map(one).collect())
}

/// Prints what was noticed, and fails below the least share.
fn conclude(
    files: &[String],
    all: &[Mutant],
    verdicts: &BTreeMap<u32, Verdict>,
    least: f64,
) -> Result<()> {
    println!("\nnot noticed:");
    for (id, verdict) in verdicts.iter().filter(|v| !v.1.noticed()) {
        let reached = if *verdict == Verdict::NotReached {
            " (not reached)"
        } else {
            ""
        };
        println!("  {}{reached}", line(&all[*id as usize]));
    }
    println!();
    for file in files {
        let here = verdicts.iter().filter(|v| all[*v.0 as usize].file == *file);
        let (noticed, total) = count(here.map(|v| v.1));
        println!("{noticed:5} of {total:5} {file}");
    }
    let (noticed, total) = count(verdicts.values());
    ensure!(total > 0, "no mutant was tried");
    let share = 100.0 * noticed as f64 / total as f64;
    println!("{noticed:5} of {total:5} noticed: {share:.1} %");
    ensure!(
        share >= least,
        "{share:.1} % of the mutants were noticed, less than {least} %: write tests that fail on those above"
    );
    Ok(())
}

fn count<'a>(verdicts: impl Iterator<Item = &'a Verdict>) -> (usize, usize) {
    verdicts.fold((0, 0), |(noticed, total), verdict| {
        (noticed + usize::from(verdict.noticed()), total + 1)
    })
}
