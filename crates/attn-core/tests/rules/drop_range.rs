//! Tokens dropped from the middle of a sequence: what is left is a run of the others alone.

use std::ops::Range;

use attn_conformance::noise::uniform;
use attn_core::{CacheConfig, Error, HeadDim, Heads, HostPages, KvCache, Problem, SequenceImage};
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 2,
    kv: 2,
    dim: HeadDim::same(64),
};
const ROW: usize = HEADS.kv * HEADS.dim.k;
const TOKENS: usize = 1500;

fn config(format: &str, page_size: usize) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .unit_tensor_scales()
        .sequences(3)
        .max_len(TOKENS)
        .page_size(page_size)
        .build()
}

fn cache(config: &CacheConfig) -> KvCache {
    let pages = HostPages::new(config).unwrap();
    KvCache::new(config.clone(), Box::new(pages)).unwrap()
}

/// The numbers of some tokens of a stream.
fn rows(side: u64, tokens: &[usize]) -> Vec<f32> {
    let row = |t: &usize| uniform(side, t * ROW..(t + 1) * ROW);
    tokens.iter().flat_map(row).collect()
}

fn append(cache: &mut KvCache, sequence: usize, tokens: impl IntoIterator<Item = usize>) {
    let tokens: Vec<usize> = tokens.into_iter().collect();
    let (k, v) = (rows(1, &tokens), rows(2, &tokens));
    cache.append(sequence, &k, &v).unwrap();
}

/// The image of a run to which these tokens alone were appended.
fn straight(
    config: &CacheConfig,
    tokens: impl IntoIterator<Item = usize>,
) -> SequenceImage<'static> {
    let mut cache = cache(config);
    append(&mut cache, 0, tokens);
    cache.image(0).unwrap()
}

/// Kills ranges that are cut to pages or tiles alone, a length that counts dropped tokens, and pages that stay taken.
#[rstest]
#[case("int8", 16)]
#[case("int8", 128)]
#[case("int4", 16)]
#[case("int4", 64)]
#[case("int8/int4", 32)]
#[case("bf16", 64)]
#[case("fp8", 128)]
fn the_rest_is_a_run_of_its_own(#[case] format: &str, #[case] page_size: usize) {
    let config = config(format, page_size);
    let mut cache = cache(&config);
    append(&mut cache, 0, 0..1000);
    let free = cache.free_pages();
    let unit = page_size.max(64);
    let (first, end) = (2 * unit, 700 / unit * unit);
    let dropped = cache.drop_range(0, unit + 1..700).unwrap();
    assert_eq!(
        (dropped, cache.table().lens[0]),
        (end - first, 1000 - dropped)
    );
    assert_eq!(cache.free_pages(), free + dropped / page_size);
    let left = |until: usize| (0..first).chain(end..until);
    assert_eq!(cache.image(0).unwrap(), straight(&config, left(1000)));
    // The stream goes on, and drops again.
    append(&mut cache, 0, 1000..1300);
    assert_eq!(cache.image(0).unwrap(), straight(&config, left(1300)));
    let dropped = cache.drop_range(0, unit..unit + unit).unwrap();
    assert_eq!(dropped, unit);
    append(&mut cache, 0, 1300..1301);
    let left = (0..unit).chain(end..1301);
    assert_eq!(cache.image(0).unwrap(), straight(&config, left));
    assert_eq!(cache.drop_range(0, unit + 1..unit + 63).unwrap(), 0);
}

/// Kills drops that free pages of a fork, and queries that miss residuals after one.
#[rstest]
fn forks_keep_their_tokens(#[values("int8", "int4")] format: &str) {
    let config = config(format, 16);
    let mut cache = cache(&config);
    append(&mut cache, 0, 0..900);
    cache.fork(0, 1).unwrap();
    let free = cache.free_pages();
    cache.drop_range(1, 64..640).unwrap();
    assert_eq!(cache.free_pages(), free);
    assert_eq!(cache.image(0).unwrap(), straight(&config, 0..900));
    let left = (0..64).chain(640..900);
    assert_eq!(cache.image(1).unwrap(), straight(&config, left));
    let problem = Problem::new(HEADS, [900, 324, 0]).q_lens([64, 64, 0]);
    cache.check_queries(&problem).unwrap();
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), free + 576 / 16);
}

#[test]
fn what_cannot_go_is_refused_and_nothing_changes() {
    let config = config("int4", 16);
    let mut cache = cache(&config);
    append(&mut cache, 0, 0..900);
    append(&mut cache, 1, 0..900);
    cache.drop_before(1, 200).unwrap();
    let before = (cache.table().clone(), cache.free_pages());
    for (sequence, range, said) in [
        (0, 63..640, "the first token to drop is 63"),
        (0, 0..64, "the first token to drop is 0"),
        (
            0,
            Range {
                start: 640,
                end: 576,
            },
            "640 to 576",
        ),
        (0, 64..901, "900 tokens"),
        (0, 64..900, "whose tokens from"),
        (1, 256..640, "dropped"),
        (3, 64..128, "sequence 3"),
    ] {
        let error = cache.drop_range(sequence, range.clone()).unwrap_err();
        assert!(error.to_string().contains(said), "{range:?}: {error}");
        assert_eq!((cache.table(), cache.free_pages()), (&before.0, before.1));
    }
    // The newest tokens, whose residuals queries read, begin where the message says.
    let Err(Error::Parameter { given, .. }) = cache.drop_range(0, 64..900) else {
        panic!("dropped");
    };
    let given = given.to_string();
    let fine: usize = given
        .split(' ')
        .find_map(|word| word.parse().ok().filter(|n| (400..900).contains(n)))
        .unwrap();
    assert!(cache.drop_range(0, 64..fine + 1).is_err());
    assert_eq!(cache.drop_range(0, 64..fine).unwrap(), fine / 64 * 64 - 64);

    let mut plain = config;
    plain.centres = false;
    let mut shard = self::cache(&plain);
    shard.begin_shard(0, 1024, &[]).unwrap();
    append(&mut shard, 0, 0..900);
    let said = shard.drop_range(0, 64..128).unwrap_err().to_string();
    assert!(said.contains("1024 tokens ahead"), "{said}");
}
