//! A decode step checks the plan's problem, formats, lengths, and the magnitude of queries.

use attn_conformance::fake::FakeBackend;
use attn_core::{
    Attend, CacheConfig, DecodeAttention, DecodeStep, ElementIndex, Error, HeadDim, Heads,
    HostPages, KvCache, KvSource, KvView, Plan, Problem, SelectedPages, StridedRows,
};
use rstest::rstest;

fn plan(problem: Problem, format: &str) -> Plan {
    Plan::new("test", &problem, format.parse().unwrap(), 17u8).unwrap()
}

const HEADS: Heads = Heads {
    q: 2,
    kv: 1,
    dim: HeadDim::same(64),
};

fn problem() -> Problem {
    Problem::new(Heads::new(2, 1, 64), vec![3, 5])
}

fn cache(format: &str, k_scale: f32) -> KvCache {
    let mut config = CacheConfig::builder(format.parse().unwrap(), Heads::new(1, 1, 64))
        .unit_tensor_scales()
        .sequences(3)
        .max_len(64)
        .build();
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
    DecodeStep::new(plan, q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .err()
}

#[test]
fn a_step_gives_what_it_was_made_of() {
    let (plan, cache, q) = (plan(problem(), "int8"), cache("int8", 1.0), [0.25; 256]);
    let (mut out, mut lse) = (vec![7.0; 256], vec![8.0; 4]);
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    assert_eq!(step.plan().prepared(), Some(&17u8));
    assert_eq!(step.plan().prepared::<u16>(), None);
    assert_eq!(step.problem(), &problem());
    let (inputs, outputs) = step.parts();
    assert_eq!(inputs.q().contiguous(), Some(&q[..]));
    assert_eq!(inputs.problem().kv_lens, [3, 5]);
    let lse = outputs.lse.unwrap();
    assert_eq!((outputs.out.len(), lse.len()), (256, 4));
    let out = outputs.out.into_contiguous().unwrap();
    assert_eq!((out[0], lse[0]), (7.0, 8.0));
}

#[test]
fn a_plan_for_longer_sequences_serves_shorter_ones() {
    let (cache, q) = (cache("int8", 1.0), [0.25; 256]);
    let plan = plan(Problem::new(HEADS, [3, 1000]), "int8");
    let mut out = [0.0; 256];
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out).unwrap();
    let (inputs, outputs) = step.parts();
    assert_eq!(inputs.problem().kv_lens, [3, 5]);
    assert_eq!(inputs.plan().problem().kv_lens, [3, 1000]);
    // Nobody asked for log-sum-exps.
    assert!(outputs.lse.is_none());
}

#[test]
fn sixteen_bit_queries_are_widened_and_results_rounded() {
    let (plan, cache) = (plan(problem(), "int8"), cache("int8", 1.0));
    let q = [half::f16::from_f32(0.25); 256];
    let mut out = [half::bf16::ZERO; 256];
    // Writes the sum of a query element and a number that bf16 cannot hold.
    let echo = FakeBackend::idle("test").with_execute(|_, step| {
        let (inputs, outputs) = step.parts();
        let mut out = outputs.out;
        let [tokens, heads, _] = out.shape();
        for (token, head) in (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let pairs = out
                .row(token, head)
                .iter_mut()
                .zip(inputs.q().row(token, head));
            pairs.for_each(|(out, q)| *out = q + 1.0 / 4096.0);
        }
        Ok(())
    });
    let kv = KvSource::Cache(&cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out).unwrap();
    echo.decode(&mut step).unwrap();
    assert_eq!(out.map(half::bf16::to_f32), [0.25; 256]);
}

#[test]
fn plans_check_their_problem_and_format() {
    let refused = |problem: Problem, format: &str| {
        let plan = Plan::new("test", &problem, format.parse().unwrap(), ());
        plan.unwrap_err().to_string()
    };
    assert!(refused(problem().softcap(0.0), "int8").contains("softcap"));
    let odd = Problem::new(
        Heads {
            dim: 80.into(),
            ..HEADS
        },
        [1],
    );
    assert!(refused(odd, "int4-g8").contains("int4-g8"));
}

#[rstest]
#[case(|_: &mut Problem, format: &mut &str| *format = "int4", "format is int4 in the plan but int8 in the cache; plan with")]
#[case(|problem: &mut Problem, _: &mut &str| problem.kv_lens = vec![3, 4], "sequence 1 has 5 tokens, but the plan is for 4; plan with")]
#[case(|problem: &mut Problem, _: &mut &str| (problem.kv_lens, problem.q_lens) = (vec![3, 5, 0, 0], vec![1; 4]), "the plan is for 4 sequences, but the call has 3; plan for 3, or")]
#[case(|problem: &mut Problem, _: &mut &str| problem.num_kv_heads = 2, "num_kv_heads is 2 in the plan but 1 in the cache; plan with")]
#[case(|problem: &mut Problem, _: &mut &str| problem.head_dim = 128.into(), "head_dim is 128 in the plan but 64 in the cache; plan with")]
fn a_cache_of_another_shape_is_named(
    #[case] change: fn(&mut Problem, &mut &str),
    #[case] says: &str,
) {
    let cache = cache("int8", 1.0);
    let (mut problem, mut format) = (problem(), "int8");
    change(&mut problem, &mut format);
    let plan = plan(problem, format);
    let p = plan.problem();
    let (mut out, mut lse) = (vec![0.0; p.out_elements()], vec![0.0; p.rows()]);
    let q = out.clone();
    let kv = KvSource::Cache(&cache);
    let error = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .err()
        .unwrap();
    assert!(error.to_string().starts_with(says), "{error}");
}

/// Kills checks that look for a sequence which is not there.
#[test]
fn queries_of_more_sequences_than_the_cache_has_are_refused() {
    for format in ["int8", "int4", "fp8"] {
        let cache = cache(format, 1.0);
        let count = cache.table().lens.len();
        let lens = |batch| Problem::new(problem().heads(), vec![0; batch]);
        let check = |problem: &Problem| {
            let found = cache.check_queries(problem);
            let of_layer = cache.layer(0).unwrap().check_queries(problem);
            assert_eq!(format!("{found:?}"), format!("{of_layer:?}"));
            found
        };
        check(&lens(count)).unwrap();
        let error = check(&lens(count + 1)).unwrap_err();
        let found = matches!(error, Error::Batch { planned, given } if [planned, given] == [count + 1, count]);
        assert!(found, "{error}");
        for q_lens in [vec![], vec![1; count + 1]] {
            let given = q_lens.len();
            let error = check(&lens(count).q_lens(q_lens)).unwrap_err();
            let found = matches!(error, Error::Length { what: "q_lens", given: g, needed } if [g, needed] == [given, count]);
            assert!(found, "{error}");
        }
    }
}

/// Kills lists that are looked at number by number alone.
#[test]
fn lists_beside_selected_pages_have_a_number_for_each_sequence() {
    let cache = cache("fp8", 1.0);
    let selected = SelectedPages {
        pages: &[0, 0],
        counts: &[1, 1],
    };
    let at = Attend {
        pages: Some(selected),
        ..Attend::new(2, &[0, 1])
    };
    for (q_lens, list) in [(Some(&[1, 1][..]), &[][..]), (None, &[0, 0])] {
        let (tokens_before, tokens_after) = (list, list);
        let at = Attend {
            q_lens,
            tokens_before,
            tokens_after,
            ..at.clone()
        };
        at.of_cache(&cache).unwrap();
    }
    let q_lens = |lens| Attend {
        q_lens: Some(lens),
        ..at.clone()
    };
    let before = |tokens_before| Attend {
        tokens_before,
        ..at.clone()
    };
    let after = |tokens_after| Attend {
        tokens_after,
        ..at.clone()
    };
    for (at, name, len) in [
        (q_lens(&[]), "q_lens", 0),
        (q_lens(&[1]), "q_lens", 1),
        (q_lens(&[1, 1, 1]), "q_lens", 3),
        (before(&[0]), "tokens_before", 1),
        (after(&[0, 0, 0]), "tokens_after", 3),
    ] {
        let error = at.of_cache(&cache).err().unwrap();
        let found = matches!(error, Error::Length { what, given, needed: 2 } if (what, given) == (name, len));
        assert!(found, "{error}");
    }
}

#[test]
fn the_first_sequences_of_a_larger_cache_are_a_problem() {
    let cache = cache("int8", 1.0);
    for lens in [vec![3, 5, 0], vec![3, 5], vec![3], vec![]] {
        let plan = plan(Problem::new(Heads::new(2, 1, 64), lens), "int8");
        let p = plan.problem();
        let (mut out, mut lse) = (vec![0.0; p.out_elements()], vec![0.0; p.rows()]);
        let q = out.clone();
        let kv = KvSource::Cache(&cache);
        let step =
            DecodeStep::new(&plan, &q, kv, &mut out).and_then(|step| step.with_lse(&mut lse));
        assert_eq!(step.unwrap().problem(), p);
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
    let plan = plan(problem().softmax_scale(0.5), format);
    let limit = 2f64.powi(64) / (0.5 * std::f64::consts::LOG2_E * counts);
    for sign in [1.0, -1.0] {
        let mut q = [0.25; 256];
        q[200] = (sign * limit * 0.999_99) as f32;
        assert!(refusal(&plan, &q, KvSource::Cache(&cache)).is_none());
        q[200] = (sign * limit * 1.000_01) as f32;
        let error = refusal(&plan, &q, KvSource::Cache(&cache)).unwrap();
        let Error::QueryRange { at, value } = error else {
            panic!("{error}")
        };
        assert_eq!(at.to_string(), "token 1, head 1, dim 8");
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
                        at: ElementIndex::Row {
                            token: 0,
                            head: 0,
                            dim: 17
                        },
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
    let plan = plan(problem.clone().softmax_scale(1.0), "fp8");
    let limit = 2f64.powi(64) / (std::f64::consts::LOG2_E * 16.0);
    let q = |share: f64| [(limit * share) as f32; 256];
    assert!(refusal(&plan, &q(0.999), KvSource::View(&view)).is_none());
    let error = refusal(&plan, &q(1.001), KvSource::View(&view)).unwrap();
    assert!(
        matches!(
            error,
            Error::QueryRange {
                at: ElementIndex::Row {
                    token: 0,
                    head: 0,
                    dim: 0
                },
                ..
            }
        ),
        "{error}"
    );
}
