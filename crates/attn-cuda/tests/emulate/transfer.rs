//! The tests of `common/transfer.rs` on emulated kernels.

use std::sync::Arc;

use anyhow::Result;
use attn_core::{KvFormat, Problem};
use attn_cuda::{
    internals::{LaunchPlan, PlanKind},
    native::{DecodeArgs, DeviceAddress, KvLayout, Op, SpansArgs},
};
use attn_kernels::cuda::{Arch, DeviceLimits, Preferences};
use libtest_mimic::Trial;

use crate::{
    Kernels,
    common_transfer::{Machine, Test},
    shards::Case,
};

impl Machine for Kernels {
    /// Words of 16 bytes, and how many bytes of them count.
    type Memory = (Vec<u128>, usize);

    fn upload(&self, bytes: &[u8]) -> Result<Self::Memory> {
        let mut words = vec![0u128; bytes.len().div_ceil(16)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Ok((words, bytes.len()))
    }

    fn address(&self, memory: &mut Self::Memory) -> DeviceAddress {
        DeviceAddress::new(memory.0.as_mut_ptr() as u64)
    }

    fn download(&self, (words, bytes): &Self::Memory) -> Result<Vec<u8>> {
        Ok(bytemuck::cast_slice(words)[..*bytes].to_vec())
    }

    unsafe fn enqueue<O: Op>(&self, shape: O::Shape, op: &O) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.launch(&shape, op) }
    }

    fn query_blocks(&self, planned: (&Problem, KvFormat, KvLayout)) -> Result<Vec<[i32; 4]>> {
        let plan = spans_plan(planned)?;
        let blocks = plan.query_blocks().iter();
        Ok(blocks
            .map(|b| [b.sequence, b.first, b.tokens, b.behind])
            .collect())
    }

    unsafe fn attend_spans(
        &self,
        planned: (&Problem, KvFormat, KvLayout),
        args: &DecodeArgs,
        to: &SpansArgs,
    ) -> Result<()> {
        let plan = spans_plan(planned)?;
        let params = plan.params(planned.0, args)?;
        let params = plan.spans_params(planned.0, to, params)?;
        for params in plan.launches(params) {
            let launch = &plan.launch;
            // SAFETY: split_kv.cu takes a DecodeParams; the rest is this function's contract.
            unsafe { self.run(&plan.instance, &params, launch.grid, launch.threads) }?;
        }
        Ok(())
    }
}

/// The plan of a shard, for a small GPU: work items are cut between CTAs.
fn spans_plan((problem, format, layout): (&Problem, KvFormat, KvLayout)) -> Result<LaunchPlan> {
    let limits = DeviceLimits::new(Arch::Sm90a.shared_limit(), 3);
    let preferences = Preferences::default();
    Ok(LaunchPlan::new(
        PlanKind::Spans,
        limits,
        &preferences,
        problem,
        format,
        layout,
    )?)
}

/// A trial for each test.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let shards = Case::all().into_iter().map(|case| {
        let kernels = kernels.clone();
        Trial::test(case.name(), move || {
            let result = case.run(kernels.as_ref());
            result.map_err(|error| format!("{error:#}").into())
        })
    });
    let trial = |test: Test| {
        let kernels = kernels.clone();
        Trial::test(test.name(), move || {
            let result = test.run(kernels.as_ref());
            result.map_err(|error| format!("{error:#}").into())
        })
    };
    Test::all().into_iter().map(trial).chain(shards).collect()
}
