//! Whole pages from pool to pool: copies on write, and pages that move between the device and the host with their scales.

use std::{ffi::c_void, sync::Arc};

use attn_core::Error;
use attn_kernels::cuda::{Instance, params::CopyPagesParams};

use super::{DeviceAddress, Pages, Stream};
use crate::{device::LoadedKernel, error::failed, gpu::CudaBackend, sizes};

/// One launch of [`CudaBackend::copy_pages_on`].
#[derive(Debug, Clone, Copy)]
pub struct CopyPagesArgs {
    /// Pages that are read.
    pub from: Pages,
    /// Pages that are written; may be the same pool.
    pub to: Pages,
    /// Bytes of a page, as [`PageLayout::page_bytes`](attn_core::PageLayout::page_bytes) says.
    pub page_bytes: usize,
    /// i64 `[pairs][2]`: the page to read and the page to write. A pair that names a page below 0, or beyond its pool, is skipped.
    pub pairs: DeviceAddress,
    /// Number of pairs.
    pub num_pairs: usize,
}

/// A prepared copy of pages.
#[derive(Debug, Clone)]
pub struct NativeCopyPages(Arc<LoadedKernel>);

/// Bytes of a page that a CTA of `copy_pages.cu` copies.
const SLICE: usize = 16384;
const THREADS: usize = 256;

/// The kernel's parameter block.
///
/// # Errors
/// [`Error::Parameter`] for bytes that are no multiples of 16, for pages of a GiB and more, and for pages that overlap.
pub fn copy_pages_params(args: &CopyPagesArgs) -> Result<CopyPagesParams, Error> {
    let bytes = args.page_bytes;
    let allowed = "at most 65535, as a CUDA grid has no more rows; copy parts of a page as pages of their own";
    sizes::check_grid(
        "slices of 16384 bytes of a page",
        bytes.div_ceil(SLICE),
        allowed,
    )?;
    args.from.check(bytes)?;
    args.to.check(bytes)?;
    let [from_stride, to_stride, _] = sizes::strides([args.from.stride, args.to.stride, 0]);
    let [from_pages, to_pages, _] = sizes::strides([args.from.num_pages, args.to.num_pages, 0]);
    Ok(CopyPagesParams {
        from: args.from.at.get(),
        to: args.to.at.get(),
        pairs: args.pairs.get(),
        from_stride,
        to_stride,
        from_pages,
        to_pages,
        page_bytes: bytes as u64,
    })
}

/// Grid and threads of `copy_pages.cu`.
#[must_use]
pub fn copy_pages_grid(args: &CopyPagesArgs) -> ([usize; 3], usize) {
    let slices = args.page_bytes.div_ceil(SLICE);
    ([args.num_pairs, slices, 1], THREADS)
}

impl CudaBackend {
    /// Loads the kernel of [`CudaBackend::copy_pages_on`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn prepare_copy_pages(&self) -> Result<NativeCopyPages, Error> {
        let kernel = self.device.kernel(&Instance::CopyPages, 0)?;
        Ok(NativeCopyPages(kernel))
    }

    /// Enqueues the copy of pages, bytes as they are: inside a pool, between pools, or between a pool and pinned host memory (swap). Can be
    /// captured.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes; pools are as large as [`Pages`] says.
    /// - No page that is written is read or written by another pair, nor by other work meanwhile.
    ///
    /// # Errors
    /// [`Error::Parameter`] for bytes that are no multiples of 16, and for pages of a GiB and more; [`Error::Device`] with the driver's refusal.
    pub unsafe fn copy_pages_on(
        &self,
        copy: &NativeCopyPages,
        stream: Stream,
        args: &CopyPagesArgs,
    ) -> Result<(), Error> {
        let mut params = copy_pages_params(args)?;
        if args.num_pairs == 0 {
            return Ok(());
        }
        let (grid, threads) = copy_pages_grid(args);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: `attn_copy_pages` takes one CopyPagesParams, asserted on both sides; it skips pages outside the pools; the rest is this
        // function's contract.
        unsafe { copy.0.launch(stream.raw(), grid, threads, &mut arguments) }
            .map_err(failed("copying pages"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_no_vector_divides_or_that_overlap_are_refused() {
        let pages = |stride| Pages {
            at: DeviceAddress::NULL,
            stride,
            num_pages: 7,
        };
        let args = |from, to, page_bytes| CopyPagesArgs {
            from: pages(from),
            to: pages(to),
            page_bytes,
            pairs: DeviceAddress::NULL,
            num_pairs: 3,
        };
        let good = args(65_552, 65_536, 65_536);
        let params = copy_pages_params(&good).unwrap();
        assert_eq!((params.from_stride, params.to_stride), (65_552, 65_536));
        assert_eq!(copy_pages_grid(&good), ([3, 4, 1], 256));
        for (from, to, bytes) in [
            (64, 64, 0),
            (64, 64, 56),
            (72, 64, 64),
            (48, 64, 64),
            (64, 48, 64),
            (1 << 30, 1 << 30, 1 << 30),
        ] {
            assert!(copy_pages_params(&args(from, to, bytes)).is_err());
        }
    }
}
