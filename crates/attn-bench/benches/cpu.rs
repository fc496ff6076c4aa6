//! Decode steps by the names that `attn bench` uses, on every instruction set of this machine, and reads of as many bytes beside them;
//! appends of one token and of 2048; sequences out of a cache and back in.
//!
//! `cargo bench -p attn-bench --bench cpu -- single/32-8-ctx8192/int8`, `… -- append/`. Criterion keeps its caches warm between iterations;
//! `attn bench` times cold.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use attn_bench::{
    CacheLayout, ContiguousCache,
    cpu::{Ceiling, Prepared},
    noise, workloads,
};
use attn_core::{CacheConfig, DecodeAttention, Error, Heads, KvFormat, KvView, SequenceImage};
use attn_cpu::{CpuBackend, Isa, Options};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

fn decode(c: &mut Criterion) {
    for workload in workloads().iter().filter(|w| w.family == "single") {
        let mut group = c.benchmark_group(workload.to_string());
        group.sample_size(10);
        group.throughput(Throughput::Bytes(workload.bytes() as u64));
        for isa in Isa::available() {
            let backend =
                CpuBackend::with_options(&Options::default().isa(isa)).expect("it is available");
            let mut prepared = None;
            group.bench_function(BenchmarkId::from_parameter(isa), |b| {
                let prepared = prepared.get_or_insert_with(|| {
                    Prepared::new(&backend, workload).expect("the workloads are legal")
                });
                b.iter(|| prepared.step(&backend).expect("the CPU decodes"));
            });
        }
        let (mut ceiling, cpu) = (None, CpuBackend::new());
        for streams in Ceiling::STREAMS {
            group.bench_function(BenchmarkId::new("read", streams), |b| {
                let ceiling = ceiling.get_or_insert_with(|| Ceiling::new(workload.bytes()));
                b.iter(|| cpu.install(|| ceiling.read(workload.bytes(), streams)));
            });
        }
        group.finish();
    }
}

/// What it costs to check the scales and codes of a contiguous cache, beside taking them on trust.
fn views(c: &mut Criterion) {
    for workload in workloads().iter().filter(|w| w.cache != CacheLayout::Pages) {
        let mut group = c.benchmark_group(format!("view/{workload}"));
        group.sample_size(10);
        group.throughput(Throughput::Bytes(workload.bytes() as u64));
        let mut rows = None;
        let mut bench = |name, view: fn(&ContiguousCache) -> Result<KvView<'_>, Error>| {
            group.bench_function(name, |b| {
                let rows = rows.get_or_insert_with(|| ContiguousCache::new(workload));
                b.iter(|| view(rows).expect("the rows are values"));
            });
        };
        bench("checked", ContiguousCache::checked_view);
        bench("trusted", ContiguousCache::view);
        group.finish();
    }
}

/// Appends of bf16 tokens, 8 KV heads of 128 dims, behind what the cache holds already; rates count the bytes of the bf16 input.
fn append(c: &mut Criterion) {
    const ROW: usize = 8 * 128;
    const MOST: usize = 4096;
    let heads = Heads::new(32, 8, 128);
    let rows = |seed| -> Vec<bf16> {
        let rows = noise(seed, 2048 * ROW);
        rows.into_iter().map(bf16::from_f32).collect()
    };
    let (k, v) = (rows(1), rows(2));
    for format in ["int8", "int4", "int4-g1", "int8/int4", "bf16", "fp8"] {
        let format: KvFormat = format.parse().expect("a format");
        let mut group = c.benchmark_group(format!("append/{format}"));
        group.sample_size(20);
        for (tokens, threads) in [(1, 1), (2048, 1), (2048, 2)] {
            let options = Options::default().threads(threads);
            let backend = CpuBackend::with_options(&options).expect("the system starts threads");
            let config = CacheConfig::builder(format, heads)
                .unit_tensor_scales()
                .max_len(MOST)
                .build();
            let mut cache = backend.create_cache(&config).expect("a legal cache");
            let [k, v] = [&k, &v].map(|x| &x[..tokens * ROW]);
            group.throughput(Throughput::Bytes(2 * size_of_val(k) as u64));
            let name = format!("{tokens} tokens, {threads} threads");
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter(|| {
                    if cache.table().lens[0] + tokens > MOST {
                        cache.truncate(0, 0).expect("a sequence of the cache");
                    }
                    cache.append(0, k, v).expect("the cache has room");
                });
            });
        }
        group.finish();
    }
}

/// A sequence of 4096 tokens out of a cache and back in, by its image in memory, beside a plain copy of as many bytes.
fn image(c: &mut Criterion) {
    const TOKENS: usize = 4096;
    let heads = Heads::new(32, 8, 128);
    let [k, v] = [1, 2].map(|seed| noise(seed, TOKENS * heads.kv * heads.dim.k));
    let backend = CpuBackend::new();
    for format in ["int8", "int4", "int4-g1", "bf16", "fp8"] {
        let format: KvFormat = format.parse().expect("a format");
        let config = CacheConfig::builder(format, heads)
            .unit_tensor_scales()
            .sequences(2);
        let config = config.max_len(TOKENS).build();
        let mut cache = backend.create_cache(&config).expect("a legal cache");
        cache.append(0, &k, &v).expect("the cache has room");
        let image = cache.image(0).expect("a sequence of the cache");
        let mut bytes = image.as_bytes().to_vec();
        let mut group = c.benchmark_group(format!("image/{format}"));
        group.sample_size(20);
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function("copy", |b| {
            b.iter(|| bytes.copy_from_slice(image.as_bytes()));
        });
        group.bench_function("copy to new memory", |b| {
            b.iter(|| image.as_bytes().to_vec());
        });
        group.bench_function("image", |b| {
            b.iter(|| cache.image(0).expect("a sequence of the cache"));
        });
        group.bench_function("write_image", |b| {
            let mut write = || cache.write_image(0, &mut bytes);
            b.iter(|| write().expect("a sequence of the cache"));
        });
        group.bench_function("from_bytes", |b| {
            b.iter(|| SequenceImage::from_bytes(&bytes[..]).expect("an image"));
        });
        group.bench_function("restore", |b| {
            b.iter(|| {
                cache.free_sequence(1).expect("a sequence of the cache");
                cache.restore(1, &image).expect("the cache has room");
            });
        });
        group.finish();
    }
}

criterion_group!(benches, decode, append, image, views);
criterion_main!(benches);
