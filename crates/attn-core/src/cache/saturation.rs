//! The count of numbers that a cache has stored as the end of its format's range.

use super::KvCache;
use crate::{
    cache_config::CacheConfig,
    error::Many,
    events,
    format::{KvFormat, Scheme},
};

/// Numbers that have saturated ([`Scheme::range`]).
#[derive(Debug, Clone, Copy)]
pub(super) struct Saturation {
    /// `None` once a write's numbers were not seen by the host.
    values: Option<u64>,
}

impl Default for Saturation {
    fn default() -> Self {
        Saturation { values: Some(0) }
    }
}

impl Saturation {
    /// Adds the numbers of a layer's write, or `None` for numbers that only the device has seen. The first that saturate are told.
    pub(super) fn count(&mut self, layer: usize, config: &CacheConfig, written: Option<u64>) {
        if !config.format.has_range() {
            return;
        }
        let before = self.values;
        self.values = before
            .zip(written)
            .map(|(before, written)| before.saturating_add(written));
        if let (Some(0), Some(values @ 1..)) = (before, self.values) {
            events::saturated(values, layer, config.format);
        }
    }
}

impl Scheme {
    fn has_range(self) -> bool {
        self.range(1.0) < f32::MAX
    }
}

impl KvFormat {
    /// Whether numbers of K or of V can saturate ([`Scheme::range`]).
    fn has_range(self) -> bool {
        self.k.has_range() || self.v.has_range()
    }

    /// For users of a cache in which `values` numbers have saturated ([`KvCache::saturated`]): what happened, and what to do.
    #[must_use]
    pub fn saturation_notice(self, values: u64) -> String {
        let has_scales = self.k.has_tensor_scale() || self.v.has_tensor_scale();
        let scales = if has_scales {
            "raise k_scales or v_scales, or "
        } else {
            ""
        };
        format!(
            "{} of K or V beyond the range of {self} stored as its end; {scales}take a format without such an end, such as int8 or bf16",
            Many(usize::try_from(values).unwrap_or(usize::MAX), "number")
        )
    }
}

impl KvCache {
    /// Numbers of K and V that were appended so far and have saturated: stored as the end of their scheme's range ([`Scheme::range`]), which f16, fp8 and
    /// int8-tensor have. 0 for formats of other schemes.
    ///
    /// `None` once rows that lie on a device were appended to a cache of such a format ([`KvCache::append_with`], [`KvCache::write_with`], a session's rows on
    /// a device): their numbers are not counted there.
    ///
    /// Numbers count when they are written, and still do when their tokens are taken back, dropped or freed. Sequences that are restored from an image
    /// bring none. The first ones are an event at level `warn` ([`events`]).
    ///
    /// ```
    /// use attn_core::{CacheConfig, Heads, HostPages, KvCache};
    ///
    /// let heads = Heads::new(1, 1, 64);
    /// let builder = CacheConfig::builder("fp8/int8".parse()?, heads).max_len(64);
    /// let config = builder.tensor_scales([0.01], []).build();
    /// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// // The scale reaches 4.48; int8 takes any number.
    /// let (mut k, v) = ([4.0; 64], [100.0; 64]);
    /// cache.append(0, &k, &v)?;
    /// assert_eq!(cache.saturated(), Some(0));
    /// k[5] = -5.0;
    /// cache.append(0, &k, &v)?;
    /// assert_eq!(cache.saturated(), Some(1));
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    #[must_use]
    pub fn saturated(&self) -> Option<u64> {
        self.saturation.values
    }
}
