//! One decode step: the scalar specification beside the SIMD path, in bytes of cache per second.
//!
//! `cargo bench -p attn-cpu`

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use std::hint::black_box;

use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, KvFormat, KvSource, Problem, Scheme,
};
use attn_cpu::{CpuBackend, Reference};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn decode(c: &mut Criterion) {
    let problem = Problem::new(8, 2, 128, vec![8192]);
    let simd = CpuBackend::new();
    let reference = Reference::new();
    let mut group = c.benchmark_group("decode_8_2_heads_d128_ctx8192");
    group.sample_size(10);
    for format in [KvFormat::INT8, KvFormat::INT4, KvFormat::same(Scheme::Bf16)] {
        let config = CacheConfig::new(format, 2, 128, 1, 8192);
        let mut cache = simd.create_cache(&config).expect("a legal config");
        let wave = |i: usize, f: f32| (i as f32 * f).sin() * 2.0;
        let k: Vec<f32> = (0..8192 * 256).map(|i| wave(i, 0.37)).collect();
        let v: Vec<f32> = (0..8192 * 256).map(|i| wave(i, 0.73)).collect();
        cache.append(0, &k, &v).expect("the pool holds 8192 tokens");
        let q: Vec<f32> = (0..8 * 128).map(|i| wave(i, 0.11)).collect();
        group.throughput(Throughput::Bytes(
            (8192.0 * 2.0 * config.layout().bytes_per_token()) as u64,
        ));
        let backends: [(&str, &dyn DecodeAttention); 2] =
            [("reference", &reference), ("simd", &simd)];
        for (name, backend) in backends {
            let plan = backend.plan(&problem, format).expect("a legal problem");
            let (mut out, mut lse) = (vec![0.0; 8 * 128], vec![0.0; 8]);
            group.bench_function(BenchmarkId::new(name, format), |b| {
                b.iter(|| {
                    let step = DecodeStep::new(&plan, black_box(&q), KvSource::Cache(&cache))
                        .expect("checked");
                    let mut output =
                        DecodeOutput::new(&problem, &mut out, &mut lse).expect("checked");
                    backend.decode(&step, &mut output).expect("the CPU decodes");
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decode);
criterion_main!(benches);
