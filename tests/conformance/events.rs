//! What a subscriber is told: once where something is made or short, at each step at level trace alone.

use attn_conformance::{
    case::noise,
    events::{Told, told},
    trials::Trials,
};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvFormat, KvSource, Problem,
    events,
};
use tracing::Level;

const HEADS: Heads = Heads {
    q: 2,
    kv: 1,
    dim: HeadDim::same(64),
};

/// Adds the tests of this file.
pub fn add(trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    trials
        .test("events: pools, short pages and plans", |backend| {
            pools_and_plans(&**backend);
        })
        .test("events: a kernel is loaded once", |backend| {
            kernels(&**backend)
        })
        .test("events: steps are spans at level trace", |backend| {
            steps(&**backend)
        })
}

fn messages(of: &[Told]) -> Vec<(&str, &str)> {
    of.iter().map(|t| (&*t.target, &*t.message)).collect()
}

fn fields<'a, const N: usize>(of: &'a Told, names: [&str; N]) -> [Option<&'a str>; N] {
    names.map(|name| of.field(name))
}

fn pools_and_plans(backend: &dyn DecodeAttention) {
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .sequences(3)
        .pages(2)
        .build();
    let (said, mut cache) = told(Level::DEBUG, || backend.create_cache(&config).unwrap());
    let said: Vec<Told> = said
        .into_iter()
        .filter(|t| t.target != events::KERNEL)
        .collect();
    assert_eq!(messages(&said), [(events::CACHE, "pool allocated")]);
    let bytes = config.pool_bytes().unwrap().to_string();
    assert_eq!(
        fields(&said[0], ["pages", "bytes", "format", "sequences"]),
        [Some("2"), Some(&*bytes), Some("int8"), Some("3")]
    );
    let x = noise(1, 65 * 64);
    cache.append(0, &x, &x).unwrap();
    let (said, refused) = told(Level::DEBUG, || cache.append(1, &x, &x));
    assert!(matches!(refused, Err(Error::CacheFull { .. })));
    assert_eq!(messages(&said), [(events::CACHE, "pages short")]);
    assert_eq!(said[0].level, Level::DEBUG);
    assert_eq!(
        fields(&said[0], ["needed", "free", "total"]),
        [Some("2"), Some("0"), Some("2")]
    );
    let problem = Problem::new(HEADS, [700, 9]).q_lens([2, 1]);
    let (said, plan) = told(Level::DEBUG, || backend.plan(&problem, KvFormat::INT8));
    let _ = plan.unwrap();
    let said: Vec<Told> = said
        .into_iter()
        .filter(|t| t.target != events::KERNEL)
        .collect();
    assert_eq!(messages(&said), [(events::PLAN, "prepared")]);
    let name = backend.device().backend;
    assert_eq!(
        fields(
            &said[0],
            ["backend", "format", "sequences", "query_tokens", "longest"]
        ),
        [Some(name), Some("int8"), Some("2"), Some("3"), Some("700")]
    );
}

/// With a pair of schemes that no other test has.
fn kernels(backend: &dyn DecodeAttention) {
    let format: KvFormat = "int8-plain/int4-r4-w4".parse().unwrap();
    let heads = Heads {
        dim: 256.into(),
        ..HEADS
    };
    let problem = Problem::new(heads, [64]);
    if backend.supports(&problem, format).is_err() {
        return;
    }
    let config = CacheConfig::builder(format, heads).max_len(64).build();
    let run = || {
        let mut cache = backend.create_cache(&config).unwrap();
        let x = noise(2, 3 * 256);
        cache.append(0, &x, &x).unwrap();
        let plan = backend.plan(&problem, format).unwrap();
        let (q, mut out) = (noise(3, 512), vec![0.0; 512]);
        let step = DecodeStep::new(&plan, &q[..], KvSource::Cache(&cache), &mut out[..]);
        backend.decode(&mut step.unwrap()).unwrap();
    };
    let loaded = || {
        let (mut said, ()) = told(Level::DEBUG, run);
        said.retain(|t| t.target == events::KERNEL);
        said
    };
    let first = loaded();
    let name = backend.device().backend;
    assert_eq!(first.is_empty(), name == "cpu", "{first:?}");
    for kernel in &first {
        let [backend, file, arch, origin, ms] =
            fields(kernel, ["backend", "kernel", "arch", "origin", "ms"]);
        assert_eq!(backend, Some(name));
        assert!(file.is_some_and(|x| !x.is_empty()) && arch.is_some_and(|x| !x.is_empty()));
        assert!(["embedded", "cached", "compiled"].contains(&origin.unwrap()));
        assert!(ms.unwrap().parse::<f64>().unwrap() > 0.0);
    }
    assert_eq!(loaded(), []);
}

fn steps(backend: &dyn DecodeAttention) {
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(64)
        .build();
    let mut cache = backend.create_cache(&config).unwrap();
    let plan = backend
        .plan(&Problem::new(HEADS, [64]), KvFormat::INT8)
        .unwrap();
    let (x, q, mut out) = (noise(4, 64), noise(5, 128), vec![0.0; 128]);
    let mut run = || {
        for _ in 0..3 {
            cache.append(0, &x, &x).unwrap();
            let step = DecodeStep::new(&plan, &q[..], KvSource::Cache(&cache), &mut out[..]);
            backend.decode(&mut step.unwrap()).unwrap();
        }
    };
    // What is loaded at the first step is told there.
    run();
    let (said, ()) = told(Level::DEBUG, &mut run);
    assert_eq!(said, []);
    let (said, ()) = told(Level::TRACE, &mut run);
    let step = [(events::STEP, "append"), (events::STEP, "attend")];
    assert_eq!(messages(&said), step.repeat(3));
    assert!(said.iter().all(|t| t.level == Level::TRACE));
    assert_eq!(
        fields(&said[0], ["sequences", "tokens"]),
        [Some("1"), Some("1")]
    );
    let name = backend.device().backend;
    assert_eq!(
        fields(&said[1], ["backend", "sequences", "query_tokens"]),
        [Some(name), Some("1"), Some("1")]
    );
}
