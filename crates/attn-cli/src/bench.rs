//! `attn bench`: named workloads on one backend, beside a pure read of as many bytes in the same run.
//!
//! Workloads and timers are those of `attn-bench`. `choice.rs` chooses the workloads, `report.rs` prints figures.

pub(crate) mod choice;
mod report;

use std::error::Error as _;

use anyhow::{Context, Result, bail, ensure};
use attn::{BackendId, Error, ErrorKind, Selection};
use attn_bench::{Timer, Workload, cpu::CpuTimer};
use choice::{CustomArgs, chosen, default_names};
use report::{HEADER, bf16_us, line, list};
use serde_json::json;

use crate::{
    attn_eval::ChartArgs,
    console::Console,
    measured::{Figures, Outcome, Row},
    program::Backends,
    progress::bar,
    threads::per_core,
};

/// What `attn bench` measures.
#[derive(clap::Args)]
pub struct BenchArgs {
    /// Workloads: a whole family/name/format, or any part of it; several of them. `--list` prints all. By default what the backend's targets name.
    #[arg(conflicts_with = "heads")]
    names: Vec<String>,
    /// The backend to time: cuda, wgpu or cpu; the best present by default, as for `run`.
    #[arg(long)]
    backend: Option<BackendId>,
    #[command(flatten)]
    custom: CustomArgs,
    /// Threads of the CPU, 1 to 1024, several to compare; one per core by default.
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Timed repetitions per workload, at most: a clock takes fewer of appends and of what takes long; by default 30 on the CPU, and as many as its clock needs on a GPU.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    runs: Option<u32>,
    /// Time the decode steps among the workloads over caches with centres of K, as caches of int8, int8/int4 and int4 are by default; on the CPU and CUDA.
    #[arg(long, conflicts_with = "list")]
    centres: bool,
    /// Print names and bytes, and stop.
    #[arg(long, conflicts_with_all = ["threads", "runs", "heads"])]
    list: bool,
    /// On the CPU, also what takes gigabytes of memory.
    #[arg(long)]
    large: bool,
    #[command(flatten)]
    charts: ChartArgs,
}

/// One timer, or on the CPU one for each number of threads.
fn timers(args: &BenchArgs, backend: BackendId) -> Result<Vec<Box<dyn Timer>>> {
    ensure!(
        args.threads.is_empty() || backend == BackendId::Cpu,
        "--threads is the CPU's; leave it out, or use --backend cpu"
    );
    match backend {
        BackendId::Cpu => {
            let all = [per_core()];
            let named = if args.threads.is_empty() {
                &all
            } else {
                &args.threads[..]
            };
            let timer = |&threads| {
                let timer = CpuTimer::open(threads).context("--threads")?;
                Ok(Box::new(timer) as Box<dyn Timer>)
            };
            named.iter().map(timer).collect()
        }
        gpu => Ok(vec![gpu_timer(gpu)?]),
    }
}

/// An error with its causes.
fn words(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// The timer of a backend other than the CPU's.
pub fn gpu_timer(backend: BackendId) -> Result<Box<dyn Timer>> {
    match backend {
        #[cfg(feature = "cuda")]
        BackendId::Cuda => Ok(Box::new(attn_bench::cuda::CudaTimer::open()?)),
        #[cfg(feature = "wgpu")]
        BackendId::Wgpu => Ok(Box::new(attn_bench::wgpu::WgpuTimer::open()?)),
        other => bail!(
            "this build of attn has no timer for {other}; build attn-cli with the feature {other}"
        ),
    }
}

/// Figures, or why there are none; and whether the device is sound.
fn measure(
    timer: &mut dyn Timer,
    workload: &Workload,
    runs: usize,
    large: bool,
) -> (Outcome, bool) {
    if workload.cache_bytes() > timer.most_bytes() && !large {
        let gigabytes = workload.cache_bytes() as f64 / 1e9;
        return (
            Err(format!("not measured: {gigabytes:.1} GB; add --large")),
            true,
        );
    }
    match timer.measure(workload, runs) {
        Ok(measured) => (Ok(Figures::new(measured, timer.by_median())), true),
        Err(error) => (Err(words(&error)), error.kind() != ErrorKind::Device),
    }
}

/// Measures the named workloads and prints one line each; whether no device failed.
pub fn bench(args: &BenchArgs, console: &mut Console<'_>, backends: &Backends) -> Result<bool> {
    args.charts.check()?;
    if args.list {
        let all = [String::new()];
        let names = if args.names.is_empty() {
            &all
        } else {
            &args.names[..]
        };
        list(&chosen(names)?, console)?;
        return Ok(true);
    }
    // Whatever can be refused is refused before a device is opened.
    let mut workloads = args.custom.workloads()?;
    if !args.names.is_empty() {
        workloads = chosen(&args.names)?;
    }
    let backend = match args.backend {
        Some(backend) => backend,
        None => best(console, backends)?,
    };
    if workloads.is_empty() {
        workloads = chosen(&default_names(backend))?;
    }
    if args.centres {
        let all = workloads.into_iter();
        workloads = all.filter_map(Workload::with_centres).collect();
        ensure!(
            !workloads.is_empty(),
            "--centres is for decode steps over pages of int8, int8/int4, int4 and their like; none of the workloads is one"
        );
    }
    let mut timers = timers(args, backend)?;
    measure_all(&mut timers, &workloads, args, console)
}

/// The backend that `run` would take, after a remark on each better one that is absent.
fn best(console: &mut Console<'_>, backends: &Backends) -> Result<BackendId> {
    let Selection { id, refused, .. } = (backends.select)(None)?;
    if !console.json {
        for (_, reason) in &refused {
            console.remark(format_args!("not used: {reason}"));
        }
    }
    Ok(id)
}

/// Measures workloads by each timer and prints them; whether no device failed.
fn measure_all(
    timers: &mut [Box<dyn Timer>],
    workloads: &[Workload],
    args: &BenchArgs,
    console: &mut Console<'_>,
) -> Result<bool> {
    let (mut rows, mut values, mut healthy) = (Vec::new(), Vec::new(), true);
    let bar = bar(timers.len() * workloads.len());
    for (device, timer) in timers.iter_mut().enumerate() {
        let runs = args.runs.map_or(timer.runs(), |runs| runs as usize);
        let name = timer.device();
        let figure = if timer.by_median() {
            "medians"
        } else {
            "fastest"
        };
        bar.suspend(|| {
            console.table(format_args!(
                "{name}; at most {runs} repetitions, caches cold, rates of the {figure}\n\n{HEADER}"
            ))
        })?;
        for workload in workloads {
            bar.set_message(workload.to_string());
            let (outcome, sound) = measure(&mut **timer, workload, runs, args.large);
            healthy &= sound;
            let row = Row {
                device,
                workload: workload.clone(),
                outcome,
                peak: timer.peak(),
            };
            let bf16 = bf16_us(&rows, &row);
            bar.inc(1);
            bar.suspend(|| console.table(line(&row, bf16)))?;
            values.push(row.value(&name, bf16));
            rows.push(row);
        }
    }
    bar.finish_and_clear();
    console.value(&json!(values))?;
    Ok(healthy)
}

#[cfg(test)]
mod tests;
