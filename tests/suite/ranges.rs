//! The ends of the accepted ranges: answers are finite, the same everywhere, and as near as `docs/arithmetic.md`, section 9, says.

use attn_conformance::{
    Case, check,
    oracle::{self, Queries},
};
use attn_core::{DecodeAttention, KvSource};
use attn_cpu::{CpuBackend, Reference};
use rstest::rstest;

/// The largest K and V that bf16 takes, the largest queries, and a soft cap at its ends: finite, and the reference's bits.
#[rstest]
fn ends_of_ranges_agree(
    #[values(1e-15, 1.0, 1e15)] softmax_scale: f32,
    #[values(None, Some(1e-3), Some(1e3))] softcap: Option<f32>,
    #[values("bf16", "f16", "int8", "int4", "int8-plain", "fp8/bf16")] format: &str,
) {
    let mut case = Case::new([2, 1], 64, &[70], format.parse().unwrap());
    case.problem.scores.softmax_scale = Some(softmax_scale);
    case.problem.scores.softcap = softcap;
    let limits = [case.format.k, case.format.v].map(|scheme| scheme.max_magnitude());
    let fill = |limit: f32| -> Vec<f32> {
        let signs = (0..70 * 64).map(|i| if i * 7 % 5 < 2 { -1.0 } else { 1.0 });
        signs.map(|sign| sign * limit).collect()
    };
    // Queries of the largest magnitude that QueryRange lets through.
    let most = (1.8e19 / (f64::from(softmax_scale) * std::f64::consts::LOG2_E)) as f32;
    let q = fill(most.min(1e38))[..128].to_vec();
    let mut answers = Vec::new();
    for backend in [
        &Reference::new() as &dyn DecodeAttention,
        &CpuBackend::new(),
    ] {
        let mut cache = backend.create_cache(&case.config()).unwrap();
        cache.append(0, &fill(limits[0]), &fill(limits[1])).unwrap();
        let got = check::decode_rows(backend, &case, &q, KvSource::Cache(&cache));
        let (out, lse) = got.unwrap();
        let all = || out.iter().chain(&lse);
        assert!(all().all(|x| x.is_finite()), "{lse:?}");
        answers.push(all().map(|x| x.to_bits()).collect::<Vec<_>>());
    }
    assert_eq!(answers[0], answers[1]);
}

/// The soft cap's form cancels where the cap is large: its own share of the error grows with it.
#[rstest]
#[case(1e-3, 2e-6)]
#[case(50.0, 1.1e-5)]
#[case(1e3, 1.2e-4)]
fn the_soft_caps_error_is_the_documented_one(
    #[case] cap: f32,
    #[case] allowed: f64,
    #[values("f16", "bf16")] format: &str,
) {
    let mut case = Case::new([2, 1], 64, &[10, 70, 300], format.parse().unwrap());
    case.problem.scores.softcap = Some(cap);
    let (mut worst, reference) = (0.0f64, Reference::new());
    for seed in 1..20 {
        case.seed = seed;
        let cache = case.cache(&reference, usize::MAX).unwrap();
        let (_, lse) = check::decode(&reference, &case, &cache).unwrap();
        let (_, want) = oracle::attend(&case.problem, &cache, &case.q(), Queries::Exact);
        let errors = lse
            .iter()
            .zip(&want)
            .map(|(a, b)| (f64::from(*a) - b).abs());
        worst = errors.fold(worst, f64::max);
    }
    println!("{format}, softcap {cap}: lse off by {worst:.1e}");
    assert!(worst <= allowed, "{format}, softcap {cap}: {worst:e}");
}

/// Sinks at the ends of their range, with sequences of no token, few and many.
fn with_sinks(format: &str, sinks: Option<[f32; 2]>) -> (Case, [Vec<f32>; 2]) {
    let mut case = Case::new([2, 1], 64, &[0, 10, 300], format.parse().unwrap());
    case.problem.scores.sinks = sinks.map(|sinks| sinks.to_vec());
    let mut answers = [
        &Reference::new() as &dyn DecodeAttention,
        &CpuBackend::new(),
    ]
    .map(|backend| {
        let cache = case.cache(backend, usize::MAX).unwrap();
        check::decode(backend, &case, &cache).unwrap()
    });
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let [reference, cpu] = &answers;
    assert_eq!(bits(&reference.0), bits(&cpu.0));
    assert_eq!(bits(&reference.1), bits(&cpu.1));
    let (out, lse) = std::mem::take(&mut answers[0]);
    (case, [out, lse])
}

/// Where a token is seen, the least sink changes no bit, and the largest leaves zeros; where none is, the sink itself is the log-sum-exp.
#[rstest]
fn sinks_at_the_ends_of_their_range_are_none_and_all(
    #[values("int8", "int4", "f16")] format: &str,
) {
    let (_, without) = with_sinks(format, None);
    let (_, [out, lse]) = with_sinks(format, Some([-1e6, 1e6]));
    for (row, (found, none)) in lse.iter().zip(&without[1]).enumerate() {
        let dims = row * 64..(row + 1) * 64;
        let (is_least, is_empty) = (row % 2 == 0, row < 2);
        let want = match (is_least, is_empty) {
            (true, false) => *none,
            (true, true) => -1e6,
            (false, _) => 1e6,
        };
        let error = f64::from(found - want).abs();
        assert!(
            if is_least && !is_empty {
                error == 0.0
            } else {
                error <= 0.1
            },
            "row {row}: {found}"
        );
        for (x, none) in out[dims.clone()].iter().zip(&without[0][dims]) {
            if is_least {
                assert_eq!(x.to_bits(), none.to_bits(), "row {row}");
            } else {
                assert_eq!(*x, 0.0, "row {row}");
            }
        }
    }
}

/// A sink's error in a log-sum-exp is half a step of its base-2 logit.
#[rstest]
#[case(1.0, 4e-6)]
#[case(100.0, 2e-5)]
#[case(1e4, 1.5e-3)]
#[case(1e6, 0.12)]
fn the_sinks_error_is_the_documented_one(#[case] sink: f32, #[case] allowed: f64) {
    let reference = Reference::new();
    for i in 0..50 {
        let sink = sink * (1.0 - i as f32 / 64.0);
        let (case, [_, lse]) = with_sinks("f16", Some([sink, -sink]));
        let cache = case.cache(&reference, usize::MAX).unwrap();
        let (_, want) = oracle::attend(&case.problem, &cache, &case.q(), Queries::Exact);
        for (row, (lse, want)) in lse.iter().zip(&want).enumerate() {
            let error = (f64::from(*lse) - want).abs();
            assert!(error <= allowed, "sink {sink}, row {row}: {error:e}");
        }
    }
}
