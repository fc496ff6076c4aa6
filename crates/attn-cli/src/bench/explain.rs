//! `attn bench --explain`: which CUDA kernels cover each workload, how long each is estimated to take, and which is chosen.

use anyhow::Result;
use attn_bench::{
    Workload,
    cuda::{CudaTimer, Explanation, explain_on_h200},
};
use serde_json::{Value, json};

use crate::{console::Console, figures::number};

const HEADER: &str = "\
| workload | kernel | row groups x warps, stages, CTAs an SM | estimated µs | chosen | CTAs | workspace KiB |
|---|---|---|---|---|---|---|";

/// Prints a row for each kernel of each workload: for the GPU that is here, or else for an H200.
pub(super) fn explain(workloads: &[Workload], console: &mut Console<'_>) -> Result<()> {
    let gpu = CudaTimer::open();
    match &gpu {
        Ok(gpu) => {
            console.table(format_args!(
                "{}\n\n{HEADER}",
                attn_bench::Timer::device(gpu)
            ))?;
        }
        Err(reason) => {
            console.remark(format_args!("{reason}"));
            console.table(format_args!("as on an H200\n\n{HEADER}"))?;
        }
    }
    let mut values = Vec::new();
    for workload in workloads {
        let explained = match &gpu {
            Ok(gpu) => gpu.explain(workload),
            Err(_) => explain_on_h200(workload),
        };
        match explained {
            Ok(explained) => {
                for line in lines(workload, &explained) {
                    console.table(format_args!("{line}"))?;
                }
                values.push(value(workload, &explained));
            }
            Err(refused) => {
                console.table(format_args!("| {workload} | {refused} |"))?;
                values
                    .push(json!({ "shape": workload.to_string(), "refused": refused.to_string() }));
            }
        }
    }
    Ok(console.value(&Value::Array(values))?)
}

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

fn value(workload: &Workload, explained: &Explanation) -> Value {
    let kernel = |kernel: &attn_bench::cuda::ExplainedKernel| {
        json!({
            "kernel": kernel.config.kernel.to_string(),
            "us": kernel.us.map(number),
            "chosen": kernel.is_chosen,
        })
    };
    json!({
        "shape": workload.to_string(),
        "kernels": explained.kernels.iter().map(kernel).collect::<Vec<_>>(),
        "ctas": explained.ctas,
        "workspace_bytes": explained.workspace_bytes,
        "rewritten": explained.is_dequantized,
    })
}

#[cfg(test)]
mod tests {
    use attn_bench::workloads;

    use super::*;

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
}
