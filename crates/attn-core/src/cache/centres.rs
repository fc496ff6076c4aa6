//! Centres of K in a cache ([`crate::centres`]): the order in which a step writes them, their copies, and what a cache with centres refuses.

use half::bf16;

use super::{CacheAccess, FirstTile, KvCache, PageStore, PageTable, TokenWrite};
use crate::{
    error::{Error, filled, refuse},
    format::BF16_MAX,
    problem::{MAX_TOKENS, Problem},
    segments::{SPAN_TOKENS, TILE},
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
    /// Copies the centres of one sequence to another, which is empty, in all layers. If the device fails, the other is no shard any more, as its centres may be
    /// of two.
    pub(super) fn copy_centres(&mut self, from: usize, to: usize) -> Result<(), Error> {
        let mut bytes = filled("centres of K", self.config.centres_bytes(), 0)?;
        for layer in 0..self.layers_with_centres() {
            let access = CacheAccess::here()?;
            self.store.read_centres(&access, layer, from, &mut bytes)?;
            self.table.tokens_before[to] = 0;
            self.store.write_centres(&access, layer, to, &bytes)?;
        }
        Ok(())
    }

    /// Copies the centres of all sequences of another cache of the same description. Those of this cache are no shards any more.
    pub(super) fn copy_all_centres(&mut self, other: &KvCache) -> Result<(), Error> {
        let mut bytes = filled("centres of K", self.config.centres_bytes(), 0)?;
        self.table.tokens_before.fill(0);
        for layer in 0..self.layers_with_centres() {
            // A shard has centres before it has tokens.
            let held = |sequence: &usize| {
                other.table.tokens_before[*sequence] + other.table.lens[*sequence] > 0
            };
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
            let centre = 2 * self.config.head_dim.k;
            for (i, centre) in out.chunks_exact_mut(centre).enumerate() {
                if self.table.tokens_before[sequence] + self.table.lens[sequence] < [1, TILE][i % 2]
                {
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

    /// Writes an empty sequence's centres in all layers. If the device fails, the sequence is no shard any more, as its centres may be of two.
    pub(super) fn write_all_centres(&mut self, sequence: usize, bytes: &[u8]) -> Result<(), Error> {
        let each = self.config.centres_bytes();
        let layers = (0..self.layers_with_centres()).zip(bytes.chunks_exact(each.max(1)));
        for (layer, bytes) in layers {
            let access = CacheAccess::here()?;
            self.table.tokens_before[sequence] = 0;
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
            format_args!("those of a cache with centres of K, which pages do not hold"),
            "`image` and `restore`, which have them, or `dequantize` of a layer",
        )
    }

    /// The centres of a sequence whose first tile is whole, `[layers, num_kv_heads, 2, head_dim]` in bf16: what [`KvCache::begin_shard`] takes for its later
    /// shards, in other caches. Empty for a cache without centres.
    ///
    /// # Errors
    /// [`Error::Parameter`] for fewer than 64 tokens, whose mean the second centre is; [`Error::Sequence`], [`Error::Step`], [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn shard_centres(&self, sequence: usize) -> Result<Vec<u8>, Error> {
        self.check_sequence(sequence)?;
        self.check_settled("a copy of centres", sequence)?;
        let tokens = self.table.tokens_before[sequence] + self.table.lens[sequence];
        if self.config.centres && tokens < TILE {
            return refuse(
                "the tokens of a sequence whose centres are copied",
                tokens,
                "64 or more, of whose keys the second centre is the mean",
            );
        }
        let bytes = self.all_centres_bytes();
        let mut centres = filled("centres of K", bytes, 0)?;
        self.read_all_centres(sequence, &mut centres)?;
        Ok(centres)
    }

    /// Makes an empty sequence a later shard, ahead of which `tokens_before` tokens lie in other caches: a multiple of 1024. Its keys have the centres of
    /// its first shard, which [`KvCache::shard_centres`] copies: so they have the bytes of the same tokens in one cache. Steps attend it with
    /// [`Problem::tokens_before`] of so many. A cache without centres takes none, and need not know.
    ///
    /// The sequence is no shard any more once it is freed.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::NotEmpty`]; [`Error::Parameter`] for tokens before that are not those of whole spans, or as many as a sequence has at most, and
    /// for centres that no cache writes; [`Error::Length`] for other centres than the cache's. Nothing is changed then. [`Error::Device`], and a sequence that was a
    /// shard before is none any more.
    pub fn begin_shard(
        &mut self,
        sequence: usize,
        tokens_before: usize,
        centres: &[u8],
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        self.check_empty("the beginning of a shard", sequence)?;
        check_before(tokens_before)?;
        let needed = self.all_centres_bytes();
        if centres.len() != needed {
            return Err(Error::Length {
                what: "the centres of a shard",
                given: centres.len(),
                needed,
            });
        }
        check_elements("a centre of K of a shard", centres)?;
        // Tokens from position 64 on have the second centre, also those of the shard's own first tile.
        let row = 2 * self.config.head_dim.k;
        let mut own = filled("centres of K", needed, 0)?;
        let heads = own
            .chunks_exact_mut(2 * row)
            .zip(centres.chunks_exact(2 * row));
        for (own, given) in heads {
            own[..row].copy_from_slice(&given[row..]);
            own[row..].copy_from_slice(&given[row..]);
        }
        self.write_all_centres(sequence, &own)?;
        self.table.tokens_before[sequence] = tokens_before;
        Ok(())
    }

    fn all_centres_bytes(&self) -> usize {
        self.config
            .centres_bytes()
            .saturating_mul(self.config.layers)
    }

    /// Refuses to attend a shard of other tokens ahead than its keys were written with: it would have another one's centres.
    pub(super) fn check_shards(&self, problem: &Problem, table: &PageTable) -> Result<(), Error> {
        if !self.config.centres {
            return Ok(());
        }
        let held = (0..problem.batch()).filter(|b| table.lens[*b] > 0);
        for b in held.filter(|b| problem.q_lens[*b] > 0) {
            let (given, own) = (problem.before(b), table.tokens_before[b]);
            if given != own {
                return refuse(
                    "tokens_before",
                    format_args!(
                        "{given} for sequence {}, which was begun with {own}",
                        table.sequences[b]
                    ),
                    "over centres of K those that the sequence was begun with: begin later shards by `begin_shard`, or create their cache without centres",
                );
            }
        }
        Ok(())
    }
}

/// Refuses tokens ahead of a shard that no shards have.
pub(super) fn check_before(tokens_before: usize) -> Result<(), Error> {
    if tokens_before.is_multiple_of(SPAN_TOKENS) && tokens_before < MAX_TOKENS {
        return Ok(());
    }
    refuse(
        "tokens_before",
        tokens_before,
        "multiples of 1024 below 1048576: shards ahead are of whole spans",
    )
}

/// Refuses elements that no centre has.
pub(super) fn check_elements(what: &'static str, centres: &[u8]) -> Result<(), Error> {
    let (elements, _) = centres.as_chunks();
    let mut elements = elements.iter().map(|x| bf16::from_le_bytes(*x).to_f32());
    match elements.find(|x| x.is_nan() || x.abs() > BF16_MAX) {
        None => Ok(()),
        Some(x) => refuse(
            what,
            x,
            "finite elements of at most 2^50; it is damaged, save the sequence again",
        ),
    }
}
