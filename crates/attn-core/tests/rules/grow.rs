//! A cache grows in place: its sequences keep their bytes, and a refusal changes nothing.

use attn_conformance::noise::uniform;
use attn_core::{CacheConfig, Error, HeadDim, Heads, HostPages, KvCache, KvFormat, Scheme};
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 2,
    kv: 2,
    dim: HeadDim::same(64),
};

fn config(format: KvFormat, pages: usize) -> CacheConfig {
    CacheConfig::builder(format, HEADS)
        .centres(false)
        .unit_tensor_scales()
        .sequences(2)
        .pages(pages)
        .build()
}

fn cache(config: &CacheConfig) -> KvCache {
    KvCache::new(config.clone(), Box::new(HostPages::new(config).unwrap())).unwrap()
}

/// Appends tokens `from..to` of a stream of values.
fn append(cache: &mut KvCache, sequence: usize, from: usize, to: usize) -> Result<(), Error> {
    let row = HEADS.kv * HEADS.dim.k;
    let [k, v] = [1, 2].map(|side| uniform(side, from * row..to * row));
    cache.append(sequence, &k, &v)
}

#[rstest]
#[case::int8(KvFormat::INT8)]
#[case::int4(KvFormat::INT4)]
#[case::bf16(KvFormat::same(Scheme::Bf16))]
fn a_cache_that_grew_holds_what_a_large_one_holds(#[case] format: KvFormat) {
    let (mut grown, mut large) = (cache(&config(format, 7)), cache(&config(format, 40)));
    for cache in [&mut grown, &mut large] {
        append(cache, 0, 0, 100).unwrap();
        cache.fork(0, 1).unwrap();
    }
    let full = append(&mut grown, 0, 100, 500).unwrap_err();
    assert!(matches!(full, Error::CacheFull { total: 7, .. }), "{full}");
    let free = grown.free_pages();
    grown.add_pages(33).unwrap();
    assert_eq!(
        (grown.config().num_pages, grown.free_pages()),
        (40, free + 33)
    );
    for cache in [&mut grown, &mut large] {
        append(cache, 0, 100, 500).unwrap();
        append(cache, 1, 300, 340).unwrap();
    }
    for sequence in 0..2 {
        let [grown, large] = [&grown, &large].map(|cache| cache.read_back(sequence).unwrap());
        assert!(grown == large, "sequence {sequence}");
    }
    let mut taken: Vec<u32> = grown.table().pages.concat();
    taken.sort_unstable();
    assert!(taken.last() < Some(&40));
}

#[test]
fn sequences_that_are_added_are_empty_and_work_like_the_others() {
    let mut cache = cache(&config(KvFormat::INT8, 9));
    append(&mut cache, 1, 0, 70).unwrap();
    assert!(matches!(
        append(&mut cache, 2, 0, 1),
        Err(Error::Sequence { given: 2, count: 2 })
    ));
    cache.add_sequences(2).unwrap();
    assert_eq!(cache.table().lens, [0, 70, 0, 0]);
    cache.fork(1, 3).unwrap();
    append(&mut cache, 3, 70, 80).unwrap();
    cache.free_sequence(1).unwrap();
    assert_eq!(cache.table().lens, [0, 0, 0, 80]);
    assert_eq!(cache.config().num_sequences, 4);
}

#[test]
fn growth_that_is_refused_changes_nothing() {
    let mut cache = cache(&config(KvFormat::INT8, 3));
    append(&mut cache, 0, 0, 70).unwrap();
    let state = |cache: &KvCache| {
        let bytes = cache.read_back(0).unwrap();
        (
            cache.table().clone(),
            cache.free_pages(),
            cache.config().clone(),
            bytes,
        )
    };
    let before = state(&cache);
    for pages in [usize::MAX, 1 << 40] {
        let error = cache.add_pages(pages).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{error}");
    }
    for sequences in [usize::MAX, 1 << 24] {
        let error = cache.add_sequences(sequences).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{error}");
    }
    assert!(state(&cache) == before);
}
