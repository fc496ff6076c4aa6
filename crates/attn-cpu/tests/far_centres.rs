//! Scores that count on the grid from a base far from its middle, and from one that is not on it: every instruction set has the reference's bits.

use attn_conformance::{check::first_difference, noise::uniform};
use attn_core::{
    CacheConfig, DecodeAttention, DecodeStep, HeadDim, Heads, KvFormat, KvSource, Problem,
};
use attn_cpu::{CpuBackend, Isa, Options, Reference};

const DIM: usize = 64;
const TOKENS: usize = 190;
const HEADS: Heads = Heads {
    q: 4,
    kv: 1,
    dim: HeadDim::same(DIM),
};

/// Keys that are near one vector in the first tile and near `factor` times it behind, and queries along it, whose scores against it are about `score` in base 2.
fn rows(factor: f32, score: f32) -> [Vec<f32>; 3] {
    let along: Vec<f32> = uniform(1, 0..DIM).iter().map(|x| x + 2.0).collect();
    let square: f32 = along.iter().map(|x| x * x).sum();
    let noise = |seed, n: usize| uniform(seed, 0..n * DIM);
    let mut k = noise(2, TOKENS);
    for (t, key) in k.chunks_exact_mut(DIM).enumerate() {
        let factor = if t < 64 { 1.0 } else { factor };
        let pairs = key.iter_mut().zip(&along);
        pairs.for_each(|(x, c)| *x = 3e-4 * *x + factor * c);
    }
    let mut q = noise(3, HEADS.q);
    for (h, q) in q.chunks_exact_mut(DIM).enumerate() {
        // Rows a little apart, so that bases are of both parities.
        let step = (score + 0.37 * h as f32) / (square * std::f32::consts::LOG2_E);
        let pairs = q.iter_mut().zip(&along);
        pairs.for_each(|(x, c)| *x = 1e-3 * *x + step * c);
    }
    [k, noise(4, TOKENS), q]
}

/// Kills vector kernels that add the exponent to a base which has no room for it, and a fused sum in two steps where the base is off the grid. The window hides
/// the first tile, whose scores would outweigh the others.
#[test]
fn every_instruction_set_has_the_bits_of_the_reference() {
    let shapes = [
        (-3.0, 20_000.0),
        (0.43, -70_000.0),
        (0.03, -70_000.0),
        (0.5, 60_000.0),
        (1.3, -40_000.0),
    ];
    for (factor, score) in shapes {
        for format in [KvFormat::INT8, KvFormat::INT4] {
            compare(format, factor, score);
        }
    }
}

fn compare(format: KvFormat, factor: f32, score: f32) {
    let [k, v, q] = rows(factor, score);
    let mut problem = Problem::new(HEADS, [TOKENS]).window_left(100);
    problem.scores.softmax_scale = Some(1.0);
    let config = CacheConfig::builder(format, HEADS).max_len(TOKENS);
    let config = config.centres(true).build();
    let results = |backend: &dyn DecodeAttention| {
        let mut cache = backend.create_cache(&config).unwrap();
        cache.append(0, &k, &v).unwrap();
        let plan = backend.plan(&problem, format).unwrap();
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; HEADS.q]);
        let step = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out);
        let mut step = step.and_then(|step| step.with_lse(&mut lse)).unwrap();
        backend.decode(&mut step).unwrap();
        [out, lse].concat()
    };
    let want = results(&Reference::new());
    let lse = &want[q.len()..];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_options(&Options::default().isa(isa)).unwrap();
        let found = first_difference(&format!("{isa}: "), &results(&backend), &want);
        assert_eq!(found, None, "{format}, {factor}, {score}, lse {lse:?}");
    }
}
