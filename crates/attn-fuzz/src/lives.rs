//! Fuzzes the lives of caches: appends, forks, frees, truncations, restores, orders and poison on a pool that may be too small, with and without checkpoints, against a
//! model that keeps the floats; decodes on every backend against f64.
//!
//! Here: the cache and its model. `lives/actions.rs`: the calls; `checks.rs`: what must hold after each of them.

mod actions;
mod checks;

use std::collections::BTreeSet;

use arbitrary::Unstructured;
use attn_core::{Append, CacheConfig, Error, HeadDim, Heads, KvCache, PageTable};

use crate::{
    backends::{Backends, CPU},
    draw::Draw,
    hold,
    pages::{self, Shape, page_counts, residual_homes},
};

/// Draws a cache and a life of actions; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_backends(u, &CPU)
}

/// Fuzzes other backends in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_backends(u: &mut Unstructured<'_>, backends: &Backends) -> Result<(), String> {
    let mut draw = Draw(u);
    let config = config(&mut draw);
    let mut life = match Life::new(backends, config)? {
        Some(life) => life,
        None => return Ok(()),
    };
    for _ in 0..draw.range(4..=24) {
        let before = life.snapshot();
        let done = life.act(&mut draw)?;
        let after = life.snapshot();
        if done == Done::Refused {
            hold!(
                before == after,
                "a refused call changed {before:?} to {after:?}; {life:?}"
            );
        }
        life.check_page_table()?;
        life.check_bytes()?;
    }
    life.decode(&mut draw)
}

fn config(draw: &mut Draw<'_, '_>) -> CacheConfig {
    let (format, heads_per_kv, kv) = (draw.cache_format(), draw.range(1..=2), draw.range(1..=2));
    let mut config =
        CacheConfig::builder(format, Heads::new(heads_per_kv * kv, kv, draw.head_dim()))
            .unit_tensor_scales()
            .centres(false)
            .sequences(draw.range(1..=4))
            .max_len(0)
            .build();
    config.page_size = draw.pick(&[16, 16, 32, 64, 128]);
    // Residual pages are dropped after 16 pages of 16 tokens, or more.
    let most = draw.pick(&[14, 14, 50]);
    config.num_pages = draw.range(0..=most);
    let every = config.page_size.max(64) * draw.pick(&[0, 0, 1, 2, 3, 5]);
    config.checkpoints = every;
    let heads = config.num_kv_heads;
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        if !scales.is_empty() {
            let extreme = draw.once_in(8);
            let drawn = (0..heads).map(|_| match extreme {
                true => draw.pick(&[1e-15, 1e15, 1.0]),
                false => draw.pick(&[0.02, 0.05, 1.0]),
            });
            *scales = drawn.collect();
        }
    }
    // V of latents is what K is.
    if format.latents {
        config.v_tensor_scales = config.k_tensor_scales.clone();
    }
    config
}

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Changed,
    Refused,
}

/// The model of a sequence.
#[derive(Debug, Clone, Default)]
struct Sequence {
    /// The pages that `read_back` must return.
    bytes: Vec<Vec<u8>>,
    /// K and V as appended; `None` once pages of other origin are restored.
    floats: Option<[Vec<f32>; 2]>,
    tokens: usize,
    /// The home pages whose residuals the cache has.
    fine: BTreeSet<usize>,
}

/// What appends take from the pool.
#[derive(Debug, Default)]
struct Demand {
    /// New home pages and residual pages, and copies of shared open ones.
    pages: usize,
    /// Residual pages that the appends drop and no other sequence has: they serve as new pages where too few are free.
    recyclable: Vec<u32>,
}

/// A cache and its model.
struct Life<'a> {
    backends: &'a Backends,
    config: CacheConfig,
    cache: KvCache,
    sequences: Vec<Sequence>,
}

impl std::fmt::Debug for Life<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens: Vec<_> = self.sequences.iter().map(|s| s.tokens).collect();
        let (config, table) = (&self.config, self.cache.table());
        write!(f, "tokens {tokens:?} {config:?} {table:?}")
    }
}

impl<'a> Life<'a> {
    fn new(backends: &'a Backends, config: CacheConfig) -> Result<Option<Self>, String> {
        let cache = match backends.reference.create_cache(&config) {
            Ok(cache) => cache,
            // FORMATS.md's limits are the fuzzer of sizes' to check.
            Err(Error::Parameter { .. }) => return Ok(None),
            Err(error) => return Err(format!("{config:?} is refused: {error}")),
        };
        let mut sequences = vec![Sequence::default(); config.num_sequences];
        for sequence in &mut sequences {
            sequence.floats = Some(Default::default());
        }
        Ok(Some(Life {
            backends,
            config,
            cache,
            sequences,
        }))
    }

    /// Elements of a token's K and of its V that an append takes: of latents K's alone.
    fn given_rows(&self) -> [usize; 2] {
        let [k, v] = self.rows();
        [k, if self.config.format.latents { 0 } else { v }]
    }

    /// Elements of a token's K, and of its V.
    fn rows(&self) -> [usize; 2] {
        let HeadDim { k, v } = self.config.head_dim;
        [k, v].map(|dim| self.config.num_kv_heads * dim)
    }

    fn shape(&self) -> Shape {
        Shape {
            format: self.config.format,
            head_dim: self.config.head_dim,
            page_size: self.config.page_size,
            heads: self.config.num_kv_heads,
        }
    }

    fn snapshot(&self) -> (PageTable, usize) {
        (self.cache.table().clone(), self.cache.free_pages())
    }

    fn sequence(&self, draw: &mut Draw<'_, '_>) -> usize {
        if draw.once_in(24) {
            return draw.size();
        }
        draw.range(0..=self.sequences.len() - 1)
    }

    /// Pages that no sequence has.
    fn free(&self) -> Vec<u32> {
        let table = self.cache.table();
        let lists = || table.pages.iter().chain(&table.residual_pages);
        let kept = || table.checkpoint_pages.iter().flatten().map(|of| of.page);
        let owned = |page: &u32| lists().flatten().any(|p| p == page) || kept().any(|p| p == *page);
        (0..self.config.num_pages as u32)
            .filter(|p| !owned(p))
            .collect()
    }

    /// What appends take from the pool; None if a sequence does not exist.
    fn demand(&self, appends: &[Append]) -> Option<Demand> {
        let mut demand = Demand::default();
        for &Append {
            sequence: s,
            tokens,
        } in appends
        {
            self.sequences.get(s)?;
            if tokens > 0 {
                self.add_demand(s, tokens, &mut demand);
            }
        }
        Some(demand)
    }

    /// Sequences whose list holds a page.
    fn owners(lists: &[Vec<u32>], page: u32) -> usize {
        lists.iter().filter(|list| list.contains(&page)).count()
    }

    fn add_demand(&self, s: usize, tokens: usize, demand: &mut Demand) {
        let (table, size, format) = (
            self.cache.table(),
            self.config.page_size,
            self.config.format,
        );
        let len = self.sequences[s].tokens;
        let held = self.held_counts(s);
        let counts = page_counts(format, size, len.saturating_add(tokens));
        if counts[0] - held[0] > self.config.num_pages {
            demand.pages = usize::MAX;
            return;
        }
        let kept = self.kept_homes(counts);
        let new_residuals = kept.iter().filter(|i| **i >= held[0]).count();
        let added = (counts[0] - held[0]).saturating_add(new_residuals);
        let open = table.pages[s].last().filter(|_| !len.is_multiple_of(size));
        let copied = match open {
            Some(page) if Self::owners(&table.pages, *page) > 1 => {
                1 + usize::from(kept.iter().any(|i| i + 1 == held[0]))
            }
            _ => 0,
        };
        demand.pages = demand.pages.saturating_add(added).saturating_add(copied);
        let old = residual_homes(format, size, held).zip(&table.residual_pages[s]);
        let dropped = old.filter(|(i, page)| {
            !kept.contains(i) && Self::owners(&table.residual_pages, **page) == 1
        });
        demand.recyclable.extend(dropped.map(|(_, page)| page));
    }

    /// A sequence's home pages, and how many of them have a residual page in the cache that steps read.
    fn held_counts(&self, s: usize) -> [usize; 2] {
        let (sequence, size) = (&self.sequences[s], self.config.page_size);
        let [home, kept] = page_counts(self.config.format, size, sequence.tokens);
        let first = pages::first_pages(self.config.format, size, home);
        let last = (first..home)
            .rev()
            .take_while(|i| sequence.fine.contains(i));
        [home, kept.min(first + last.count())]
    }

    /// The home pages whose residuals a cache keeps, those of its checkpoints included, where those for steps are of these counts.
    fn kept_homes(&self, counts: [usize; 2]) -> BTreeSet<usize> {
        let (format, size) = (self.config.format, self.config.page_size);
        let for_steps = residual_homes(format, size, counts);
        let of_checkpoints = (0..counts[0]).filter(|i| self.is_before_checkpoint(*i));
        for_steps.chain(of_checkpoints).collect()
    }

    /// Whether a home page lies in the window before a checkpoint.
    fn is_before_checkpoint(&self, home: usize) -> bool {
        let (every, size) = (self.config.checkpoints, self.config.page_size);
        let window = 64 * pages::larger_window(self.config.format);
        every > 0 && every - home * size % every <= window
    }

    /// Counts tokens that were appended.
    fn grow(&mut self, s: usize, tokens: usize) {
        let size = self.config.page_size;
        let held = self.sequences[s].tokens.div_ceil(size);
        let tokens = self.sequences[s].tokens + tokens;
        let mut fine = self.kept_homes(page_counts(self.config.format, size, tokens));
        fine.retain(|i| *i >= held || self.sequences[s].fine.contains(i));
        let sequence = &mut self.sequences[s];
        (sequence.tokens, sequence.fine) = (tokens, fine);
    }

    /// Whether the pool has room for what appends take.
    fn has_room(&self, demand: &Option<Demand>) -> bool {
        let free = self.cache.free_pages();
        demand
            .as_ref()
            .is_some_and(|d| d.pages <= free + d.recyclable.len())
    }

    fn act(&mut self, draw: &mut Draw<'_, '_>) -> Result<Done, String> {
        match draw.range(0..=20) {
            0..=5 => self.append(draw),
            6 => self.append_with(draw),
            7 | 8 => self.fork(draw),
            9 => self.free_sequence(draw),
            10 | 11 => self.restore(draw),
            12 => self.order(draw),
            13 => self.poison(draw),
            14..=16 => self.truncate(draw),
            17 | 18 => self.restore_image(draw),
            _ => self.decode(draw).map(|()| Done::Refused),
        }
    }

    /// Compares a call's outcome with whether the model says that it can succeed.
    fn expect(&self, what: &str, done: Result<&(), &Error>, can: bool) -> Result<(), String> {
        match done {
            Ok(()) => hold!(can, "{what} is taken, but cannot be; {self:?}"),
            Err(error) => hold!(!can, "{what} is refused: {error}; {self:?}"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faulty;

    fn finds(backends: &Backends) -> bool {
        crate::finds(400, fuzz, |u| fuzz_backends(u, backends))
    }

    #[test]
    fn a_backend_with_one_wrong_bit_is_found() {
        assert!(finds(&faulty::one_wrong_bit()));
    }

    #[test]
    fn an_error_that_the_reference_shares_is_found() {
        assert!(finds(&faulty::all_wrong()));
    }

    #[test]
    fn an_error_of_the_integer_arithmetic_that_the_reference_shares_is_found() {
        assert!(finds(&faulty::integers_wrong()));
    }

    #[test]
    fn a_store_that_writes_one_wrong_byte_is_found() {
        assert!(finds(&faulty::wrong_pages()));
    }

    #[test]
    fn a_store_that_loses_residuals_is_found() {
        assert!(finds(&faulty::lost_residuals()));
    }

    #[test]
    fn a_backend_that_reads_without_residuals_is_found() {
        assert!(finds(&faulty::all_coarse()));
    }
}
