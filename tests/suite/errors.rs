//! Refusals: typed, and nothing changes.

use attn_conformance::{Build, Case};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, Error, KvFormat, KvSource, KvView,
    Problem, Scheme,
};
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

#[rstest]
#[case::page_size(|c: &mut CacheConfig| c.page_size = 48, "page_size")]
#[case::heads(|c: &mut CacheConfig| c.num_kv_heads = 0, "num_kv_heads")]
#[case::head_dim(|c: &mut CacheConfig| c.head_dim = 65, "head_dim")]
#[case::small_pages(|c: &mut CacheConfig| c.page_size = 32, "scheme")]
#[case::v_channel(|c: &mut CacheConfig| c.format.v = c.format.k, "V scheme")]
#[case::static_scales(|c: &mut CacheConfig| c.k_tensor_scales = vec![1.0], "tensor scales")]
#[case::nan_scale(
    |c: &mut CacheConfig| {
        c.format = KvFormat::same(Scheme::Fp8E4m3);
        (c.k_tensor_scales, c.v_tensor_scales) = (vec![1.0], vec![f32::NAN]);
    },
    "tensor scale"
)]
fn a_cache_names_the_setting_it_refuses(#[case] spoil: fn(&mut CacheConfig), #[case] name: &str) {
    let mut config = CacheConfig::new(KvFormat::INT4, 1, 64, 1, 64);
    spoil(&mut config);
    let error = CpuBackend::new().create_cache(&config).err().unwrap();
    assert!(
        matches!(&error, Error::Parameter { what, .. } | Error::Length { what, .. } if *what == name),
        "{error}"
    );
}

#[test]
fn forks_and_sequences_that_do_not_exist_are_refused() {
    let case = Case::new([2, 1], 64, &[70, 3], KvFormat::INT4);
    let mut cache = case.cache(&CpuBackend::new(), 70).unwrap();
    let free = cache.free_pages();
    for error in [
        cache.append(2, &[1.0; 64], &[1.0; 64]).unwrap_err(),
        cache.fork(0, 2).unwrap_err(),
        cache.free_sequence(2).unwrap_err(),
        cache.read_back(2).unwrap_err(),
    ] {
        assert!(
            matches!(error, Error::Sequence { given: 2, count: 2 }),
            "{error}"
        );
    }
    for to in [0, 1] {
        let error = cache.fork(0, to).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Parameter {
                    what: "fork target",
                    ..
                }
            ),
            "{error}"
        );
    }
    for (k, v, what) in [(63, 63, "k"), (64, 128, "v")] {
        let error = cache.append(0, &vec![1.0; k], &vec![1.0; v]).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: w, .. } if w == what),
            "{error}"
        );
    }
    let error = cache.order_free_pages(&[0]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Parameter {
                what: "order of free pages",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        (cache.free_pages(), &cache.table().lens[..]),
        (free, &[70, 3][..])
    );
}

#[test]
fn outputs_and_views_of_the_wrong_length_are_refused() {
    let mut case = Case::new([2, 1], 64, &[5], KvFormat::INT8);
    case.build = Build::Bnsh;
    let p = &case.problem;
    for (out, lse, what) in [(127, 2, "out"), (128, 3, "lse")] {
        let error = DecodeOutput::new(p, &mut vec![0.0; out], &mut vec![0.0; lse])
            .err()
            .unwrap();
        assert!(
            matches!(error, Error::Length { what: w, .. } if w == what),
            "{error}"
        );
    }
    let contiguous = case.contiguous();
    let plan = CpuBackend::new().plan(p, case.format).unwrap();
    let q = case.q();
    let refuse = |view: &KvView<'_>| DecodeStep::new(&plan, &q, KvSource::View(view)).err();
    let whole = contiguous.view();
    assert!(refuse(&whole).is_none());
    let mut short = whole;
    short.v.codes = &whole.v.codes[..5 * 64 - 1];
    assert!(matches!(
        refuse(&short),
        Some(Error::Length {
            what: "v codes",
            needed: 320,
            ..
        })
    ));
    let mut short = whole;
    short.k.scales = &whole.k.scales[..4];
    assert!(matches!(
        refuse(&short),
        Some(Error::Length {
            what: "scales",
            given: 4,
            needed: 5
        })
    ));
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
