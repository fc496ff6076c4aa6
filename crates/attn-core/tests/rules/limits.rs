//! What is refused before any row is looked at: appends without room, of sequences that are not there or would be too long, and sizes whose products
//! exceed 64 bits.

use std::{sync::mpsc, thread, time::Duration};

use attn_core::{
    Append, CacheConfig, Error, Heads, HostPages, KvCache, KvFormat, KvSource, Plan, Problem, Rows,
    SpanStates, SpansStep, WideRows, problem::MAX_TOKENS,
};
use half::{bf16, f16};
use rstest::rstest;

const DIM: usize = 64;

fn cache(format: KvFormat, kv: usize, pages: usize) -> KvCache {
    let heads = Heads::new(kv, kv, DIM);
    let config = CacheConfig::builder(format, heads)
        .centres(false)
        .unit_tensor_scales()
        .sequences(2)
        .pages(pages)
        .build();
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// What `run` gives. It ends at once, or takes hours: a minute tells them apart on any machine.
fn soon<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(run()));
    let result = result.recv_timeout(Duration::from_secs(60));
    result.expect("the call looks at rows that it refuses")
}

/// Rows without end: each lies on the slice's first ones.
fn endless<'a, T>(x: &'a [T], shape: [usize; 4]) -> Rows<'a>
where
    attn_core::Elements<'a>: From<&'a [T]>,
{
    Rows::strided_batch(x, shape, [0, DIM, DIM]).unwrap()
}

/// Tokens of 17 KV heads, in sequences of 17, of which there are 2^32 + 1.
const FAR_TOO_MANY: [usize; 4] = [(1 << 32) + 1, 17, 17, DIM];

/// As many tokens as a sequence may have, of 2^12 heads.
const NO_ROOM: [usize; 4] = [1 << 16, 16, 1 << 12, DIM];

macro_rules! appends_of {
    ($element:ty) => {
        soon(|| {
            let x = vec![<$element>::default(); 33 * DIM + NO_ROOM[2] * DIM];
            let mut cache = cache(KvFormat::INT8, FAR_TOO_MANY[2], 1);
            let rows = endless(&x[..], FAR_TOO_MANY);
            let error = cache.append(0, rows, rows).unwrap_err();
            assert!(
                matches!(error, Error::TooLong { sequence: 0, .. }),
                "{error}"
            );
            assert!(matches!(
                cache.append(2, rows, rows),
                Err(Error::Sequence { .. })
            ));
            let tokens = FAR_TOO_MANY[0] * FAR_TOO_MANY[1];
            let twice = [
                Append {
                    sequence: 1,
                    tokens,
                },
                Append {
                    sequence: 1,
                    tokens: 0,
                },
            ];
            assert!(cache.append_batch(&twice, rows, rows).is_err());
            cache.reserve(&[]).unwrap();
            assert!(matches!(
                cache.append(0, rows, rows),
                Err(Error::Step { .. })
            ));

            let mut cache = self::cache(KvFormat::INT8, NO_ROOM[2], 1);
            let rows = endless(&x[..], NO_ROOM);
            let full = |error| {
                matches!(
                    error,
                    Err(Error::CacheFull {
                        needed: 16384,
                        free: 1,
                        ..
                    })
                )
            };
            assert!(full(cache.append(0, rows, rows)));
            let half = Append {
                sequence: 0,
                tokens: MAX_TOKENS / 2,
            };
            let batch = [
                half,
                Append {
                    sequence: 1,
                    ..half
                },
            ];
            assert!(full(cache.append_batch(&batch, rows, rows)));
            assert_eq!(
                (cache.table().lens.as_slice(), cache.free_pages()),
                (&[0, 0][..], 1)
            );
            // The rows that an open step writes are as many as it has room for.
            cache
                .reserve(&[Append {
                    sequence: 0,
                    tokens: 3,
                }])
                .unwrap();
            assert!(matches!(
                cache.write(0, rows, rows),
                Err(Error::Shape { .. })
            ));
        })
    };
}

#[test]
fn an_append_that_is_refused_looks_at_no_row() {
    appends_of!(f32);
    appends_of!(f16);
    appends_of!(bf16);
}

#[test]
fn a_shard_that_is_refused_looks_at_no_query() {
    soon(|| {
        let heads = Heads::new(4096, 64, DIM);
        let mut cache = cache(KvFormat::INT8, 64, 16);
        let append = [Append {
            sequence: 0,
            tokens: 1000,
        }];
        cache.append_with(&append, |_, _| Ok(())).unwrap();
        let problem = Problem::new(heads, [1000]).q_len(1 << 19).tokens_after([5]);
        let plan = Plan::new("test", &problem, KvFormat::INT8, ()).unwrap();
        let x = vec![0.0; (1 << 19) * DIM + 4096 * DIM];
        let q = Rows::strided(&x, [1 << 19, 4096, DIM], [DIM, DIM]).unwrap();
        let chosen = cache.sequences(&[0]).unwrap();
        let step = SpansStep::new(&plan, q, KvSource::Sequences(&chosen));
        let error = step.err().expect("a shard that ends inside a span");
        let found = matches!(
            error,
            Error::Parameter {
                what: "the length of a shard",
                ..
            }
        );
        assert!(found, "{error}");
    });
}

/// A cache whose sequence 0 has `len` tokens, of which all but the last few are dropped.
fn long(len: usize) -> KvCache {
    let mut cache = cache(KvFormat::INT8, 1, 70);
    while cache.table().lens[0] < len {
        let tokens = (len - cache.table().lens[0]).min(4096);
        let append = [Append {
            sequence: 0,
            tokens,
        }];
        cache.append_with(&append, |_, _| Ok(())).unwrap();
        cache.drop_before(0, cache.table().lens[0] - 100).unwrap();
    }
    cache
}

#[rstest]
#[case(MAX_TOKENS, 1)]
#[case(MAX_TOKENS - 3, 4)]
#[case(MAX_TOKENS - 3, usize::MAX)]
fn a_sequence_ends_at_the_most_tokens_of_a_problem(#[case] len: usize, #[case] more: usize) {
    let mut cache = long(len);
    let before = (cache.table().clone(), cache.free_pages());
    let append = Append {
        sequence: 0,
        tokens: more,
    };
    let other = Append {
        sequence: 1,
        tokens: 1,
    };
    let row = [0.5; 4 * DIM];
    let given = more.min(4) * DIM;
    let mut found = vec![
        cache.pages_needed(&[other, append]).map(|_| ()),
        cache.append_with(&[append], |_, _| Ok(())),
        cache.reserve(&[other, append]),
    ];
    if more < 5 {
        found.push(cache.append(0, &row[..given], &row[..given]));
        found.push(cache.append_batch(&[append], &row[..given], &row[..given]));
    }
    for error in found {
        let error = error.unwrap_err();
        let all = len.saturating_add(more);
        let is_named = matches!(error, Error::TooLong { sequence: 0, tokens, limit: MAX_TOKENS } if tokens == all);
        let text = error.to_string();
        assert!(
            is_named && text.contains("1048576") && text.contains("free the sequence"),
            "{text}"
        );
    }
    assert_eq!((cache.table().clone(), cache.free_pages()), before);
    assert!(cache.open_step().is_none());
    // As many as there may be are taken, and can be attended.
    let rest = [Append {
        sequence: 0,
        tokens: MAX_TOKENS - len,
    }];
    cache.append_with(&rest, |_, _| Ok(())).unwrap();
    Problem::new(Heads::new(1, 1, DIM), [cache.table().lens[0]])
        .check()
        .unwrap();
}

#[test]
fn pages_are_restored_only_where_there_is_room() {
    let mut cache = cache(KvFormat::INT8, 1, 3);
    let size = cache.layout().page_bytes();
    let error = cache.restore_pages(0, MAX_TOKENS + 1, &[]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TooLong {
                sequence: 0,
                tokens: 1_048_577,
                ..
            }
        ),
        "{error}"
    );
    // Room comes before values: these are no quantizer's.
    let bad = vec![vec![0xff; size]; 4];
    let error = cache.restore_pages(0, 200, &bad).unwrap_err();
    assert!(
        matches!(
            error,
            Error::CacheFull {
                needed: 4,
                free: 3,
                ..
            }
        ),
        "{error}"
    );
    let error = cache.restore_pages(0, 150, &bad[..3]).unwrap_err();
    assert!(matches!(error, Error::BadBytes { .. }), "{error}");
}

#[test]
fn sizes_whose_products_wrap_are_refused_though_there_is_no_row() {
    const HUGE: usize = 1 << 60;
    let x = [0.0f32; 64];
    for shape in [
        [0, HUGE, 64],
        [HUGE, 0, 64],
        [1 << 32, 1 << 32, 0],
        [0, usize::MAX, 2],
    ] {
        for error in [
            Rows::strided(&x, shape, [0, 0]).err(),
            WideRows::new(&[], shape).err(),
        ] {
            let text = error.expect("sizes that no slice has").to_string();
            assert!(text.contains("less than 2^64"), "{text}");
        }
    }
    // Of sizes that fit, no row is none.
    let none = Rows::strided(&x, [0, 1 << 32, 64], [0, 0]).unwrap();
    assert!(none.to_wide().unwrap().is_empty());
    assert_eq!(
        WideRows::new(&[], [0, 1 << 32, 64]).unwrap().contiguous(),
        Some(&[][..])
    );

    for (rows, dim) in [(1 << 63, 128), (1 << 63, 0), (1 << 58, 64), (usize::MAX, 1)] {
        let error = SpanStates::new(rows, dim, vec![], vec![]).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{error}");
    }
    let none = SpanStates::new(1 << 57, 64, vec![], vec![]).unwrap();
    assert_eq!((none.spans(), none.rows()), (0, 1 << 57));
    let unchecked = Problem::new(Heads::new(1 << 40, 1, DIM), [0; 4]).q_len(usize::MAX);
    assert!(SpanStates::unseen(&unchecked).is_err());
    let ranges: Vec<_> = unchecked.query_ranges().collect();
    assert_eq!(ranges[3], usize::MAX..usize::MAX);
    assert_eq!(KvFormat::INT8.first_residual_token(usize::MAX), usize::MAX);
}

#[test]
#[should_panic(expected = "span 1 of 1")]
fn a_state_of_a_span_that_is_not_there_is_not_set() {
    let problem = Problem::new(Heads::new(2, 1, DIM), [5]);
    let mut states = SpanStates::unseen(&problem).unwrap();
    states.set(1, 0, [0.0, 1.0], &[0.0; DIM]);
}
