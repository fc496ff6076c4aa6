//! Which pages the sequences of a cache have, and what backends whose kernels check no page ask of that.

use crate::{
    error::{Error, refuse},
    format::{KvFormat, Window, residual_slot},
    problem::Problem,
};

/// The pages and lengths of all sequences; sequences may share pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageTable {
    /// Home pages of each sequence, in token order; [`PageTable::DROPPED`] in place of those that [`KvCache::drop_before`](super::KvCache::drop_before) has freed.
    pub pages: Vec<Vec<u32>>,
    /// Residual pages of each sequence, in the order of their home pages: those of its first [`PageTable::first_residual_pages`] home pages, where it has so many,
    /// [`PageTable::DROPPED`] in place of freed ones; then those of its last home pages, each once. [`PageTable::residual_page`] finds one.
    pub residual_pages: Vec<Vec<u32>>,
    /// Residual pages of each sequence that it keeps at checkpoints ([`CacheConfig::checkpoints`](crate::CacheConfig::checkpoints)), in the order of their home pages, which lie behind the first
    /// ones and before the last ones: no step reads them, and [`PageTable::residual_page`] finds none. Empty in the table of some of a cache's sequences.
    pub checkpoint_pages: Vec<Vec<CheckpointPage>>,
    /// Home pages that hold a sequence's first tile and keep their residuals for good ([`KvFormat::first_residual_pages`]).
    pub first_residual_pages: usize,
    /// The sequence of the cache that each one is, whose centres of K it has ([`CacheConfig::centres`](crate::CacheConfig::centres)).
    pub sequences: Vec<usize>,
    /// Cached tokens of each sequence, dropped ones included.
    pub lens: Vec<usize>,
    /// The first token of each sequence that has not been dropped; whole pages, and whole tiles of 64 tokens, lie before it.
    pub first_tokens: Vec<usize>,
    /// Tokens of each sequence that lie in shards ahead ([`KvCache::begin_shard`](super::KvCache::begin_shard)); 0 where it begins here.
    pub tokens_before: Vec<usize>,
    /// Whether each KV head of a sequence is a sequence of its own ([`CacheLayer::selected`](super::CacheLayer::selected)). Entries of `pages` are then numbers of runs,
    /// page · num_kv_heads + KV head, and those of `sequences` are sequence · num_kv_heads + KV head.
    pub of_runs: bool,
}

/// The residual page of a home page that has left a sequence's last ones, kept for a truncation ([`CacheConfig::checkpoints`](crate::CacheConfig::checkpoints)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CheckpointPage {
    /// The index of the home page among the sequence's.
    pub home: usize,
    /// The page that has its residuals.
    pub page: u32,
}

impl PageTable {
    /// Stands for a page that was freed: a page of no pool.
    pub const DROPPED: u32 = u32::MAX;

    /// For backends whose kernels check no page: refuses a table by which these would read outside of a pool of `num_pages` pages. Sequence b of the problem is sequence b of
    /// the table.
    ///
    /// Only pages before those that query tokens see may be dropped ones.
    ///
    /// # Errors
    /// [`Error::Batch`] for fewer sequences than the problem's; [`Error::Length`] for fewer pages than a length has, or fewer residual pages than query tokens
    /// read; [`Error::Parameter`] for a page that is not in the pool.
    pub fn check(
        &self,
        problem: &Problem,
        format: KvFormat,
        page_size: usize,
        num_pages: usize,
    ) -> Result<(), Error> {
        if self.pages.len() < problem.batch() {
            return Err(Error::Batch {
                planned: problem.batch(),
                given: self.pages.len(),
            });
        }
        for (b, kv_len) in problem.kv_lens.iter().enumerate() {
            let pages = kv_len.div_ceil(page_size);
            self.check_home(problem, b, [page_size, pages, num_pages])?;
            self.check_residuals(problem, b, format, [page_size, pages, num_pages])?;
        }
        Ok(())
    }

    /// The home pages of a sequence of `pages`: enough of them, and those of the pool, but for dropped ones before the first that is seen.
    fn check_home(
        &self,
        problem: &Problem,
        b: usize,
        [page_size, pages, num_pages]: [usize; 3],
    ) -> Result<(), Error> {
        let own = &self.pages[b];
        check_count("pages of a sequence", own.len(), pages)?;
        // Sequences without query tokens are not read.
        let seen = match problem.q_lens[b] {
            0 => pages,
            q_len => problem.first_seen_tile(q_len, problem.all_tokens(b)) / page_size,
        };
        let (unseen, read) = own.split_at(seen.min(own.len()));
        let kept = unseen.iter().filter(|page| **page != Self::DROPPED);
        check_pool(kept.chain(read), num_pages)
    }

    /// The residual pages of a sequence of `pages` home pages: those that its query tokens read, all of them of the pool.
    fn check_residuals(
        &self,
        problem: &Problem,
        b: usize,
        format: KvFormat,
        [page_size, pages, num_pages]: [usize; 3],
    ) -> Result<(), Error> {
        let (q_len, own) = (problem.q_lens[b], self.residuals(b));
        let (mut first, mut last) = (0, pages);
        if q_len > 0 && format.window() != Window::None {
            if problem.reads_first_tile(b) {
                first = format.first_residual_pages(page_size).min(pages);
            }
            let all = problem.all_tokens(b);
            last = problem.first_residual_read(format, q_len, all) / page_size;
        }
        let read = (0..first).chain(last.max(first)..pages);
        let held = read.clone().filter(|i| self.residual_page(b, *i).is_some());
        check_count("residual pages of a sequence", held.count(), read.count())?;
        check_pool(own.iter().filter(|page| **page != Self::DROPPED), num_pages)
    }

    /// For backends: how many entries of the table a page of so many KV heads is: one, or one for each run.
    #[must_use]
    pub fn entries_of_page(&self, num_kv_heads: usize) -> usize {
        if self.of_runs { num_kv_heads } else { 1 }
    }

    /// The residual page of home page `i` of sequence `b`, if the sequence has it.
    #[must_use]
    pub fn residual_page(&self, b: usize, i: usize) -> Option<u32> {
        let (own, held) = (self.residuals(b), self.pages.get(b).map_or(0, Vec::len));
        let at = match i < self.first_residual_pages {
            true => i,
            false => i.checked_sub(self.first_of_last(b))? + self.first_residual_pages,
        };
        let page = own.get(at).filter(|_| i < held);
        page.copied().filter(|page| *page != Self::DROPPED)
    }

    /// Of sequence `b` the first of the last home pages that have residual pages: none before it has, but for the first ones
    /// ([`PageTable::first_residual_pages`]).
    pub(crate) fn first_of_last(&self, b: usize) -> usize {
        let pages = self.pages.get(b).map_or(0, Vec::len);
        let last = self.residuals(b).len() - self.first_held(b);
        pages.saturating_sub(last)
    }

    /// Residual pages of sequence `b` at the front of its list, those of its first home pages.
    pub(crate) fn first_held(&self, b: usize) -> usize {
        self.residuals(b).len().min(self.first_residual_pages)
    }

    /// For backends whose kernels look residual pages up in slots ([`CacheConfig::residual_slots`](crate::CacheConfig::residual_slots)): enters those of sequence `b`, each in the slot of its home
    /// page ([`KvFormat::residual_slot`]). Other slots stay as they are.
    pub fn fill_residual_slots(&self, b: usize, slots: &mut [u32]) {
        let (first, pages) = (
            self.first_residual_pages,
            self.pages.get(b).map_or(0, Vec::len),
        );
        let ring = slots.len().saturating_sub(first);
        let newest = self.first_of_last(b).max(pages.saturating_sub(ring))..pages;
        for i in (0..first.min(pages)).chain(newest) {
            let page = self.residual_page(b, i);
            if let (Some(page), Some(slot)) = (page, residual_slot(first, slots.len(), i)) {
                slots[slot] = page;
            }
        }
    }

    /// The residual pages that a sequence keeps at checkpoints; none in a table without any.
    pub(crate) fn at_checkpoints(&self, b: usize) -> &[CheckpointPage] {
        self.checkpoint_pages.get(b).map_or(&[], |pages| pages)
    }

    /// Whether sequence `b` has the residuals of home page `home`, be it for a step or for a truncation.
    pub(super) fn has_residuals(&self, b: usize, home: usize) -> bool {
        let kept = self.at_checkpoints(b);
        self.residual_page(b, home).is_some()
            || kept.binary_search_by_key(&home, |kept| kept.home).is_ok()
    }

    /// The residual pages of a sequence: none in a table without any.
    fn residuals(&self, b: usize) -> &[u32] {
        self.residual_pages.get(b).map_or(&[], |pages| pages)
    }
}

pub(crate) fn check_count(what: &'static str, given: usize, needed: usize) -> Result<(), Error> {
    if given >= needed {
        return Ok(());
    }
    Err(Error::Length {
        what,
        given,
        needed,
    })
}

pub(crate) fn check_pool<'a>(
    mut pages: impl Iterator<Item = &'a u32>,
    num_pages: usize,
) -> Result<(), Error> {
    match pages.find(|page| **page as usize >= num_pages) {
        None => Ok(()),
        Some(page) => refuse(
            "page",
            format_args!("{page} of {num_pages}"),
            "a page of the pool, counted from 0",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{head_dim::HeadDim, problem::Heads};

    const HEADS: Heads = Heads {
        q: 1,
        kv: 1,
        dim: HeadDim::same(64),
    };

    fn table(pages: &[&[u32]], residuals: &[&[u32]]) -> PageTable {
        let lists = |all: &[&[u32]]| all.iter().map(|own| own.to_vec()).collect();
        PageTable {
            pages: lists(pages),
            residual_pages: lists(residuals),
            first_residual_pages: 1,
            ..PageTable::default()
        }
    }

    #[test]
    fn tables_that_lead_outside_the_pool_are_refused() {
        let problem = Problem::new(HEADS, vec![100, 0, 64]);
        let check = |pages: [&[u32]; 3], residuals: [&[u32]; 3], format| {
            table(&pages, &residuals).check(&problem, format, 64, 6)
        };
        let (good, residuals) = ([&[0, 2][..], &[], &[3]], [&[1, 4][..], &[], &[5]]);
        check(good, residuals, KvFormat::INT4).unwrap();
        check(good, [&[]; 3], KvFormat::INT8).unwrap();
        for (pages, residuals) in [
            ([&[0, 6][..], &[], &[3]], residuals),
            ([&[0, 2][..], &[6], &[3]], residuals),
            ([&[0, 2][..], &[], &[PageTable::DROPPED]], residuals),
            ([&[0][..], &[], &[3]], residuals),
            ([&[0, 2][..], &[], &[]], residuals),
            (good, [&[1, 6][..], &[], &[5]]),
            (good, [&[1][..], &[], &[5]]),
            (good, [&[1, 4][..], &[], &[]]),
        ] {
            let refused = check(pages, residuals, KvFormat::INT4);
            assert!(refused.is_err(), "{pages:?} {residuals:?}");
        }
        let short = table(&good[..2], &residuals[..2]).check(&problem, KvFormat::INT4, 64, 6);
        assert!(matches!(short, Err(Error::Batch { .. })), "{short:?}");
    }

    /// Kills a check that leaves out the residuals of the first tile where they are read, or misses dropped ones where they are not.
    #[test]
    fn residuals_of_the_first_tile_are_there_where_it_is_read() {
        const GONE: u32 = PageTable::DROPPED;
        let home: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7];
        let check = |problem: &Problem, home: &[u32], residuals: &[u32]| {
            table(&[home], &[residuals]).check(problem, KvFormat::INT4, 64, 12)
        };
        let problem = Problem::new(HEADS, [500]);
        check(&problem, home, &[8, 9, 10]).unwrap();
        for residuals in [
            &[GONE, 9, 10][..],
            &[8, 9],
            &[12, 9, 10],
            &[8, 9, 12],
            &[8, 9, GONE],
        ] {
            let refused = check(&problem, home, residuals);
            assert!(refused.is_err(), "{residuals:?}");
        }
        let gone: Vec<u32> = [[GONE; 4], [4, 5, 6, 7]].concat();
        let windowed = problem.clone().window_left(200);
        check(&windowed, &gone, &[GONE, 9, 10]).unwrap();
        let shard = problem.tokens_before([1024]);
        check(&shard, home, &[GONE, 9, 10]).unwrap();
    }

    #[test]
    fn pages_before_those_that_query_tokens_see_may_be_dropped() {
        const GONE: u32 = PageTable::DROPPED;
        let mut problem = Problem::new(HEADS, vec![200]);
        problem.scores.window_left = Some(40);
        let check = |problem: &Problem, pages: &[u32]| {
            table(&[pages], &[]).check(problem, KvFormat::INT8, 32, 5)
        };
        // Query token 199 sees tokens from 159 on, whose tile begins at 128: page 4.
        let gone = [GONE, GONE, GONE, GONE, 0, 1, 2];
        check(&problem, &gone).unwrap();
        let in_tile = [GONE, GONE, GONE, GONE, GONE, 1, 2];
        assert!(check(&problem, &in_tile).is_err());
        let outside = [GONE, 5, GONE, GONE, 0, 1, 2];
        assert!(check(&problem, &outside).is_err());
        // Of a shard with 1000 tokens behind it no token is seen, and none of a sequence without query tokens.
        let behind = problem.clone().tokens_after([1000]);
        check(&behind, &[GONE; 7]).unwrap();
        check(&problem.q_lens([0]), &[GONE; 7]).unwrap();
    }

    #[test]
    fn residual_pages_stand_in_the_slots_of_their_home_pages() {
        const GONE: u32 = PageTable::DROPPED;
        let pages: [&[u32]; 5] = [&[0; 2], &[0; 10], &[], &[0; 4], &[GONE; 10]];
        let residuals: [&[u32]; 5] = [
            &[5, 6],
            &[7, 8, 10, 11, 12, 13],
            &[],
            &[1, 2, 3, 4],
            &[GONE, GONE, 10, 11],
        ];
        let table = PageTable {
            first_residual_pages: 2,
            ..table(&pages, &residuals)
        };
        let slots = |b| {
            let mut slots = [9; 6];
            table.fill_residual_slots(b, &mut slots);
            slots
        };
        assert_eq!(slots(0), [5, 6, 9, 9, 9, 9]);
        // Pages 0, 1, and 6 to 9 in the ring of four behind them.
        assert_eq!(slots(1), [7, 8, 12, 13, 10, 11]);
        assert_eq!(slots(2), [9; 6]);
        assert_eq!(slots(3), [1, 2, 9, 9, 3, 4]);
        assert_eq!(slots(4), [9, 9, 10, 11, 9, 9]);
        let found = [0, 1, 2, 5, 6, 9, 10].map(|i| table.residual_page(1, i));
        let expected = [7, 8, 0, 0, 10, 13, 0].map(|page| (page > 0).then_some(page));
        assert_eq!(found, expected);
        assert_eq!(
            (table.residual_page(0, 2), table.residual_page(4, 0)),
            (None, None)
        );
        let mut fewer = [9; 4];
        table.fill_residual_slots(1, &mut fewer);
        assert_eq!(fewer, [7, 8, 12, 13]);
        table.fill_residual_slots(1, &mut fewer[..1]);
        table.fill_residual_slots(1, &mut []);
    }
}
