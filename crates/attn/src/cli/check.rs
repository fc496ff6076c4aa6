//! `attn devices` and `attn check`.

use anyhow::Result;
use attn::{BackendId, DecodeAttention, KvFormat, Problem, Scheme, problem::HEAD_DIMS};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

/// What a backend has kernels for, asked of itself: formats at head_dim 128, and the head_dims of `int8`.
fn kernels(backend: &dyn DecodeAttention) -> (Vec<String>, Vec<usize>) {
    let has = |format, head_dim| {
        let problem = Problem::new(8, 1, head_dim, vec![1]);
        backend.supports(&problem, format).is_ok()
    };
    let mut formats = vec![KvFormat::INT8, KvFormat::INT4];
    for scheme in Scheme::ALL {
        let format = KvFormat::same(scheme);
        if format.check(128, 64).is_ok() && !formats.contains(&format) {
            formats.push(format);
        }
    }
    let formats = formats.into_iter().filter(|format| has(*format, 128));
    let head_dims = HEAD_DIMS
        .into_iter()
        .filter(|dim| has(KvFormat::INT8, *dim));
    (
        formats.map(|f| f.to_string()).collect(),
        head_dims.collect(),
    )
}

/// Prints every backend: its device and kernels, or why it is not available.
pub fn devices(as_json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for id in BackendId::ALL {
        let name = id.to_string();
        match id.open() {
            Ok(backend) => {
                let device = backend.device();
                let (formats, head_dims) = kernels(&*backend);
                if !as_json {
                    let dims: Vec<_> = head_dims.iter().map(usize::to_string).collect();
                    println!("{name:5} available: {} ({})", device.name, device.detail);
                    println!("      formats {}", formats.join(", "));
                    println!("      head_dims {}", dims.join(", "));
                }
                rows.push(json!({
                    "backend": name, "available": true, "device": device.name, "detail": device.detail,
                    "formats": formats, "head_dims": head_dims,
                }));
            }
            Err(reason) => {
                if !as_json {
                    println!("{name:5} not available: {reason}");
                }
                rows.push(
                    json!({ "backend": name, "available": false, "reason": reason.to_string() }),
                );
            }
        }
    }
    if as_json {
        println!("{}", json!(rows));
    }
    Ok(())
}

/// Runs the conformance table over one or every backend that is here; whether all passed.
pub fn check(only: Option<BackendId>, as_json: bool) -> Result<bool> {
    let reference = attn_cpu::Reference::new();
    let (mut all_passed, mut rows) = (true, Vec::new());
    for id in BackendId::ALL
        .into_iter()
        .filter(|id| only.is_none_or(|o| o == *id))
    {
        let backend = match id.open() {
            Ok(backend) => backend,
            Err(reason) if only.is_some() => return Err(reason.into()),
            Err(reason) => {
                eprintln!("skipped: {reason}");
                continue;
            }
        };
        let (cases, threads) = attn_conformance::cases_from_env(&*backend)?;
        // Drawn on stderr, and only where that is a terminal.
        let bar = ProgressBar::no_length()
            .with_prefix(id.to_string())
            .with_style(ProgressStyle::with_template(
                "{prefix} {wide_bar} {pos}/{len} cases, {eta} left",
            )?);
        let report = attn_conformance::check_table(
            &reference,
            &*backend,
            &cases,
            threads,
            &mut |done, of| {
                bar.set_length(of as u64);
                bar.set_position(done as u64);
            },
        );
        bar.finish_and_clear();
        all_passed &= report.failures.is_empty();
        for failure in &report.failures {
            eprintln!("failed: {failure}");
        }
        for refusal in &report.refusals {
            eprintln!("no kernel: {refusal}");
        }
        if !as_json {
            println!(
                "{id}: {} cases, {} without a kernel, {} failures; digest integer {:016x} float {:016x}",
                report.cases,
                report.refusals.len(),
                report.failures.len(),
                report.integer_digest,
                report.float_digest
            );
        }
        rows.push(json!({
            "backend": id.to_string(), "cases": report.cases, "failures": report.failures, "no_kernel": report.refusals,
            "integer_digest": format!("{:016x}", report.integer_digest), "float_digest": format!("{:016x}", report.float_digest),
        }));
    }
    if as_json {
        println!("{}", json!(rows));
    }
    Ok(all_passed)
}
