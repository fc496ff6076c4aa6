//! A decode step by the scalar reference and by this machine's vectors, compared to the bit. `cargo run --release --example same_bits`

use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvFormat, KvSource, Problem,
};
use attn_cpu::{CpuBackend, Reference};

const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: HeadDim::same(64),
};
const TOKENS: usize = 300;

/// Numbers in −1..1, the same on every run.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mixed = |i: u32| (i + seed).wrapping_mul(0x9E37_79B9).rotate_left(15);
    (0..count as u32)
        .map(|i| mixed(mixed(i)) as i32 as f32 / 2.0_f32.powi(31))
        .collect()
}

/// The outputs of one step over 300 tokens.
fn attended(backend: &dyn DecodeAttention) -> Result<Vec<f32>, Error> {
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(TOKENS)
        .build();
    let mut cache = backend.create_cache(&config)?;
    let rows = TOKENS * HEADS.kv * HEADS.dim.k;
    cache.append(0, &numbers(1, rows), &numbers(2, rows))?;
    let plan = backend.plan(&Problem::new(HEADS, [TOKENS]), KvFormat::INT8)?;
    let q = numbers(3, HEADS.q * HEADS.dim.k);
    let mut out = vec![0.0; q.len()];
    let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)?;
    backend.decode(&mut step)?;
    Ok(out)
}

fn main() -> Result<(), Error> {
    let vectors = CpuBackend::new();
    let [scalar, fast] = [attended(&Reference::new())?, attended(&vectors)?];
    let is_same = scalar
        .iter()
        .zip(&fast)
        .all(|(a, b)| a.to_bits() == b.to_bits());
    println!("{}: {}", vectors.device().name, vectors.device().detail);
    println!(
        "{} outputs, the same bits as the scalar reference: {is_same}; the first is {}",
        fast.len(),
        fast[0]
    );
    Ok(())
}
