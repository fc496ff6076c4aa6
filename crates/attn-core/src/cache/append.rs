//! Appends to a cache of one layer, and the room that appends take.

use std::ops::Range;

use super::{CacheAccess, KvCache, PageStore, TokenWrite};
use crate::{
    error::Error,
    events,
    rows::Rows,
    wide_rows::{Widened, check_values},
};

/// The number of tokens that a sequence gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// The sequence.
    pub sequence: usize,
    /// The number of tokens.
    pub tokens: usize,
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

impl KvCache {
    /// Appends tokens to one sequence: `k` and `v` are `[tokens, num_kv_heads, head_dim]` in f32, f16 or bf16, side by side
    /// or at strides ([`Rows::strided`]).
    ///
    /// The bytes do not depend on how many tokens come at once. Residual pages that the sequence no longer keeps are freed when the tokens are
    /// written; if the pool has too few other pages, they take the new tokens instead. Of formats with a window, up to
    /// [`CacheConfig::max_q_len`](crate::CacheConfig::max_q_len) of the new tokens can be queries until the sequence's next append.
    ///
    /// A cache of several layers takes a step's tokens by [`KvCache::reserve`] and [`KvCache::write`], of which this is both.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Length`], or [`Error::Shape`] for strided rows; [`Error::NotFinite`], [`Error::Magnitude`], [`Error::CacheFull`];
    /// [`Error::SeveralLayers`]; [`Error::Step`] while a step is open; [`Error::Device`] if the device fails. Lengths and pages are
    /// unchanged then.
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
    /// Those of [`KvCache::append`], and [`Error::Repeated`] for a sequence named twice.
    pub fn append_batch<'a>(
        &mut self,
        appends: &[Append],
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        let tokens = appends
            .iter()
            .fold(0usize, |n, a| n.saturating_add(a.tokens));
        let [k, v] = self.checked_rows(tokens, k.into(), v.into())?;
        self.append_tokens(appends, |store, writes| {
            store.append(&CacheAccess::here()?, 0, writes, k.rows(), v.rows())
        })
    }

    /// K and V of so many tokens, in f32, of values that the format takes.
    pub(super) fn checked_rows<'a>(
        &self,
        tokens: usize,
        k: Rows<'a>,
        v: Rows<'a>,
    ) -> Result<[Widened<'a>; 2], Error> {
        let needed = [tokens, self.config.num_kv_heads, self.config.head_dim];
        let (in_k, in_v) = (k.check("k", needed)?, v.check("v", needed)?);
        let (k, v) = (k.widened(in_k, "K in f32")?, v.widened(in_v, "V in f32")?);
        check_values("k", k.rows(), self.config.format.k)?;
        check_values("v", v.rows(), self.config.format.v)?;
        Ok([k, v])
    }

    /// Free pages that an append of these takes: it has room where [`KvCache::free_pages`] is at least that.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Repeated`].
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
    /// [`Error::Sequence`], [`Error::Repeated`], [`Error::SeveralLayers`], [`Error::CacheFull`],
    /// [`Error::Step`]; those of `write`. Lengths and pages are unchanged then.
    pub fn append_with(
        &mut self,
        appends: &[Append],
        write: impl FnOnce(&dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.append_tokens(appends, |store, writes| write(store, writes))
    }

    /// Reserves pages and writes, or changes nothing.
    fn append_tokens(
        &mut self,
        appends: &[Append],
        write: impl FnOnce(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.config.layers != 1 {
            return Err(Error::SeveralLayers {
                what: "an append",
                layers: self.config.layers,
                next: "`reserve` the step's tokens and `write` each layer",
            });
        }
        self.check_no_step("an append")?;
        let (total, recyclable) = self.check_appends(appends)?;
        if total == 0 {
            return Ok(());
        }
        let _step = events::append(appends.len(), total);
        self.open_step_of(appends, total, recyclable)?;
        let written = self.write_layer(0, write);
        if written.is_err() {
            // Only a device that fails twice loses the recycled pages' bytes; the first failure is the one to report.
            let _ = self.restore_recycled();
            self.roll_back();
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
    pub(super) fn new_pages(&self, sequence: usize, tokens: usize) -> usize {
        let len = self.table.lens[sequence].saturating_add(tokens);
        len.div_ceil(self.config.page_size)
            .saturating_sub(self.table.pages[sequence].len())
    }

    /// Indices of the home pages whose residuals a sequence keeps once it has `tokens` more; it lacks those past its last page.
    pub(super) fn residual_indices(&self, sequence: usize, tokens: usize) -> Range<usize> {
        let len = self.table.lens[sequence].saturating_add(tokens);
        let page_size = self.config.page_size;
        let end = len.div_ceil(page_size);
        let q_len = tokens.min(self.config.max_q_len);
        let kept = self.config.format.residual_pages(page_size, len, q_len);
        end - kept..end
    }

    /// Number of residual pages that a sequence lacks for `tokens` more.
    pub(super) fn new_residual_pages(&self, sequence: usize, tokens: usize) -> usize {
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
    pub(super) fn pages_to_copy(
        &self,
        sequence: usize,
        tokens: usize,
    ) -> impl Iterator<Item = u32> {
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
            return Err(Error::Repeated { sequence: pair[0] });
        }
        Ok(room)
    }

    /// Refuses appends that the pool has no room for; returns their tokens in total, and residual pages to recycle, as many as the pool lacks.
    pub(super) fn check_appends(&self, appends: &[Append]) -> Result<(usize, Vec<u32>), Error> {
        let Room {
            tokens,
            needed,
            mut dropped,
        } = self.room_for(appends)?;
        dropped.truncate(needed.saturating_sub(self.pages.num_free()));
        self.pages.check_room(needed - dropped.len())?;
        Ok((tokens, dropped))
    }
}
