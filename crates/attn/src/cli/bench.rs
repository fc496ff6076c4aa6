//! `attn bench`: named shapes, timed cold, beside a pure read of as many bytes.
//!
//! A backend takes part by a [`Timer`]: it knows its own clock and how to empty its caches; names, bytes and tables are here.

use anyhow::{Result, bail, ensure};
use attn::BackendId;
use attn_cpu::{
    CpuBackend,
    bench::{Measured, Shape, measure, shapes, with_threads},
};
use serde_json::json;

/// What `attn bench` measures.
#[derive(clap::Args)]
pub struct BenchArgs {
    /// Shapes: any part of family/name, several of them; `--list` prints all. By default family `single`.
    names: Vec<String>,
    /// The backend to time.
    #[arg(long, default_value = "cpu")]
    backend: BackendId,
    /// Threads of the CPU, several to compare; all by default.
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Timed steps per shape.
    #[arg(long, default_value_t = 30)]
    runs: usize,
    /// Print the names and stop.
    #[arg(long)]
    list: bool,
    /// Also what takes gigabytes of memory.
    #[arg(long)]
    large: bool,
}

/// Times a shape over so many runs.
type Measure = dyn Fn(&Shape, usize) -> Result<Measured>;

/// How one backend is timed.
struct Timer {
    /// What stands in the table's first line.
    device: String,
    /// Times one shape over so many runs.
    measure: Box<Measure>,
}

fn timers(args: &BenchArgs) -> Result<Vec<Timer>> {
    match args.backend {
        BackendId::Cpu => {
            let all = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = if args.threads.is_empty() {
                vec![all]
            } else {
                args.threads.clone()
            };
            ensure!(!threads.contains(&0), "--threads 0: at least one thread");
            let timer = |threads| {
                let backend = CpuBackend::open()?;
                Ok(Timer {
                    device: format!("cpu: {}, {threads} threads", backend.isa()),
                    measure: Box::new(move |shape, runs| {
                        Ok(with_threads(threads, || measure(&backend, shape, runs))?)
                    }),
                })
            };
            threads.into_iter().map(timer).collect()
        }
        other => bail!("{other}: no timer in this program; `attn bench --backend cpu`"),
    }
}

/// Measures the named shapes and prints one line each.
pub fn bench(args: &BenchArgs, as_json: bool) -> Result<()> {
    let full = |shape: &Shape| format!("{}/{}", shape.family, shape.name);
    let default = ["single/".to_owned()];
    let names = if args.names.is_empty() && !args.list {
        &default[..]
    } else {
        &args.names[..]
    };
    let wanted = |shape: &Shape| {
        let named =
            names.is_empty() || names.iter().any(|name| full(shape).contains(name.as_str()));
        named && (args.large || args.list || shape.fits_a_cpu)
    };
    let shapes: Vec<Shape> = shapes().into_iter().filter(wanted).collect();
    ensure!(
        !shapes.is_empty(),
        "no shape is called {}; `attn bench --list` prints the names, `--large` adds those of gigabytes",
        names.join(" or ")
    );
    if args.list {
        for shape in &shapes {
            println!("{:44} {:9.1} MB", full(shape), shape.bytes() as f64 / 1e6);
        }
        return Ok(());
    }
    let mut rows = Vec::new();
    for timer in timers(args)? {
        if !as_json {
            println!(
                "{}; min and median of {} cold steps\n",
                timer.device, args.runs
            );
            println!(
                "| shape | MB | µs min | median | GB/s | read min | median | share of the read |"
            );
            println!("|---|---|---|---|---|---|---|---|");
        }
        for shape in &shapes {
            let (bytes, m) = (shape.bytes() as f64, (timer.measure)(shape, args.runs)?);
            let (rate, share) = (bytes / m.step.min / 1e3, m.ceiling.min / m.step.min);
            if as_json {
                rows.push(json!({
                    "device": timer.device, "shape": full(shape), "bytes": bytes, "us": m.step.min, "us_median": m.step.median,
                    "gb_per_s": rate, "read_us": m.ceiling.min, "read_us_median": m.ceiling.median, "share": share,
                }));
            } else {
                println!(
                    "| {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} % |",
                    full(shape),
                    bytes / 1e6,
                    m.step.min,
                    m.step.median,
                    rate,
                    m.ceiling.min,
                    m.ceiling.median,
                    share * 100.0
                );
            }
        }
    }
    if as_json {
        println!("{}", json!(rows));
    }
    Ok(())
}
