//! The checks that need a GPU, in one program without a toolchain: `.ci/gpu` runs it. Timings are `attn bench`'s. And one that needs
//! none, but g++: `emulate`.

mod emulate;
mod hostile;
mod images;
mod native;
mod numbers;
mod stress;

use std::{process::ExitCode, time::Instant};

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};

/// Checks on a GPU.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compiles every kernel that the other commands and the suite use, on all cores, into the cache.
    Images(images::Options),
    /// The conformance table (ATTN_TABLE, ATTN_CASE) on the GPU.
    Check,
    /// Random shapes: the GPU equals the CPU to the bit, whatever the batch, the pages and the grid.
    Stress {
        /// Number of shapes.
        #[arg(default_value_t = 2000)]
        count: u64,
        /// Seed of the first shape.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// On this CPU, without a GPU: decode and append, compiled by g++ for threads that are fibers, give the CPU's bits and bytes.
    Emulate {
        /// Number of shapes.
        #[arg(default_value_t = 40)]
        count: usize,
        /// Seed of the first shape.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// The conformance table's integer cases instead: minutes, as nearly each has its own kernel.
        #[arg(long)]
        table: bool,
    },
    /// Misuse of the safe interface: pinned memory that changes after a call, stores that lie, strides and sizes at the ends of their types.
    Hostile {
        /// Leave out what only the driver refuses, which compute-sanitizer counts as errors.
        #[arg(long)]
        sanitized: bool,
    },
    /// The native entry: device append, a captured graph replayed with longer lengths, 16-bit inputs, the checking launch.
    Native,
    /// The part of `native` that runs with ATTN_CHECK=1.
    #[command(hide = true)]
    Checked,
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Images(options) => images::run(&options),
        Command::Check => check(),
        Command::Stress { count, seed } => stress::run(count, seed),
        Command::Emulate { count, seed, table } => emulate::run(count, seed, table),
        Command::Hostile { sanitized } => hostile::run(sanitized),
        Command::Native => native::run(),
        Command::Checked => native::checked(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attn-gpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<()> {
    let gpu = attn_cuda::open()?;
    let reference = attn_cpu::Reference::new();
    let start = Instant::now();
    let report = attn_conformance::check_backend(&reference, &*gpu, &mut |_, _| ());
    for failure in report.failures.iter().take(60) {
        println!("failed: {failure}");
    }
    println!(
        "conformance: {} cases, {} without a kernel, {} failures, {:.0} s; digest integer {:016x} float {:016x}",
        report.cases,
        report.refusals.len(),
        report.failures.len(),
        start.elapsed().as_secs_f64(),
        report.integer_digest,
        report.float_digest
    );
    ensure!(
        report.failures.is_empty(),
        "{} cases fail",
        report.failures.len()
    );
    Ok(())
}

/// The error of a call to the driver, in words.
fn driver<T>(result: Result<T, cudarc::driver::DriverError>) -> Result<T> {
    result.map_err(|error| anyhow::anyhow!("the driver said {error}"))
}
