//! The shapes that benches name: published figures refer to them, so that none may change under its name.

use attn_core::bench::{Measured, Timing, noise, shapes};

/// One line per shape: what it is, and the bytes that its share of the read is made from.
fn list() -> String {
    let line = |shape: attn_core::bench::Shape| {
        let p = &shape.problem;
        let lens = &p.kv_lens;
        let [least, most] = [lens.iter().min(), lens.iter().max()].map(|len| len.unwrap());
        // Where lengths differ, their order counts, too.
        let order: usize = lens.iter().enumerate().map(|(i, len)| (i + 1) * len).sum();
        format!(
            "{shape} {:?} {:?} heads {}/{} q {} batch {} tokens {least}..={most} order {order} bytes {} cache {} append {}\n",
            shape.work,
            shape.place,
            p.num_q_heads,
            p.num_kv_heads,
            p.q_len,
            p.batch(),
            shape.bytes(),
            shape.cache_bytes(),
            shape.append_bytes(),
        )
    };
    shapes().into_iter().map(line).collect()
}

/// After a change on purpose: `ATTN_WRITE_SHAPES=1 cargo test -p attn-core --test shapes`.
#[test]
fn shapes_are_those_of_the_committed_list() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/shapes.txt");
    if std::env::var_os("ATTN_WRITE_SHAPES").is_some() {
        std::fs::write(path, list()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap();
    for (got, want) in list().lines().zip(committed.lines()) {
        assert_eq!(got, want);
    }
    assert_eq!(list().lines().count(), committed.lines().count());
}

#[test]
fn appends_are_refused_where_every_page_fills() {
    use attn_core::bench::Work;
    let of = |work: Work, lens: &[usize]| {
        let mut shape = shapes().remove(0);
        (shape.work, shape.problem.kv_lens) = (work, lens.to_vec());
        shape.check_growing().is_ok()
    };
    assert!(of(Work::Decode, &[64, 128]));
    assert!(!of(Work::Append, &[64, 128]));
    assert!(!of(Work::AppendDecode, &[64, 128]));
    assert!(of(Work::Append, &[64, 127]));
    assert!(of(Work::AppendDecode, &[65, 128]));
}

#[test]
fn the_median_is_the_middle_one_and_the_minimum_the_least() {
    let timing = Timing::of(vec![9.0, 1.0, 5.0, 2.0, 100.0]);
    assert_eq!((timing.min, timing.median), (1.0, 5.0));
    let timing = Timing::of(vec![4.0, 3.0]);
    assert_eq!((timing.min, timing.median), (3.0, 4.0));
    let timing = Timing::of(vec![7.0]);
    let measured = Measured {
        step: timing,
        ceiling: timing,
    };
    assert_eq!((measured.step.min, measured.ceiling.median), (7.0, 7.0));
}

#[test]
fn noise_is_centred_spread_and_its_seeds_differ() {
    let (a, b) = (noise(1, 10_000), noise(2, 10_000));
    assert_eq!(a, noise(1, 10_000));
    assert_ne!(a, b);
    let mean = a.iter().sum::<f32>() / 10_000.0;
    assert!(mean.abs() < 0.03, "{mean}");
    assert!(a.iter().all(|x| x.abs() < 2.0));
    // The sum of two numbers that are even in −1..1: a variance of two thirds.
    let variance = a.iter().map(|x| x * x).sum::<f32>() / 10_000.0;
    assert!((0.62..0.71).contains(&variance), "{variance}");
}
