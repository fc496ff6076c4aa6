//! Moves pages out of a cache as bytes and back in: [`KvCache::read_back`], [`KvCache::restore`], [`KvCache::write_page`].

use super::{CacheAccess, KvCache};
use crate::error::Error;

impl KvCache {
    /// A sequence's home pages in order, then its residual pages, unwritten bytes zeroed: those of its last home pages, as many as any run of so many
    /// tokens keeps, or fewer after [`KvCache::truncate`]. A sequence with dropped tokens is refused: [`KvCache::restore`] would take their pages for
    /// written ones.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Dropped`], [`Error::Device`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.check_sequence(sequence)?;
        self.check_undropped("a copy of the pages", sequence)?;
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        let (home, residuals) = (
            &self.table.pages[sequence],
            &self.table.residual_pages[sequence],
        );
        let kept = self.config.format.residual_pages(page_size, len, 0);
        let residuals = &residuals[residuals.len().saturating_sub(kept)..];
        let first = home.len() - residuals.len();
        let home = home.iter().enumerate().map(|(i, page)| (i, *page, false));
        let residuals = residuals
            .iter()
            .enumerate()
            .map(|(i, page)| (first + i, *page, true));
        home.chain(residuals)
            .map(|(i, page, is_residual)| {
                let tokens = page_size.min(len - i * page_size);
                let mut bytes = self.store.read_page(&CacheAccess(()), page)?;
                self.layout.canonical(&mut bytes, tokens, is_residual)?;
                Ok(bytes)
            })
            .collect()
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
        let needed = pages.len();
        self.pages.check_room(needed)?;
        let home = tokens.div_ceil(self.config.page_size);
        let taken = (0..needed)
            .map(|_| self.pages.take())
            .collect::<Result<Vec<u32>, _>>()?;
        let access = CacheAccess(());
        let mut write = || {
            for (page, bytes) in taken.iter().zip(pages) {
                self.store.write_page(&access, *page, bytes)?;
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
        self.table.residual_pages[sequence] = taken[home..].to_vec();
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
