//! What an engine does between steps changes no bit of them: it chooses sequences, takes back drafts that were rejected, drops what a layer's window
//! has left behind, and moves sequences from cache to cache.

use attn_conformance::{
    Case,
    case::noise,
    check::{decode, decode_rows, first_difference},
    trials::Trials,
};
use attn_core::{
    CacheConfig, DecodeAttention, Error, HostPages, KvCache, KvFormat, KvSource, SequenceImage,
};

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for format in ["int8", "int4", "int8/int4"] {
        let name = format!("{format}: any sequences of a cache, in any order");
        trials = trials.test(name, move |backend| chosen(&**backend, format));
        let name = format!("{format}: drafts that are taken back leave no trace");
        trials = trials.test(name, move |backend| drafts(&**backend, format));
        let name = format!(
            "{format}: a fork that goes back to a checkpoint is a run that was never longer"
        );
        trials = trials.test(name, move |backend| resumed(&**backend, format));
        let name = format!("{format}: a sequence is itself in another slot and another cache");
        trials = trials.test(name, move |backend| moved(&**backend, format));
        let name = format!("{format}: images that do not fit are refused and change nothing");
        trials = trials.test(name, move |backend| refused_images(&**backend, format));
    }
    for (format, page_size) in [
        ("int8", 64),
        ("int4", 64),
        ("int8/int4", 16),
        ("int8", 128),
        ("bf16", 64),
    ] {
        let name = format!("{format}: a window's pages are enough, on pages of {page_size}");
        trials = trials.test(name, move |backend| window(&**backend, format, page_size));
    }
    trials
}

/// A long sequence in a pool for its window alone, whose freed pages another sequence writes, has the bits of one that keeps all pages.
fn window(backend: &dyn DecodeAttention, format: &str, page_size: usize) {
    let (len, window, most, row) = (900, 100, 5, 2 * 64);
    let mut one = case(format, &[len]);
    (one.page_size, one.problem.scores.window_left) = (page_size, Some(window));
    let full = one.config();
    let mut config = full.clone();
    // The window, the step's tokens, a tile at both ends; and a page to be written by the other sequence.
    let pages = (window + most + 2 * 64).div_ceil(page_size) + 1;
    config.num_pages = pages + full.format.max_residual_pages(page_size, 64);
    config.num_sequences = 2;
    assert!(
        config.num_pages < full.num_pages,
        "the pool is smaller than the sequence"
    );
    let create = |config: &CacheConfig| match backend.create_cache(config) {
        Ok(cache) => Some(cache),
        Err(Error::Unsupported(_)) => None,
        Err(error) => panic!("{error}"),
    };
    let (Some(mut small), Some(mut straight)) = (create(&config), create(&full)) else {
        panic!("{format} on pages of {page_size} has no kernel");
    };
    let [k, v] = [1, 2].map(|seed| noise(seed, len * row));
    let (mut at, mut dropped) = (0, 0);
    while at < len {
        let next = (at + 1 + at % most).min(len);
        let new = at * row..next * row;
        for cache in [&mut small, &mut straight] {
            cache.append(0, &k[new.clone()], &v[new.clone()]).unwrap();
        }
        one.problem.kv_lens = vec![next];
        one.problem.q_lens = vec![next - at];
        let q = &one.q()[..(next - at) * 8 * 64];
        let [got, want] = [&small, &straight]
            .map(|cache| decode_rows(backend, &one, q, KvSource::Cache(cache)).unwrap());
        let found = first_difference(&format!("{next} tokens: out"), &got.0, &want.0)
            .or_else(|| first_difference(&format!("{next} tokens: lse"), &got.1, &want.1));
        assert_eq!(found, None);
        at = next;
        small.drop_before(0, at.saturating_sub(window)).unwrap();
        // Other tokens on all pages that are free now.
        let free = small.free_pages();
        let fit = (0..=free).rev().find(|pages| {
            let append = attn_core::Append {
                sequence: 1,
                tokens: pages * page_size,
            };
            small.pages_needed(&[append]).unwrap() <= free
        });
        let other = noise(at as u64, fit.unwrap_or(0) * page_size * row);
        small.append(1, &other, &other).unwrap();
        small.free_sequence(1).unwrap();
        let first = small.table().first_tokens[0];
        assert!(first + 64.max(page_size) > at.saturating_sub(window) && first >= dropped);
        dropped = first;
    }
    assert!(dropped > 700, "{dropped}");
    // A longer window, and none, see what is gone.
    for longer in [Some(at - 1 - dropped + 1), None] {
        one.problem.q_lens = vec![1];
        one.problem.scores.window_left = longer;
        let q = &one.q()[..8 * 64];
        let refused = decode_rows(backend, &one, q, KvSource::Cache(&small));
        assert!(
            matches!(refused, Err(Error::Dropped { sequence: 0, kept, .. }) if kept == dropped),
            "{longer:?}"
        );
    }
    one.problem.scores.window_left = Some(at - 1 - dropped);
    decode_rows(backend, &one, &one.q()[..8 * 64], KvSource::Cache(&small)).unwrap();
}

fn case(format: &str, lens: &[usize]) -> Case {
    let format: KvFormat = format.parse().expect("a format's name");
    Case::new([8, 2], 64, lens, format)
}

fn chosen(backend: &dyn DecodeAttention, format: &str) {
    let case = case(format, &[0, 5, 700, 90]);
    let cache = case.cache(backend, usize::MAX).unwrap();
    let (all, all_lse) = decode(backend, &case, &cache).unwrap();
    let order = [3, 1, 3, 2];
    let (rows, heads) = (8 * 64, 8);
    let of = |x: &[f32], each: usize| -> Vec<f32> {
        order
            .iter()
            .flat_map(|b| x[b * each..(b + 1) * each].to_vec())
            .collect()
    };
    let mut some = case.clone();
    some.problem.kv_lens = order.map(|b| case.problem.kv_lens[b]).to_vec();
    let sequences = cache.sequences(&order).unwrap();
    let kv = KvSource::Sequences(&sequences);
    let (out, lse) = decode_rows(backend, &some, &of(&case.q(), rows), kv).unwrap();
    assert_eq!(first_difference("out", &out, &of(&all, rows)), None);
    assert_eq!(first_difference("lse", &lse, &of(&all_lse, heads)), None);
}

/// Outputs and log-sum-exps of one sequence.
fn decoded(backend: &dyn DecodeAttention, cache: &KvCache, case: &Case, b: usize) -> [Vec<f32>; 2] {
    let mut one = case.clone();
    one.problem.kv_lens = vec![cache.table().lens[b]];
    one.problem.q_lens = vec![1];
    let q = &one.q()[..8 * 64];
    let sequences = cache.sequences(&[b]).unwrap();
    let kv = KvSource::Sequences(&sequences);
    decode_rows(backend, &one, q, kv).unwrap().into()
}

fn moved(backend: &dyn DecodeAttention, format: &str) {
    let case = case(format, &[0, 5, 700, 90]);
    let cache = case.cache(backend, usize::MAX).unwrap();
    // The same tokens on the host: the image is the same, and serves as well.
    let config = case.config();
    let host = HostPages::new(&config).unwrap();
    let mut host = KvCache::new(config.clone(), Box::new(host)).unwrap();
    let mut other = backend.create_cache(&config).unwrap();
    other.append(1, &[0.5; 3 * 128], &[2.0; 3 * 128]).unwrap();
    for (from, to) in [(2, 0), (3, 2), (0, 3)] {
        let stored = cache.image(from).unwrap().into_bytes();
        let image = SequenceImage::from_bytes(&stored[..]).unwrap();
        host.restore(to, &image).unwrap();
        let from_host = host.image(to).unwrap();
        assert!(
            from_host.as_bytes() == stored,
            "sequence {from} on the host"
        );
        other.restore(to, &from_host).unwrap();
        assert!(other.image(to).unwrap() == image, "sequence {from} as {to}");
        assert_eq!(other.table().lens[to], image.tokens());
        if image.tokens() > 0 {
            let [want, got] =
                [(&cache, from), (&other, to)].map(|(cache, b)| decoded(backend, cache, &case, b));
            for (what, got, want) in [("out", &got[0], &want[0]), ("lse", &got[1], &want[1])] {
                assert_eq!(first_difference(what, got, want), None, "{from} as {to}");
            }
        }
    }
}

fn refused_images(backend: &dyn DecodeAttention, format: &str) {
    let case = case(format, &[200, 0, 70]);
    let mut cache = case.cache(backend, usize::MAX).unwrap();
    let (table, free) = (cache.table().clone(), cache.free_pages());
    let images = |cache: &KvCache| [0, 2].map(|b| cache.image(b).unwrap());
    let before = images(&cache);
    let attended = decoded(backend, &cache, &case, 0);
    let stored = before[0].as_bytes();
    for at in [
        0,
        8,
        12,
        20,
        24,
        32,
        36,
        40,
        44,
        48,
        60,
        64,
        stored.len() - 1,
    ] {
        let mut damaged = stored.to_vec();
        damaged[at] ^= 1;
        assert!(SequenceImage::from_bytes(damaged).is_err(), "byte {at}");
    }
    for part in [&stored[..stored.len() - 1], &stored[..100], &[]] {
        assert!(SequenceImage::from_bytes(part).is_err());
    }
    let mut wider = case.config();
    (wider.format, wider.head_dim) = (case.format, 128.into());
    let mut plain = case.config();
    plain.format = "int4-g1".parse().expect("a format's name");
    for config in [wider, plain] {
        let host = HostPages::new(&config).unwrap();
        let image = KvCache::new(config, Box::new(host)).unwrap();
        let refused = cache.restore(1, &image.image(1).unwrap());
        assert!(matches!(refused, Err(Error::ImageMismatch { .. })));
    }
    assert!(cache.restore(2, &before[0]).is_err(), "it has tokens");
    assert!(cache.restore(3, &before[0]).is_err(), "there is none");
    assert_eq!((cache.table(), cache.free_pages()), (&table, free));
    assert!(images(&cache) == before);
    assert_eq!(decoded(backend, &cache, &case, 0), attended);
}

fn drafts(backend: &dyn DecodeAttention, format: &str) {
    let (len, drafts) = (200, 5);
    let row = 2 * 64;
    let [k, v] = [1, 2].map(|seed| noise(seed, len * row));
    let wrong = noise(3, drafts * row);
    let mut one = case(format, &[len]);
    let [mut cache, mut straight] = [(); 2].map(|()| backend.create_cache(&one.config()).unwrap());
    let mut at = 58;
    for cache in [&mut cache, &mut straight] {
        cache.append(0, &k[..at * row], &v[..at * row]).unwrap();
    }
    for step in 0.. {
        let next = (at + 1 + step % drafts).min(len);
        let right = at * row..next * row;
        // The drafts are appended together; the first ones were right.
        let join = |x: &[f32]| {
            [
                &x[right.clone()],
                &wrong[..drafts * row - (next - at - 1) * row],
            ]
            .concat()
        };
        cache.append(0, &join(&k), &join(&v)).unwrap();
        cache.truncate(0, next).unwrap();
        straight
            .append(0, &k[right.clone()], &v[right.clone()])
            .unwrap();
        at = next;
        one.problem.kv_lens = vec![at];
        one.problem.q_lens = vec![1];
        let q = &one.q()[..8 * 64];
        let [got, want] = [&cache, &straight]
            .map(|cache| decode_rows(backend, &one, q, KvSource::Cache(cache)).unwrap());
        assert_eq!(
            first_difference(&format!("{at} tokens: out"), &got.0, &want.0),
            None
        );
        assert_eq!(
            first_difference(&format!("{at} tokens: lse"), &got.1, &want.1),
            None
        );
        if at == len {
            return;
        }
    }
}

/// As a radix tree does: a text that has a prefix in common with a longer one goes on from a checkpoint of this.
fn resumed(backend: &dyn DecodeAttention, format: &str) {
    const PREFIX: usize = 512;
    let row = 2 * 64;
    let [k, v] = [1, 2].map(|seed| noise(seed, 900 * row));
    let [other_k, other_v] = [3, 4].map(|seed| noise(seed, 300 * row));
    let mut one = case(format, &[900, 900, 900]);
    let mut config = one.config();
    config.checkpoints = 256;
    config.num_pages = 3 * config.pages_for(900);
    let mut cache = backend.create_cache(&config).unwrap();
    let mut at = 0;
    for next in [1, 300, 301, 860, 900] {
        let new = at * row..next * row;
        cache.append(0, &k[new.clone()], &v[new]).unwrap();
        at = next;
    }
    let mut cold = backend.create_cache(&config).unwrap();
    cold.append(0, &k, &v).unwrap();
    let prefix = PREFIX * row;
    cold.append(1, &k[..prefix], &v[..prefix]).unwrap();
    cache.fork(0, 1).unwrap();
    assert_eq!(
        cache.longest_prefix(1, 700).unwrap(),
        if format == "int8" { 700 } else { PREFIX }
    );
    cache.truncate(1, PREFIX).unwrap();
    let mut compare = |cache: &KvCache, cold: &KvCache, q_len: usize| {
        for b in [0, 1] {
            let images = [cache, cold].map(|cache| cache.image(b).unwrap());
            assert!(images[0] == images[1], "sequence {b}");
            one.problem.kv_lens = vec![cache.table().lens[b]];
            one.problem.q_lens = vec![q_len];
            let q = &one.q()[..q_len * 8 * 64];
            let [got, want] = [cache, cold].map(|cache| {
                let sequences = cache.sequences(&[b]).unwrap();
                decode_rows(backend, &one, q, KvSource::Sequences(&sequences)).unwrap()
            });
            for (what, got, want) in [("out", &got.0, &want.0), ("lse", &got.1, &want.1)] {
                assert_eq!(first_difference(what, got, want), None, "sequence {b}");
            }
        }
    };
    compare(&cache, &cold, 1);
    compare(&cache, &cold, 64);
    let mut at = 0;
    for next in [1, 40, 300] {
        let new = at * row..next * row;
        for cache in [&mut cache, &mut cold] {
            cache
                .append(1, &other_k[new.clone()], &other_v[new.clone()])
                .unwrap();
        }
        compare(&cache, &cold, (next - at).min(64));
        at = next;
    }
    // From cache to cache, and back to a checkpoint there.
    let image = cache.image(1).unwrap();
    for (cache, image) in [(&mut cold, &image), (&mut cache, &image)] {
        cache.free_sequence(0).unwrap();
        cache.restore(0, image).unwrap();
        cache.truncate(0, 256).unwrap();
    }
    compare(&cache, &cold, 1);
    for sequence in [0, 1] {
        cache.free_sequence(sequence).unwrap();
    }
    assert_eq!(cache.free_pages(), config.num_pages);
}
