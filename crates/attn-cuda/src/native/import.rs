//! Rows of a contiguous cache into pages, for views that no kernel reads in place.

use std::{ffi::c_void, sync::Arc};

use attn_core::{Error, PageLayout};
use attn_kernels::cuda::{Instance, params::ImportParams};
use cudarc::driver::sys;

use super::{COPY_THREADS, DeviceAddress, DeviceRows};
use crate::{
    device::{Device, LoadedKernel},
    error::failed,
    sizes,
};

/// Device addresses of one import launch: rows of a contiguous cache into pages of the same format.
#[derive(Debug, Clone, Copy)]
pub struct ImportArgs {
    /// The rows, at any strides and addresses. Their static scales are not read: codes are copied as they are.
    pub rows: DeviceRows,
    /// The pool.
    pub pool: DeviceAddress,
    /// u32 `[batch][page_table_stride]`.
    pub page_table: DeviceAddress,
    /// Entries per sequence.
    pub page_table_stride: usize,
    /// Sequences.
    pub batch: usize,
    /// No length exceeds it.
    pub max_kv_len: usize,
}

/// A prepared import launch.
#[derive(Debug, Clone)]
pub struct NativeImport {
    layout: PageLayout,
    kernel: Arc<LoadedKernel>,
}

impl NativeImport {
    /// The layout of the pages that it fills.
    pub(crate) fn layout(&self) -> &PageLayout {
        &self.layout
    }
}

pub(crate) fn prepare_import(device: &Device, layout: PageLayout) -> Result<NativeImport, Error> {
    super::check_heads(layout.num_kv_heads())?;
    for scheme in [layout.format().k, layout.format().v] {
        if scheme.code_bits() == 4 || scheme.is_rotated() {
            return Err(Error::parameter(
                "imported scheme",
                format_args!("{scheme}"),
                "f16, bf16, fp8, int8-plain, int8-g32, int8-tensor",
            ));
        }
    }
    let instance = Instance::Import {
        format: layout.format(),
        head_dim: layout.head_dim(),
        page_size: layout.page_size(),
    };
    Ok(NativeImport {
        layout,
        kernel: device.kernel(&instance, 0)?,
    })
}

/// Enqueues one import.
///
/// # Safety
/// Those of `CudaBackend::import_on`; the device's context is current.
pub(crate) unsafe fn launch_import(
    import: &NativeImport,
    stream: sys::CUstream,
    args: &ImportArgs,
) -> Result<(), Error> {
    if args.batch == 0 || args.max_kv_len == 0 {
        return Ok(());
    }
    let allowed = "at most 65535, as a CUDA grid has no more layers; import some at a time";
    sizes::check_grid("sequences to import", args.batch, allowed)?;
    let rows = args.rows.decode_params();
    let mut params = ImportParams {
        k: rows.k,
        v: rows.v,
        k_scales: rows.k_scales,
        v_scales: rows.v_scales,
        k_strides: rows.k_strides,
        v_strides: rows.v_strides,
        k_scale_strides: rows.k_scale_strides,
        v_scale_strides: rows.v_scale_strides,
        pool: args.pool.get(),
        page_table: args.page_table.get(),
        kv_lens: rows.kv_lens,
        num_kv_heads: sizes::int("num_kv_heads", import.layout.num_kv_heads())?,
        page_table_stride: sizes::int("page_table_stride", args.page_table_stride)?,
    };
    let pages = args.max_kv_len.div_ceil(import.layout.page_size());
    let grid = [pages, import.layout.num_kv_heads(), args.batch];
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: `attn_import` takes one ImportParams, asserted on both sides; the rest is this function's contract.
    unsafe {
        import
            .kernel
            .launch(stream, grid, COPY_THREADS, &mut arguments)
    }
    .map_err(failed("importing"))
}
