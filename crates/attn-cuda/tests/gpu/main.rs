//! What only a GPU can show: the native entry, misuse of the safe interface, random shapes. Without a GPU each is ignored with the reason.

#[path = "../common/transfer.rs"]
mod common_transfer;
#[path = "../common/numbers.rs"]
mod numbers;
#[path = "../common/paged_rows.rs"]
mod paged_rows;
#[path = "../common/pages.rs"]
mod pages;
#[path = "../common/rotary.rs"]
mod rotary;
#[path = "../common/shards.rs"]
mod shards;

mod grid_functions;
mod hostile;
mod layers;
mod native;
mod ragged;
mod random_shapes;
mod rotated;
mod rows_in_pages;
mod transfer;

use std::process::ExitCode;

use anyhow::Result;
use attn_conformance::trials::Trials;
use attn_core::Unsupported;
use attn_cuda::CudaBackend;
use libtest_mimic::{Arguments, Trial};

/// The error of a call to the driver, in words.
fn driver<T>(result: Result<T, cudarc::driver::DriverError>) -> Result<T> {
    result.map_err(|error| anyhow::anyhow!("the driver said {error}"))
}

/// A test that fails by an error.
fn passes(result: Result<()>) {
    if let Err(error) = result {
        panic!("{error:#}");
    }
}

/// Without a GPU the backend says so, and what mends it.
fn opening_names_the_next_step() -> Result<(), libtest_mimic::Failed> {
    match attn_cuda::open() {
        Ok(backend) => assert_eq!(backend.device().backend, "cuda"),
        Err(Unsupported::Absent {
            backend, next_step, ..
        }) => assert!(backend == "cuda" && !next_step.is_empty()),
        Err(other) => panic!("{other}"),
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Trials::new("cuda", CudaBackend::open());
    trials = hostile::add(trials);
    trials = grid_functions::add(trials);
    trials = native::add(trials);
    trials = ragged::add(trials);
    trials = layers::add(trials);
    trials = rotated::add(trials);
    trials = rows_in_pages::add(trials);
    trials = transfer::add(trials);
    trials = random_shapes::add(trials);
    let mut all = trials.finish();
    all.push(Trial::test(
        "opening never panics and names the next step",
        opening_names_the_next_step,
    ));
    all.extend(hostile::without_a_gpu());
    libtest_mimic::run(&arguments, all).exit_code()
}
