//! Caches that take centres off their keys (`docs/arithmetic.md`, section 12): what they store, and what forks, truncation, images and steps do with centres.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use attn_conformance::{fake::FakePages, noise::uniform};
use attn_core::{
    Append, CacheConfig, Error, HeadDim, Heads, HostPages, KvCache, KvFormat, Problem,
    SequenceImage, centres::to_centre, rotation::rotate_stored,
};
use rstest::rstest;

const DIM: usize = 64;
const HEADS: Heads = Heads {
    q: 2,
    kv: 2,
    dim: HeadDim::same(DIM),
};
const ROW: usize = HEADS.kv * DIM;

fn config(format: &str) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .sequences(3)
        .max_len(400)
        .page_size(16)
        .centres(true)
        .build()
}

fn cache(config: &CacheConfig) -> KvCache {
    let pages = HostPages::new(config).unwrap();
    KvCache::new(config.clone(), Box::new(pages)).unwrap()
}

/// K and V of so many tokens, K with a constant of 20 in every other dim.
fn rows(seed: u64, tokens: usize) -> [Vec<f32>; 2] {
    let [mut k, v] = [2 * seed, 2 * seed + 1].map(|seed| uniform(seed, 0..tokens * ROW));
    k.iter_mut().step_by(2).for_each(|x| *x += 20.0);
    [k, v]
}

fn append(cache: &mut KvCache, sequence: usize, [k, v]: &[Vec<f32>; 2], tokens: [usize; 2]) {
    let part = tokens[0] * ROW..tokens[1] * ROW;
    let rows = (&k[part.clone()], &v[part]);
    cache.append(sequence, rows.0, rows.1).unwrap();
}

/// The image of a run that appended the tokens at once.
fn straight(config: &CacheConfig, rows: &[Vec<f32>; 2], tokens: usize) -> SequenceImage<'static> {
    let mut cache = cache(config);
    append(&mut cache, 0, rows, [0, tokens]);
    cache.image(0).unwrap()
}

fn centres(image: &SequenceImage<'_>) -> Vec<Vec<f32>> {
    let (elements, _) = image.centres().as_chunks::<2>();
    let values: Vec<f32> = elements
        .iter()
        .map(|x| half::bf16::from_le_bytes(*x).to_f32())
        .collect();
    values.chunks_exact(DIM).map(<[f32]>::to_vec).collect()
}

/// Kills centres of other tokens, and means without the first centre.
#[test]
fn centres_are_the_first_key_and_the_mean_of_the_first_tile() {
    let config = config("int8");
    let all = rows(1, 70);
    let image = straight(&config, &all, 70);
    for (head, both) in centres(&image).chunks_exact(2).enumerate() {
        let key = |t: usize| {
            let mut key = all[0][t * ROW + head * DIM..][..DIM].to_vec();
            rotate_stored(&mut key);
            key
        };
        let first: Vec<f32> = key(0).into_iter().map(|x| to_centre(x).to_f32()).collect();
        assert_eq!(both[0], first);
        for (d, found) in both[1].iter().enumerate() {
            let mean = (0..64).map(|t| f64::from(key(t)[d])).sum::<f64>() / 64.0;
            let off = (f64::from(*found) - mean).abs();
            assert!(
                off <= mean.abs() / 256.0 + 2e-3,
                "{head} {d}: {found} {mean}"
            );
        }
    }
    // Sequences that are too short have none, or the first alone.
    let [short, none] = [63, 0].map(|tokens| centres(&straight(&config, &all, tokens)));
    assert!(short[0].iter().any(|x| *x != 0.0) && short[1] == [0.0; DIM]);
    assert!(none.iter().all(|centre| *centre == [0.0; DIM]));
}

/// Kills stores that write later tokens before the mean is there, or the first tile before the first key.
#[rstest]
fn bytes_do_not_depend_on_how_tokens_arrive(
    #[values("int8", "int8/int4", "int4", "int4-r2")] format: &str,
    #[values(1, 7, 63, 64, 65, 100)] piece: usize,
) {
    let (config, all) = (config(format), rows(2, 150));
    let mut pieces = cache(&config);
    for start in (0..150).step_by(piece) {
        append(&mut pieces, 0, &all, [start, 150.min(start + piece)]);
    }
    assert_eq!(pieces.image(0).unwrap(), straight(&config, &all, 150));
}

#[rstest]
fn rows_come_back_nearer_than_without_centres(
    #[values(("int8", 0.01, 8.0), ("int4", 0.13, 8.0))] (format, most, gain): (&str, f32, f32),
) {
    let all = rows(3, 300);
    let error = |centres: bool| {
        let mut config = config(format);
        config.centres = centres;
        let mut cache = cache(&config);
        append(&mut cache, 0, &all, [0, 300]);
        let [k, _] = cache.layer(0).unwrap().dequantize(0).unwrap();
        let off = k.iter().zip(&all[0]).map(|(a, b)| (a - b).abs());
        off.sum::<f32>() / k.len() as f32
    };
    let [with, without] = [true, false].map(error);
    assert!(with < most && with * gain < without, "{with} {without}");
}

/// Kills forks that share centres instead of copying them, and truncations that keep a mean of tokens that are gone.
#[rstest]
fn forks_and_truncated_sequences_are_runs_of_their_own(
    #[values("int8", "int4")] format: &str,
    #[values(0, 1, 30, 63, 64)] kept: usize,
) {
    let config = config(format);
    let (all, mut other) = (rows(4, 150), rows(5, 150));
    for (other, all) in other.iter_mut().zip(&all) {
        other[..kept * ROW].copy_from_slice(&all[..kept * ROW]);
    }
    let mut cache = cache(&config);
    append(&mut cache, 0, &all, [0, 64]);
    cache.fork(0, 1).unwrap();
    cache.truncate(1, kept).unwrap();
    append(&mut cache, 1, &other, [kept, 150]);
    append(&mut cache, 0, &all, [64, 150]);
    assert_eq!(cache.image(0).unwrap(), straight(&config, &all, 150));
    assert_eq!(cache.image(1).unwrap(), straight(&config, &other, 150));
}

#[test]
fn a_cancelled_step_leaves_no_trace() {
    let mut config = config("int4");
    config.layers = 2;
    let (all, other) = (rows(6, 150), rows(7, 100));
    let write = |cache: &mut KvCache, [k, v]: &[Vec<f32>; 2], tokens: [usize; 2], layers| {
        let append = Append {
            sequence: 0,
            tokens: tokens[1] - tokens[0],
        };
        cache.reserve(&[append]).unwrap();
        let part = tokens[0] * ROW..tokens[1] * ROW;
        for layer in 0..layers {
            cache
                .write(layer, &k[part.clone()], &v[part.clone()])
                .unwrap();
        }
    };
    let mut straight = cache(&config);
    write(&mut straight, &all, [0, 150], 2);
    let mut cancelled = cache(&config);
    write(&mut cancelled, &all, [0, 30], 2);
    write(&mut cancelled, &other, [30, 100], 1);
    cancelled.cancel_step().unwrap();
    write(&mut cancelled, &all, [30, 150], 2);
    assert_eq!(cancelled.image(0).unwrap(), straight.image(0).unwrap());
}

#[test]
fn images_and_copies_have_the_centres() {
    let (config, all) = (config("int8/int4"), rows(8, 150));
    let mut cache = cache(&config);
    append(&mut cache, 0, &all, [0, 90]);
    let image = cache.image(0).unwrap();
    assert_eq!(image.centres().len(), config.centres_bytes());
    let parsed = SequenceImage::from_bytes(image.as_bytes()).unwrap();
    cache.restore(2, &parsed).unwrap();
    let mut copy = self::cache(&config);
    copy.copy_from(&cache).unwrap();
    for cache in [&mut cache, &mut copy] {
        append(cache, 2, &all, [90, 150]);
        assert_eq!(cache.image(2).unwrap(), straight(&config, &all, 150));
    }
    cache.add_sequences(2).unwrap();
    cache.fork(2, 4).unwrap();
    assert_eq!(cache.image(4).unwrap(), cache.image(2).unwrap());
    assert_eq!(cache.sequences(&[4, 0]).unwrap().table().sequences, [4, 0]);
}

/// Kills caches that read pages of the other kind as their own.
#[test]
fn what_would_lose_the_centres_is_refused() {
    let (with, all) = (config("int8"), rows(9, 100));
    let mut without = with.clone();
    without.centres = false;
    let (mut cache, mut plain) = (cache(&with), cache(&without));
    append(&mut cache, 0, &all, [0, 100]);
    append(&mut plain, 0, &all, [0, 100]);
    let [image, of_plain] = [&cache, &plain].map(|cache| cache.image(0).unwrap());
    for refused in [cache.restore(1, &of_plain), plain.restore(1, &image)] {
        assert!(
            matches!(
                refused,
                Err(Error::ImageMismatch {
                    what: "centres",
                    ..
                })
            ),
            "{refused:?}"
        );
    }
    let pages = plain.read_back(0).unwrap();
    for error in [
        cache.read_back(0).unwrap_err(),
        cache.layer(0).unwrap().read_back(0).unwrap_err(),
        cache.restore_pages(1, 100, &pages).unwrap_err(),
    ] {
        let said = error.to_string();
        assert!(said.contains("centres of K"), "{said}");
    }
    assert!(matches!(
        plain.copy_from(&cache),
        Err(Error::Parameter { .. })
    ));
    let store = HostPages::new(&without).unwrap();
    let mixed = KvCache::new(with, Box::new(store));
    assert!(matches!(
        mixed.err(),
        Some(Error::StoreMismatch {
            what: "centres",
            ..
        })
    ));
}

#[test]
fn damaged_centres_of_an_image_are_refused() {
    let (config, all) = (config("int8"), rows(10, 70));
    let image = straight(&config, &all, 70);
    let bytes = image.as_bytes();
    let mut flagged = bytes.to_vec();
    flagged[52] = 2;
    let said = SequenceImage::from_bytes(flagged).unwrap_err().to_string();
    assert!(said.contains("0 or 1"), "{said}");
    let mut dropped = bytes.to_vec();
    dropped[52] = 0;
    assert!(SequenceImage::from_bytes(dropped).is_err());
    let fp8 = CacheConfig::builder("fp8".parse::<KvFormat>().unwrap(), HEADS);
    let error = fp8.unit_tensor_scales().centres(true).build().check();
    assert!(error.unwrap_err().to_string().contains("centres of K"));
}

/// A description of caches with room for shards.
fn shards(format: &str) -> CacheConfig {
    let mut config = config(format);
    (config.num_pages, config.max_len) = (400, 2048);
    config
}

/// Kills shards that make centres of their own tokens, and first tiles of shards that have the first token's key for a centre.
#[rstest]
fn later_shards_store_what_one_cache_stores(#[values("int8", "int8/int4", "int4")] format: &str) {
    let (config, all) = (shards(format), rows(11, 1300));
    let (mut whole, mut first, mut later) = (cache(&config), cache(&config), cache(&config));
    append(&mut whole, 0, &all, [0, 1300]);
    append(&mut first, 1, &all, [0, 1024]);
    later
        .begin_shard(2, 1024, &first.shard_centres(1).unwrap())
        .unwrap();
    for tokens in [[1024, 1030], [1030, 1087], [1087, 1300]] {
        append(&mut later, 2, &all, tokens);
    }
    // All tiles but those that the newest token reads with residuals: of a later shard its first one, too.
    let rows = |cache: &KvCache, sequence: usize, first: usize| {
        let both = cache.layer(0).unwrap().dequantize(sequence).unwrap();
        both.map(|rows| rows[first * ROW..(first + 192) * ROW].to_vec())
    };
    assert!(rows(&later, 2, 0) == rows(&whole, 0, 1024));

    let image = later.image(2).unwrap();
    assert_eq!(image.tokens_before(), 1024);
    let mut restored = cache(&config);
    restored.restore(0, &image).unwrap();
    restored.fork(0, 1).unwrap();
    assert_eq!(restored.table().tokens_before, [1024, 1024, 0]);
    for sequence in [0, 1] {
        assert_eq!(restored.image(sequence).unwrap(), image);
    }
    restored.free_sequence(0).unwrap();
    assert_eq!(restored.table().tokens_before, [0, 1024, 0]);
}

/// Kills copies that leave out the centres of a sequence without tokens, which a begun shard has.
#[rstest]
fn a_copy_of_a_begun_shard_goes_on_as_the_shard_does(#[values(false, true)] is_emptied: bool) {
    let (config, all) = (shards("int8"), rows(13, 1400));
    let (mut first, mut later, mut copy) = (cache(&config), cache(&config), cache(&config));
    append(&mut first, 0, &all, [0, 1024]);
    let centres = first.shard_centres(0).unwrap();
    later.begin_shard(0, 1024, &centres).unwrap();
    if is_emptied {
        append(&mut later, 0, &all, [1300, 1400]);
        later.truncate(0, 0).unwrap();
    }
    copy.copy_from(&later).unwrap();
    for cache in [&mut later, &mut copy] {
        append(cache, 0, &all, [1024, 1324]);
    }
    assert!(copy.image(0).unwrap() == later.image(0).unwrap());
}

/// A cache of two layers whose device does not write the second layer's centres while `fails` says so.
fn failing(config: &CacheConfig, fails: &Arc<AtomicBool>) -> KvCache {
    let fails = fails.clone();
    let store = FakePages::new(config).unwrap();
    let store = store.with_centres_limit(move |layer| layer == 0 || !fails.load(Ordering::Relaxed));
    store.cache().unwrap()
}

/// Kills failed calls that leave a shard some of another one's centres.
#[test]
fn a_shard_whose_centres_the_device_fails_to_replace_is_none_any_more() {
    let mut config = shards("int8");
    config.layers = 2;
    let (all, fails) = (rows(14, 1024), Arc::new(AtomicBool::new(false)));
    let mut cache = failing(&config, &fails);
    let append = [Append {
        sequence: 0,
        tokens: 1024,
    }];
    cache.reserve(&append).unwrap();
    for layer in 0..2 {
        cache.write(layer, &all[0], &all[1]).unwrap();
    }
    let (centres, image) = (cache.shard_centres(0).unwrap(), cache.image(0).unwrap());
    type Call<'a> = &'a dyn Fn(&mut KvCache) -> Result<(), Error>;
    let calls: [Call<'_>; 3] = [
        &|cache| cache.begin_shard(2, 2048, &centres),
        &|cache| cache.fork(0, 2),
        &|cache| cache.restore(2, &image),
    ];
    let fail = |cache: &mut KvCache, call: Call<'_>| {
        fails.store(false, Ordering::Relaxed);
        cache.begin_shard(2, 1024, &centres).unwrap();
        let free = cache.free_pages();
        fails.store(true, Ordering::Relaxed);
        let error = call(cache).unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error}");
        let table = cache.table();
        assert_eq!((table.tokens_before[2], table.lens[2]), (0, 0));
        assert_eq!(cache.free_pages(), free);
    };
    for call in calls {
        fail(&mut cache, call);
    }
    fail(&mut failing(&config, &fails), &|copy| {
        copy.copy_from(&cache)
    });
    // A refusal that comes before the device leaves the shard as it is.
    fails.store(false, Ordering::Relaxed);
    cache.begin_shard(2, 1024, &centres).unwrap();
    cache.begin_shard(2, 1000, &centres).unwrap_err();
    assert_eq!(cache.table().tokens_before[2], 1024);
}

#[test]
fn what_is_no_shard_is_refused() {
    let (config, all) = (shards("int8"), rows(12, 1100));
    let (mut first, mut later) = (cache(&config), cache(&config));
    append(&mut first, 0, &all, [0, 1024]);
    append(&mut first, 1, &all, [0, 63]);
    let centres = first.shard_centres(0).unwrap();
    let mut damaged = centres.clone();
    damaged[5] = 0x7f;
    damaged[4] = 0xff;
    for (refused, what) in [
        (first.shard_centres(1).map(drop), "64 or more"),
        (first.begin_shard(0, 1024, &centres), "sequence 0"),
        (
            later.begin_shard(0, 1000, &centres),
            "tokens_before is 1000",
        ),
        (
            later.begin_shard(0, 1 << 20, &centres),
            "tokens_before is 1048576",
        ),
        (
            later.begin_shard(0, 1024, &centres[2..]),
            "centres of a shard",
        ),
        (
            later.begin_shard(0, 1024, &damaged),
            "a centre of K of a shard",
        ),
        (later.begin_shard(3, 1024, &centres), "sequence 3"),
    ] {
        let said = refused.unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
    }
    assert_eq!(later.table().tokens_before, [0; 3]);

    // A sequence's tokens are those of all its shards.
    let room = 1024;
    later.begin_shard(0, (1 << 20) - room, &centres).unwrap();
    let appends = |tokens| {
        [Append {
            sequence: 0,
            tokens,
        }]
    };
    let refused = later.pages_needed(&appends(room + 1)).unwrap_err();
    assert!(
        matches!(refused, Error::TooLong { sequence: 0, tokens, .. } if tokens == (1 << 20) + 1)
    );
    later.pages_needed(&appends(room)).unwrap();

    later.begin_shard(0, 1024, &centres).unwrap();
    append(&mut later, 0, &all, [1024, 1100]);
    // Another shard's centres would be read, silently.
    let check = |cache: &KvCache, tokens: usize, before: usize| {
        let problem = Problem::new(HEADS, [tokens, 0, 0]).tokens_before([before, 0, 0]);
        cache.check_queries(&problem)
    };
    check(&later, 76, 1024).unwrap();
    for before in [0, 2048] {
        let said = check(&later, 76, before).unwrap_err().to_string();
        let expected =
            format!("tokens_before is {before} for sequence 0, which was begun with 1024");
        assert!(said.contains(&expected), "{said}");
    }
    assert!(check(&first, 1024, 1024).is_err());
    let mut plain = config.clone();
    plain.centres = false;
    let mut plain = cache(&plain);
    append(&mut plain, 0, &all, [0, 76]);
    check(&plain, 76, 1024).unwrap();
    assert!(plain.shard_centres(0).unwrap().is_empty());
}

/// Kills looks at keys with their centres, at too few tokens, and sums that a constant hides in.
#[rstest]
#[case::slow("int8", true, 0.0, false)]
#[case::slow_without_centres("int8", false, 0.0, true)]
#[case::fast("int4", true, 1.0, true)]
#[case::fast_of_8_bits("fp8", false, 1.0, true)]
#[case::floats("bf16", false, 1.0, false)]
fn keys_with_outlier_channels_are_noticed(
    #[case] format: &str,
    #[case] centres: bool,
    #[case] turns: f32,
    #[case] expected: bool,
) {
    let format: KvFormat = format.parse().unwrap();
    let builder = CacheConfig::builder(format, HEADS).max_len(400);
    let config = builder.unit_tensor_scales().centres(centres).build();
    let mut cache = cache(&config);
    let (k, v) = (uniform(20, 0..400 * ROW), uniform(21, 0..400 * ROW));
    let mut k: Vec<f32> = k.iter().map(|x| 2.0 * x).collect();
    for (t, row) in k.chunks_exact_mut(ROW).enumerate() {
        // One pair of the second head.
        let angle = t as f32 * turns;
        row[DIM + 3] += 30.0 * angle.cos();
        row[DIM + 35] += 30.0 * angle.sin();
    }
    let mut append = |from: usize, to: usize| {
        let part = from * ROW..to * ROW;
        cache.append(0, &k[part.clone()], &v[part]).unwrap();
        (cache.key_outliers(), cache.has_key_outliers())
    };
    assert_eq!(append(0, 127), (None, false));
    let (ratio, noticed) = append(127, 128);
    assert_eq!(noticed, expected, "{ratio:?}");
    assert_eq!(ratio.is_none(), format == "bf16".parse().unwrap());
    assert!(
        expected || ratio.is_none_or(|ratio| ratio < 3.0),
        "{ratio:?}"
    );
    // Not due again.
    assert_eq!(append(128, 400), (ratio, noticed));
}
