//! What C callers may get wrong: each is refused with a status and a sentence, and changes nothing.

mod common;

use std::{
    ffi::{CStr, c_char, c_void},
    ptr,
};

use attn_c::*;
use attn_conformance::noise::uniform;

use common::*;

#[test]
fn null_is_refused_by_name() {
    let (mut cache, mut device) = (ptr::null_mut(), ptr::null_mut());
    let handles = Handles::new();
    // SAFETY: NULL is allowed by all of these, which refuse it or do nothing.
    unsafe {
        let status = attn_cache_create(ptr::null(), &config(), &mut cache);
        refused(status, Status::Parameter, "device is NULL");
        let status = attn_cache_create(handles.device, ptr::null(), &mut cache);
        refused(status, Status::Parameter, "attn_cache_config is NULL");
        let status = attn_cache_create(handles.device, &config(), ptr::null_mut());
        refused(status, Status::Parameter, "cache is NULL");
        let status = attn_device_open(c"cpu".as_ptr(), ptr::null_mut());
        refused(status, Status::Parameter, "device is NULL");
        let status = attn_cache_fork(ptr::null_mut(), 0, 1);
        refused(status, Status::Parameter, "cache is NULL");
        let status = attn_device_open(c"gpu".as_ptr(), &mut device);
        refused(status, Status::Parameter, "device is \"gpu\"; allowed: cpu");
        attn_cache_destroy(ptr::null_mut());
        attn_device_close(ptr::null_mut());
        attn_plan_destroy(ptr::null_mut());
        assert!(attn_device_name(ptr::null()).is_null());
    }
    assert!(cache.is_null() && device.is_null());
    let mut new = tokens(&[0.5; ROW], &[0.5; ROW]);
    new.k = ptr::without_provenance(0x1002);
    refused(
        handles.append(&[one(0, 1)], &new),
        Status::Parameter,
        "k is 0x1002; it must be a multiple of 4 bytes",
    );
    new.k = ptr::null();
    let status = handles.append(&[one(0, 1)], &new);
    refused(status, Status::Parameter, "k is NULL");
}

#[test]
fn structs_of_another_version_are_refused() {
    let handles = Handles::new();
    let mut cache = ptr::null_mut();
    let old = CacheConfig {
        struct_size: 8,
        ..config()
    };
    // SAFETY: a config may be of any size, which it says.
    let status = unsafe { attn_cache_create(handles.device, &old, &mut cache) };
    refused(
        status,
        Status::Parameter,
        "attn_cache_config.struct_size is 8; set it to sizeof(attn_cache_config), which is ",
    );
    assert_eq!(attn_abi_version(), ATTN_ABI_VERSION);
}

#[test]
fn descriptions_that_no_cache_has_are_refused() {
    let handles = Handles::new();
    let create = |change: &dyn Fn(&mut CacheConfig)| {
        let (mut config, mut cache) = (config(), ptr::null_mut());
        change(&mut config);
        // SAFETY: the arguments are this function's own.
        let status = unsafe { attn_cache_create(handles.device, &config, &mut cache) };
        assert!(cache.is_null());
        status
    };
    let text = |text: &'static CStr| text.as_ptr().cast::<c_char>();
    let status = create(&|config| config.format = text(c"int3"));
    refused(status, Status::Parameter, "int3");
    let status = create(&|config| config.format = text(c"int8\xff"));
    refused(status, Status::Parameter, "which is not UTF-8");
    let status = create(&|config| config.head_dim = 65);
    refused(status, Status::Parameter, "head_dim is 65; allowed: ");
    let status = create(&|config| config.pages = usize::MAX);
    refused(status, Status::Parameter, "num_pages is ");
    let status = create(&|config| config.q_heads = 141 * HEADS);
    refused(
        status,
        Status::Parameter,
        "heads_per_kv is 141; allowed: 1 to 128",
    );
    let status = create(&|config| config.centres = 3);
    refused(status, Status::Parameter, "centres is 3; allowed: 0, 1, 2");
    let status = create(&|config| (config.centres, config.format) = (1, text(c"bf16")));
    refused(
        status,
        Status::Parameter,
        "centres of K is those of a cache of bf16",
    );
    let status = create(&|config| config.checkpoints = 100);
    refused(status, Status::Parameter, "checkpoints is 100; allowed: ");
    let status = create(&|config| config.kv_heads = usize::MAX);
    refused(status, Status::Parameter, "num_kv_heads is ");
}

#[test]
fn rows_that_do_not_fit_are_refused_and_change_nothing() {
    let handles = Handles::new();
    let (k, v) = ([0.5; 3 * ROW], [2.0; 3 * ROW]);
    let mut new = tokens(&k, &v);
    assert_eq!(handles.append(&[one(1, 3)], &new), Status::Ok);
    refused(
        handles.append(&[one(2, 1)], &new),
        Status::Sequence,
        "sequence 2 does not exist; the cache has 2",
    );
    refused(
        handles.append(&[one(0, 1), one(0, 1)], &new),
        Status::Parameter,
        "0",
    );
    refused(
        handles.append(&[one(0, usize::MAX)], &new),
        Status::Shape,
        "is more than memory can hold",
    );
    new.dtype = 3;
    refused(
        handles.append(&[one(0, 1)], &new),
        Status::Parameter,
        "dtype is 3; allowed: ATTN_DTYPE_F32",
    );
    new.dtype = 0;
    new.k_token_stride = ROW - 1;
    refused(
        handles.append(&[one(0, 1)], &new),
        Status::Shape,
        "k_token_stride is 127; a token has 128 elements",
    );
    let mut bad = k;
    bad[5] = f32::NAN;
    refused(
        handles.append(&[one(0, 1)], &tokens(&bad, &v)),
        Status::Number,
        "k is NaN at token 0, head 0, dim 5",
    );
    let many = [0.5; 129 * ROW];
    let status = handles.append(&[one(0, 129), one(1, 0)], &tokens(&many, &many));
    assert_eq!(status, Status::Ok);
    refused(
        handles.append(&[one(1, 126)], &tokens(&many, &many)),
        Status::CacheFull,
        "the cache needs 2 more pages, but 0 of 4 are free",
    );
    assert_eq!([handles.len(0), handles.len(1)], [129, 3]);
}

#[test]
fn steps_that_do_not_fit_are_refused_and_write_nothing() {
    let handles = Handles::new();
    let (k, v) = ([0.5; 3 * ROW], [2.0; 3 * ROW]);
    assert_eq!(handles.append(&[one(1, 3)], &tokens(&k, &v)), Status::Ok);
    let (q, mut out) = ([1.0; 2 * ROW], [7.0; 2 * ROW]);
    let of = rows(&q, &mut out);
    refused(
        handles.attend(&[5], PLAIN, &of),
        Status::Sequence,
        "sequence 5",
    );
    let wrong = Modifiers { flags: 12, ..PLAIN };
    refused(
        handles.attend(&[1], wrong, &of),
        Status::Parameter,
        "flags is 0xc; allowed: 0, ATTN_NOT_CAUSAL, ATTN_FAST",
    );
    let wrong = Modifiers {
        softcap: -1.0,
        ..PLAIN
    };
    refused(
        handles.attend(&[1], wrong, &of),
        Status::Parameter,
        "softcap is -1",
    );
    let small = Rows {
        out: ptr::null_mut(),
        ..of
    };
    refused(
        handles.attend(&[1], PLAIN, &small),
        Status::Parameter,
        "out is NULL",
    );
    assert_eq!(out, [7.0; 2 * ROW]);
    assert_eq!(handles.attend(&[1], PLAIN, &rows(&q, &mut out)), Status::Ok);
    assert!(out.iter().all(|x| (x - 2.0).abs() < 0.02), "{out:?}");
}

#[test]
fn tokens_with_gaps_are_those_without() {
    let handles = Handles::new();
    let dense = uniform(1, 0..5 * ROW);
    let stride = ROW + 24;
    let mut wide = vec![f32::NAN; 4 * stride + ROW];
    for (t, row) in dense.chunks(ROW).enumerate() {
        wide[t * stride..][..ROW].copy_from_slice(row);
    }
    let mut gaps = tokens(&wide, &dense);
    gaps.k_token_stride = stride;
    assert_eq!(
        handles.append(&[one(0, 5)], &gaps),
        Status::Ok,
        "{}",
        last_error()
    );
    assert_eq!(
        handles.append(&[one(1, 5)], &tokens(&dense, &dense)),
        Status::Ok
    );
    let saved = [0, 1].map(|sequence| {
        let mut needed = 0;
        // SAFETY: the arguments are this function's own, and the second time of the size that was asked for.
        unsafe {
            let status = attn_cache_save(handles.cache, sequence, ptr::null_mut(), 0, &mut needed);
            assert_eq!(status, Status::Ok);
            let mut bytes = vec![0u8; needed];
            let place = bytes.as_mut_ptr().cast::<c_void>();
            let status = attn_cache_save(handles.cache, sequence, place, needed, &mut needed);
            assert_eq!(status, Status::Ok);
            bytes
        }
    });
    assert!(!saved[0].is_empty());
    assert_eq!(saved[0], saved[1]);
}

#[test]
fn saved_bytes_of_another_size_or_damaged_are_refused() {
    let handles = Handles::new();
    let (k, v) = ([0.5; ROW], [2.0; ROW]);
    assert_eq!(handles.append(&[one(0, 1)], &tokens(&k, &v)), Status::Ok);
    let (mut bytes, mut needed) = ([0u8; 7], 0);
    // SAFETY: the arguments are this function's own, and the second time of the size that was asked for.
    unsafe {
        let place = bytes.as_mut_ptr().cast::<c_void>();
        let status = attn_cache_save(handles.cache, 0, place, 7, &mut needed);
        refused(status, Status::Shape, "size is 7, but sequence 0 takes ");
        assert!(needed > 7);
        let status = attn_cache_restore(handles.cache, 1, place, 7);
        refused(status, Status::Parameter, "attn-seq");
        assert_eq!(bytes, [0; 7]);

        let mut bytes = vec![0u8; needed];
        let place = bytes.as_mut_ptr().cast::<c_void>();
        let status = attn_cache_save(handles.cache, 0, place, needed, &mut needed);
        assert_eq!(status, Status::Ok);
        bytes[needed - 1] ^= 1;
        let status = attn_cache_restore(handles.cache, 1, place, needed);
        refused(status, Status::Parameter, "checksum");
        assert_eq!(handles.len(1), 0);
        bytes[needed - 1] ^= 1;
        let status = attn_cache_restore(handles.cache, 1, place, needed);
        assert_eq!(status, Status::Ok);
    }
    assert_eq!(handles.len(1), 1);
}

#[test]
fn a_plan_needs_a_gpu() {
    let handles = Handles::new();
    let config = PlanConfig {
        struct_size: size_of::<PlanConfig>(),
        format: c"int8".as_ptr(),
        q_heads: 4,
        kv_heads: 2,
        head_dim: 64,
        v_dim: 0,
        page_size: 0,
        count: 1,
        q_lens: ptr::null(),
        max_tokens: 64,
        modifiers: PLAIN,
        rotary: 1,
        ragged: 1,
        rows: 0,
        spans: 0,
    };
    let mut plan = ptr::null_mut();
    let of_rows = PlanConfig { rows: 1, ..config };
    let of_shards = PlanConfig {
        spans: 1,
        ragged: 0,
        ..config
    };
    // SAFETY: the arguments are this function's own; the device refuses before it reads an address.
    unsafe {
        let status = attn_plan_create(handles.device, &config, &mut plan);
        refused(status, Status::Device, "cpu");
        let status = attn_plan_create(handles.device, &of_rows, &mut plan);
        refused(status, Status::Device, "cpu");
        let status = attn_plan_create(handles.device, &of_shards, &mut plan);
        refused(status, Status::Device, "cpu");
        for wrong in [(1, 0), (0, 1)].map(|(ragged, rows)| PlanConfig {
            ragged,
            rows,
            ..of_shards
        }) {
            let status = attn_plan_create(handles.device, &wrong, &mut plan);
            refused(status, Status::Parameter, "attn_plan_config.spans is set");
        }
        let none = ptr::null_mut();
        let status = attn_plan_attend_spans(
            none,
            ptr::null(),
            ptr::null(),
            ptr::null(),
            ptr::null(),
            none.cast(),
        );
        refused(status, Status::Parameter, "plan is NULL");
        let status =
            attn_plan_attend_rows(none, ptr::null(), ptr::null(), ptr::null(), none.cast());
        refused(status, Status::Parameter, "plan is NULL");
        let mut new = tokens(&[], &[]);
        let status = attn_cache_append_on(handles.cache, ptr::null(), 0, &new, ptr::null_mut());
        refused(status, Status::Device, "cpu");
        // Caches take K after RoPE; the struct is not read.
        new.rotary = ptr::dangling();
        let status = attn_cache_append_on(handles.cache, ptr::null(), 0, &new, ptr::null_mut());
        refused(status, Status::Parameter, "attn_tokens.rotary");
        let status = attn_cache_append(handles.cache, ptr::null(), 0, &new);
        refused(status, Status::Parameter, "attn_tokens.rotary");
        let status =
            attn_plan_list_query_blocks(plan, ptr::null(), ptr::null_mut(), ptr::null_mut());
        refused(status, Status::Parameter, "plan");
    }
    assert!(plan.is_null());
}

#[test]
fn transfers_need_a_gpu_and_a_format() {
    let handles = Handles::new();
    let mut config = TransferConfig {
        struct_size: size_of::<TransferConfig>(),
        format: c"int8".as_ptr(),
        kv_heads: 2,
        head_dim: 64,
        v_dim: 0,
        page_size: 0,
        max_q_len: 0,
    };
    let mut transfer = ptr::null_mut();
    // SAFETY: the arguments are this function's own; handles are NULL or open.
    unsafe {
        let status = attn_transfer_create(handles.device, &config, &mut transfer);
        refused(status, Status::Device, "cpu");
        config.head_dim = 65;
        let status = attn_transfer_create(handles.device, &config, &mut transfer);
        refused(status, Status::Parameter, "65");
        config.struct_size -= 1;
        let status = attn_transfer_create(handles.device, &config, &mut transfer);
        refused(
            status,
            Status::Parameter,
            "attn_transfer_config.struct_size",
        );
        let none = ptr::null_mut();
        let status = attn_transfer_export(none, ptr::null(), ptr::null(), none.cast());
        refused(status, Status::Parameter, "transfer is NULL");
        let status = attn_transfer_pages(none, ptr::null(), none.cast());
        refused(status, Status::Parameter, "transfer is NULL");
        let status = attn_transfer_merge_spans(none, ptr::null(), none.cast());
        refused(status, Status::Parameter, "transfer is NULL");
        let status = attn_transfer_merge(none, ptr::null(), none.cast());
        refused(status, Status::Parameter, "transfer is NULL");
        attn_transfer_destroy(none);
    }
    assert!(transfer.is_null());
}

#[test]
fn statuses_have_names() {
    let name = |status: u32| {
        // SAFETY: names are text without end.
        let name = unsafe { CStr::from_ptr(attn_status_name(status)) };
        name.to_str().expect("names are ASCII")
    };
    assert_eq!(name(Status::Ok as u32), "OK");
    assert_eq!(name(Status::CacheFull as u32), "CACHE_FULL");
    assert_eq!(name(Status::Internal as u32), "INTERNAL");
    assert_eq!(name(10), "UNKNOWN");
}

/// Rows `[tokens][heads][DIM]` at strides, with `gap` between them.
fn spread(x: &[f32], heads: usize, [token, head]: [usize; 2], gap: f32) -> Vec<f32> {
    let tokens = x.len() / (heads * DIM);
    let mut all = vec![gap; (tokens - 1) * token + (heads - 1) * head + DIM];
    for (i, row) in x.chunks_exact(DIM).enumerate() {
        let at = i / heads * token + i % heads * head;
        all[at..at + DIM].copy_from_slice(row);
    }
    all
}

#[test]
fn rows_at_strides_are_those_without() {
    let handles = Handles::new();
    let kv = uniform(1, 0..5 * ROW);
    // Heads before tokens for K, heads apart for V.
    let (far_k, far_v) = (
        spread(&kv, HEADS, [DIM, 5 * DIM], f32::NAN),
        spread(&kv, HEADS, [HEADS * (DIM + 8), DIM + 8], f32::NAN),
    );
    let mut far = tokens(&far_k, &far_v);
    (far.k_token_stride, far.k_head_stride) = (DIM, 5 * DIM);
    // The tokens' stride follows from the heads'.
    far.v_head_stride = DIM + 8;
    let said = |status| assert_eq!(status, Status::Ok, "{}", last_error());
    said(handles.append(&[one(0, 5)], &far));
    said(handles.append(&[one(1, 5)], &tokens(&kv, &kv)));
    let heads = 2 * HEADS;
    let q = uniform(2, 0..2 * heads * DIM);
    let mut want = vec![0.0; q.len()];
    said(handles.attend(&[0, 1], PLAIN, &rows(&q, &mut want)));
    assert_eq!(want[..heads * DIM].len(), want[heads * DIM..].len());
    // Both sequences hold the same tokens.
    let mut swapped = vec![0.0; q.len()];
    said(handles.attend(&[1, 0], PLAIN, &rows(&q, &mut swapped)));
    assert_eq!(swapped, want);

    let (in_q, in_out) = ([DIM + 1, 2 * (DIM + 1)], [heads * (DIM + 3), DIM + 3]);
    let far_q = spread(&q, heads, in_q, f32::NAN);
    let expected = spread(&want, heads, in_out, 7.0);
    let mut out = vec![7.0; expected.len()];
    let mut of = rows(&far_q, &mut out);
    [of.q_token_stride, of.q_head_stride] = in_q;
    of.out_head_stride = DIM + 3;
    said(handles.attend(&[0, 1], PLAIN, &of));
    assert_eq!(out, expected);

    // Outputs between the queries of one array.
    let both = [2 * heads * DIM, DIM];
    let mut fused = spread(&q, heads, both, 7.0);
    fused.resize(4 * heads * DIM, 7.0);
    let expected: Vec<f32> = q
        .chunks(heads * DIM)
        .zip(want.chunks(heads * DIM))
        .flat_map(|(q, out)| [q, out].concat())
        .collect();
    let start = fused.as_mut_ptr();
    let mut of = rows(&q, &mut []);
    // SAFETY: inside of `fused`.
    (of.q, of.out) = (start.cast(), unsafe { start.add(heads * DIM) }.cast());
    (of.q_token_stride, of.out_token_stride) = (both[0], both[0]);
    said(handles.attend(&[0, 1], PLAIN, &of));
    assert_eq!(fused, expected);
    // And in place of the queries.
    let mut own = q.clone();
    let start = own.as_mut_ptr();
    let mut of = rows(&q, &mut []);
    (of.q, of.out) = (start.cast(), start.cast());
    said(handles.attend(&[0, 1], PLAIN, &of));
    assert_eq!(own, want);
}

#[test]
fn strides_that_do_not_fit_are_refused_and_write_nothing() {
    let handles = Handles::new();
    let kv = [0.5; 3 * ROW];
    let mut new = tokens(&kv, &kv);
    new.v_head_stride = DIM - 1;
    refused(
        handles.append(&[one(0, 1)], &new),
        Status::Shape,
        "v_head_stride is 63; a head has 64 elements",
    );
    new.v_head_stride = usize::MAX;
    refused(
        handles.append(&[one(0, 1)], &new),
        Status::Shape,
        "more than memory can hold",
    );
    assert_eq!(handles.len(0), 0);
    assert_eq!(handles.append(&[one(0, 3)], &tokens(&kv, &kv)), Status::Ok);
    let (q, mut out) = ([1.0; 4 * ROW], [7.0; 4 * ROW]);
    let of = rows(&q, &mut out);
    for (change, sentence) in [
        (
            (|of: &mut Rows| of.q_token_stride = 2 * ROW - 1) as fn(&mut Rows),
            "q_token_stride is 255; a token has 256 elements",
        ),
        (
            |of: &mut Rows| of.out_head_stride = DIM - 1,
            "out_head_stride is 63; a head has 64 elements",
        ),
    ] {
        let mut wrong = of;
        change(&mut wrong);
        refused(
            handles.attend(&[0, 0], PLAIN, &wrong),
            Status::Shape,
            sentence,
        );
    }
    // Rows that would write each other's elements.
    let mut wrong = of;
    (wrong.out_token_stride, wrong.out_head_stride) = (DIM, DIM + 32);
    refused(
        handles.attend(&[0, 0], PLAIN, &wrong),
        Status::Parameter,
        "do not overlap",
    );
    assert_eq!(out, [7.0; 4 * ROW]);
}

#[test]
fn the_guide_names_this_version_of_the_interface() {
    let guide = include_str!("../../../docs/c.md");
    for name in [
        format!("`ATTN_{ATTN_ABI_VERSION}'"),
        format!("libattn.so.{ATTN_ABI_VERSION}`"),
        format!("{ATTN_ABI_VERSION} is `ATTN_ABI_VERSION`"),
    ] {
        assert!(guide.contains(&name), "docs/c.md lacks {name}");
    }
}
