//! Where the tokens of an append go: the slot and the residual page of each, as `append.cu` reads them.

use std::ops::Range;

use attn_core::{
    Error, PageLayout, TokenWrite, Window,
    cache::{check_writes, tokens_of},
    error::{refuse, reserve},
};

use crate::{
    sizes,
    staging::{ListPlace, Lists},
};

/// The slots of an append's tokens, checked: the kernel checks no address.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) lists: Lists,
    /// i64 of each token: its page · page_size + its place in the page; −1 for one that is not written.
    pub(crate) slots: ListPlace,
    /// u32 of each token: the residual page of its page, or `u32::MAX`; empty where no scheme has a window.
    pub(crate) residual_pages: ListPlace,
    /// u32 of each token: its sequence, whose centres of K are taken off; empty without centres.
    pub(crate) centre_rows: ListPlace,
    /// i32 of each token: its number in its sequence; empty without centres.
    pub(crate) centre_positions: ListPlace,
    /// The tokens of K and V, from the first to the last one that is written.
    pub(crate) tokens: Range<usize>,
}

impl Slots {
    /// The slots of writes to a pool of `num_pages`, in the order of their rows, of which K and V have the shapes `rows`. `sequences`: those that there are centres
    /// of, of a cache that has some.
    ///
    /// # Errors
    /// Those of [`tokens_of`] and [`check_writes`]; [`Error::Parameter`] for rows in another order, a sequence without centres, and tokens at position 0 among
    /// others where there are centres; [`Error::OutOfMemory`].
    pub(crate) fn new(
        layout: &PageLayout,
        num_pages: usize,
        writes: &[TokenWrite],
        rows: [[usize; 3]; 2],
        sequences: Option<usize>,
    ) -> Result<Self, Error> {
        let given = tokens_of(layout, rows)?;
        check_writes(layout, num_pages, writes, given)?;
        let mut pairs = writes.windows(2);
        if let Some(pair) = pairs.find(|pair| pair[0].source >= pair[1].source) {
            let given = format_args!("{} behind {}", pair[1].source, pair[0].source);
            return refuse(
                "source of a token",
                given,
                "writes in the order of the rows",
            );
        }
        let tokens = match (writes.first(), writes.last()) {
            (Some(first), Some(last)) => first.source..last.source + 1,
            _ => 0..0,
        };
        if let Some(sequences) = sequences {
            check_centres(writes, sequences)?;
        }
        let count = |needed: bool| if needed { tokens.len() } else { 0 };
        let has_window = layout.format().window() != Window::None;
        let mut slots = filled(tokens.len(), -1i64)?;
        let mut residuals = filled(count(has_window), u32::MAX)?;
        let mut centres = filled(count(sequences.is_some()), 0u32)?;
        let mut positions = filled(count(sequences.is_some()), 0i32)?;
        for write in writes {
            let at = write.source - tokens.start;
            slots[at] = i64::from(write.page) * layout.page_size() as i64 + write.token as i64;
            if let (Some(to), Some(page)) = (residuals.get_mut(at), write.residual_page) {
                *to = page;
            }
            if let (Some(row), Some(position)) = (centres.get_mut(at), positions.get_mut(at)) {
                *row = write.sequence as u32;
                *position = sizes::int("a token's number in its sequence", write.position)?;
            }
        }
        let mut lists = Lists::default();
        Ok(Slots {
            slots: lists.add(&slots)?,
            residual_pages: lists.add(&residuals)?,
            centre_rows: lists.add(&centres)?,
            centre_positions: lists.add(&positions)?,
            lists,
            tokens,
        })
    }
}

/// A list of so many equal numbers.
fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>, Error> {
    let mut list = Vec::new();
    reserve("an append's lists", &mut list, len)?;
    list.resize(len, value);
    Ok(list)
}

/// Refuses writes to sequences that there are no centres of, and those that make first centres among others, which these centres are taken off.
fn check_centres(writes: &[TokenWrite], sequences: usize) -> Result<(), Error> {
    if let Some(write) = writes.iter().find(|write| write.sequence >= sequences) {
        let given = format_args!("{} of {sequences}", write.sequence);
        return refuse(
            "sequence to append to",
            given,
            "a sequence with centres of K",
        );
    }
    let first = writes.iter().filter(|write| write.position == 0).count();
    if first > 0 && first < writes.len() {
        let given = format_args!("{first} of {} tokens", writes.len());
        let allowed =
            "calls of their own, since their keys are centres of K of the tokens behind them";
        return refuse("tokens at position 0", given, allowed);
    }
    Ok(())
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
        let builder = CacheConfig::builder(format, Heads::new(q, kv, dim)).centres(false);
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
        centred(layout, writes, rows, None)
    }

    fn centred(
        layout: &PageLayout,
        writes: &[TokenWrite],
        rows: usize,
        sequences: Option<usize>,
    ) -> Result<Slots, Error> {
        let [heads, dim] = LAYOUT;
        Slots::new(layout, 32, writes, [[rows, heads, dim]; 2], sequences)
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
        assert_eq!(slots(&layout, &writes, 6).unwrap().tokens, 0..5);
        assert!(slots(&layout, &writes, 4).is_err());
        let mut swapped = writes.clone();
        swapped.swap(1, 2);
        let refused = slots(&layout, &swapped, 5).unwrap_err();
        let what = "source of a token";
        assert!(matches!(refused, Error::Parameter { what: w, .. } if w == what));
    }

    /// Kills slots in the order of the writes: rows between those that are written have none.
    #[test]
    fn rows_between_those_that_are_written_go_nowhere() {
        let (layout, writes) = writes(KvFormat::INT4);
        let some = [writes[1], writes[4]];
        let made = slots(&layout, &some, 5).unwrap();
        assert_eq!(made.tokens, 1..5);
        let found = numbers(&made, made.slots, 4).into_iter();
        let found: Vec<i64> = found.map(i64::from_le_bytes).collect();
        let of = |w: &TokenWrite| i64::from(w.page) * 32 + w.token as i64;
        assert_eq!(found, [of(&some[0]), -1, -1, of(&some[1])]);
        assert!(slots(&layout, &[], 5).unwrap().tokens.is_empty());
    }

    #[test]
    fn tokens_have_the_centre_of_their_position() {
        let (layout, mut writes) = writes(KvFormat::INT8);
        writes[2].position = 64;
        // Tokens at position 0 make centres, in calls of their own.
        assert!(centred(&layout, &writes, 5, Some(2)).is_err());
        let behind = [&writes[..3], &writes[4..]].concat();
        let made = centred(&layout, &behind, 5, Some(2)).unwrap();
        let list = |place| {
            let found = numbers(&made, place, 5).into_iter();
            found.map(u32::from_le_bytes).collect::<Vec<_>>()
        };
        assert_eq!(list(made.centre_rows), [0, 0, 0, 0, 1]);
        assert_eq!(list(made.centre_positions), [30, 31, 64, 0, 1]);
        assert!(centred(&layout, &writes[3..4], 5, Some(2)).is_ok());
        assert!(centred(&layout, &behind, 5, Some(1)).is_err());
        let base = crate::handles::DeviceAddress::new(1);
        let without = slots(&layout, &writes, 5).unwrap();
        assert!(
            without.centre_rows.at(base).is_null() && without.centre_positions.at(base).is_null()
        );
    }
}
