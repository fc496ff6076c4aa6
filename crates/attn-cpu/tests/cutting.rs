//! A step is cut into segments and spans for threads: whatever the cut, each sequence's answer is the reference's.

use attn_conformance::noise::uniform;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, Problem,
};
use attn_cpu::{CpuBackend, Reference};
use rayon::ThreadPoolBuilder;

fn cache(problem: &Problem, format: KvFormat) -> KvCache {
    let (heads, dim) = (problem.num_kv_heads, problem.head_dim.k);
    let config = CacheConfig::builder(format, problem.heads())
        .unit_tensor_scales()
        .lens(problem.kv_lens.iter().copied())
        .build();
    let mut cache = CpuBackend::new().create_cache(&config).unwrap();
    for (b, len) in problem.kv_lens.iter().enumerate() {
        let [k, v] = [2 * b, 2 * b + 1].map(|seed| uniform(seed as u64, 0..len * heads * dim));
        cache.append(b, &k, &v).unwrap();
    }
    cache
}

fn bits(backend: &dyn DecodeAttention, problem: &Problem, cache: &KvCache) -> Vec<u32> {
    let plan = backend.plan(problem, cache.config().format).unwrap();
    let q = uniform(99, 0..problem.out_elements());
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    let kv = KvSource::Cache(cache);
    let mut step = DecodeStep::new(&plan, &q, kv, &mut out)
        .and_then(|step| step.with_lse(&mut lse))
        .unwrap();
    backend.decode(&mut step).unwrap();
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

/// Compares at several numbers of threads: few items go by segments, many by spans.
fn compare(problem: &Problem, format: KvFormat, threads: &[usize]) {
    let cache = cache(problem, format);
    let want = bits(&Reference::new(), problem, &cache);
    let backend = CpuBackend::new();
    for &threads in threads {
        let pool = ThreadPoolBuilder::new().num_threads(threads);
        let got = pool.build().unwrap();
        let got = got.install(|| bits(&backend, problem, &cache));
        let first = want.iter().zip(&got).position(|(a, b)| a != b);
        assert_eq!(first, None, "{format} at {threads} threads");
        assert_eq!(want.len(), got.len());
    }
}

#[test]
fn sequences_around_the_edges_of_segments_and_spans_have_the_references_bits() {
    // Segments of 256 tokens, spans of 1024.
    let lens = vec![0, 1, 256, 257, 1024, 1025, 0, 2100, 64];
    for format in [KvFormat::INT8, "bf16".parse().unwrap()] {
        let mut problem = Problem::new(Heads::new(2, 1, 64), lens.clone());
        compare(&problem, format, &[1, 2, 16]);
        (problem.num_q_heads, problem.num_kv_heads) = (4, 4);
        (problem.kv_lens, problem.q_lens) = (vec![1300, 300], vec![1, 20]);
        compare(&problem, format, &[1, 3, 16]);
    }
}

#[test]
fn many_rows_of_many_states_have_the_references_bits() {
    // So many that they are merged by several threads.
    let mut problem = Problem::new(Heads::new(8, 2, 64), vec![1100, 0, 700, 5]);
    problem.q_lens = vec![16; problem.batch()];
    compare(&problem, KvFormat::INT8, &[1, 2, 16]);
}

#[test]
fn one_backend_takes_steps_of_any_size_one_after_the_other() {
    let backend = CpuBackend::new();
    for lens in [vec![1500, 40], vec![3], vec![], vec![0, 0], vec![700; 3]] {
        let problem = Problem::new(Heads::new(2, 2, 64), lens);
        if problem.batch() == 0 {
            let one = Problem::new(Heads::new(2, 2, 64), vec![0]);
            assert!(bits(&backend, &problem, &cache(&one, KvFormat::INT4)).is_empty());
            continue;
        }
        let cache = cache(&problem, KvFormat::INT4);
        let want = bits(&Reference::new(), &problem, &cache);
        assert_eq!(bits(&backend, &problem, &cache), want);
    }
}
