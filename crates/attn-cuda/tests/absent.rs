//! Without a GPU the backend says so, and says what mends it; with one it attends.

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, KvFormat, KvSource, Problem, Unsupported,
};
use attn_cpu::CpuBackend;

#[test]
fn opening_never_panics_and_names_the_next_step() {
    match attn_cuda::open() {
        Ok(backend) => assert_eq!(backend.device().backend, "cuda"),
        Err(Unsupported::Absent {
            backend, next_step, ..
        }) => assert!(backend == "cuda" && !next_step.is_empty()),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn another_backends_cache_and_plan_are_refused() {
    let Ok(gpu) = attn_cuda::open() else {
        eprintln!("skipped: no GPU");
        return;
    };
    let cpu = CpuBackend::new();
    let config = CacheConfig::new(KvFormat::INT8, 1, 64, 1, 64);
    let mut cache = cpu.create_cache(&config).unwrap();
    cache.append(0, &[0.5; 64], &[2.0; 64]).unwrap();
    let problem = Problem::new(4, 1, 64, vec![1]);
    let q = [1.0; 256];
    for plan in [
        gpu.plan(&problem, KvFormat::INT8).unwrap(),
        cpu.plan(&problem, KvFormat::INT8).unwrap(),
    ] {
        let (mut out, mut lse) = ([0.0; 256], [0.0; 4]);
        let kv = KvSource::Cache(&cache);
        let mut step = DecodeStep::new(&plan, &q, kv, &mut out, &mut lse).unwrap();
        let error = gpu.decode(&mut step).unwrap_err();
        assert!(
            matches!(
                error,
                Error::WrongBackend {
                    backend: "cuda",
                    ..
                }
            ),
            "{error}"
        );
    }
}
