//! Random shapes: GPU and CPU, batch and alone, three grids, with and without `low_latency.cu`, twice.

use std::sync::{Arc, OnceLock};

use anyhow::{Result, bail};
use attn_conformance::{
    Case,
    check::{decode, first_difference},
    random::random,
    trials::Trials,
};
use attn_core::{Error, error::Unsupported};
use attn_cpu::CpuBackend;
use attn_cuda::{CudaBackend, Options};
use attn_kernels::cuda::{KernelChoice, KvLayout, instance::covered};

use crate::passes;

/// Shapes of one test.
const OF_ONE: u64 = 20;

/// Where the GPU's answer differs from the CPU's, or from its own under another batch or grid.
fn differs(cpu: &CpuBackend, gpus: &[CudaBackend; 3], case: &Case) -> Result<Option<String>> {
    let want = decode(cpu, case, &case.cache(cpu, usize::MAX)?)?;
    let which = (case.seed % 3) as usize;
    let cache = case.built(&gpus[which])?;
    for (run, gpu) in [("", &gpus[which]), ("second run: ", &gpus[which])] {
        let got = decode(gpu, case, &cache)?;
        let found = first_difference(&format!("{run}out"), &got.0, &want.0)
            .or_else(|| first_difference(&format!("{run}lse"), &got.1, &want.1));
        if found.is_some() {
            return Ok(found);
        }
    }
    // Another grid, the sequence alone, its pages elsewhere.
    let b = (case.seed as usize / 3) % case.problem.batch();
    let one = case.only(b);
    let gpu = &gpus[(which + 1) % 3];
    let got = decode(gpu, &one, &one.built(gpu)?)?;
    let (heads, dim) = (case.problem.num_q_heads, case.problem.head_dim.v);
    let tokens = case.problem.query_ranges().nth(b).unwrap_or_default();
    let rows = tokens.start * heads..tokens.end * heads;
    let dims = rows.start * dim..rows.end * dim;
    Ok(first_difference("alone, out", &got.0, &want.0[dims])
        .or_else(|| first_difference("alone, lse", &got.1, &want.1[rows])))
}

fn has_no_kernel(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref();
    matches!(
        error,
        Some(Error::Unsupported(Unsupported::NoKernel { .. }))
    )
}

/// `OF_ONE` shapes from `first` on.
fn run(gpus: &[CudaBackend; 3], first: u64) -> Result<()> {
    let cpu = CpuBackend::new();
    for seed in first..first + OF_ONE {
        let case = random(seed);
        if covered(case.format, KvLayout::Pages(case.page_size)).is_err() {
            continue;
        }
        match differs(&cpu, gpus, &case) {
            Ok(None) => {}
            Ok(Some(text)) => bail!("{case}: {text}"),
            // As the conformance table has it: widths that a GPU's shared memory does not hold.
            Err(error) if has_no_kernel(&error) && !case.is_required() => {
                println!("{case}: {error:#}");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The GPU as it is, and as two smaller ones: one whose kernel is `many_rows.cu` wherever it can, one that merges through global memory wherever it can.
fn open() -> Result<[CudaBackend; 3]> {
    let options = Options::from_env()?;
    let smaller = |sms, kernel| {
        let options = options.clone().sms(sms).kernel(kernel);
        CudaBackend::with_options(&options)
    };
    Ok([
        CudaBackend::open()?,
        smaller(37, KernelChoice::ManyRows)?,
        smaller(61, KernelChoice::LowLatencyGlobal)?,
    ])
}

fn from_env(name: &str, default: u64) -> u64 {
    let Ok(value) = std::env::var(name) else {
        return default;
    };
    value
        .parse()
        .unwrap_or_else(|_| panic!("{name} is {value}; allowed: a whole number"))
}

/// Adds the tests of this file: `ATTN_STRESS` shapes from the seed `ATTN_STRESS_SEED` on.
pub fn add(mut trials: Trials<CudaBackend>) -> Trials<CudaBackend> {
    let (count, first) = (from_env("ATTN_STRESS", 60), from_env("ATTN_STRESS_SEED", 1));
    // Opened by the first test that runs, and shared.
    let gpus = Arc::new(OnceLock::new());
    for first in (first..first + count).step_by(OF_ONE as usize) {
        let (name, gpus) = (
            format!("random shapes {first} to {}", first + OF_ONE - 1),
            gpus.clone(),
        );
        trials = trials.test(name, move |_| {
            let opened = gpus.get_or_init(|| open().map_err(|error| format!("{error:#}")));
            match opened {
                Ok(gpus) => passes(run(gpus, first)),
                Err(error) => panic!("{error}"),
            }
        });
    }
    trials
}
