//! Page tables as launches read them: a row for each sequence.

use attn_core::{Error, PageTable, Problem, error::refuse};

use crate::sizes;

/// The page table that a launch reads.
#[derive(Debug, Default)]
pub(crate) struct DeviceTables {
    /// `[batch][stride]`.
    pub(crate) table: Vec<u32>,
    /// `[batch][slots]`, of a cache whose format has a window.
    pub(crate) residuals: Vec<u32>,
    pub(crate) stride: usize,
}

/// An empty list with room for `count` entries: an allocation that fails must not end the process.
fn with_room<T>(count: usize) -> Result<Vec<T>, Error> {
    let mut list = Vec::new();
    let asked = list.try_reserve_exact(count);
    asked.map_err(|_| Error::OutOfMemory {
        what: "the page table",
        bytes: count.saturating_mul(size_of::<T>()),
    })?;
    Ok(list)
}

impl DeviceTables {
    /// The tables of the problem's sequences. Checks that every page is in the pool of `num_pages`, and that lengths have their pages.
    ///
    /// Kernels read whole sequences and give weight 0 to what no window sees. They find the page of zeros behind the pool's pages, page `num_pages`,
    /// in place of pages that were dropped.
    pub(crate) fn of_cache(
        problem: &Problem,
        cache: &PageTable,
        [page_size, slots]: [usize; 2],
        num_pages: usize,
    ) -> Result<Self, Error> {
        let too_few = |what, given, needed| {
            Err(Error::Length {
                what,
                given,
                needed,
            })
        };
        let batch = problem.batch();
        if cache.pages.len() < batch || cache.residual_pages.len() < batch {
            return Err(Error::Batch {
                planned: batch,
                given: cache.pages.len().min(cache.residual_pages.len()),
            });
        }
        let pages = &cache.pages[..batch];
        let longest = pages.iter().map(Vec::len).max().unwrap_or(0);
        let zeros = num_pages as u32;
        let stride = longest.max(1);
        let entries = sizes::product("entries of the page table", &[batch, stride])?;
        let residual_entries = sizes::product("slots of residual pages", &[batch, slots])?;
        let (mut table, mut residuals) = (with_room(entries)?, with_room(residual_entries)?);
        for (b, (own, kv_len)) in pages.iter().zip(&problem.kv_lens).enumerate() {
            let needed = kv_len.div_ceil(page_size);
            if own.len() < needed {
                return too_few("the pages of a sequence", own.len(), needed);
            }
            let of_last = &cache.residual_pages[b];
            let is_kept = |page: &u32| *page != PageTable::DROPPED;
            if slots > 0 && of_last.is_empty() && own.last().is_some_and(is_kept) {
                return too_few("the residual pages of a sequence", 0, 1);
            }
            let mut all = own.iter().filter(|page| is_kept(page)).chain(of_last);
            if let Some(page) = all.find(|page| **page as usize >= num_pages) {
                let given = format_args!("{page} of {num_pages}");
                return refuse("page", given, "a page of the pool, counted from 0");
            }
            table.extend(own.iter().map(|page| (*page).min(zeros)));
            table.resize((b + 1) * stride, zeros);
            residuals.resize((b + 1) * slots, zeros);
            for (i, page) in (0..own.len()).rev().zip(of_last.iter().rev()).take(slots) {
                residuals[b * slots + i % slots] = *page;
            }
        }
        Ok(DeviceTables {
            table,
            residuals,
            stride,
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
        let mut table = with_room(pages)?;
        table.extend(0..last);
        Ok(DeviceTables {
            table,
            residuals: Vec::new(),
            stride,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Heads;

    fn page_table(pages: &[&[u32]], residuals: &[&[u32]]) -> PageTable {
        let lists = |all: &[&[u32]]| all.iter().map(|own| own.to_vec()).collect();
        let mut table = PageTable::default();
        table.pages = lists(pages);
        table.residual_pages = lists(residuals);
        table.lens = vec![0; pages.len()];
        table
    }

    fn table(
        lens: &[usize],
        of: &PageTable,
        slots: usize,
        num_pages: usize,
    ) -> Result<DeviceTables, Error> {
        let heads = Heads {
            q: 1,
            kv: 1,
            dim: 64,
        };
        let problem = Problem::new(heads, lens);
        DeviceTables::of_cache(&problem, of, [32, slots], num_pages)
    }

    #[test]
    fn a_page_table_has_a_row_for_each_sequence() {
        let of = page_table(&[&[4, 2, 0], &[], &[3]], &[&[], &[], &[]]);
        let made = table(&[65, 0, 32], &of, 0, 5).unwrap();
        assert_eq!((made.stride, &made.residuals[..]), (3, &[][..]));
        assert_eq!(made.table, [4, 2, 0, 5, 5, 5, 3, 5, 5]);
        assert_eq!(table(&[65], &of, 0, 5).unwrap().table, [4, 2, 0]);
    }

    #[test]
    fn residual_pages_stand_in_the_slots_of_their_home_pages() {
        let of = page_table(&[&[4, 2, 0], &[], &[3]], &[&[7, 8], &[], &[9]]);
        // Home pages 1 and 2 of the first sequence, and page 0 of the last.
        let made = table(&[65, 0, 32], &of, 2, 10).unwrap();
        assert_eq!(made.residuals, [8, 7, 10, 10, 9, 10]);
        // More slots than residual pages.
        let made = table(&[65, 0, 32], &of, 4, 10).unwrap();
        let none = 10;
        assert_eq!(made.residuals[..4], [none, 7, 8, none]);
        assert_eq!(
            made.residuals[4..],
            [none, none, none, none, 9, none, none, none]
        );
        let none = page_table(&[&[4, 2, 0]], &[&[]]);
        assert!(table(&[65], &none, 2, 10).is_err(), "no residual page");
    }

    #[test]
    fn the_page_of_zeros_stands_for_dropped_pages() {
        const GONE: u32 = PageTable::DROPPED;
        let of = page_table(&[&[GONE, GONE, 4], &[GONE, GONE]], &[&[3], &[]]);
        let made = table(&[65, 64], &of, 2, 5).unwrap();
        assert_eq!(made.table, [5, 5, 4, 5, 5, 5]);
        assert_eq!(made.residuals, [3, 5, 5, 5]);
        assert!(table(&[65, 64], &of, 2, 4).is_err(), "page 4 of 4");
    }

    #[test]
    fn a_table_that_leads_out_of_the_pool_is_refused() {
        let of = page_table(&[&[4, 2], &[3]], &[&[], &[]]);
        for num_pages in [0, 1, 2, 4] {
            assert!(table(&[64, 32], &of, 0, num_pages).is_err(), "{num_pages}");
        }
        let of = page_table(&[&[0]], &[&[7]]);
        assert!(table(&[1], &of, 2, 7).is_err() && table(&[1], &of, 2, 8).is_ok());
        let short = page_table(&[&[0, 1]], &[&[]]);
        assert!(table(&[64], &short, 0, 2).is_ok() && table(&[65], &short, 0, 2).is_err());
        assert!(
            table(&[1, 1], &short, 0, 2).is_err(),
            "a sequence that is not there"
        );
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
