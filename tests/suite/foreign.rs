//! Plans and caches of another backend are refused by the CPU's, and no output is touched.

use attn_conformance::fake::FakePages;
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, Heads, KvFormat, KvSource, Plan, Problem,
};
use attn_cpu::{CpuBackend, Reference};

fn backends() -> [Box<dyn DecodeAttention>; 2] {
    [Box::new(CpuBackend::new()), Box::new(Reference::new())]
}

#[test]
fn another_backends_plan_or_cache_is_refused_and_no_output_is_touched() {
    // A sequence without tokens has nothing to read, and yet its cache is another's.
    let of = |len: usize| backends().into_iter().map(move |backend| (backend, len));
    for (backend, len) in of(5).chain(of(0)) {
        let config = CacheConfig::builder(KvFormat::INT8, Heads::new(1, 1, 64))
            .sequences(1)
            .max_len(5)
            .build();
        let problem = Problem::new(Heads::new(2, 1, 64), vec![len]);
        let x = vec![0.5; len * 64];
        let own = {
            let mut cache = backend.create_cache(&config).unwrap();
            cache.append(0, &x, &x).unwrap();
            cache
        };
        let theirs = {
            // Pages that the CPU's backends do not know.
            let mut cache = FakePages::new(&config).unwrap().hidden().cache().unwrap();
            cache.append(0, &x, &x).unwrap();
            cache
        };
        let plan = backend.plan(&problem, KvFormat::INT8).unwrap();
        let their_plan = Plan::new("theirs", &problem, KvFormat::INT8, ()).unwrap();
        for (plan, cache, name) in [(&their_plan, &own, "plan"), (&plan, &theirs, "cache")] {
            let (q, mut out, mut lse) = ([0.25; 128], [7.0; 128], [7.0; 2]);
            let kv = KvSource::Cache(cache);
            let mut step = DecodeStep::new(plan, &q, kv, &mut out)
                .and_then(|step| step.with_lse(&mut lse))
                .unwrap();
            let error = backend.decode(&mut step).unwrap_err();
            assert!(
                matches!(error, Error::WrongBackend { backend: "cpu", what } if what == name),
                "{error}"
            );
            assert!(out.iter().chain(&lse).all(|x| *x == 7.0), "{name}");
        }
    }
}
