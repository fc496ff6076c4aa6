//! Moves pages out of a cache as bytes and back in: [`KvCache::read_back`], [`KvCache::restore`], [`KvCache::write_page`].

use super::{CacheAccess, KvCache};
use crate::{error::Error, layout::PageLayout};

impl KvCache {
    /// A sequence's pages in order, unwritten bytes zeroed; last comes the tail page's K codes and scales while a page is open.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Device`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.check_sequence(sequence)?;
        let layout = self.layout;
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        let mut all = Vec::new();
        for (i, &page) in self.table.pages[sequence].iter().enumerate() {
            let tokens = page_size.min(len - i * page_size);
            let mut bytes = self.store.read_page(&CacheAccess(()), page)?;
            layout.canonical(
                &mut bytes,
                tokens,
                layout.has_tail_page() && tokens < page_size,
            )?;
            all.push(bytes);
        }
        if let (Some(tail), true) = (
            self.table.tail_pages[sequence],
            !len.is_multiple_of(page_size),
        ) {
            let bytes = self.store.read_page(&CacheAccess(()), tail)?;
            let tail_k = layout.tail_k();
            let mut kept = vec![0u8; tail_k.page_bytes()];
            copy_k(&tail_k, (&bytes, &layout), (&mut kept, &tail_k));
            tail_k.canonical(&mut kept, len % page_size, false)?;
            all.push(kept);
        }
        Ok(all)
    }

    /// Fills an empty sequence with `tokens` tokens from pages as [`KvCache::read_back`] gives them, or [`convert::import`](crate::convert::import) makes them.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Parameter`] if the sequence is not empty; [`Error::Length`], [`Error::BadBytes`] for other than such pages;
    /// [`Error::CacheFull`]. Nothing is changed.
    pub fn restore(
        &mut self,
        sequence: usize,
        tokens: usize,
        pages: &[Vec<u8>],
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let layout = self.layout;
        if self.table.lens[sequence] != 0 {
            return Err(Error::Parameter {
                what: "restore target",
                given: format!(
                    "sequence {sequence} of {} tokens",
                    self.table.lens[sequence]
                ),
                allowed: "an empty sequence; free it first",
            });
        }
        layout.check_pages(pages, tokens)?;
        let needed = self.config.pages_for(tokens);
        self.pages.check_room(needed)?;
        let home = tokens.div_ceil(self.config.page_size);
        let taken = (0..needed)
            .map(|_| self.pages.take())
            .collect::<Result<Vec<u32>, _>>()?;
        let access = CacheAccess(());
        let mut write = || {
            for (page, bytes) in taken.iter().zip(&pages[..home]) {
                self.store.write_page(&access, *page, bytes)?;
            }
            if let (Some(tail), Some(bytes)) = (taken.get(home), pages.get(home)) {
                let (tail_k, mut padded) = (layout.tail_k(), vec![0; layout.page_bytes()]);
                copy_k(&tail_k, (bytes, &tail_k), (&mut padded, &layout));
                self.store.write_page(&access, *tail, &padded)?;
            }
            Ok(())
        };
        let written = write();
        if written.is_err() {
            taken
                .into_iter()
                .rev()
                .for_each(|page| self.pages.release(page));
            return written;
        }
        self.table.tail_pages[sequence] = taken.get(home).copied();
        self.table.pages[sequence] = taken[..home].to_vec();
        self.table.lens[sequence] = tokens;
        Ok(())
    }

    /// Writes one page's bytes as they are, for restoring an offloaded page or to overwrite a page in tests.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a page outside the pool, [`Error::Length`] for other than one page.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        if page as usize >= self.config.num_pages {
            return Err(Error::Parameter {
                what: "page",
                given: page.to_string(),
                allowed: "a page of the pool",
            });
        }
        let needed = self.layout.page_bytes();
        if bytes.len() != needed {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes.len(),
                needed,
            });
        }
        self.store.write_page(&CacheAccess(()), page, bytes)
    }
}

/// Copies each KV head's K of a tail page between pages of two layouts: all pages keep it at the start of a head's run.
fn copy_k(tail_k: &PageLayout, from: (&[u8], &PageLayout), to: (&mut [u8], &PageLayout)) {
    let ((from, from_layout), (to, to_layout)) = (from, to);
    let used = tail_k.k_params().end;
    for head in 0..tail_k.num_kv_heads() {
        let source = &from[head * from_layout.run_bytes()..][..used];
        to[head * to_layout.run_bytes()..][..used].copy_from_slice(source);
    }
}
