//! `attn devices` and `attn check`.

use anyhow::Result;
use attn::{BackendId, DecodeAttention, HEAD_DIMS, Heads, KvFormat, Problem, Scheme};
use attn_conformance::Report;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::{console::Console, program::Backends};

/// What a backend has kernels for, asked of itself: formats at head_dim 128, and the head_dims of `int8`.
fn kernels(backend: &dyn DecodeAttention) -> (Vec<String>, Vec<usize>) {
    let has = |format, head_dim| {
        let problem = Problem::new(Heads::new(8, 1, head_dim), vec![1]);
        backend.supports(&problem, format).is_ok()
    };
    let mut formats = vec![KvFormat::INT8, KvFormat::INT8_INT4, KvFormat::INT4];
    for scheme in Scheme::ALL {
        let format = KvFormat::same(scheme);
        if format.check(128).is_ok() && !formats.contains(&format) {
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
pub fn devices(console: &mut Console<'_>, backends: &Backends) -> Result<()> {
    let mut rows = Vec::new();
    for id in BackendId::ALL {
        let name = id.to_string();
        match (backends.open)(id) {
            Ok(backend) => {
                let device = backend.device();
                let (formats, head_dims) = kernels(&*backend);
                let dims: Vec<_> = head_dims.iter().map(usize::to_string).collect();
                console.table(format_args!(
                    "{name:5} available: {} ({})\n      formats {}\n      head_dims {}",
                    device.name,
                    device.detail,
                    formats.join(", "),
                    dims.join(", ")
                ))?;
                rows.push(json!({
                    "backend": name, "available": true, "device": device.name, "detail": device.detail,
                    "formats": formats, "head_dims": head_dims,
                }));
            }
            Err(reason) => {
                console.table(format_args!("{name:5} not available: {reason}"))?;
                rows.push(
                    json!({ "backend": name, "available": false, "reason": reason.to_string() }),
                );
            }
        }
    }
    console.value(&json!(rows))?;
    Ok(())
}

/// Prints a line for each backend: its device, or why it is not available.
pub fn seen(console: &mut Console<'_>, backends: &Backends) -> Result<()> {
    console.table(format_args!("attn {} sees", env!("CARGO_PKG_VERSION")))?;
    for id in BackendId::ALL {
        match (backends.open)(id) {
            Ok(backend) => {
                let device = backend.device();
                console.table(format_args!("  {id:5} {} ({})", device.name, device.detail))?;
            }
            Err(reason) => console.table(format_args!("  {id:5} not available: {reason}"))?,
        }
    }
    Ok(console.table("")?)
}

/// Runs the conformance table over one or every backend that is here; whether all passed.
pub fn check(
    only: Option<BackendId>,
    console: &mut Console<'_>,
    backends: &Backends,
) -> Result<bool> {
    let (mut all_passed, mut rows) = (true, Vec::new());
    for id in BackendId::ALL
        .into_iter()
        .filter(|id| only.is_none_or(|o| o == *id))
    {
        let backend = match (backends.open)(id) {
            Ok(backend) => backend,
            Err(reason) if only.is_some() => return Err(reason.into()),
            Err(reason) => {
                console.remark(format_args!("skipped: {reason}"));
                continue;
            }
        };
        let report = hold_to_table(id, &*backend)?;
        all_passed &= report.failures.is_empty();
        for failure in &report.failures {
            console.remark(format_args!("failed: {failure}"));
        }
        for refusal in &report.refusals {
            console.remark(format_args!("no kernel: {refusal}"));
        }
        let grid = backend.check_grid()?;
        all_passed &= grid.is_none_or(|grid| grid.is_right());
        console.table(line(id, &report))?;
        if let Some(grid) = &grid {
            console.table(format_args!("{id}: the device's own functions: {grid}"))?;
        }
        let functions = grid.map(|grid| grid.to_string());
        rows.push(value(id, &report, functions));
    }
    console.value(&json!(rows))?;
    Ok(all_passed)
}

/// Runs the cases that the environment asks for, with a bar on stderr where that is a terminal.
fn hold_to_table(id: BackendId, backend: &dyn DecodeAttention) -> Result<Report> {
    let (cases, threads) = attn_conformance::cases_from_env(backend)?;
    let bar = ProgressBar::no_length()
        .with_prefix(id.to_string())
        .with_style(ProgressStyle::with_template(
            "{prefix} {wide_bar} {pos}/{len} cases, {eta} left",
        )?);
    let report = attn_conformance::check_table(
        &attn_cpu::Reference::new(),
        backend,
        &cases,
        threads,
        &mut |done, of| {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        },
    );
    bar.finish_and_clear();
    Ok(report)
}

fn line(id: BackendId, report: &Report) -> String {
    format!(
        "{id}: {} cases, {} without a kernel, {} failures; digest integer {:016x} float {:016x}",
        report.cases,
        report.refusals.len(),
        report.failures.len(),
        report.integer_digest,
        report.float_digest
    )
}

fn value(id: BackendId, report: &Report, device_functions: Option<String>) -> Value {
    json!({
        "backend": id.to_string(), "cases": report.cases, "failures": report.failures, "no_kernel": report.refusals,
        "integer_digest": format!("{:016x}", report.integer_digest), "float_digest": format!("{:016x}", report.float_digest),
        "device_functions": device_functions,
    })
}

#[cfg(test)]
mod tests {
    use attn::Unsupported;

    use super::*;
    use crate::faulty::{self, Fault, program};

    /// The CPU alone, spoilt.
    fn spoilt(id: BackendId, fault: Fault) -> Result<Box<dyn DecodeAttention>, Unsupported> {
        match id {
            BackendId::Cpu => Ok(faulty::open(fault)),
            _ => Err(Unsupported::Absent {
                backend: "gpu",
                reason: "none".to_owned(),
                next_step: "use another".to_owned(),
            }),
        }
    }

    fn check_with(
        open: fn(BackendId) -> Result<Box<dyn DecodeAttention>, Unsupported>,
    ) -> (u8, Value, String) {
        let backends = Backends {
            open,
            select: attn::select,
        };
        let (code, out, err) = program(&["check", "--json"], &backends);
        (code, serde_json::from_str(&out).expect("JSON"), err)
    }

    #[test]
    fn a_backend_that_is_right_passes_and_absent_ones_are_named() {
        let (code, rows, err) = check_with(|id| spoilt(id, |_, _| ()));
        assert_eq!(code, 0, "{err}");
        assert_eq!(rows[0]["failures"], json!([]));
        assert_eq!(err.matches("skipped: gpu: none").count(), 2, "{err}");
    }

    #[test]
    fn failures_end_the_program_with_1() {
        // One bit, NaN in an output, NaN in a log-sum-exp.
        let flipped =
            check_with(|id| spoilt(id, |out, _| out[0] = f32::from_bits(out[0].to_bits() ^ 1)));
        let nan = check_with(|id| spoilt(id, |out, _| out[0] = f32::NAN));
        let nan_lse = check_with(|id| spoilt(id, |_, lse| lse[0] = f32::NAN));
        for (code, rows, err) in [flipped, nan, nan_lse] {
            assert_eq!(code, 1, "{rows}");
            let failures = rows[0]["failures"].as_array().unwrap().len();
            assert!(failures > 0, "{rows}");
            assert_eq!(err.matches("failed: seed ").count(), failures, "{err}");
        }
    }

    #[test]
    fn the_line_counts_cases_refusals_and_failures() {
        let report = Report {
            cases: 30,
            failures: vec!["one".to_owned()],
            refusals: vec!["two".to_owned(), "three".to_owned()],
            integer_digest: 0xab,
            float_digest: 0xcd,
        };
        assert_eq!(
            line(BackendId::Cpu, &report),
            "cpu: 30 cases, 2 without a kernel, 1 failures; digest integer 00000000000000ab float 00000000000000cd"
        );
    }

    #[test]
    fn devices_are_printed_with_formats_and_head_dims_or_the_reason() {
        let backends = Backends {
            open: |id| spoilt(id, |_, _| ()),
            select: attn::select,
        };
        let (code, text, _) = program(&["devices"], &backends);
        assert_eq!(code, 0);
        for part in [
            "cuda  not available: gpu: none",
            "cpu   available: ",
            "      formats int8, int8/int4, int4, ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
        assert!(
            text.contains(&format!("      head_dims {dims}\n")),
            "{text}"
        );
        let (formats, _) =
            kernels(&*spoilt(BackendId::Cpu, |_, _| ()).unwrap_or_else(|_| panic!("it is there")));
        let each = |format: &String| formats.iter().filter(|other| *other == format).count();
        assert!(
            formats.iter().all(|format| each(format) == 1),
            "{formats:?}"
        );
        // Eight groups of 16 dims are the last that a head of 128 holds.
        for name in ["int8-plain", "int4-w4", "int4-g8"] {
            assert!(formats.contains(&name.to_owned()), "{formats:?}");
        }
    }

    #[test]
    fn a_named_backend_that_is_absent_is_refused() {
        let backends = Backends {
            open: |id| spoilt(id, |_, _| ()),
            select: attn::select,
        };
        let (code, out, err) = program(&["check", "--backend", "cuda"], &backends);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains("attn: gpu: none"), "{err}");
    }
}
