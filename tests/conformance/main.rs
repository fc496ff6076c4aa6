//! The table over every backend, a test for each case. A backend that is absent is ignored with its reason, or fails under `ATTN_REQUIRE`.

#[path = "../common/layers.rs"]
mod layers;

mod cache_layers;
mod engines;
mod events;
mod plans;
mod real_layers;
mod selected_pages;
mod strides;
mod unseen;

use std::{process::ExitCode, sync::Arc};

use attn_conformance::{
    cases_from_env,
    trials::{Outcomes, Trials},
};
use attn_core::{DecodeAttention, Unsupported};
use attn_cpu::{CpuBackend, Reference};
use libtest_mimic::{Arguments, Trial};

/// The tests of one backend: the table's cases, what a caller may choose about a step, what an engine does between steps, and real layers.
fn trials(
    name: &'static str,
    opened: Result<Box<dyn DecodeAttention>, Unsupported>,
    outcomes: &Outcomes,
) -> Vec<Trial> {
    let mut trials = Trials::new(name, opened);
    let backend = trials.backend().cloned();
    // An absent backend has the cases that the CPU would have, which are not run.
    let cases = match &backend {
        Some(backend) => cases_from_env(&***backend),
        None => cases_from_env(&CpuBackend::new()),
    };
    let (cases, _) = cases.unwrap_or_else(|error| panic!("{error}"));
    trials = trials.cases(&Arc::new(Reference::new()), cases, outcomes);
    trials = plans::add(trials);
    trials = engines::add(trials);
    trials = cache_layers::add(trials);
    trials = events::add(trials);
    trials = selected_pages::add(trials);
    trials = strides::add(trials);
    trials = unseen::add(trials);
    if name != "cpu" {
        trials = real_layers::add(trials);
    }
    trials.finish()
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let backends = [
        ("cpu", CpuBackend::open().map(|cpu| Box::new(cpu) as Box<_>)),
        ("cuda", attn_cuda::open()),
        ("wgpu", attn_wgpu::open()),
    ];
    let (mut all, mut digests) = (Vec::new(), Vec::new());
    for (name, opened) in backends {
        let outcomes = Outcomes::default();
        all.extend(trials(name, opened, &outcomes));
        digests.push((name, outcomes));
    }
    let conclusion = libtest_mimic::run(&arguments, all);
    for (name, outcomes) in digests {
        let report = outcomes.report();
        if report.cases > 0 {
            println!(
                "{name}: {} cases, {} without a kernel, {} failures; digest integer {:016x} float {:016x}",
                report.cases,
                report.refusals.len(),
                report.failures.len(),
                report.integer_digest,
                report.float_digest
            );
        }
    }
    conclusion.exit_code()
}
