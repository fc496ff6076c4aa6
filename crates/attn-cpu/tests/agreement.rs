//! Vector kernels and reference on tiny steps of every kind: a quick subset of `bits.rs`, which takes minutes.

use attn_conformance::noise::uniform;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, KvView, Problem,
    Scheme, StridedRows,
};
use attn_cpu::{CpuBackend, Reference};

const FORMATS: [&str; 21] = [
    "f16",
    "bf16",
    "fp8",
    "int8",
    "int8-plain",
    "int8-g32",
    "int8-tensor",
    "int4",
    "int4-r2-w4",
    "int4-w0",
    "int4-g1",
    "int4-g4",
    "int8/int4",
    "int4-w4/int4-g4",
    "int8-tensor/int8-g32",
    "int4-g2/int8-tensor",
    "int4-g4/bf16",
    "int8-g32/fp8",
    "f16/int8-g32",
    "bf16/int4-g4",
    "fp8/int8-tensor",
];

/// Numbers between −2 and 2.
fn noise(seed: usize, count: usize) -> Vec<f32> {
    let numbers = uniform(seed as u64, 0..count);
    numbers.into_iter().map(|x| 2.0 * x).collect()
}

fn format(name: &str) -> KvFormat {
    name.parse().expect("a format's name")
}

/// K and V of each sequence, `[kv_len, num_kv_heads, head_dim]`.
type Sequences = Vec<[Vec<f32>; 2]>;

fn sequences(problem: &Problem) -> Sequences {
    let row = problem.num_kv_heads * problem.head_dim.k;
    let one = |(b, len): (usize, &usize)| [1, 2].map(|side| noise(3 * b + side, len * row));
    problem.kv_lens.iter().enumerate().map(one).collect()
}

fn cached(problem: &Problem, format: KvFormat, sequences: &Sequences) -> KvCache {
    let mut config = CacheConfig::builder(format, problem.heads())
        .unit_tensor_scales()
        .lens(problem.kv_lens.iter().copied())
        .build();
    config.k_tensor_scales.fill(0.02);
    config.v_tensor_scales.fill(0.03);
    let mut cache = CpuBackend::new().create_cache(&config).unwrap();
    for (b, [k, v]) in sequences.iter().enumerate() {
        cache.append(b, k, v).unwrap();
    }
    cache
}

fn decode(
    backend: &dyn DecodeAttention,
    problem: &Problem,
    format: KvFormat,
    q: &[f32],
    kv: KvSource<'_>,
) -> Vec<f32> {
    let plan = backend.plan(problem, format).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    let mut step = DecodeStep::new(&plan, q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    [out, lse].concat()
}

/// Holds the vector kernels on one thread to the reference.
fn agree(problem: &Problem, format: KvFormat, q: &[f32], kv: KvSource<'_>) {
    let want = decode(&Reference::new(), problem, format, q, kv);
    let backend = CpuBackend::new();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let got = pool
        .unwrap()
        .install(|| decode(&backend, problem, format, q, kv));
    let first = (want.iter().zip(&got)).position(|(a, b)| a.to_bits() != b.to_bits());
    let pair = first.map(|i| (i, want[i], got[i]));
    assert_eq!(pair, None, "{format}, kv_lens {:?}", problem.kv_lens);
}

fn agree_on(problem: &Problem, format: KvFormat, q: &[f32], sequences: &Sequences) {
    let cache = cached(problem, format, sequences);
    agree(problem, format, q, KvSource::Cache(&cache));
}

#[test]
fn full_and_open_pages_of_every_format_have_the_references_bits() {
    let mut problem = Problem::new(Heads::new(2, 1, 64), vec![70, 0, 257]);
    problem.q_lens = vec![2; problem.batch()];
    let (q, sequences) = (noise(9, problem.out_elements()), sequences(&problem));
    for name in FORMATS {
        agree_on(&problem, format(name), &q, &sequences);
    }
}

#[test]
fn masks_caps_and_slopes_have_the_references_bits() {
    let mut problem = Problem::new(Heads::new(4, 2, 64), vec![3, 300]);
    problem.q_lens = vec![3; problem.batch()];
    problem.scores.alibi_slopes = Some(vec![0.5, 0.25, 0.125, 0.0]);
    let (q, sequences) = (noise(9, problem.out_elements()), sequences(&problem));
    for (causal, window, cap) in [
        (true, Some(70), None),
        (true, Some(0), Some(5.0)),
        (false, None, Some(50.0)),
    ] {
        (
            problem.scores.causal,
            problem.scores.window_left,
            problem.scores.softcap,
        ) = (causal, window, cap);
        for name in ["int8", "int4", "bf16"] {
            agree_on(&problem, format(name), &q, &sequences);
        }
    }
}

#[test]
fn segments_with_far_maxima_have_the_references_bits() {
    let problem = Problem::new(Heads::new(2, 1, 64), vec![700]);
    let (q, mut sequences) = (noise(9, problem.out_elements()), sequences(&problem));
    // The scores of the second segment are hundreds above those of the first and the third.
    let second = &mut sequences[0][0][256 * 64..512 * 64];
    second.iter_mut().for_each(|x| *x *= 100.0);
    for name in ["int8", "int4", "f16", "bf16"] {
        agree_on(&problem, format(name), &q, &sequences);
    }
}

#[test]
fn zeros_and_small_numbers_have_the_references_bits() {
    let problem = Problem::new(Heads::new(2, 1, 64), vec![130, 5]);
    let q = noise(9, problem.out_elements());
    for by in [0.0, 0.01] {
        let mut scaled = sequences(&problem);
        let numbers = scaled.iter_mut().flatten().flatten();
        numbers.for_each(|x| *x *= by);
        for name in FORMATS {
            agree_on(&problem, format(name), &q, &scaled);
            agree_on(&problem, format(name), &vec![0.0; q.len()], &scaled);
        }
    }
}

#[test]
fn six_spans_of_one_sequence_have_the_references_bits() {
    // One thread takes whole spans, whose states are merged one by one; others would be grouped.
    let problem = Problem::new(Heads::new(1, 1, 64), vec![5 * 1024 + 300]);
    let (q, sequences) = (noise(9, problem.out_elements()), sequences(&problem));
    agree_on(&problem, KvFormat::INT8, &q, &sequences);
}

#[test]
fn a_prompt_of_one_split_that_ends_in_its_second_span_has_the_references_bits() {
    // As many query tokens and heads as are not cut into spans, so that one split merges its spans: the second is of one segment, and not the first.
    for (len, q_len) in [(1100, 20), (1280, 33)] {
        let heads = Heads::new(4, 4, 64);
        let problem = Problem::new(heads, vec![len]).q_len(q_len);
        let (q, sequences) = (noise(9, problem.out_elements()), sequences(&problem));
        for name in ["int8", "bf16"] {
            agree_on(&problem, format(name), &q, &sequences);
        }
    }
}

/// Rows of a view, `[sequence][token][head]`, with the f16 scales that the scheme has.
fn rows(scheme: Scheme, seed: usize, problem: &Problem, capacity: usize) -> (Vec<u8>, Vec<u16>) {
    let rows = problem.batch() * capacity * problem.num_kv_heads;
    let numbers = noise(seed, rows * problem.head_dim.k);
    let code = |x: &f32| match scheme {
        Scheme::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
        Scheme::Bf16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
        _ => vec![((x * 40.0) as i32 as u8) & 0xf7],
    };
    let scale = |i: usize| half::f16::from_f32(0.01 + (i % 13) as f32 * 0.003).to_bits();
    let groups = if scheme.has_row_scales() {
        rows * scheme.groups(problem.head_dim.k).count()
    } else {
        0
    };
    let codes = numbers.iter().flat_map(code).collect();
    (codes, (0..groups).map(scale).collect())
}

#[test]
fn views_of_two_schemes_have_the_references_bits() {
    let (heads, dim, capacity) = (2, 64, 90);
    let problem = Problem::new(Heads::new(4, heads, dim), vec![70, 0, 90]);
    let q = noise(9, problem.out_elements());
    for name in [
        "int8-plain/fp8",
        "bf16/int8-plain",
        "int8-g32/int8-tensor",
        "int8-tensor/int8-plain",
        "f16/bf16",
        "int8-plain/int8-g32",
    ] {
        let format = format(name);
        let [k, v] = [(format.k, 1), (format.v, 2)]
            .map(|(scheme, seed)| rows(scheme, seed, &problem, capacity));
        fn side<'a>(scheme: Scheme, (codes, scales): &'a (Vec<u8>, Vec<u16>)) -> StridedRows<'a> {
            let bytes = 64 * scheme.code_bits() / 8;
            StridedRows::bsnh(codes, scales, 2, 90, bytes, scheme.groups(64).count())
        }
        let tensor = [format.k, format.v].map(|scheme| match scheme.has_tensor_scale() {
            true => vec![0.5; heads],
            false => Vec::new(),
        });
        let scales = [&tensor[0][..], &tensor[1][..]];
        let view = KvView::new(
            &problem,
            format,
            side(format.k, &k),
            side(format.v, &v),
            scales,
        );
        agree(&problem, format, &q, KvSource::View(&view.unwrap()));
    }
}

#[test]
fn query_tokens_on_both_sides_of_a_tile_read_residuals_each_by_its_own_position() {
    for len in [129, 190, 257, 320] {
        let mut problem = Problem::new(Heads::new(2, 1, 64), vec![len]);
        problem.q_lens = vec![5; problem.batch()];
        let (q, sequences) = (noise(9, problem.out_elements()), sequences(&problem));
        for name in ["int4", "int8/int4", "int4-w4/int4", "int4/int4-g1"] {
            for causal in [true, false] {
                problem.scores.causal = causal;
                agree_on(&problem, format(name), &q, &sequences);
            }
        }
    }
}

#[test]
fn plans_are_one_piece_without_a_workspace_and_of_formats_that_there_are() {
    let backends: [&dyn DecodeAttention; 2] = [&Reference::new(), &CpuBackend::new()];
    for backend in backends {
        let problem = Problem::new(Heads::new(2, 1, 80), vec![5]);
        let plan = backend.plan(&problem, KvFormat::INT8).unwrap();
        assert_eq!(plan.problem(), &problem);
        for name in ["int8-g32", "int4-g4"] {
            assert!(backend.plan(&problem, format(name)).is_err(), "{name}");
        }
        let problem = problem.q_lens([1, 1]);
        assert!(backend.plan(&problem, KvFormat::INT8).is_err());
    }
}
