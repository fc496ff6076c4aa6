//! A process that is forked from one that has opened a device: each call that would need its threads is refused at once.
#![cfg(all(target_os = "linux", feature = "cpu"))]

#[path = "forked/child.rs"]
mod child;

use std::{cell::RefCell, sync::Arc};

use attn::{
    Append, Attend, AttendRows, BackendId, CacheConfig, DecodeAttention, DecodeStep, Error,
    HeadDim, Heads, KvFormat, KvSource, Problem, SequenceImage, Session, SpansStep, Unsupported,
};

/// Enough rows that an append and a step take several threads.
const TOKENS: usize = 600;

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};

fn is_told<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unsupported(Unsupported::Forked)))
}

#[test]
fn a_forked_process_is_refused_by_every_call_that_needs_threads() {
    let backend: Arc<dyn DecodeAttention> = attn::open(BackendId::Cpu).unwrap().into();
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .centres(false)
        .sequences(2)
        .max_len(4096)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let rows = vec![0.5; TOKENS * HEADS.kv * HEADS.dim.k];
    let q = vec![0.25; TOKENS * HEADS.q * HEADS.dim.k];
    cache.append(0, &rows, &rows).unwrap();
    let problem = Problem::new(HEADS, [TOKENS]).q_len(TOKENS);
    let plan = backend.plan(&problem, KvFormat::INT8).unwrap();
    let image = cache.image(0).unwrap().into_bytes();
    let mut session = Session::new(backend.clone(), &config).unwrap();
    let all = [Append {
        sequence: 0,
        tokens: TOKENS,
    }];
    session.append(&all, &rows, &rows).unwrap();
    let at = Attend {
        q_lens: Some(&[TOKENS]),
        ..Attend::new(HEADS.q, &[0])
    };
    let mut out = vec![0.0; q.len()];
    session.attend(&at, AttendRows::new(&q, &mut out)).unwrap();
    // The parent's values, which each claim borrows in the child.
    let (cache, session) = (RefCell::new(cache), RefCell::new(session));
    let out = RefCell::new(out);

    child::assert_in_child(&[
        ("a long append is refused", &|| {
            is_told(cache.borrow_mut().append(0, &rows, &rows))
        }),
        ("an append of one token is refused", &|| {
            let row = &rows[..HEADS.kv * HEADS.dim.k];
            is_told(cache.borrow_mut().append(0, row, row))
        }),
        ("a step with a kept plan is refused", &|| {
            let (mut session, mut out) = (session.borrow_mut(), out.borrow_mut());
            is_told(session.attend(&at, AttendRows::new(&q, &mut **out)))
        }),
        ("what a session waits for is not waited for", &|| {
            is_told(session.borrow().wait())
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
