//! The sequences of a cache that a step attends: any of them, in any order.

use super::{CacheLayer, KvCache, PageTable};
use crate::error::Error;

/// Some of a cache's sequences as the batch of a step: sequence b of the problem is the b-th of these.
///
/// A step with [`KvSource::Cache`](crate::KvSource::Cache) attends the cache's first sequences. Of a cache of several layers they are those of one layer:
/// [`CacheLayer::sequences`].
///
/// ```
/// use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(8).max_len(256).build();
/// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
/// cache.append(5, &[0.5; 3 * 64], &[2.0; 3 * 64])?;
/// cache.append(2, &[0.5; 64], &[2.0; 64])?;
/// let running = cache.sequences(&[5, 2])?;
/// assert_eq!(running.table().lens, [3, 1]);
/// # Ok::<(), attn_core::Error>(())
/// ```
pub struct CachedSequences<'a> {
    pub(super) layer: CacheLayer<'a>,
    pub(super) table: PageTable,
}

impl KvCache {
    /// Chooses the sequences of a step; one may be named several times.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::SeveralLayers`] for a cache of several layers, of which [`CacheLayer::sequences`] takes one.
    pub fn sequences(&self, sequences: &[usize]) -> Result<CachedSequences<'_>, Error> {
        self.only_layer()?.sequences(sequences)
    }
}

impl<'a> CacheLayer<'a> {
    /// Chooses the sequences of a step, as [`KvCache::sequences`] does.
    ///
    /// # Errors
    /// [`Error::Sequence`].
    pub fn sequences(self, sequences: &[usize]) -> Result<CachedSequences<'a>, Error> {
        let (cache, all) = (self.cache(), self.table());
        sequences
            .iter()
            .try_for_each(|sequence| cache.check_sequence(*sequence))?;
        let of = |lists: &[Vec<u32>]| sequences.iter().map(|s| lists[*s].clone()).collect();
        let numbers_of = |all: &[usize]| sequences.iter().map(|s| all[*s]).collect();
        Ok(CachedSequences {
            layer: self,
            table: PageTable {
                pages: of(&all.pages),
                residual_pages: of(&all.residual_pages),
                checkpoint_pages: Vec::new(),
                sequences: sequences.to_vec(),
                lens: numbers_of(&all.lens),
                first_tokens: numbers_of(&all.first_tokens),
                tokens_before: numbers_of(&all.tokens_before),
                first_residual_pages: all.first_residual_pages,
                of_runs: false,
            },
        })
    }
}

impl<'a> CachedSequences<'a> {
    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &'a KvCache {
        self.layer.cache()
    }

    /// The layer that is attended; the only one of most caches.
    #[must_use]
    pub fn layer(&self) -> CacheLayer<'a> {
        self.layer
    }

    /// Pages and lengths of the chosen sequences, in their order.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }
}
