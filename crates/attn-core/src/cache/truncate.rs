//! Takes back a sequence's newest tokens: [`KvCache::truncate`].

use std::ops::Range;

use super::{KvCache, is_kept};
use crate::{
    error::{Error, TruncateLimit},
    format::Window,
};

impl KvCache {
    /// Takes back a sequence's newest tokens, such as drafts that were rejected: its first `len` stay, and the pages behind them are returned.
    ///
    /// The sequence has the image ([`KvCache::image`]) of a run that never had the others, and what is appended then has its bytes and outputs. Of formats
    /// with a window the residuals that the next tokens read must be there still: since the last append, as many tokens as it had, if at most
    /// [`CacheConfig::max_q_len`](crate::CacheConfig::max_q_len), and 64 of a sequence of which none but such drafts were taken back before, also after it was restored. More go as far as
    /// residuals reach; the image then has fewer of these. To its first 64 tokens, or its first page where that is larger, a sequence goes back from any
    /// length, and so it does to every checkpoint ([`CacheBuilder::checkpoints`](crate::CacheBuilder::checkpoints)). Other formats have no such limit. Of a sequence with dropped tokens
    /// ([`KvCache::drop_before`]) at least these stay, or none at all.
    ///
    /// To go on from an earlier point and keep the sequence, as in a radix tree, [`KvCache::fork`] it and truncate the fork.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::PastEnd`] for more tokens than there are; [`Error::Truncate`] for fewer than were dropped, or than the residuals
    /// reach back to, with the nearest numbers that can be kept ([`KvCache::longest_prefix`]); [`Error::Step`] for a sequence with tokens of an open step, which
    /// [`KvCache::cancel_step`] takes back. Nothing is changed then.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(256).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.append(0, &[0.5; 5 * 64], &[2.0; 5 * 64])?;
    /// // Three drafts were wrong.
    /// cache.truncate(0, 2)?;
    /// assert_eq!(cache.table().lens, [2]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check_truncate(sequence, len)?;
        let dropped = self.table.first_tokens[sequence];
        let kept = len.div_ceil(self.config.page_size);
        let of_first = kept.min(self.table.first_held(sequence));
        let of_last = kept.saturating_sub(self.table.first_of_last(sequence));
        let residuals = self.table.residual_pages[sequence].split_off(of_first + of_last);
        let pages = self.table.pages[sequence].split_off(kept);
        let at_checkpoints = &mut self.table.checkpoint_pages[sequence];
        let staying = at_checkpoints.partition_point(|of| of.home < kept);
        let of_checkpoints = at_checkpoints.split_off(staying);
        let of_checkpoints = of_checkpoints.into_iter().map(|of| of.page);
        // The last page that was taken is the first to be taken again.
        let taken: Vec<u32> = pages
            .into_iter()
            .chain(of_checkpoints)
            .chain(residuals)
            .collect();
        for page in taken.into_iter().rev().filter(is_kept) {
            self.pages.release(page);
        }
        self.table.lens[sequence] = len;
        self.table.first_tokens[sequence] = dropped.min(len);
        self.take_up_checkpoints(sequence);
        Ok(())
    }

    /// Refuses what [`KvCache::truncate`] refuses, and changes nothing: for caches that are truncated together or not at all, such as those of shards.
    ///
    /// # Errors
    /// Those of [`KvCache::truncate`].
    pub fn check_truncate(&self, sequence: usize, len: usize) -> Result<(), Error> {
        let longest_prefix = self.longest_prefix(sequence, len)?;
        if longest_prefix == len {
            return Ok(());
        }
        let limit = match len < self.table.first_tokens[sequence] {
            true => TruncateLimit::Dropped,
            false => TruncateLimit::Residuals,
        };
        Err(Error::Truncate {
            sequence,
            tokens: self.table.lens[sequence],
            given: len,
            longest_prefix,
            least: self.shortest_from(sequence, len),
            limit,
        })
    }

    /// The most tokens, `len` at most, that [`KvCache::truncate`] can leave of a sequence: where to go on from to have the first `len` tokens again. It is
    /// `len` itself for formats without a window. With checkpoints ([`CacheBuilder::checkpoints`](crate::CacheBuilder::checkpoints)) it is less by fewer tokens than lie between two of them.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::PastEnd`] for more tokens than there are; [`Error::Step`] for a sequence with tokens of an open step.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// let builder = CacheConfig::builder(KvFormat::INT4, heads).sequences(2).max_len(1000);
    /// let config = builder.checkpoints(256).build();
    /// // A backend's `create_cache` does this with its own store.
    /// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.append(0, &[0.5; 1000 * 64], &[2.0; 1000 * 64])?;
    /// // Another text has the first 600 tokens in common with this one.
    /// let prefix = cache.longest_prefix(0, 600)?;
    /// assert_eq!(prefix, 512);
    /// cache.fork(0, 1)?;
    /// cache.truncate(1, prefix)?;
    /// cache.append(1, &[0.5; 88 * 64], &[2.0; 88 * 64])?;
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn longest_prefix(&self, sequence: usize, len: usize) -> Result<usize, Error> {
        self.check_sequence(sequence)?;
        self.check_settled("a truncation", sequence)?;
        self.check_inside("the number of tokens to keep", sequence, len)?;
        let (dropped, mut len) = (self.table.first_tokens[sequence], len);
        while len >= dropped {
            let missing = self.pages_read_behind(sequence, len);
            match missing.into_iter().find(|home| self.lacks(sequence, *home)) {
                // What ends behind the page reads it, too.
                Some(home) => len = home * self.config.page_size,
                None => return Ok(len),
            }
        }
        Ok(0)
    }

    /// The fewest tokens, more than `len`, that [`KvCache::truncate`] can leave of a sequence: all of them at most.
    fn shortest_from(&self, sequence: usize, len: usize) -> usize {
        let (tokens, dropped) = (self.table.lens[sequence], self.table.first_tokens[sequence]);
        let mut len = (len + 1).max(dropped);
        while len < tokens {
            let mut read = self.pages_read_behind(sequence, len).rev();
            match read.find(|home| self.lacks(sequence, *home)) {
                Some(home) => {
                    let behind = (home + 1) * self.config.page_size;
                    len = self.config.format.first_position_with(behind);
                }
                None => return len,
            }
        }
        tokens
    }

    /// The home pages of a sequence of `len` tokens whose residuals the next token reads for their place in its window.
    fn pages_read_behind(&self, sequence: usize, len: usize) -> Range<usize> {
        let format = self.config.format;
        if format.window() == Window::None {
            return 0..0;
        }
        let page_size = self.config.page_size;
        let first = format
            .first_residual_token(len)
            .max(self.table.first_tokens[sequence]);
        first / page_size..len.div_ceil(page_size)
    }

    fn lacks(&self, sequence: usize, home: usize) -> bool {
        !self.table.has_residuals(sequence, home)
    }
}
