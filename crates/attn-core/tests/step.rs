//! What a decode step checks: the plan's problem, formats, lengths, and how large queries may be.

use attn_core::{
    CacheConfig, DecodeStep, Error, HostPages, KvCache, KvFormat, KvSource, KvView, Plan, Problem,
    StridedRows,
};
use rstest::rstest;

fn plan(problem: Problem, format: &str) -> Plan {
    Plan {
        backend: "test",
        problem,
        format: format.parse().unwrap(),
        num_splits: 1,
        workspace_bytes: 0,
    }
}

fn problem() -> Problem {
    Problem::new(2, 1, 64, vec![3, 5])
}

fn cache(format: &str, k_scale: f32) -> KvCache {
    let mut config = CacheConfig::new(format.parse().unwrap(), 1, 64, 3, 64);
    config.k_tensor_scales.fill(k_scale);
    // V's scale says nothing of queries.
    config.v_tensor_scales.fill(100.0);
    let store = HostPages::new(&config).unwrap();
    let mut cache = KvCache::new(config, Box::new(store)).unwrap();
    for (sequence, tokens) in [(0, 3), (1, 5)] {
        let x = vec![0.5; tokens * 64];
        cache.append(sequence, &x, &x).unwrap();
    }
    cache
}

fn refusal(plan: &Plan, q: &[f32], kv: KvSource<'_>) -> Option<Error> {
    let (mut out, mut lse) = (vec![0.0; 256], vec![0.0; 4]);
    DecodeStep::new(plan, q, kv, &mut out, &mut lse).err()
}

#[test]
fn a_step_gives_what_it_was_made_of() {
    let (plan, cache, q) = (plan(problem(), "int8"), cache("int8", 1.0), [0.25; 256]);
    let (mut out, mut lse) = (vec![7.0; 256], vec![8.0; 4]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out, &mut lse).unwrap();
    assert_eq!(step.plan(), &plan);
    assert_eq!(step.inputs().plan(), &plan);
    assert_eq!(step.inputs().q(), q);
    let (out, lse) = step.outputs();
    assert_eq!((out.len(), lse.len()), (256, 4));
    assert_eq!((out[0], lse[0]), (7.0, 8.0));
}

#[test]
fn a_plan_whose_problem_was_changed_is_checked_again() {
    let cache = cache("int8", 1.0);
    let mut plan = plan(problem(), "int8");
    plan.problem.softcap = Some(0.0);
    let error = refusal(&plan, &[0.25; 256], KvSource::Cache(&cache)).unwrap();
    assert!(
        matches!(
            error,
            Error::Parameter {
                what: "softcap",
                ..
            }
        ),
        "{error}"
    );
}

#[rstest]
#[case(|plan: &mut Plan| plan.format = KvFormat::INT4, "format", "int4")]
#[case(|plan: &mut Plan| plan.problem.kv_lens = vec![3, 4], "kv_len", "4 for sequence 1")]
#[case(|plan: &mut Plan| plan.problem.kv_lens = vec![3, 5, 0, 0], "batch", "4")]
#[case(|plan: &mut Plan| plan.problem.num_kv_heads = 2, "num_kv_heads", "2")]
#[case(|plan: &mut Plan| plan.problem.head_dim = 128, "head_dim", "128")]
fn a_cache_of_another_shape_is_named(
    #[case] change: fn(&mut Plan),
    #[case] name: &str,
    #[case] text: &str,
) {
    let cache = cache("int8", 1.0);
    let mut plan = plan(problem(), "int8");
    change(&mut plan);
    let p = &plan.problem;
    let (mut out, mut lse) = (vec![0.0; p.elements()], vec![0.0; p.rows()]);
    let q = out.clone();
    let kv = KvSource::Cache(&cache);
    let error = DecodeStep::new(&plan, &q, kv, &mut out, &mut lse).err();
    let written = KvFormat::INT4.to_string();
    let text = if text == "int4" { &written[..] } else { text };
    assert!(
        matches!(&error, Some(Error::Mismatch { what, problem, .. }) if *what == name && problem == text),
        "{error:?}"
    );
}

#[test]
fn the_first_sequences_of_a_larger_cache_are_a_problem() {
    let cache = cache("int8", 1.0);
    for lens in [vec![3, 5, 0], vec![3, 5], vec![3], vec![]] {
        let plan = plan(Problem::new(2, 1, 64, lens), "int8");
        let p = &plan.problem;
        let (mut out, mut lse) = (vec![0.0; p.elements()], vec![0.0; p.rows()]);
        let q = out.clone();
        let kv = KvSource::Cache(&cache);
        DecodeStep::new(&plan, &q, kv, &mut out, &mut lse).unwrap();
    }
}

#[rstest]
#[case("fp8", 4.0, 4.0)]
#[case("fp8", 0.25, 1.0)]
#[case("int8-tensor", 64.0, 64.0)]
#[case("int8", 1.0, 1.0)]
fn a_query_is_refused_where_its_scaled_value_is_beyond_2_to_the_64(
    #[case] format: &str,
    #[case] k_scale: f32,
    #[case] counts: f64,
) {
    let cache = cache(format, k_scale);
    let mut plan = plan(problem(), format);
    plan.problem.softmax_scale = 0.5;
    let limit = 2f64.powi(64) / (0.5 * std::f64::consts::LOG2_E * counts);
    for sign in [1.0, -1.0] {
        let mut q = [0.25; 256];
        q[200] = (sign * limit * 0.999_99) as f32;
        assert!(refusal(&plan, &q, KvSource::Cache(&cache)).is_none());
        q[200] = (sign * limit * 1.000_01) as f32;
        let error = refusal(&plan, &q, KvSource::Cache(&cache)).unwrap();
        let Error::QueryRange { index: 200, value } = error else {
            panic!("{error}")
        };
        let ratio = f64::from(value) * sign / 2f64.powi(64);
        assert!((1.0..1.000_03).contains(&ratio), "{ratio}");
        // What is no number is called that.
        for bad in [f32::NAN, f32::INFINITY] {
            q[17] = bad;
            let error = refusal(&plan, &q, KvSource::Cache(&cache)).unwrap();
            assert!(
                matches!(
                    error,
                    Error::NotFinite {
                        what: "q",
                        index: 17,
                        ..
                    }
                ),
                "{error}"
            );
        }
    }
}

#[test]
fn a_views_static_scales_count_for_queries() {
    let problem = problem();
    let codes = [0x38; 2 * 5 * 64];
    let rows = StridedRows::bnsh(&codes, &[], 1, 5, 64, 0);
    let scales: [&[f32]; 2] = [&[16.0], &[1.0]];
    let view = KvView::new(&problem, "fp8".parse().unwrap(), rows, rows, scales).unwrap();
    let mut plan = plan(problem.clone(), "fp8");
    plan.problem.softmax_scale = 1.0;
    let limit = 2f64.powi(64) / (std::f64::consts::LOG2_E * 16.0);
    let q = |share: f64| [(limit * share) as f32; 256];
    assert!(refusal(&plan, &q(0.999), KvSource::View(&view)).is_none());
    let error = refusal(&plan, &q(1.001), KvSource::View(&view)).unwrap();
    assert!(
        matches!(error, Error::QueryRange { index: 0, .. }),
        "{error}"
    );
}
