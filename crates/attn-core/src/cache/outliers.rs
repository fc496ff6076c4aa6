//! Notices keys that a cache stores badly: those whose magnitude lies in a few channels (outlier channels), such as biases of K that turn too fast for the
//! centres.

use super::{CacheAccess, KvCache, PageTable};
use crate::{
    convert::tile_keys,
    error::{Error, filled},
    events,
    format::KvFormat,
    segments::TILE,
};

/// Tokens of a sequence from which on a layer's keys are looked at first.
const FIRST_LOOK: usize = 2 * TILE;

/// By how much longer a sequence is at a layer's next look. Biases that turn slowly leave the centres behind only after thousands of tokens.
const NEXT_LOOK: usize = 8;

/// The ratio of [`KvCache::key_outliers`] from which on a cache warns. An int8 row then errs by more than three times what it would without its outlier
/// channels. Keys of models without biases have 1 to 4 (the bundled layers).
const MOST: f32 = 10.0;

/// What a cache has seen of its keys.
#[derive(Debug, Clone, Default)]
pub(super) struct KeyLooks {
    /// The largest ratio so far.
    highest: Option<f32>,
    /// Tokens that a sequence has at each layer's next look; layers that were not looked at yet are missing.
    next: Vec<usize>,
}

impl KeyLooks {
    fn next(&self, layer: usize) -> usize {
        self.next.get(layer).copied().unwrap_or(FIRST_LOOK)
    }
}

impl KvFormat {
    /// For users of a cache whose keys have outlier channels ([`KvCache::key_outliers`]): what that means, and what to do.
    #[must_use]
    pub fn outlier_notice(self, ratio: f32) -> String {
        format!(
            "keys have outlier channels: their mean square is {ratio:.0} times that of the middle channel, so that {self} stores the others badly; \
             biases of K in fast rotary pairs do that; take bf16 for the layers that have them, or int8, which errs least of the quantized formats"
        )
    }
}

impl KvCache {
    /// How uneven the channels of the keys are that this cache has looked at: the mean over the channels of a head of the mean square of a tile's keys, less
    /// their centres in a cache that has some, over that of the middle channel; the largest of all heads, layers and looks. `None` before the first look, which comes when a
    /// sequence has 128 tokens; later ones when it has 8 times as many.
    ///
    /// Formats of 4 and 8 bits share a row's range among its channels, and err by as much more as the square root of the ratio says. At more than 10 there is
    /// an event at level `warn` ([`events`]), once: see [`KvFormat::outlier_notice`].
    #[must_use]
    pub fn key_outliers(&self) -> Option<f32> {
        self.looks.highest
    }

    /// Whether keys have outlier channels of which the cache has warned ([`KvCache::key_outliers`]).
    #[must_use]
    pub fn has_key_outliers(&self) -> bool {
        self.key_outliers().is_some_and(|ratio| ratio > MOST)
    }

    /// Whether [`KvCache::look_at_keys`] would read a layer's pages: for who orders what it enqueued ahead of that. Of a layer that the cache lacks there are none.
    #[must_use]
    pub fn keys_are_due(&self, layer: usize) -> bool {
        layer < self.config.layers
            && self.config.format.k.code_bits() < 16
            && self.sequence_to_look_at(layer).is_some()
            && self.store.can_wait()
    }

    fn sequence_to_look_at(&self, layer: usize) -> Option<usize> {
        let next = self.looks.next(layer);
        self.table.lens.iter().position(|len| *len >= next)
    }

    /// Looks at the newest whole tile of a sequence whose layer was just written, where it is due. Appends of rows in host memory do it by themselves.
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Device`], [`Error::OutOfMemory`]; [`Error::BadBytes`] for pages that no append wrote.
    pub fn look_at_keys(&mut self, layer: usize) -> Result<(), Error> {
        self.check_layer(layer)?;
        let Some(sequence) = self
            .sequence_to_look_at(layer)
            .filter(|_| self.keys_are_due(layer))
        else {
            return Ok(());
        };
        let tokens = self.table.lens[sequence];
        self.looks.next.resize(self.config.layers, FIRST_LOOK);
        while self.looks.next[layer] <= tokens {
            self.looks.next[layer] = self.looks.next[layer].saturating_mul(NEXT_LOOK);
        }
        let Some(keys) = self.newest_tile(sequence, layer)? else {
            return Ok(());
        };
        let had_outliers = self.has_key_outliers();
        let dim = self.config.head_dim.k;
        let heads = keys.chunks_exact(TILE * dim);
        let ratio = heads.map(|head| unevenness(head, dim)).fold(0.0, f32::max);
        self.looks.highest = Some(
            self.looks
                .highest
                .map_or(ratio, |highest| highest.max(ratio)),
        );
        if self.has_key_outliers() && !had_outliers {
            events::outliers(ratio, layer, self.config.format);
        }
        Ok(())
    }

    /// The keys of a sequence's newest whole tile, less their centres, `[num_kv_heads, 64, head_dim.k]`; none where its pages were dropped.
    fn newest_tile(&self, sequence: usize, layer: usize) -> Result<Option<Vec<f32>>, Error> {
        let first = (self.table.lens[sequence] / TILE - 1) * TILE;
        let page_size = self.config.page_size;
        let pages =
            &self.table.pages[sequence][first / page_size..(first + TILE).div_ceil(page_size)];
        if pages.contains(&PageTable::DROPPED) {
            return Ok(None);
        }
        let size = self.layout.page_bytes();
        let mut bytes = filled("pages of keys", pages.len() * size, 0)?;
        self.store
            .read_pages(&CacheAccess::here()?, layer, pages, &mut bytes)?;
        let [scales, _] = self.config.tensor_scales(layer);
        let pages: Vec<&[u8]> = bytes.chunks_exact(size).collect();
        tile_keys(&self.layout, &pages, first % page_size, scales).map(Some)
    }
}

/// The mean square of all channels of keys `[64, dim]` over that of the middle channel.
fn unevenness(keys: &[f32], dim: usize) -> f32 {
    let mut squares = vec![0.0f64; dim];
    for key in keys.chunks_exact(dim) {
        let channels = squares.iter_mut().zip(key);
        channels.for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
    }
    let mean = squares.iter().sum::<f64>() / dim as f64;
    squares.sort_by(f64::total_cmp);
    match squares[dim / 2] {
        // All keys alike, whose centres leave nothing.
        _ if mean == 0.0 => 1.0,
        middle => (mean / middle) as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::unevenness;

    /// Kills a mean in place of the middle channel, and sums over tokens in place of channels.
    #[test]
    fn unevenness_is_that_of_channels() {
        let mut keys = [1.0f32; 64 * 64];
        assert_eq!(unevenness(&keys, 64), 1.0);
        // A token far from the others is no channel.
        keys[..64].fill(100.0);
        assert_eq!(unevenness(&keys, 64), 1.0);
        keys[..64].fill(1.0);
        keys.iter_mut().skip(5).step_by(64).for_each(|x| *x = 80.0);
        assert_eq!(unevenness(&keys, 64), (6400.0 + 63.0) / 64.0);
        assert_eq!(unevenness(&[0.0; 64 * 64], 64), 1.0);
    }
}
