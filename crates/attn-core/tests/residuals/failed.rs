//! Residual pages after failed calls, and after pages that were read come back.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use attn_core::{Append, Error, KvCache, PageTable};
use rstest::rstest;

use super::{
    alone, assert_consistent, config, grow_to,
    limited::{Call, failure, limited},
};

const NEVER: usize = usize::MAX;

/// A cache, and the tokens and the page writes after which its store fails.
fn failing(format: &str, page_size: usize, pages: usize) -> (KvCache, [Arc<AtomicUsize>; 2]) {
    let config = config(format, page_size, pages);
    let after = [(); 2].map(|()| Arc::new(AtomicUsize::new(NEVER)));
    let [tokens, copies] = after.clone();
    let cache = limited(config, move |call, count| match call {
        Call::Tokens => tokens.load(Ordering::Relaxed),
        Call::Pages => {
            let left = copies.load(Ordering::Relaxed);
            if left != NEVER {
                copies.store(left.saturating_sub(count), Ordering::Relaxed);
            }
            left
        }
    });
    (cache, after)
}

type State = (PageTable, Vec<Vec<Vec<u8>>>, Vec<u32>);

/// The table, the bytes, the number of free pages, and the order in which they would be taken.
fn state(cache: &mut KvCache) -> State {
    let table = cache.table().clone();
    let bytes = (0..4).map(|b| cache.read_back(b).unwrap()).collect();
    // An append that takes as many free pages as it can, and fails.
    let (free, config) = (cache.free_pages(), cache.config());
    let fits = |pages: &usize| config.pages_for(pages * config.page_size) <= free;
    let pages = (0..=free).rev().find(fits).unwrap();
    let mut order = vec![free as u32];
    let spare = Append {
        sequence: 3,
        tokens: pages * config.page_size,
    };
    let found = cache.append_with(&[spare], |_, writes| {
        order.extend(writes.iter().map(|w| w.page));
        order.extend(writes.iter().filter_map(|w| w.residual_page));
        Err(failure("looking"))
    });
    assert_eq!(found.is_err(), pages > 0);
    (table, bytes, order)
}

#[rstest]
fn a_failed_append_leaves_pages_residuals_lengths_and_the_free_list(
    #[values("int4", "int8/int4", "int4/int4-w4", "int8")] format: &str,
    #[values(16, 64)] page_size: usize,
    #[values(1, 70, 600)] more: usize,
) {
    let (mut cache, [tokens, copies]) = failing(format, page_size, 6000 / page_size);
    grow_to(&mut cache, 0, 1, 330).unwrap();
    cache.fork(0, 1).unwrap();
    grow_to(&mut cache, 2, 2, 450).unwrap();
    let before = state(&mut cache);
    // Twice: what a failure leaves must fail in the same way.
    for _ in 0..2 {
        for (sequence, tokens_written) in [(0, 0), (1, more / 2), (2, more - 1)] {
            tokens.store(tokens_written, Ordering::Relaxed);
            let len = cache.table().lens[sequence] + more;
            let error = grow_to(&mut cache, sequence, 9, len).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error}");
            // Only the open page of a sequence that shares none takes bytes, behind its last token.
            assert!(state(&mut cache) == before, "{sequence}");
        }
        tokens.store(NEVER, Ordering::Relaxed);
        for written in 0..2 {
            copies.store(written, Ordering::Relaxed);
            let batch = [2, 1].map(|sequence| Append {
                sequence,
                tokens: more,
            });
            let found = cache.append_with(&batch, |_, _| Err(failure("recording")));
            assert!(found.is_err());
            copies.store(NEVER, Ordering::Relaxed);
            assert!(state(&mut cache) == before, "{written} copies");
        }
    }
    for (sequence, seed) in [(1, 1), (2, 2), (0, 1)] {
        let len = cache.table().lens[sequence] + more;
        grow_to(&mut cache, sequence, seed, len).unwrap();
        assert!(cache.read_back(sequence).unwrap() == alone(format, page_size, seed, len));
    }
    assert_consistent(&cache);
}

#[rstest]
#[case("int4", 64, 640)]
#[case("int4-w4/int8", 32, 1000)]
#[case("int4", 128, 700)]
fn a_failed_append_gives_recycled_pages_their_bytes_back(
    #[case] format: &str,
    #[case] page_size: usize,
    #[case] max_len: usize,
) {
    let pages = config(format, page_size, 1).pages_for(max_len);
    for from in [max_len - 100, max_len - 260, page_size + 1] {
        let (mut cache, [tokens, _]) = failing(format, page_size, pages);
        grow_to(&mut cache, 0, 1, from).unwrap();
        let before = state(&mut cache);
        for written in [0, 1, (max_len - from) / 2, max_len - from - 1] {
            tokens.store(written, Ordering::Relaxed);
            assert!(grow_to(&mut cache, 0, 9, max_len).is_err());
            assert!(
                state(&mut cache) == before,
                "from {from}, {written} written"
            );
        }
        tokens.store(NEVER, Ordering::Relaxed);
        grow_to(&mut cache, 0, 1, max_len).unwrap();
        assert_eq!(cache.free_pages(), 0);
        assert!(cache.read_back(0).unwrap() == alone(format, page_size, 1, max_len));
    }
}

#[rstest]
fn a_restored_sequence_is_the_one_that_was_read_back(
    #[values("int4", "int8/int4", "int4-w4/int4", "int8", "int4-w0")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(1, 64, 257, 600)] len: usize,
) {
    let (mut cache, [_, copies]) = failing(format, page_size, 3000 / page_size);
    grow_to(&mut cache, 0, 1, len).unwrap();
    let pages = cache.read_back(0).unwrap();
    let before = state(&mut cache);
    for count in [
        0,
        len.div_ceil(page_size) - 1,
        // One less than what the next token reads.
        len.div_ceil(page_size) + cache.config().format.next_residual_pages(page_size, len) - 1,
        pages.len() + 1,
    ] {
        let mut other = pages.clone();
        other.resize(count, pages[0].clone());
        let error = cache.restore_pages(1, len, &other).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: "pages", given, needed } if (given, needed) == (count, pages.len())),
            "{error}"
        );
    }
    copies.store(pages.len() - 1, Ordering::Relaxed);
    assert!(cache.restore_pages(1, len, &pages).is_err());
    copies.store(NEVER, Ordering::Relaxed);
    assert!(state(&mut cache) == before);
    cache.restore_pages(1, len, &pages).unwrap();
    assert!(cache.read_back(1).unwrap() == pages);
    assert_consistent(&cache);
    // It goes on as the first does, and takes nothing from it.
    grow_to(&mut cache, 1, 1, len + 150).unwrap();
    assert!(cache.read_back(1).unwrap() == alone(format, page_size, 1, len + 150));
    assert!(cache.read_back(0).unwrap() == pages);
    for sequence in 0..2 {
        cache.free_sequence(sequence).unwrap();
    }
    assert_eq!(cache.free_pages(), cache.config().num_pages);
    assert_eq!(cache.table().residual_pages, vec![Vec::<u32>::new(); 4]);
}
