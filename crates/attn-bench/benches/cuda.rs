//! Decode steps and appends on the GPU by the names that `attn bench` uses, and reads of as many bytes beside them.
//!
//! `cargo bench -p attn-bench --features cuda --bench cuda -- gqa8/batch512`. Time is the GPU's own: graphs of launches over caches beyond L2, between CUDA
//! events; criterion decides how many and reports. `attn bench --backend cuda` takes less of a GPU's time.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use std::time::Duration;

use attn_bench::{cuda::CudaTimer, workloads};
use attn_core::Error;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn decode(c: &mut Criterion) {
    let mut timer = match CudaTimer::open() {
        Ok(timer) => timer,
        Err(reason) => return println!("nothing measured: {reason}"),
    };
    for workload in workloads() {
        if let Err(reason) = timer.supports(&workload) {
            println!("{workload} not measured: {reason}");
            continue;
        }
        let mut group = c.benchmark_group(workload.to_string());
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(100))
            .measurement_time(Duration::from_millis(300))
            .throughput(Throughput::Bytes(workload.bytes() as u64));
        // Filled once, and only where criterion's filter lets one of the two pass.
        let (mut idle, mut ready) = (Some(&mut timer), None);
        let mut fill = || {
            let timer = idle.take().expect("asked for once");
            timer.prepare(&workload).expect("the device has the memory")
        };
        group.bench_function("work", |b| {
            let prepared = ready.get_or_insert_with(&mut fill);
            b.iter_custom(|iters| measured(prepared.work_time(iters)));
        });
        group.bench_function("read", |b| {
            let prepared = ready.get_or_insert_with(&mut fill);
            b.iter_custom(|iters| measured(prepared.read_time(iters)));
        });
        group.finish();
    }
}

fn measured(time: Result<Duration, Error>) -> Duration {
    time.expect("the device works")
}

criterion_group!(benches, decode);
criterion_main!(benches);
