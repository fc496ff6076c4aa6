//! The functions of the grid as `grid_functions.cu` gives them, of all their inputs, against those of integers.

use std::sync::Arc;

use anyhow::{Result, ensure};
use attn_core::grid::{CHECKED_POINTS, CHECKED_SCALES, GridCheck};
use attn_kernels::cuda::{Arch, Exponential, Instance, Target, params::GridFunctionsParams};
use libtest_mimic::Trial;

use crate::Kernels;

fn are_right(kernels: &Kernels, target: Target) -> Result<()> {
    let (num_points, num_scales) = (CHECKED_POINTS.count(), usize::from(CHECKED_SCALES));
    let (mut points, mut scales) = (vec![7f32; num_points], vec![7f32; num_scales]);
    let params = GridFunctionsParams {
        points: points.as_mut_ptr() as u64,
        scales: scales.as_mut_ptr() as u64,
        first_point: *CHECKED_POINTS.start(),
        num_points: num_points as i32,
        num_scales: num_scales as i32,
        reserved: 0,
    };
    // SAFETY: the kernel takes this block, and the arrays are as long as it says.
    unsafe { kernels.run_as(target, &Instance::GridFunctions, &params, [3, 1, 1], 128) }?;
    let check = GridCheck::of(&points, &scales);
    ensure!(check.is_right(), "{check}");
    Ok(())
}

pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let targets = Exponential::ALL.map(|exponential| Target {
        arch: Arch::Sm90a,
        exponential,
    });
    let trials = targets.into_iter().map(|target| {
        let kernels = kernels.clone();
        let name = format!("functions of the grid by {}", target.exponential.name());
        Trial::test(name, move || Ok(are_right(&kernels, target)?))
    });
    trials.collect()
}
