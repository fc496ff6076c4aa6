//! `attn bench`: named shapes on one backend, beside a pure read of as many bytes in the same run.
//!
//! Shapes and what a backend must bring are `attn_core::bench`'s; names, tables and charts are here.

use std::{error::Error as _, path::PathBuf};

use anyhow::{Result, ensure};
use attn::{
    BackendId, Error, KvFormat, Scheme,
    bench::{Measured, Shape, Timer, Timing, shapes},
};
use attn_cpu::bench::CpuTimer;
use attn_cuda::bench::CudaTimer;
use attn_wgpu::bench::WgpuTimer;
use serde_json::{Value, json};

use crate::plot;

/// What `attn bench` measures.
#[derive(clap::Args)]
pub struct BenchArgs {
    /// Shapes: a whole family/name/format, or any part of it; several of them. `--list` prints all. By default what the backend's targets name.
    names: Vec<String>,
    /// The backend to time.
    #[arg(long, default_value = "cpu")]
    backend: BackendId,
    /// Threads of the CPU, several to compare; all by default.
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Timed repetitions per shape; by default 30 on the CPU, and as many as its clock needs on a GPU.
    #[arg(long)]
    runs: Option<usize>,
    /// Print names and bytes, and stop.
    #[arg(long)]
    list: bool,
    /// On the CPU, also what takes gigabytes of memory.
    #[arg(long)]
    large: bool,
    /// Also draw latency over context and share of the read over cache size into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// What a shape took, or why there is no figure.
pub type Outcome = Result<Figures, String>;

/// One shape on one device.
pub struct Row {
    /// Of the timer.
    pub device: usize,
    /// What was to be measured.
    pub shape: Shape,
    /// What it took, or why there is no figure.
    pub outcome: Outcome,
}

/// The figures that rates are made of, with what they were chosen from.
pub struct Figures {
    /// All of it.
    pub measured: Measured,
    /// Microseconds of the work.
    pub us: f64,
    /// Of the read.
    pub read_us: f64,
}

impl Figures {
    fn new(measured: Measured, by_median: bool) -> Self {
        let of = |timing: Timing| if by_median { timing.median } else { timing.min };
        Figures {
            us: of(measured.step),
            read_us: of(measured.ceiling),
            measured,
        }
    }

    /// Of the read ceiling.
    pub fn share(&self) -> f64 {
        self.read_us / self.us
    }
}

fn timers(args: &BenchArgs) -> Result<Vec<Box<dyn Timer>>> {
    ensure!(
        args.threads.is_empty() || args.backend == BackendId::Cpu,
        "--threads is the CPU's; leave it out, or use --backend cpu"
    );
    ensure!(
        !args.threads.contains(&0),
        "--threads 0: at least one thread"
    );
    match args.backend {
        BackendId::Cpu => {
            let all = std::thread::available_parallelism().map_or(1, usize::from);
            let named = if args.threads.is_empty() {
                &[all]
            } else {
                &args.threads[..]
            };
            let timer = |&threads| Ok(Box::new(CpuTimer::open(threads)?) as Box<dyn Timer>);
            named.iter().map(timer).collect()
        }
        BackendId::Cuda => Ok(vec![Box::new(CudaTimer::open()?)]),
        BackendId::Wgpu => Ok(vec![Box::new(WgpuTimer::open()?)]),
    }
}

/// What a backend's targets name.
fn default_names(args: &BenchArgs) -> Vec<String> {
    let names: &[&str] = match args.backend {
        BackendId::Cuda => &[""],
        BackendId::Cpu if args.plot.is_some() => &["single/32-8", "context/"],
        BackendId::Cpu => &["single/"],
        BackendId::Wgpu => &["gqa8/batch32/", "gqa8/batch512/", "single/32-8-ctx8192/"],
    };
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The shapes with one of these names, or else with one of these in their names.
fn chosen(names: &[String]) -> Result<Vec<Shape>> {
    let all = shapes();
    let mut wanted = vec![false; all.len()];
    for name in names {
        let whole = all.iter().any(|shape| shape.to_string() == *name);
        let mut found = false;
        for (shape, wanted) in all.iter().zip(&mut wanted) {
            let text = shape.to_string();
            if if whole {
                text == *name
            } else {
                text.contains(name.as_str())
            } {
                (*wanted, found) = (true, true);
            }
        }
        ensure!(
            found,
            "no shape is called {name}; `attn bench --list` prints the names"
        );
    }
    Ok(all
        .into_iter()
        .zip(wanted)
        .filter(|pair| pair.1)
        .map(|pair| pair.0)
        .collect())
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

/// bf16's time for the same shape, where it has been measured before.
fn bf16_us(rows: &[Row], row: &Row) -> Option<f64> {
    let same = |other: &&Row| {
        let (a, b) = (&other.shape, &row.shape);
        a.format == KvFormat::same(Scheme::Bf16)
            && (other.device, a.family, &a.name) == (row.device, b.family, &b.name)
    };
    let figures = rows.iter().find(same)?.outcome.as_ref().ok()?;
    Some(figures.us)
}

const HEADER: &str = "\
| shape | MB | µs min | median | GB/s | read min | median | of the read | bf16 µs |
|---|---|---|---|---|---|---|---|---|";

fn line(row: &Row, bf16: Option<f64>) -> String {
    let bytes = row.shape.bytes() as f64;
    match &row.outcome {
        Ok(f) => format!(
            "| {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} % | {} |",
            row.shape,
            bytes / 1e6,
            f.measured.step.min,
            f.measured.step.median,
            bytes / f.us / 1e3,
            f.measured.ceiling.min,
            f.measured.ceiling.median,
            f.share() * 100.0,
            bf16.map_or("–".into(), |us| format!("{us:.1}"))
        ),
        Err(reason) => format!("| {} | {:.1} | {reason} |", row.shape, bytes / 1e6),
    }
}

fn value(row: &Row, device: &str, bf16: Option<f64>) -> Value {
    let bytes = row.shape.bytes() as f64;
    let mut value = json!({ "device": device, "shape": row.shape.to_string(), "bytes": bytes });
    let Value::Object(map) = &mut value else {
        return value;
    };
    let mut put = |name: &str, x: Value| map.insert(name.to_owned(), x);
    match &row.outcome {
        Ok(f) => {
            put("us", json!(f.us));
            put("us_min", json!(f.measured.step.min));
            put("us_median", json!(f.measured.step.median));
            put("gb_per_s", json!(bytes / f.us / 1e3));
            put("read_us", json!(f.read_us));
            put("read_us_min", json!(f.measured.ceiling.min));
            put("read_us_median", json!(f.measured.ceiling.median));
            put("share", json!(f.share()));
            put("bf16_us", json!(bf16));
        }
        Err(reason) => {
            put("reason", json!(reason));
        }
    }
    value
}

fn list(shapes: &[Shape], as_json: bool) {
    if as_json {
        let of = |s: &Shape| json!({ "shape": s.to_string(), "bytes": s.bytes() });
        println!("{}", Value::from_iter(shapes.iter().map(of)));
        return;
    }
    for shape in shapes {
        let name = shape.to_string();
        println!("{name:44} {:9.1} MB", shape.bytes() as f64 / 1e6);
    }
}

/// Figures, or why there are none; and whether the device is sound.
fn measure(timer: &mut dyn Timer, shape: &Shape, runs: usize, large: bool) -> (Outcome, bool) {
    if shape.cache_bytes() > timer.most_bytes() && !large {
        let gigabytes = shape.cache_bytes() as f64 / 1e9;
        return (
            Err(format!("not measured: {gigabytes:.1} GB; add --large")),
            true,
        );
    }
    match timer.measure(shape, runs) {
        Ok(measured) => (Ok(Figures::new(measured, timer.by_median())), true),
        Err(error) => (Err(words(&error)), !matches!(error, Error::Device { .. })),
    }
}

/// Measures the named shapes and prints one line each; whether no device failed.
pub fn bench(args: &BenchArgs, as_json: bool) -> Result<bool> {
    let names = if !args.names.is_empty() {
        args.names.clone()
    } else if args.list {
        vec![String::new()]
    } else {
        default_names(args)
    };
    let shapes = chosen(&names)?;
    if args.list {
        list(&shapes, as_json);
        return Ok(true);
    }
    let mut timers = timers(args)?;
    let devices: Vec<String> = timers.iter().map(|timer| timer.device()).collect();
    let (mut rows, mut values, mut healthy) = (Vec::new(), Vec::new(), true);
    for (device, timer) in timers.iter_mut().enumerate() {
        let runs = args.runs.unwrap_or(timer.runs());
        if !as_json {
            let figure = if timer.by_median() {
                "medians"
            } else {
                "fastest"
            };
            let name = &devices[device];
            println!("{name}; {runs} repetitions, caches cold, rates of the {figure}\n\n{HEADER}");
        }
        for shape in &shapes {
            let (outcome, sound) = measure(&mut **timer, shape, runs, args.large);
            healthy &= sound;
            let row = Row {
                device,
                shape: shape.clone(),
                outcome,
            };
            let bf16 = bf16_us(&rows, &row);
            if as_json {
                values.push(value(&row, &devices[device], bf16));
            } else {
                println!("{}", line(&row, bf16));
            }
            rows.push(row);
        }
    }
    if as_json {
        println!("{}", json!(values));
    }
    if let Some(path) = &args.plot {
        plot::draw(path, &devices, &rows)?;
    }
    Ok(healthy)
}
