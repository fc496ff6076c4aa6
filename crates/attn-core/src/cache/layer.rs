//! One layer of a cache, for reading.

use super::{KvCache, PageTable};
use crate::{convert::dequantize_centred, error::Error, layout::PageLayout, problem::Problem};

/// One layer of a [`KvCache`]: its pool of pages, under the page table of all layers.
///
/// ```
/// use attn_core::{Append, CacheConfig, Error, Heads, HostPages, KvCache, KvFormat, KvSource};
///
/// let heads = Heads::new(4, 1, 64);
/// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(2).max_len(256).build();
/// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
/// cache.reserve(&[Append { sequence: 0, tokens: 1 }])?;
/// cache.write(1, &[0.5; 64], &[2.0; 64])?;
/// // What a step attends; layer 0 is not written yet.
/// let kv = KvSource::Layer(cache.layer(1)?);
/// assert_eq!(kv.kv_lens(), [1]);
/// assert!(matches!(cache.layer(2), Err(Error::Layer { given: 2, count: 2 })));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct CacheLayer<'a> {
    cache: &'a KvCache,
    layer: usize,
}

impl KvCache {
    /// One layer, to be attended: [`KvSource::Layer`](crate::KvSource::Layer).
    ///
    /// # Errors
    /// [`Error::Layer`].
    pub fn layer(&self, layer: usize) -> Result<CacheLayer<'_>, Error> {
        self.check_layer(layer)?;
        Ok(CacheLayer { cache: self, layer })
    }

    /// The layer of a cache of one.
    pub(crate) fn only_layer(&self) -> Result<CacheLayer<'_>, Error> {
        if self.config.layers != 1 {
            return Err(Error::SeveralLayers {
                what: "attention",
                layers: self.config.layers,
                next: "name the layer to attend",
            });
        }
        self.layer(0)
    }

    /// The first layer.
    pub(crate) fn first_layer(&self) -> CacheLayer<'_> {
        CacheLayer {
            cache: self,
            layer: 0,
        }
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<(), Error> {
        let count = self.config.layers;
        if layer < count {
            Ok(())
        } else {
            Err(Error::Layer {
                given: layer,
                count,
            })
        }
    }
}

impl<'a> CacheLayer<'a> {
    /// The cache.
    #[must_use]
    pub fn cache(self) -> &'a KvCache {
        self.cache
    }

    /// The layer's number, from 0 on.
    #[must_use]
    pub fn index(self) -> usize {
        self.layer
    }

    /// The pages and lengths of all sequences: those of the cache.
    #[must_use]
    pub fn table(self) -> &'a PageTable {
        self.cache.table()
    }

    /// For backends: the layout of what the entries of a table number: pages, or runs as pages of one KV head.
    #[must_use]
    pub fn layout_of(self, table: &PageTable) -> PageLayout {
        match table.of_runs {
            true => self.cache.layout.of_run(),
            false => self.cache.layout,
        }
    }

    /// The static scales of K and of V per KV head; empty for schemes that have none.
    #[must_use]
    pub fn tensor_scales(self) -> [&'a [f32]; 2] {
        self.cache.config.tensor_scales(self.layer)
    }

    /// Refuses what [`KvCache::check_queries`] does, and a layer that lacks the tokens of the open step.
    ///
    /// # Errors
    /// [`Error::Step`]; those of [`KvCache::check_queries`] but [`Error::SeveralLayers`].
    pub fn check_queries(self, problem: &Problem) -> Result<(), Error> {
        self.check_queries_of(problem, self.table())
    }

    /// Checks a problem's queries against the sequences that `table` lists.
    pub(crate) fn check_queries_of(
        self,
        problem: &Problem,
        table: &PageTable,
    ) -> Result<(), Error> {
        self.cache.check_written(self.layer)?;
        self.cache.check_queries_of(problem, table)
    }

    /// A sequence's K and V in this layer, dequantized: `[tokens, num_kv_heads, head_dim]` each, as its newest token reads them.
    ///
    /// # Errors
    /// Those of [`KvCache::image`].
    pub fn dequantize(self, sequence: usize) -> Result<[Vec<f32>; 2], Error> {
        let cache = self.cache;
        let pages = cache.pages_of_layers(sequence, self.layer..self.layer + 1)?;
        let centres = match cache.config.centres {
            true => cache.centres_of(sequence, self.layer)?,
            false => Vec::new(),
        };
        let tokens = cache.table.lens[sequence];
        dequantize_centred(
            &cache.layout,
            &pages,
            [tokens, cache.table.tokens_before[sequence]],
            self.tensor_scales(),
            &centres,
        )
    }

    /// The pages of [`KvCache::read_back`], of this layer alone.
    ///
    /// # Errors
    /// Those of [`KvCache::read_back`].
    pub fn read_back(self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.cache
            .read_back_layers(sequence, self.layer..self.layer + 1)
    }
}
