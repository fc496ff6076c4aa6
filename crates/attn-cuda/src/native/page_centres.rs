//! Centres of K that lie in a pool's pages.

use attn_core::{Error, PageLayout, PoolPages};

use super::pages::Pages;
use crate::handles::DeviceAddress;

/// Where a pool's pages have centres of K: behind the bytes of each page those of the sequence whose first page it is, bf16 `[num_kv_heads][2][head_dim]`. They go where the
/// page goes, and sequences that share it share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCentres {
    /// Those of the first page.
    pub at: DeviceAddress,
    /// Elements from those of a page to those of the next.
    pub stride: usize,
}

impl PageCentres {
    /// Bytes of a page with its centres.
    ///
    /// # Errors
    /// Those of [`PoolPages::new`] and [`PoolPages::with_centres`].
    pub fn page_bytes(layout: &PageLayout) -> Result<usize, Error> {
        Ok(PoolPages::new(layout)?.with_centres()?.bytes())
    }

    /// Those of a pool, whose pages are farther apart by their bytes at least.
    ///
    /// # Errors
    /// Those of [`PageCentres::page_bytes`]; [`Error::Parameter`] for pages that leave no room.
    pub fn new(pool: &Pages, layout: &PageLayout) -> Result<Self, Error> {
        pool.check(Self::page_bytes(layout)?)?;
        Ok(PageCentres {
            at: pool.at.offset(layout.page_bytes()),
            stride: pool.stride / 2,
        })
    }
}
