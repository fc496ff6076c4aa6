//! The SIMD path gives the reference's bits, at any number of threads.

use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, KvFormat, KvSource, Problem, Scheme,
};
use attn_cpu::{CpuBackend, Reference};

fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3.0
    }
}

fn decode(backend: &dyn DecodeAttention, problem: &Problem, format: KvFormat) -> Vec<u32> {
    let max = problem.kv_lens.iter().copied().max().unwrap();
    let config = CacheConfig::new(
        format,
        problem.num_kv_heads,
        problem.head_dim,
        problem.batch(),
        max,
    );
    let mut cache = backend.create_cache(&config).unwrap();
    let mut next = noise(7);
    for (b, len) in problem.kv_lens.iter().enumerate() {
        let n = len * problem.num_kv_heads * problem.head_dim;
        let k: Vec<f32> = (0..n).map(|_| next()).collect();
        let v: Vec<f32> = (0..n).map(|_| next()).collect();
        cache.append(b, &k, &v).unwrap();
    }
    let q: Vec<f32> = (0..problem.rows() * problem.head_dim)
        .map(|_| next())
        .collect();
    let plan = backend.plan(problem, format).unwrap();
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache)).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; problem.rows()]);
    backend
        .decode(
            &step,
            &mut DecodeOutput::new(problem, &mut out, &mut lse).unwrap(),
        )
        .unwrap();
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

#[test]
fn simd_bits_equal_reference_for_every_pair_and_thread_count() {
    let mut problem = Problem::new(6, 2, 128, vec![0, 1, 65, 333, 700]);
    problem.q_len = 2;
    for k in Scheme::ALL {
        for v in Scheme::ALL {
            let format = KvFormat { k, v };
            if format.check(128, 64).is_err() {
                continue;
            }
            let want = decode(&Reference::new(), &problem, format);
            for threads in [1, 2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                let got = pool.install(|| decode(&CpuBackend::new(), &problem, format));
                let first = want.iter().zip(&got).position(|(a, b)| a != b);
                assert_eq!(first, None, "{format} at {threads} threads");
            }
        }
    }
}
