//! The program `attn`: decode attention on real data, from the command line.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use attn::{BackendId, KvFormat};
use clap::{Parser, Subcommand};

#[path = "../cli/bench.rs"]
mod bench;
#[path = "../cli/check.rs"]
mod check;
#[path = "../cli/data.rs"]
mod data;
#[path = "../cli/plot.rs"]
mod plot;
#[path = "../cli/quantize.rs"]
mod quantize;
#[path = "../cli/run.rs"]
mod run;

/// Decode attention over a quantized KV cache.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print JSON instead of tables.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Decode over real K, V and Q in several formats, beside the exact result (the default).
    Run(RunArgs),
    /// Which backends are here, and why the others are not.
    Devices,
    /// Hold the backends that are here to the conformance table.
    Check {
        /// Only this backend.
        #[arg(long)]
        backend: Option<BackendId>,
    },
    /// Time named shapes beside a pure read of as many bytes.
    Bench(bench::BenchArgs),
    /// K and V of a safetensors file as pages of a format, in another safetensors file.
    Quantize {
        /// A safetensors file with NAME.k and NAME.v, [kv_heads, seq, head_dim], f16, bf16 or f32.
        input: PathBuf,
        /// The file to write: NAME.pages, and what else FORMATS.md asks for.
        output: PathBuf,
        /// The format, `k/v` or one name.
        #[arg(long)]
        kv: KvFormat,
        /// Tokens per page: 16, 32, 64 or 128.
        #[arg(long, default_value_t = 64)]
        page_size: usize,
    },
    /// The pages of `attn quantize` back as f32 K and V.
    Dequantize {
        /// A file that `attn quantize` wrote.
        input: PathBuf,
        /// The file to write: NAME.k and NAME.v, [kv_heads, seq, head_dim], f32.
        output: PathBuf,
    },
}

/// What `attn run` reads and compares.
#[derive(clap::Args)]
struct RunArgs {
    /// A safetensors file with layerNN.{k,v,q,out,lse}; the bundled SmolLM2-135M tensors by default.
    file: Option<PathBuf>,
    /// Formats, `k/v` or one name: f16, bf16, fp8, int8, int8-g32, int8-tensor, int4, int4-g1 … int4-g8, int4-channel/int8, …
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8,int8,int4")]
    kv: Vec<KvFormat>,
    /// cuda, wgpu or cpu; the best present by default.
    #[arg(long)]
    backend: Option<BackendId>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match dispatch(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("attn: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn dispatch(args: Args) -> Result<bool> {
    let default = RunArgs {
        file: None,
        kv: ["bf16", "fp8", "int8", "int4"]
            .iter()
            .map(|f| f.parse())
            .collect::<Result<_, _>>()?,
        backend: None,
    };
    match args.command.unwrap_or(Command::Run(default)) {
        Command::Run(run) => {
            run::run(run.file.as_deref(), &run.kv, run.backend, args.json).map(|()| true)
        }
        Command::Bench(bench) => bench::bench(&bench, args.json),
        Command::Devices => check::devices(args.json).map(|()| true),
        Command::Check { backend } => check::check(backend, args.json),
        Command::Quantize {
            input,
            output,
            kv,
            page_size,
        } => quantize::quantize(&input, &output, kv, page_size, args.json).map(|()| true),
        Command::Dequantize { input, output } => {
            quantize::dequantize(&input, &output, args.json).map(|()| true)
        }
    }
}
