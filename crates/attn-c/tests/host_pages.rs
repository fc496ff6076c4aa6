//! Pages in host memory that the caller owns.

mod common;

use std::ptr;

use attn_c::*;
use attn_conformance::noise::uniform;

use common::*;

const CONFIG: HostPagesConfig = HostPagesConfig {
    struct_size: size_of::<HostPagesConfig>(),
    format: c"int8".as_ptr(),
    kv_heads: HEADS,
    head_dim: DIM,
    v_dim: 0,
    page_size: 16,
};

/// A description of pages, destroyed with it.
struct Pages(*mut HostPages);

impl Pages {
    fn of(config: &HostPagesConfig) -> Self {
        let mut pages = ptr::null_mut();
        // SAFETY: the arguments are this function's own; so below, unless it says otherwise.
        let status = unsafe { attn_host_pages_create(config, &mut pages) };
        assert_eq!(status, Status::Ok, "{}", last_error());
        Pages(pages)
    }

    fn bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { attn_host_pages_page_bytes(self.0) }
    }

    fn append(&self, pool: &mut [u8], slots: &[i64], tokens: &Tokens) -> Status {
        let (at, bytes) = (pool.as_mut_ptr(), pool.len());
        // SAFETY: as above.
        unsafe {
            attn_host_pages_append_slots(self.0, at, bytes, slots.as_ptr(), slots.len(), tokens)
        }
    }

    fn attend(&self, step: &HostStep, rows: &Rows) -> Status {
        // SAFETY: as above.
        unsafe { attn_host_pages_attend(self.0, step, rows) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made by `of`.
        unsafe { attn_host_pages_destroy(self.0) }
    }
}

fn step(pool: &[u8], table: &[i32], kv_lens: &[i32], q_lens: &[usize]) -> HostStep {
    HostStep {
        struct_size: size_of::<HostStep>(),
        q_heads: 2 * HEADS,
        pool: pool.as_ptr(),
        pool_bytes: pool.len(),
        count: kv_lens.len(),
        page_table: table.as_ptr(),
        page_table_stride: table.len() / kv_lens.len(),
        kv_lens: kv_lens.as_ptr(),
        q_lens: q_lens.as_ptr(),
        modifiers: PLAIN,
    }
}

#[test]
fn the_callers_pages_have_the_bits_of_a_cache() {
    let pages = Pages::of(&CONFIG);
    let mut pool = vec![0xff; 9 * pages.bytes()];
    // Sequence 0 has 40 tokens on pages 7, 2, 4, sequence 1 has 5 on page 0; between them a token without a place, of numbers that no cache takes.
    let (table, lens) = ([7, 2, 4, 0, -1, -1], [40, 5]);
    let slot = |b: usize, t: usize| i64::from(table[b * 3 + t / 16]) * 16 + (t % 16) as i64;
    let mut slots: Vec<i64> = (0..40).map(|t| slot(0, t)).collect();
    slots.push(-1);
    slots.extend((0..5).map(|t| slot(1, t)));
    let mut kv = [1, 2].map(|seed| uniform(seed, 0..46 * ROW));
    kv[0][40 * ROW] = f32::NAN;
    let status = pages.append(&mut pool, &slots, &tokens(&kv[0], &kv[1]));
    assert_eq!(status, Status::Ok, "{}", last_error());

    let handles = Handles::of(&CacheConfig {
        centres: 2,
        page_size: 16,
        ..config()
    });
    for (b, at) in [(0, 0..40), (1, 41..46)] {
        let [k, v] = kv.each_ref().map(|x| &x[at.start * ROW..at.end * ROW]);
        assert_eq!(
            handles.append(&[one(b, at.len())], &tokens(k, v)),
            Status::Ok
        );
    }
    let q = uniform(3, 0..2 * 2 * ROW);
    let (mut found, mut wanted) = (vec![0.0; q.len()], vec![1.0; q.len()]);
    let (mut lse, mut wanted_lse) = ([0.0; 4 * HEADS], [1.0; 4 * HEADS]);
    let (mut ours, mut theirs) = (rows(&q, &mut found), rows(&q, &mut wanted));
    (ours.lse, theirs.lse) = (lse.as_mut_ptr(), wanted_lse.as_mut_ptr());
    let of_two = step(&pool, &table, &lens, &[1, 1]);
    assert_eq!(pages.attend(&of_two, &ours), Status::Ok, "{}", last_error());
    assert_eq!(handles.attend(&[0, 1], PLAIN, &theirs), Status::Ok);
    assert_eq!((&found, lse), (&wanted, wanted_lse));

    // Two tokens of the first sequence, outputs in the queries' memory.
    let mut in_place = q.clone();
    let at = in_place.as_mut_ptr();
    let mut of_one = step(&pool, &table[..3], &lens[..1], &[2]);
    let mut same = rows(&q, &mut found);
    (same.q, same.out) = (at.cast_const().cast(), at.cast());
    assert_eq!(pages.attend(&of_one, &same), Status::Ok, "{}", last_error());
    let apart = rows(&q, &mut found);
    assert_eq!(pages.attend(&of_one, &apart), Status::Ok);
    assert_eq!(in_place, found);
    of_one.modifiers.window = 8;
    assert_eq!(pages.attend(&of_one, &apart), Status::Ok);
    assert_ne!(in_place, found);
}

#[test]
fn what_pages_do_not_hold_is_refused_and_changes_nothing() {
    let pages = Pages::of(&CONFIG);
    let mut pool = vec![7; 2 * pages.bytes()];
    let before = pool.clone();
    let [k, v] = [1, 2].map(|seed| uniform(seed, 0..2 * ROW));
    let mut nan = k.clone();
    nan[ROW] = f32::NAN;
    let status = pages.append(&mut pool, &[0, 1], &tokens(&nan, &v));
    refused(status, Status::Number, "k is NaN at token 1");
    let status = pages.append(&mut pool, &[0, 32], &tokens(&k, &v));
    refused(status, Status::Parameter, "slot");
    let mut new = tokens(&k, &v);
    new.k = ptr::null();
    refused(
        pages.append(&mut pool, &[0], &new),
        Status::Parameter,
        "k is NULL",
    );
    assert_eq!(pool, before);

    let (q, mut out) = (uniform(3, 0..2 * ROW), vec![5.0; 2 * ROW]);
    let rows = rows(&q, &mut out);
    for (table, lens, status, sentence) in [
        ([2], [1], Status::Parameter, "page"),
        ([-1], [1], Status::Parameter, "page"),
        ([0], [17], Status::Shape, "pages of a sequence"),
        ([0], [-1], Status::Parameter, "negative"),
    ] {
        refused(
            pages.attend(&step(&pool, &table, &lens, &[1]), &rows),
            status,
            sentence,
        );
    }
    assert_eq!(out, vec![5.0; 2 * ROW]);

    for (config, sentence) in [
        (
            HostPagesConfig {
                format: c"int4".as_ptr(),
                ..CONFIG
            },
            "int4",
        ),
        (
            HostPagesConfig {
                page_size: 7,
                ..CONFIG
            },
            "page_size",
        ),
        (
            HostPagesConfig {
                kv_heads: 0,
                ..CONFIG
            },
            "heads",
        ),
        (
            HostPagesConfig {
                struct_size: 3,
                ..CONFIG
            },
            "sizeof(attn_host_pages_config)",
        ),
    ] {
        let mut made = ptr::null_mut();
        // SAFETY: the arguments are this function's own.
        let status = unsafe { attn_host_pages_create(&config, &mut made) };
        assert!(made.is_null());
        refused(status, Status::Parameter, sentence);
    }
}
