//! What `attn bench` prints as tables; `Row::value` has the same figures as JSON.

use anyhow::Result;
use attn::{KvFormat, Scheme};
use attn_bench::Workload;
use serde_json::{Value, json};

use crate::{console::Console, figures::gb_per_s, measured::Row};

/// bf16's time for the same workload, where it has been measured before.
pub(super) fn bf16_us(rows: &[Row], row: &Row) -> Option<f64> {
    let same = |other: &&Row| {
        let (a, b) = (&other.workload, &row.workload);
        a.format == KvFormat::same(Scheme::Bf16)
            && (other.device, a.family, &a.name) == (row.device, b.family, &b.name)
    };
    let figures = rows.iter().find(same)?.outcome.as_ref().ok()?;
    Some(figures.us)
}

/// The head of the table whose rows `line` gives.
pub(super) const HEADER: &str = "\
| workload | MB | µs min | median | GB/s | read min | median | of the read | bf16 µs | TFLOP/s |
|---|---|---|---|---|---|---|---|---|---|";

/// A row of the table.
pub(super) fn line(row: &Row, bf16: Option<f64>) -> String {
    let bytes = row.workload.bytes() as f64;
    match &row.outcome {
        Ok(f) => format!(
            "| {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.0} % | {} | {} |",
            row.workload,
            bytes / 1e6,
            f.measured.step.min,
            f.measured.step.median,
            gb_per_s(bytes, f.us),
            f.measured.ceiling.min,
            f.measured.ceiling.median,
            f.share() * 100.0,
            bf16.map_or("–".into(), |us| format!("{us:.1}")),
            rate(row, f.us)
        ),
        Err(reason) => format!("| {} | {:.1} | {reason} |", row.workload, bytes / 1e6),
    }
}

/// The rate of both products; beside that of the dot product alone, with the share of it, where that was measured.
fn rate(row: &Row, us: f64) -> String {
    let rate = row.tflop_per_s(us);
    match row.peak {
        Some(peak) => format!(
            "{rate:.3} of {:.3}, {:.0} %",
            peak / 1e12,
            rate / peak * 1e14
        ),
        None => format!("{rate:.1}"),
    }
}

/// Prints the names and bytes of workloads.
pub(super) fn list(workloads: &[Workload], console: &mut Console<'_>) -> Result<()> {
    for workload in workloads {
        let (name, megabytes) = (workload.to_string(), workload.bytes() as f64 / 1e6);
        console.table(format_args!("{name:44} {megabytes:9.1} MB"))?;
    }
    let of = |s: &Workload| json!({ "shape": s.to_string(), "bytes": s.bytes() });
    console.value(&Value::from_iter(workloads.iter().map(of)))?;
    Ok(())
}
