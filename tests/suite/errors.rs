//! Refusals: typed, and nothing changes.

use attn_conformance::Case;
use attn_core::{DecodeAttention, DecodeStep, Error, KvFormat, KvSource, Problem, Scheme};
use attn_cpu::CpuBackend;
use rstest::rstest;

#[rstest]
#[case(f32::NAN)]
#[case(f32::INFINITY)]
#[case(f32::NEG_INFINITY)]
fn append_refuses_what_is_not_finite_and_changes_nothing(#[case] bad: f32) {
    let case = Case::new([2, 1], 64, &[70], KvFormat::INT4);
    let mut cache = case.cache(&CpuBackend::new(), 70).unwrap();
    let (before, free) = (cache.read_back(0).unwrap(), cache.free_pages());
    let mut v = vec![1.0; 64];
    v[5] = bad;
    let error = cache.append(0, &[1.0; 64], &v).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NotFinite {
                what: "v",
                index: 5,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        (cache.read_back(0).unwrap(), cache.free_pages()),
        (before, free)
    );
}

#[test]
fn a_full_cache_refuses_and_keeps_its_tokens() {
    let case = Case::new([2, 1], 64, &[128], KvFormat::INT8);
    let mut cache = case.cache(&CpuBackend::new(), 128).unwrap();
    let before = cache.read_back(0).unwrap();
    let error = cache.append(0, &[1.0; 64], &[1.0; 64]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::CacheFull {
                needed: 1,
                free: 0,
                total: 2
            }
        ),
        "{error}"
    );
    assert_eq!(
        (cache.table().lens[0], cache.read_back(0).unwrap()),
        (128, before)
    );
}

#[test]
fn a_step_refuses_bad_queries_and_foreign_lengths() {
    let case = Case::new([2, 1], 64, &[5], KvFormat::INT8);
    let backend = CpuBackend::new();
    let cache = case.cache(&backend, 5).unwrap();
    let plan = backend.plan(&case.problem, case.format).unwrap();
    let refuse = |q: &[f32]| {
        DecodeStep::new(&plan, q, KvSource::Cache(&cache))
            .err()
            .unwrap()
    };
    assert!(matches!(
        refuse(&[0.0; 100]),
        Error::Length {
            what: "q",
            given: 100,
            needed: 128
        }
    ));
    assert!(matches!(
        refuse(&[f32::NAN; 128]),
        Error::NotFinite {
            what: "q",
            index: 0,
            ..
        }
    ));
    assert!(matches!(
        refuse(&[1e30; 128]),
        Error::QueryRange { index: 0, .. }
    ));
    let longer = Problem::new(2, 1, 64, vec![6]);
    let plan = backend.plan(&longer, case.format).unwrap();
    let error = DecodeStep::new(&plan, &[0.0; 128], KvSource::Cache(&cache))
        .err()
        .unwrap();
    assert!(
        matches!(error, Error::Mismatch { what: "kv_len", .. }),
        "{error}"
    );
}

#[rstest]
#[case::head_dim(Problem::new(2, 1, 72, vec![1]), "head_dim")]
#[case::heads(Problem::new(3, 2, 64, vec![1]), "num_q_heads/num_kv_heads")]
#[case::heads_per_kv(Problem::new(65, 1, 64, vec![1]), "heads_per_kv")]
#[case::q_len(Problem { q_len: 17, ..Problem::new(2, 1, 64, vec![1]) }, "q_len")]
#[case::kv_len(Problem::new(2, 1, 64, vec![(1 << 20) + 1]), "kv_len")]
#[case::softcap(Problem { softcap: Some(0.0), ..Problem::new(2, 1, 64, vec![1]) }, "softcap")]
fn a_plan_names_the_parameter_it_refuses(#[case] problem: Problem, #[case] name: &str) {
    let error = CpuBackend::new()
        .plan(&problem, KvFormat::INT8)
        .unwrap_err();
    assert!(
        matches!(error, Error::Parameter { what, .. } if what == name),
        "{error}"
    );
}

#[test]
fn formats_are_written_as_they_are_read() {
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            let format = KvFormat { k, v };
            assert_eq!(format.to_string().parse::<KvFormat>().unwrap(), format);
        }
    }
    assert!("int5".parse::<KvFormat>().is_err());
}
