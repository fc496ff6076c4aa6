//! The suite over backends that are wrong in one way each: it must say which, and where.

use std::sync::atomic::{AtomicUsize, Ordering};

use attn_conformance::{Case, check_table, fake::FakeBackend};
use attn_core::Unsupported;
use attn_cpu::Reference;
use rstest::rstest;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// One output is one unit in the last place off.
    LastBit,
    /// The last row is never written.
    Unwritten,
    /// Every second call answers differently.
    Restless,
    /// There is no kernel for anything.
    NoKernel,
    /// It panics.
    Panic,
    /// A sequence's bits depend on the batch.
    Batch,
}

/// The reference with a fault.
fn theirs(fault: Fault) -> FakeBackend {
    let calls = AtomicUsize::new(0);
    let backend = FakeBackend::of(Reference::new()).named("theirs");
    let backend = backend.with_refusals(move |problem, _| {
        (fault == Fault::NoKernel).then(|| Unsupported::NoKernel {
            backend: "theirs",
            what: format!("head_dim {}", problem.head_dim),
            built: "nothing".to_owned(),
        })
    });
    backend.with_answers(move |answer| {
        assert!(fault != Fault::Panic, "this backend panics");
        let calls = calls.fetch_add(1, Ordering::Relaxed);
        let wrong = match fault {
            Fault::LastBit => true,
            Fault::Restless => calls % 2 == 1,
            Fault::Batch => answer.problem.batch() > 1,
            _ => false,
        };
        if wrong {
            answer.out[7] = f32::from_bits(answer.out[7].to_bits() ^ 1);
        }
        if let (Fault::Unwritten, Some(last)) = (fault, answer.out.last_mut()) {
            *last = f32::NAN;
        }
    })
}

fn case(format: &str, head_dim: usize) -> Case {
    let mut case = Case::new([2, 1], head_dim, &[70, 9], format.parse().unwrap());
    case.alone = true;
    case
}

#[rstest]
#[case(Fault::None, "int8", 64, "")]
#[case(Fault::LastBit, "int8", 64, "out[7] is ")]
#[case(Fault::LastBit, "bf16", 64, "")]
#[case(Fault::Unwritten, "int4", 64, "out[255] is NaN")]
#[case(Fault::Unwritten, "bf16", 64, "out[255] is NaN")]
#[case(Fault::Restless, "bf16", 64, "second run's out[7] is ")]
#[case(Fault::Panic, "int8", 64, "panicked")]
#[case(
    Fault::NoKernel,
    "int8",
    64,
    "required, but theirs: no kernel for head_dim 64"
)]
#[case(Fault::NoKernel, "int8", 96, "refused")]
#[case(Fault::Batch, "int8", 64, "out[7] is ")]
fn what_is_wrong_is_named(
    #[case] fault: Fault,
    #[case] format: &str,
    #[case] head_dim: usize,
    #[case] says: &str,
) {
    let theirs = theirs(fault);
    let case = case(format, head_dim);
    let report = check_table(&Reference::new(), &theirs, &[case], 1, &mut |_, _| ());
    assert_eq!(report.cases, 1);
    match says {
        // A float result elsewhere than on the CPU is held to a bound, not to bits.
        "" => assert!(report.failures.is_empty(), "{:?}", report.failures),
        "refused" => assert_eq!((report.refusals.len(), report.failures.len()), (1, 0)),
        _ => {
            let [failure] = &report.failures[..] else {
                panic!("{:?}", report.failures)
            };
            assert!(failure.starts_with("seed 1: "), "{failure}");
            assert!(failure.contains(says), "{failure}");
        }
    }
}
