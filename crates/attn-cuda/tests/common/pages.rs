//! The pages of a cache of the CPU as launches take them: the pool, with gaps, and the tables.

use anyhow::{Context, Result};
use attn_core::{CacheConfig, HostPages, KvCache, PageLayout, PageTable};
use attn_cuda::native::{DeviceAddress, PagedSequences, Pages};

/// Bytes between pages.
pub const PADDING: usize = 48;

/// The pool of a cache of one layer.
pub fn pool_of(cache: &KvCache) -> Result<&[u8]> {
    let pages = cache.store().as_any().downcast_ref::<HostPages>();
    let pool = pages.and_then(|pages| pages.pool(0));
    pool.context("the CPU's pages lie in host memory")
}

/// The pool's pages with bytes between them that are no numbers.
pub fn padded(pool: &[u8], layout: &PageLayout) -> Vec<u8> {
    let pages = pool.chunks_exact(layout.page_bytes());
    pages
        .flat_map(|page| [page, &[0xff; PADDING]].concat())
        .collect()
}

/// So many padded pages that lie there.
pub fn padded_at(at: DeviceAddress, layout: &PageLayout, num_pages: usize) -> Pages {
    Pages {
        at,
        stride: layout.page_bytes() + PADDING,
        num_pages,
    }
}

/// The tables of a cache's sequences. Entries that mean nothing lead out of any pool, so that a launch that takes one shows.
#[derive(Default)]
pub struct Tables {
    /// `[batch][stride]`.
    pub pages: Vec<u32>,
    pub stride: usize,
    /// `[batch][slots]`; never empty where there are sequences.
    pub residuals: Vec<u32>,
    pub slots: usize,
    /// `[batch]`.
    pub lens: Vec<i32>,
}

impl Tables {
    /// Tables for sequences of up to `reach` tokens and more. Dropped pages, and their residual pages, are the page behind the pool's.
    pub fn new(cache: &KvCache, slots: usize, reach: usize) -> Self {
        Tables::of(cache.config(), cache.table(), slots, reach)
    }

    /// The same of some of a cache's sequences.
    pub fn of(config: &CacheConfig, table: &PageTable, slots: usize, reach: usize) -> Self {
        let longest = table.pages.iter().map(Vec::len).max().unwrap_or(0);
        let stride = longest.max(reach.div_ceil(config.page_size)).max(1);
        let batch = table.pages.len();
        let mut pages = vec![u32::MAX; batch * stride];
        let mut residuals = vec![u32::MAX; batch * slots.max(1)];
        let behind = config.num_pages as u32;
        for (b, own) in table.pages.iter().enumerate() {
            for (entry, page) in pages[b * stride..].iter_mut().zip(own) {
                *entry = match *page {
                    PageTable::DROPPED => behind,
                    page => page,
                };
            }
            let row = &mut residuals[b * slots..][..slots];
            if table.first_tokens[b] > 0 {
                row.fill(behind);
            }
            table.fill_residual_slots(b, row);
        }
        Tables {
            pages,
            stride,
            residuals,
            slots,
            lens: table.lens.iter().map(|&len| len as i32).collect(),
        }
    }

    /// The sequences, where page table, residual pages and lengths lie at these addresses.
    pub fn sequences(
        &self,
        pool: Pages,
        [page_table, residual_pages, kv_lens]: [DeviceAddress; 3],
        tensor_scales: [DeviceAddress; 2],
    ) -> PagedSequences {
        PagedSequences {
            pool,
            page_table,
            page_table_stride: self.stride,
            residual_pages: match self.slots {
                0 => DeviceAddress::NULL,
                _ => residual_pages,
            },
            residual_slots: self.slots,
            kv_lens,
            tensor_scales,
        }
    }
}
