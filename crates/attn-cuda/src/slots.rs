//! Where the tokens of an append go: the slot and the residual page of each, as `append.cu` reads them.

use attn_core::{
    Error, PageLayout, TokenWrite, Window,
    cache::{check_writes, tokens_of},
    error::refuse,
};

use crate::staging::{ListPlace, Lists};

/// The slots of an append's tokens, checked: the kernel checks no address.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) lists: Lists,
    /// i64 of each token: its page · page_size + its place in the page.
    pub(crate) slots: ListPlace,
    /// u32 of each token: the residual page of its page, or `u32::MAX`; empty where no scheme has a window.
    pub(crate) residual_pages: ListPlace,
    pub(crate) tokens: usize,
}

impl Slots {
    /// The slots of writes to a pool of `num_pages`. K and V have the shapes `rows`, and a row for each write, in order.
    ///
    /// # Errors
    /// Those of [`tokens_of`] and [`check_writes`]; [`Error::Parameter`] for rows in another order; [`Error::OutOfMemory`].
    pub(crate) fn new(
        layout: &PageLayout,
        num_pages: usize,
        writes: &[TokenWrite],
        rows: [[usize; 3]; 2],
    ) -> Result<Self, Error> {
        let tokens = tokens_of(layout, rows)?;
        check_writes(layout, num_pages, writes, tokens)?;
        let mut places = writes.iter().enumerate();
        if let Some((at, write)) = places.find(|(at, write)| write.source != *at) {
            let given = format_args!("{} of write {at}", write.source);
            return refuse("source of a token", given, "the number of its write");
        }
        let page_size = layout.page_size() as i64;
        let slot = |w: &TokenWrite| i64::from(w.page) * page_size + w.token as i64;
        let residual = |w: &TokenWrite| w.residual_page.unwrap_or(u32::MAX);
        let has_window = layout.format().window() != Window::None;
        let with_residuals = if has_window { writes } else { &[] };
        let mut lists = Lists::default();
        let slots: Vec<i64> = writes.iter().map(slot).collect();
        let residual_pages: Vec<u32> = with_residuals.iter().map(residual).collect();
        Ok(Slots {
            slots: lists.add(&slots)?,
            residual_pages: lists.add(&residual_pages)?,
            lists,
            tokens: writes.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{Append, CacheConfig, Heads, HostPages, KvCache, KvFormat};

    const LAYOUT: [usize; 2] = [2, 64];

    /// Where 3 tokens of sequence 0, behind 30, and 2 of sequence 1 go, on pages of 32 tokens.
    fn writes(format: KvFormat) -> (PageLayout, Vec<TokenWrite>) {
        let [heads, dim] = LAYOUT;
        let (q, kv) = (heads, heads);
        let builder = CacheConfig::builder(format, Heads { q, kv, dim });
        let config = builder.sequences(2).page_size(32).pages(32).build();
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        let append = |sequence, tokens| Append { sequence, tokens };
        let first = [append(0, 30)];
        cache.append_with(&first, |_, _| Ok(())).unwrap();
        let mut all = Vec::new();
        let then = [append(0, 3), append(1, 2)];
        let noted = cache.append_with(&then, |_, writes| {
            all = writes.to_vec();
            Ok(())
        });
        noted.unwrap();
        (*cache.layout(), all)
    }

    fn slots(layout: &PageLayout, writes: &[TokenWrite], rows: usize) -> Result<Slots, Error> {
        let [heads, dim] = LAYOUT;
        Slots::new(layout, 32, writes, [[rows, heads, dim]; 2])
    }

    /// The numbers of a list.
    fn numbers<const N: usize>(slots: &Slots, at: ListPlace, take: usize) -> Vec<[u8; N]> {
        let base = crate::handles::DeviceAddress::new(1);
        let first = at.at(base).get() as usize - 1;
        let bytes = &slots.lists.bytes()[first..][..take * N];
        bytes.chunks(N).map(|x| x.try_into().unwrap()).collect()
    }

    #[test]
    fn every_token_has_its_slot_and_its_residual_page() {
        for format in [KvFormat::INT8, KvFormat::INT4] {
            let (layout, writes) = writes(format);
            let made = slots(&layout, &writes, 5).unwrap();
            let of = |i: usize| i64::from(writes[i].page) * 32;
            let [a, b, c] = [0, 2, 3].map(of);
            let found = numbers(&made, made.slots, 5);
            let found: Vec<i64> = found.into_iter().map(i64::from_le_bytes).collect();
            assert_eq!(found, [a + 30, a + 31, b, c, c + 1]);
            let mut base = crate::handles::DeviceAddress::new(1);
            if format == KvFormat::INT8 {
                base = made.residual_pages.at(base);
                assert!(base.is_null(), "a format without residuals has no list");
                continue;
            }
            let found = numbers(&made, made.residual_pages, 5);
            let found = found.into_iter().map(u32::from_le_bytes);
            let want = writes.iter().map(|write| write.residual_page.unwrap());
            assert!(found.eq(want));
        }
        // Pages that keep no residuals.
        let (layout, mut writes) = writes(KvFormat::INT4);
        writes[1].residual_page = None;
        let made = slots(&layout, &writes, 5).unwrap();
        let found = numbers(&made, made.residual_pages, 2);
        assert_eq!(u32::from_le_bytes(found[1]), u32::MAX);
    }

    #[test]
    fn rows_that_are_not_those_of_the_writes_are_refused() {
        let (layout, writes) = writes(KvFormat::INT8);
        // Rows behind those of the writes are not read.
        assert_eq!(slots(&layout, &writes, 6).unwrap().tokens, 5);
        assert!(slots(&layout, &writes, 4).is_err());
        let mut swapped = writes.clone();
        swapped.swap(1, 2);
        for other in [&swapped[..], &writes[1..]] {
            let refused = slots(&layout, other, 5).unwrap_err();
            let what = "source of a token";
            assert!(matches!(refused, Error::Parameter { what: w, .. } if w == what));
        }
    }
}
