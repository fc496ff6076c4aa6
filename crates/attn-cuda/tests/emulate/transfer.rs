//! The tests of `common/transfer.rs` on emulated kernels.

use std::sync::Arc;

use anyhow::Result;
use attn_core::{KvFormat, PageLayout, Problem};
use attn_cuda::{
    internals::{
        LaunchPlan, PlanKind, copy_pages_grid, copy_pages_params, export_grid, export_params,
        merge_spans_grid, merge_spans_params, merge_states_grid, merge_states_params,
    },
    native::{
        CopyPagesArgs, DecodeArgs, DeviceAddress, ExportArgs, KvLayout, MergeSpansArgs,
        MergeStatesArgs, SpansArgs,
    },
};
use attn_kernels::cuda::{Arch, DeviceLimits, Instance, Preferences};
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

    unsafe fn export(&self, layout: &PageLayout, args: &ExportArgs) -> Result<()> {
        let instance = Instance::Export {
            format: layout.format(),
            head_dim: layout.head_dim(),
            page_size: layout.page_size(),
        };
        let (grid, threads) = export_grid(layout, args.batch, args.max_tokens);
        // SAFETY: export.cu takes an ExportParams; the rest is this function's contract.
        unsafe { self.run(&instance, &export_params(args, layout)?, grid, threads) }
    }

    unsafe fn copy_pages(&self, args: &CopyPagesArgs) -> Result<()> {
        let (grid, threads) = copy_pages_grid(args);
        let params = copy_pages_params(args)?;
        // SAFETY: copy_pages.cu takes a CopyPagesParams; the rest is this function's contract.
        unsafe { self.run(&Instance::CopyPages, &params, grid, threads) }
    }

    unsafe fn merge(&self, args: &MergeStatesArgs) -> Result<()> {
        let (grid, threads) = merge_states_grid(args.rows);
        let params = merge_states_params(args)?;
        // SAFETY: merge_states.cu takes a MergeStatesParams; the rest is this function's contract.
        unsafe { self.run(&Instance::MergeStates, &params, grid, threads) }
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

    unsafe fn merge_spans(
        &self,
        (format, head_dim): (KvFormat, usize),
        args: &MergeSpansArgs,
    ) -> Result<()> {
        let (grid, threads) = merge_spans_grid(args.rows);
        let (instance, params) = (
            Instance::MergeSpans { format, head_dim },
            merge_spans_params(args)?,
        );
        // SAFETY: merge_spans.cu takes a MergeSpansParams; the rest is this function's contract.
        unsafe { self.run(&instance, &params, grid, threads) }
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
