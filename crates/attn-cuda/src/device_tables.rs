//! Page tables as launches read them: a row for each sequence.

use attn_core::{CacheConfig, Error, PageTable, Problem, error::reserve};

use crate::sizes;

/// The page table that a launch reads.
#[derive(Debug, Default)]
pub(crate) struct DeviceTables {
    /// `[batch][stride]`.
    pub(crate) table: Vec<u32>,
    /// `[batch][slots]`, of a cache whose format has a window.
    pub(crate) residuals: Vec<u32>,
    pub(crate) stride: usize,
    /// Slots of a sequence in `residuals`.
    pub(crate) slots: usize,
}

impl DeviceTables {
    /// The tables of the problem's sequences. Checks that every page is in the pool of `num_pages`, and that lengths have their pages.
    ///
    /// Kernels read whole sequences and give weight 0 to what no window sees. They find the page of zeros behind the pool's pages, page `num_pages`,
    /// in place of pages that were dropped.
    pub(crate) fn of_cache(
        problem: &Problem,
        cache: &PageTable,
        config: &CacheConfig,
        num_pages: usize,
    ) -> Result<Self, Error> {
        cache.check(problem, config.format, config.page_size, num_pages)?;
        let (batch, slots) = (problem.batch(), config.residual_slots());
        let pages = &cache.pages[..batch];
        let longest = pages.iter().map(Vec::len).max().unwrap_or(0);
        let zeros = num_pages as u32;
        let stride = longest.max(1);
        let entries = sizes::product("entries of the page table", &[batch, stride])?;
        let residual_entries = sizes::product("slots of residual pages", &[batch, slots])?;
        let (mut table, mut residuals) = (Vec::new(), Vec::new());
        reserve("the page table", &mut table, entries)?;
        reserve(
            "the table of residual pages",
            &mut residuals,
            residual_entries,
        )?;
        for (b, own) in pages.iter().enumerate() {
            table.extend(own.iter().map(|page| (*page).min(zeros)));
            table.resize((b + 1) * stride, zeros);
            residuals.resize((b + 1) * slots, zeros);
            cache.fill_residual_slots(b, &mut residuals[b * slots..]);
        }
        Ok(DeviceTables {
            table,
            residuals,
            stride,
            slots,
        })
    }

    /// Tables of pages in order, as many for each sequence as the longest needs.
    pub(crate) fn in_order(
        batch: usize,
        max_kv_len: usize,
        page_size: usize,
    ) -> Result<Self, Error> {
        let stride = max_kv_len.div_ceil(page_size).max(1);
        let pages = sizes::product("pages of a view", &[batch, stride])?;
        let last = u32::try_from(pages).map_err(|_| {
            Error::parameter(
                "pages of a view",
                pages,
                "less than 2^32; decode fewer sequences at once",
            )
        })?;
        let mut table = Vec::new();
        reserve("the page table", &mut table, pages)?;
        table.extend(0..last);
        Ok(DeviceTables {
            table,
            residuals: Vec::new(),
            stride,
            slots: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{HeadDim, Heads, KvFormat};

    const HEADS: Heads = Heads {
        q: 1,
        kv: 1,
        dim: HeadDim::same(64),
    };

    fn page_table(pages: &[&[u32]], residuals: &[&[u32]]) -> PageTable {
        let lists = |all: &[&[u32]]| all.iter().map(|own| own.to_vec()).collect();
        let mut table = PageTable::default();
        table.pages = lists(pages);
        table.residual_pages = lists(residuals);
        table
    }

    /// On pages of 64 tokens, of which a window of two tiles takes two, and four slots with the pages of 65 query tokens.
    fn table(problem: &Problem, format: KvFormat, of: &PageTable) -> Result<DeviceTables, Error> {
        let config = CacheConfig::builder(format, HEADS).page_size(64).build();
        DeviceTables::of_cache(problem, of, &config, 10)
    }

    #[test]
    fn a_page_table_has_a_row_for_each_sequence() {
        let of = page_table(&[&[4, 2, 0], &[], &[3]], &[]);
        let problem = Problem::new(HEADS, [129, 0, 64]);
        let made = table(&problem, KvFormat::INT8, &of).unwrap();
        assert_eq!((made.stride, &made.residuals[..]), (3, &[][..]));
        assert_eq!(made.table, [4, 2, 0, 10, 10, 10, 3, 10, 10]);
        let first = table(&Problem::new(HEADS, [129]), KvFormat::INT8, &of);
        assert_eq!(first.unwrap().table, [4, 2, 0]);
        // A page that no pool has, and sequences that are not there.
        let of = page_table(&[&[4, 10]], &[]);
        assert!(table(&Problem::new(HEADS, [128]), KvFormat::INT8, &of).is_err());
        assert!(table(&problem, KvFormat::INT8, &of).is_err());
    }

    #[test]
    fn residual_pages_stand_in_their_slots_of_every_row() {
        let mut of = page_table(&[&[4, 2, 0], &[], &[3]], &[&[6, 7, 8], &[], &[9]]);
        of.first_residual_pages = 1;
        let problem = Problem::new(HEADS, [129, 0, 64]);
        let made = table(&problem, KvFormat::INT4, &of).unwrap();
        let (slots, none) = (made.slots, 10);
        assert!(slots >= 5, "{slots}");
        let mut want = vec![none; 3 * slots];
        // The first home pages, and pages 1 and 2 of the first sequence: 1 + 1 and 1 + 2.
        (want[0], want[2], want[3], want[2 * slots]) = (6, 7, 8, 9);
        assert_eq!(made.residuals, want);
    }

    #[test]
    fn the_page_of_zeros_stands_for_dropped_pages() {
        const GONE: u32 = PageTable::DROPPED;
        let of = page_table(&[&[GONE, GONE, 4], &[GONE]], &[]);
        let mut problem = Problem::new(HEADS, [192, 64]).q_lens([1, 0]);
        problem.scores.window_left = Some(9);
        let made = table(&problem, KvFormat::INT8, &of).unwrap();
        assert_eq!(made.table, [10, 10, 4, 10, 10, 10]);
        // Without the window they would be seen.
        problem.scores.window_left = None;
        assert!(table(&problem, KvFormat::INT8, &of).is_err());
    }

    #[test]
    fn a_view_of_too_many_pages_is_refused_before_memory_is_asked_for() {
        let made = DeviceTables::in_order(2, 65, 32).unwrap();
        assert_eq!((made.stride, made.table), (3, vec![0, 1, 2, 3, 4, 5]));
        for (batch, max_kv_len) in [(1 << 18, 1 << 20), (1 << 60, 1 << 20), (usize::MAX, 64)] {
            assert!(
                DeviceTables::in_order(batch, max_kv_len, 64).is_err(),
                "{batch}"
            );
        }
    }
}
