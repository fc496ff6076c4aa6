//! A copy of a whole cache, its pages under the same numbers: [`KvCache::copy_from`].

use super::{CacheAccess, KvCache};
use crate::error::{Error, filled, refuse};

/// Bytes that are copied at once, or one page.
const PIECE: usize = 16 << 20;

impl KvCache {
    /// Makes this cache, which holds no token, a copy of another one of the same description, on any backend. Sequences, their shared pages, dropped
    /// tokens, and the order in which free pages are taken are the other's, so that the same calls on both give the same bytes.
    ///
    /// # Errors
    /// [`Error::Parameter`] if this cache holds tokens, or was created from another description than the other's [`KvCache::config`]; [`Error::Step`] while
    /// a step of the other is open; [`Error::OutOfMemory`], [`Error::Device`]. This cache holds no token then, and after a failure of the device no shard that was begun
    /// ([`KvCache::begin_shard`]).
    ///
    /// ```
    /// # use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
    /// # let heads = Heads::new(4, 1, 64);
    /// # let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(2).max_len(256).build();
    /// # let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// cache.append(0, &[0.5; 5 * 64], &[2.0; 5 * 64])?;
    /// cache.fork(0, 1)?;
    /// // A backend's `create_cache` gives a cache of `cache.config()`.
    /// let mut copy = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// copy.copy_from(&cache)?;
    /// assert_eq!((copy.table(), copy.free_pages()), (cache.table(), cache.free_pages()));
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn copy_from(&mut self, other: &KvCache) -> Result<(), Error> {
        self.check_copy(other)?;
        let (size, access) = (self.layout.page_bytes(), CacheAccess::here()?);
        let owned: Vec<u32> = other.pages.owned().collect();
        let at_once = (PIECE / size).clamp(1, owned.len().max(1));
        let mut bytes = filled("a copy of pages", at_once * size, 0)?;
        for layer in 0..self.config.layers {
            for pages in owned.chunks(at_once) {
                let bytes = &mut bytes[..pages.len() * size];
                other.store.read_pages(&access, layer, pages, bytes)?;
                self.store.write_pages(&access, layer, pages, bytes)?;
            }
        }
        self.copy_all_centres(other)?;
        self.table = other.table.clone();
        self.pages = other.pages.clone();
        self.saturation = other.saturation;
        self.looks = other.looks.clone();
        Ok(())
    }

    fn check_copy(&self, other: &KvCache) -> Result<(), Error> {
        other.check_no_step("a copy of the cache")?;
        self.check_no_step("a copy into the cache")?;
        let what = "the cache to copy into";
        if let Some(sequence) = self.table.lens.iter().position(|len| *len != 0) {
            let len = self.table.lens[sequence];
            return refuse(
                what,
                format_args!("one with {len} tokens in sequence {sequence}"),
                "one without tokens; free its sequences first",
            );
        }
        if self.config != other.config {
            return refuse(
                what,
                format_args!("one of another description"),
                "one created from the `config()` of the cache to copy",
            );
        }
        Ok(())
    }
}
