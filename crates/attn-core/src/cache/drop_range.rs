//! Frees pages between the first and the newest tokens of a sequence: [`KvCache::drop_range`].

use std::ops::Range;

use super::KvCache;
use crate::{
    error::{Error, refuse},
    segments::TILE,
};

impl KvCache {
    /// Drops tokens from the middle of a sequence and closes the gap, so that streams can run for ever: the first tokens and the newest ones stay, and
    /// those behind the gap are counted from its beginning on. The limit of a sequence's tokens counts those that are there.
    ///
    /// Pages go, and whole tiles of 64 tokens: `tokens` is cut to multiples of 64 and of the page size inside of it, and the number of tokens that were dropped is returned. The
    /// sequence has then the [`KvCache::image`] of one to which the others alone were appended, and attention its bits. Keys keep the rotary positions that the caller has given
    /// them, and are not turned: further tokens and queries go on with theirs. Windows and ALiBi count the tokens that are there. Checkpoints
    /// ([`CacheBuilder::checkpoints`](crate::CacheBuilder::checkpoints)) behind the gap stay where it has a multiple of their distance, and are given up otherwise.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::PastEnd`] for an end behind the sequence's; [`Error::Parameter`] for a range that has tokens of the first tile or page, or of a
    /// format with a window tokens whose residuals the next queries read, for one that begins behind its end, and for later shards; [`Error::Dropped`] where tokens before
    /// the range were dropped by [`KvCache::drop_before`]; [`Error::Step`] for a sequence with tokens of an open step. Nothing is changed then.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.append(0, &[0.5; 1000 * 64], &[2.0; 1000 * 64])?;
    /// // The first 64 tokens stay, and the newest 300 or more.
    /// assert_eq!(cache.drop_range(0, 64..700)?, 576);
    /// assert_eq!(cache.table().lens, [424]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn drop_range(&mut self, sequence: usize, tokens: Range<usize>) -> Result<usize, Error> {
        let pages = self.pages_to_drop(sequence, tokens)?;
        let dropped = pages.len() * self.config.page_size;
        let mut freed = self.drop_checkpoints(sequence, pages.clone());
        freed.extend(self.table.pages[sequence].drain(pages));
        self.table.lens[sequence] -= dropped;
        for page in freed.into_iter().rev() {
            self.pages.release(page);
        }
        Ok(dropped)
    }

    /// The pages that lie in a range of tokens, none of which keeps residuals.
    fn pages_to_drop(&self, sequence: usize, tokens: Range<usize>) -> Result<Range<usize>, Error> {
        self.check_sequence(sequence)?;
        self.check_settled("dropping tokens", sequence)?;
        self.check_inside("the end of the tokens to drop", sequence, tokens.end)?;
        let Range { start, end } = tokens;
        if start > end {
            return refuse(
                "the tokens to drop",
                format_args!("{start} to {end}"),
                "a range that ends behind its begin",
            );
        }
        let before = self.table.tokens_before[sequence];
        if before > 0 {
            return refuse(
                "the sequence to drop tokens of",
                format_args!("a shard with {before} tokens ahead"),
                "sequences that begin in this cache, since others would have to move",
            );
        }
        self.check_undropped("dropping tokens", sequence)?;
        let page_size = self.config.page_size;
        let unit = page_size.max(TILE);
        if start < unit {
            return refuse(
                "the first token to drop",
                start,
                "64 or more, and a page's or more: the first tile stays, which is read finely and whose keys are centres of all others",
            );
        }
        let fine = self.first_residual_of_last(sequence);
        if end > fine {
            return refuse(
                "the end of the tokens to drop",
                format_args!(
                    "{end} of sequence {sequence}, whose tokens from {fine} on keep residuals"
                ),
                "an end before them: the next queries read these tokens finely",
            );
        }
        let first = start.next_multiple_of(unit) / page_size;
        Ok(first..(end / unit * unit / page_size).max(first))
    }

    /// The first token whose page is one of the last that keep residuals; the sequence's end where none does.
    fn first_residual_of_last(&self, sequence: usize) -> usize {
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        (self.table.first_of_last(sequence) * page_size).min(len)
    }
}
