//! States over disjoint tokens: what one may be, and that joining them is the softmax over all of their tokens.

use attn_core::{AttnState, Error};

/// The state of some scores and values, in f64: outputs and log-sum-exp.
fn exact(scores: &[f64], values: &[f64]) -> (f64, f64) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let out = scores.iter().zip(values).map(|(s, v)| (s - max).exp() * v);
    (out.sum::<f64>() / sum, max + sum.ln())
}

fn state(scores: &[f64], values: &[f64]) -> AttnState {
    let (out, lse) = exact(scores, values);
    AttnState::new(1, vec![out as f32], vec![lse as f32]).unwrap()
}

#[test]
fn merged_states_are_the_softmax_over_all_tokens() {
    for distance in [0.0, 0.25, 1.0, 3.0, 10.0, 16.0] {
        let (a, b) = ([1.0, 0.5], [0.75 + distance, -2.0, 0.25]);
        let (x, y) = ([3.0, -1.0], [0.5, 2.0, -4.0]);
        let (out, lse) = exact(&[&a[..], &b].concat(), &[&x[..], &y].concat());
        for (first, second) in [((&a[..], &x[..]), (&b[..], &y[..])), ((&b, &y), (&a, &x))] {
            let mut merged = state(first.0, first.1);
            merged.merge_state(&state(second.0, second.1)).unwrap();
            let (got, got_lse) = (f64::from(merged.out()[0]), f64::from(merged.lse()[0]));
            assert!((got - out).abs() < 2e-6, "{distance}: {got}, {out}");
            assert!((got_lse - lse).abs() < 2e-6, "{distance}: {got_lse}, {lse}");
        }
    }
}

#[test]
fn a_state_far_below_another_counts_as_nothing() {
    for distance in [40.0, 100.0, 1e6] {
        let large = AttnState::new(2, vec![1.5, -2.0], vec![7.0]).unwrap();
        let small = AttnState::new(2, vec![4.0, 5.0], vec![7.0 - distance]).unwrap();
        for (mut left, right) in [(large.clone(), &small), (small.clone(), &large)] {
            left.merge_state(right).unwrap();
            // The arithmetic's exp2 and reciprocal err by a unit in the last place.
            let close = |(x, y): (&f32, &f32)| (x - y).abs() < 3e-7 * y.abs();
            let pairs = left.out().iter().zip(large.out());
            assert!(pairs.clone().all(close), "{distance}: {left:?}");
            assert_eq!(left.lse(), large.lse(), "{distance}");
        }
    }
}

#[test]
fn outputs_end_at_2_to_the_126() {
    let largest = f32::from_bits(0x7e80_0000);
    let with = |x: f32| AttnState::new(1, vec![0.0, x], vec![0.0, 0.0]);
    for sign in [1.0, -1.0] {
        with(sign * largest).unwrap();
        let error = with(sign * f32::from_bits(0x7e80_0001)).unwrap_err();
        assert!(matches!(error, Error::Parameter { what: "out", .. }));
    }
    let mut sum = with(largest).unwrap();
    sum.merge_state(&with(largest).unwrap()).unwrap();
    assert!(sum.out()[1].is_finite());
}

#[test]
fn a_state_without_rows_and_one_of_one_dim_are_states() {
    assert_eq!(AttnState::new(3, vec![], vec![]).unwrap().out(), [0.0; 0]);
    let empty = AttnState::empty(2, 1).unwrap();
    assert_eq!(empty.out(), [0.0; 2]);
    assert_eq!(empty.lse(), [f32::NEG_INFINITY; 2]);
    let error = AttnState::empty(2, 0).unwrap_err();
    assert!(
        matches!(&error, Error::Parameter { what: "head_dim", given, .. } if given == "0"),
        "{error}"
    );
}

#[test]
fn lengths_that_differ_are_named() {
    let one = AttnState::empty(2, 4).unwrap();
    for (rows, dim, name) in [(2, 3, "other head_dim"), (3, 4, "other lse")] {
        let mut other = AttnState::empty(rows, dim).unwrap();
        let error = other.merge_state(&one).unwrap_err();
        assert!(
            matches!(error, Error::Length { what, .. } if what == name),
            "{error}"
        );
    }
    let error = AttnState::new(4, vec![0.0; 7], vec![0.0; 2]).unwrap_err();
    assert!(matches!(
        error,
        Error::Length {
            what: "out",
            given: 7,
            needed: 8
        }
    ));
}
