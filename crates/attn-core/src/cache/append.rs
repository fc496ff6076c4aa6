//! Appends to a cache of one layer, and the room that appends take.

use std::ops::Range;

use super::{CacheAccess, CheckpointPage, KvCache, PageStore, TokenWrite};
use crate::{
    error::Error,
    events,
    format::KvFormat,
    problem::MAX_TOKENS,
    row_layout::Layout,
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

impl Append {
    /// The tokens of all appends, saturating.
    #[must_use]
    pub fn total(appends: &[Append]) -> usize {
        let tokens = appends.iter().map(|append| append.tokens);
        tokens.fold(0, usize::saturating_add)
    }
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

/// Appends that the cache has room for, to sequences that exist, are named once and stay within the limit.
pub(crate) struct Admitted<'a> {
    pub appends: &'a [Append],
    /// All tokens.
    pub tokens: usize,
    /// Residual pages to recycle, as many as the pool lacks.
    pub recyclable: Vec<u32>,
}

/// K and V of the shape that a call needs, and where their rows lie. No row has been looked at: there may be any number, as at strides of 0.
pub(super) type ShapedRows<'a> = [(Rows<'a>, Layout); 2];

impl KvCache {
    /// Appends tokens to one sequence: `k` and `v` are `[tokens, num_kv_heads, head_dim]` in f32, f16 or bf16, side by side
    /// or at strides ([`Rows::strided`]). Of latents ([`KvFormat::latents`]) `v` is of no tokens: `&[]`, or [`Rows::no_tokens`] of a device's.
    ///
    /// The bytes do not depend on how many tokens come at once. Residual pages that the sequence no longer keeps are freed when the tokens are
    /// written; if the pool has too few other pages, they take the new tokens instead. Of formats with a window, up to
    /// [`CacheConfig::max_q_len`](crate::CacheConfig::max_q_len) of the new tokens can be queries until the sequence's next append.
    ///
    /// A cache of several layers takes a step's tokens by [`KvCache::reserve`] and [`KvCache::write`], of which this is both.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Length`], or [`Error::Shape`] for strided rows; [`Error::CacheFull`]; [`Error::TooLong`] for more than
    /// [`MAX_TOKENS`] tokens of a sequence; [`Error::NotFinite`], [`Error::Magnitude`]; [`Error::SeveralLayers`];
    /// [`Error::Step`] while a step is open; [`Error::Device`] if the device fails. Values are looked at last, in rows that there is room for. Lengths,
    /// pages and bytes are unchanged then.
    ///
    /// [`Error::StepLeftOpen`] if the device fails twice: the tokens are then those of an open step, as after [`KvCache::reserve`].
    pub fn append<'a>(
        &mut self,
        sequence: usize,
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        let (k, v) = (k.into(), v.into());
        let tokens = k.tokens("k", [self.config.num_kv_heads, self.config.head_dim.k])?;
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
        let rows = self.shaped_rows(Append::total(appends), k.into(), v.into())?;
        let admitted = self.admit_append(appends)?;
        let ([k, v], saturated) = self.checked_values(0, rows)?;
        self.append_admitted(admitted, Some(saturated), |store, writes| {
            store.append(&CacheAccess::here()?, 0, writes, k.rows(), v.rows())
        })?;
        // The tokens are there: a device that fails to give them back says so at the next call that needs it.
        let _ = self.look_at_keys(0);
        Ok(())
    }

    /// K and V of so many tokens.
    pub(super) fn shaped_rows<'a>(
        &self,
        tokens: usize,
        k: Rows<'a>,
        v: Rows<'a>,
    ) -> Result<ShapedRows<'a>, Error> {
        self.config.format.check_appended_v(v.len())?;
        let [of_k, of_v] = self.layout.shapes(tokens);
        let (in_k, in_v) = (k.check_host("k", of_k)?, v.check_host("v", of_v)?);
        Ok([(k, in_k), (v, in_v)])
    }

    /// K and V of a layer in f32, of values that the format takes, and how many of these saturate.
    pub(super) fn checked_values<'a>(
        &self,
        layer: usize,
        [(k, in_k), (v, in_v)]: ShapedRows<'a>,
    ) -> Result<([Widened<'a>; 2], u64), Error> {
        let (k, v) = (k.widened(in_k, "K in f32")?, v.widened(in_v, "V in f32")?);
        let KvFormat {
            k: of_k, v: of_v, ..
        } = self.config.format;
        let [k_scales, v_scales] = self.config.tensor_scales(layer);
        let saturated = check_values("k", k.rows(), of_k, k_scales)?
            + check_values("v", v.rows(), of_v, v_scales)?;
        Ok(([k, v], saturated))
    }

    /// Free pages that an append of these takes: it has room where [`KvCache::free_pages`] is at least that.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Repeated`], [`Error::TooLong`].
    pub fn pages_needed(&self, appends: &[Append]) -> Result<usize, Error> {
        let room = self.room_for(appends)?;
        Ok(room.needed.saturating_sub(room.dropped.len()))
    }

    /// Appends tokens that lie in the backend's memory already: `write` gets the backend's store and each token's destination, and writes the
    /// tokens or records the writes. It is called once, or for a cache with centres of K as often as [`PageStore::append`] asks for.
    ///
    /// `appends` names each sequence once; [`TokenWrite::source`] counts through all of them in this order.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::Repeated`], [`Error::SeveralLayers`], [`Error::CacheFull`], [`Error::TooLong`], [`Error::Step`]; those of `write`.
    /// Lengths and pages are unchanged then. [`Error::StepLeftOpen`] as for [`KvCache::append`].
    pub fn append_with(
        &mut self,
        appends: &[Append],
        mut write: impl FnMut(&dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let admitted = self.admit_append(appends)?;
        self.append_admitted(admitted, None, |store, writes| write(store, writes))
    }

    /// Refuses an append to a cache of several layers, and what [`KvCache::admit`] refuses.
    pub(crate) fn admit_append<'a>(&self, appends: &'a [Append]) -> Result<Admitted<'a>, Error> {
        if self.config.layers != 1 {
            return Err(Error::SeveralLayers {
                what: "an append",
                layers: self.config.layers,
                next: "`reserve` the step's tokens and `write` each layer",
            });
        }
        self.admit("an append", appends)
    }

    /// Reserves pages and writes, or changes nothing; a device that fails twice leaves the step open. `saturated` as for [`KvCache::write_layer`].
    pub(crate) fn append_admitted(
        &mut self,
        admitted: Admitted<'_>,
        saturated: Option<u64>,
        write: impl FnMut(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if admitted.tokens == 0 {
            return Ok(());
        }
        let _step = events::append(admitted.appends.len(), admitted.tokens);
        self.open_step_of(admitted)?;
        let written = self.write_layer(0, saturated, write);
        written.map_err(|error| self.undo_step(error))
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

    /// Indices of the home pages whose residuals a sequence keeps once it has `tokens` more, in order: those of its first tile, then the last ones. It lacks
    /// those past its last page.
    pub(super) fn residual_indices(&self, sequence: usize, tokens: usize) -> [Range<usize>; 2] {
        let len = self.table.lens[sequence].saturating_add(tokens);
        let page_size = self.config.page_size;
        let end = len.div_ceil(page_size);
        let first = self.table.first_residual_pages.min(end);
        let q_len = tokens.min(self.config.max_q_len);
        let kept = self.config.format.residual_pages(page_size, len, q_len);
        [0..first, end - (kept - first)..end]
    }

    /// Indices of the home pages for which a sequence takes residual pages with `tokens` more, in order: those that it keeps for a step or at a checkpoint.
    pub(super) fn new_residual_indices(
        &self,
        sequence: usize,
        tokens: usize,
    ) -> impl Iterator<Item = usize> {
        let held = self.table.pages[sequence].len();
        let kept = self.residual_indices(sequence, tokens);
        (held..kept[1].end).filter(move |home| self.keeps_residuals(&kept, *home))
    }

    /// Whether a sequence keeps the residuals of a home page, where a step keeps those of `kept`.
    pub(super) fn keeps_residuals(&self, kept: &[Range<usize>; 2], home: usize) -> bool {
        kept.iter().any(|kept| kept.contains(&home)) || self.config.keeps_at_checkpoint(home)
    }

    /// The residual pages that are none of a sequence's last ones with `tokens` more: those of checkpoints stay, and the others are freed when the tokens are written.
    pub(super) fn leaving_residual_pages(
        &self,
        sequence: usize,
        tokens: usize,
    ) -> impl Iterator<Item = CheckpointPage> {
        let first = self.table.first_held(sequence);
        let last = &self.table.residual_pages[sequence][first..];
        let [_, kept] = self.residual_indices(sequence, tokens);
        let homes = self.table.first_of_last(sequence)..kept.start;
        let leaving = homes.zip(last);
        leaving.map(|(home, page)| CheckpointPage { home, page: *page })
    }

    /// The pages that an append has to copy because other sequences share them: the open page, and its residual page if it is kept.
    pub(super) fn pages_to_copy(
        &self,
        sequence: usize,
        tokens: usize,
    ) -> impl Iterator<Item = u32> {
        let home = self.shared_open_page(sequence);
        let open = self.table.pages[sequence].len().saturating_sub(1);
        let kept = self.residual_indices(sequence, tokens);
        let is_kept = home.is_some() && self.keeps_residuals(&kept, open);
        let residual = self.table.residual_page(sequence, open);
        home.into_iter().chain(residual.filter(|_| is_kept))
    }

    /// What appends take, by the table; refuses those to missing or repeated sequences, and those beyond the most tokens of a sequence.
    fn room_for(&self, appends: &[Append]) -> Result<Room, Error> {
        let mut room = Room::default();
        let mut sequences = Vec::with_capacity(appends.len());
        for &Append { sequence, tokens } in appends {
            self.check_sequence(sequence)?;
            sequences.push(sequence);
            let ahead = self.table.tokens_before[sequence] + self.table.lens[sequence];
            check_len(sequence, ahead.saturating_add(tokens))?;
            if tokens == 0 {
                continue;
            }
            let pages = self.new_pages(sequence, tokens)
                + self.new_residual_indices(sequence, tokens).count()
                + self.pages_to_copy(sequence, tokens).count();
            room.needed = room.needed.saturating_add(pages);
            room.tokens = room.tokens.saturating_add(tokens);
            let leaving = self.leaving_residual_pages(sequence, tokens);
            let old = leaving.filter(|of| !self.config.keeps_at_checkpoint(of.home));
            let own = old.map(|of| of.page);
            room.dropped
                .extend(own.filter(|page| !self.pages.is_shared(*page)));
        }
        sequences.sort_unstable();
        if let Some(pair) = sequences.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Repeated { sequence: pair[0] });
        }
        Ok(room)
    }

    /// Refuses appends while a step is open, to sequences that are missing, repeated or would be too long, and those that the pool has no room for.
    pub(super) fn admit<'a>(
        &self,
        what: &'static str,
        appends: &'a [Append],
    ) -> Result<Admitted<'a>, Error> {
        self.check_no_step(what)?;
        let Room {
            tokens,
            needed,
            mut dropped,
        } = self.room_for(appends)?;
        dropped.truncate(needed.saturating_sub(self.pages.num_free()));
        self.pages.check_room(needed - dropped.len())?;
        Ok(Admitted {
            appends,
            tokens,
            recyclable: dropped,
        })
    }
}

/// Refuses more tokens than a sequence has at most.
pub(super) fn check_len(sequence: usize, tokens: usize) -> Result<(), Error> {
    if tokens <= MAX_TOKENS {
        return Ok(());
    }
    Err(Error::TooLong {
        sequence,
        tokens,
        limit: MAX_TOKENS,
    })
}
