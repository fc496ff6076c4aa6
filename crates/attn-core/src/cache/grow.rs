//! Grows a cache in place: [`KvCache::add_pages`], [`KvCache::add_sequences`].

use super::{CacheAccess, KvCache};
use crate::{
    error::{Error, reserve},
    events,
};

impl KvCache {
    /// Adds `count` free pages to the pool, for all layers. Sequences keep their pages, and plans stay valid.
    ///
    /// The CPU's pool grows; for the time of the call there are two. The pools of CUDA and wgpu have their place in prepared steps and refuse.
    ///
    /// # Errors
    /// [`Error::Parameter`] from a backend whose pool cannot grow, and for more pages than a pool can have; [`Error::OutOfMemory`],
    /// [`Error::Device`]. Nothing is changed then.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).pages(1).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.append(0, &[0.5; 60 * 64], &[2.0; 60 * 64])?;
    /// cache.add_pages(1)?;
    /// cache.append(0, &[0.5; 60 * 64], &[2.0; 60 * 64])?;
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn add_pages(&mut self, count: usize) -> Result<(), Error> {
        let mut config = self.config.clone();
        config.num_pages = config.num_pages.saturating_add(count);
        config.check()?;
        self.pages.reserve(count)?;
        if count > 0 {
            self.store.grow(&CacheAccess::here()?, count)?;
        }
        self.pages.grow(count);
        self.config = config;
        events::pool("grown", &self.config, self.layout.page_bytes());
        Ok(())
    }

    /// Adds `count` empty sequences behind the last one.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more sequences than a cache can have; [`Error::OutOfMemory`]. Nothing is changed then.
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(64).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.add_sequences(2)?;
    /// assert_eq!(cache.table().lens, [0, 0, 0]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn add_sequences(&mut self, count: usize) -> Result<(), Error> {
        let mut config = self.config.clone();
        config.num_sequences = config.num_sequences.saturating_add(count);
        config.check()?;
        let table = &mut self.table;
        reserve("the page table", &mut table.pages, count)?;
        reserve(
            "the table of residual pages",
            &mut table.residual_pages,
            count,
        )?;
        reserve(
            "the table of checkpoints",
            &mut table.checkpoint_pages,
            count,
        )?;
        reserve("the numbers of sequences", &mut table.sequences, count)?;
        reserve("the lengths", &mut table.lens, count)?;
        reserve("the first tokens", &mut table.first_tokens, count)?;
        reserve("the tokens before", &mut table.tokens_before, count)?;
        if config.centres && count > 0 {
            self.store.grow_centres(&CacheAccess::here()?, count)?;
        }
        let sequences = config.num_sequences;
        table.sequences = (0..sequences).collect();
        table.pages.resize(sequences, Vec::new());
        table.residual_pages.resize(sequences, Vec::new());
        table.checkpoint_pages.resize(sequences, Vec::new());
        table.lens.resize(sequences, 0);
        table.first_tokens.resize(sequences, 0);
        table.tokens_before.resize(sequences, 0);
        self.config = config;
        Ok(())
    }
}
