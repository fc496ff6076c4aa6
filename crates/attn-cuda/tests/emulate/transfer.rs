//! The tests of `common/transfer.rs` on emulated kernels.

use std::sync::Arc;

use anyhow::Result;
use attn_core::PageLayout;
use attn_cuda::{
    internals::{
        copy_pages_grid, copy_pages_params, export_grid, export_params, merge_states_grid,
        merge_states_params,
    },
    native::{CopyPagesArgs, DeviceAddress, ExportArgs, MergeStatesArgs},
};
use attn_kernels::cuda::Instance;
use libtest_mimic::Trial;

use crate::{
    Kernels,
    common_transfer::{Machine, Test},
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
}

/// A trial for each test.
pub fn trials(kernels: &Arc<Kernels>) -> Vec<Trial> {
    let trial = |test: Test| {
        let kernels = kernels.clone();
        Trial::test(test.name(), move || {
            let result = test.run(kernels.as_ref());
            result.map_err(|error| format!("{error:#}").into())
        })
    };
    Test::all().into_iter().map(trial).collect()
}
