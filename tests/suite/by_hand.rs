//! The f64 oracle, compared with attention that is worked out by hand.

use attn_conformance::{
    Case,
    oracle::{self, Queries},
};
use attn_core::{Heads, Problem};
use attn_cpu::Reference;

/// Outputs and log-sum-exps over four tokens of one head whose V is 1, 2, 4, 8 in every dim, and whose scores are all 0.
fn over_equal_scores(problem: &Problem) -> Vec<(f64, f64)> {
    let dim = problem.head_dim.k;
    let k = vec![1.0; 4 * dim];
    let v: Vec<f32> = [1.0, 2.0, 4.0, 8.0]
        .iter()
        .flat_map(|x| vec![*x; dim])
        .collect();
    let q = vec![0.0; problem.query_tokens() * dim];
    let (out, lse) = oracle::attend_rows(problem, &q, &k, &v);
    assert!(out.chunks(dim).all(|row| row.iter().all(|x| *x == row[0])));
    out.into_iter().step_by(dim).zip(lse).collect()
}

fn near(got: &[(f64, f64)], want: &[(f64, f64)]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        let same = |a: f64, b: f64| a == b || (a - b).abs() < 1e-6;
        assert!(
            same(got.0, want.0) && same(got.1, want.1),
            "{got:?}, not {want:?}"
        );
    }
}

#[test]
fn the_oracle_masks_what_lies_behind_or_before_the_window() {
    let mut problem = Problem::new(Heads::new(1, 1, 64), vec![4]);
    problem.q_lens = vec![2; problem.batch()];
    // The queries are those of tokens 2 and 3.
    let (two, three, four) = (2f64.ln(), 3f64.ln(), 4f64.ln());
    near(
        &over_equal_scores(&problem),
        &[(7.0 / 3.0, three), (15.0 / 4.0, four)],
    );
    problem.scores.window_left = Some(1);
    near(&over_equal_scores(&problem), &[(3.0, two), (6.0, two)]);
    problem.scores.window_left = Some(0);
    near(&over_equal_scores(&problem), &[(4.0, 0.0), (8.0, 0.0)]);
    problem.scores.causal = false;
    problem.scores.window_left = Some(1);
    near(
        &over_equal_scores(&problem),
        &[(14.0 / 3.0, three), (6.0, two)],
    );
}

#[test]
fn the_oracles_slopes_weigh_tokens_by_their_distance() {
    let mut problem = Problem::new(Heads::new(1, 1, 64), vec![4]);
    // Each token counts half of the next one.
    problem.scores.alibi_slopes = Some(vec![std::f32::consts::LN_2]);
    let want = (1.0 / 8.0 + 2.0 / 4.0 + 4.0 / 2.0 + 8.0) / 1.875;
    near(&over_equal_scores(&problem), &[(want, 1.875f64.ln())]);
}

#[test]
fn the_oracles_sinks_weigh_as_tokens_without_a_value() {
    let mut problem = Problem::new(Heads::new(1, 1, 64), vec![4]);
    // Four tokens of weight 1, and a sink of weight 4; the first query sees the sink alone.
    problem.scores.sinks = Some(vec![4f32.ln()]);
    problem.q_lens = vec![5; problem.batch()];
    let rows = over_equal_scores(&problem);
    near(&rows[..1], &[(0.0, 4f64.ln())]);
    near(&rows[4..], &[(15.0 / 8.0, 8f64.ln())]);
}

#[test]
fn the_oracle_gives_queries_without_tokens_zeros() {
    let mut problem = Problem::new(Heads::new(1, 1, 64), vec![4]);
    // The first query is of a token before the first one.
    problem.q_lens = vec![5; problem.batch()];
    let rows = over_equal_scores(&problem);
    assert_eq!(rows[0], (0.0, f64::NEG_INFINITY));
    near(&rows[1..2], &[(1.0, 0.0)]);
}

#[test]
fn the_oracle_reads_pages_as_the_rows_that_were_appended() {
    let case = Case::new([4, 2], 64, &[70], "f16".parse().unwrap());
    let cache = case.cache(&Reference::new(), usize::MAX).unwrap();
    let q = case.q();
    let paged = oracle::attend(&case.problem, &cache, &q, Queries::Exact);
    let [k, v] = case.kv(0);
    let rows = oracle::attend_rows(&case.problem, &q, &k, &v);
    // f16 keeps 11 bits.
    let error = |a: &[f64], b: &[f64]| {
        let both = a.iter().zip(b);
        both.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    assert!(
        error(&paged.0, &rows.0) < 0.02,
        "{}",
        error(&paged.0, &rows.0)
    );
    assert!(
        error(&paged.1, &rows.1) < 0.02,
        "{}",
        error(&paged.1, &rows.1)
    );
}
