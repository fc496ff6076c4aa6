//! The page table at its edges: the last free page, sequences that do not exist, heads with runs of their own, what read_back leaves out.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use attn_conformance::fake::{Call, limited};
use attn_core::{
    Append, CacheConfig, Error, Heads, HostPages, KvCache, KvFormat, PageStore, PageTable,
    TokenWrite,
};
use rstest::rstest;

const DIM: usize = 64;

fn config(format: KvFormat, heads: usize, pages: usize) -> CacheConfig {
    let heads = Heads::new(heads, heads, DIM);
    CacheConfig::builder(format, heads)
        .centres(false)
        .unit_tensor_scales()
        .sequences(3)
        .pages(pages)
        .build()
}

fn cache(format: KvFormat, heads: usize, pages: usize) -> KvCache {
    let config = config(format, heads, pages);
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// Of so many tokens to each of these sequences.
fn appends<const N: usize>(of: [(usize, usize); N]) -> [Append; N] {
    of.map(|(sequence, tokens)| Append { sequence, tokens })
}

fn values(count: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + seed * 101 + i / 640) % 129) as f32 / 16.0 - 4.0;
    (0..count).map(value).collect()
}

/// Tokens of one head, K and V.
fn grow(cache: &mut KvCache, sequence: usize, tokens: usize) -> Result<(), Error> {
    let (k, v) = (values(tokens * DIM, 1), values(tokens * DIM, 2));
    cache.append(sequence, &k, &v)
}

/// The page table, and the number of free pages.
type Books = (PageTable, usize);

fn books(cache: &KvCache) -> Books {
    (cache.table().clone(), cache.free_pages())
}

fn full(found: Result<(), Error>) -> (usize, usize, usize) {
    match found {
        Err(Error::CacheFull {
            needed,
            free,
            total,
        }) => (needed, free, total),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sequence_that_does_not_exist_is_named_before_anything_else() {
    let mut cache = cache(KvFormat::INT8, 1, 4);
    grow(&mut cache, 0, 5).unwrap();
    let before = books(&cache);
    let pages = cache.read_back(0).unwrap();
    for error in [
        cache.append(3, &[0.0; 63], &[0.0f32; 0]).unwrap_err(),
        cache
            .append_with(
                &[Append {
                    sequence: 3,
                    tokens: 1,
                }],
                |_, _| Ok(()),
            )
            .unwrap_err(),
        cache
            .append_with(
                &[Append {
                    sequence: 3,
                    tokens: 0,
                }],
                |_, _| Ok(()),
            )
            .unwrap_err(),
        cache.fork(3, 1).unwrap_err(),
        cache.fork(0, 3).unwrap_err(),
        cache.restore_pages(3, 5, &pages).unwrap_err(),
        cache.free_sequence(3).unwrap_err(),
        cache.read_back(3).unwrap_err(),
    ] {
        assert!(
            matches!(error, Error::Sequence { given: 3, count: 3 }),
            "{error}"
        );
    }
    assert_eq!(books(&cache), before);
}

#[rstest]
#[case(&[Append { sequence: 0, tokens: 1 }, Append { sequence: 0, tokens: 1 }])]
#[case(&[Append { sequence: 2, tokens: 1 }, Append { sequence: 0, tokens: 3 }, Append { sequence: 2, tokens: 0 }])]
#[case(&[Append { sequence: 1, tokens: 0 }, Append { sequence: 1, tokens: 0 }])]
fn a_sequence_named_twice_is_refused(#[case] appends: &[Append]) {
    let mut cache = cache(KvFormat::INT8, 1, 4);
    let error = cache.append_with(appends, |_, _| Ok(())).unwrap_err();
    assert!(
        matches!(error, Error::Repeated { sequence } if sequence == appends[0].sequence),
        "{error}"
    );
    assert_eq!(cache.free_pages(), 4);
}

#[test]
fn no_tokens_take_no_page_and_are_not_written() {
    let mut cache = cache(KvFormat::INT4, 1, 4);
    let untouched = |_: &dyn PageStore, _: &[TokenWrite]| -> Result<(), Error> {
        panic!("there is nothing to write")
    };
    cache
        .append_with(&appends([(0, 0), (1, 0)]), untouched)
        .unwrap();
    cache.append_with(&[], untouched).unwrap();
    grow(&mut cache, 0, 70).unwrap();
    cache.fork(0, 1).unwrap();
    // The pool is full now: copies of the shared pages would not be had.
    assert_eq!(cache.free_pages(), 0);
    let before = books(&cache);
    cache
        .append_with(&appends([(1, 0), (2, 0)]), untouched)
        .unwrap();
    assert_eq!(books(&cache), before);
    // Nor beside tokens of another sequence.
    let mut cache = self::cache(KvFormat::INT4, 1, 8);
    grow(&mut cache, 0, 3).unwrap();
    cache.fork(0, 1).unwrap();
    let free = cache.free_pages();
    cache
        .append_with(&appends([(1, 0), (2, 1), (0, 0)]), |_, writes| {
            assert_eq!(writes.len(), 1);
            Ok(())
        })
        .unwrap();
    assert_eq!((cache.free_pages(), cache.table().lens[2]), (free - 2, 1));
    assert_eq!(cache.table().pages[0], cache.table().pages[1]);
}

#[test]
fn what_an_append_lacks_is_counted_to_the_page() {
    // A home page and a residual page.
    let mut one = cache(KvFormat::INT4, 1, 1);
    assert_eq!(full(grow(&mut one, 0, 1)), (2, 1, 1));
    let mut two = cache(KvFormat::INT4, 1, 2);
    grow(&mut two, 0, 1).unwrap();
    // Copies of the two shared open pages, two new home pages and two new residual pages.
    let mut cache = cache(KvFormat::INT4, 1, 9);
    grow(&mut cache, 0, 70).unwrap();
    cache.fork(0, 1).unwrap();
    assert_eq!(cache.free_pages(), 5);
    let before = books(&cache);
    assert_eq!(full(grow(&mut cache, 1, 130)), (6, 5, 9));
    // The residual page of the open page is not copied where it is dropped: a copy, six home pages, four residual pages.
    assert_eq!(full(grow(&mut cache, 1, 8 * 64 - 70)), (11, 5, 9));
    // Forks take nothing.
    let mut small = self::cache(KvFormat::INT4, 1, 4);
    grow(&mut small, 0, 70).unwrap();
    small.fork(0, 1).unwrap();
    assert_eq!(full(grow(&mut small, 1, 1)), (2, 0, 4));
    // Two home pages and their residual pages.
    let pages = cache.read_back(0).unwrap();
    assert_eq!(pages.len(), 4);
    grow(&mut cache, 2, 65).unwrap();
    cache.free_sequence(1).unwrap();
    cache.fork(2, 1).unwrap();
    cache.free_sequence(2).unwrap();
    assert_eq!(cache.free_pages(), 1);
    let after = books(&cache);
    assert_eq!(full(cache.restore_pages(2, 70, &pages)), (4, 1, 9));
    assert_eq!(books(&cache), after);
    cache.free_sequence(1).unwrap();
    cache.restore_pages(2, 70, &pages).unwrap();
    assert_eq!(cache.read_back(2).unwrap(), pages);
    assert_eq!(before.0.pages[0], cache.table().pages[0]);
}

#[rstest]
#[case(KvFormat::INT8)]
#[case(KvFormat::INT4)]
fn a_fork_that_grows_over_pages_has_the_bytes_of_one_that_was_never_forked(
    #[case] format: KvFormat,
) {
    let mut cache = cache(format, 1, 24);
    let (k, v) = (values(250 * DIM, 5), values(250 * DIM, 6));
    cache.append(0, &k[..70 * DIM], &v[..70 * DIM]).unwrap();
    cache.fork(0, 1).unwrap();
    cache.append(1, &k[70 * DIM..], &v[70 * DIM..]).unwrap();
    cache.append(2, &k, &v).unwrap();
    assert_eq!(cache.read_back(1).unwrap(), cache.read_back(2).unwrap());
    // The other goes on, too.
    cache.append(0, &k[70 * DIM..], &v[70 * DIM..]).unwrap();
    assert_eq!(cache.read_back(0).unwrap(), cache.read_back(2).unwrap());
}

#[rstest]
#[case("int8", 70)]
#[case("int4", 70)]
#[case("int4", 64)]
#[case("bf16/int4-g1", 1)]
#[case("int8/int4", 70)]
#[case("int4-r2/int8", 130)]
fn read_back_leaves_out_what_no_token_wrote(#[case] format: &str, #[case] tokens: usize) {
    let format: KvFormat = format.parse().unwrap();
    let (mut clean, mut dirty) = (cache(format, 1, 6), cache(format, 1, 6));
    let garbage = vec![0xff; dirty.layout().page_bytes()];
    for page in 0..6 {
        dirty.write_page(page, &garbage).unwrap();
    }
    grow(&mut clean, 0, tokens).unwrap();
    grow(&mut dirty, 0, tokens).unwrap();
    assert_eq!(clean.read_back(0).unwrap(), dirty.read_back(0).unwrap());
}

/// Kills parameters of V, which are K's first group, that are taken for all of K's.
#[rstest]
#[case("int8-latents", (96, 64))]
#[case("int8-latents", (64, 64))]
#[case("int8-plain-latents", (128, 80))]
#[case("bf16-latents", (96, 64))]
fn read_back_leaves_out_what_no_latent_wrote(
    #[case] format: KvFormat,
    #[case] dim: (usize, usize),
) {
    let read = |garbage: u8| {
        let config = CacheConfig::builder(format, Heads::new(1, 1, dim))
            .centres(false)
            .pages(2)
            .build();
        let store = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(store)).unwrap();
        let page = vec![garbage; cache.layout().page_bytes()];
        for i in 0..2 {
            cache.write_page(i, &page).unwrap();
        }
        cache
            .append(0, &values(70 * dim.0, 5), &[0.0f32; 0])
            .unwrap();
        cache.read_back(0).unwrap()
    };
    assert_eq!(read(0), read(0xff));
}

#[rstest]
#[case("int8", 70)]
#[case("int4", 70)]
#[case("int4", 128)]
#[case("int4/bf16", 5)]
#[case("int8/int4-r2-w4", 130)]
fn each_head_has_the_bytes_that_it_has_alone(#[case] format: &str, #[case] tokens: usize) {
    let format: KvFormat = format.parse().unwrap();
    let mut both = cache(format, 2, 12);
    let sides = [1, 2].map(|seed| values(tokens * 2 * DIM, seed));
    both.append(0, &sides[0], &sides[1]).unwrap();
    let pages = both.read_back(0).unwrap();
    for head in 0..2 {
        let mut alone = cache(format, 1, 8);
        let [k, v] = [&sides[0], &sides[1]].map(|side| -> Vec<f32> {
            let rows = side.chunks_exact(DIM).skip(head).step_by(2);
            rows.flatten().copied().collect()
        });
        alone.append(0, &k, &v).unwrap();
        let alone = alone.read_back(0).unwrap();
        assert_eq!(alone.len(), pages.len());
        for (page, alone) in pages.iter().zip(&alone) {
            assert_eq!(page.len(), 2 * alone.len());
            assert!(
                page[head * alone.len()..][..alone.len()] == alone[..],
                "head {head}"
            );
        }
    }
    both.restore_pages(1, tokens, &pages).unwrap();
    let more = values(2 * DIM, 9);
    for sequence in [0, 1] {
        both.append(sequence, &more, &more).unwrap();
    }
    assert_eq!(both.read_back(0).unwrap(), both.read_back(1).unwrap());
}

#[test]
fn a_copy_that_fails_ends_the_append_before_any_token_is_written() {
    let (config, fails) = (
        config(KvFormat::INT8, 1, 8),
        Arc::new(AtomicBool::new(false)),
    );
    let asked = fails.clone();
    let mut cache = limited(config, move |call, count| {
        match call == Call::Pages && asked.load(Ordering::Relaxed) {
            true => 0,
            false => count,
        }
    });
    grow(&mut cache, 0, 5).unwrap();
    cache.fork(0, 1).unwrap();
    let before = (books(&cache), cache.read_back(0).unwrap());
    fails.store(true, Ordering::Relaxed);
    assert!(matches!(grow(&mut cache, 1, 3), Err(Error::Device { .. })));
    // The sequence after the one whose copy fails is not touched, either.
    let found = cache.append_with(&appends([(1, 1), (2, 1)]), |_, _| Ok(()));
    assert!(matches!(found, Err(Error::Device { .. })));
    assert_eq!((books(&cache), cache.read_back(0).unwrap()), before);
    fails.store(false, Ordering::Relaxed);
    grow(&mut cache, 1, 3).unwrap();
    assert_eq!(cache.read_back(0).unwrap(), before.1);
}
