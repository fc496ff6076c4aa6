//! Steps that are refused, taken back or failed by the device: what was there before them is there again.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use attn_conformance::fake::{Call, limited};
use attn_core::{CacheConfig, Error, KvCache, KvSource, PageTable};
use rstest::rstest;

use super::{
    LAYERS, appends, attends, begin, books, cache, cache_of, config, is_step, step, values,
};

/// Whatever was written of it, and however long it is.
#[rstest]
fn any_step_is_taken_back(
    #[values("int8", "int4", "int8/int4", "bf16")] format: &str,
    #[values(0, 1, LAYERS - 1)] written: usize,
) {
    let mut cache = cache(format);
    step(&mut cache, &[[0, 75], [1, 130]]).unwrap();
    cache.fork(0, 2).unwrap();
    // Longer than `max_q_len`, in a shared open page, into an empty sequence, of no tokens.
    for of in [
        &[[1, 300], [0, 300]][..],
        &[[0, 1], [2, 1]],
        &[[3, 1], [2, 100]],
        &[[1, 0], [0, 40]],
        &[],
    ] {
        let before = books(&cache);
        begin(&mut cache, of, written).unwrap();
        assert_eq!(cache.open_step(), Some(&appends(of)[..]));
        let lens = &cache.table().lens;
        let grown = of.iter().all(|[s, n]| lens[*s] == before.0.lens[*s] + n);
        assert!(grown, "{lens:?}");
        cache.cancel_step().unwrap();
        assert_eq!(cache.open_step(), None);
        assert!(books(&cache) == before, "{of:?}");
    }
    // What comes next has the bytes of a run that was never interrupted.
    let mut straight = super::cache(format);
    step(&mut straight, &[[0, 75], [1, 130]]).unwrap();
    straight.fork(0, 2).unwrap();
    for cache in [&mut cache, &mut straight] {
        step(cache, &[[0, 2], [1, 60], [2, 1]]).unwrap();
    }
    assert!(books(&cache) == books(&straight));
}

#[rstest]
fn a_full_pool_gives_old_residuals_back(
    #[values("int4", "int8/int4")] format: &str,
    #[values(1, LAYERS - 1)] written: usize,
) {
    let mut recycled = 0;
    let of = [[0, 32], [1, 32]];
    for pages in 12..24 {
        let mut cache = cache_of(config(format, LAYERS, 64, pages));
        loop {
            let before = books(&cache);
            match begin(&mut cache, &of, written) {
                Ok(()) => {}
                Err(Error::CacheFull { .. }) => {
                    assert!(books(&cache) == before);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
            let took = |table: &PageTable| table.pages[0].len() + table.pages[1].len();
            // A page's residual page comes with it.
            let new = took(cache.table()) - took(&before.0);
            recycled += usize::from(before.1 < 2 * new);
            cache.cancel_step().unwrap();
            assert!(books(&cache) == before, "{:?}", before.0.lens);
            step(&mut cache, &of).unwrap();
        }
    }
    assert!(recycled > 0, "no step took an old residual page");
}

#[test]
fn a_step_that_is_refused_changes_nothing() {
    let mut cache = cache_of(config("int4", LAYERS, 32, 12));
    step(&mut cache, &[[0, 40], [1, 33]]).unwrap();
    let before = books(&cache);
    let refused = [
        (appends(&[[0, 1], [1, 4000]]), "more pages"),
        (appends(&[[0, 1], [0, 1]]), "twice"),
        (appends(&[[0, 1], [4, 1]]), "sequence 4"),
        (appends(&[[0, 1 << 19], [1, 1 << 19]]), "more pages"),
        (appends(&[[0, 1], [1, usize::MAX]]), "sequence 1 would have"),
    ];
    for (appends, names) in &refused {
        let error = cache.reserve(appends).unwrap_err().to_string();
        assert!(error.contains(names), "{error}");
        assert_eq!(cache.open_step(), None);
        assert!(books(&cache) == before);
    }
    // Pages are counted once for all layers.
    let mut one = cache_of(config("int4", 1, 32, 12));
    step(&mut one, &[[0, 40], [1, 33]]).unwrap();
    let more = appends(&[[0, 100], [1, 32]]);
    let needed = cache.pages_needed(&more).unwrap();
    assert_eq!(needed, one.pages_needed(&more).unwrap());
    assert_eq!((cache.free_pages(), one.free_pages()), (before.1, before.1));
}

/// A cache of which one call fails, after so many others: of appends, of page writes.
fn failing(config: CacheConfig) -> (KvCache, [Arc<AtomicUsize>; 2]) {
    let left = [(); 2].map(|()| Arc::new(AtomicUsize::new(usize::MAX)));
    let of_calls = left.clone();
    let cache = limited(config, move |call, count| {
        let left = &of_calls[usize::from(call == Call::Pages)];
        match left.fetch_sub(1, Ordering::Relaxed) {
            0 => 0,
            _ => count,
        }
    });
    (cache, left)
}

fn is_device<T>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::Device { .. })));
}

#[test]
fn a_layer_that_the_device_fails_is_written_again_or_the_step_taken_back() {
    let (mut cache, [appended, copied]) = failing(config("int4", LAYERS, 32, 64));
    step(&mut cache, &[[0, 70]]).unwrap();
    cache.fork(0, 1).unwrap();
    let before = books(&cache);
    // A copy of the shared open page or of its residual page fails in any of the layers.
    for left in 0..2 * LAYERS {
        copied.store(left, Ordering::Relaxed);
        is_device(begin(&mut cache, &[[2, 5], [1, 1]], 0));
        copied.store(usize::MAX, Ordering::Relaxed);
        assert_eq!(cache.open_step(), None);
        assert!(books(&cache) == before, "{left}");
    }
    copied.store(2 * LAYERS, Ordering::Relaxed);
    appended.store(1, Ordering::Relaxed);
    is_device(begin(&mut cache, &[[1, 1]], LAYERS));
    assert_eq!(
        (cache.table().lens[1], cache.open_step().is_some()),
        (71, true)
    );
    is_step(
        attends(KvSource::Layer(cache.layer(1).unwrap())),
        "layer 1 lacks",
    );
    appended.store(usize::MAX, Ordering::Relaxed);
    for layer in 1..LAYERS {
        let [k, v] = [1, 101].map(|seed| values(layer, seed, 70, 71));
        cache.write(layer, &k, &v).unwrap();
    }
    cache.truncate(1, 70).unwrap();
    copied.store(usize::MAX, Ordering::Relaxed);
    assert!(
        cache.read_back(1).unwrap() == before.2[1] && cache.read_back(0).unwrap() == before.2[0]
    );
}

#[test]
fn a_copy_onto_an_old_residual_page_that_fails_gives_the_residuals_back() {
    // Sequence 2 keeps residuals of many query tokens, which its next token drops; 0 and 1 share an open page.
    let filled = |pages| {
        let mut config = config("int4", LAYERS, 32, pages);
        config.max_q_len = 256;
        let (mut cache, [_, copied]) = failing(config);
        step(&mut cache, &[[2, 364]]).unwrap();
        step(&mut cache, &[[0, 40]]).unwrap();
        cache.fork(0, 1).unwrap();
        (cache, copied)
    };
    let used = 64 - filled(64).0.free_pages();
    // The oldest residuals are read again once newer tokens are taken back.
    let residuals = |cache: &mut KvCache| {
        cache.truncate(2, 100).unwrap();
        cache.read_back(2).unwrap()
    };
    let want = residuals(&mut filled(used).0);
    for left in 0..2 * LAYERS {
        let (mut cache, copied) = filled(used);
        assert_eq!(cache.free_pages(), 0);
        let before = books(&cache);
        copied.store(left, Ordering::Relaxed);
        is_device(begin(&mut cache, &[[2, 1], [1, 1]], 0));
        assert!(
            books(&cache) == before && residuals(&mut cache) == want,
            "{left}"
        );
    }
    let (mut cache, _) = filled(used);
    step(&mut cache, &[[2, 1], [1, 1]]).unwrap();
    assert_eq!(cache.table().lens[..3], [40, 41, 365]);
}

#[test]
fn a_step_stays_open_while_old_residuals_cannot_be_written_back() {
    let (mut cache, [_, written]) = failing(config("int4", LAYERS, 64, 11));
    // Up to the step that takes an old residual page.
    let before = loop {
        let before = books(&cache);
        begin(&mut cache, &[[0, 32]], 1).unwrap();
        written.store(1, Ordering::Relaxed);
        if cache.cancel_step().is_err() {
            break before;
        }
        written.store(usize::MAX, Ordering::Relaxed);
        step(&mut cache, &[[0, 32]]).unwrap();
    };
    assert_eq!(cache.table().lens[0], before.0.lens[0] + 32);
    assert!(cache.open_step().is_some());
    written.store(usize::MAX, Ordering::Relaxed);
    cache.cancel_step().unwrap();
    assert!(books(&cache) == before);
}
