//! Where steps run: on workers that share no CPU, unless the caller says otherwise.

use std::sync::Arc;

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, HeadDim, Heads, KvCache, KvFormat, KvSource, Problem,
};
use attn_cpu::{CpuBackend, Options};
use rayon::{ThreadPoolBuilder, current_num_threads, current_thread_index};

/// The CPUs that the calling thread may run on, as the kernel prints them.
#[cfg(target_os = "linux")]
fn allowed() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.unwrap().trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    });
    ranges.flatten().collect()
}

fn with(options: Options) -> CpuBackend {
    CpuBackend::with_options(&options).unwrap()
}

/// Each worker's CPUs, inside whatever pool the backend enters.
#[cfg(target_os = "linux")]
fn workers(backend: &CpuBackend) -> Vec<Vec<usize>> {
    backend.install(|| rayon::broadcast(|_| allowed()))
}

#[cfg(target_os = "linux")]
fn assert_disjoint(workers: &[Vec<usize>], all: &[usize]) {
    let mut taken = workers.concat();
    taken.sort_unstable();
    let count = taken.len();
    taken.dedup();
    assert_eq!(taken.len(), count, "two workers share a CPU: {workers:?}");
    assert!(workers.iter().all(|cpus| !cpus.is_empty()));
    assert!(taken.iter().all(|cpu| all.contains(cpu)), "{workers:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn workers_have_cpus_of_their_own_among_those_allowed() {
    let all = allowed();
    let backend = CpuBackend::new();
    if (2..=all.len()).contains(&backend.threads()) {
        assert!(backend.install(current_thread_index).is_some());
        assert_disjoint(&workers(&backend), &all);
        // Another backend has the same workers.
        let name = || std::thread::current().id();
        let first = backend.install(|| rayon::broadcast(|_| name()));
        let second = CpuBackend::new().install(|| rayon::broadcast(|_| name()));
        assert_eq!(first, second);
    }
    for threads in 1..=all.len() {
        let backend = with(Options::default().threads(threads));
        assert_eq!(backend.threads(), threads);
        assert_disjoint(&workers(&backend), &all);
    }
    assert_eq!(allowed(), all, "the caller's CPUs stay");
}

#[test]
#[cfg(target_os = "linux")]
fn nothing_is_pinned_that_was_asked_to_be_free_or_has_too_many_workers() {
    let all = allowed();
    for options in [
        Options::default().threads(2).pin(false),
        Options::default().threads(all.len() + 1),
    ] {
        for cpus in workers(&with(options)) {
            assert_eq!(cpus, all);
        }
    }
    let free = with(Options::default().pin(false));
    assert_eq!(free.install(current_thread_index), None);
}

#[test]
fn work_stays_in_the_callers_pool_and_goes_to_the_one_it_brings() {
    let three = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let backend = CpuBackend::new();
    three.install(|| {
        let here = current_thread_index();
        assert_eq!(backend.threads(), 3);
        assert_eq!(backend.install(current_thread_index), here);
    });
    let five = ThreadPoolBuilder::new()
        .num_threads(5)
        .thread_name(|_| "brought".to_owned())
        .build()
        .unwrap();
    let backend = with(Options::default().threads(2).pool(Arc::new(five)));
    let name = || {
        let thread = std::thread::current();
        (thread.name().map(str::to_owned), current_num_threads())
    };
    let brought = (Some("brought".to_owned()), 5);
    assert_eq!(backend.install(name), brought);
    assert_eq!(three.install(|| backend.install(name)), brought);
    assert_eq!(three.install(|| backend.threads()), 5);
}

#[test]
fn numbers_of_threads_beyond_any_machine_are_refused() {
    for threads in [0, attn_cpu::MOST_THREADS + 1] {
        let refused = CpuBackend::with_options(&Options::default().threads(threads));
        let said = refused.err().unwrap().to_string();
        assert!(said.contains("1 to 1024"), "{said}");
    }
}

const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: HeadDim::same(64),
};

fn filled(backend: &CpuBackend, tokens: usize) -> KvCache {
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(tokens)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let x: Vec<f32> = (0..tokens * 2 * 64)
        .map(|i| (i * 31 % 97) as f32 / 48.0 - 1.0)
        .collect();
    cache.append(0, &x, &x).unwrap();
    cache
}

fn bits(backend: &CpuBackend, cache: &KvCache, tokens: usize) -> Vec<u32> {
    let plan = backend
        .plan(&Problem::new(HEADS, [tokens]), KvFormat::INT8)
        .unwrap();
    let (q, mut out) = (vec![0.25; 8 * 64], vec![0.0; 8 * 64]);
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(cache), &mut out);
    backend.decode(&mut step.unwrap()).unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn many_threads_decode_at_once_with_the_same_bits() {
    // One length stays on the caller's thread, one goes to the workers.
    for tokens in [90, 3000] {
        let shared = CpuBackend::new();
        let cache = filled(&shared, tokens);
        let one = with(Options::default().threads(1));
        let want = bits(&one, &cache, tokens);
        let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        std::thread::scope(|scope| {
            for caller in 0..6 {
                let (shared, cache, want, pool) = (&shared, &cache, &want, &pool);
                scope.spawn(move || {
                    let own = CpuBackend::new();
                    for _ in 0..50 {
                        let got = match caller % 3 {
                            0 => bits(shared, cache, tokens),
                            1 => bits(&own, cache, tokens),
                            _ => pool.install(|| bits(shared, cache, tokens)),
                        };
                        assert_eq!(&got, want);
                    }
                });
            }
        });
    }
}
