//! The program `attn`: decode attention on real data, from the command line.
//!
//! A library for this project's fuzzers and for the program `attn-eval` alone: [`main`] is the program, and the public modules may change in any release.

use std::process::ExitCode;

use anyhow::Result;
use attn::BackendId;
use clap::{Parser, Subcommand};

mod attn_eval;
mod bench;
mod check;
pub mod console;
pub mod data;
mod explain;
#[cfg(test)]
mod faulty;
pub mod figures;
pub mod inspect;
pub mod measured;
pub mod pages;
pub mod program;
pub mod progress;
pub mod quantize;
mod run;
pub mod target;
mod threads;

use console::Console;
use program::{Arguments, Backends};

/// Decode attention over a quantized KV cache.
#[derive(Parser)]
#[command(
    name = "attn",
    version,
    about,
    after_help = "Whole models and charts: the program attn-eval, `cargo run --release -p attn-eval`."
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print JSON instead of tables; a figure that is no number is the string NaN, inf or -inf.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Decode over real K, V and Q in several formats, beside the exact result; without a command, over the bundled ones.
    Run(run::RunArgs),
    /// Which backends are here, and why the others are not.
    Devices,
    /// Hold the backends that are here to the conformance table.
    Check {
        /// Only this backend.
        #[arg(long)]
        backend: Option<BackendId>,
    },
    /// Time named workloads, or a shape of your own, beside a pure read of as many bytes.
    Bench(bench::BenchArgs),
    /// What a step of a shape has to read, by which kernel, and the time of a plain read of as much; nothing is run.
    Explain(explain::ExplainArgs),
    /// K and V of a safetensors file as pages of a format, in another safetensors file.
    Quantize(quantize::QuantizeArgs),
    /// The pages of `attn quantize` back as f32 K and V.
    Dequantize(quantize::DequantizeArgs),
    /// The content of a file of pages, or of K and V, checked.
    Inspect(inspect::InspectArgs),
    /// A script that completes commands and options in a shell, on standard output.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// The manual as pages for `man`: written into a folder, a page for each command; or the first one, on standard output.
    Manual {
        /// The folder.
        folder: Option<std::path::PathBuf>,
        /// Replace pages that exist.
        #[arg(long)]
        force: bool,
    },
    #[command(hide = true, disable_help_flag = true)]
    Generate(attn_eval::AnyArgs),
    #[command(hide = true, disable_help_flag = true)]
    Perplexity(attn_eval::AnyArgs),
    #[command(hide = true, disable_help_flag = true)]
    Plot(attn_eval::AnyArgs),
}

/// Runs the program with this process's arguments, and gives its exit code.
pub fn main() -> ExitCode {
    program::main::<Args>()
}

impl Arguments for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn decodes(&self) -> bool {
        matches!(
            self.command,
            None | Some(Command::Run(_) | Command::Check { .. })
        )
    }

    fn run(self, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
        match self.command {
            None => first(console, backends),
            Some(Command::Run(run)) => run::run(&run, console, backends),
            Some(Command::Bench(bench)) => bench::bench(&bench, console, backends),
            Some(Command::Explain(args)) => explain::explain(&args, console).map(|()| true),
            Some(Command::Devices) => check::devices(console, backends).map(|()| true),
            Some(Command::Check { backend }) => check::check(backend, console, backends),
            Some(Command::Quantize(args)) => quantize::quantize(&args, console).map(|()| true),
            Some(Command::Inspect(args)) => inspect::inspect(&args, console).map(|()| true),
            Some(Command::Dequantize(args)) => quantize::dequantize(&args, console).map(|()| true),
            Some(Command::Completions { shell }) => {
                program::completions::<Args>(shell, console).map(|()| true)
            }
            Some(Command::Manual { folder, force }) => {
                program::manual::<Args>(folder.as_deref(), force, console).map(|()| true)
            }
            Some(Command::Generate(_)) => attn_eval::command("generate"),
            Some(Command::Perplexity(_)) => attn_eval::command("perplexity"),
            Some(Command::Plot(_)) => attn_eval::command("plot"),
        }
    }
}

/// What to do after the first call.
const NEXT: &str = "
next: attn explain --heads 32/8 --ctx 8192   bytes, kernels and ceiling of a step of your model's shape
      attn bench                             times on this device, beside a plain read
      attn run FILE                          the same table for your own K, V and Q
      attn check                             whether every bit is right on this machine
      attn --help                            all commands";

/// Without a command: what is here, the bundled data in the usual formats, and what to do next.
fn first(console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
    if !console.json {
        check::seen(console, backends)?;
    }
    let passed = run::run(&run::RunArgs::first(), console, backends)?;
    console.table(NEXT)?;
    Ok(passed)
}
