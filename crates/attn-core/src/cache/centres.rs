//! Centres of K in a cache ([`crate::centres`]): the order in which a step writes them, their copies, and what a cache with centres refuses.

use half::bf16;

use super::{CacheAccess, FirstTile, KvCache, PageStore, PageTable, TokenWrite};
use crate::{
    error::{Error, filled, refuse},
    problem::Problem,
    segments::TILE,
};

/// Writes tokens to a store.
type WriteTokens<'a> = dyn FnMut(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error> + 'a;

/// Writes tokens to a layer with centres: those at position 0, which are first centres, those of first tiles, then the second centres of the tiles that are
/// whole now, and all later tokens.
pub(super) fn write_with_centres(
    store: &mut dyn PageStore,
    table: &PageTable,
    layer: usize,
    writes: &[TokenWrite],
    write: &mut WriteTokens<'_>,
) -> Result<(), Error> {
    if writes.iter().all(|write| write.position >= TILE) {
        return write(store, writes);
    }
    let mut write_those = |store: &mut dyn PageStore, from: usize, to: usize| {
        let those = writes.iter().filter(|w| (from..to).contains(&w.position));
        let those: Vec<TokenWrite> = those.copied().collect();
        match those.is_empty() {
            true => Ok(()),
            false => write(store, &those),
        }
    };
    write_those(store, 0, 1)?;
    write_those(store, 1, TILE)?;
    let whole = writes.iter().filter(|write| write.position == TILE - 1);
    let tiles: Vec<FirstTile> = whole
        .map(|write| first_tile(store, table, write.sequence))
        .collect();
    if !tiles.is_empty() {
        store.centre(&CacheAccess::here()?, layer, &tiles)?;
    }
    write_those(store, TILE, usize::MAX)
}

/// Where the first tile of a sequence lies that has one.
fn first_tile(store: &dyn PageStore, table: &PageTable, sequence: usize) -> FirstTile {
    let mut tile = FirstTile {
        sequence,
        pages: [0; _],
        residual_pages: [None; _],
    };
    let homes = table.pages[sequence].iter();
    let count = TILE.div_ceil(store.layout().page_size());
    for (i, page) in homes.take(count).enumerate() {
        tile.pages[i] = *page;
        tile.residual_pages[i] = table.residual_page(sequence, i);
    }
    tile
}

impl KvCache {
    /// Copies the centres of one sequence to another, in all layers.
    pub(super) fn copy_centres(&mut self, from: usize, to: usize) -> Result<(), Error> {
        let mut bytes = filled("centres of K", self.config.centres_bytes(), 0)?;
        for layer in 0..self.layers_with_centres() {
            let access = CacheAccess::here()?;
            self.store.read_centres(&access, layer, from, &mut bytes)?;
            self.store.write_centres(&access, layer, to, &bytes)?;
        }
        Ok(())
    }

    /// Copies the centres of all sequences of another cache of the same description.
    pub(super) fn copy_all_centres(&mut self, other: &KvCache) -> Result<(), Error> {
        let mut bytes = filled("centres of K", self.config.centres_bytes(), 0)?;
        for layer in 0..self.layers_with_centres() {
            let held = |sequence: &usize| other.table.lens[*sequence] > 0;
            for sequence in (0..self.config.num_sequences).filter(held) {
                let access = CacheAccess::here()?;
                other
                    .store
                    .read_centres(&access, layer, sequence, &mut bytes)?;
                self.store.write_centres(&access, layer, sequence, &bytes)?;
            }
        }
        Ok(())
    }

    /// Reads a sequence's centres in all layers, zeros where its tokens have none yet.
    pub(super) fn read_all_centres(&self, sequence: usize, out: &mut [u8]) -> Result<(), Error> {
        let each = self.config.centres_bytes();
        let layers = (0..self.layers_with_centres()).zip(out.chunks_exact_mut(each.max(1)));
        for (layer, out) in layers {
            let access = CacheAccess::here()?;
            self.store.read_centres(&access, layer, sequence, out)?;
            let centre = 2 * self.config.head_dim;
            for (i, centre) in out.chunks_exact_mut(centre).enumerate() {
                let least = [1, TILE][i % 2];
                if self.table.lens[sequence] < least {
                    centre.fill(0);
                }
            }
        }
        Ok(())
    }

    /// The centres of a sequence in one layer, `[num_kv_heads, 2, head_dim]`.
    pub(super) fn centres_of(&self, sequence: usize, layer: usize) -> Result<Vec<bf16>, Error> {
        let mut bytes = filled("centres of K", self.config.centres_bytes(), 0)?;
        self.store
            .read_centres(&CacheAccess::here()?, layer, sequence, &mut bytes)?;
        let (elements, _) = bytes.as_chunks();
        Ok(elements.iter().map(|x| bf16::from_le_bytes(*x)).collect())
    }

    /// Writes a sequence's centres in all layers.
    pub(super) fn write_all_centres(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let each = self.config.centres_bytes();
        let layers = (0..self.layers_with_centres()).zip(bytes.chunks_exact(each.max(1)));
        for (layer, bytes) in layers {
            let access = CacheAccess::here()?;
            self.store.write_centres(&access, layer, sequence, bytes)?;
        }
        Ok(())
    }

    fn layers_with_centres(&self) -> usize {
        match self.config.centres {
            true => self.config.layers,
            false => 0,
        }
    }

    /// Refuses pages without the centres that they mean something by.
    pub(super) fn check_no_centres(&self, what: &'static str) -> Result<(), Error> {
        if !self.config.centres {
            return Ok(());
        }
        refuse(
            what,
            "those of a cache with centres of K, which pages do not hold",
            "`image` and `restore`, which have them, or `dequantize` of a layer",
        )
    }

    /// Refuses a later shard of sequences: its centres are those of the first shard.
    pub(super) fn check_shard(&self, problem: &Problem) -> Result<(), Error> {
        let ahead = problem.tokens_before.iter().find(|tokens| **tokens > 0);
        match ahead.filter(|_| self.config.centres) {
            None => Ok(()),
            Some(tokens) => refuse(
                "tokens_before",
                *tokens,
                "0 over a cache with centres of K; create the shards' caches without centres",
            ),
        }
    }
}
