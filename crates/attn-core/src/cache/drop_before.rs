//! Frees the pages of tokens that no window sees any more: [`KvCache::drop_before`].

use super::{KvCache, PageTable, is_kept};
use crate::{error::Error, segments::TILE};

impl KvCache {
    /// Frees the home and residual pages that hold only tokens before `token`, so that a layer with a sliding window keeps its window's pages alone.
    ///
    /// The sequence's length and the positions of its tokens stay, and appends go on. Steps whose query tokens all see nothing before the first kept
    /// token ([`PageTable::first_tokens`]) give the same bits as without the drop; others are refused with [`Error::Dropped`]. A layer whose next
    /// query stands at position `p` needs tokens from `p - window_left` on, so `token` is at most that. Backends read whole tiles of 64 tokens, so a
    /// page is freed with the others of its tile. Pages that a fork shares are freed when all their sequences have dropped them.
    ///
    /// In a cache of several layers a page is freed for all of them: the widest window says which tokens go, and a layer without a window needs all.
    ///
    /// A call for tokens that were dropped already changes nothing. [`KvCache::truncate`] keeps the dropped tokens or empties the sequence,
    /// [`KvCache::fork`] copies the sequence as it is, [`KvCache::read_back`] refuses it.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::PastEnd`]; [`Error::Step`] for a sequence with tokens of an open step.
    /// Nothing is changed then.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).pages(4).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// // Four pages of 64 tokens, for a layer whose tokens see 100 tokens before their own.
    /// cache.append(0, &[0.5; 250 * 64], &[2.0; 250 * 64])?;
    /// cache.drop_before(0, 250 - 100)?;
    /// assert_eq!((cache.table().first_tokens[0], cache.free_pages()), (128, 2));
    /// cache.append(0, &[0.5; 100 * 64], &[2.0; 100 * 64])?;
    /// assert_eq!(cache.table().lens, [350]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn drop_before(&mut self, sequence: usize, token: usize) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        self.check_settled("dropping tokens", sequence)?;
        self.check_inside("the token to drop before", sequence, token)?;
        let page_size = self.config.page_size;
        let whole = page_size.max(TILE);
        let (dropped, first) = (self.table.first_tokens[sequence], token / whole * whole);
        if first <= dropped {
            return Ok(());
        }
        let (from, to) = (dropped / page_size, first / page_size);
        let of_first = self.table.first_held(sequence);
        let of_last = to.saturating_sub(self.table.first_of_last(sequence));
        let residuals = &mut self.table.residual_pages[sequence];
        let old = residuals
            .drain(of_first..of_first + of_last)
            .collect::<Vec<_>>();
        let at_checkpoints = &mut self.table.checkpoint_pages[sequence];
        let unseen = at_checkpoints.partition_point(|of| of.home < to);
        let unseen: Vec<u32> = at_checkpoints.drain(..unseen).map(|of| of.page).collect();
        // What is dropped is whole tiles and pages, so that all pages of the first tile go at once.
        let of_first = residuals[..of_first].iter_mut();
        let homes = self.table.pages[sequence][from..to].iter_mut();
        let freed = homes
            .chain(of_first)
            .map(|page| std::mem::replace(page, PageTable::DROPPED));
        for page in freed.chain(unseen).chain(old).filter(is_kept) {
            self.pages.release(page);
        }
        self.table.first_tokens[sequence] = first;
        Ok(())
    }

    /// Refuses a sequence of which tokens were dropped, for what needs all of them.
    pub(super) fn check_undropped(&self, what: &'static str, sequence: usize) -> Result<(), Error> {
        match self.table.first_tokens[sequence] {
            0 => Ok(()),
            kept => Err(Error::Dropped {
                what,
                sequence,
                first: 0,
                kept,
            }),
        }
    }
}
