//! Refusals: typed, and nothing changes.

use attn_conformance::{Build, Case, check};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, ElementIndex, Error, Heads, Int8Scale, KvFormat,
    KvSource, KvView, Plan, Problem, Scheme, StridedRows, internals::order_free_pages,
};
use attn_cpu::CpuBackend;
use rstest::rstest;

/// A format that views have.
const PLAIN: KvFormat = KvFormat::same(Scheme::Int8(Int8Scale::Token));

/// Why a step with outputs of the right lengths is refused.
fn refusal(plan: &Plan, q: &[f32], kv: KvSource<'_>) -> Option<Error> {
    let problem = plan.problem();
    let mut out = vec![0.0; problem.out_elements()];
    let mut lse = vec![0.0; problem.rows()];
    DecodeStep::new(plan, q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .err()
}

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
                at: ElementIndex::Row {
                    token: 0,
                    head: 0,
                    dim: 5
                },
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
    let refuse = |q: &[f32]| refusal(&plan, q, KvSource::Cache(&cache)).unwrap();
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
            at: ElementIndex::Row {
                token: 0,
                head: 0,
                dim: 0
            },
            ..
        }
    ));
    assert!(matches!(refuse(&[1e30; 128]), Error::QueryRange { .. }));
    let shorter = Problem::new(Heads::new(2, 1, 64), vec![4]);
    let plan = backend.plan(&shorter, case.format).unwrap();
    let error = refusal(&plan, &[0.0; 128], KvSource::Cache(&cache)).unwrap();
    assert!(
        matches!(
            error,
            Error::KvLen {
                sequence: 0,
                tokens: 5,
                planned: 4
            }
        ),
        "{error}"
    );
}

#[rstest]
#[case::head_dim(Problem::new(Heads::new(2, 1, 72), vec![1]), "head_dim")]
#[case::heads(Problem::new(Heads::new(3, 2, 64), vec![1]), "num_q_heads/num_kv_heads")]
#[case::heads_per_kv(Problem::new(Heads::new(129, 1, 64), vec![1]), "heads_per_kv")]
#[case::q_len(Problem::new(Heads::new(2, 1, 64), vec![1]).q_len((1 << 20) + 1), "q_len")]
#[case::kv_len(Problem::new(Heads::new(2, 1, 64), vec![(1 << 20) + 1]), "kv_len")]
#[case::softcap(Problem::new(Heads::new(2, 1, 64), vec![1]).softcap(0.0), "softcap")]
#[case::sink(Problem::new(Heads::new(2, 1, 64), vec![1]).sinks([0.0, 1.1e6]), "sinks")]
#[case::no_sink(Problem::new(Heads::new(2, 1, 64), vec![1]).sinks([f32::NEG_INFINITY, 0.0]), "sinks")]
#[case::nan_sink(Problem::new(Heads::new(2, 1, 64), vec![1]).sinks([f32::NAN, 0.0]), "sinks")]
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
fn a_plan_has_a_sink_for_each_query_head() {
    let heads = Heads::new(4, 2, 64);
    for given in [0, 2, 5] {
        let problem = Problem::new(heads, [1]).sinks(vec![0.0; given]);
        let error = CpuBackend::new()
            .plan(&problem, KvFormat::INT8)
            .unwrap_err();
        assert!(
            matches!(error, Error::Length { what: "sinks", given: n, needed: 4 } if n == given),
            "{error}"
        );
    }
}

#[rstest]
#[case::page_size(|c: &mut CacheConfig| c.page_size = 48, "page_size")]
#[case::heads(|c: &mut CacheConfig| c.num_kv_heads = 0, "num_kv_heads")]
#[case::head_dim(|c: &mut CacheConfig| c.head_dim = 65.into(), "head_dim")]
#[case::groups(|c: &mut CacheConfig| c.format.k = Scheme::Int4(3), "format")]
#[case::narrow_groups(|c: &mut CacheConfig| c.format.v = Scheme::Int4(8), "format")]
#[case::static_scales(|c: &mut CacheConfig| c.k_tensor_scales = vec![1.0], "k_scales")]
#[case::nan_scale(
    |c: &mut CacheConfig| {
        c.format = KvFormat::same(Scheme::Fp8E4m3);
        (c.k_tensor_scales, c.v_tensor_scales) = (vec![1.0], vec![f32::NAN]);
    },
    "v_scales"
)]
#[case::missing_scales(
    |c: &mut CacheConfig| (c.format, c.k_tensor_scales) = (KvFormat::same(Scheme::Fp8E4m3), vec![1.0]),
    "v_scales"
)]
fn a_cache_names_the_setting_it_refuses(#[case] spoil: fn(&mut CacheConfig), #[case] name: &str) {
    let mut config = CacheConfig::builder(KvFormat::INT4, Heads::new(1, 1, 64))
        .centres(false)
        .sequences(1)
        .max_len(64)
        .build();
    spoil(&mut config);
    let error = CpuBackend::new().create_cache(&config).err().unwrap();
    assert!(
        matches!(
            &error,
            Error::Parameter { what, .. } | Error::MissingScales { what, .. } | Error::ScaleCount { what, .. } if *what == name
        ),
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
    let error = cache.fork(0, 0).unwrap_err();
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
    let error = cache.fork(0, 1).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NotEmpty {
                sequence: 1,
                tokens: 3,
                ..
            }
        ),
        "{error}"
    );
    for (k, v, what) in [(63, 63, "k"), (64, 128, "v")] {
        let error = cache.append(0, &vec![1.0; k], &vec![1.0; v]).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: w, .. } if w == what),
            "{error}"
        );
    }
    let error = order_free_pages(&mut cache, &[0]).unwrap_err();
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

#[rstest]
#[case(127, 2, "out")]
#[case(129, 2, "out")]
#[case(128, 1, "lse")]
#[case(128, 3, "lse")]
fn outputs_of_another_length_than_the_steps_are_refused(
    #[case] out: usize,
    #[case] lse: usize,
    #[case] what: &str,
) {
    let case = Case::new([2, 1], 64, &[5], KvFormat::INT8);
    let backend = CpuBackend::new();
    let cache = case.cache(&backend, 5).unwrap();
    let plan = backend.plan(&case.problem, case.format).unwrap();
    let (q, mut out, mut lse) = (case.q(), vec![7.0; out], vec![7.0; lse]);
    let kv = KvSource::Cache(&cache);
    let error = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .err();
    assert!(
        matches!(error, Some(Error::Length { what: w, .. }) if w == what),
        "{error:?}"
    );
    assert!(out.iter().chain(&lse).all(|x| *x == 7.0));
}

/// What is wrong with a view.
type Spoil = fn(&mut [StridedRows<'_>; 2]);

#[rstest]
#[case::short_codes(|rows: &mut [StridedRows<'_>; 2]| rows[1].codes = &rows[1].codes[..5 * 64 - 1], "v codes")]
#[case::short_scales(|rows: &mut [StridedRows<'_>; 2]| rows[0].scales = &rows[0].scales[..4], "scales")]
#[case::wrapping_tokens(|rows: &mut [StridedRows<'_>; 2]| rows[0].code_strides[2] = 1 << 63, "k codes")]
#[case::wrapping_scales(|rows: &mut [StridedRows<'_>; 2]| rows[1].scale_strides[2] = 1 << 63, "scales")]
#[case::stride_that_wraps_to_0(|rows: &mut [StridedRows<'_>; 2]| rows[0].code_strides[2] = 1 << 62, "k codes")]
fn views_that_do_not_reach_every_token_are_refused(#[case] spoil: Spoil, #[case] what: &str) {
    let mut case = Case::new([2, 1], 64, &[5], PLAIN);
    case.build = Build::Bnsh;
    let contiguous = case.contiguous();
    let whole = contiguous.view(&case.problem).unwrap();
    let mut rows = [*whole.k(), *whole.v()];
    spoil(&mut rows);
    let [k, v] = rows;
    for make in [KvView::new, KvView::with_trusted_values] {
        let error = make(&case.problem, case.format, k, v, [&[], &[]]).unwrap_err();
        assert!(
            matches!(error, Error::Length { what: w, .. } if w == what),
            "{error}"
        );
    }
}

#[test]
fn a_view_of_other_tokens_than_the_problems_is_refused() {
    let mut case = Case::new([2, 1], 64, &[5, 9], PLAIN);
    case.build = Build::Bnsh;
    let contiguous = case.contiguous();
    let view = contiguous.view(&case.problem).unwrap();
    let backend = CpuBackend::new();
    for (lens, variant) in [
        (vec![5, 8], "KvLen"),
        (vec![4, 9], "KvLen"),
        (vec![5, 9, 1], "Batch"),
    ] {
        let problem = Problem::new(Heads::new(2, 1, 64), lens);
        let plan = backend.plan(&problem, case.format).unwrap();
        let q = vec![0.5; problem.out_elements()];
        let error = refusal(&plan, &q, KvSource::View(&view)).unwrap();
        assert_eq!(error.variant().0, variant, "{error}");
    }
}

/// Where the last row begins that a problem of 2 heads and lengths 5 and 70 reads.
fn last_row(strides: [usize; 3]) -> usize {
    strides[0] + strides[1] + 69 * strides[2]
}

#[rstest]
#[case::negative("int8-plain", 0xac00, None)]
#[case::negative_zero("int8-plain", 0x8000, None)]
#[case::infinite("int8-g32", 0x7c00, None)]
#[case::nan("int8-plain", 0x7e00, None)]
#[case::largest("int8-plain", 0x7bff, Some(()))]
fn scales_of_views_are_no_nan_or_negative(
    #[case] format: &str,
    #[case] bits: u16,
    #[case] allowed: Option<()>,
    #[values(0, 1)] side: usize,
    #[values(Build::Bnsh, Build::Bsnh)] build: Build,
) {
    let mut case = Case::new([2, 2], 64, &[5, 70], format.parse().unwrap());
    case.build = build;
    let contiguous = case.contiguous();
    let whole = contiguous.view(&case.problem).unwrap();
    let mut rows = [*whole.k(), *whole.v()];
    let mut scales = rows[side].scales.to_vec();
    let groups = case.format.k.groups(64).count();
    scales[last_row(rows[side].scale_strides) + groups - 1] = bits;
    rows[side].scales = &scales;
    let make = |lens: &[usize]| {
        let mut problem = case.problem.clone();
        problem.kv_lens = lens.to_vec();
        KvView::new(&problem, case.format, rows[0], rows[1], [&[], &[]]).err()
    };
    match (make(&[5, 70]), allowed) {
        (None, Some(())) => (),
        (Some(Error::BadBytes { what, .. }), None) => assert_eq!(what, "view scale"),
        (found, _) => panic!("{found:?}"),
    }
    // A token that no sequence has is not looked at.
    assert!(make(&[5, 69]).is_none());
}

#[rstest]
#[case("f16", 0x7c00, 0x7bff)]
#[case("f16", 0xfe00, 0xfbff)]
#[case("bf16", 0x7f80, 0x5880)]
#[case("bf16", 0xd881, 0xd880)]
#[case("fp8", 0x7f, 0x7e)]
#[case("fp8", 0xff, 0xfe)]
fn codes_of_views_are_numbers(
    #[case] format: &str,
    #[case] bad: u16,
    #[case] good: u16,
    #[values(0, 1)] side: usize,
    #[values(Build::Bnsh, Build::Bsnh)] build: Build,
) {
    let mut case = Case::new([2, 2], 64, &[5, 70], format.parse().unwrap());
    case.build = build;
    let (contiguous, config) = (case.contiguous(), case.config());
    let scales = [&config.k_tensor_scales[..], &config.v_tensor_scales[..]];
    let whole = contiguous.view(&case.problem).unwrap();
    for (code, allowed) in [(bad, false), (good, true)] {
        let mut rows = [*whole.k(), *whole.v()];
        let mut codes = rows[side].codes.to_vec();
        let width = case.format.k.code_bits() / 8;
        let at = last_row(rows[side].code_strides) + 63 * width;
        codes[at..at + width].copy_from_slice(&code.to_le_bytes()[..width]);
        rows[side].codes = &codes;
        let [k, v] = rows;
        let view = KvView::new(&case.problem, case.format, k, v, scales);
        assert_eq!(view.is_ok(), allowed, "{code:#x}: {view:?}");
        let trusted = KvView::with_trusted_values(&case.problem, case.format, k, v, scales);
        assert!(trusted.is_ok());
    }
}

#[test]
fn a_window_of_any_size_sees_the_whole_cache() {
    let mut case = Case::new([2, 1], 64, &[10], KvFormat::INT8);
    let backend = CpuBackend::new();
    let cache = case.cache(&backend, 10).unwrap();
    let whole = check::decode(&backend, &case, &cache).unwrap();
    for window in [usize::MAX, 1 << 63, (1 << 63) - 1, 1 << 32] {
        case.problem.scores.window_left = Some(window);
        let got = check::decode(&backend, &case, &cache).unwrap();
        assert_eq!(got, whole, "{window}");
    }
}

#[test]
fn formats_are_written_as_they_are_read() {
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            let format = KvFormat::new(k, v);
            assert_eq!(format.to_string().parse::<KvFormat>().unwrap(), format);
        }
    }
    assert!("int5".parse::<KvFormat>().is_err());
}
