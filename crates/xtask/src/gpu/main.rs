//! The checks and timings that need a GPU, in one program without a toolchain: `.ci/gpu` runs it.

mod buffers;
mod images;
mod native;
mod stress;
mod time;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Checks and timings on a GPU.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compiles every kernel that the other commands and the suite use, on all cores, into the cache.
    Images {
        /// Compile only these of every so many, as `i/n`.
        #[arg(long)]
        shard: Option<String>,
        /// Print unit and options instead.
        #[arg(long)]
        list: bool,
    },
    /// Random shapes: the GPU equals the CPU to the bit, whatever the batch, the pages and the grid.
    Stress {
        /// How many.
        #[arg(default_value_t = 2000)]
        count: u64,
        /// Of the first.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// The native entry: device append, a captured graph replayed with longer lengths, 16-bit inputs, the checking launch.
    Native,
    /// What `native` runs with ATTN_CHECK=1.
    #[command(hide = true)]
    Checked,
    /// Times beside the read ceiling.
    Time {
        /// Only workloads whose name contains this.
        #[arg(default_value = "")]
        filter: String,
    },
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Images { shard, list } => images::run(shard.as_deref(), list),
        Command::Stress { count, seed } => stress::run(count, seed),
        Command::Native => native::run(),
        Command::Checked => native::checked(),
        Command::Time { filter } => time::run(&filter),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attn-gpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The error of a call to the driver, in words.
fn driver<T>(result: Result<T, cudarc::driver::DriverError>) -> Result<T> {
    result.map_err(|error| anyhow::anyhow!("the driver said {error}"))
}
