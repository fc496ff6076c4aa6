//! Whole pages from pool to pool: copies on write, and pages that move between the device and the host with their scales.

use attn_core::Error;
use attn_kernels::cuda::{Instance, params::CopyPagesParams};

use super::{grid::Grid, op::Op, pages::Pages};
use crate::{handles::DeviceAddress, sizes};

/// Copies of pages, bytes as they are: inside a pool, between pools, or between a pool and pinned host memory (swap).
///
/// Refused are bytes of a page that are no multiple of 16, pages of a GiB and more, and pages that overlap.
///
/// # Safety
/// - Pools are as large as [`Pages`] says.
/// - No page that is written is read or written by another pair, nor by other work meanwhile.
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

/// Bytes of a page that a CTA of `copy_pages.cu` copies.
const SLICE: usize = 16384;
const THREADS: usize = 256;

// SAFETY: `attn_copy_pages` takes one CopyPagesParams, asserted on both sides; it skips pages outside the pools.
unsafe impl Op for CopyPagesArgs {
    type Shape = ();
    type Params = CopyPagesParams;
    const DOING: &'static str = "copying pages";

    fn instances((): &()) -> Result<Vec<Instance>, Error> {
        Ok(vec![Instance::CopyPages])
    }

    fn params(&self, (): &()) -> Result<CopyPagesParams, Error> {
        let bytes = self.page_bytes;
        let what = "slices of 16384 bytes of a page";
        let allowed = "at most 65535, as a CUDA grid has no more rows; copy parts of a page as pages of their own";
        sizes::check_grid(what, bytes.div_ceil(SLICE), allowed)?;
        self.from.check(bytes)?;
        self.to.check(bytes)?;
        let [from_stride, to_stride] = sizes::strides([self.from.stride, self.to.stride]);
        let [from_pages, to_pages] = sizes::strides([self.from.num_pages, self.to.num_pages]);
        Ok(CopyPagesParams {
            from: self.from.at.get(),
            to: self.to.at.get(),
            pairs: self.pairs.get(),
            from_stride,
            to_stride,
            from_pages,
            to_pages,
            page_bytes: bytes as u64,
        })
    }

    fn grid(&self, (): &()) -> Grid {
        // Pages without bytes are no empty launch: they are refused.
        let slices = self.page_bytes.div_ceil(SLICE).max(1);
        Grid::new([self.num_pairs, slices, 1], THREADS)
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
        let params = good.params(&()).unwrap();
        assert_eq!((params.from_stride, params.to_stride), (65_552, 65_536));
        assert_eq!(good.grid(&()), Grid::new([3, 4, 1], 256));
        for (from, to, bytes) in [
            (64, 64, 0),
            (64, 64, 56),
            (72, 64, 64),
            (48, 64, 64),
            (64, 48, 64),
            (1 << 30, 1 << 30, 1 << 30),
        ] {
            let wrong = args(from, to, bytes);
            assert!(wrong.params(&()).is_err() && !wrong.grid(&()).is_empty());
        }
    }
}
