//! Residual pages: which a sequence keeps, who shares them, and what appends, forks and failures leave of them.

mod failed;

use attn_core::{
    Append, CacheConfig, Error, HostPages, KvCache, KvFormat, PageLayout,
    convert::{Side, dequantize},
    layout::Part,
    rotation::rotate_stored,
};
use rstest::rstest;

use crate::texts::{DIM, ONE_HEAD, grow_to, values};

fn config(format: &str, page_size: usize, pages: usize) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), ONE_HEAD)
        .centres(false)
        .sequences(4)
        .page_size(page_size)
        .pages(pages)
        .build()
}

fn cache(format: &str, page_size: usize, pages: usize) -> KvCache {
    let config = config(format, page_size, pages);
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// The pages of a text of one length, appended at once to a cache of its own.
fn alone(format: &str, page_size: usize, seed: usize, len: usize) -> Vec<Vec<u8>> {
    let mut cache = cache(format, page_size, 2 * len.div_ceil(page_size));
    grow_to(&mut cache, 0, seed, len).unwrap();
    cache.read_back(0).unwrap()
}

/// Every page has one owner per place in the table, none is lost, and each sequence has as many as its length says.
fn assert_consistent(cache: &KvCache) {
    assert_consistent_with_restored(cache, &[]);
}

/// The same, where some sequences have been restored: these have the residual pages of an image.
fn assert_consistent_with_restored(cache: &KvCache, restored: &[usize]) {
    let (table, config) = (cache.table(), cache.config());
    let mut owned: Vec<u32> = Vec::new();
    for (b, len) in table.lens.iter().enumerate() {
        let (home, residuals) = (&table.pages[b], &table.residual_pages[b]);
        let (format, size) = (config.format, config.page_size);
        assert_eq!(home.len(), len.div_ceil(size));
        if restored.contains(&b) {
            assert_eq!(residuals.len(), format.saved_residual_pages(size, *len));
        } else {
            assert_eq!(residuals.len(), format.residual_pages(size, *len, 0));
            assert_eq!(home.len() + residuals.len(), config.pages_for(*len));
        }
        let mut own = [&home[..], residuals].concat();
        own.sort_unstable();
        let count = own.len();
        own.dedup();
        assert_eq!(own.len(), count, "a page has two places in sequence {b}");
        owned.extend(own);
    }
    owned.sort_unstable();
    owned.dedup();
    assert_eq!(owned.len() + cache.free_pages(), config.num_pages);
}

/// The home pages of `home` that have residuals: those of the first tile, and as many last ones as make `kept` of them.
fn homes_of(page_size: usize, home: usize, kept: usize) -> Vec<usize> {
    let first = 64usize.div_ceil(page_size).min(home).min(kept);
    (0..first).chain(home - (kept - first)..home).collect()
}

const FORMATS: [&str; 8] = [
    "int4",
    "int4-w4",
    "int8/int4",
    "int4/int8",
    "int4-w4/int4",
    "int4/int4-w4",
    "int4-w0/int4-r2",
    "int8",
];

#[rstest]
fn bytes_do_not_depend_on_how_many_tokens_come_at_once(
    #[values(16, 32, 64, 128)] page_size: usize,
) {
    for format in FORMATS {
        let total = 700;
        let mut cache = cache(format, page_size, 2 * 700usize.div_ceil(page_size));
        let mut step = 0;
        // Ones, pages, and calls that pass the whole window.
        let steps = [1, 15, 1, 16, 31, 64, 1, 130, 3, 300, 137, 1];
        while cache.table().lens[0] < total {
            let len = (cache.table().lens[0] + steps[step % steps.len()]).min(total);
            step += 1;
            grow_to(&mut cache, 0, 1, len).unwrap();
            let expected = alone(format, page_size, 1, len);
            assert!(
                cache.read_back(0).unwrap() == expected,
                "{format} {page_size} {len}"
            );
            assert_consistent(&cache);
        }
    }
}

#[rstest]
#[case("int4", 64)]
#[case("int4/int4-w4", 16)]
fn one_token_at_a_time_gives_the_bytes_of_all_at_once(
    #[case] format: &str,
    #[case] page_size: usize,
) {
    let mut cache = cache(format, page_size, 100);
    for len in 1..=600 {
        grow_to(&mut cache, 0, 1, len).unwrap();
        assert_consistent(&cache);
        if len % 37 == 0 || len % 64 < 2 {
            assert!(cache.read_back(0).unwrap() == alone(format, page_size, 1, len));
        }
    }
}

/// The 8 bits of code and residual of one element.
fn code_of(
    layout: &PageLayout,
    side: Side,
    home: &[u8],
    residual: &[u8],
    t: usize,
    d: usize,
) -> u16 {
    let load = |part: &Part, page: &[u8]| part.load_code(&page[layout.run(0, 0)], t, d);
    let fine = layout.residual(side).unwrap();
    load(&layout.part(side), home) << 4 | load(&fine, residual)
}

#[rstest]
#[case("int4", 16, 0, 4 + 9)]
#[case("int4-w4/int4", 64, 0, 1 + 5)]
#[case("int8/int4", 32, 1, 2 + 5)]
#[case("int4-r4/int8", 128, 0, 1 + 2)]
fn residual_pages_are_those_of_the_first_and_the_last_home_pages(
    #[case] format: &str,
    #[case] page_size: usize,
    #[case] first_side: usize,
    #[case] kept: usize,
) {
    let len = 777;
    let layout = config(format, page_size, 1).layout().unwrap();
    let pages = alone(format, page_size, 1, len);
    let (home, residuals) = pages.split_at(len.div_ceil(page_size));
    // Tokens from 713 on, the newest 64, read tiles from 640 on by windows of two tiles, from 512 on by windows of four.
    assert_eq!(residuals.len(), kept);
    for (side, seed) in [(Side::K, 1), (Side::V, 101)].into_iter().skip(first_side) {
        let scheme = layout.part(side).scheme;
        if layout.residual(side).is_none() {
            continue;
        }
        for t in 0..len {
            let homes = homes_of(page_size, home.len(), kept);
            let Some(residual) = homes.iter().position(|i| *i == t / page_size) else {
                continue;
            };
            let (mut codes, mut params) = (
                [0; DIM],
                vec![Default::default(); scheme.groups(DIM).count()],
            );
            let x = values(seed, t, t + 1);
            attn_core::quant::encode(scheme, 1.0, &x, scheme.groups(DIM), &mut codes, &mut params);
            let i = t / page_size;
            for (d, code) in codes.iter().enumerate() {
                let residual = &residuals[residual];
                let found = code_of(&layout, side, &home[i], residual, t % page_size, d);
                assert_eq!(found, *code, "{side:?} ({t}, {d})");
            }
        }
    }
}

/// A pool of the pages of one length takes that many tokens, however they come.
#[rstest]
fn a_pool_takes_as_many_tokens_as_promised(
    #[values("int4", "int4-w4/int8", "int8")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(1, 16, 65, 128, 300, 1000)] step: usize,
) {
    let max_len = 1000;
    let pages = config(format, page_size, 1).pages_for(max_len);
    let mut cache = cache(format, page_size, pages);
    while cache.table().lens[0] < max_len {
        let len = (cache.table().lens[0] + step).min(max_len);
        let append = Append {
            sequence: 0,
            tokens: len - cache.table().lens[0],
        };
        // Old residual pages that the append recycles are not asked for.
        let (needed, free) = (cache.pages_needed(&[append]).unwrap(), cache.free_pages());
        assert!(needed <= free, "{needed} of {free}");
        grow_to(&mut cache, 0, 1, len).unwrap();
        assert_consistent(&cache);
    }
    assert_eq!(cache.free_pages(), 0);
    assert!(cache.read_back(0).unwrap() == alone(format, page_size, 1, max_len));
    // One page more is too much, and changes nothing.
    let before = (cache.table().clone(), cache.read_back(0).unwrap());
    let over = max_len.next_multiple_of(page_size) + 1;
    let error = grow_to(&mut cache, 0, 1, over).unwrap_err();
    assert!(
        matches!(
            error,
            Error::CacheFull {
                needed: 1,
                free: 0,
                ..
            }
        ),
        "{error}"
    );
    assert!((cache.table().clone(), cache.read_back(0).unwrap()) == before);
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), pages);
}

#[test]
fn a_batch_recycles_old_residual_pages_of_all_its_sequences() {
    let pages = 3 * config("int4", 64, 1).pages_for(640);
    let mut cache = cache("int4", 64, pages);
    for len in [300, 500, 640] {
        let appends = [0, 1, 2].map(|sequence| Append {
            sequence,
            tokens: len - cache.table().lens[sequence],
        });
        let texts = |first: usize| -> Vec<f32> {
            let text = |a: &Append| values(first + a.sequence, len - a.tokens, len);
            appends.iter().flat_map(text).collect()
        };
        cache
            .append_batch(&appends, &texts(1), &texts(101))
            .unwrap();
        assert_consistent(&cache);
        for sequence in 0..3 {
            assert!(cache.read_back(sequence).unwrap() == alone("int4", 64, 1 + sequence, len));
        }
    }
    assert_eq!(cache.free_pages(), 0);
}

/// A pool where the dropped pages are shared: they cannot be recycled, and the check of room says what is lacking.
#[test]
fn shared_residual_pages_are_not_recycled() {
    let mut cache = cache("int4", 64, 14);
    grow_to(&mut cache, 0, 1, 320).unwrap();
    cache.fork(0, 1).unwrap();
    let before = cache.table().clone();
    let bytes = cache.read_back(1).unwrap();
    // Home pages 5..8 and residual pages 5..8 are new; the five old ones are the fork's, too.
    assert_eq!(cache.free_pages(), 4);
    let error = grow_to(&mut cache, 0, 1, 512).unwrap_err();
    assert!(
        matches!(
            error,
            Error::CacheFull {
                needed: 6,
                free: 4,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(*cache.table(), before);
    grow_to(&mut cache, 0, 1, 448).unwrap();
    assert_consistent(&cache);
    assert!(cache.read_back(1).unwrap() == bytes);
    assert!(cache.read_back(0).unwrap() == alone("int4", 64, 1, 448));
}

/// Forks share all pages, and copy the open ones when either of them appends.
#[rstest]
#[case(1)]
#[case(58)]
#[case(200)]
#[case(1000)]
fn forks_copy_open_pages(
    #[case] more: usize,
    #[values("int4", "int8/int4", "int4-w4/int4", "int8")] format: &str,
    #[values(16, 64, 128)] page_size: usize,
    #[values(false, true)] parent_grows: bool,
) {
    let len = 390;
    let mut cache = cache(format, page_size, 400);
    grow_to(&mut cache, 0, 1, len).unwrap();
    cache.fork(0, 1).unwrap();
    assert_eq!(cache.table().pages[0], cache.table().pages[1]);
    assert_eq!(
        cache.table().residual_pages[0],
        cache.table().residual_pages[1]
    );
    assert_consistent(&cache);
    let (grower, other) = if parent_grows { (0, 1) } else { (1, 0) };
    let (free, before) = (cache.free_pages(), cache.table().clone());
    let bytes = cache.read_back(other).unwrap();
    // Another text from here on.
    let (k, v) = (values(7, len, len + more), values(107, len, len + more));
    cache.append(grower, &k, &v).unwrap();
    assert_consistent(&cache);
    let table = cache.table();
    assert_eq!(table.pages[other], before.pages[other]);
    assert_eq!(table.residual_pages[other], before.residual_pages[other]);
    assert!(cache.read_back(other).unwrap() == bytes);
    // All full pages are shared still, and residuals of full pages that both keep.
    let full = len / page_size;
    assert_eq!(table.pages[grower][..full], before.pages[other][..full]);
    assert_ne!(table.pages[grower][full], before.pages[other][full]);
    let home = |len: usize| len.div_ceil(page_size);
    let kept = |len: usize| cache.config().format.residual_pages(page_size, len, 0);
    let homes = homes_of(page_size, home(len + more), kept(len + more));
    let held = homes_of(page_size, home(len), kept(len));
    for i in homes.iter().filter(|i| **i < full && held.contains(i)) {
        let page = table.residual_page(grower, *i);
        assert!(
            page.is_some() && page == before.residual_page(other, *i),
            "{i}"
        );
    }
    // So many pages are the grower's alone.
    let own = home(len + more) - full;
    let own_residuals = homes.iter().filter(|i| **i >= full).count();
    assert_eq!(free - cache.free_pages(), own + own_residuals);
    // The bytes are those of a sequence that was never forked.
    let mut expected = self::cache(format, page_size, 400);
    grow_to(&mut expected, 0, 1, len).unwrap();
    expected.append(0, &k, &v).unwrap();
    assert!(cache.read_back(grower).unwrap() == expected.read_back(0).unwrap());
    // The other one's open pages are its own now: it grows without a copy.
    let open = before.pages[other][full];
    grow_to(&mut cache, other, 1, len + 1).unwrap();
    assert_eq!(cache.table().pages[other][full], open);
    assert!(cache.read_back(other).unwrap() == alone(format, page_size, 1, len + 1));
    cache.free_sequence(0).unwrap();
    cache.free_sequence(1).unwrap();
    assert_eq!(cache.free_pages(), 400);
}

#[test]
fn a_fork_of_full_pages_copies_nothing() {
    let mut cache = cache("int4", 64, 40);
    grow_to(&mut cache, 0, 1, 320).unwrap();
    cache.fork(0, 1).unwrap();
    let before = cache.table().clone();
    let free = cache.free_pages();
    grow_to(&mut cache, 1, 1, 321).unwrap();
    // A home page and a residual page; the oldest residual page but for the first tile's goes on in the parent.
    assert_eq!(free - cache.free_pages(), 2);
    assert_eq!(cache.table().pages[1][..5], before.pages[0][..]);
    let (child, parent) = (&cache.table().residual_pages[1], &before.residual_pages[0]);
    assert_eq!((child[0], &child[1..4]), (parent[0], &parent[2..]));
    assert_eq!(cache.table().residual_pages[0], before.residual_pages[0]);
}

#[test]
fn tokens_between_the_first_tile_and_the_window_are_written_without_residuals() {
    let mut cache = cache("int4", 16, 80);
    grow_to(&mut cache, 0, 1, 50).unwrap();
    let mut seen = Vec::new();
    let batch = [Append {
        sequence: 0,
        tokens: 600 - 50,
    }];
    cache
        .append_with(&batch, |_, writes| {
            seen = writes.to_vec();
            Ok(())
        })
        .unwrap();
    let table = cache.table();
    for (t, write) in (50..600).zip(&seen) {
        let (i, last) = (t / 16, 38 - 16);
        assert_eq!((write.page, write.token), (table.pages[0][i], t % 16));
        let at = if i < 4 {
            Some(i)
        } else {
            (i + 4).checked_sub(last)
        };
        let residual = at.filter(|_| i < 4 || i >= last);
        let residual = residual.map(|at| table.residual_pages[0][at]);
        assert_eq!(write.residual_page, residual, "{t}");
    }
}

/// Root mean square of the errors of tokens `from..to`.
fn rms(found: &[f32], x: &[f32], from: usize, to: usize) -> f32 {
    let errors = found[from * DIM..to * DIM].iter().zip(&x[from * DIM..]);
    let sum: f32 = errors.map(|(a, b)| (a - b) * (a - b)).sum();
    (sum / ((to - from) * DIM) as f32).sqrt()
}

/// The coarse step of a row that is rotated and stored in 4 bits: an eighth of the largest element of a group; of several groups, the root of the mean
/// square.
fn coarse_step(row: &[f32], groups: usize) -> f32 {
    let mut row = row.to_vec();
    rotate_stored(&mut row);
    let largest = |group: &[f32]| group.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let steps = row.chunks(DIM / groups).map(|group| largest(group) / 8.0);
    let squares: f32 = steps.map(|step| step * step).sum();
    (squares / groups as f32).sqrt()
}

#[rstest]
#[case("int4", 64, 300, [2, 2])]
#[case("int4", 128, 257, [2, 2])]
#[case("int4-w4/int4", 16, 611, [4, 2])]
#[case("int4-w0/int4-r2", 64, 640, [0, 2])]
#[case("int4/int4-w4", 32, 100, [2, 4])]
fn values_of_the_first_tile_and_the_last_ones_are_finer_than_others(
    #[case] format: &str,
    #[case] page_size: usize,
    #[case] len: usize,
    #[case] tiles: [usize; 2],
) {
    let config = config(format, page_size, 1);
    let layout = config.layout().unwrap();
    let pages = alone(format, page_size, 1, len);
    let found = dequantize(&layout, &pages, len, &[], &[]).unwrap();
    let schemes = [config.format.k, config.format.v];
    for (side, found) in found.iter().enumerate() {
        let x = values(1 + 100 * side, 0, len);
        assert_eq!(found.len(), x.len());
        let fine = ((len - 1) / 64 + 1).saturating_sub(tiles[side]) * 64;
        let fine = fine.min(len);
        for t in 0..len {
            // Errors are spread evenly over a step, whose 16th is that of a fine row: their root mean square over 64 dims is near 0.29 of it.
            let step = coarse_step(&x[t * DIM..][..DIM], schemes[side].groups(DIM).count());
            let is_fine = tiles[side] > 0 && (t < 64 || t >= fine);
            let step = if is_fine { step / 16.0 } else { step };
            let error = rms(found, &x, t, t + 1) / step;
            assert!(
                (0.2..0.38).contains(&error),
                "side {side}, token {t}: {error} of a step"
            );
        }
    }
}

#[test]
fn a_step_bounds_the_error_of_every_rotated_element() {
    // Read the codes as the arithmetic does, and compare the rotated rows.
    let len = 200;
    let layout = config("int4", 64, 1).layout().unwrap();
    let pages = alone("int4", 64, 1, len);
    let (home, residuals) = pages.split_at(4);
    let first = home.len() - residuals.len();
    assert!(first < 2);
    for (side, seed) in [(Side::K, 1), (Side::V, 101)] {
        let part = layout.part(side);
        for t in first * 64..len {
            let mut row = values(seed, t, t + 1);
            attn_core::rotation::rotate_stored(&mut row);
            let (i, at) = (t / 64, t % 64);
            let scale = part.load_param(&home[i], at, 0).scale;
            let step = scale.to_f32();
            // The scale is rounded to f16: the largest element may lie 16/2048 of it beyond the last code.
            let slack = step / 128.0;
            for (d, x) in row.iter().enumerate() {
                let residual = &residuals[i - first];
                let code = code_of(&layout, side, &home[i], residual, at, d);
                let (u, r) = (code >> 4, code & 15);
                let coarse = (2.0 * f32::from(u) - 15.0) * step;
                let fine = attn_core::quant::half_step_value(u, r, scale);
                assert!((coarse - x).abs() <= step + slack, "({t}, {d})");
                assert!((fine - x).abs() <= step / 16.0 + slack, "({t}, {d})");
            }
        }
    }
}

#[test]
fn rotated_rows_of_8_bits_come_back_within_a_step() {
    for format in ["int8", "int8/int4"] {
        let layout = config(format, 64, 1).layout().unwrap();
        let pages = alone(format, 64, 1, 100);
        let [k, _] = dequantize(&layout, &pages, 100, &[], &[]).unwrap();
        for (found, x) in k.iter().zip(values(1, 0, 100)) {
            // Steps of at most 13/127, and the root of 64 dims of them.
            assert!((found - x).abs() < 0.15, "{found} {x}");
        }
        assert!(rms(&k, &values(1, 0, 100), 0, 100) < 0.03);
    }
}

#[test]
fn a_format_without_a_window_has_no_residual_pages() {
    for format in ["int8", "int4-w0", "int8-plain/int4-g1", "bf16"] {
        let mut cache = cache(format, 64, 20);
        grow_to(&mut cache, 0, 1, 1000).unwrap();
        assert!(cache.table().residual_pages[0].is_empty());
        let mut seen = Vec::new();
        let batch = [Append {
            sequence: 1,
            tokens: 3,
        }];
        cache
            .append_with(&batch, |_, writes| {
                seen.extend(writes.iter().map(|w| w.residual_page));
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, [None; 3]);
    }
    assert_eq!(KvFormat::INT8.window().kept_tokens(), 0);
}
