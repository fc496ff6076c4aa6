//! Pages in host memory, written by the vectorized quantizers, long appends by several threads.

use std::any::Any;

use attn_core::{CacheAccess, CacheConfig, Error, HostPages, PageLayout, PageStore, TokenWrite};
use rayon::prelude::*;

use crate::{
    pool::Threads,
    quantize::{RowWriter, Tokens},
    simd::Isa,
};

/// The rows of K and of V from which on an append is worth waking other threads: one thread takes some 50 µs.
const SPREAD: usize = 512;

/// The least rows that one thread takes at once.
const PIECE: usize = 64;

/// A pool of pages whose bytes are those of [`HostPages`].
pub(crate) struct CpuPages {
    pages: HostPages,
    writer: RowWriter,
    threads: Threads,
}

impl CpuPages {
    /// Takes over an empty pool; `isa` is one that the caller has found available.
    pub fn new(
        pages: HostPages,
        config: &CacheConfig,
        isa: Isa,
        threads: Threads,
    ) -> Result<Self, Error> {
        let scales = [&config.k_tensor_scales, &config.v_tensor_scales].map(Vec::clone);
        Ok(CpuPages {
            writer: RowWriter::new(&config.layout()?, scales, isa),
            pages,
            threads,
        })
    }
}

/// Tokens to write, and the bytes of their page.
type PageWrite<'a, 'b> = (&'a [TokenWrite], &'b mut [u8]);

/// The pages of groups of tokens, each with its own page, as slices of the pool; `None` if two groups share a page.
fn split_pool<'a, 'b>(
    mut groups: Vec<&'a [TokenWrite]>,
    mut pool: &'b mut [u8],
    page_bytes: usize,
) -> Option<Vec<PageWrite<'a, 'b>>> {
    groups.sort_unstable_by_key(|group| group[0].page);
    let mut next = 0;
    let mut split = Vec::with_capacity(groups.len());
    for group in groups {
        let page = group[0].page as usize;
        let skipped = page.checked_sub(next)?;
        let (bytes, rest) = pool[skipped * page_bytes..].split_at_mut(page_bytes);
        split.push((group, bytes));
        (pool, next) = (rest, page + 1);
    }
    Some(split)
}

/// Writes the pages' runs in the rayon pool that this is called in; `rows` are those of all pages.
fn spread(
    mut pages: Vec<PageWrite<'_, '_>>,
    rows: usize,
    run_bytes: usize,
    write: impl Fn(&[TokenWrite], usize, &mut [u8]) + Sync,
) {
    let pages_at_once = PIECE * pages.len() / rows;
    let pages = pages.par_iter_mut().with_min_len(pages_at_once.max(1));
    pages.for_each(|(group, page)| {
        let runs_at_once = PIECE.div_ceil(2 * group.len());
        let runs = page.par_chunks_exact_mut(run_bytes);
        let runs = runs.with_min_len(runs_at_once).enumerate();
        runs.for_each(|(head, run)| write(group, head, run));
    });
}

impl PageStore for CpuPages {
    fn layout(&self) -> PageLayout {
        self.pages.layout()
    }

    fn num_pages(&self) -> usize {
        self.pages.num_pages()
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        writes: &[TokenWrite],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error> {
        let layout = self.pages.layout();
        if layout.has_tail_page() {
            return self.pages.append(access, writes, k, v);
        }
        let (run_bytes, page_bytes) = (layout.run_bytes(), layout.page_bytes());
        let (writer, threads) = (&self.writer, &self.threads);
        let pool = self.pages.pool_mut(access);
        let write = |writes: &[TokenWrite], head, run: &mut [u8]| {
            let kv = [k, v];
            writer.write(Tokens { writes, kv }, head, run);
        };
        // A sequence's tokens follow each other, and a page that is written belongs to one sequence.
        let groups = writes.chunk_by(|a, b| a.page == b.page);
        let rows = 2 * writes.len() * layout.num_kv_heads();
        if rows >= SPREAD
            && threads.count() > 1
            && let Some(pages) = split_pool(groups.clone().collect(), pool, page_bytes)
        {
            threads.run(false, |_| spread(pages, rows, run_bytes, write));
            return Ok(());
        }
        for group in groups {
            let page = &mut pool[group[0].page as usize * page_bytes..][..page_bytes];
            let runs = page.chunks_exact_mut(run_bytes).enumerate();
            runs.for_each(|(head, run)| write(group, head, run));
        }
        Ok(())
    }

    fn read_page(&self, access: &CacheAccess, page: u32) -> Result<Vec<u8>, Error> {
        self.pages.read_page(access, page)
    }

    fn write_page(&mut self, access: &CacheAccess, page: u32, bytes: &[u8]) -> Result<(), Error> {
        self.pages.write_page(access, page, bytes)
    }

    /// The [`HostPages`], which is what readers of pages in host memory look for.
    fn as_any(&self) -> &dyn Any {
        &self.pages
    }
}
