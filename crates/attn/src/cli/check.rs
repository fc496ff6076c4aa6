//! `attn devices` and `attn check`.

use anyhow::Result;
use attn::BackendId;
use serde_json::json;

/// Prints every backend: its device, or why it is not available.
pub fn devices(as_json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for id in BackendId::ALL {
        let (available, text) = match id.open() {
            Ok(backend) => {
                let device = backend.device();
                (
                    true,
                    format!(
                        "{} ({}); every format, head_dim and mask",
                        device.name, device.detail
                    ),
                )
            }
            Err(reason) => (false, reason.to_string()),
        };
        rows.push(json!({ "backend": id.to_string(), "available": available, "detail": text }));
        if !as_json {
            println!(
                "{id:5} {:13} {text}",
                if available {
                    "available"
                } else {
                    "not available"
                }
            );
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
        let report = attn_conformance::check_backend(&reference, &*backend, &mut |done, of| {
            eprint!("\r{id}: {done}/{of}");
        });
        eprintln!();
        all_passed &= report.failures.is_empty();
        report
            .failures
            .iter()
            .for_each(|failure| eprintln!("{failure}"));
        if !as_json {
            println!(
                "{id}: {} cases, {} failures",
                report.cases,
                report.failures.len()
            );
        }
        rows.push(json!({ "backend": id.to_string(), "cases": report.cases, "failures": report.failures }));
    }
    if as_json {
        println!("{}", json!(rows));
    }
    Ok(all_passed)
}
