//! Who owns which page: the page table over a shared pool, and the cache's lifecycle.
//!
//! [`KvCache`] keeps the host's books (lengths, pages, sharing) and checks every call; a backend's [`PageStore`] keeps the
//! bytes where the backend is. A refused call changes neither.

use std::any::Any;

use crate::{
    error::{Error, refuse},
    format::KvFormat,
    layout::PageLayout,
    problem::check_head_dim,
    view::check_tensor_scales,
};

/// A cache to create.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheConfig {
    /// What is stored.
    pub format: KvFormat,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page: 16, 32, 64 or 128.
    pub page_size: usize,
    /// Pages in the pool.
    pub num_pages: usize,
    /// Sequences, all empty at first.
    pub num_sequences: usize,
    /// Static K scale per KV head, for fp8 and int8-tensor.
    pub k_tensor_scales: Vec<f32>,
    /// Static V scale per KV head, likewise.
    pub v_tensor_scales: Vec<f32>,
}

impl CacheConfig {
    /// Pages of 64 tokens, enough for `num_sequences` of `max_kv_len` tokens, tensor scales 1.
    pub fn new(
        format: KvFormat,
        num_kv_heads: usize,
        head_dim: usize,
        num_sequences: usize,
        max_kv_len: usize,
    ) -> Self {
        let page_size = 64;
        let scales = |has: bool| {
            if has {
                vec![1.0; num_kv_heads]
            } else {
                Vec::new()
            }
        };
        let mut config = CacheConfig {
            format,
            num_kv_heads,
            head_dim,
            page_size,
            num_pages: 0,
            num_sequences,
            k_tensor_scales: scales(format.k.has_tensor_scale()),
            v_tensor_scales: scales(format.v.has_tensor_scale()),
        };
        config.num_pages = num_sequences * config.pages_for(max_kv_len);
        config
    }

    /// Pages that one sequence of `kv_len` tokens takes, tail page included.
    pub fn pages_for(&self, kv_len: usize) -> usize {
        kv_len.div_ceil(self.page_size) + usize::from(self.layout().has_tail_page() && kv_len > 0)
    }

    /// The page's layout.
    pub fn layout(&self) -> PageLayout {
        PageLayout {
            format: self.format,
            head_dim: self.head_dim,
            page_size: self.page_size,
            num_kv_heads: self.num_kv_heads,
        }
    }

    /// Refuses what no pool can hold.
    ///
    /// # Errors
    /// [`Error::Parameter`], [`Error::Length`].
    pub fn check(&self) -> Result<(), Error> {
        check_head_dim(self.head_dim)?;
        if ![16, 32, 64, 128].contains(&self.page_size) {
            return refuse("page_size", self.page_size, "16, 32, 64, 128");
        }
        if !(1..=65536).contains(&self.num_kv_heads) {
            return refuse("num_kv_heads", self.num_kv_heads, "1 to 65536");
        }
        if self.num_pages > u32::MAX as usize {
            return refuse("num_pages", self.num_pages, "at most 2^32 - 1");
        }
        self.format.check(self.head_dim, self.page_size)?;
        check_tensor_scales(self.format.k, &self.k_tensor_scales, self.num_kv_heads)?;
        check_tensor_scales(self.format.v, &self.v_tensor_scales, self.num_kv_heads)
    }
}

/// Where one token goes, decided and checked by [`KvCache::append`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenWrite {
    /// The token's index in the call's K and V.
    pub source: usize,
    /// Its home page.
    pub page: u32,
    /// The tail page that holds its K while the page is open, for `Int4 Channel`.
    pub tail_page: Option<u32>,
    /// Its index inside the page.
    pub token: usize,
}

impl TokenWrite {
    /// Whether this token fills its page, which is then sealed.
    pub fn fills(&self, page_size: usize) -> bool {
        self.token + 1 == page_size
    }
}

/// A backend's pool of pages. Arguments are checked by [`KvCache`].
pub trait PageStore: Send + Sync {
    /// Quantizes and writes tokens in order, sealing pages as they fill; `k`, `v` are `[tokens, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn append(&mut self, writes: &[TokenWrite], k: &[f32], v: &[f32]) -> Result<(), Error>;
    /// The bytes of one page.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn read_page(&self, page: u32) -> Result<Vec<u8>, Error>;
    /// Replaces the bytes of one page.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), Error>;
    /// For the backend to find its own type again.
    fn as_any(&self) -> &dyn Any;
    /// Likewise, to write.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Which pages hold which sequence; pages may be shared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageTable {
    /// Home pages of each sequence, in token order.
    pub pages: Vec<Vec<u32>>,
    /// Tail page of each sequence, for `Int4 Channel`.
    pub tail_pages: Vec<Option<u32>>,
    /// Cached tokens of each sequence.
    pub lens: Vec<usize>,
}

/// A paged, quantized cache on one backend.
pub struct KvCache {
    config: CacheConfig,
    table: PageTable,
    free: Vec<u32>,
    owners: Vec<u32>,
    store: Box<dyn PageStore>,
}

impl KvCache {
    /// Puts the books on a backend's store; backends call this from `create_cache`.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`].
    pub fn new(config: CacheConfig, store: Box<dyn PageStore>) -> Result<Self, Error> {
        config.check()?;
        let n = config.num_sequences;
        Ok(KvCache {
            table: PageTable {
                pages: vec![Vec::new(); n],
                tail_pages: vec![None; n],
                lens: vec![0; n],
            },
            free: (0..config.num_pages as u32).rev().collect(),
            owners: vec![0; config.num_pages],
            config,
            store,
        })
    }

    /// What was asked for.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Pages and lengths.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The backend's bytes.
    pub fn store(&self) -> &dyn PageStore {
        &*self.store
    }

    /// Pages not owned by any sequence.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Puts the free pages in the given order of allocation, so that tests can place pages at will.
    ///
    /// # Errors
    /// [`Error::Parameter`] if `order` is not a permutation of the free pages.
    pub fn order_free_pages(&mut self, order: &[u32]) -> Result<(), Error> {
        let (mut have, mut want) = (self.free.clone(), order.to_vec());
        have.sort_unstable();
        want.sort_unstable();
        if have != want {
            return Err(Error::Parameter {
                what: "order of free pages",
                given: format!("{} pages", order.len()),
                allowed: "a permutation of the free pages",
            });
        }
        self.free = order.iter().rev().copied().collect();
        Ok(())
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

    fn take_page(&mut self) -> u32 {
        let page = self
            .free
            .pop()
            .expect("the caller compared the need with the free list");
        self.owners[page as usize] = 1;
        page
    }

    fn drop_page(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        *owners -= 1;
        if *owners == 0 {
            self.free.push(page);
        }
    }

    /// Appends tokens to one sequence: `k` and `v` are `[tokens, num_kv_heads, head_dim]`.
    ///
    /// Pages are sealed as they fill. The bytes do not depend on how many tokens come at once.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Length`], [`Error::NotFinite`], [`Error::CacheFull`]: nothing is changed.
    pub fn append(&mut self, sequence: usize, k: &[f32], v: &[f32]) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let row = self.config.num_kv_heads * self.config.head_dim;
        if !k.len().is_multiple_of(row) {
            return Err(Error::Length {
                what: "k",
                given: k.len(),
                needed: k.len().next_multiple_of(row),
            });
        }
        if v.len() != k.len() {
            return Err(Error::Length {
                what: "v",
                given: v.len(),
                needed: k.len(),
            });
        }
        check_finite("k", k)?;
        check_finite("v", v)?;
        self.append_with(&[(sequence, k.len() / row)], |store, writes| {
            store.append(writes, k, v)
        })
    }

    /// Appends tokens that the backend has already: `write` is told where each goes, and writes or records that.
    ///
    /// `appends` is sequences, each once, and how many tokens each gets; sources count through all of them in this order.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Parameter`] for a sequence named twice, [`Error::CacheFull`]: nothing is changed; those of `write`.
    pub fn append_with(
        &mut self,
        appends: &[(usize, usize)],
        write: impl FnOnce(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check_appends(appends)?;
        let appends = appends.iter().filter(|(_, tokens)| *tokens > 0);
        let mut writes = Vec::new();
        for &(sequence, tokens) in appends.clone() {
            self.take_pages(sequence, tokens, &mut writes)?;
        }
        if writes.is_empty() {
            return Ok(());
        }
        write(&mut *self.store, &writes)?;
        for &(sequence, tokens) in appends {
            self.table.lens[sequence] += tokens;
        }
        Ok(())
    }

    /// The open page that an append to `sequence` would have to copy, as others share it.
    fn shared_open_page(&self, sequence: usize) -> Option<u32> {
        let open = !self.table.lens[sequence].is_multiple_of(self.config.page_size);
        let page = self.table.pages[sequence].last().copied().filter(|_| open);
        page.filter(|&page| self.owners[page as usize] > 1)
    }

    fn check_appends(&self, appends: &[(usize, usize)]) -> Result<(), Error> {
        let has_tail = self.config.layout().has_tail_page();
        let mut needed = 0;
        for (i, &(sequence, tokens)) in appends.iter().enumerate() {
            self.check_sequence(sequence)?;
            if appends[..i].iter().any(|(other, _)| *other == sequence) {
                return Err(Error::Parameter {
                    what: "sequence to append to",
                    given: format!("{sequence}, twice"),
                    allowed: "each sequence once per call",
                });
            }
            if tokens == 0 {
                continue;
            }
            let pages = (self.table.lens[sequence] + tokens).div_ceil(self.config.page_size);
            needed += pages.saturating_sub(self.table.pages[sequence].len())
                + usize::from(self.shared_open_page(sequence).is_some())
                + usize::from(has_tail && self.table.tail_pages[sequence].is_none());
        }
        if needed > self.free.len() {
            return Err(Error::CacheFull {
                needed,
                free: self.free.len(),
                total: self.config.num_pages,
            });
        }
        Ok(())
    }

    /// Gives `sequence` the pages of `tokens` more tokens, and says where each goes.
    fn take_pages(
        &mut self,
        sequence: usize,
        tokens: usize,
        writes: &mut Vec<TokenWrite>,
    ) -> Result<(), Error> {
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        if let Some(page) = self.shared_open_page(sequence) {
            let copy = self.take_page();
            let bytes = self.store.read_page(page)?;
            self.store.write_page(copy, &bytes)?;
            self.drop_page(page);
            *self.table.pages[sequence]
                .last_mut()
                .expect("an open page is the last") = copy;
        }
        if self.config.layout().has_tail_page() && self.table.tail_pages[sequence].is_none() {
            self.table.tail_pages[sequence] = Some(self.take_page());
        }
        while self.table.pages[sequence].len() < (len + tokens).div_ceil(page_size) {
            let page = self.take_page();
            self.table.pages[sequence].push(page);
        }
        let first = writes.len();
        writes.extend((0..tokens).map(|i| TokenWrite {
            source: first + i,
            page: self.table.pages[sequence][(len + i) / page_size],
            tail_page: self.table.tail_pages[sequence],
            token: (len + i) % page_size,
        }));
        Ok(())
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
            if self.free.is_empty() {
                return Err(Error::CacheFull {
                    needed: 1,
                    free: 0,
                    total: self.config.num_pages,
                });
            }
            let bytes = self.store.read_page(tail)?;
            let copy = self.take_page();
            self.store.write_page(copy, &bytes)?;
            self.table.tail_pages[to] = Some(copy);
        }
        for &page in &self.table.pages[from] {
            self.owners[page as usize] += 1;
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
            .for_each(|page| self.drop_page(page));
        self.table.lens[sequence] = 0;
        Ok(())
    }

    /// A sequence's pages in order, unwritten bytes zeroed; last comes the tail page's K codes and scales while a page is open.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Device`].
    pub fn read_back(&self, sequence: usize) -> Result<Vec<Vec<u8>>, Error> {
        self.check_sequence(sequence)?;
        let layout = self.config.layout();
        let (len, page_size) = (self.table.lens[sequence], self.config.page_size);
        let mut all = Vec::new();
        for (i, &page) in self.table.pages[sequence].iter().enumerate() {
            let tokens = page_size.min(len - i * page_size);
            let mut bytes = self.store.read_page(page)?;
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
            let bytes = self.store.read_page(tail)?;
            let tail_k = layout.tail_k();
            let mut kept = vec![0u8; tail_k.page_bytes()];
            for head in 0..layout.num_kv_heads {
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
        let layout = self.config.layout();
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
        if needed > self.free.len() {
            return Err(Error::CacheFull {
                needed,
                free: self.free.len(),
                total: self.config.num_pages,
            });
        }
        let home = tokens.div_ceil(self.config.page_size);
        let taken: Vec<u32> = (0..needed).map(|_| self.take_page()).collect();
        let mut write = || {
            for (page, bytes) in taken.iter().zip(&pages[..home]) {
                self.store.write_page(*page, bytes)?;
            }
            if let (Some(tail), Some(bytes)) = (taken.get(home), pages.get(home)) {
                let (tail_k, mut padded) = (layout.tail_k(), vec![0; layout.page_bytes()]);
                for head in 0..layout.num_kv_heads {
                    let used = tail_k.k_params().end;
                    let (from, to) = (head * tail_k.run_bytes(), head * layout.run_bytes());
                    padded[to..to + used].copy_from_slice(&bytes[from..from + used]);
                }
                self.store.write_page(*tail, &padded)?;
            }
            Ok(())
        };
        let written = write();
        if written.is_err() {
            taken.into_iter().for_each(|page| self.drop_page(page));
            return written;
        }
        self.table.tail_pages[sequence] = taken.get(home).copied();
        self.table.pages[sequence] = taken[..home].to_vec();
        self.table.lens[sequence] = tokens;
        Ok(())
    }

    /// Writes one page's bytes as they are, for restoring an offloaded page or poisoning a test's.
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
        let needed = self.config.layout().page_bytes();
        if bytes.len() != needed {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes.len(),
                needed,
            });
        }
        self.store.write_page(page, bytes)
    }
}

/// Refuses NaN and infinity.
pub(crate) fn check_finite(what: &'static str, x: &[f32]) -> Result<(), Error> {
    match x.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(Error::NotFinite {
            what,
            index,
            value: x[index],
        }),
        None => Ok(()),
    }
}
