//! The page table: who owns which page, and what a refused or failed call leaves.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use attn_conformance::fake::{FakePages, limited};
use attn_core::{
    Append, CacheConfig, ElementIndex, Error, Heads, HostPages, KvCache, KvFormat, PageStore,
    Scheme, internals::order_free_pages,
};
use rstest::rstest;

const DIM: usize = 64;

fn config(format: KvFormat, pages: usize) -> CacheConfig {
    let heads = Heads::new(1, 1, DIM);
    CacheConfig::builder(format, heads)
        .centres(false)
        .unit_tensor_scales()
        .sequences(3)
        .pages(pages)
        .build()
}

fn cache(format: KvFormat, pages: usize) -> KvCache {
    let config = config(format, pages);
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

fn tokens(n: usize, seed: usize) -> Vec<f32> {
    (0..n * DIM)
        .map(|i| ((i * 37 + seed * 101) % 129) as f32 / 16.0 - 4.0)
        .collect()
}

fn grow(cache: &mut KvCache, sequence: usize, n: usize) -> Result<(), Error> {
    cache.append(sequence, &tokens(n, sequence), &tokens(n, sequence + 7))
}

#[rstest]
#[case::int8(KvFormat::INT8)]
#[case::int8_int4(KvFormat::INT8_INT4)]
#[case::int4(KvFormat::INT4)]
fn a_call_that_the_device_fails_changes_no_length_and_takes_no_page(#[case] format: KvFormat) {
    let config = config(format, 24);
    let fails = Arc::new(AtomicBool::new(false));
    let asked = fails.clone();
    let mut cache = limited(config, move |_, count| {
        match asked.load(Ordering::Relaxed) {
            true => 0,
            false => count,
        }
    });
    grow(&mut cache, 0, 70).unwrap();
    cache.fork(0, 1).unwrap();
    let state = |cache: &KvCache| {
        let bytes: Vec<_> = (0..3).map(|b| cache.read_back(b).unwrap()).collect();
        (cache.table().clone(), cache.free_pages(), bytes)
    };
    let before = state(&cache);
    let pages = cache.read_back(0).unwrap();
    fails.store(true, Ordering::Relaxed);
    for _ in 0..20 {
        for sequence in 0..3 {
            // New pages, a copy of the page that two sequences share, residual pages.
            let error = grow(&mut cache, sequence, 130).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error}");
        }
        let error = cache.append_with(
            &[
                Append {
                    sequence: 0,
                    tokens: 3,
                },
                Append {
                    sequence: 2,
                    tokens: 65,
                },
            ],
            |_, _| {
                Err(Error::WrongBackend {
                    backend: "test",
                    what: "cache",
                })
            },
        );
        assert!(error.is_err());
        assert!(cache.restore_pages(2, 70, &pages).is_err());
        assert_eq!(state(&cache), before);
    }
    fails.store(false, Ordering::Relaxed);
    // All the pages are there, and the sibling keeps its bytes.
    grow(&mut cache, 1, 130).unwrap();
    grow(&mut cache, 2, 130).unwrap();
    assert_eq!(cache.read_back(0).unwrap(), before.2[0]);
}

#[test]
fn appended_tokens_go_where_the_table_says() {
    let mut cache = cache(KvFormat::INT8, 8);
    grow(&mut cache, 0, 60).unwrap();
    grow(&mut cache, 1, 3).unwrap();
    let mut seen = Vec::new();
    cache
        .append_with(
            &[
                Append {
                    sequence: 1,
                    tokens: 2,
                },
                Append {
                    sequence: 2,
                    tokens: 0,
                },
                Append {
                    sequence: 0,
                    tokens: 70,
                },
            ],
            |_, writes| {
                seen = writes.to_vec();
                Ok(())
            },
        )
        .unwrap();
    let table = cache.table().clone();
    assert_eq!(table.lens, [130, 5, 0]);
    let sources: Vec<usize> = seen.iter().map(|w| w.source).collect();
    assert_eq!(sources, (0..72).collect::<Vec<_>>());
    let places = |b: usize, from: usize| {
        let pages = &table.pages[b];
        (from..table.lens[b]).map(move |t| (pages[t / 64], t % 64))
    };
    let want: Vec<_> = places(1, 3).chain(places(0, 60)).collect();
    let got: Vec<_> = seen.iter().map(|w| (w.page, w.token)).collect();
    assert_eq!(got, want);
}

#[rstest]
#[case::int8(KvFormat::INT8, 3, 1)]
#[case::int4(KvFormat::INT4, 6, 2)]
fn pages_of_forks_come_back_when_the_last_owner_frees_them(
    #[case] format: KvFormat,
    #[case] used: usize,
    #[case] open: usize,
) {
    let mut cache = cache(format, 9);
    grow(&mut cache, 0, 130).unwrap();
    cache.fork(0, 1).unwrap();
    assert_eq!(9 - cache.free_pages(), used);
    // The copies of the open pages belong to one sequence, the rest to both.
    grow(&mut cache, 1, 1).unwrap();
    assert_eq!(9 - cache.free_pages(), used + open);
    cache.free_sequence(0).unwrap();
    cache.free_sequence(1).unwrap();
    assert_eq!(cache.free_pages(), 9);
    let held = cache.table().pages.iter().all(Vec::is_empty);
    assert!(held && cache.table().lens == [0; 3]);
}

#[test]
fn both_of_two_forks_can_grow_in_one_call() {
    let mut cache = cache(KvFormat::INT8, 4);
    grow(&mut cache, 0, 10).unwrap();
    cache.fork(0, 1).unwrap();
    cache
        .append_with(
            &[
                Append {
                    sequence: 0,
                    tokens: 1,
                },
                Append {
                    sequence: 1,
                    tokens: 1,
                },
            ],
            |_, _| Ok(()),
        )
        .unwrap();
    let pages = &cache.table().pages;
    assert_ne!(pages[0], pages[1]);
    assert_eq!(cache.free_pages(), 2);
}

#[rstest]
#[case::k(0, "k")]
#[case::v(1, "v")]
fn values_that_no_cache_holds_are_refused(#[case] side: usize, #[case] name: &str) {
    let formats = [
        "int8",
        "int8-plain",
        "bf16",
        "fp8",
        "f16",
        "int4",
        "int4-g1",
    ];
    for (format, bad) in formats.into_iter().flat_map(|f| {
        [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            1.2e15,
            1.2e30,
            1.3e30,
            -f32::MAX,
        ]
        .map(|bad| (f, bad))
    }) {
        let mut cache = cache(format.parse().unwrap(), 4);
        let most = match format {
            "bf16" => 2f32.powi(50),
            "int8" | "int4" => 2f32.powi(100),
            _ => f32::MAX,
        };
        let mut x = [vec![1.0; DIM], vec![1.0; DIM]];
        x[side][5] = bad;
        let fifth = ElementIndex::Row {
            token: 0,
            head: 0,
            dim: 5,
        };
        let result = cache.append(0, &x[0], &x[1]);
        match result {
            Err(Error::NotFinite { what, at, .. }) if !bad.is_finite() => {
                assert_eq!((what, at), (name, fifth))
            }
            Err(Error::Magnitude { what, at, .. }) if bad.is_finite() && bad.abs() > most => {
                assert_eq!((what, at), (name, fifth))
            }
            Ok(()) if bad.is_finite() && bad.abs() <= most => continue,
            other => panic!("{format}, {bad}: {other:?}"),
        }
        assert_eq!((cache.table().lens[0], cache.free_pages()), (0, 4));
    }
    // The largest magnitude of bf16 is 2^50, that of rotated rows 2^100.
    for (format, most) in [
        (KvFormat::same(Scheme::Bf16), 2f32.powi(50)),
        (KvFormat::INT8, 2f32.powi(100)),
        (KvFormat::INT4, 2f32.powi(100)),
    ] {
        let mut cache = cache(format, 4);
        let x = vec![most; DIM];
        cache.append(0, &x, &x).unwrap();
    }
}

#[test]
fn numbers_that_no_cache_has_are_refused_before_memory_is_asked_for() {
    let new = |format, kv, dim, sequences, max_len| {
        let heads = Heads::new(kv, kv, dim);
        let config = CacheConfig::builder(format, heads)
            .centres(false)
            .unit_tensor_scales();
        config.sequences(sequences).max_len(max_len).build()
    };
    let fp8 = KvFormat::same(Scheme::Fp8E4m3);
    // Products that overflow saturate, and are refused.
    assert_eq!(
        new(KvFormat::INT8, 1, 64, 1 << 33, 1 << 38).num_pages,
        usize::MAX
    );
    let spoilt = |spoil: fn(&mut CacheConfig)| {
        let mut config = config(KvFormat::INT8, 4);
        spoil(&mut config);
        config
    };
    for (config, name) in [
        (new(fp8, 1 << 53, 64, 1, 64), "num_kv_heads"),
        (new(KvFormat::INT8, 1, 64, 1, usize::MAX), "num_pages"),
        (spoilt(|c| c.num_sequences = 1 << 40), "num_sequences"),
        (spoilt(|c| c.num_sequences = usize::MAX), "num_sequences"),
        (spoilt(|c| c.num_pages = 1 << 32), "num_pages"),
        (spoilt(|c| c.page_size = 0), "page_size"),
        (
            spoilt(|c| (c.num_kv_heads, c.head_dim.k, c.page_size) = (65536, 256, 128)),
            "the size of a page",
        ),
    ] {
        let errors = [
            config.check().err(),
            HostPages::new(&config).err(),
            config.pool_bytes().err(),
        ];
        for error in errors {
            assert!(
                matches!(&error, Some(Error::Parameter { what, .. }) if *what == name),
                "{name}: {error:?}"
            );
        }
    }
    assert_eq!(spoilt(|c| c.page_size = 0).pages_for(5), 5);
    // The largest pool is asked for, and not had; its table never is.
    let mut config =
        spoilt(|c| (c.num_q_heads, c.num_kv_heads, c.head_dim.k) = (65536, 65536, 256));
    (config.page_size, config.num_pages) = (16, u32::MAX as usize);
    assert!(matches!(
        HostPages::new(&config),
        Err(Error::OutOfMemory { .. })
    ));
}

#[test]
fn a_store_of_other_pages_than_the_configs_is_refused() {
    let mut config = config(KvFormat::INT8, 4);
    config.centres = true;
    type Spoil = fn(&mut CacheConfig);
    let others: [(Spoil, &str); 5] = [
        (|c| c.num_pages = 3, "num_pages"),
        (|c| c.page_size = 32, "page_size"),
        (|c| c.format = KvFormat::INT8_INT4, "format"),
        (|c| c.num_sequences -= 1, "num_sequences"),
        (|c| c.num_sequences += 1, "num_sequences"),
    ];
    for (spoil, name) in others {
        let mut other = config.clone();
        spoil(&mut other);
        refuses_store(&config, &other, name);
    }
}

/// Kills stores that write codes of other scales than attention reads them with.
#[test]
fn a_store_of_other_static_scales_than_the_configs_is_refused() {
    let mut config = config(KvFormat::same(Scheme::Fp8E4m3), 4);
    config.k_tensor_scales = vec![0.5; config.num_kv_heads];
    config.v_tensor_scales = vec![2.0; config.num_kv_heads];
    let mut other = config.clone();
    other.k_tensor_scales[0] = 0.25;
    refuses_store(&config, &other, "k_tensor_scales");
    let mut other = config.clone();
    other.v_tensor_scales[0] = 0.25;
    refuses_store(&config, &other, "v_tensor_scales");
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap();
}

/// Asserts that a store of another description is refused for what differs, behind a [`HostStore`](attn_core::HostStore), too.
fn refuses_store(config: &CacheConfig, other: &CacheConfig, name: &str) {
    let stores: [Box<dyn PageStore>; 2] = [
        Box::new(HostPages::new(other).unwrap()),
        Box::new(FakePages::new(other).unwrap()),
    ];
    for store in stores {
        let error = KvCache::new(config.clone(), store).err();
        assert!(
            matches!(error, Some(Error::StoreMismatch { what, .. }) if what == name),
            "{name}: {error:?}"
        );
    }
}

#[test]
fn appends_of_any_number_of_tokens_are_typed_errors() {
    let mut cache = cache(KvFormat::INT8, 4);
    grow(&mut cache, 0, 5).unwrap();
    let most = (1 << 20) - 5;
    let huge = [
        usize::MAX,
        usize::MAX - 5,
        1 << 63,
        most + 1,
        most,
        4 * 64 - 4,
    ];
    for appends in huge.map(|n| vec![(0, n)]).into_iter().chain([
        vec![(0, usize::MAX), (1, usize::MAX)],
        vec![(0, 1), (1, 65), (2, usize::MAX)],
        vec![(0, most), (1, most), (2, most)],
    ]) {
        let appends = appends
            .into_iter()
            .map(|(sequence, tokens)| Append { sequence, tokens });
        let appends: Vec<_> = appends.collect();
        let error = cache.append_with(&appends, |_, _| Ok(())).unwrap_err();
        let is_named = match error {
            Error::TooLong { .. } => appends.iter().any(|append| append.tokens > most),
            Error::CacheFull {
                free: 3, total: 4, ..
            } => appends.iter().all(|append| append.tokens <= most),
            _ => false,
        };
        assert!(is_named, "{error}");
    }
    let twice = cache.append_with(
        &[
            Append {
                sequence: 1,
                tokens: 1,
            },
            Append {
                sequence: 2,
                tokens: 0,
            },
            Append {
                sequence: 1,
                tokens: 0,
            },
        ],
        |_, _| Ok(()),
    );
    assert!(matches!(twice, Err(Error::Repeated { sequence: 1 })));
    cache
        .append_with(
            &[Append {
                sequence: 0,
                tokens: 4 * 64 - 5,
            }],
            |_, _| Ok(()),
        )
        .unwrap();
    assert_eq!((cache.free_pages(), cache.table().lens[0]), (0, 256));
}

#[test]
fn pages_are_taken_in_the_order_that_was_asked_for() {
    let mut cache = cache(KvFormat::INT8, 5);
    grow(&mut cache, 0, 1).unwrap();
    for bad in [
        &[1, 2, 3][..],
        &[1, 2, 3, 3],
        &[0, 1, 2, 3],
        &[1, 2, 3, 5],
        &[1, 2, 3, 4, 4],
    ] {
        assert!(order_free_pages(&mut cache, bad).is_err(), "{bad:?}");
    }
    order_free_pages(&mut cache, &[3, 1, 4, 2]).unwrap();
    grow(&mut cache, 1, 130).unwrap();
    assert_eq!(cache.table().pages[1], [3, 1, 4]);
    cache.free_sequence(0).unwrap();
    assert_eq!(cache.free_pages(), 2);
}

#[test]
fn pages_are_written_and_restored_whole() {
    let mut cache = cache(KvFormat::same(Scheme::Bf16), 4);
    let bytes = cache.layout().page_bytes();
    for (page, len) in [
        (0, bytes - 1),
        (0, bytes + 1),
        (4, bytes),
        (u32::MAX, bytes),
    ] {
        assert!(
            cache.write_page(page, &vec![0; len]).is_err(),
            "{page}, {len}"
        );
    }
    grow(&mut cache, 0, 70).unwrap();
    let pages = cache.read_back(0).unwrap();
    let (table, free) = (cache.table().clone(), cache.free_pages());
    // Every bf16 that is not finite, or above 2^50, in K's and in V's part, and tokens that are not there.
    let v_at = cache.layout().v_codes().start;
    for bits in [0x7f80u16, 0xff80, 0x7fc0, 0x5881, 0xd881] {
        for at in [0, v_at] {
            let mut damaged = pages.clone();
            damaged[0][at..at + 2].copy_from_slice(&bits.to_le_bytes());
            let error = cache.restore_pages(1, 70, &damaged).unwrap_err();
            assert!(
                matches!(error, Error::BadBytes { what: "code", .. }),
                "{error}"
            );
        }
    }
    for (tokens, count) in [(70, 1), (64, 2), (129, 2), (1 << 20, 2)] {
        let error = cache.restore_pages(1, tokens, &pages[..count]).unwrap_err();
        assert!(matches!(error, Error::Length { .. }), "{error}");
    }
    // Pages of other lengths whose bytes are as many.
    let mut shifted = pages.clone();
    let byte = shifted[0].pop().unwrap();
    shifted[1].push(byte);
    let error = cache.restore_pages(1, 70, &shifted).unwrap_err();
    assert!(
        matches!(error, Error::Length { what: "page", .. }),
        "{error}"
    );
    assert_eq!((cache.table(), cache.free_pages()), (&table, free));
    cache.restore_pages(1, 70, &pages).unwrap();
    assert_eq!(cache.read_back(1).unwrap(), pages);
}

#[test]
fn a_layout_keeps_no_more_tokens_than_a_page_has() {
    let layout = config(KvFormat::INT8, 1).layout().unwrap();
    let mut page = vec![0xff; layout.page_bytes()];
    for tokens in [65, usize::MAX] {
        assert!(layout.canonical(&mut page, tokens, false).is_err());
    }
    layout.canonical(&mut page, 64, false).unwrap();
    assert!(page.iter().all(|b| *b == 0xff));
    layout.canonical(&mut page, 0, false).unwrap();
    assert!(page.iter().all(|b| *b == 0));
}
