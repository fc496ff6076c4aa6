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
        /// Replace pages that exist.
        #[arg(long)]
        force: bool,
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

    fn is_of_device(error: &anyhow::Error) -> bool {
        // A model's error shows the attention's as its own, and is not its cause.
        let of_attention = error.chain().find_map(|cause| match cause.downcast_ref() {
            Some(attn_llm::Error::Attention(error)) => Some(error),
            _ => cause.downcast_ref::<attn::Error>(),
        });
        of_attention.is_some_and(|error| error.kind() == attn::ErrorKind::Device)
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
            Command::Manual { folder, force } => {
                program::manual::<Args>(folder.as_deref(), force, console).map(|()| true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_fails_under_a_model_is_no_misuse() {
        let failed = || attn::Error::Device {
            backend: "cuda",
            doing: "decoding",
            source: "an illegal address".into(),
        };
        let of_model = anyhow::Error::from(attn_llm::Error::Attention(failed()));
        assert!(Args::is_of_device(&of_model));
        assert!(Args::is_of_device(&of_model.context("layer 3")));
        assert!(Args::is_of_device(&failed().into()));
        assert!(!Args::is_of_device(&anyhow::anyhow!("no such file")));
    }
}
