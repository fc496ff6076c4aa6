//! Caches of several layers, and tokens that no window sees any more.

mod common;

use std::ptr;

use attn_c::*;
use attn_conformance::noise::uniform;

use common::*;

/// Numbers as rows have them, another for each seed.
fn values(count: usize, seed: usize) -> Vec<f32> {
    uniform(seed as u64, 0..count)
}

fn of_layers(layers: usize) -> Handles {
    Handles::of(&CacheConfig { layers, ..config() })
}

fn reserve(handles: &Handles, appends: &[Append]) -> Status {
    // SAFETY: the arguments are this function's own; so below.
    unsafe { attn_cache_reserve(handles.cache, appends.as_ptr(), appends.len()) }
}

fn write(handles: &Handles, layer: usize, tokens: &Tokens) -> Status {
    // SAFETY: as above.
    unsafe { attn_cache_write(handles.cache, layer, tokens) }
}

fn cancel(handles: &Handles) -> Status {
    // SAFETY: as above.
    unsafe { attn_cache_cancel_step(handles.cache) }
}

fn drop_before(handles: &Handles, sequence: usize, token: usize) -> Status {
    // SAFETY: as above.
    unsafe { attn_cache_drop_before(handles.cache, sequence, token) }
}

fn stats(handles: &Handles) -> CacheStats {
    let mut stats = CacheStats {
        page_bytes: 0,
        pages: 0,
        free_pages: 0,
        saturated: ATTN_NOT_COUNTED,
        key_outliers: -1.0,
        checkpoint_bytes: 1,
    };
    // SAFETY: as above.
    let status = unsafe { attn_cache_get_stats(handles.cache, &mut stats) };
    said(status);
    stats
}

#[track_caller]
fn said(status: Status) {
    assert_eq!(status, Status::Ok, "{}", last_error());
}

#[test]
fn a_step_written_layer_by_layer_has_the_results_of_a_cache_for_each_layer() {
    let shared = of_layers(3);
    let own: Vec<_> = (0..3).map(|_| Handles::new()).collect();
    let q = values(4 * ROW, 99);
    for (step, appends) in [[one(1, 70), one(0, 3)], [one(0, 1), one(1, 1)]]
        .iter()
        .enumerate()
    {
        said(reserve(&shared, appends));
        let count: usize = appends.iter().map(|append| append.tokens).sum();
        // In any order.
        for layer in [2, 0, 1] {
            let [k, v] = [0, 1].map(|part| values(count * ROW, 10 * step + 2 * layer + part));
            said(write(&shared, layer, &tokens(&k, &v)));
            said(own[layer].append(appends, &tokens(&k, &v)));
            let (mut a, mut b) = (vec![0.0; q.len()], vec![1.0; q.len()]);
            said(shared.attend_layer(layer, &[1, 0], PLAIN, &rows(&q, &mut a)));
            said(own[layer].attend(&[1, 0], PLAIN, &rows(&q, &mut b)));
            assert_eq!(a, b, "layer {layer}");
        }
    }
    assert_eq!([shared.len(0), shared.len(1)], [4, 71]);
    assert_eq!(stats(&shared).free_pages, stats(&own[0]).free_pages);
}

#[test]
fn what_does_not_go_with_the_open_step_is_refused_and_changes_nothing() {
    let handles = of_layers(2);
    let (k, v) = (values(3 * ROW, 1), values(3 * ROW, 2));
    let new = tokens(&k, &v);
    let status = handles.append(&[one(0, 3)], &new);
    refused(status, Status::Parameter, "`reserve` the step's tokens");
    refused(
        write(&handles, 0, &tokens(&[], &[])),
        Status::Shape,
        "no step is open; reserve its tokens first",
    );
    refused(
        reserve(&handles, &[one(2, 1)]),
        Status::Sequence,
        "sequence 2 does not exist",
    );
    refused(
        reserve(&handles, &[one(0, 1000)]),
        Status::CacheFull,
        "more pages",
    );
    said(reserve(&handles, &[one(0, 3)]));
    assert_eq!(handles.len(0), 3);
    refused(
        reserve(&handles, &[one(1, 1)]),
        Status::Shape,
        "a step of 3 tokens is open; write its other layers, or cancel it",
    );
    refused(write(&handles, 2, &new), Status::Parameter, "layer 2");
    let mut bad = k.clone();
    bad[7] = f32::INFINITY;
    refused(
        write(&handles, 0, &tokens(&bad, &v)),
        Status::Number,
        "k is inf at token 0, head 0, dim 7",
    );
    let (q, mut out) = (values(2 * ROW, 3), [7.0; 2 * ROW]);
    refused(
        handles.attend_layer(0, &[0], PLAIN, &rows(&q, &mut out)),
        Status::Shape,
        "layer 0 lacks the tokens of the open step",
    );
    said(write(&handles, 0, &new));
    refused(
        write(&handles, 0, &new),
        Status::Shape,
        "the open step has written layer 0",
    );
    refused(
        handles.attend_layer(2, &[0], PLAIN, &rows(&q, &mut out)),
        Status::Parameter,
        "layer 2",
    );
    // SAFETY: the arguments are this function's own.
    let status = unsafe { attn_cache_truncate(handles.cache, 0, 1) };
    refused(status, Status::Shape, "an open step has the newest");
    refused(
        drop_before(&handles, 0, 0),
        Status::Shape,
        "an open step has the newest",
    );
    assert_eq!(out, [7.0; 2 * ROW]);
    said(cancel(&handles));
    said(cancel(&handles));
    assert_eq!(handles.len(0), 0);
    assert_eq!(stats(&handles).free_pages, stats(&handles).pages);
    // SAFETY: NULL is refused by name.
    let status = unsafe { attn_cache_cancel_step(ptr::null_mut()) };
    refused(status, Status::Parameter, "cache is NULL");
    let mut cache = ptr::null_mut();
    let wrong = CacheConfig {
        layers: usize::MAX,
        ..config()
    };
    // SAFETY: the arguments are this function's own.
    let status = unsafe { attn_cache_create(handles.device, &wrong, &mut cache) };
    refused(status, Status::Parameter, "layers is ");
    assert!(cache.is_null());
}

#[test]
fn scales_are_those_of_each_layer() {
    let fp8 = |layers, scales: &[f32]| {
        Handles::of(&CacheConfig {
            format: c"fp8".as_ptr(),
            k_scales: scales.as_ptr(),
            v_scales: scales.as_ptr(),
            layers,
            ..config()
        })
    };
    let scales = [0.5, 0.25, 0.125, 2.0];
    let shared = fp8(2, &scales);
    let (k, v, q) = (values(ROW, 1), values(ROW, 2), values(2 * ROW, 3));
    said(reserve(&shared, &[one(0, 1)]));
    for (layer, own) in scales.chunks(HEADS).enumerate() {
        let alone = fp8(0, own);
        said(alone.append(&[one(0, 1)], &tokens(&k, &v)));
        said(write(&shared, layer, &tokens(&k, &v)));
        let (mut a, mut b) = (vec![0.0; q.len()], vec![1.0; q.len()]);
        said(shared.attend_layer(layer, &[0], PLAIN, &rows(&q, &mut a)));
        said(alone.attend(&[0], PLAIN, &rows(&q, &mut b)));
        assert_eq!(a, b, "layer {layer}");
    }
}

#[test]
fn numbers_beyond_the_range_of_static_scales_are_counted() {
    let scales = [0.001, 1.0];
    let handles = Handles::of(&CacheConfig {
        format: c"fp8".as_ptr(),
        k_scales: scales.as_ptr(),
        v_scales: scales.as_ptr(),
        ..config()
    });
    assert_eq!(stats(&handles).saturated, 0);
    // Of both heads' numbers those of the first are beyond 0.464.
    let x = vec![0.5; ROW];
    said(handles.append(&[one(0, 1)], &tokens(&x, &x)));
    assert_eq!(stats(&handles).saturated, ROW as u64);
}

#[test]
fn static_formats_ask_for_their_scales() {
    let ones = [1.0; HEADS];
    let handles = Handles::new();
    for (format, k, missing) in [
        (c"fp8", ptr::null(), "k_scales is missing: fp8 stores"),
        (c"fp8", ones.as_ptr(), "v_scales is missing: fp8 stores"),
        (
            c"int8/int8-tensor",
            ptr::null(),
            "v_scales is missing: int8-tensor stores",
        ),
    ] {
        let without = CacheConfig {
            format: format.as_ptr(),
            k_scales: k,
            ..config()
        };
        let mut cache = ptr::null_mut();
        // SAFETY: the arguments are this function's own.
        let status = unsafe { attn_cache_create(handles.device, &without, &mut cache) };
        refused(status, Status::Parameter, missing);
        assert!(cache.is_null());
    }
}

/// A cache whose first sequence has 300 tokens.
fn with_300_tokens() -> Handles {
    let wide = CacheConfig {
        max_tokens: 512,
        ..config()
    };
    let handles = Handles::of(&wide);
    let (k, v) = (values(300 * ROW, 1), values(300 * ROW, 2));
    said(handles.append(&[one(0, 300)], &tokens(&k, &v)));
    handles
}

#[test]
fn a_stream_drops_its_middle() {
    let handles = with_300_tokens();
    let mut dropped = 7;
    // SAFETY: the cache is alive, and the number is this function's own.
    let drop = |first, end, dropped: *mut usize| unsafe {
        attn_cache_drop_range(handles.cache, 0, first, end, dropped)
    };
    refused(
        drop(0, 128, &mut dropped),
        Status::Parameter,
        "the first token to drop is 0",
    );
    assert_eq!((dropped, handles.len(0)), (7, 300));
    said(drop(64, 200, &mut dropped));
    assert_eq!((dropped, handles.len(0)), (128, 172));
    said(drop(64, 128, ptr::null_mut()));
    assert_eq!(handles.len(0), 108);
}

#[test]
fn a_window_keeps_its_bits_when_the_tokens_before_it_are_dropped() {
    let handles = with_300_tokens();
    let q = values(2 * ROW, 3);
    let window = Modifiers {
        window: 100,
        chunk: 0,
        ..PLAIN
    };
    let (mut before, mut after) = (vec![0.0; q.len()], vec![1.0; q.len()]);
    said(handles.attend(&[0], window, &rows(&q, &mut before)));
    let free = stats(&handles).free_pages;
    refused(
        drop_before(&handles, 0, 301),
        Status::Parameter,
        "is 301, but sequence 0 has 300 tokens; pass at most 300",
    );
    refused(drop_before(&handles, 2, 0), Status::Sequence, "sequence 2");
    assert_eq!(stats(&handles).free_pages, free);
    // Tokens 0 to 199 are behind the next query's window, in three whole tiles.
    said(drop_before(&handles, 0, 300 - 100 + 1));
    assert_eq!(stats(&handles).free_pages, free + 3);
    assert_eq!(handles.len(0), 300);
    said(handles.attend(&[0], window, &rows(&q, &mut after)));
    assert_eq!(before, after);
    let mut untouched = [7.0; 2 * ROW];
    refused(
        handles.attend(&[0], PLAIN, &rows(&q, &mut untouched)),
        Status::Shape,
        "192",
    );
    assert_eq!(untouched, [7.0; 2 * ROW]);
    let mut needed = 0;
    // SAFETY: the arguments are this function's own.
    let status = unsafe { attn_cache_save(handles.cache, 0, ptr::null_mut(), 0, &mut needed) };
    refused(status, Status::Shape, "192");
}

/// Kills an option that does not reach the cache, and a number that is not its longest prefix.
#[test]
fn a_sequence_goes_back_to_a_checkpoint() {
    for (checkpoints, longest, pages) in [(0, 64, 0), (256, 256, 2)] {
        let handles = Handles::of(&CacheConfig {
            format: c"int4".as_ptr(),
            max_tokens: 700,
            checkpoints,
            ..config()
        });
        let row = vec![0.5; 700 * ROW];
        let appended = handles.append(&[one(0, 700)], &tokens(&row, &row));
        said(appended);
        let of = stats(&handles);
        assert_eq!(of.checkpoint_bytes, pages * of.page_bytes);
        let mut found = 0;
        // SAFETY: the arguments are this function's own.
        let status = unsafe { attn_cache_longest_prefix(handles.cache, 0, 300, &mut found) };
        said(status);
        assert_eq!(found, longest);
        // SAFETY: as above.
        let truncate = |tokens| unsafe { attn_cache_truncate(handles.cache, 0, tokens) };
        let sentence = format!("can be truncated to {longest} or to ");
        refused(truncate(300), Status::Shape, &sentence);
        said(truncate(longest));
        assert_eq!(handles.len(0), longest);
        // SAFETY: NULL is refused by name.
        let status = unsafe { attn_cache_longest_prefix(handles.cache, 0, 3, ptr::null_mut()) };
        refused(status, Status::Parameter, "longest is NULL");
    }
}

/// The C caller's `v` is NULL then; V of whole rows is K. Kills reads of V, and results over other values.
#[test]
fn latents_are_appended_as_k_alone() {
    let of = |format: &'static std::ffi::CStr| {
        Handles::of(&CacheConfig {
            format: format.as_ptr(),
            centres: 2,
            ..config()
        })
    };
    let (latents, both) = (of(c"int8-latents"), of(c"int8"));
    let (k, q) = (values(70 * ROW, 1), values(2 * ROW, 2));
    let mut new = tokens(&k, &k);
    said(both.append(&[one(0, 70)], &new));
    new.v = ptr::null();
    said(latents.append(&[one(0, 70)], &new));
    let [mut once, mut twice] = [vec![0.0; 2 * ROW], vec![0.0; 2 * ROW]];
    said(latents.attend(&[0], PLAIN, &rows(&q, &mut once)));
    said(both.attend(&[0], PLAIN, &rows(&q, &mut twice)));
    assert_eq!(once, twice);
    assert_eq!(2 * stats(&latents).page_bytes, stats(&both).page_bytes);
}

/// Kills counts of sequences in place of KV heads, and selected pages that are read as all.
#[test]
fn selected_pages_are_those_of_each_kv_head() {
    let handles = Handles::of(&CacheConfig {
        centres: 2,
        ..config()
    });
    let (k, q) = (values(100 * ROW, 1), values(2 * ROW, 2));
    said(handles.append(&[one(1, 100)], &tokens(&k, &k)));
    let attend = |pages: *const u32, page_counts: *const usize, out: &mut [f32]| {
        let step = Step {
            struct_size: size_of::<Step>(),
            q_heads: 2 * HEADS,
            count: 1,
            sequences: &1,
            q_lens: ptr::null(),
            modifiers: PLAIN,
            layer: 0,
            pages,
            page_counts,
        };
        handles.attend_step(&step, &rows(&q, out))
    };
    let [mut all, mut both, mut some] = [(); 3].map(|()| vec![0.0; 2 * ROW]);
    said(attend(ptr::null(), ptr::null(), &mut all));
    said(attend([0, 1, 0, 1].as_ptr(), [2, 2].as_ptr(), &mut both));
    assert_eq!(both, all);
    // Of two pages of 64 tokens KV head 1 has the second alone.
    said(attend([0, 1, 1].as_ptr(), [2, 1].as_ptr(), &mut some));
    assert_eq!(some[..ROW], all[..ROW]);
    assert_ne!(some[ROW..], all[ROW..]);
    let mut kept = some.clone();
    let status = attend([0, 2, 1].as_ptr(), [2, 1].as_ptr(), &mut kept);
    refused(status, Status::Parameter, "which has 2");
    let status = attend([0].as_ptr(), ptr::null(), &mut kept);
    refused(status, Status::Parameter, "page_counts is NULL");
    assert_eq!(kept, some);
}
