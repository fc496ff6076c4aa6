//! A decode step allocates nothing once one of its size has run.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Heads, KvFormat, KvSource, Problem, Rows, RowsMut,
};
use attn_cpu::CpuBackend;

/// The system's allocator, and how often it was asked for memory, by any thread.
struct Counting(AtomicUsize);

// SAFETY: every call goes to `System` as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract; `p` came from `System`.
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract; `p` came from `System`.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting(AtomicUsize::new(0));

fn allocations() -> usize {
    ALLOCATOR.0.load(Ordering::Relaxed)
}

/// Calls of the allocator in each of eight steps, for a step that is called `steps` times before.
/// `apart`: elements between the rows of queries and outputs.
fn counted(format: &str, threads: usize, apart: usize) -> Vec<usize> {
    let format: KvFormat = format.parse().unwrap();
    let (heads, dim, lens) = (2, 64, vec![700, 65, 3]);
    let mut problem = Problem::new(Heads::new(4 * heads, heads, dim), lens.clone());
    problem.q_lens = vec![2; problem.batch()];
    let mut config = CacheConfig::builder(format, problem.heads())
        .unit_tensor_scales()
        .lens(lens.iter().copied())
        .build();
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        scales.fill(0.1);
    }
    let backend = CpuBackend::new();
    let mut cache = backend.create_cache(&config).unwrap();
    for (b, len) in lens.iter().enumerate() {
        let x: Vec<f32> = (0..len * heads * dim).map(|i| (i % 37) as f32).collect();
        cache.append(b, &x, &x).unwrap();
    }
    let q = vec![0.5; problem.rows() * (dim + apart)];
    let shape = [problem.query_tokens(), problem.num_q_heads, dim];
    let strides = [problem.num_q_heads * (dim + apart), dim + apart];
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
    let plan = backend.plan(&problem, format).unwrap();
    let mut step = || {
        let before = allocations();
        let kv = KvSource::Cache(&cache);
        let q = Rows::strided(&q, shape, strides).unwrap();
        let out = RowsMut::strided(&mut out, shape, strides).unwrap();
        let mut step = DecodeStep::new(&plan, q, kv, out)
            .and_then(|step| step.with_lse(&mut lse))
            .unwrap();
        backend.decode(&mut step).unwrap();
        allocations() - before
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.build().unwrap();
    // Each thread's memory grows in the first step that it takes part in.
    pool.install(|| {
        for _ in 0..64 {
            step();
        }
        (0..8).map(|_| step()).collect()
    })
}

/// One test, so that no other allocates meanwhile.
#[test]
fn a_step_allocates_nothing_after_the_first() {
    for format in [
        "int8",
        "int4",
        "int4-g4",
        "bf16",
        "fp8",
        "int8/bf16",
        "f16/int4-g2",
    ] {
        for (threads, apart) in [(1, 0), (2, 0), (1, 16)] {
            let counts = counted(format, threads, apart);
            // rayon's own queues and the test's main thread allocate now and then, whatever steps do; a step that allocates does so each time.
            let worst = counts.iter().filter(|count| **count > 0).count();
            assert!(
                worst <= 1,
                "{format} at {threads} threads allocates: {counts:?}"
            );
        }
    }
}
