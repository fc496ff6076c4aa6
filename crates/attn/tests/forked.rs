//! A process that is forked from one that has opened a device: each call that would need its threads is refused at once.
#![cfg(all(target_os = "linux", feature = "cpu"))]

#[path = "forked/child.rs"]
mod child;

use std::cell::RefCell;

use attn::{
    BackendId, CacheConfig, DecodeStep, Error, Heads, HostRows, HostSteps, KvFormat, KvSource,
    Problem, SequenceImage, SpansStep, Unsupported,
};

/// Enough rows that an append and a step take several threads.
const TOKENS: usize = 600;

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: 64,
};

fn is_told<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unsupported(Unsupported::Forked)))
}

fn host_rows<'a>(q: &'a [f32], out: &'a mut [f32]) -> HostRows<'a> {
    HostRows {
        q: q.into(),
        out: out.into(),
        lse: None,
    }
}

#[test]
fn a_forked_process_is_refused_by_every_call_that_needs_threads() {
    let backend = attn::open(BackendId::Cpu).unwrap();
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .sequences(2)
        .max_len(4096)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let rows = vec![0.5; TOKENS * HEADS.kv * HEADS.dim];
    let q = vec![0.25; TOKENS * HEADS.q * HEADS.dim];
    cache.append(0, &rows, &rows).unwrap();
    let problem = Problem::new(HEADS, [TOKENS]).q_len(TOKENS);
    let plan = backend.plan(&problem, KvFormat::INT8).unwrap();
    let image = cache.image(0).unwrap().into_bytes();
    let mut out = vec![0.0; q.len()];
    let mut steps = HostSteps::default();
    let rows_of_step = host_rows(&q, &mut out);
    steps
        .attend(&*backend, &cache, &[0], &problem, rows_of_step)
        .unwrap();
    // The parent's values, which each claim borrows in the child.
    let (cache, steps, out) = (RefCell::new(cache), RefCell::new(steps), RefCell::new(out));

    child::assert_in_child(&[
        ("a long append is refused", &|| {
            is_told(cache.borrow_mut().append(0, &rows, &rows))
        }),
        ("an append of one token is refused", &|| {
            let row = &rows[..HEADS.kv * HEADS.dim];
            is_told(cache.borrow_mut().append(0, row, row))
        }),
        ("a step with a kept plan is refused", &|| {
            let (cache, mut steps) = (cache.borrow(), steps.borrow_mut());
            let mut out = out.borrow_mut();
            let rows = host_rows(&q, &mut out);
            is_told(steps.attend(&*backend, &cache, &[0], &problem, rows))
        }),
        ("a step of the parent's plan is refused", &|| {
            let (cache, mut out) = (cache.borrow(), out.borrow_mut());
            let kv = KvSource::Cache(&cache);
            is_told(DecodeStep::new(&plan, &q, kv, &mut **out).map(drop))
        }),
        ("a step of shards is refused", &|| {
            let cache = cache.borrow();
            is_told(SpansStep::new(&plan, &q, KvSource::Cache(&cache)).map(drop))
        }),
        ("a plan is refused", &|| {
            is_told(backend.plan(&problem, KvFormat::INT8))
        }),
        ("a new cache is refused", &|| {
            is_told(backend.create_cache(&config))
        }),
        ("an image is refused", &|| is_told(cache.borrow().image(0))),
        ("an image's return is refused", &|| {
            let image = SequenceImage::from_bytes(&image[..]).unwrap();
            is_told(cache.borrow_mut().restore(1, &image))
        }),
        ("more pages are refused", &|| {
            is_told(cache.borrow_mut().add_pages(1))
        }),
        ("the backend is not opened again", &|| {
            matches!(attn::open(BackendId::Cpu), Err(Unsupported::Forked))
        }),
        ("no backend is selected", &|| is_told(attn::select(None))),
        ("nothing was changed", &|| {
            cache.borrow().table().lens == [TOKENS, 0]
        }),
        ("what only reads the table works", &|| {
            cache.borrow_mut().fork(0, 1).is_ok()
        }),
    ]);

    // The parent goes on.
    cache.borrow_mut().append(0, &rows, &rows).unwrap();
    assert_eq!(cache.borrow().table().lens, [2 * TOKENS, 0]);
}
