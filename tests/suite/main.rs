//! The suite over every backend that is here; the others are named with their reason, or fail under `ATTN_REQUIRE`.

use attn_conformance::check_backend;
use attn_core::{DecodeAttention, Unsupported};
use attn_cpu::{CpuBackend, Reference};
use rstest::rstest;

mod accuracy;
mod bounds;
mod by_hand;
mod claims;
mod errors;
mod foreign;
mod plans;
mod ranges;
mod third_party;
mod vectors;

/// Opens a backend, or prints why not; absence of one that `ATTN_REQUIRE` names fails.
fn open_or_skip(name: &str) -> Option<Box<dyn DecodeAttention>> {
    let opened: Result<Box<dyn DecodeAttention>, Unsupported> = match name {
        "cpu" => Ok(Box::new(CpuBackend::new())),
        "cuda" => attn_cuda::open(),
        _ => attn_wgpu::open(),
    };
    match opened {
        Ok(backend) => Some(backend),
        Err(reason) => {
            let required = std::env::var("ATTN_REQUIRE").unwrap_or_default();
            assert!(
                !required.split(',').any(|r| r == name),
                "ATTN_REQUIRE={required}, but {reason}"
            );
            eprintln!("skipped: {reason}");
            None
        }
    }
}

#[rstest]
#[case::cpu("cpu")]
#[case::cuda("cuda")]
#[case::wgpu("wgpu")]
fn every_case_of_the_table_holds(#[case] name: &str) {
    let Some(backend) = open_or_skip(name) else {
        return;
    };
    let report = check_backend(&Reference::new(), &*backend, &mut |_, _| ());
    for refusal in &report.refusals {
        eprintln!("no kernel: {refusal}");
    }
    println!(
        "{name}: {} cases, {} refused, {} failures; digest integer {:016x} float {:016x}",
        report.cases,
        report.refusals.len(),
        report.failures.len(),
        report.integer_digest,
        report.float_digest
    );
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
    // The CPU is where every case runs.
    assert!(
        name != "cpu" || report.refusals.is_empty(),
        "the CPU refused {} cases",
        report.refusals.len()
    );
}
