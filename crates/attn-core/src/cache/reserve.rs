//! A model's step over all layers of a cache: [`KvCache::reserve`] takes pages and counts the tokens, [`KvCache::write`] writes them layer by layer, and
//! [`KvCache::cancel_step`] takes all of it back.

use super::{
    Append, CacheAccess, KvCache, PageStore, TokenWrite, append::Admitted,
    centres::write_with_centres,
};
use crate::{
    error::{Error, Many, filled},
    events, process,
    rows::Rows,
};

/// Tokens that the table counts already, while layers are still to be written; what the table had before.
pub(super) struct OpenStep {
    appends: Vec<Append>,
    tokens: usize,
    grown: Vec<Grown>,
    recycled: Vec<Recycled>,
    writes: Vec<TokenWrite>,
    /// Whether each layer has been written.
    written: Vec<bool>,
    /// Whether it never began, and only old residuals are to be written back: the table is that before the step.
    is_torn: bool,
}

impl OpenStep {
    /// What is to be done before calls that the step refuses, and how.
    fn unfinished(&self) -> (String, &'static str) {
        match self.is_torn {
            true => (
                "a step failed, and old residuals that it overwrote are still to be written back"
                    .to_owned(),
                "cancel it",
            ),
            false => (
                format!("a step of {} is open", Many(self.tokens, "token")),
                "write its other layers, or cancel it",
            ),
        }
    }
}

/// The pages that a step adds to a sequence.
struct Reservation {
    sequence: usize,
    tokens: usize,
    /// The shared open page and its copy; the same of its residual page.
    copied: Vec<[u32; 2]>,
    pages: Vec<u32>,
    residual_pages: Vec<u32>,
}

/// A sequence that the table has with the step's tokens.
struct Grown {
    reservation: Reservation,
    /// Its residual pages before the step.
    residual_pages: Vec<u32>,
    /// How many it had at checkpoints before the step, which adds some behind these.
    at_checkpoints: usize,
    /// Those that it no longer keeps, freed at the end of the step.
    dropped: Vec<u32>,
}

/// An old residual page that serves as a new page, because the pool has no other; a step that is taken back gives the bytes back.
struct Recycled {
    page: u32,
    /// What it held, in all layers.
    held: Vec<u8>,
}

impl KvCache {
    /// Begins a model's step: takes the pages of new tokens, which are those of all layers, and counts the tokens. [`KvCache::write`] writes them layer by
    /// layer.
    ///
    /// Lengths grow here, once for all layers, and [`KvCache::table`] is that of the step from now on. A layer is attended once it is written; with the last
    /// one's write the step is over. Until then it can be taken back whole by [`KvCache::cancel_step`], however many tokens it has, and its sequences
    /// are not forked, truncated, dropped from, freed or copied; the other sequences are as ever. Steps of no tokens are written, too.
    ///
    /// `appends` names each sequence once. Pages, residual pages and copies of open pages are counted as by [`KvCache::pages_needed`].
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Repeated`]; [`Error::CacheFull`]; [`Error::TooLong`] for more than
    /// [`MAX_TOKENS`](crate::problem::MAX_TOKENS) tokens of a sequence; [`Error::Step`] while another step is open; [`Error::OutOfMemory`],
    /// [`Error::Device`]. Lengths, pages and bytes are unchanged then.
    ///
    /// [`Error::StepLeftOpen`] if the device fails twice: the step can then only be cancelled.
    ///
    /// ```
    /// use attn_core::{Append, CacheConfig, Error, Heads, HostPages, KvCache, KvFormat};
    ///
    /// let heads = Heads::new(4, 1, 64);
    /// let config = CacheConfig::builder(KvFormat::INT8, heads).layers(3).max_len(256).build();
    /// let mut cache = KvCache::new(config.clone(), Box::new(HostPages::new(&config)?))?;
    /// let (k, v) = ([0.5; 5 * 64], [2.0; 5 * 64]);
    ///
    /// cache.reserve(&[Append { sequence: 0, tokens: 5 }])?;
    /// for layer in 0..3 {
    ///     cache.write(layer, &k, &v)?;
    ///     // Attention over the layer: `KvSource::Layer(cache.layer(layer)?)`.
    /// }
    /// assert_eq!(cache.table().lens, [5]);
    ///
    /// // Layer 1 of the next step gives NaN: the cache is what it was before the step.
    /// cache.reserve(&[Append { sequence: 0, tokens: 1 }])?;
    /// cache.write(0, &k[..64], &v[..64])?;
    /// assert!(matches!(cache.write(1, &[f32::NAN; 64], &v[..64]), Err(Error::NotFinite { .. })));
    /// cache.cancel_step()?;
    /// assert_eq!(cache.table().lens, [5]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn reserve(&mut self, appends: &[Append]) -> Result<(), Error> {
        let admitted = self.admit("a reservation", appends)?;
        self.open_step_of(admitted)
    }

    /// Writes one layer's K and V of the tokens that [`KvCache::reserve`] has counted: `[tokens, num_kv_heads, head_dim]` of all sequences in the order of its
    /// appends, in f32, f16 or bf16. Layers come in any order, each once; the last one's write ends the step.
    ///
    /// The bytes are those of [`KvCache::append_batch`] on a cache of this layer alone. A write that was refused, or that the device failed, is repeated,
    /// or the step is taken back by [`KvCache::cancel_step`].
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Step`] where no step is open or it has written the layer; [`Error::Length`], [`Error::NotFinite`], [`Error::Magnitude`];
    /// [`Error::Device`] if the device fails. The layer counts as not written then.
    pub fn write<'a>(
        &mut self,
        layer: usize,
        k: impl Into<Rows<'a>>,
        v: impl Into<Rows<'a>>,
    ) -> Result<(), Error> {
        let tokens = self.tokens_to_write(layer)?;
        let rows = self.shaped_rows(tokens, k.into(), v.into())?;
        let ([k, v], saturated) = self.checked_values(layer, rows)?;
        self.write_in_span(layer, Some(saturated), |store, writes| {
            store.append(&CacheAccess::here()?, layer, writes, k.rows(), v.rows())
        })?;
        // As in `append_batch`.
        let _ = self.look_at_keys(layer);
        Ok(())
    }

    /// Writes one layer's tokens that lie in the backend's memory already: `write` gets the backend's store and each token's destination in the layer's
    /// pool, and writes the tokens or records the writes, in as many calls as [`KvCache::append_with`] makes. [`TokenWrite::source`] counts through all tokens of the step.
    ///
    /// # Errors
    /// [`Error::Layer`], [`Error::Step`] as for [`KvCache::write`]; those of `write`. The layer counts as not written then.
    pub fn write_with(
        &mut self,
        layer: usize,
        mut write: impl FnMut(&dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check_unwritten(layer)?;
        self.write_in_span(layer, None, |store, writes| write(store, writes))
    }

    /// The tokens of the open step, of which [`KvCache::write`] takes the layer's K and V.
    ///
    /// # Errors
    /// [`Error::Layer`]; [`Error::Step`] where no step is open or it has written the layer.
    pub fn tokens_to_write(&self, layer: usize) -> Result<usize, Error> {
        Ok(self.check_unwritten(layer)?.tokens)
    }

    /// Takes the open step back: lengths, pages and residuals are those before [`KvCache::reserve`], whichever layers were written. Without an open step
    /// nothing is done. What a finished step has added is taken back by [`KvCache::truncate`].
    ///
    /// Writes that [`KvCache::write_with`] has enqueued must have run, or be ordered ahead of whatever comes.
    ///
    /// # Errors
    /// [`Error::Device`] if old residuals, whose pages the step took in a full pool, cannot be written back; the step stays open then.
    pub fn cancel_step(&mut self) -> Result<(), Error> {
        self.restore_recycled()?;
        self.roll_back();
        Ok(())
    }

    /// The appends of the step that [`KvCache::reserve`] began, until its last layer is written.
    #[must_use]
    pub fn open_step(&self) -> Option<&[Append]> {
        self.step.as_ref().map(|step| &step.appends[..])
    }

    /// Refuses a call that begins a step while another is open.
    pub(super) fn check_no_step(&self, what: &'static str) -> Result<(), Error> {
        match &self.step {
            None => Ok(()),
            Some(step) => {
                let (state, next) = step.unfinished();
                Err(Error::Step { what, state, next })
            }
        }
    }

    /// Refuses a sequence to which the open step appends.
    pub(super) fn check_settled(&self, what: &'static str, sequence: usize) -> Result<(), Error> {
        let Some(step) = &self.step else {
            return Ok(());
        };
        let mut grown = step.appends.iter().filter(|append| append.tokens > 0);
        match grown.find(|append| append.sequence == sequence) {
            None => Ok(()),
            Some(append) => {
                let (mut state, next) = step.unfinished();
                if !step.is_torn {
                    state = format!(
                        "an open step has the newest {} of sequence {sequence}",
                        Many(append.tokens, "token")
                    );
                }
                Err(Error::Step { what, state, next })
            }
        }
    }

    /// Refuses to read a layer that lacks the open step's tokens.
    pub(super) fn check_written(&self, layer: usize) -> Result<(), Error> {
        match &self.step {
            Some(step) if step.is_torn => self.check_no_step("attention"),
            Some(step) if !step.written[layer] => Err(Error::Step {
                what: "attention",
                state: format!("layer {layer} lacks the tokens of the open step"),
                next: "write them, or cancel the step",
            }),
            _ => Ok(()),
        }
    }

    /// The open step, if it has still to write the layer.
    fn check_unwritten(&self, layer: usize) -> Result<&OpenStep, Error> {
        self.check_layer(layer)?;
        let refuse = |state, next| {
            let what = "a write";
            Err(Error::Step { what, state, next })
        };
        match &self.step {
            None => refuse("no step is open".to_owned(), "reserve its tokens first"),
            Some(step) if step.is_torn => {
                let (state, next) = step.unfinished();
                refuse(state, next)
            }
            Some(step) if step.written[layer] => refuse(
                format!("the open step has written layer {layer}"),
                "write each layer once; cancel the step to begin again",
            ),
            Some(step) => Ok(step),
        }
    }

    /// [`KvCache::write_layer`] as a span for subscribers.
    pub(crate) fn write_in_span(
        &mut self,
        layer: usize,
        saturated: Option<u64>,
        write: impl FnMut(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (sequences, tokens) = self
            .step
            .as_ref()
            .map_or((0, 0), |step| (step.appends.len(), step.tokens));
        let _step = events::append(sequences, tokens);
        self.write_layer(layer, saturated, write)
    }

    /// Writes the open step's tokens to a layer; the last layer ends the step. `saturated` of their numbers do, if the host has seen them.
    pub(super) fn write_layer(
        &mut self,
        layer: usize,
        saturated: Option<u64>,
        mut write: impl FnMut(&mut dyn PageStore, &[TokenWrite]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(step) = &mut self.step else {
            return Ok(());
        };
        if !step.writes.is_empty() {
            process::check()?;
            match self.config.centres {
                false => write(&mut *self.store, &step.writes)?,
                true => write_with_centres(
                    &mut *self.store,
                    &self.table,
                    layer,
                    &step.writes,
                    &mut write,
                )?,
            }
            self.saturation.count(layer, &self.config, saturated);
        }
        step.written[layer] = true;
        if step.written.iter().all(|written| *written) {
            self.finish_step();
        }
        Ok(())
    }

    /// Opens a step of admitted appends.
    pub(super) fn open_step_of(
        &mut self,
        Admitted {
            appends,
            tokens,
            mut recyclable,
        }: Admitted<'_>,
    ) -> Result<(), Error> {
        let written = filled("the layers of a step", self.config.layers, false)?;
        let (mut reserved, mut recycled) = (Vec::with_capacity(appends.len()), Vec::new());
        let mut take = |cache: &mut Self| cache.take(&mut recyclable, &mut recycled);
        let writes = self
            .take_pages(appends, &mut reserved, &mut take)
            .and_then(|()| self.writes(&reserved, tokens));
        let mut step = OpenStep {
            appends: appends.to_vec(),
            tokens,
            grown: Vec::new(),
            recycled,
            writes: Vec::new(),
            written,
            is_torn: writes.is_err(),
        };
        match writes {
            Ok(writes) => {
                step.writes = writes;
                step.grown = reserved.into_iter().map(|r| self.enter(r)).collect();
                self.step = Some(step);
                Ok(())
            }
            Err(error) => {
                reserved.into_iter().rev().for_each(|r| self.give_back(r));
                self.step = Some(step);
                Err(self.undo_step(error))
            }
        }
    }

    /// Takes the open step back because of an error, which is returned; a device that fails again leaves the step open.
    pub(super) fn undo_step(&mut self, error: Error) -> Error {
        match self.cancel_step() {
            Ok(()) => error,
            Err(second) => Error::StepLeftOpen {
                first: Box::new(error),
                second: Box::new(second),
            },
        }
    }

    /// Takes a free page, or recycles one where there is none.
    fn take(
        &mut self,
        recyclable: &mut Vec<u32>,
        recycled: &mut Vec<Recycled>,
    ) -> Result<u32, Error> {
        if self.pages.num_free() > 0 {
            return self.pages.take();
        }
        let Some(page) = recyclable.pop() else {
            return self.pages.take();
        };
        let held = self.read_all_layers(page)?;
        recycled.push(Recycled { page, held });
        // Its two owners are its old place, until the step is over, and its new one.
        self.pages.share(page);
        Ok(page)
    }

    /// Takes the pages that the appends need, and copies the open pages that others share.
    fn take_pages(
        &mut self,
        appends: &[Append],
        reserved: &mut Vec<Reservation>,
        take: &mut impl FnMut(&mut Self) -> Result<u32, Error>,
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
                let to = take(self)?;
                reserved[at].copied.push([from, to]);
                let bytes = self.read_all_layers(from)?;
                self.write_all_layers(to, &bytes)?;
            }
            for _ in 0..self.new_pages(sequence, tokens) {
                let page = take(self)?;
                reserved[at].pages.push(page);
            }
            for _ in 0..self.new_residual_indices(sequence, tokens).count() {
                let page = take(self)?;
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
                    sequence: r.sequence,
                    position: self.table.tokens_before[r.sequence] + t,
                });
            }
        }
        Ok(writes)
    }

    /// Enters a sequence's pages and length into the table.
    fn enter(&mut self, r: Reservation) -> Grown {
        let table = &mut self.table;
        let at_checkpoints = table.checkpoint_pages[r.sequence].len();
        let residual_pages = table.residual_pages[r.sequence].clone();
        for &[from, to] in &r.copied {
            let homes = table.pages[r.sequence].iter_mut();
            replace(homes.chain(&mut table.residual_pages[r.sequence]), from, to);
        }
        let dropped = self.enter_residuals(r.sequence, r.tokens, &r.residual_pages);
        self.table.pages[r.sequence].extend(&r.pages);
        self.table.lens[r.sequence] += r.tokens;
        Grown {
            reservation: r,
            residual_pages,
            at_checkpoints,
            dropped,
        }
    }

    /// Frees what the sequences of the step, which is over, no longer keep.
    fn finish_step(&mut self) {
        let grown = self.step.take().into_iter().flat_map(|step| step.grown);
        for grown in grown {
            let copied = grown.reservation.copied.iter().map(|[from, _]| *from);
            let old = copied.chain(grown.dropped);
            old.for_each(|page| self.pages.release(page));
        }
    }

    /// Puts the table back to what it was before the open step.
    fn roll_back(&mut self) {
        let grown = self.step.take().into_iter().flat_map(|step| step.grown);
        for grown in grown.collect::<Vec<_>>().into_iter().rev() {
            let r = grown.reservation;
            let pages = &mut self.table.pages[r.sequence];
            pages.truncate(pages.len() - r.pages.len());
            for &[from, to] in &r.copied {
                replace(pages.iter_mut(), to, from);
            }
            self.table.residual_pages[r.sequence] = grown.residual_pages;
            self.table.checkpoint_pages[r.sequence].truncate(grown.at_checkpoints);
            self.table.lens[r.sequence] -= r.tokens;
            self.give_back(r);
        }
    }

    /// Frees the pages of a step that failed, the last taken first, so that they are taken in the same order again.
    fn give_back(&mut self, r: Reservation) {
        let copies = r.copied.into_iter().map(|[_, to]| to);
        let taken: Vec<u32> = copies.chain(r.pages).chain(r.residual_pages).collect();
        let pages = taken.into_iter().rev();
        pages.for_each(|page| self.pages.release(page));
    }

    /// Writes back what the open step's recycled pages held.
    fn restore_recycled(&mut self) -> Result<(), Error> {
        let (step, store) = (&self.step, &mut *self.store);
        let mut recycled = step.iter().flat_map(|step| &step.recycled);
        recycled.try_for_each(|page| write_all_layers(store, page.page, &page.held))
    }

    /// The bytes of a page in every layer, one layer behind the other.
    fn read_all_layers(&self, page: u32) -> Result<Vec<u8>, Error> {
        let size = self.layout.page_bytes();
        let mut bytes = filled("a copy of a page", self.config.layers * size, 0)?;
        for (layer, bytes) in bytes.chunks_exact_mut(size).enumerate() {
            self.store
                .read_pages(&CacheAccess::here()?, layer, &[page], bytes)?;
        }
        Ok(bytes)
    }

    /// Replaces a page in every layer.
    pub(super) fn write_all_layers(&mut self, page: u32, bytes: &[u8]) -> Result<(), Error> {
        write_all_layers(&mut *self.store, page, bytes)
    }
}

fn write_all_layers(store: &mut dyn PageStore, page: u32, bytes: &[u8]) -> Result<(), Error> {
    let size = store.layout().page_bytes();
    let mut layers = bytes.chunks_exact(size).enumerate();
    layers
        .try_for_each(|(layer, bytes)| store.write_page(&CacheAccess::here()?, layer, page, bytes))
}

fn replace<'a>(pages: impl Iterator<Item = &'a mut u32>, from: u32, to: u32) {
    pages
        .filter(|page| **page == from)
        .for_each(|page| *page = to);
}

/// The home page and the residual page of each of a sequence's page indices from its open page on, with those that a step reserved.
struct Places<'a> {
    cache: &'a KvCache,
    reserved: &'a Reservation,
    /// The residual page of each page index that the step adds, if it is kept.
    residuals: Vec<Option<u32>>,
    /// Whether the open page's residuals are kept.
    keeps_open: bool,
}

impl<'a> Places<'a> {
    fn new(cache: &'a KvCache, reserved: &'a Reservation) -> Self {
        let Reservation {
            sequence, tokens, ..
        } = *reserved;
        let held = cache.table.pages[sequence].len();
        let mut residuals = vec![None; reserved.pages.len()];
        let indices = cache.new_residual_indices(sequence, tokens);
        for (i, page) in indices.zip(&reserved.residual_pages) {
            residuals[i - held] = Some(*page);
        }
        let kept = cache.residual_indices(sequence, tokens);
        Places {
            cache,
            reserved,
            residuals,
            keeps_open: cache.keeps_residuals(&kept, held.saturating_sub(1)),
        }
    }

    fn copied(&self, page: u32) -> u32 {
        let copy = self.reserved.copied.iter().find(|[from, _]| *from == page);
        copy.map_or(page, |[_, to]| *to)
    }

    /// The pages that take the tokens of page index `i`.
    fn of(&self, i: usize) -> (u32, Option<u32>) {
        let (table, r) = (&self.cache.table, self.reserved);
        let held = &table.pages[r.sequence];
        let Some(page) = held.get(i) else {
            let new = i - held.len();
            return (r.pages[new], self.residuals[new]);
        };
        let residual = table
            .residual_page(r.sequence, i)
            .filter(|_| self.keeps_open);
        (self.copied(*page), residual.map(|page| self.copied(page)))
    }
}
