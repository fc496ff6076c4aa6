//! The caches, problems and calls that examples share.

use attn_core::{
    CacheConfig, DecodeStep, Error, HeadDim, Heads, HostPages, KvCache, KvSource, Plan, Problem,
};

/// What was called, and why it was refused.
pub type Refusal = (&'static str, Error);

pub const DIM: usize = 64;
pub const HEADS: Heads = Heads {
    q: 2,
    kv: 1,
    dim: HeadDim::same(DIM),
};
/// Elements of a token's K.
pub const ROW: usize = DIM;

pub fn config(format: &str) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .unit_tensor_scales()
        .sequences(3)
        .pages(20)
        .build()
}

pub fn cache_of(config: CacheConfig) -> KvCache {
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// A cache whose sequence 0 has so many tokens.
pub fn filled(format: &str, tokens: usize) -> KvCache {
    let mut cache = cache_of(config(format));
    append(&mut cache, 0, tokens).unwrap();
    cache
}

pub fn append(cache: &mut KvCache, sequence: usize, tokens: usize) -> Result<(), Error> {
    let x = vec![0.5; tokens * cache.config().num_kv_heads * cache.config().head_dim.k];
    cache.append(sequence, &x, &x)
}

/// Why a step over a cache's first sequences is refused, with queries of one value.
pub fn attend(cache: &KvCache, problem: &Problem, format: &str, q: f32) -> Error {
    let plan = Plan::new("cpu", problem, format.parse().unwrap(), ()).unwrap();
    let q = vec![q; problem.out_elements()];
    let mut out = q.clone();
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(cache), &mut out);
    step.err().unwrap()
}

pub fn problem(lens: &[usize]) -> Problem {
    Problem::new(HEADS, lens)
}
