//! The suite's own bounds: a fault that the reference shares changes no bit against it, so that only the f64 oracle can notice.

use attn_conformance::{
    Case,
    check::{Bounds, bounds},
    check_table,
};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, KvCache, KvFormat, Plan, Problem,
    StepOutputs, Unsupported,
};
use attn_cpu::Reference;
use rstest::rstest;

/// The reference's answers, changed by a share of what the bounds allow.
struct Off {
    inner: Reference,
    device: DeviceInfo,
    /// Relative, of every output.
    out: f64,
    /// The bound of every log-sum-exp, relative to it or to 10 where that is more.
    lse: f64,
}

impl Off {
    fn new(backend: &'static str, out: f64, lse: f64) -> Self {
        Off {
            inner: Reference::new(),
            device: DeviceInfo::new(backend, "test", ""),
            out,
            lse,
        }
    }
}

impl DecodeAttention for Off {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        self.inner.supports(problem, format)
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        self.inner.create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.inner.plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.inner.execute(step)?;
        let StepOutputs { out, lse, .. } = step.parts().1;
        let out = out.into_contiguous();
        for x in out.expect("its tests give contiguous rows") {
            *x = (f64::from(*x) * (1.0 + self.out)) as f32;
        }
        for x in lse.into_iter().flatten() {
            *x = (f64::from(*x) + self.lse * f64::from(x.abs()).max(10.0)) as f32;
        }
        Ok(())
    }
}

#[rstest]
#[case::integer("int8", "cpu", 2e-2, 1e-4)]
#[case::integer_of_another_backend("int4", "theirs", 2e-2, 1e-4)]
#[case::float("f16", "cpu", 3e-5, 3e-5)]
#[case::float_of_another_backend("fp8", "theirs", 5e-4, 5e-4)]
#[case::bf16_of_another_backend("bf16", "theirs", 4e-3, 4e-3)]
#[case::bf16_k_of_another_backend("bf16/f16", "theirs", 4e-3, 4e-3)]
#[case::bf16_v_of_another_backend("f16/bf16", "theirs", 4e-3, 4e-3)]
fn a_fault_that_the_reference_shares_is_noticed_beyond_the_bound_and_no_sooner(
    #[case] format: &str,
    #[case] backend: &'static str,
    #[case] out: f64,
    #[case] lse: f64,
) {
    let case = Case::new([2, 1], 64, &[70, 9], format.parse().unwrap());
    let allowed = Bounds { out, lse };
    for (out, lse, says) in [
        (0.8, 0.8, None),
        (-0.8, -0.8, None),
        (1.2, 0.0, Some("relative L2 error")),
        (-1.2, 0.0, Some("relative L2 error")),
        (0.0, 1.2, Some("lse[0] is")),
        (0.0, -1.2, Some("lse[0] is")),
    ] {
        let off = || Off::new(backend, out * allowed.out, lse * allowed.lse);
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
