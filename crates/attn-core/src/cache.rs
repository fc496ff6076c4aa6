//! The cache over a shared pool of pages, and its lifecycle.
//!
//! [`KvCache`] keeps the page table (lengths, pages, sharing), one for all layers, and checks every call; a backend's [`PageStore`] keeps the bytes of
//! every layer in the backend's memory. A refused call changes neither, and a call that the device fails changes no length and takes no page; a device that
//! fails again while the call is taken back leaves the step open ([`Error::StepLeftOpen`]).
//!
//! Here: creation, forks and freeing. `cache/truncate.rs`: tokens that are taken back; `checkpoints.rs`: what is kept for that. `cache/store.rs`: the interface to a backend; `page_table.rs`: lengths and pages, as kernels read them; `writes.rs`: what backends compare before they write or copy; `append.rs`: appends; `reserve.rs`: a model's step, layer by
//! layer; `layer.rs`: one layer, to be attended; `drop_before.rs`: tokens that no window sees any more; `copy.rs`: a copy of a whole cache; `grow.rs`: more pages and sequences; `sequences.rs`: a step's choice of sequences; `transfer.rs`: sequences and pages as bytes;
//! `image.rs`: a sequence as one block of bytes.

mod append;
mod centres;
mod checkpoints;
mod copy;
mod drop_before;
mod drop_range;
mod grow;
mod image;
mod layer;
mod outliers;
mod page_table;
mod reserve;
mod saturation;
mod selected_pages;
mod sequences;
mod store;
mod transfer;
mod truncate;
mod writes;

pub use append::Append;
pub use image::SequenceImage;
pub use layer::CacheLayer;
pub use page_table::{CheckpointPage, PageTable};
pub(crate) use page_table::{check_count, check_pool};
pub use selected_pages::SelectedPages;
pub use sequences::CachedSequences;
pub use store::{CacheAccess, FirstTile, PageStore, TokenWrite};
pub use writes::{check_pages, check_writes, tokens_of};

use outliers::KeyLooks;
use reserve::OpenStep;
use saturation::Saturation;

use crate::{
    cache_config::CacheConfig,
    error::{Error, filled, refuse},
    events,
    format::Window,
    layout::PageLayout,
    page_allocator::PageAllocator,
    problem::Problem,
    process,
};

/// A paged, quantized cache on one backend, of one layer or of several.
///
/// The layers of a model share lengths, pages and forks: one page table, and a pool of pages for each layer ([`CacheConfig::layers`]). A cache of one layer
/// takes tokens by [`KvCache::append`], one of several by [`KvCache::reserve`] and [`KvCache::write`]; everything else holds for all layers at once.
///
/// ```
/// use attn_core::{CacheConfig, Heads, HostPages, KvCache, KvFormat};
///
/// let heads = Heads::new(4, 1, 64);
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
    step: Option<OpenStep>,
    saturation: Saturation,
    looks: KeyLooks,
}

impl KvCache {
    /// Makes the page table for a backend's store; backends call this from `create_cache`.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`] and [`process::check`]; [`Error::StoreMismatch`] if the store's layout, layers, number of pages, or what it says of its sequences and static
    /// scales differ from the config's; [`Error::OutOfMemory`].
    pub fn new(config: CacheConfig, store: Box<dyn PageStore>) -> Result<Self, Error> {
        process::check()?;
        config.check()?;
        let layout = config.layout()?;
        store::check_store(&config, &*store)?;
        let n = config.num_sequences;
        events::pool("allocated", &config, layout.page_bytes());
        Ok(KvCache {
            table: PageTable {
                pages: filled("the page table", n, Vec::new())?,
                residual_pages: filled("the table of residual pages", n, Vec::new())?,
                checkpoint_pages: filled("the table of checkpoints", n, Vec::new())?,
                sequences: (0..n).collect(),
                lens: filled("the lengths", n, 0)?,
                first_tokens: filled("the first tokens", n, 0)?,
                tokens_before: filled("the tokens before", n, 0)?,
                first_residual_pages: config.format.first_residual_pages(config.page_size),
                of_runs: false,
            },
            pages: PageAllocator::new(config.num_pages)?,
            layout,
            config,
            store,
            step: None,
            saturation: Saturation::default(),
            looks: KeyLooks::default(),
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

    /// Refuses query tokens that see tokens which were dropped ([`KvCache::drop_before`]), or read residuals which the cache no longer has: those of
    /// the sequence's last append can be queries, and the newest 64 or more. Other formats than those with a window have no such limit.
    ///
    /// # Errors
    /// [`Error::Batch`] for a problem of more sequences than the cache has; [`Error::Length`] for other [`Problem::q_lens`] than one of each sequence;
    /// [`Error::Dropped`]; [`Error::ResidualQueries`]; [`Error::Parameter`] for other [`Problem::tokens_before`] than the keys of a cache with centres were written
    /// with; [`Error::SeveralLayers`] for a cache of several layers, of which
    /// [`CacheLayer::check_queries`] takes one; [`Error::Step`] for a layer that lacks the tokens of an open step.
    pub fn check_queries(&self, problem: &Problem) -> Result<(), Error> {
        self.only_layer()?.check_queries(problem)
    }

    /// Checks a problem's queries against the sequences that `table` lists.
    fn check_queries_of(&self, problem: &Problem, table: &PageTable) -> Result<(), Error> {
        let CacheConfig {
            format, page_size, ..
        } = self.config;
        check_batch(problem, table)?;
        self.check_shards(problem, table)?;
        let lens = problem.q_lens.iter().zip(&table.lens).enumerate();
        for (b, (&q_len, &kv_len)) in lens.filter(|(_, (q_len, _))| **q_len > 0) {
            let all = kv_len.saturating_add(problem.after(b));
            let seen = problem.first_seen(q_len, all);
            if seen < table.first_tokens[b] {
                return Err(Error::Dropped {
                    what: "attention",
                    sequence: b,
                    first: seen,
                    kept: table.first_tokens[b],
                });
            }
            if format.window() == Window::None {
                continue;
            }
            let kept = first_fine_page(table, b);
            let has_residuals =
                |q_len| problem.first_residual_read(format, q_len, all) / page_size >= kept;
            if !has_residuals(q_len) {
                return Err(Error::ResidualQueries {
                    sequence: b,
                    q_len,
                    most: (1..q_len).rfind(|q_len| has_residuals(*q_len)).unwrap_or(0),
                    max_q_len: self.config.max_q_len,
                    format,
                });
            }
        }
        Ok(())
    }

    /// Puts the free pages in the given order of allocation; refuses what is not a permutation of them.
    pub(crate) fn order_free_pages(&mut self, order: &[u32]) -> Result<(), Error> {
        self.pages.order(order)
    }

    pub(crate) fn check_sequence(&self, sequence: usize) -> Result<(), Error> {
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

    /// Makes `to` (empty) share `from`'s tokens; the open page and its residual page are copied when either appends.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::NotEmpty`] for `to`; [`Error::Parameter`] if both are the same; [`Error::Step`] if `from` has tokens of an open step;
    /// [`Error::Device`] if the device fails to copy centres of K: `to` stays empty, and is no shard ([`KvCache::begin_shard`]) any more.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        self.check_sequence(from)?;
        self.check_sequence(to)?;
        self.check_settled("a fork", from)?;
        if from == to {
            return refuse(
                "fork target",
                format_args!("sequence {to} itself"),
                "another sequence, which is empty",
            );
        }
        self.check_empty("a fork", to)?;
        self.copy_centres(from, to)?;
        let (homes, residuals) = (&self.table.pages[from], &self.table.residual_pages[from]);
        let checkpoints = self.table.at_checkpoints(from).iter().map(|of| &of.page);
        let all = homes.iter().chain(residuals).chain(checkpoints);
        for page in all.filter(|page| is_kept(page)) {
            self.pages.share(*page);
        }
        self.table.checkpoint_pages[to] = self.table.checkpoint_pages[from].clone();
        self.table.pages[to] = self.table.pages[from].clone();
        self.table.residual_pages[to] = self.table.residual_pages[from].clone();
        self.table.lens[to] = self.table.lens[from];
        self.table.first_tokens[to] = self.table.first_tokens[from];
        self.table.tokens_before[to] = self.table.tokens_before[from];
        Ok(())
    }

    /// Refuses a number of tokens that a sequence does not have.
    fn check_inside(&self, what: &'static str, sequence: usize, given: usize) -> Result<(), Error> {
        let tokens = self.table.lens[sequence];
        if given <= tokens {
            return Ok(());
        }
        Err(Error::PastEnd {
            what,
            given,
            sequence,
            tokens,
        })
    }

    /// Refuses a sequence that has tokens, for a call that fills an empty one.
    fn check_empty(&self, what: &'static str, sequence: usize) -> Result<(), Error> {
        match self.table.lens[sequence] {
            0 => Ok(()),
            tokens => Err(Error::NotEmpty {
                what,
                sequence,
                tokens,
            }),
        }
    }

    /// Empties a sequence and returns its pages.
    ///
    /// # Errors
    /// [`Error::Sequence`]; [`Error::Step`] if the sequence has tokens of an open step.
    pub fn free_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        self.check_sequence(sequence)?;
        self.check_settled("freeing a sequence", sequence)?;
        let pages = std::mem::take(&mut self.table.pages[sequence]);
        let residuals = std::mem::take(&mut self.table.residual_pages[sequence]);
        let checkpoints = std::mem::take(&mut self.table.checkpoint_pages[sequence]);
        pages
            .into_iter()
            .chain(residuals)
            .chain(checkpoints.into_iter().map(|of| of.page))
            .filter(is_kept)
            .for_each(|page| self.pages.release(page));
        self.table.lens[sequence] = 0;
        self.table.first_tokens[sequence] = 0;
        self.table.tokens_before[sequence] = 0;
        Ok(())
    }
}

/// The home page of a sequence from which on all have residuals: 0 where no page between the first ones and the last ones lacks them.
fn first_fine_page(table: &PageTable, sequence: usize) -> usize {
    match table.first_of_last(sequence) {
        first if first <= table.first_residual_pages => 0,
        first => first,
    }
}

/// Refuses a problem of more sequences than the table lists, or without a number of query tokens for each.
fn check_batch(problem: &Problem, table: &PageTable) -> Result<(), Error> {
    if problem.batch() > table.lens.len() {
        return Err(Error::Batch {
            planned: problem.batch(),
            given: table.lens.len(),
        });
    }
    problem.check_q_lens()
}

/// Whether an entry of the table is a page of the pool.
fn is_kept(page: &u32) -> bool {
    *page != PageTable::DROPPED
}
