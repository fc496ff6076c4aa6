//! Residual pages after failed calls, and after pages that were read come back.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use attn_conformance::fake::{Call, failure, limited};
use attn_core::{Append, Error, KvCache, PageTable};
use rstest::rstest;

use super::{alone, assert_consistent, assert_consistent_with_restored, config, grow_to};

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

/// Pages, residuals, lengths and the free list's order stay.
#[rstest]
fn a_failed_append_changes_nothing(
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

/// It is the one that was read back.
#[rstest]
fn a_restored_sequence_is_the_same(
    #[values("int4", "int8/int4", "int4-w4/int4", "int8", "int4-w0")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(1, 64, 257, 600)] len: usize,
) {
    let (mut cache, [_, copies]) = failing(format, page_size, 3000 / page_size);
    grow_to(&mut cache, 0, 1, len).unwrap();
    let pages = cache.read_back(0).unwrap();
    let (home, format_of) = (len.div_ceil(page_size), cache.config().format);
    // As many residual pages as a cache holds between steps may come along.
    let most = home + format_of.residual_pages(page_size, len, 0);
    for count in [
        0,
        home - 1,
        // One less than what the next token reads.
        home + format_of.next_residual_pages(page_size, len) - 1,
        most + 1,
    ] {
        let mut other = pages.clone();
        other.resize(count, pages[0].clone());
        let error = cache.restore_pages(1, len, &other).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: "pages", given, needed } if (given, needed) == (count, most)),
            "{error}"
        );
    }
    let spare = vec![vec![0; pages[0].len()]; most - pages.len()];
    // They come between those of the first tile and the last ones.
    let first = home + format_of.first_residual_pages(page_size).min(home);
    let more = [&pages[..first], &spare, &pages[first..]].concat();
    cache.restore_pages(1, len, &more).unwrap();
    assert!(cache.read_back(1).unwrap() == pages);
    cache.free_sequence(1).unwrap();
    let before = state(&mut cache);
    copies.store(pages.len() - 1, Ordering::Relaxed);
    assert!(cache.restore_pages(1, len, &pages).is_err());
    copies.store(NEVER, Ordering::Relaxed);
    assert!(state(&mut cache) == before);
    cache.restore_pages(1, len, &pages).unwrap();
    assert!(cache.read_back(1).unwrap() == pages);
    assert_consistent_with_restored(&cache, &[1]);
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

/// What an open step refuses of a sequence that it grows or, torn, may have spoilt.
fn assert_refused_until_cancelled(cache: &mut KvCache, sequence: usize) {
    let row = [0.5; 64];
    let step = |error: Result<(), Error>| matches!(error, Err(Error::Step { .. }));
    assert!(step(cache.append(3, &row, &row)));
    assert!(step(cache.reserve(&[])));
    assert!(step(cache.truncate(sequence, 1)));
    assert!(step(cache.fork(sequence, 3)));
    assert!(step(cache.free_sequence(sequence)));
    assert!(step(cache.image(sequence).map(|_| ())));
    let heads = attn_core::Heads::new(1, 1, 64);
    let problem = attn_core::Problem::new(heads, [2000; 4]);
    assert!(step(cache.check_queries(&problem)));
}

/// A cache in which an append recycles residual pages: one whose pool has no other page left.
fn full(format: &str, page_size: usize, max_len: usize) -> (KvCache, [Arc<AtomicUsize>; 2]) {
    let pages = config(format, page_size, 1).pages_for(max_len);
    let (mut cache, fails) = failing(format, page_size, pages);
    grow_to(&mut cache, 0, 1, max_len - 260).unwrap();
    (cache, fails)
}

#[test]
fn a_device_that_fails_twice_leaves_the_step_open_until_old_residuals_are_back() {
    let (mut cache, [tokens, copies]) = full("int4", 64, 640);
    let before = state(&mut cache);
    tokens.store(3, Ordering::Relaxed);
    copies.store(0, Ordering::Relaxed);
    let error = grow_to(&mut cache, 0, 9, 640).unwrap_err();
    let text = error.to_string();
    let second = std::error::Error::source(&error).map(ToString::to_string);
    assert!(matches!(error, Error::StepLeftOpen { .. }), "{text}");
    assert!(
        text.contains("writing tokens") && text.contains("cancel_step"),
        "{text}"
    );
    assert_eq!(second.as_deref(), Some("test: writing pages failed"));
    assert_refused_until_cancelled(&mut cache, 0);
    // It goes on failing for a while.
    assert!(matches!(cache.cancel_step(), Err(Error::Device { .. })));
    copies.store(1, Ordering::Relaxed);
    assert!(matches!(cache.cancel_step(), Err(Error::Device { .. })));
    assert!(cache.open_step().is_some());
    copies.store(NEVER, Ordering::Relaxed);
    cache.cancel_step().unwrap();
    tokens.store(NEVER, Ordering::Relaxed);
    assert!(state(&mut cache) == before);
    // Or the write is repeated, which ends the step.
    tokens.store(3, Ordering::Relaxed);
    copies.store(0, Ordering::Relaxed);
    assert!(grow_to(&mut cache, 0, 9, 640).is_err());
    tokens.store(NEVER, Ordering::Relaxed);
    let [k, v] = [1, 101].map(|seed| super::values(seed, 380, 640));
    cache.write(0, &k, &v).unwrap();
    assert!(cache.read_back(0).unwrap() == alone("int4", 64, 1, 640));
    assert_consistent(&cache);
}

#[test]
fn a_step_that_is_torn_while_it_begins_can_only_be_cancelled() {
    // Sequence 2 drops residuals and takes all free pages, so that the copies of the open pages of a fork go to old residual pages.
    let batch = [(2, 300), (1, 70)].map(|(sequence, tokens)| Append { sequence, tokens });
    let built = |pages: usize| {
        let (mut cache, fails) = failing("int4", 64, pages);
        grow_to(&mut cache, 0, 1, 330).unwrap();
        cache.fork(0, 1).unwrap();
        grow_to(&mut cache, 2, 2, 450).unwrap();
        let needed = cache.pages_needed(&batch).unwrap();
        (needed <= cache.free_pages()).then_some((cache, fails))
    };
    let (mut cache, [_, copies]) = (24..100).find_map(built).unwrap();
    assert_eq!(cache.pages_needed(&batch).unwrap(), cache.free_pages());
    let before = state(&mut cache);
    // One page is copied over old residuals; the next copy fails, and so does the way back.
    copies.store(1, Ordering::Relaxed);
    let error = cache.append_with(&batch, |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, Error::StepLeftOpen { .. }), "{error}");
    assert_eq!(*cache.table(), before.0);
    for sequence in [1, 2] {
        assert_refused_until_cancelled(&mut cache, sequence);
    }
    let written = cache.write_with(0, |_, _| Ok(()));
    assert!(matches!(written, Err(Error::Step { .. })));
    assert!(matches!(cache.cancel_step(), Err(Error::Device { .. })));
    copies.store(NEVER, Ordering::Relaxed);
    cache.cancel_step().unwrap();
    assert!(state(&mut cache) == before);
    cache.append_with(&batch, |_, _| Ok(())).unwrap();
    assert_eq!(cache.table().lens, [330, 400, 750, 0]);
}
