//! The ranges of a problem end where their texts say, and a step sees the tokens that its masks leave.

use attn_core::{Error, HEAD_DIMS, Heads, Problem};
use rstest::rstest;

fn problem() -> Problem {
    Problem::new(Heads::new(4, 2, 64), vec![10, 0])
}

fn refused(p: &Problem) -> Option<(&'static str, String)> {
    match p.check() {
        Ok(()) => None,
        Err(Error::Parameter { what, given, .. }) => Some((what, given)),
        Err(other) => panic!("{other}"),
    }
}

/// `len` tokens of one sequence, and so many after them in other shards.
fn shard(len: usize, after: usize) -> Problem {
    let mut p = problem().q_lens([1]).tokens_after([after]);
    p.kv_lens = vec![len];
    p
}

#[test]
fn a_shard_but_the_last_ends_with_a_span() {
    for len in [0, 1024, 2048] {
        shard(len, 5).check_shards().unwrap();
    }
    for len in [1, 64, 960, 1088, 1280, 2047] {
        shard(len, 0).check_shards().unwrap();
        let error = shard(len, 5).check_shards().unwrap_err();
        let found = matches!(&error, Error::Parameter { what: "the length of a shard", given, .. } if *given == len.to_string());
        assert!(found, "{error}");
    }
}

/// Kills a check that takes any number of tokens ahead, or leaves them out of the longest sequence.
#[test]
fn shards_ahead_are_of_whole_spans_and_count_as_tokens_of_the_sequence() {
    let shard = |before: usize| shard(1024, 3072).tokens_before([before]);
    for before in [0, 1024, (1 << 20) - 4096] {
        shard(before).check().unwrap();
        assert_eq!(shard(before).before(0), before);
    }
    for (before, given) in [
        (1, "1"),
        (64, "64"),
        (1025, "1025"),
        ((1 << 20) - 3072, "1045504"),
        (1 << 20, "1048576"),
        (usize::MAX << 10, &(usize::MAX << 10).to_string()),
    ] {
        assert_eq!(
            refused(&shard(before)),
            Some(("tokens_before", given.to_owned()))
        );
    }
    let lists = shard(0).tokens_before([0, 0]).check();
    assert!(matches!(
        lists,
        Err(Error::Length {
            what: "tokens_before",
            given: 2,
            needed: 1
        })
    ));
}

/// A row of the first shard reads its first tile fine wherever it stands, but not one that its window hides, and no row of another shard does.
#[test]
fn rows_that_see_the_first_tile_of_a_sequence_read_it() {
    let whole = Problem::new(problem().heads(), [5000]).q_len(3);
    assert!(whole.reads_first_tile(0));
    for (window, reads) in [(4997, true), (4934, true), (4933, false), (70, false)] {
        assert_eq!(
            whole.clone().window_left(window).reads_first_tile(0),
            reads,
            "{window}"
        );
    }
    assert!(!whole.clone().q_lens([0]).reads_first_tile(0));
    assert!(!whole.clone().tokens_before([1024]).reads_first_tile(0));
    let first = Problem::new(problem().heads(), [1024]).tokens_after([3976]);
    assert!(first.reads_first_tile(0) && !first.window_left(4000).reads_first_tile(0));
}

#[test]
fn shards_are_of_sequences_that_there_may_be() {
    shard(1024, (1 << 20) - 1024).check().unwrap();
    for (after, given) in [
        ((1 << 20) - 1023, "1047553"),
        (1 << 20, "1048576"),
        (usize::MAX, "2^64 - 1"),
    ] {
        let found = refused(&shard(1024, after));
        assert_eq!(found, Some(("tokens_after", given.to_owned())));
    }
}

#[test]
fn a_new_problem_is_causal_decode_of_one_token() {
    let p = problem();
    assert_eq!(
        (p.max_q_len(), p.scores.causal, p.score_scale()),
        (1, true, 0.125)
    );
    assert_eq!((p.scores.softcap, p.scores.window_left), (None, None));
    assert_eq!((p.batch(), p.heads_per_kv(), p.rows()), (2, 2, 8));
    assert_eq!(p.out_elements(), 512);
    assert_eq!(refused(&p), None);
}

#[test]
fn the_head_dims_of_the_list_are_allowed_and_no_other() {
    for head_dim in 0..300 {
        let p = Problem::new(Heads::new(1, 1, head_dim), vec![1]);
        let found = refused(&p).map(|refusal| refusal.0);
        let expected = (!HEAD_DIMS.contains(&head_dim)).then_some("head_dim");
        assert_eq!(found, expected, "{head_dim}");
    }
}

#[rstest]
#[case(1, 1, None)]
#[case(128, 1, None)]
#[case(256, 2, None)]
#[case(129, 1, Some("heads_per_kv"))]
#[case(258, 2, Some("heads_per_kv"))]
#[case(0, 1, Some("num_q_heads/num_kv_heads"))]
#[case(1, 0, Some("num_q_heads/num_kv_heads"))]
#[case(0, 0, Some("num_q_heads/num_kv_heads"))]
#[case(3, 2, Some("num_q_heads/num_kv_heads"))]
#[case(1, 2, Some("num_q_heads/num_kv_heads"))]
#[case(1 << 16, 1 << 16, None)]
#[case((1 << 16) + 1, (1 << 16) + 1, Some("num_kv_heads"))]
fn heads_are_whole_groups_of_at_most_128(
    #[case] q_heads: usize,
    #[case] kv_heads: usize,
    #[case] what: Option<&str>,
) {
    let p = Problem::new(Heads::new(q_heads, kv_heads, 64), vec![1]);
    assert_eq!(refused(&p).map(|refusal| refusal.0), what);
}

#[test]
fn query_tokens_and_lengths_end_where_the_text_says() {
    for (q_len, allowed) in [
        (0, true),
        (1, true),
        (17, true),
        (1 << 20, true),
        ((1 << 20) + 1, false),
    ] {
        let p = problem().q_len(q_len);
        let expected = (!allowed).then(|| ("q_len", q_len.to_string()));
        assert_eq!(refused(&p), expected);
    }
    for (len, allowed) in [(0, true), (1 << 20, true), ((1 << 20) + 1, false)] {
        let p = Problem::new(Heads::new(1, 1, 64), vec![3, len, 4]);
        let expected = (!allowed).then(|| ("kv_len", len.to_string()));
        assert_eq!(refused(&p), expected);
    }
}

#[test]
fn slopes_are_0_or_of_a_normal_magnitude() {
    for (slope, allowed) in [
        (0.0, true),
        (-0.0, true),
        (1e-20, true),
        (-1e-20, true),
        (1.2e-20, true),
        (0.9e-20, false),
        (1e3, true),
        (-1e3, true),
        (1000.1, false),
        (-1500.0, false),
        (f32::INFINITY, false),
    ] {
        let p = problem().alibi_slopes([0.5, 0.25, 1.0, slope]);
        let found = refused(&p).map(|refusal| refusal.0);
        assert_eq!(found, (!allowed).then_some("alibi_slopes"), "{slope}");
    }
}

#[test]
fn sinks_are_finite_up_to_a_million_and_one_for_each_query_head() {
    for (sink, allowed) in [
        (0.0, true),
        (1e-40, true),
        (1e6, true),
        (-1e6, true),
        (1_000_001.0, false),
        (-1_000_001.0, false),
        (f32::NEG_INFINITY, false),
        (f32::INFINITY, false),
        (f32::NAN, false),
    ] {
        let p = problem().sinks([0.5, sink, 1.0, -2.0]);
        let found = refused(&p).map(|refusal| refusal.0);
        assert_eq!(found, (!allowed).then_some("sinks"), "{sink}");
    }
    for given in [0, 3, 5] {
        let error = problem().sinks(vec![0.0; given]).check().unwrap_err();
        assert!(
            matches!(error, Error::Length { what: "sinks", given: n, needed: 4 } if n == given),
            "{error}"
        );
    }
}

#[test]
fn masks_leave_the_tokens_that_the_law_names() {
    // Positions of four query tokens of 10: 6, 7, 8, 9.
    let mut p = Problem::new(Heads::new(1, 1, 64), vec![10, 2]);
    p.q_lens = vec![4; p.batch()];
    let seen = |p: &Problem, b| -> Vec<_> { (0..4).map(|i| p.visible(b, i)).collect() };
    assert_eq!(seen(&p, 0), [0..7, 0..8, 0..9, 0..10]);
    // Two of them stand before a sequence of 2.
    assert_eq!(seen(&p, 1), [0..0, 0..0, 0..1, 0..2]);
    p.scores.window_left = Some(3);
    assert_eq!(seen(&p, 0), [3..7, 4..8, 5..9, 6..10]);
    assert_eq!(seen(&p, 1), [0..0, 0..0, 0..1, 0..2]);
    p.scores.window_left = Some(0);
    assert_eq!(seen(&p, 0), [6..7, 7..8, 8..9, 9..10]);
    p.scores.causal = false;
    assert_eq!(seen(&p, 0), [6..10, 7..10, 8..10, 9..10]);
    p.scores.window_left = None;
    assert_eq!(seen(&p, 0), [0..10, 0..10, 0..10, 0..10]);
    // A window of 2^20 reaches over the longest sequence.
    p = Problem::new(Heads::new(1, 1, 64), vec![1 << 20]);
    p.scores.window_left = Some((1 << 20) - 2);
    assert_eq!(p.visible(0, 0), 1..1 << 20);
    p.scores.window_left = Some((1 << 20) - 1);
    assert_eq!(p.visible(0, 0), 0..1 << 20);
}
