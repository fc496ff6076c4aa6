//! Weights of one byte where they are hardest to round: peaks over flat tails, sinks with small values, uniform attention.
//!
//! The queries and keys are exact in 8 bits, so that only weights and values err.

use attn_conformance::{
    Case, check, noise,
    oracle::{self, Queries},
};
use attn_core::{DecodeAttention, KvSource};
use attn_cpu::CpuBackend;
use rstest::rstest;

const DIM: usize = 128;
const HEADS: usize = 4;

/// Tokens of a case: a tile's peak stands at its token 21.
#[derive(Clone, Copy)]
struct Tail {
    tiles: usize,
    /// The share of a tile's weight that its tail has.
    mass: f64,
    /// Every how many tokens belong to the tail.
    every: usize,
    /// The part of the values that tokens have in common.
    common: f32,
    /// What the values of peaks are multiplied by.
    of_peak: f32,
}

/// The relative error of decode against f64 attention over the same cache.
fn error(format: &str, tail: Tail) -> f64 {
    let tokens = 64 * tail.tiles;
    let case = Case::new([HEADS, HEADS], DIM, &[tokens], format.parse().unwrap());
    let in_tail = 64usize.div_ceil(tail.every) as f64;
    let weight = tail.mass / (1.0 - tail.mass) / in_tail;
    // A query and keys along one dim: softmax_scale times their product is the logit.
    let logit = |t: usize| match t % 64 {
        21 => 0.0,
        t if t % tail.every == 0 => weight.ln() as f32,
        _ => -40.0,
    };
    let unit = 1.0 / case.problem.score_scale();
    let (mut k, mut v) = (vec![0.0; tokens * HEADS * DIM], Vec::new());
    for (row, k) in k.chunks_exact_mut(DIM).enumerate() {
        let (t, head) = (row / HEADS, row % HEADS);
        k[0] = logit(t) * unit / 4.0;
        let own = (1.0 - tail.common * tail.common).sqrt();
        let factor = if t % 64 == 21 { tail.of_peak } else { 1.0 };
        let value = |d: usize| {
            let [shared, alone] = [head * DIM + d, 1000 + row * DIM + d].map(|at| noise::at(0, at));
            factor * (shared * tail.common + own * alone)
        };
        v.extend((0..DIM).map(value));
    }
    let mut q = vec![0.0; HEADS * DIM];
    q.iter_mut().step_by(DIM).for_each(|x| *x = 4.0);
    let backend = CpuBackend::new();
    let mut cache = backend.create_cache(&case.config()).unwrap();
    cache.append(0, &k, &v).unwrap();
    let (out, _) = check::decode_rows(&backend, &case, &q, KvSource::Cache(&cache)).unwrap();
    let (want, _) = oracle::attend(&case.problem, &cache, &q, Queries::Exact);
    let pairs = || out.iter().zip(&want);
    let error: f64 = pairs().map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let norm: f64 = want.iter().map(|x| x * x).sum();
    (error / norm).sqrt()
}

const PEAKS: Tail = Tail {
    tiles: 128,
    mass: 0.1,
    every: 1,
    common: 0.8,
    of_peak: 1.0,
};

/// Rounding to nearest would lose these tails whole: 34 to 48 %.
#[rstest]
#[case::one_tile(Tail { tiles: 1, common: 0.0, ..PEAKS })]
#[case::one_tile_in_common(Tail { tiles: 1, ..PEAKS })]
#[case::each_tile(PEAKS)]
#[case::every_second_token(Tail { every: 2, ..PEAKS })]
#[case::every_eighth_token(Tail { every: 8, ..PEAKS })]
#[case::thin(Tail { mass: 0.02, ..PEAKS })]
#[case::sink(Tail { tiles: 1, of_peak: 0.02, ..PEAKS })]
#[case::sinks(Tail { of_peak: 0.02, mass: 0.05, ..PEAKS })]
fn a_peak_over_a_flat_tail_errs_by_little(
    #[case] tail: Tail,
    #[values("int8", "int8-plain", "int8-g32", "int8/int4", "int4", "int4-g4")] format: &str,
) {
    let error = error(format, tail);
    println!("{format}: {error:.2e}");
    assert!(error <= 0.022, "{format}: {error:e}");
}

/// A weight per token that is the same for all: the lattice leaves what one step of all weights together is, 1e-4 of values in common and 3.5e-3 of random
/// ones. V's scales add to it, which are read within 0.54 %: 3.1e-3 in the mean of squares, which random values show whole. In values in common they
/// nearly cancel, but for what many scales of nearly one magnitude have in common.
#[rstest]
#[case::values_in_common(0.8, 5e-4)]
#[case::random_values(0.0, 4.7e-3)]
fn uniform_attention_is_nearly_exact(
    #[case] common: f32,
    #[case] limit: f64,
    #[values("int8", "int8/int4", "int4", "int4-g4")] format: &str,
) {
    let flat = Tail {
        mass: 64.0 / 65.0,
        common,
        ..PEAKS
    };
    let error = error(format, flat);
    println!("{format}: {error:.2e}");
    assert!(error <= limit, "{format}: {error:e}");
}
