//! What a constant in all keys costs a cache: with centres nothing, without them most of the answer.

use attn_conformance::{noise::uniform, oracle};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, HeadDim, Heads, KvFormat, KvSource, Problem,
    ScoreModifiers,
};
use attn_cpu::CpuBackend;
use rstest::rstest;

const HEADS: Heads = Heads {
    q: 8,
    kv: 1,
    dim: HeadDim::same(128),
};
const TOKENS: usize = 1000;

/// Numbers of about a normal distribution's shape, of variance 1.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let [a, b, c] = [0, 1, 2].map(|i| uniform(3 * seed + i, 0..n));
    (0..n).map(|i| a[i] + b[i] + c[i]).collect()
}

/// Keys, values and queries: keys with a constant of this norm in the ten last dims, to which queries are nearly at right angles, so that soft cap and sinks
/// meet scores of their own size.
fn rows(norm: f32) -> [Vec<f32>; 3] {
    let dim = HEADS.dim.k;
    let (mut k, v, mut q) = (
        normal(1, TOKENS * dim),
        normal(2, TOKENS * dim),
        normal(3, HEADS.q * dim),
    );
    for row in k.chunks_exact_mut(dim) {
        row[dim - 10..]
            .iter_mut()
            .for_each(|x| *x += norm / 10f32.sqrt());
    }
    for row in q.chunks_exact_mut(dim) {
        let mean = row[dim - 10..].iter().sum::<f32>() / 10.0;
        row[dim - 10..].iter_mut().for_each(|x| *x -= mean - 0.005);
    }
    [k, v, q]
}

/// The relative L2 error of outputs against attention in f64 over the rows themselves.
fn error(format: KvFormat, centres: bool, norm: f32, scores: &ScoreModifiers) -> f64 {
    let [k, v, q] = rows(norm);
    let problem = Problem::new(HEADS, [TOKENS]).scores(scores.clone());
    let config = CacheConfig::builder(format, HEADS).max_len(TOKENS);
    let backend = CpuBackend::new();
    let mut cache = backend
        .create_cache(&config.centres(centres).build())
        .unwrap();
    cache.append(0, &k, &v).unwrap();
    let plan = backend.plan(&problem, format).unwrap();
    let mut out = vec![0.0; q.len()];
    let mut step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out).unwrap();
    backend.decode(&mut step).unwrap();
    let (exact, _) = oracle::attend_rows(&problem, &q, &k, &v);
    let pairs = out.iter().map(|x| f64::from(*x)).zip(exact);
    let (off, all) = pairs.fold((0.0, 0.0), |(off, all), (got, want)| {
        (off + (got - want).powi(2), all + want * want)
    });
    (off / all).sqrt()
}

/// The norm is that of the biases of K of Qwen2-7B. Kills scores that lose a centre, or that have only one, beside soft cap and sinks, too.
#[rstest]
fn a_constant_of_norm_605_is_free(
    #[values("int8", "int8/int4", "int4")] format: &str,
    #[values((None, false), (Some(50.0), false), (None, true), (Some(50.0), true))]
    (softcap, has_sinks): (Option<f32>, bool),
) {
    let format: KvFormat = format.parse().unwrap();
    let scores = ScoreModifiers {
        softcap,
        sinks: has_sinks.then(|| vec![7.0; HEADS.q]),
        ..ScoreModifiers::default()
    };
    let error = |centres, norm| error(format, centres, norm, &scores);
    let (without, with) = (error(true, 0.0), error(true, 605.0));
    println!("{format}: {without:.4} without a constant, {with:.4} with one");
    assert!(with <= 1.3 * without, "{with} {without}");
    assert!(error(false, 605.0) > 3.0 * with);
}
