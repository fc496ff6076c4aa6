//! The workloads that benches name: published figures refer to them, so that none may change under its name.

use attn_bench::{
    CacheLayout, ContiguousCache, Measured, Operation, Timing, Workload, noise, workloads,
};
use attn_core::{Heads, KvFormat, KvView, Problem};

/// One line per workload: what it is, and the bytes that its share of the read is made from.
fn list() -> String {
    let line = |workload: Workload| {
        let p = &workload.problem;
        let lens = &p.kv_lens;
        let [least, most] = [lens.iter().min(), lens.iter().max()].map(|len| len.unwrap());
        // Where lengths differ, their order counts, too.
        let order: usize = lens.iter().enumerate().map(|(i, len)| (i + 1) * len).sum();
        let planned = match workload.planned {
            0 => String::new(),
            tokens => format!(" planned {tokens}"),
        };
        format!(
            "{workload} {:?} {:?} heads {}/{} q {} batch {} tokens {least}..={most} order {order} bytes {} cache {} append {}{planned}\n",
            workload.operation,
            workload.cache,
            p.num_q_heads,
            p.num_kv_heads,
            p.max_q_len(),
            p.batch(),
            workload.bytes(),
            workload.cache_bytes(),
            workload.append_bytes(),
        )
    };
    workloads().into_iter().map(line).collect()
}

/// After a change on purpose: `ATTN_WRITE_SHAPES=1 cargo test -p attn-bench --test workloads`.
#[test]
fn shapes_are_those_of_the_committed_list() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workloads.txt");
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
    let of = |work: Operation, lens: &[usize]| {
        let mut workload = workloads().remove(0);
        (workload.operation, workload.problem.kv_lens) = (work, lens.to_vec());
        workload.check_for_caches().is_ok()
    };
    assert!(of(Operation::Decode, &[64, 128]));
    assert!(!of(Operation::Append, &[64, 128]));
    assert!(!of(Operation::AppendDecode, &[64, 128]));
    assert!(of(Operation::Append, &[64, 127]));
    assert!(of(Operation::AppendDecode, &[65, 128]));
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
    // Figures of one run and of the next are of the same numbers.
    assert_eq!(a[..3], [-0.254_007_58, -0.308_336_38, -0.175_948_98]);
    assert_eq!(b[..3], [1.285_649_8, 0.101_764_8, -1.432_108_9]);
    // The sum of two numbers that are even in −1..1: a variance of two thirds.
    let variance = a.iter().map(|x| x * x).sum::<f32>() / 10_000.0;
    assert!((0.62..0.71).contains(&variance), "{variance}");
}

/// Sequences of other lengths than whole pages, in place.
fn contiguous(format: &str, cache: CacheLayout) -> Workload {
    Workload {
        family: "test",
        name: "uneven".to_owned(),
        format: format.parse().unwrap(),
        problem: Problem::new(Heads::new(4, 2, 64), vec![70, 3, 129]),
        page_size: 64,
        cache,
        operation: Operation::Decode,
        planned: 0,
        centres: false,
    }
}

#[test]
fn bytes_of_a_contiguous_cache_are_those_of_its_tokens() {
    for (format, row) in [
        ("f16", 128 + 128),
        ("fp8", 64 + 64),
        ("int8-plain", 66 + 66),
        ("int8-g32", 68 + 68),
        ("int8-g32/bf16", 68 + 128),
        ("int8-tensor/int8-plain", 64 + 66),
    ] {
        for place in [CacheLayout::Bnsh, CacheLayout::Bsnh] {
            let workload = contiguous(format, place);
            assert_eq!(workload.cache_bytes(), (70 + 3 + 129) * 2 * row, "{format}");
        }
        // Pages of 64 tokens are whole.
        let workload = contiguous(format, CacheLayout::Pages);
        assert_eq!(
            workload.cache_bytes(),
            (2 + 1 + 3) * 64 * 2 * row,
            "{format}"
        );
    }
}

#[test]
fn residuals_are_read_in_the_first_tile_and_in_those_of_the_window() {
    for (format, q_len, causal, tokens) in [
        ("int8", 1, true, [0, 0]),
        ("int4-w0", 1, true, [0, 0]),
        // 70 tokens are one tile and a part of another, in two pages of 64; 3 tokens are one page; 257 are five pages, of which the first is read, too.
        ("int4", 1, true, [128 + 64 + 192; 2]),
        ("int4-w4/int8", 1, true, [128 + 64 + 320, 0]),
        ("int8-plain/int4-r2", 1, true, [0, 128 + 64 + 192]),
        // The first of two rows stands in the tile before, at token 255, and reads a tile more.
        ("int4", 2, true, [128 + 64 + 256; 2]),
        ("int4", 2, false, [128 + 64 + 192; 2]),
    ] {
        let mut workload = contiguous(format, CacheLayout::Pages);
        workload.problem.kv_lens = vec![70, 3, 257];
        workload.problem.scores.causal = causal;
        workload.problem.q_lens = vec![q_len; workload.problem.batch()];
        let bytes: usize = tokens.iter().map(|tokens| tokens * 2 * 32).sum();
        assert_eq!(workload.residual_bytes(), bytes, "{format}");
        assert_eq!(workload.bytes(), workload.cache_bytes() + bytes, "{format}");
    }
}

#[test]
fn rows_to_time_lie_as_their_shape_says() {
    for format in [
        "f16",
        "bf16",
        "int8-plain",
        "int8-g32/bf16",
        "bf16/int8-plain",
    ] {
        for place in [CacheLayout::Bnsh, CacheLayout::Bsnh] {
            let workload = contiguous(format, place);
            let format: KvFormat = workload.format;
            let rows = ContiguousCache::new(&workload);
            for view in [rows.view().unwrap(), rows.checked_view().unwrap()] {
                assert_eq!(view.format(), format);
                check_rows(&view, place);
            }
        }
    }
    let none = Workload {
        problem: Problem::new(Heads::new(4, 2, 64), vec![]),
        ..contiguous("int8-plain", CacheLayout::Bnsh)
    };
    let rows = ContiguousCache::new(&none);
    assert!(rows.view().unwrap().k().codes.is_empty());
}

/// Each side has room for the longest of three sequences, and not a byte more.
fn check_rows(view: &KvView<'_>, cache: CacheLayout) {
    let format = view.format();
    for (rows, scheme) in [(view.k(), format.k), (view.v(), format.v)] {
        let row = 64 * scheme.code_bits() / 8;
        let groups = if scheme.has_row_scales() {
            scheme.groups(64).count()
        } else {
            0
        };
        assert_eq!(rows.codes.len(), 3 * 2 * 129 * row);
        assert_eq!(rows.scales.len(), 3 * 2 * 129 * groups);
        let of = |each: usize| match cache {
            CacheLayout::Bsnh => [2 * 129 * each, each, 2 * each],
            _ => [2 * 129 * each, 129 * each, each],
        };
        assert_eq!(rows.code_strides, of(row));
        assert_eq!(rows.scale_strides, of(groups));
        // Small codes, which differ; scales of 1/64.
        assert!(rows.codes.iter().all(|byte| *byte < 64));
        assert_eq!(rows.codes[..5], [0, 31, 1, 32, 2]);
        assert!(rows.scales.iter().all(|bits| *bits == 0x2400));
    }
}

#[test]
fn a_custom_workload_is_named_by_its_numbers_and_has_their_bytes() {
    let mut problem = Problem::new(Heads::new(28, 4, 128), vec![3000; 7]);
    problem.q_lens = vec![2; problem.batch()];
    let workload = Workload::custom(problem.clone(), KvFormat::INT8, 16).unwrap();
    assert_eq!(
        workload.to_string(),
        "custom/28-4-d128-q2-ctx3000-batch7-page16/int8"
    );
    // 188 pages of 16 tokens; a token of a KV head has 2 × 128 codes and two f16 scales.
    assert_eq!(workload.bytes(), 7 * 188 * 16 * 4 * (2 * 128 + 4));
    let error = Workload::custom(problem, KvFormat::INT8, 17).unwrap_err();
    assert!(error.to_string().contains("page_size"), "{error}");
}

#[test]
fn a_custom_workload_is_named_by_its_longest_sequence() {
    let problem = Problem::new(Heads::new(2, 1, 64), vec![7, 300, 20]);
    let workload = Workload::custom(problem, KvFormat::INT8, 64).unwrap();
    assert_eq!(
        workload.to_string(),
        "custom/2-1-d64-q1-ctx300-batch3-page64/int8"
    );
}
