//! Appends, and steps of several layers.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use attn_conformance::fake::{failure, limited};
use attn_core::{Append, CacheConfig, Error, Heads, KvFormat, Rows};

use crate::calls::*;

pub fn appends() -> Vec<Refusal> {
    let mut cache = filled("int8", 100);
    let mut with = |at: usize, value: f32| {
        let (mut k, v) = (vec![0.5; 3 * ROW], vec![0.5; 3 * ROW]);
        k[at] = value;
        cache.append(0, &k, &v).unwrap_err()
    };
    let numbers = [
        ("K with NaN in token 2", with(2 * ROW + 5, f32::NAN)),
        ("K of 1e31 in int8", with(ROW + 63, 1e31)),
    ];
    let mut layers = config("int8");
    layers.layers = 3;
    let mut layers = cache_of(layers);
    let twice = [Append {
        sequence: 1,
        tokens: 2,
    }; 2];
    let too_long = [Append {
        sequence: 0,
        tokens: (1 << 20) - 99,
    }];
    let wide = vec![0.5; 3 * 2 * ROW];
    let rows = Rows::strided(&wide, [3, 2, DIM], [2 * ROW, DIM]).unwrap();
    let mut all = Vec::from(numbers);
    all.extend([
        (
            "K of 2 heads for a cache of one",
            cache.append(0, rows, rows).unwrap_err(),
        ),
        (
            "V of fewer tokens than K",
            cache.append(0, &wide[..2 * ROW], &wide[..ROW]).unwrap_err(),
        ),
        (
            "more tokens than the pool has room for",
            append(&mut cache, 1, 2000).unwrap_err(),
        ),
        (
            "more tokens than a sequence has",
            cache.append_with(&too_long, |_, _| Ok(())).unwrap_err(),
        ),
        (
            "a device that fails in an append, and again when old residuals are written back",
            failed_twice(),
        ),
        (
            "a sequence beyond the last",
            append(&mut cache, 7, 1).unwrap_err(),
        ),
        (
            "a sequence of 2^64 - 1",
            append(&mut cache, usize::MAX, 1).unwrap_err(),
        ),
        (
            "a sequence named twice",
            cache.append_with(&twice, |_, _| Ok(())).unwrap_err(),
        ),
        (
            "an append to a cache of 3 layers",
            append(&mut layers, 0, 1).unwrap_err(),
        ),
    ]);
    all
}

/// An append to a full pool, whose new pages are old residual pages.
fn failed_twice() -> Error {
    let heads = Heads::new(1, 1, DIM);
    let builder = CacheConfig::builder(KvFormat::INT4, heads);
    let fails = Arc::new(AtomicBool::new(false));
    let has_failed = fails.clone();
    let mut cache = limited(builder.max_len(640).build(), move |_, count| {
        if has_failed.load(Ordering::Relaxed) {
            0
        } else {
            count
        }
    });
    append(&mut cache, 0, 380).unwrap();
    fails.store(true, Ordering::Relaxed);
    let tokens = [Append {
        sequence: 0,
        tokens: 260,
    }];
    let failed = cache.append_with(&tokens, |_, _| Err(failure("writing tokens")));
    failed.unwrap_err()
}

pub fn steps() -> Vec<Refusal> {
    let mut layers = config("int8");
    layers.layers = 2;
    let mut cache = cache_of(layers);
    let (one, row) = (
        [Append {
            sequence: 0,
            tokens: 1,
        }],
        [0.5; ROW],
    );
    let early = cache.write(0, &row, &row).unwrap_err();
    cache.reserve(&one).unwrap();
    cache.write(0, &row, &row).unwrap();
    vec![
        ("a write without a step", early),
        ("a second step", cache.reserve(&one).unwrap_err()),
        (
            "a layer that is written twice",
            cache.write(0, &row, &row).unwrap_err(),
        ),
        (
            "a layer that the cache lacks",
            cache.write(2, &row, &row).unwrap_err(),
        ),
        (
            "attention to a layer that is not written",
            cache
                .layer(1)
                .unwrap()
                .check_queries(&problem(&[1]))
                .unwrap_err(),
        ),
        (
            "a fork of a sequence that grows",
            cache.fork(0, 1).unwrap_err(),
        ),
        (
            "attention that names no layer",
            cache.check_queries(&problem(&[1])).unwrap_err(),
        ),
    ]
}
