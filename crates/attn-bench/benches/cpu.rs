//! Decode steps by the names that `attn bench` uses, on every instruction set of this machine, and reads of as many bytes beside them.
//!
//! `cargo bench -p attn-bench --bench cpu -- single/32-8-ctx8192/int8`. Criterion keeps its caches warm between iterations; `attn bench` times cold.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use attn_bench::{
    CacheLayout, ContiguousCache,
    cpu::{Ceiling, Prepared},
    workloads,
};
use attn_core::{Error, KvView};
use attn_cpu::{CpuBackend, Isa, Options};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

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

criterion_group!(benches, decode, views);
criterion_main!(benches);
