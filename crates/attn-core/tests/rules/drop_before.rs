//! Tokens that no window sees any more: which pages are freed, and what forks, truncations, appends and steps make of the rest.

use attn_core::{
    Append, CacheConfig, DecodeStep, Error, HeadDim, Heads, HostPages, KvCache, KvFormat, KvSource,
    PageTable, Plan, Problem,
};
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 1,
    kv: 1,
    dim: HeadDim::same(64),
};
const PAGES: usize = 64;

fn cache(format: &str, page_size: usize) -> KvCache {
    let config = CacheConfig::builder(format.parse().unwrap(), HEADS)
        .centres(false)
        .unit_tensor_scales()
        .sequences(3)
        .page_size(page_size)
        .pages(PAGES)
        .build();
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

fn grow(cache: &mut KvCache, sequence: usize, tokens: usize) {
    let append = Append { sequence, tokens };
    let x = vec![0.5; tokens * HEADS.dim.k];
    cache.append_batch(&[append], &x, &x).unwrap();
}

/// Pages that the table names, each counted once.
fn owned(table: &PageTable) -> usize {
    let lists = table.pages.iter().chain(&table.residual_pages).flatten();
    let mut pages: Vec<u32> = lists
        .copied()
        .filter(|page| *page != PageTable::DROPPED)
        .collect();
    pages.sort_unstable();
    pages.dedup();
    pages.len()
}

/// Books: every page is owned or free, lists are as long as the lengths say, and `first` tokens are gone.
fn check(cache: &KvCache, sequence: usize, len: usize, first: usize) {
    let (table, page_size) = (cache.table(), cache.config().page_size);
    let pages = &table.pages[sequence];
    assert_eq!(
        [table.lens[sequence], table.first_tokens[sequence]],
        [len, first]
    );
    assert_eq!(pages.len(), len.div_ceil(page_size));
    let dropped: Vec<bool> = pages.iter().map(|p| *p == PageTable::DROPPED).collect();
    let expected: Vec<bool> = (0..pages.len()).map(|i| i < first / page_size).collect();
    assert_eq!(dropped, expected);
    // Residual pages of the first tile go at once; what is dropped is whole tiles.
    let of_first = table
        .first_residual_pages
        .min(table.residual_pages[sequence].len());
    let (of_first, of_last) = table.residual_pages[sequence].split_at(of_first);
    let gone = |page: &u32| *page == PageTable::DROPPED;
    assert!(of_first.iter().all(|page| gone(page) == (first > 0)));
    assert!(of_last.len() <= pages.len() - first / page_size && !of_last.iter().any(gone));
    assert_eq!(owned(table) + cache.free_pages(), PAGES);
}

#[rstest]
#[case(16, 300, 63, 0)]
#[case(16, 300, 64, 64)]
#[case(16, 300, 250, 192)]
#[case(64, 300, 191, 128)]
#[case(64, 300, 300, 256)]
#[case(64, 256, 256, 256)]
#[case(128, 300, 255, 128)]
#[case(128, 300, 256, 256)]
fn whole_tiles_and_pages_before_the_token_are_freed(
    #[values("int8", "int4", "int8/int4", "fp8")] format: &str,
    #[case] page_size: usize,
    #[case] len: usize,
    #[case] token: usize,
    #[case] first: usize,
) {
    let mut cache = cache(format, page_size);
    grow(&mut cache, 0, len);
    let before = cache.table().clone();
    let free = cache.free_pages();
    cache.drop_before(0, token).unwrap();
    check(&cache, 0, len, first);
    let of_first = before.first_residual_pages;
    let residuals = before.residual_pages[0].len() - of_first;
    let left = residuals.min(len.div_ceil(page_size) - first / page_size);
    let freed_first = if first > 0 { of_first } else { 0 };
    let freed = first / page_size + residuals - left + freed_first;
    assert_eq!(cache.free_pages(), free + freed);
    // What stays is where it was.
    let table = cache.table();
    let home = first / page_size;
    assert_eq!(table.pages[0][home..], before.pages[0][home..]);
    assert_eq!(
        table.residual_pages[0][of_first..],
        before.residual_pages[0][of_first + residuals - left..]
    );
    // Again, and for less: nothing.
    let after = table.clone();
    cache.drop_before(0, token).unwrap();
    cache.drop_before(0, 0).unwrap();
    assert_eq!(*cache.table(), after);
    // Appends go on, behind a page that is open and one that is not.
    grow(&mut cache, 0, 5);
    grow(&mut cache, 0, 150);
    check(&cache, 0, len + 155, first);
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), PAGES);
    check(&cache, 0, 0, 0);
}

#[test]
fn freed_pages_are_taken_again_at_once() {
    let mut cache = cache("int8", 64);
    for _ in 0..PAGES {
        grow(&mut cache, 0, 64);
    }
    let append = Append {
        sequence: 1,
        tokens: 65,
    };
    assert_eq!(cache.pages_needed(&[append]).unwrap(), 2);
    cache.drop_before(0, 64 * 2).unwrap();
    grow(&mut cache, 1, 65);
    assert_eq!(cache.free_pages(), 0);
    check(&cache, 0, PAGES * 64, 128);
}

#[rstest]
fn forks_share_pages_until_each_has_dropped_them(#[values("int8", "int4")] format: &str) {
    let mut cache = cache(format, 64);
    grow(&mut cache, 0, 700);
    let used = PAGES - cache.free_pages();
    cache.fork(0, 1).unwrap();
    cache.drop_before(0, 400).unwrap();
    check(&cache, 0, 700, 384);
    check(&cache, 1, 700, 0);
    assert_eq!(PAGES - cache.free_pages(), used);
    // A fork of what is left; appends copy the open page alone.
    cache.fork(0, 2).unwrap();
    grow(&mut cache, 2, 1);
    check(&cache, 2, 701, 384);
    cache.drop_before(1, 700).unwrap();
    check(&cache, 1, 700, 640);
    for sequence in [2, 0, 1] {
        cache.free_sequence(sequence).unwrap();
    }
    assert_eq!(cache.free_pages(), PAGES);
}

#[rstest]
fn a_truncation_keeps_the_dropped_tokens_or_none(
    #[values("int8", "int4", "int8/int4")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
) {
    let mut cache = cache(format, page_size);
    grow(&mut cache, 0, 300);
    cache.drop_before(0, 300).unwrap();
    assert_eq!(cache.table().first_tokens[0], 256);
    let before = cache.table().clone();
    for len in [255, 1] {
        let refused = cache.truncate(0, len);
        assert!(
            matches!(refused, Err(Error::Truncate { given, least: 256, .. }) if given == len),
            "{refused:?}"
        );
        assert_eq!(*cache.table(), before);
    }
    cache.truncate(0, 270).unwrap();
    check(&cache, 0, 270, 256);
    cache.truncate(0, 256).unwrap();
    check(&cache, 0, 256, 256);
    grow(&mut cache, 0, 70);
    check(&cache, 0, 326, 256);
    cache.truncate(0, 0).unwrap();
    check(&cache, 0, 0, 0);
    assert_eq!(cache.free_pages(), PAGES);
}

#[test]
fn bad_tokens_and_copies_are_refused_and_nothing_changes() {
    let mut cache = cache("int4", 64);
    grow(&mut cache, 0, 300);
    let before = cache.table().clone();
    let beyond = cache.drop_before(0, 301);
    assert!(
        matches!(
            beyond,
            Err(Error::PastEnd {
                given: 301,
                tokens: 300,
                ..
            })
        ),
        "{beyond:?}"
    );
    let missing = cache.drop_before(3, 0);
    assert!(matches!(missing, Err(Error::Sequence { given: 3, .. })));
    assert_eq!(*cache.table(), before);
    cache.read_back(0).unwrap();
    cache.drop_before(0, 64).unwrap();
    let copy = cache.read_back(0);
    assert!(
        matches!(
            copy,
            Err(Error::Dropped {
                first: 0,
                kept: 64,
                ..
            })
        ),
        "{copy:?}"
    );
    // The number of sequences grows with the lists.
    cache.add_sequences(2).unwrap();
    assert_eq!(cache.table().first_tokens, [64, 0, 0, 0, 0]);
}

/// Whether a step of `q_len` tokens over sequences 0 and 1, of 300 tokens each, is taken.
fn step(
    cache: &KvCache,
    q_lens: [usize; 2],
    window: Option<usize>,
    causal: bool,
) -> Result<(), Error> {
    let mut problem = Problem::new(HEADS, [512; 2]).q_lens(q_lens).causal(causal);
    problem.scores.window_left = window;
    let plan = Plan::new("test", &problem, cache.config().format, ())?;
    let rows = problem.out_elements();
    let (q, mut out) = (vec![1.0; rows], vec![0.0; rows]);
    let of_cache = DecodeStep::new(&plan, &q[..], KvSource::Cache(cache), &mut out[..]).map(|_| ());
    let chosen = cache.sequences(&[0, 1])?;
    let mut now = problem.clone();
    now.kv_lens = vec![300; 2];
    assert_eq!(chosen.check_problem(&now).is_ok(), of_cache.is_ok());
    of_cache
}

/// 256 of sequence 1's 300 tokens are gone. A window that sees 256 from the first query token on is the longest.
#[rstest]
#[case([1, 1], Some(43), true, true)]
#[case([1, 1], Some(44), true, false)]
#[case([1, 1], None, true, false)]
#[case([9, 0], None, true, true)]
#[case([9, 9], Some(35), true, true)]
#[case([1, 9], Some(36), true, false)]
#[case([1, 44], Some(0), true, true)]
#[case([1, 45], Some(0), true, false)]
#[case([1, 301], Some(0), true, false)]
#[case([1, 9], Some(35), false, true)]
#[case([1, 9], Some(36), false, false)]
fn steps_whose_windows_see_dropped_tokens_are_refused(
    #[values("int8", "int4", "bf16")] format: &str,
    #[case] q_lens: [usize; 2],
    #[case] window: Option<usize>,
    #[case] causal: bool,
    #[case] is_taken: bool,
) {
    let mut cache = cache(format, 64);
    for sequence in [0, 1] {
        grow(&mut cache, sequence, 300);
    }
    cache.drop_before(1, 290).unwrap();
    let taken = step(&cache, q_lens, window, causal);
    match taken {
        Ok(()) => assert!(is_taken),
        Err(Error::Dropped {
            sequence: 1,
            kept: 256,
            first,
            ..
        }) => assert!(!is_taken && first < 256, "{first}"),
        Err(other) => panic!("{other}"),
    }
}

/// A step reads the residuals that its window sees, so that those of dropped pages are not missed.
#[test]
fn residuals_outside_the_window_are_not_missed() {
    let format: KvFormat = "int4-w4".parse().unwrap();
    let problem = Problem::new(HEADS, [1000]);
    assert_eq!(problem.first_residual_read(format, 1, 1000), 768);
    let windowed = problem.clone().window_left(70);
    assert_eq!(windowed.first_residual_read(format, 1, 1000), 896);
    assert_eq!(windowed.first_seen_tile(1, 1000), 896);
    assert_eq!(windowed.first_residual_read(format, 300, 1000), 576);
    let all = windowed.causal(false);
    assert_eq!(all.first_residual_read(format, 300, 1000), 768);
}
