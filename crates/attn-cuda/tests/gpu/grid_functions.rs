//! The GPU's exponential and logarithm on the grid, and what kernels have in their place where these are not right.

use anyhow::{Result, ensure};
use attn_conformance::{Size, check_table, table, trials::Trials};
use attn_core::DecodeAttention;
use attn_cpu::Reference;
use attn_cuda::{CudaBackend, Exponential, Options};

use crate::passes;

/// Cases that are attended by polynomials: each compiles kernels.
const CASES: usize = 6;

fn are_right() -> Result<()> {
    for exponential in Exponential::ALL {
        let options = Options::from_env()?.exponential(exponential);
        let check = CudaBackend::with_options(&options)?.check_grid()?;
        let check = check.ok_or_else(|| anyhow::anyhow!("the GPU's functions are not compared"))?;
        println!("{}: {check}", exponential.name());
        ensure!(check.is_right(), "{}: {check}", exponential.name());
    }
    Ok(())
}

fn polynomials_have_the_same_bits() -> Result<()> {
    let options = Options::from_env()?.exponential(Exponential::Polynomial);
    let gpu = CudaBackend::with_options(&options)?;
    let mut cases = table(Size::Reduced);
    cases.retain(|case| case.format.is_integer());
    let apart = cases.len() / CASES;
    let cases: Vec<_> = cases.into_iter().step_by(apart).collect();
    let report = check_table(&Reference::new(), &gpu, &cases, 1, &mut |_, _| ());
    ensure!(
        report.cases >= CASES && report.failures.is_empty(),
        "{report:?}"
    );
    Ok(())
}

pub fn add(trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    trials
        .test("functions of the grid are right", |_| passes(are_right()))
        .test("polynomials have the same bits", |_| {
            passes(polynomials_have_the_same_bits());
        })
}
