//! Copies of whole caches: the same calls on the original and on the copy give the same pages, and neither sees the other's.

use attn_core::{Append, CacheConfig, Error, HeadDim, Heads, HostPages, KvCache};
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};

fn config(format: &str, layers: usize) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .centres(false)
        .unit_tensor_scales()
        .layers(layers)
        .sequences(5)
        .page_size(16)
        .pages(120)
        .build()
}

fn empty(config: &CacheConfig) -> KvCache {
    let store = HostPages::new(config).unwrap();
    KvCache::new(config.clone(), Box::new(store)).unwrap()
}

fn values(tokens: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + seed * 101) % 129) as f32 / 16.0 - 4.0;
    (0..tokens * HEADS.kv * HEADS.dim.k).map(value).collect()
}

fn append(cache: &mut KvCache, sequence: usize, tokens: usize, seed: usize) {
    cache.reserve(&[Append { sequence, tokens }]).unwrap();
    for layer in 0..cache.config().layers {
        let [k, v] = [1, 2].map(|side| values(tokens, 8 * seed + 4 * layer + side));
        cache.write(layer, &k, &v).unwrap();
    }
}

/// A cache with shared, dropped and freed pages, whose free pages are not in order.
fn lived(config: &CacheConfig) -> KvCache {
    let mut cache = empty(config);
    append(&mut cache, 0, 200, 1);
    append(&mut cache, 1, 30, 2);
    append(&mut cache, 2, 150, 3);
    cache.fork(0, 3).unwrap();
    append(&mut cache, 3, 5, 4);
    cache.free_sequence(1).unwrap();
    cache.drop_before(2, 130).unwrap();
    cache.truncate(0, 198).unwrap();
    cache
}

/// What the calls that follow make of a cache: its table, and the bytes of the sequences that can be read.
fn goes_on(cache: &mut KvCache) -> (String, Vec<Vec<Vec<u8>>>) {
    for (sequence, tokens, seed) in [(0, 20, 5), (1, 70, 6), (2, 3, 7), (3, 1, 8)] {
        append(cache, sequence, tokens, seed);
    }
    cache.fork(3, 4).unwrap();
    let bytes = [0, 1, 3, 4].map(|s| cache.read_back(s).unwrap());
    let table = format!("{:?} {}", cache.table(), cache.free_pages());
    (table, bytes.to_vec())
}

#[rstest]
fn a_copy_goes_on_as_the_original_does(
    #[values("int8", "int4", "int8/int4", "bf16")] format: &str,
    #[values(1, 2)] layers: usize,
) {
    let config = config(format, layers);
    let mut cache = lived(&config);
    let mut copy = empty(&config);
    copy.copy_from(&cache).unwrap();
    assert_eq!(goes_on(&mut copy), goes_on(&mut lived(&config)));
    // The copy's tokens have left the original as it was.
    assert_eq!(goes_on(&mut cache), goes_on(&mut lived(&config)));
}

#[test]
fn caches_that_cannot_be_copied_are_refused_and_nothing_changes() {
    let config = config("int8", 1);
    let mut cache = lived(&config);
    let mut other = lived(&config);
    let before = other.table().clone();
    let refusal = other.copy_from(&cache).unwrap_err();
    assert!(refusal.to_string().contains("198 tokens in sequence 0"));
    assert_eq!(*other.table(), before);

    let mut larger = config.clone();
    larger.num_pages += 1;
    let refusal = empty(&larger).copy_from(&cache).unwrap_err();
    assert!(matches!(refusal, Error::Parameter { .. }));

    let tokens = 1;
    cache
        .reserve(&[Append {
            sequence: 1,
            tokens,
        }])
        .unwrap();
    let mut other = empty(&config);
    let refusal = other.copy_from(&cache).unwrap_err();
    assert!(matches!(refusal, Error::Step { .. }));
    assert_eq!(other.free_pages(), 120);
}

#[test]
fn a_cache_that_has_grown_is_copied_as_large_as_it_is() {
    let mut cache = lived(&config("int8", 1));
    cache.add_pages(7).unwrap();
    cache.add_sequences(2).unwrap();
    let mut copy = empty(cache.config());
    copy.copy_from(&cache).unwrap();
    assert_eq!(copy.table(), cache.table());
    assert_eq!(copy.free_pages(), cache.free_pages());
}
