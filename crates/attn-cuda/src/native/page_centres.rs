//! Centres of K that lie in a pool's pages.

use attn_core::{
    Error, PageLayout, Window, arithmetic::TILE, centres::centres_bytes, error::refuse,
};

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
    #[must_use]
    pub fn page_bytes(layout: &PageLayout) -> usize {
        layout.page_bytes() + centres_bytes(layout.num_kv_heads(), layout.head_dim().k)
    }

    /// Those of a pool, whose pages are farther apart by their bytes at least.
    ///
    /// # Errors
    /// [`Error::Parameter`] for formats whose caches have no centres, and those that read keys with residuals; for pages of fewer than 64 tokens, which do not hold a first tile;
    /// for pages that leave no room.
    pub fn new(pool: &Pages, layout: &PageLayout) -> Result<Self, Error> {
        check_page_centres(layout)?;
        pool.check(Self::page_bytes(layout))?;
        Ok(PageCentres {
            at: pool.at.offset(layout.page_bytes()),
            stride: pool.stride / 2,
        })
    }
}

/// Refuses pages that have no centres of K.
pub(super) fn check_page_centres(layout: &PageLayout) -> Result<(), Error> {
    layout.format().check_centres()?;
    if layout.format().k.window() != Window::None {
        let given = format_args!("{}, whose keys have residuals", layout.format());
        return refuse(
            "format of pages with centres of K",
            given,
            "int8, int8/int4-w0",
        );
    }
    if layout.page_size() < TILE {
        let given = format_args!("{} tokens", layout.page_size());
        return refuse(
            "page with centres of K",
            given,
            "64 or 128 tokens, which hold a first tile",
        );
    }
    Ok(())
}
