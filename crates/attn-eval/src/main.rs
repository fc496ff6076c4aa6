//! The program `attn-eval`: whole models over a quantized KV cache, and charts of what `attn bench` measured.
//!
//! A package of its own: `attn` is built without candle, a tokenizer and a library for charts.

use std::process::ExitCode;

use anyhow::Result;
use attn_cli::{
    console::Console,
    program::{self, Arguments, Backends},
};
use clap::{Parser, Subcommand};

mod layers;
mod models;
mod needle;
mod plot;
mod recorded;

/// Whole models over a quantized KV cache, and charts of measured figures.
#[derive(Parser)]
#[command(name = "attn-eval", version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// Print JSON instead of tables; a figure that is no number is the string NaN, inf or -inf.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Text from prompts: a whole model, whose cache is of a format.
    Generate(models::GenerateArgs),
    /// What cache formats do to a model's predictions of a text.
    Perplexity(models::PerplexityArgs),
    /// Whether a model finds numbers that are hidden in a long text, over cache formats.
    Needle(needle::NeedleArgs),
    /// Q, K and V of a model's layers over a text, as a file for `attn run`.
    Layers(layers::LayersArgs),
    /// The charts of figures that `attn bench` measured.
    Plot(plot::PlotArgs),
    /// A script that completes commands and options in a shell, on standard output.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// The manual as pages for `man`: written into a folder, a page for each command; or the first one, on standard output.
    Manual {
        /// The folder.
        folder: Option<std::path::PathBuf>,
    },
}

fn main() -> ExitCode {
    program::main::<Args>()
}

impl Arguments for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn decodes(&self) -> bool {
        matches!(
            self.command,
            Command::Generate(_) | Command::Perplexity(_) | Command::Needle(_)
        )
    }

    fn run(self, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
        match self.command {
            Command::Generate(args) => models::generate(&args, console, backends).map(|()| true),
            Command::Perplexity(args) => models::perplexity(&args, console, backends),
            Command::Needle(args) => needle::needle(&args, console, backends),
            Command::Layers(args) => layers::layers(&args, console).map(|()| true),
            Command::Plot(args) => plot::plot(&args).map(|()| true),
            Command::Completions { shell } => {
                program::completions::<Args>(shell, console).map(|()| true)
            }
            Command::Manual { folder } => {
                program::manual::<Args>(folder.as_deref(), console).map(|()| true)
            }
        }
    }
}
