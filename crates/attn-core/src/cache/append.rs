//! Appends: pages are reserved, the backend writes the tokens, and only then do pages and lengths enter the table.

use std::ops::Range;

use super::{CacheAccess, KvCache, PageStore, TokenWrite};
use crate::{error::Error, events, rows::Rows, wide_rows::check_values};

/// The number of tokens that a sequence gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// The sequence.
    pub sequence: usize,
    /// The number of tokens.
    pub tokens: usize,
}

/// The pages that an append adds to a sequence; the table changes only when the tokens are written.
struct Reservation {
    sequence: usize,
    tokens: usize,
    /// The shared open page and its copy; the same of its residual page.
    copied: Vec<[u32; 2]>,
    pages: Vec<u32>,
    residual_pages: Vec<u32>,
}

/// What the appends of one call take.
#[derive(Default)]
struct Room {
    tokens: usize,
    /// Pages, copies and residual pages included.
    needed: usize,
    /// Residual pages that the sequences drop, which can serve as new pages.
    dropped: Vec<u32>,
}

/// Old residual pages of the sequences of one call that serve as new pages, because the pool has no others; a failed call gives the bytes back.
#[derive(Default)]
struct Recycled {
    /// Pages to be recycled, the last one first.
    candidates: Vec<u32>,
    /// Those that were, and what they held.
    held: Vec<(u32, Vec<u8>)>,
}

impl KvCache {
    /// Appends tokens to one sequence: `k` and `v` are `[tokens, num_kv_heads, head_dim]` in f32, f16 or bf16, side by side
    /// or at strides ([`Rows::strided`]).
    ///
    /// The bytes do not depend on how many tokens come at once. Residual pages that the sequence no longer keeps are freed when the tokens are
    /// written; if the pool has too few other pages, they take the new tokens instead. Of formats with a window, up to
    /// [`CacheConfig::max_q_len`](crate::CacheConfig::max_q_len) of the new tokens can be queries until the sequence's next append.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Length`], or [`Error::Shape`] for strided rows; [`Error::NotFinite`], [`Error::Magnitude`], [`Error::CacheFull`]; [`Error::Device`] if the
    /// device fails. Lengths and pages are unchanged then.
    pub fn append<'a>(
        &mut self,
        sequence: usize,
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let (k, v) = (k.into(), v.into());
        let tokens = k.tokens("k", [self.config.num_kv_heads, self.config.head_dim])?;
        self.append_batch(&[Append { sequence, tokens }], k, v)
    }

    /// Appends tokens to several sequences at once, or to none if anything is refused or fails.
    ///
    /// `appends` names each sequence once; `k` and `v` hold the tokens of all of them in this order, `[tokens, num_kv_heads, head_dim]` in
    /// f32, f16 or bf16, side by side or at strides. The bytes are those of one append after the other.
    ///
    /// # Errors
    /// Those of [`KvCache::append`], and [`Error::Parameter`] for a sequence named twice.
    pub fn append_batch<'a>(
        &mut self,
        appends: &[Append],
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        let (k, v) = (k.into(), v.into());
        let tokens = appends
            .iter()
            .fold(0usize, |n, a| n.saturating_add(a.tokens));
        let needed = [tokens, self.config.num_kv_heads, self.config.head_dim];
        let (in_k, in_v) = (k.check("k", needed)?, v.check("v", needed)?);
        let (k, v) = (k.widened(in_k, "K in f32")?, v.widened(in_v, "V in f32")?);
        check_values("k", k.rows(), self.config.format.k)?;
        check_values("v", v.rows(), self.config.format.v)?;
        self.write_tokens(appends, |store, writes| {
            store.append(&CacheAccess(()), writes, k.rows(), v.rows())
        })
    }

    /// Free pages that an append of these takes: it has room where [`KvCache::free_pages`] is at least that.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Parameter`] for a sequence named twice.
    pub fn pages_needed(&self, appends: &[Append]) -> Result<usize, Error> {
        let room = self.room_for(appends)?;
        Ok(room.needed.saturating_sub(room.dropped.len()))
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
        let (total, candidates) = self.check_appends(appends)?;
        if total == 0 {
            return Ok(());
        }
        let _step = events::append(appends.len(), total);
        let mut recycled = Recycled {
            candidates,
            held: Vec::new(),
        };
        let mut reserved = Vec::with_capacity(appends.len());
        let mut written = self.reserve(appends, &mut reserved, &mut recycled);
        if written.is_ok() {
            written = self
                .writes(&reserved, total)
                .and_then(|writes| write(&mut *self.store, &writes));
        }
        match written {
            Ok(()) => reserved.into_iter().for_each(|r| self.commit(r)),
            Err(_) => {
                reserved.into_iter().rev().for_each(|r| self.give_back(r));
                for (page, bytes) in recycled.held {
                    // Only a device that fails twice loses them; the first failure is the one to report.
                    let _ = self.store.write_page(&CacheAccess(()), page, &bytes);
                }
            }
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

    /// Indices of the home pages whose residuals a sequence keeps once it has `tokens` more; it lacks those past its last page.
    fn residual_indices(&self, sequence: usize, tokens: usize) -> Range<usize> {
        let len = self.table.lens[sequence].saturating_add(tokens);
        let page_size = self.config.page_size;
        let end = len.div_ceil(page_size);
        let q_len = tokens.min(self.config.max_q_len);
        let kept = self.config.format.residual_pages(page_size, len, q_len);
        end - kept..end
    }

    /// Number of residual pages that a sequence lacks for `tokens` more.
    fn new_residual_pages(&self, sequence: usize, tokens: usize) -> usize {
        let kept = self.residual_indices(sequence, tokens);
        let held = self.table.pages[sequence].len();
        kept.end - held.clamp(kept.start, kept.end)
    }

    /// The residual pages that a sequence drops with `tokens` more; they are freed when the tokens are written.
    fn dropped_residual_pages(&self, sequence: usize, tokens: usize) -> &[u32] {
        let held = &self.table.residual_pages[sequence];
        let first = self.table.pages[sequence].len() - held.len();
        let start = self.residual_indices(sequence, tokens).start;
        &held[..start.saturating_sub(first).min(held.len())]
    }

    /// The pages that an append has to copy because other sequences share them: the open page, and its residual page if it is kept.
    fn pages_to_copy(&self, sequence: usize, tokens: usize) -> impl Iterator<Item = u32> {
        let residuals = &self.table.residual_pages[sequence];
        let is_kept = self.dropped_residual_pages(sequence, tokens).len() < residuals.len();
        let residual = residuals.last().copied().filter(|_| is_kept);
        let home = self.shared_open_page(sequence);
        home.into_iter().chain(residual.filter(|_| home.is_some()))
    }

    /// What appends take, by the table; refuses those to missing or repeated sequences.
    fn room_for(&self, appends: &[Append]) -> Result<Room, Error> {
        let mut room = Room::default();
        let mut sequences = Vec::with_capacity(appends.len());
        for &Append { sequence, tokens } in appends {
            self.check_sequence(sequence)?;
            sequences.push(sequence);
            if tokens == 0 {
                continue;
            }
            let pages = self.new_pages(sequence, tokens)
                + self.new_residual_pages(sequence, tokens)
                + self.pages_to_copy(sequence, tokens).count();
            room.needed = room.needed.saturating_add(pages);
            room.tokens = room.tokens.saturating_add(tokens);
            let own = self.dropped_residual_pages(sequence, tokens).iter();
            let own = own.filter(|page| !self.pages.is_shared(**page));
            room.dropped.extend(own);
        }
        sequences.sort_unstable();
        if let Some(pair) = sequences.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Parameter {
                what: "sequence to append to",
                given: format!("{}, twice", pair[0]),
                allowed: "each sequence once per call",
            });
        }
        Ok(room)
    }

    /// Refuses appends that the pool has no room for; returns their tokens in total, and residual pages to recycle, as many as the pool lacks.
    fn check_appends(&self, appends: &[Append]) -> Result<(usize, Vec<u32>), Error> {
        let Room {
            tokens,
            needed,
            mut dropped,
        } = self.room_for(appends)?;
        dropped.truncate(needed.saturating_sub(self.pages.num_free()));
        self.pages.check_room(needed - dropped.len())?;
        Ok((tokens, dropped))
    }

    /// Takes a free page, or recycles one where there is none.
    fn take(&mut self, recycled: &mut Recycled) -> Result<u32, Error> {
        if self.pages.num_free() > 0 {
            return self.pages.take();
        }
        let Some(page) = recycled.candidates.pop() else {
            return self.pages.take();
        };
        let bytes = self.store.read_page(&CacheAccess(()), page)?;
        recycled.held.push((page, bytes));
        // Its two owners are its old place, until the append is over, and its new one.
        self.pages.share(page);
        Ok(page)
    }

    /// Takes the pages that the appends need, and copies the open pages that others share.
    fn reserve(
        &mut self,
        appends: &[Append],
        reserved: &mut Vec<Reservation>,
        recycled: &mut Recycled,
    ) -> Result<(), Error> {
        for &Append { sequence, tokens } in appends.iter().filter(|a| a.tokens > 0) {
            let shared: Vec<u32> = self.pages_to_copy(sequence, tokens).collect();
            reserved.push(Reservation {
                sequence,
                tokens,
                copied: Vec::new(),
                pages: Vec::new(),
                residual_pages: Vec::new(),
            });
            let at = reserved.len() - 1;
            for from in shared {
                let to = self.take(recycled)?;
                reserved[at].copied.push([from, to]);
                let bytes = self.store.read_page(&CacheAccess(()), from)?;
                self.store.write_page(&CacheAccess(()), to, &bytes)?;
            }
            for _ in 0..self.new_pages(sequence, tokens) {
                let page = self.take(recycled)?;
                reserved[at].pages.push(page);
            }
            for _ in 0..self.new_residual_pages(sequence, tokens) {
                let page = self.take(recycled)?;
                reserved[at].residual_pages.push(page);
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
            let len = self.table.lens[r.sequence];
            let places = Places::new(self, r);
            for t in len..len + r.tokens {
                let (page, residual_page) = places.of(t / page_size);
                writes.push(TokenWrite {
                    source: writes.len(),
                    page,
                    residual_page,
                    token: t % page_size,
                });
            }
        }
        Ok(writes)
    }

    fn commit(&mut self, r: Reservation) {
        let kept = self.residual_indices(r.sequence, r.tokens).len();
        for &[from, to] in &r.copied {
            let (pages, residuals) = (
                &mut self.table.pages[r.sequence],
                &mut self.table.residual_pages[r.sequence],
            );
            let places = pages.iter_mut().chain(residuals);
            places
                .filter(|page| **page == from)
                .for_each(|page| *page = to);
            self.pages.release(from);
        }
        self.table.pages[r.sequence].extend(r.pages);
        let residuals = &mut self.table.residual_pages[r.sequence];
        residuals.extend(r.residual_pages);
        // Of a sequence that was truncated, fewer are held than a longer run would keep.
        let old = residuals.len().saturating_sub(kept);
        for page in residuals.drain(..old) {
            self.pages.release(page);
        }
        self.table.lens[r.sequence] += r.tokens;
    }

    /// Frees the pages of an append that failed, the last taken first, so that they are taken in the same order again.
    fn give_back(&mut self, r: Reservation) {
        let copies = r.copied.into_iter().map(|[_, to]| to);
        let taken: Vec<u32> = copies.chain(r.pages).chain(r.residual_pages).collect();
        let pages = taken.into_iter().rev();
        pages.for_each(|page| self.pages.release(page));
    }
}

/// The home page and the residual page of each of a sequence's page indices from its open page on, with those that an append reserved.
struct Places<'a> {
    cache: &'a KvCache,
    reserved: &'a Reservation,
    /// Indices whose residuals are kept.
    kept: Range<usize>,
}

impl<'a> Places<'a> {
    fn new(cache: &'a KvCache, reserved: &'a Reservation) -> Self {
        Places {
            cache,
            reserved,
            kept: cache.residual_indices(reserved.sequence, reserved.tokens),
        }
    }

    fn copied(&self, page: u32) -> u32 {
        let copy = self.reserved.copied.iter().find(|[from, _]| *from == page);
        copy.map_or(page, |[_, to]| *to)
    }

    /// The pages that take the tokens of page index `i`.
    fn of(&self, i: usize) -> (u32, Option<u32>) {
        let (table, r) = (&self.cache.table, self.reserved);
        let (held, residuals) = (&table.pages[r.sequence], &table.residual_pages[r.sequence]);
        let page = match held.get(i) {
            Some(page) => self.copied(*page),
            None => r.pages[i - held.len()],
        };
        if !self.kept.contains(&i) {
            return (page, None);
        }
        // Held residual pages are those of the last held pages; new ones begin past them, or where the kept ones do.
        let residual = if i < held.len() {
            self.copied(residuals[residuals.len() - (held.len() - i)])
        } else {
            r.residual_pages[i - self.kept.start.max(held.len())]
        };
        (page, Some(residual))
    }
}
