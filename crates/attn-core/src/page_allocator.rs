//! The page allocator: which pages of a pool are free, and how many sequences own each of the others.

use crate::{
    error::{Error, filled, refuse, reserve},
    events,
};

/// The free pages and the reference counts of a pool.
#[derive(Debug, Clone)]
pub(crate) struct PageAllocator {
    /// Freed pages; the last one is taken next.
    freed: Vec<u32>,
    /// The first page that was never taken; it and all later pages are free, too.
    fresh: u32,
    /// Number of sequences that own each page.
    ref_counts: Vec<u32>,
}

impl PageAllocator {
    /// A pool of `num_pages` free pages.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(num_pages: usize) -> Result<Self, Error> {
        Ok(PageAllocator {
            freed: Vec::new(),
            fresh: 0,
            ref_counts: filled("the pages' reference counts", num_pages, 0)?,
        })
    }

    /// Makes sure that [`PageAllocator::grow`] by `pages` allocates nothing.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn reserve(&mut self, pages: usize) -> Result<(), Error> {
        reserve("the pages' reference counts", &mut self.ref_counts, pages)
    }

    /// Adds free pages behind the pool's last one.
    pub fn grow(&mut self, pages: usize) {
        let count = self.ref_counts.len() + pages;
        self.ref_counts.resize(count, 0);
    }

    /// The pages that sequences own.
    pub fn owned(&self) -> impl Iterator<Item = u32> {
        let owners = self.ref_counts.iter().zip(0..);
        owners
            .filter(|(owners, _)| **owners > 0)
            .map(|(_, page)| page)
    }

    /// Number of pages that no sequence owns.
    pub fn num_free(&self) -> usize {
        self.freed.len() + (self.ref_counts.len() - self.fresh as usize)
    }

    /// Puts the free pages in the given order of allocation.
    ///
    /// # Errors
    /// [`Error::Parameter`] if `order` is not a permutation of the free pages.
    pub fn order(&mut self, order: &[u32]) -> Result<(), Error> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let owned = |page: &u32| self.ref_counts.get(*page as usize).is_none_or(|&n| n > 0);
        if sorted.len() != self.num_free()
            || order.len() != sorted.len()
            || sorted.iter().any(owned)
        {
            return refuse(
                "order of free pages",
                format_args!("{} pages", order.len()),
                "a permutation of the free pages",
            );
        }
        self.freed = order.iter().rev().copied().collect();
        self.fresh = self.ref_counts.len() as u32;
        Ok(())
    }

    /// Takes a free page, which then has one owner.
    ///
    /// # Errors
    /// [`Error::CacheFull`].
    pub fn take(&mut self) -> Result<u32, Error> {
        let page = match self.freed.pop() {
            Some(page) => page,
            None if (self.fresh as usize) < self.ref_counts.len() => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return Err(self.full(1)),
        };
        self.ref_counts[page as usize] = 1;
        Ok(page)
    }

    /// Adds an owner to a page.
    pub fn share(&mut self, page: u32) {
        self.ref_counts[page as usize] += 1;
    }

    /// Whether a page has several owners.
    pub fn is_shared(&self, page: u32) -> bool {
        self.ref_counts[page as usize] > 1
    }

    /// Removes an owner of a page; a page without owners is free.
    pub fn release(&mut self, page: u32) {
        let ref_count = &mut self.ref_counts[page as usize];
        *ref_count -= 1;
        if *ref_count == 0 {
            self.freed.push(page);
        }
    }

    /// Refuses a call that takes more pages than are free.
    ///
    /// # Errors
    /// [`Error::CacheFull`].
    pub fn check_room(&self, needed: usize) -> Result<(), Error> {
        if needed > self.num_free() {
            return Err(self.full(needed));
        }
        Ok(())
    }

    fn full(&self, needed: usize) -> Error {
        let (free, total) = (self.num_free(), self.ref_counts.len());
        events::short(needed, free, total);
        Error::CacheFull {
            needed,
            free,
            total,
        }
    }
}
