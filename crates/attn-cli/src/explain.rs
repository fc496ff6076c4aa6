//! `attn explain`: what a step of a shape has to read, by which CUDA kernel, and what a plain read of as many bytes would take; no step is run.

use anyhow::{Result, ensure};
use attn_bench::Workload;
#[cfg(feature = "cuda")]
use attn_bench::cuda::{CudaTimer, Explanation, explain_on_h200};
use serde_json::{Map, Value, json};

use crate::{
    bench::choice::{CustomArgs, chosen},
    console::Console,
    figures::number,
};

/// What `attn explain` explains.
#[derive(clap::Args)]
pub struct ExplainArgs {
    /// Workloads of `attn bench`: a whole family/name/format, or any part of it; several of them.
    #[arg(conflicts_with = "heads", required_unless_present = "heads")]
    names: Vec<String>,
    #[command(flatten)]
    custom: CustomArgs,
    /// GB/s of a plain read on the device in question; by default an H200's. `attn bench` measures it.
    #[arg(long, default_value_t = 4690.0)]
    read: f64,
}

const HEADER: &str = "\
| workload | cache MB | of bf16 | a step moves MB | GFLOP | operations per byte | ceiling µs |
|---|---|---|---|---|---|---|";

#[cfg(feature = "cuda")]
const KERNELS: &str = "\
| workload | kernel | row groups x warps, stages, CTAs an SM | estimated µs | chosen | CTAs | workspace KiB |
|---|---|---|---|---|---|---|";

/// Prints bytes and ceilings of each workload, then a row for each CUDA kernel that covers it: for the GPU that is here, or else for an H200.
pub fn explain(args: &ExplainArgs, console: &mut Console<'_>) -> Result<()> {
    ensure!(
        args.read.is_finite() && args.read > 0.0,
        "--read is {}; allowed: a rate in GB/s, above 0",
        args.read
    );
    let workloads = match args.names.is_empty() {
        true => args.custom.workloads()?,
        false => chosen(&args.names)?,
    };
    console.table(format_args!(
        "ceiling: a plain read at {} GB/s\n\n{HEADER}",
        args.read
    ))?;
    let mut values = Vec::new();
    for workload in &workloads {
        let needs = Needs::new(workload, args.read);
        console.table(format_args!("{}", needs.line(workload)))?;
        values.push(needs.value(workload));
    }
    #[cfg(feature = "cuda")]
    kernels(&workloads, console, &mut values)?;
    let values = values.into_iter().map(Value::Object);
    Ok(console.value(&Value::Array(values.collect()))?)
}

/// What a workload needs on any device.
struct Needs {
    cache_bytes: usize,
    /// Bytes of whole pages of the same tokens in bf16.
    plain_bytes: usize,
    bytes: usize,
    flops: f64,
    /// Microseconds of a plain read of `bytes`.
    ceiling: f64,
}

impl Needs {
    /// `read`: GB/s of a plain read.
    fn new(workload: &Workload, read: f64) -> Self {
        let (bytes, problem) = (workload.bytes(), &workload.problem);
        let lens = problem.kv_lens.iter();
        let tokens: usize = lens
            .map(|len| len.next_multiple_of(workload.page_size.max(1)))
            .sum();
        Needs {
            cache_bytes: workload.cache_bytes(),
            plain_bytes: 2 * tokens * problem.kv_elements().iter().sum::<usize>(),
            bytes,
            flops: match workload.operation.is_append_alone() {
                true => 0.0,
                false => workload.decode_flops(),
            },
            ceiling: bytes as f64 / read * 1e-3,
        }
    }

    fn line(&self, workload: &Workload) -> String {
        format!(
            "| {workload} | {:.1} | {:.0} % | {:.1} | {:.2} | {:.1} | {:.1} |",
            self.cache_bytes as f64 / 1e6,
            100.0 * self.cache_bytes as f64 / self.plain_bytes as f64,
            self.bytes as f64 / 1e6,
            self.flops * 1e-9,
            self.flops / self.bytes as f64,
            self.ceiling
        )
    }

    fn value(&self, workload: &Workload) -> Map<String, Value> {
        let value = json!({
            "shape": workload.to_string(), "cache_bytes": self.cache_bytes, "bf16_cache_bytes": self.plain_bytes,
            "bytes": self.bytes, "flops": number(self.flops), "ceiling_us": number(self.ceiling),
        });
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

/// Prints the CUDA kernels of each workload, and adds them to the values.
#[cfg(feature = "cuda")]
fn kernels(
    workloads: &[Workload],
    console: &mut Console<'_>,
    values: &mut [Map<String, Value>],
) -> Result<()> {
    let gpu = CudaTimer::open();
    let device = match &gpu {
        Ok(gpu) => attn_bench::Timer::device(gpu),
        Err(reason) => {
            console.remark(format_args!("{reason}"));
            "as on an H200".to_owned()
        }
    };
    console.table(format_args!("\ncuda, {device}\n\n{KERNELS}"))?;
    for (workload, value) in workloads.iter().zip(values) {
        let explained = match &gpu {
            Ok(gpu) => gpu.explain(workload),
            Err(_) => explain_on_h200(workload),
        };
        value.insert("device".to_owned(), json!(device));
        match explained {
            Ok(explained) => {
                for line in lines(workload, &explained) {
                    console.table(format_args!("{line}"))?;
                }
                value.append(&mut of_kernels(&explained));
            }
            Err(refused) => {
                console.table(format_args!("| {workload} | {refused} |"))?;
                value.insert("refused".to_owned(), json!(refused.to_string()));
            }
        }
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn lines(workload: &Workload, explained: &Explanation) -> Vec<String> {
    let line = |kernel: &attn_bench::cuda::ExplainedKernel| {
        let config = kernel.config;
        let us = kernel.us.map_or("–".to_owned(), |us| format!("{us:.1}"));
        let chosen = match (kernel.is_chosen, explained.is_dequantized) {
            (true, true) => "yes, of rewritten pages",
            (true, false) => "yes",
            (false, _) => "",
        };
        let [ctas, workspace] = match kernel.is_chosen {
            true => {
                [explained.ctas, explained.workspace_bytes.div_ceil(1024)].map(|n| n.to_string())
            }
            false => [String::new(), String::new()],
        };
        format!(
            "| {workload} | {} | {}x{}, {}, {} | {us} | {chosen} | {ctas} | {workspace} |",
            config.kernel, config.row_groups, config.row_warps, config.stages, config.ctas
        )
    };
    explained.kernels.iter().map(line).collect()
}

#[cfg(feature = "cuda")]
fn of_kernels(explained: &Explanation) -> Map<String, Value> {
    let kernel = |kernel: &attn_bench::cuda::ExplainedKernel| {
        json!({
            "kernel": kernel.config.kernel.to_string(),
            "us": kernel.us.map(number),
            "chosen": kernel.is_chosen,
        })
    };
    let kernels: Vec<_> = explained.kernels.iter().map(kernel).collect();
    Map::from_iter([
        ("kernels".to_owned(), json!(kernels)),
        ("ctas".to_owned(), json!(explained.ctas)),
        (
            "workspace_bytes".to_owned(),
            json!(explained.workspace_bytes),
        ),
        ("rewritten".to_owned(), json!(explained.is_dequantized)),
    ])
}

#[cfg(test)]
mod tests {
    use attn_bench::workloads;

    use super::*;
    use crate::{faulty::program, program::Backends};

    #[cfg(feature = "cuda")]
    #[test]
    fn every_workload_has_one_kernel_and_a_line_for_each_candidate() {
        for workload in workloads() {
            let explained = explain_on_h200(&workload).unwrap();
            let lines = lines(&workload, &explained);
            assert_eq!(lines.len(), explained.kernels.len(), "{workload}");
            let chosen = lines.iter().filter(|line| line.contains("| yes"));
            assert_eq!(chosen.count(), 1, "{workload}: {lines:?}");
        }
    }

    #[test]
    fn every_workload_has_a_ceiling_and_no_more_bytes_than_in_bf16() {
        for workload in workloads() {
            let needs = Needs::new(&workload, 1000.0);
            assert!(needs.cache_bytes <= needs.plain_bytes, "{workload}");
            // A thousand bytes in a nanosecond.
            let us = workload.bytes() as f64 * 1e-6;
            assert!((needs.ceiling - us).abs() < 1e-9 * us, "{workload}");
        }
    }

    #[test]
    fn a_shape_is_explained_without_a_gpu() {
        let shape = "explain --heads 32/8 --ctx 8192 --kv int8 --read 1000 --json";
        let args: Vec<_> = shape.split(' ').collect();
        let (code, out, err) = program(&args, &Backends::here());
        assert_eq!(code, 0, "{err}");
        let value: Value = serde_json::from_str(&out).unwrap();
        let bytes = value[0]["cache_bytes"].as_u64().unwrap();
        // Codes, and two bytes of a scale for each of K and V, in 8192 tokens of 8 heads.
        assert_eq!(bytes, 8192 * 8 * 2 * (128 + 2), "{value}");
        let refused = program(&["explain", "single/", "--read", "0"], &Backends::here());
        assert!(refused.2.contains("--read is 0"), "{}", refused.2);
    }
}
