//! Checkpoints: a sequence that was truncated to one, or resumed there, is a run that was never longer.

use attn_conformance::noise::Noise;
use attn_core::{
    Append, CacheBuilder, CacheConfig, CheckpointPage, Error, HostPages, KvCache, Problem,
    SequenceImage, TruncateLimit,
};
use rstest::rstest;

use crate::texts::{ONE_HEAD, values};

fn builder(format: &str, page_size: usize, every: usize) -> CacheBuilder {
    CacheConfig::builder(format.parse().unwrap(), ONE_HEAD)
        .sequences(4)
        .page_size(page_size)
        .checkpoints(every)
}

fn cache(builder: CacheBuilder) -> KvCache {
    let config = builder.build();
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// Appends tokens of a text to a sequence up to the length `to`, others in each layer.
fn grow_to(cache: &mut KvCache, sequence: usize, seed: usize, to: usize) {
    let from = cache.table().lens[sequence];
    let tokens = to - from;
    cache.reserve(&[Append { sequence, tokens }]).unwrap();
    for layer in 0..cache.config().layers {
        let [k, v] = [seed, seed + 100].map(|seed| values(seed + 1000 * layer, from, to));
        cache.write(layer, &k, &v).unwrap();
    }
}

/// The image of a text's first `len` tokens, appended at once to a cache of its own.
fn cold(builder: CacheBuilder, seed: usize, len: usize) -> SequenceImage<'static> {
    let mut cache = cache(builder.pages(3 * len.div_ceil(16) + 8));
    grow_to(&mut cache, 0, seed, len);
    cache.image(0).unwrap()
}

/// Every page has one owner per place in the table or none: those of all sequences, and the free ones, are the pool.
fn assert_owned(cache: &KvCache) {
    let table = cache.table();
    let kept = table.checkpoint_pages.iter().flatten().map(|of| of.page);
    let lists = table.pages.iter().chain(&table.residual_pages).flatten();
    let mut owned: Vec<u32> = lists.copied().chain(kept).collect();
    owned.retain(|page| *page < u32::MAX);
    owned.sort_unstable();
    owned.dedup();
    assert_eq!(owned.len() + cache.free_pages(), cache.config().num_pages);
}

/// Kills pages of a window that are not kept, pages kept too long, and a table that a truncation leaves without them.
#[rstest]
fn goes_back_to_checkpoints(
    #[values("int4", "int8/int4", "int4-r2-w4", "int4-w4/int4", "int4/int8")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(128, 384, 640)] every: usize,
    #[values(37, 1300)] at_once: usize,
) {
    let new = || builder(format, page_size, every).max_len(1300);
    let mut cache = cache(new());
    while cache.table().lens[0] < 1300 {
        let to = (cache.table().lens[0] + at_once).min(1300);
        grow_to(&mut cache, 0, 1, to);
        assert_owned(&cache);
    }
    assert!(cache.image(0).unwrap() == cold(new(), 1, 1300));
    for len in (every..1300).step_by(every).rev() {
        cache.truncate(0, len).unwrap();
        assert_owned(&cache);
        assert!(cache.image(0).unwrap() == cold(new(), 1, len), "{len}");
        // As many as between steps, where there are so many, lie where steps read them.
        let for_steps = cache.table().residual_pages[0].len();
        let most = cache.config().format.residual_pages(page_size, len, 0);
        assert!(for_steps == most || for_steps < most && every > 128);
        // A fork goes on, as its own, and the sequence as before.
        cache.fork(0, 1).unwrap();
        grow_to(&mut cache, 1, 2, len + 150);
        cache.truncate(1, len).unwrap();
        grow_to(&mut cache, 1, 1, len + 300);
        assert!(
            cache.image(1).unwrap() == cold(new(), 1, len + 300),
            "{len}"
        );
        let queries = |len: usize| Problem::new(ONE_HEAD, [len, 0]).q_lens([64, 0]);
        cache.check_queries(&queries(len)).unwrap();
        cache.free_sequence(1).unwrap();
        assert!(cache.image(0).unwrap() == cold(new(), 1, len), "{len}");
    }
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), cache.config().num_pages);
}

/// A cold run, and a sequence under any calls, on pools that are just large enough. Kills pages that are shared or freed wrongly, and a pool that is too small.
#[rstest]
fn any_calls_leave_a_cold_runs_image(
    #[values(16, 64, 128)] page_size: usize,
    #[values(128, 512)] every: usize,
    #[values("int4", "int8/int4", "int4-r2-w4", "int4/int8")] format: &str,
) {
    const MOST: usize = 1200;
    let new = || {
        builder(format, page_size, every)
            .max_q_len(100)
            .max_len(MOST)
    };
    let mut cache = cache(new());
    let mut noise = Noise::new((page_size + every) as u64);
    let mut below = |n: usize| noise.below(n);
    // Text and whether the image has all residuals, of each sequence.
    let mut known = [(1, true); 4];
    for step in 0..100 {
        let (s, other) = (below(4), below(4));
        let len = cache.table().lens[s];
        match below(8) {
            0..=2 => {
                let more = [1, 3, 70, 600, 1200][below(5)].min(MOST - len);
                if len == 0 {
                    known[s] = (1 + step, true);
                }
                let appends = [Append {
                    sequence: s,
                    tokens: more,
                }];
                // Sequences that share pages may each need their own of them later.
                if cache.pages_needed(&appends).unwrap() <= cache.free_pages() {
                    let before = cache.table().clone();
                    cache.reserve(&appends).unwrap();
                    cache.cancel_step().unwrap();
                    assert_eq!(*cache.table(), before);
                    grow_to(&mut cache, s, known[s].0, len + more);
                }
            }
            3 | 4 if len > 0 => {
                let asked = below(len + 1);
                let prefix = cache.longest_prefix(s, asked).unwrap();
                assert!(asked - prefix < every, "{asked} {prefix}");
                cache.truncate(s, prefix).unwrap();
                known[s].1 &= prefix == len;
                known[s].1 |= prefix.is_multiple_of(every) || prefix <= 64;
            }
            5 if s != other && cache.table().lens[other] == 0 => {
                cache.fork(s, other).unwrap();
                known[other] = known[s];
            }
            6 if len > 0 && s != other => {
                let image = cache.image(s).unwrap();
                cache.free_sequence(other).unwrap();
                if cache.restore(other, &image).is_ok() {
                    assert!(cache.image(other).unwrap() == image);
                    known[other] = known[s];
                }
            }
            7 => cache.free_sequence(s).unwrap(),
            _ => {}
        }
        assert_owned(&cache);
        let looked_at = (0..4).filter(|i| step % 30 == 29 || [s, other].contains(i));
        for (s, (seed, is_whole)) in looked_at.map(|s| (s, &known[s])) {
            let len = cache.table().lens[s];
            let (found, cold) = (cache.image(s).unwrap(), cold(new(), *seed, len));
            match is_whole {
                true => assert!(found == cold, "sequence {s} of {len} in step {step}"),
                // The home pages are a cold run's anyway.
                false => {
                    let homes = len.div_ceil(page_size) * cache.layout().page_bytes();
                    assert!(found.pages()[..homes] == cold.pages()[..homes]);
                }
            }
        }
    }
    for s in 0..4 {
        cache.free_sequence(s).unwrap();
    }
    assert_eq!(cache.free_pages(), cache.config().num_pages);
    // One alone has room for all of its tokens, however they come.
    let mut alone = self::cache(new().sequences(1));
    for to in (0..=MOST).step_by(50) {
        grow_to(&mut alone, 0, 1, to);
    }
    alone.truncate(0, every).unwrap();
    grow_to(&mut alone, 0, 1, MOST);
    assert!(alone.image(0).unwrap() == cold(new(), 1, MOST));
}

#[rstest]
fn the_error_names_the_nearest_lengths(
    #[values(16, 64, 128)] page_size: usize,
    #[values(128, 512, 1024)] every: usize,
    #[values(0, 700)] dropped: usize,
) {
    let mut cache = cache(builder("int4", page_size, every).max_len(3000));
    grow_to(&mut cache, 0, 1, 3000);
    cache.drop_before(0, dropped).unwrap();
    let first = cache.table().first_tokens[0];
    let can: Vec<bool> = (0..=3000)
        .map(|len| cache.check_truncate(0, len).is_ok())
        .collect();
    for len in 0..=3000 {
        let longest = (0..=len).rfind(|len| can[*len]).unwrap();
        assert_eq!(cache.longest_prefix(0, len).unwrap(), longest);
        match cache.check_truncate(0, len) {
            Ok(()) => assert_eq!(longest, len),
            Err(Error::Truncate {
                given,
                longest_prefix,
                least,
                limit,
                ..
            }) => {
                let next = (len..=3000).find(|len| can[*len]).unwrap();
                assert_eq!((given, longest_prefix, least), (len, longest, next));
                let is_dropped = limit == TruncateLimit::Dropped;
                assert_eq!(is_dropped, len < first);
            }
            Err(other) => panic!("{other}"),
        }
        if len >= first {
            assert!(len - longest < every, "{len} {longest}");
        }
    }
    // And the calls do what these say.
    let prefix = cache.longest_prefix(0, 2000).unwrap();
    cache.truncate(0, prefix).unwrap();
    grow_to(&mut cache, 0, 1, 3000);
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), cache.config().num_pages);
}

#[test]
fn forks_that_share_a_checkpoint_append_in_its_open_page() {
    for page_size in [16, 64, 128] {
        let new = || builder("int8/int4", page_size, 512).layers(2);
        let mut cache = cache(new().pages(600));
        grow_to(&mut cache, 0, 1, 2000);
        cache.fork(0, 1).unwrap();
        cache.fork(1, 2).unwrap();
        // A few tokens before the checkpoint its residuals reach, too; the page is open then, and three sequences have it.
        let len = 1024 - 5;
        for (sequence, seed) in [(1, 2), (2, 3)] {
            cache.truncate(sequence, len).unwrap();
            grow_to(&mut cache, sequence, seed, 1500);
        }
        assert!(cache.image(0).unwrap() == cold(new(), 1, 2000));
        for (sequence, seed) in [(1, 2), (2, 3)] {
            let mut straight = self::cache(new().pages(600));
            grow_to(&mut straight, 0, 1, len);
            grow_to(&mut straight, 0, seed, 1500);
            let image = straight.image(0).unwrap();
            assert!(cache.image(sequence).unwrap() == image, "{page_size}");
            // The checkpoint that both passed is one of their own.
            cache.truncate(sequence, 1024).unwrap();
            straight.truncate(0, 1024).unwrap();
            let image = straight.image(0).unwrap();
            assert!(cache.image(sequence).unwrap() == image, "{page_size}");
        }
        assert_owned(&cache);
        for sequence in [1, 0, 2] {
            cache.free_sequence(sequence).unwrap();
        }
        assert_eq!(cache.free_pages(), 600);
    }
}

#[test]
fn an_image_goes_into_caches_of_other_checkpoints_and_of_none() {
    let of = |every| cache(builder("int4", 64, every).layers(3).max_len(2000));
    let mut from = of(256);
    grow_to(&mut from, 0, 1, 2000);
    let stored = from.image(0).unwrap().into_bytes();
    let image = SequenceImage::from_bytes(&stored[..]).unwrap();
    let page = 3 * from.layout().page_bytes();
    // Seven checkpoints of two pages.
    assert_eq!(image.checkpoint_pages().len(), 7 * 2 * page);
    for (every, kept) in [(256, 14), (512, 6), (384, 4), (0, 0)] {
        let mut to = of(every);
        to.restore(1, &image).unwrap();
        assert_eq!(to.table().checkpoint_pages[1].len(), kept, "{every}");
        assert_owned(&to);
        let back = to.image(1).unwrap();
        assert_eq!(back.pages(), image.pages());
        assert_eq!(back.checkpoint_pages().len(), kept * page);
        // Of those at every 384 tokens 768 and 1536 are among those at every 256.
        let prefix = match every {
            0 => 64,
            384 => 768,
            _ => 1024,
        };
        assert_eq!(to.longest_prefix(1, 1100).unwrap(), prefix, "{every}");
        to.truncate(1, prefix).unwrap();
        let new = || builder("int4", 64, every).layers(3).max_len(2000);
        assert_eq!(to.image(1).unwrap().pages(), cold(new(), 1, prefix).pages());
    }
    // One that was saved by a cache without checkpoints.
    let mut plain = of(0);
    grow_to(&mut plain, 0, 1, 2000);
    let mut to = of(256);
    to.restore(0, &plain.image(0).unwrap()).unwrap();
    assert_eq!(to.longest_prefix(0, 1100).unwrap(), 64);
    // A pool that lacks a page takes none.
    let mut small = cache(builder("int4", 64, 256).layers(3).pages(32 + 4 + 14 - 1));
    assert!(matches!(
        small.restore(0, &image),
        Err(Error::CacheFull { needed: 50, .. })
    ));
    assert_eq!(small.free_pages(), 49);
}

/// Kills a restored sequence whose residuals before the saved ones are the checkpoint's alone: a long verification step would be refused though they are there.
#[rstest]
fn a_restored_sequence_reads_what_its_last_checkpoint_keeps(#[values(16, 64)] page_size: usize) {
    let new = || builder("int4", page_size, 128).max_len(2000);
    let mut long = cache(new());
    grow_to(&mut long, 0, 1, 1100);
    long.truncate(0, 1024).unwrap();
    let image = long.image(0).unwrap();
    let mut back = cache(new());
    back.restore(2, &image).unwrap();
    assert_owned(&back);
    let [ours, theirs] =
        [(&back, 2), (&long, 0)].map(|(cache, s)| cache.table().residual_pages[s].len());
    assert_eq!(ours, theirs);
    assert!(back.image(2).unwrap() == image);
}

#[test]
fn dropped_tokens_take_their_checkpoints_with_them() {
    let mut cache = cache(builder("int4", 64, 256).max_len(3000));
    let homes = |cache: &KvCache| -> Vec<usize> {
        let kept = cache.table().checkpoint_pages[0].iter();
        kept.map(|CheckpointPage { home, .. }| *home).collect()
    };
    grow_to(&mut cache, 0, 1, 2000);
    let all = [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27];
    assert_eq!(homes(&cache), all);
    cache.fork(0, 1).unwrap();
    // As many as from one checkpoint to another: those behind stay.
    assert_eq!(cache.drop_range(0, 320..832).unwrap(), 512);
    assert_eq!(homes(&cache), all[..10]);
    assert_owned(&cache);
    let mut shorter = self::cache(builder("int4", 64, 256).max_len(3000));
    grow_to(&mut shorter, 0, 1, 320);
    let [k, v] = [1, 101].map(|seed| values(seed, 832, 2000));
    shorter.append(0, &k, &v).unwrap();
    for len in [1488, 1024, 256] {
        cache.truncate(0, len).unwrap();
        shorter.truncate(0, len).unwrap();
        let images = [&cache, &shorter].map(|cache| cache.image(0).unwrap());
        assert!(images[0] == images[1], "{len}");
    }
    // By another number: none lies behind any more, until the next one.
    assert_eq!(cache.drop_range(1, 320..448).unwrap(), 128);
    assert_eq!(cache.longest_prefix(1, 1500).unwrap(), 256);
    grow_to(&mut cache, 1, 1, 2600);
    assert_eq!(cache.longest_prefix(1, 2100).unwrap(), 2048);
    cache.drop_before(1, 2400).unwrap();
    assert!(cache.table().checkpoint_pages[1].is_empty());
    assert_owned(&cache);
    for sequence in [0, 1] {
        cache.free_sequence(sequence).unwrap();
    }
    assert_eq!(cache.free_pages(), cache.config().num_pages);
}

/// Kills pages of checkpoints that stay one by one, where the gap moves them from one place of a window to another.
#[test]
fn a_gap_of_other_than_whole_distances_leaves_no_checkpoint_behind_it() {
    let mut cache = cache(builder("int4", 64, 256).max_len(3000));
    grow_to(&mut cache, 0, 1, 2000);
    let (free, kept) = (cache.free_pages(), cache.table().checkpoint_pages[0].len());
    assert_eq!(kept, 14);
    assert_eq!(cache.drop_range(0, 64..128).unwrap(), 64);
    assert!(cache.table().checkpoint_pages[0].is_empty());
    assert_eq!(cache.free_pages(), free + 1 + kept);
    assert_owned(&cache);
}

#[test]
fn checkpoints_are_at_multiples_of_tiles_and_pages() {
    let check = |page_size, every| builder("int4", page_size, every).build().check();
    for (page_size, every) in [(16, 64), (64, 64), (128, 128), (32, 1024), (16, 1 << 40)] {
        check(page_size, every).unwrap();
    }
    for (page_size, every) in [(16, 16), (64, 100), (128, 64), (128, 192), (16, 1)] {
        let refused = check(page_size, every).unwrap_err().to_string();
        let said = format!("checkpoints is {every}; allowed: multiples of 64");
        assert!(refused.starts_with(&said), "{refused}");
    }
    // What they take is said, and room for it made.
    for (format, page_size, every, pages) in [
        ("int4", 64, 1024, 2),
        ("int4", 16, 1024, 8),
        ("int4", 128, 1024, 1),
        ("int4-w4", 64, 1024, 4),
        ("int4-w4", 64, 64, 1),
        ("int8", 64, 1024, 0),
    ] {
        let of = |every| builder(format, page_size, every).layers(3).max_len(4096);
        let (with, without) = (of(every).build(), of(0).build());
        assert_eq!(with.checkpoint_pages(), pages);
        assert_eq!(without.checkpoint_pages(), 0);
        let bytes = 3 * pages * with.layout().unwrap().page_bytes();
        assert_eq!(with.checkpoint_bytes().unwrap(), bytes);
        let more = 4 * pages * 4096 / every;
        let home = 4096 / page_size;
        let most = 4 * 2 * home;
        assert_eq!(with.num_pages, (without.num_pages + more).min(most));
    }
    // A format without a window keeps nothing for them, and goes back anywhere.
    let mut plain = cache(builder("int8", 64, 256).max_len(2000));
    grow_to(&mut plain, 0, 1, 2000);
    assert!(plain.table().checkpoint_pages[0].is_empty());
    assert_eq!(plain.longest_prefix(0, 1001).unwrap(), 1001);
}

#[test]
fn shards_have_checkpoints_from_their_own_first_token() {
    let shard = || {
        let mut cache = cache(builder("int4", 64, 384).centres(false).max_len(1000));
        cache.begin_shard(0, 1024, &[]).unwrap();
        cache
    };
    let (mut cache, mut cold) = (shard(), shard());
    grow_to(&mut cache, 0, 1, 1000);
    assert_eq!(cache.longest_prefix(0, 700).unwrap(), 384);
    cache.truncate(0, 384).unwrap();
    grow_to(&mut cold, 0, 1, 384);
    assert!(cache.image(0).unwrap() == cold.image(0).unwrap());
}

/// The open page's residuals are kept for a checkpoint by an append that no step reads them after, and another sequence has the page.
#[test]
fn an_open_page_before_a_checkpoint_is_copied_with_its_residuals() {
    for page_size in [16, 64, 128] {
        let new = || builder("int4", page_size, 512);
        let mut cache = cache(new().pages(600));
        // Inside of the window before 512.
        grow_to(&mut cache, 0, 1, 507);
        cache.fork(0, 1).unwrap();
        let before = cache.image(1).unwrap();
        grow_to(&mut cache, 0, 1, 1500);
        assert!(cache.image(1).unwrap() == before);
        cache.truncate(0, 512).unwrap();
        assert!(cache.image(0).unwrap() == cold(new(), 1, 512));
        grow_to(&mut cache, 1, 1, 1500);
        cache.free_sequence(0).unwrap();
        cache.truncate(1, 512).unwrap();
        assert!(cache.image(1).unwrap() == cold(new(), 1, 512));
        cache.free_sequence(1).unwrap();
        assert_eq!(cache.free_pages(), 600);
    }
}

/// Kills residual pages of a checkpoint that are given to new tokens where the pool is full.
#[test]
fn a_pool_that_lacks_a_page_takes_none_of_a_checkpoint() {
    let new = || builder("int4", 64, 256);
    let mut roomy = cache(new().pages(100));
    let mut recycled = 0;
    for len in (640..1920).step_by(64) {
        grow_to(&mut roomy, 0, 1, len);
        let needed = 100 - roomy.free_pages();
        let mut tight = cache(new().pages(needed));
        grow_to(&mut tight, 0, 1, len - 64);
        let free = tight.free_pages();
        assert!(free == 1 || free == 2);
        recycled += 2 - free;
        grow_to(&mut tight, 0, 1, len);
        assert!(tight.image(0).unwrap() == roomy.image(0).unwrap(), "{len}");
        let mut short = cache(new().pages(needed - 1));
        grow_to(&mut short, 0, 1, len - 64);
        let (table, image) = (short.table().clone(), short.image(0).unwrap());
        let [k, v] = [1, 101].map(|seed| values(seed, len - 64, len));
        let refused = short.append(0, &k, &v);
        assert!(matches!(refused, Err(Error::CacheFull { .. })), "{len}");
        assert!(*short.table() == table && short.image(0).unwrap() == image);
    }
    assert_eq!(recycled, 10, "half of the pages are no checkpoint's");
}
