//! The interface between a cache, which decides where tokens go, and a backend's pool of pages, which keeps their bytes.

use std::any::Any;

use crate::{
    cache_config::CacheConfig,
    error::{Error, Given, refuse},
    layout::{PAGE_SIZES, PageLayout},
    process,
    segments::TILE,
    wide_rows::WideRows,
};

/// The destination of one token. Only [`KvCache`](super::KvCache) makes one, and it checks the page and the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenWrite {
    /// The token's index in the call's K and V.
    pub source: usize,
    /// The token's home page.
    pub page: u32,
    /// The page that takes the token's residuals, if the format keeps any.
    pub residual_page: Option<u32>,
    /// The token's index inside the page.
    pub token: usize,
    /// The token's sequence.
    pub sequence: usize,
    /// The token's index inside the sequence.
    pub position: usize,
}

/// Where the first 64 tokens of a sequence lie, of which the store makes a centre of K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FirstTile {
    /// The sequence.
    pub sequence: usize,
    /// Its first home pages, as many as hold 64 tokens.
    pub pages: [u32; FIRST_PAGES],
    /// Their residual pages, if K keeps any.
    pub residual_pages: [Option<u32>; FIRST_PAGES],
}

/// Pages of 64 tokens at most.
pub(crate) const FIRST_PAGES: usize = TILE / PAGE_SIZES[0];

/// Permission to drive a [`PageStore`]. Only a [`KvCache`](super::KvCache) has one, so that no other caller can write pages that sequences own; and only in
/// the process that opened its device ([`process`]).
#[derive(Debug)]
pub struct CacheAccess(());

impl CacheAccess {
    /// # Errors
    /// Those of [`process::check`].
    pub(crate) fn here() -> Result<Self, Error> {
        process::check()?;
        Ok(CacheAccess(()))
    }
}

/// A backend's pools of pages, one for each layer, driven by the [`KvCache`](super::KvCache) that owns it. Layers are below [`PageStore::layers`].
/// A store on the host that differs from [`HostPages`](crate::HostPages) in some calls implements [`HostStore`](crate::HostStore).
pub trait PageStore: Send + Sync {
    /// The layout of the pools' pages.
    fn layout(&self) -> PageLayout;
    /// Number of pages in each layer's pool.
    fn num_pages(&self) -> usize;
    /// Number of layers; one unless the store says otherwise.
    fn layers(&self) -> usize {
        1
    }
    /// Quantizes and writes tokens of one layer in order; `k`, `v` are `[tokens, num_kv_heads, head_dim]`, side by side or at strides.
    ///
    /// A store with centres of K ([`PageStore::has_centres`]) takes the centre of each token's position ([`centre_of`](crate::centres::centre_of)) off its
    /// key. Tokens at position 0 come in calls of their own: their keys are their sequences' first centres, rounded by
    /// [`to_centre`](crate::centres::to_centre). All other centres that a call needs are there already.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error>;
    /// Reads the bytes of pages of a layer's pool into `out`, one page behind the other: `out` has room for exactly these.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails; `out` holds anything then.
    fn read_pages(
        &self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error>;
    /// Replaces the bytes of pages of a layer's pool, each named once; `bytes` are those of the first page, then of the next.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails; the pages hold anything then.
    fn write_pages(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error>;
    /// Whether [`PageStore::read_pages`] can wait for the device. On a page in a browser it cannot, and what the cache would look at by itself stays unread.
    fn can_wait(&self) -> bool {
        true
    }
    /// Reads the bytes of one page of a layer.
    ///
    /// # Errors
    /// Those of [`PageStore::read_pages`].
    fn read_page(&self, access: &CacheAccess, layer: usize, page: u32) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.layout().page_bytes()];
        self.read_pages(access, layer, &[page], &mut bytes)?;
        Ok(bytes)
    }
    /// Replaces the bytes of one page of a layer.
    ///
    /// # Errors
    /// Those of [`PageStore::write_pages`].
    fn write_page(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        page: u32,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.write_pages(access, layer, &[page], bytes)
    }
    /// The static scales of K and of V per layer and KV head that codes are written with, as [`CacheConfig`] has them; `None` from a store that does not say.
    fn tensor_scales(&self) -> Option<[&[f32]; 2]> {
        None
    }
    /// Number of sequences that the store keeps centres of K for; `None` from a store that does not say.
    fn num_sequences(&self) -> Option<usize> {
        None
    }
    /// Whether the store keeps centres of K for each sequence ([`centres`](crate::centres)), `[num_kv_heads, 2, head_dim]` in bf16; not unless it says so.
    fn has_centres(&self) -> bool {
        false
    }
    /// Makes the second centres of sequences in one layer: the [`mean`](crate::centres::mean) of what their first tiles store, read with residuals.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn centre(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        let _ = (access, layer, tiles);
        no_centres()
    }
    /// Reads a sequence's centres in one layer into `out`, which has room for exactly these.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails; `out` holds anything then.
    fn read_centres(
        &self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let _ = (access, layer, sequence, out);
        no_centres()
    }
    /// Replaces a sequence's centres in one layer.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails; the centres hold anything then.
    fn write_centres(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let _ = (access, layer, sequence, bytes);
        no_centres()
    }
    /// Adds room for the centres of `sequences` sequences behind the last one, in each layer.
    ///
    /// # Errors
    /// [`Error::Parameter`] from a store that cannot grow, which is what the provided method does; [`Error::OutOfMemory`], [`Error::Device`]. Nothing is changed then.
    fn grow_centres(&mut self, access: &CacheAccess, sequences: usize) -> Result<(), Error> {
        let _ = access;
        refuse(
            "sequences to add",
            sequences,
            "0 where this backend keeps centres of K; create the cache with more sequences, or without centres",
        )
    }
    /// Adds `pages` pages behind the last one of each layer; the others keep their numbers and bytes.
    ///
    /// A store whose pool cannot grow in place refuses, which is what the provided method does.
    ///
    /// # Errors
    /// [`Error::Parameter`] from a store that cannot grow, [`Error::OutOfMemory`], [`Error::Device`]. The pools are unchanged then.
    fn grow(&mut self, access: &CacheAccess, pages: usize) -> Result<(), Error> {
        let _ = access;
        refuse(
            "pages to add",
            pages,
            "0 on this backend, whose pools keep their size; create a larger cache, and move the sequences by `image` and `restore`",
        )
    }
    /// The store as [`Any`], so that a backend can recover its own type.
    fn as_any(&self) -> &dyn Any;
}

fn no_centres() -> Result<(), Error> {
    refuse("centres of K", "a call for them", "stores that keep some")
}

/// Refuses a store that was made from another description than the cache's.
pub(super) fn check_store(config: &CacheConfig, store: &dyn PageStore) -> Result<(), Error> {
    fn same<T: PartialEq + ToString>(what: &'static str, both: [T; 2]) -> Result<(), Error> {
        let [config, store] = &both;
        if config == store {
            return Ok(());
        }
        let [config, store] = both.map(|value| value.to_string());
        Err(Error::StoreMismatch {
            what,
            config,
            store,
        })
    }
    let layout = store.layout();
    same("format", [config.format, layout.format()])?;
    same("head_dim", [config.head_dim, layout.head_dim()])?;
    for (what, of_config, of_store) in [
        ("page_size", config.page_size, layout.page_size()),
        ("num_kv_heads", config.num_kv_heads, layout.num_kv_heads()),
        ("num_pages", config.num_pages, store.num_pages()),
        ("layers", config.layers, store.layers()),
    ] {
        same(what, [of_config, of_store])?;
    }
    same("centres", [config.centres, store.has_centres()])?;
    if let Some(sequences) = store.num_sequences().filter(|_| config.centres) {
        same("num_sequences", [config.num_sequences, sequences])?;
    }
    let [k, v] = store.tensor_scales().unwrap_or_default();
    let k = ("k_tensor_scales", &config.k_tensor_scales, k);
    for (what, of_config, of_store) in [k, ("v_tensor_scales", &config.v_tensor_scales, v)] {
        if let Some(i) = of_config.iter().zip(of_store).position(|(a, b)| a != b) {
            let heads = config.num_kv_heads.max(1);
            let at = format!("for head {} of layer {}", i % heads, i / heads);
            let texts = [of_config[i], of_store[i]].map(|x| format!("{} {at}", Given::from(x)));
            same(what, texts)?;
        }
    }
    Ok(())
}
