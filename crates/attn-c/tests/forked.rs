//! A process that is forked from one that has opened a device: each call on its handles is refused at once.
#![cfg(target_os = "linux")]

#[path = "../../attn/tests/forked/child.rs"]
mod child;
mod common;

use std::ptr;

use attn_c::*;

use common::*;

fn is_told(status: Status) -> bool {
    status == Status::Unsupported && last_error().contains("this process was forked from one")
}

#[test]
fn a_forked_process_is_refused_by_every_call_on_a_cache() {
    const TOKENS: usize = 600;
    let handles = Handles::of(&CacheConfig {
        max_tokens: 4096,
        ..config()
    });
    let (k, q) = (vec![0.5; TOKENS * ROW], vec![0.5; 2 * ROW]);
    let new = tokens(&k, &k);
    assert_eq!(handles.append(&[one(0, TOKENS)], &new), Status::Ok);
    let attend = || handles.attend(&[0], PLAIN, &rows(&q, &mut vec![0.0; 2 * ROW]));
    assert_eq!(attend(), Status::Ok);

    child::assert_in_child(&[
        ("an append is refused", &|| {
            is_told(handles.append(&[one(0, TOKENS)], &new))
        }),
        ("a step is refused", &|| is_told(attend())),
        // A thread of the parent's may have held the handle's lock.
        ("a question is refused", &|| {
            let mut tokens = 0;
            // SAFETY: the arguments are this function's own.
            is_told(unsafe { attn_cache_tokens(handles.cache, 0, &mut tokens) })
        }),
        ("a device is refused", &|| {
            let mut device = ptr::null_mut();
            // SAFETY: as above.
            is_told(unsafe { attn_device_open(c"cpu".as_ptr(), &mut device) })
        }),
    ]);

    assert_eq!(handles.append(&[one(0, TOKENS)], &new), Status::Ok);
    assert_eq!(handles.len(0), 2 * TOKENS);
}
