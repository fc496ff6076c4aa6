//! The suite over backends that are wrong in one way each: it must say which, and where.

use attn_conformance::{Case, check_table};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, KvCache, KvFormat, Plan, Problem,
    Unsupported,
};
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

struct Theirs {
    inner: Reference,
    fault: Fault,
    calls: std::sync::atomic::AtomicUsize,
    device: DeviceInfo,
}

impl DecodeAttention for Theirs {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        match self.fault {
            Fault::NoKernel => Err(Unsupported::NoKernel {
                backend: "theirs",
                what: format!("head_dim {}", problem.head_dim),
                built: "nothing".to_owned(),
            }),
            _ => self.inner.supports(problem, format),
        }
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        self.inner.create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.inner.plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        assert!(self.fault != Fault::Panic, "this backend panics");
        let calls = self
            .calls
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.inner.execute(step)?;
        let batch = step.problem().batch();
        let out = step.parts().1.out.into_contiguous();
        let out = out.expect("its tests give contiguous rows");
        let wrong = match self.fault {
            Fault::LastBit => Some(7),
            Fault::Restless if calls % 2 == 1 => Some(7),
            Fault::Batch if batch > 1 => Some(7),
            _ => None,
        };
        if let Some(i) = wrong {
            out[i] = f32::from_bits(out[i].to_bits() ^ 1);
        }
        if self.fault == Fault::Unwritten {
            let last = out.len() - 1;
            out[last] = f32::NAN;
        }
        Ok(())
    }
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
    let theirs = Theirs {
        inner: Reference::new(),
        fault,
        calls: 0.into(),
        device: DeviceInfo::new("theirs", "test", ""),
    };
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
