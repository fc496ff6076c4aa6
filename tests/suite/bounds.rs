//! The suite's own bounds: a fault that the reference shares changes no bit against it, so that only the f64 oracle can notice.

use attn_conformance::{
    Case,
    check::{Bounds, bounds},
    check_table,
    fake::FakeBackend,
};
use attn_cpu::Reference;
use rstest::rstest;

/// The reference with every output multiplied by 1 + `out`, and every log-sum-exp moved by `lse` relative to it, or to 10 where that is more.
fn off(backend: &'static str, out: f64, lse: f64) -> FakeBackend {
    let reference = FakeBackend::of(Reference::new()).named(backend);
    reference.with_answers(move |answer| {
        for x in answer.out {
            *x = (f64::from(*x) * (1.0 + out)) as f32;
        }
        for x in answer.lse {
            *x = (f64::from(*x) + lse * f64::from(x.abs()).max(10.0)) as f32;
        }
    })
}

#[rstest]
#[case::integer("int8", "cpu", 2e-2, 6.5e-4)]
#[case::integer_of_another_backend("int4", "theirs", 2e-2, 6.5e-4)]
#[case::integer_k_of_another_backend("int8/f16", "theirs", 5e-4, 1e-4)]
#[case::float("f16", "cpu", 3e-5, 3e-5)]
#[case::float_of_another_backend("fp8", "theirs", 5e-4, 5e-4)]
#[case::bf16_of_another_backend("bf16", "theirs", 4e-3, 4e-3)]
#[case::bf16_k_of_another_backend("bf16/f16", "theirs", 4e-3, 4e-3)]
#[case::bf16_v_of_another_backend("f16/bf16", "theirs", 4e-3, 4e-3)]
fn a_shared_fault_is_noticed_beyond_the_bound_alone(
    #[case] format: &str,
    #[case] backend: &'static str,
    #[case] out: f64,
    #[case] lse: f64,
) {
    let mut case = Case::new([2, 1], 64, &[70, 9], format.parse().unwrap());
    // Scores of nearly 0 lie on the grid; elsewhere its own error takes most of the log-sum-exp's bound.
    case.problem.scores.softmax_scale = Some(1e-12);
    let allowed = Bounds { out, lse };
    for (out, lse, says) in [
        (0.8, 0.8, None),
        (-0.8, -0.8, None),
        (1.2, 0.0, Some("relative L2 error")),
        (-1.2, 0.0, Some("relative L2 error")),
        (0.0, 1.2, Some("lse[0] is")),
        (0.0, -1.2, Some("lse[0] is")),
    ] {
        let off = || off(backend, out * allowed.out, lse * allowed.lse);
        assert_eq!(bounds(&off(), &case), allowed);
        let cases = std::slice::from_ref(&case);
        let report = check_table(&off(), &off(), cases, 1, &mut |_, _| ());
        match (says, &report.failures[..]) {
            (None, []) => (),
            (Some(says), [failure]) => assert!(failure.contains(says), "{failure}"),
            (_, failures) => panic!("{out} and {lse} of the bound: {failures:?}"),
        }
    }
}
