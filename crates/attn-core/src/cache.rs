//! The page table over a shared pool, and the cache's lifecycle.
//!
//! [`KvCache`] keeps the page table (lengths, pages, sharing) and checks every call; a backend's [`PageStore`] keeps the bytes in the
//! backend's memory. A refused call changes neither, and a call that the device fails changes no length and takes no page.

use std::any::Any;

use crate::{
    cache_config::CacheConfig,
    elements::Elements,
    error::{Error, check_values, filled},
    layout::PageLayout,
    page_allocator::PageAllocator,
};

/// The number of tokens that a sequence gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// The sequence.
    pub sequence: usize,
    /// The number of tokens.
    pub tokens: usize,
}

/// The destination of one token. Only [`KvCache`] makes one, and it checks the page and the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenWrite {
    /// The token's index in the call's K and V.
    pub source: usize,
    /// The token's home page.
    pub page: u32,
    /// The tail page that holds the token's K while the home page is open, for `Int4 Channel`.
    pub tail_page: Option<u32>,
    /// The token's index inside the page.
    pub token: usize,
}

impl TokenWrite {
    /// Whether this token fills its page, which is then sealed.
    #[must_use]
    pub fn fills(&self, page_size: usize) -> bool {
        self.token + 1 == page_size
    }
}

/// Permission to drive a [`PageStore`]. Only a [`KvCache`] has one, so that no other caller can write pages that sequences own.
#[derive(Debug)]
pub struct CacheAccess(());

/// A backend's pool of pages, driven by the [`KvCache`] that owns it.
pub trait PageStore: Send + Sync {
    /// The layout of the pool's pages.
    fn layout(&self) -> PageLayout;
    /// Number of pages in the pool.
    fn num_pages(&self) -> usize;
    /// Quantizes and writes tokens in order, sealing pages as they fill; `k`, `v` are `[tokens, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn append(
        &mut self,
        access: &CacheAccess,
        writes: &[TokenWrite],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error>;
    /// Reads the bytes of one page.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn read_page(&self, access: &CacheAccess, page: u32) -> Result<Vec<u8>, Error>;
    /// Replaces the bytes of one page.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn write_page(&mut self, access: &CacheAccess, page: u32, bytes: &[u8]) -> Result<(), Error>;
    /// The store as [`Any`], so that a backend can recover its own type.
    fn as_any(&self) -> &dyn Any;
}

/// The pages and lengths of all sequences; sequences may share pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageTable {
    /// Home pages of each sequence, in token order.
    pub pages: Vec<Vec<u32>>,
    /// Tail page of each sequence, for `Int4 Channel`.
    pub tail_pages: Vec<Option<u32>>,
    /// Cached tokens of each sequence.
    pub lens: Vec<usize>,
}

/// A paged, quantized cache on one backend.
///
/// ```
/// use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
///
/// let heads = Heads { q: 4, kv: 1, dim: 64 };
/// let config = CacheConfig::builder(KvFormat::INT8, heads).sequences(2).max_len(256).build();
/// // A backend's `create_cache` does this with its own store.
/// let pages = HostPages::new(&config)?;
/// let mut cache = KvCache::new(config, Box::new(pages))?;
/// cache.append(0, &[0.5; 3 * 64], &[2.0; 3 * 64])?;
/// cache.fork(0, 1)?;
/// assert_eq!(cache.table().lens, [3, 3]);
/// cache.free_sequence(0)?;
/// assert_eq!(cache.table().lens, [0, 3]);
/// # Ok::<(), attn_core::Error>(())
/// ```
pub struct KvCache {
    config: CacheConfig,
    layout: PageLayout,
    table: PageTable,
    pages: PageAllocator,
    store: Box<dyn PageStore>,
}

/// The pages that an append adds to a sequence; the table changes only when the tokens are written.
struct Reservation {
    sequence: usize,
    tokens: usize,
    /// The shared open page, and its copy.
    copied: Option<[u32; 2]>,
    pages: Vec<u32>,
    tail: Option<u32>,
}

impl KvCache {
    /// Makes the page table for a backend's store; backends call this from `create_cache`.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`]; [`Error::Mismatch`] if the store's layout or number of pages differs from the config's; [`Error::OutOfMemory`].
    pub fn new(config: CacheConfig, store: Box<dyn PageStore>) -> Result<Self, Error> {
        config.check()?;
        let layout = config.layout()?;
        let differ = |what, config: String, store: String| {
            Err(Error::Mismatch {
                what,
                problem: config,
                cache: store,
            })
        };
        if store.layout() != layout {
            let texts = [layout, store.layout()].map(|layout| format!("{layout:?}"));
            let [config, store] = texts;
            return differ("page layout", config, store);
        }
        if store.num_pages() != config.num_pages {
            let [config, store] = [config.num_pages, store.num_pages()].map(|n| n.to_string());
            return differ("num_pages", config, store);
        }
        let n = config.num_sequences;
        Ok(KvCache {
            table: PageTable {
                pages: filled("the page table", n, Vec::new())?,
                tail_pages: filled("the tail pages", n, None)?,
                lens: filled("the lengths", n, 0)?,
            },
            pages: PageAllocator::new(config.num_pages)?,
            layout,
            config,
            store,
        })
    }

    /// The description that the cache was created from.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The layout of the cache's pages.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// The pages and lengths of all sequences.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The backend's pool of pages.
    #[must_use]
    pub fn store(&self) -> &dyn PageStore {
        &*self.store
    }

    /// Number of pages that no sequence owns.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.pages.num_free()
    }

    /// Puts the free pages in the given order of allocation; refuses what is not a permutation of them.
    pub(crate) fn order_free_pages(&mut self, order: &[u32]) -> Result<(), Error> {
        self.pages.order(order)
    }

    fn check_sequence(&self, sequence: usize) -> Result<(), Error> {
        let count = self.table.lens.len();
        if sequence < count {
            Ok(())
        } else {
            Err(Error::Sequence {
                given: sequence,
                count,
            })
        }
    }

    /// Appends tokens to one sequence: `k` and `v` are `[tokens, num_kv_heads, head_dim]` in f32, f16 or bf16.
    ///
    /// Pages are sealed as they fill. The bytes do not depend on how many tokens come at once.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Length`], [`Error::NotFinite`], [`Error::Magnitude`], [`Error::CacheFull`]; [`Error::Device`] if the
    /// device fails. Lengths and pages are unchanged then.
    pub fn append<'a>(
        &mut self,
        sequence: usize,
        k: impl Into<Elements<'a>>,
        v: impl Into<Elements<'a>>,
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let (k, v) = (k.into(), v.into());
        let row = self.config.num_kv_heads * self.config.head_dim;
        if !k.len().is_multiple_of(row) {
            return Err(Error::Length {
                what: "k",
                given: k.len(),
                needed: k.len().next_multiple_of(row),
            });
        }
        let tokens = k.len() / row;
        self.append_batch(&[Append { sequence, tokens }], k, v)
    }

    /// Appends tokens to several sequences at once, or to none if anything is refused or fails.
    ///
    /// `appends` names each sequence once; `k` and `v` hold the tokens of all of them in this order, `[tokens, num_kv_heads, head_dim]` in
    /// f32, f16 or bf16. The bytes are those of one append after the other.
    ///
    /// # Errors
    /// Those of [`KvCache::append`], and [`Error::Parameter`] for a sequence named twice.
    pub fn append_batch<'a>(
        &mut self,
        appends: &[Append],
        k: impl Into<Elements<'a>>,
        v: impl Into<Elements<'a>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let row = self.config.num_kv_heads * self.config.head_dim;
        let tokens = appends
            .iter()
            .fold(0usize, |n, a| n.saturating_add(a.tokens));
        let needed = tokens.saturating_mul(row);
        for (what, given) in [("k", k.len()), ("v", v.len())] {
            if given != needed {
                return Err(Error::Length {
                    what,
                    given,
                    needed,
                });
            }
        }
        let (k, v) = (k.widened("K in f32")?, v.widened("V in f32")?);
        check_values("k", &k, self.config.format.k)?;
        check_values("v", &v, self.config.format.v)?;
        self.write_tokens(appends, |store, writes| {
            store.append(&CacheAccess(()), writes, &k, &v)
        })
    }

    /// Appends tokens that lie in the backend's memory already: `write` gets the backend's store and each token's destination, and writes the
    /// tokens or records the writes.
    ///
    /// `appends` names each sequence once; [`TokenWrite::source`] counts through all of them in this order.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Parameter`] for a sequence named twice, [`Error::CacheFull`]; those of `write`. Lengths and pages are
    /// unchanged then.
    pub fn append_with(
        &mut self,
        appends: &[Append],
        write: impl FnOnce(&dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.write_tokens(appends, |store, writes| write(store, writes))
    }

    /// Reserves pages, writes, and only then enters pages and lengths into the table.
    fn write_tokens(
        &mut self,
        appends: &[Append],
        write: impl FnOnce(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let total = self.check_appends(appends)?;
        if total == 0 {
            return Ok(());
        }
        let mut reserved = Vec::with_capacity(appends.len());
        let mut written = self.reserve(appends, &mut reserved);
        if written.is_ok() {
            written = self
                .writes(&reserved, total)
                .and_then(|writes| write(&mut *self.store, &writes));
        }
        match written {
            Ok(()) => reserved.into_iter().for_each(|r| self.commit(r)),
            Err(_) => reserved.into_iter().rev().for_each(|r| self.give_back(r)),
        }
        written
    }

    /// The open page that an append to `sequence` would have to copy because other sequences share it.
    fn shared_open_page(&self, sequence: usize) -> Option<u32> {
        let open = !self.table.lens[sequence].is_multiple_of(self.config.page_size);
        let page = self.table.pages[sequence].last().copied().filter(|_| open);
        page.filter(|&page| self.pages.is_shared(page))
    }

    /// Number of pages that a sequence lacks for `tokens` more.
    fn new_pages(&self, sequence: usize, tokens: usize) -> usize {
        let len = self.table.lens[sequence].saturating_add(tokens);
        len.div_ceil(self.config.page_size)
            .saturating_sub(self.table.pages[sequence].len())
    }

    fn needs_tail(&self, sequence: usize) -> bool {
        self.layout.has_tail_page() && self.table.tail_pages[sequence].is_none()
    }

    /// Refuses appends to missing or repeated sequences; returns their tokens in total.
    fn check_appends(&self, appends: &[Append]) -> Result<usize, Error> {
        let (mut needed, mut total) = (0usize, 0usize);
        let mut sequences = Vec::with_capacity(appends.len());
        for &Append { sequence, tokens } in appends {
            self.check_sequence(sequence)?;
            sequences.push(sequence);
            if tokens == 0 {
                continue;
            }
            let pages = self.new_pages(sequence, tokens)
                + usize::from(self.shared_open_page(sequence).is_some())
                + usize::from(self.needs_tail(sequence));
            needed = needed.saturating_add(pages);
            total = total.saturating_add(tokens);
        }
        sequences.sort_unstable();
        if let Some(pair) = sequences.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Parameter {
                what: "sequence to append to",
                given: format!("{}, twice", pair[0]),
                allowed: "each sequence once per call",
            });
        }
        self.pages.check_room(needed)?;
        Ok(total)
    }

    /// Takes the pages that the appends need, and copies the open pages that others share.
    fn reserve(
        &mut self,
        appends: &[Append],
        reserved: &mut Vec<Reservation>,
    ) -> Result<(), Error> {
        for &Append { sequence, tokens } in appends.iter().filter(|a| a.tokens > 0) {
            let needs_tail = self.needs_tail(sequence);
            let mut reservation = Reservation {
                sequence,
                tokens,
                copied: None,
                pages: Vec::new(),
                tail: None,
            };
            let shared = self.shared_open_page(sequence);
            if let Some(page) = shared {
                reservation.copied = Some([page, self.pages.take()?]);
            }
            if needs_tail {
                reservation.tail = Some(self.pages.take()?);
            }
            for _ in 0..self.new_pages(sequence, tokens) {
                reservation.pages.push(self.pages.take()?);
            }
            let copied = reservation.copied;
            reserved.push(reservation);
            if let Some([from, to]) = copied {
                let bytes = self.store.read_page(&CacheAccess(()), from)?;
                self.store.write_page(&CacheAccess(()), to, &bytes)?;
            }
        }
        Ok(())
    }

    /// The destination of each token.
    fn writes(&self, reserved: &[Reservation], total: usize) -> Result<Vec<TokenWrite>, Error> {
        let mut writes = Vec::new();
        writes
            .try_reserve_exact(total)
            .map_err(|_| Error::OutOfMemory {
                what: "the places of tokens to append",
                bytes: total.saturating_mul(size_of::<TokenWrite>()),
            })?;
        let page_size = self.config.page_size;
        for r in reserved {
            let (len, held) = (self.table.lens[r.sequence], &self.table.pages[r.sequence]);
            let open = len / page_size;
            let tail_page = self.table.tail_pages[r.sequence].or(r.tail);
            for t in len..len + r.tokens {
                let page = match (t / page_size, r.copied) {
                    (page, Some([_, copy])) if page == open => copy,
                    (page, _) if page < held.len() => held[page],
                    (page, _) => r.pages[page - held.len()],
                };
                writes.push(TokenWrite {
                    source: writes.len(),
                    page,
                    tail_page,
                    token: t % page_size,
                });
            }
        }
        Ok(writes)
    }

    fn commit(&mut self, r: Reservation) {
        if let Some([from, to]) = r.copied {
            let last = self.table.pages[r.sequence].len() - 1;
            self.table.pages[r.sequence][last] = to;
            self.pages.release(from);
        }
        self.table.pages[r.sequence].extend(r.pages);
        if r.tail.is_some() {
            self.table.tail_pages[r.sequence] = r.tail;
        }
        self.table.lens[r.sequence] += r.tokens;
    }

    /// Frees the pages of an append that failed, the last taken first, so that they are taken in the same order again.
    fn give_back(&mut self, r: Reservation) {
        let copy = r.copied.map(|[_, to]| to);
        let pages = r.pages.into_iter().rev().chain(r.tail).chain(copy);
        pages.for_each(|page| self.pages.release(page));
    }

    /// Makes `to` (empty) share `from`'s tokens; the open page is copied when either appends.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Parameter`] if `to` is not empty; [`Error::CacheFull`] if no page is left for a tail page.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.check_sequence(from)?;
        self.check_sequence(to)?;
        if from == to || self.table.lens[to] != 0 {
            return Err(Error::Parameter {
                what: "fork target",
                given: format!("sequence {to} of {} tokens", self.table.lens[to]),
                allowed: "another, empty sequence; free it first",
            });
        }
        if let Some(tail) = self.table.tail_pages[from] {
            let copy = self.pages.take()?;
            let access = CacheAccess(());
            let bytes = self.store.read_page(&access, tail);
            let copied = bytes.and_then(|bytes| self.store.write_page(&access, copy, &bytes));
            if copied.is_err() {
                self.pages.release(copy);
                return copied;
            }
            self.table.tail_pages[to] = Some(copy);
        }
        for &page in &self.table.pages[from] {
            self.pages.share(page);
        }
        self.table.pages[to] = self.table.pages[from].clone();
        self.table.lens[to] = self.table.lens[from];
        Ok(())
    }

    /// Empties a sequence and returns its pages.
    ///
    /// # Errors
    /// [`Error::Sequence`].
    pub fn free_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let pages = std::mem::take(&mut self.table.pages[sequence]);
        let tail = self.table.tail_pages[sequence].take();
        pages
            .into_iter()
            .chain(tail)
            .for_each(|page| self.pages.release(page));
        self.table.lens[sequence] = 0;
        Ok(())
    }

    /// A sequence's pages in order, unwritten bytes zeroed; last comes the tail page's K codes and scales while a page is open.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Device`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.check_sequence(sequence)?;
        let layout = self.layout;
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        let mut all = Vec::new();
        for (i, &page) in self.table.pages[sequence].iter().enumerate() {
            let tokens = page_size.min(len - i * page_size);
            let mut bytes = self.store.read_page(&CacheAccess(()), page)?;
            layout.canonical(
                &mut bytes,
                tokens,
                layout.has_tail_page() && tokens < page_size,
            )?;
            all.push(bytes);
        }
        if let (Some(tail), true) = (
            self.table.tail_pages[sequence],
            !len.is_multiple_of(page_size),
        ) {
            let bytes = self.store.read_page(&CacheAccess(()), tail)?;
            let tail_k = layout.tail_k();
            let mut kept = vec![0u8; tail_k.page_bytes()];
            for head in 0..layout.num_kv_heads() {
                let used = tail_k.k_params().end;
                let (from, to) = (head * layout.run_bytes(), head * tail_k.run_bytes());
                kept[to..to + used].copy_from_slice(&bytes[from..from + used]);
            }
            tail_k.canonical(&mut kept, len % page_size, false)?;
            all.push(kept);
        }
        Ok(all)
    }

    /// Fills an empty sequence with `tokens` tokens from pages as [`KvCache::read_back`] gives them, or [`convert::import`](crate::convert::import) makes them.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Parameter`] if the sequence is not empty; [`Error::Length`], [`Error::BadBytes`] for other than such pages;
    /// [`Error::CacheFull`]. Nothing is changed.
    pub fn restore(
        &mut self,
        sequence: usize,
        tokens: usize,
        pages: &[Vec<u8>],
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let layout = self.layout;
        if self.table.lens[sequence] != 0 {
            return Err(Error::Parameter {
                what: "restore target",
                given: format!(
                    "sequence {sequence} of {} tokens",
                    self.table.lens[sequence]
                ),
                allowed: "an empty sequence; free it first",
            });
        }
        layout.check_pages(pages, tokens)?;
        let needed = self.config.pages_for(tokens);
        self.pages.check_room(needed)?;
        let home = tokens.div_ceil(self.config.page_size);
        let taken = (0..needed)
            .map(|_| self.pages.take())
            .collect::<Result<Vec<u32>, _>>()?;
        let access = CacheAccess(());
        let mut write = || {
            for (page, bytes) in taken.iter().zip(&pages[..home]) {
                self.store.write_page(&access, *page, bytes)?;
            }
            if let (Some(tail), Some(bytes)) = (taken.get(home), pages.get(home)) {
                let (tail_k, mut padded) = (layout.tail_k(), vec![0; layout.page_bytes()]);
                for head in 0..layout.num_kv_heads() {
                    let used = tail_k.k_params().end;
                    let (from, to) = (head * tail_k.run_bytes(), head * layout.run_bytes());
                    padded[to..to + used].copy_from_slice(&bytes[from..from + used]);
                }
                self.store.write_page(&access, *tail, &padded)?;
            }
            Ok(())
        };
        let written = write();
        if written.is_err() {
            taken
                .into_iter()
                .rev()
                .for_each(|page| self.pages.release(page));
            return written;
        }
        self.table.tail_pages[sequence] = taken.get(home).copied();
        self.table.pages[sequence] = taken[..home].to_vec();
        self.table.lens[sequence] = tokens;
        Ok(())
    }

    /// Writes one page's bytes as they are, for restoring an offloaded page or to overwrite a page in tests.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a page outside the pool, [`Error::Length`] for other than one page.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        if page as usize >= self.config.num_pages {
            return Err(Error::Parameter {
                what: "page",
                given: page.to_string(),
                allowed: "a page of the pool",
            });
        }
        let needed = self.layout.page_bytes();
        if bytes.len() != needed {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes.len(),
                needed,
            });
        }
        self.store.write_page(&CacheAccess(()), page, bytes)
    }
}
