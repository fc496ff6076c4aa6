//! Decode steps by the names that `attn bench` uses, on every instruction set of this machine, and reads of as many bytes beside them.
//!
//! `cargo bench -p attn-cpu -- single/32-8-ctx8192/int8`. Criterion keeps its caches warm between iterations; `attn bench` times cold.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use attn_core::{
    Error, KvView,
    bench::{Place, Rows, shapes},
};
use attn_cpu::{
    CpuBackend, Isa,
    bench::{Ceiling, Prepared},
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn decode(c: &mut Criterion) {
    for shape in shapes().iter().filter(|s| s.family == "single") {
        let mut group = c.benchmark_group(shape.to_string());
        group.sample_size(10);
        group.throughput(Throughput::Bytes(shape.bytes() as u64));
        for isa in Isa::available() {
            let backend = CpuBackend::with_isa(isa).expect("it is available");
            let mut prepared = None;
            group.bench_function(BenchmarkId::from_parameter(isa), |b| {
                let prepared = prepared.get_or_insert_with(|| {
                    Prepared::new(&backend, shape).expect("the shapes are legal")
                });
                b.iter(|| prepared.step(&backend).expect("the CPU decodes"));
            });
        }
        let mut ceiling = None;
        for streams in Ceiling::STREAMS {
            group.bench_function(BenchmarkId::new("read", streams), |b| {
                let ceiling = ceiling.get_or_insert_with(|| Ceiling::new(shape.bytes()));
                b.iter(|| ceiling.read(shape.bytes(), streams));
            });
        }
        group.finish();
    }
}

/// What it costs to check the scales and codes of a contiguous cache, beside taking them on trust.
fn views(c: &mut Criterion) {
    for shape in shapes().iter().filter(|s| s.place != Place::Pages) {
        let mut group = c.benchmark_group(format!("view/{shape}"));
        group.sample_size(10);
        group.throughput(Throughput::Bytes(shape.bytes() as u64));
        let mut rows = None;
        let mut bench = |name, view: fn(&Rows) -> Result<KvView<'_>, Error>| {
            group.bench_function(name, |b| {
                let rows = rows.get_or_insert_with(|| Rows::new(shape));
                b.iter(|| view(rows).expect("the rows are values"));
            });
        };
        bench("checked", Rows::checked_view);
        bench("trusted", Rows::view);
        group.finish();
    }
}

criterion_group!(benches, decode, views);
criterion_main!(benches);
