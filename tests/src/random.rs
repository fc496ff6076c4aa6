//! Random shapes, each determined by its seed, of few enough kernels to compile.

use attn_core::{HeadDim, KvFormat};

use crate::{
    case::{Build, Case},
    noise::Noise,
};

/// Format, head_dim and page_size of a random shape: enough to meet every code path, few enough to compile.
const KINDS: [(&str, HeadDim, usize); 18] = [
    ("int8", HeadDim::same(128), 64),
    ("int8", HeadDim::same(64), 64),
    ("int8", HeadDim::same(256), 16),
    ("int4", HeadDim::same(128), 64),
    ("int4", HeadDim::same(64), 64),
    ("int4", HeadDim::same(80), 128),
    ("int4", HeadDim::same(192), 64),
    ("int4-g4", HeadDim::same(128), 64),
    ("int4-g8", HeadDim::same(128), 32),
    ("int4-g1", HeadDim::same(96), 128),
    ("int8/int4", HeadDim::same(128), 64),
    ("int8/int4-g1", HeadDim::same(128), 64),
    ("int8-g32", HeadDim::same(128), 64),
    ("int8-tensor", HeadDim::same(64), 32),
    ("int4-r2-w4/int8-g32", HeadDim::same(128), 64),
    ("int8", HeadDim { k: 576, v: 512 }, 64),
    ("int8", HeadDim { k: 192, v: 128 }, 64),
    ("int8-tensor", HeadDim::same(512), 32),
];

/// (heads_per_kv, q_len): every row tile, full and not.
const ROWS: [(usize, usize); 10] = [
    (1, 1),
    (4, 1),
    (8, 1),
    (5, 3),
    (16, 1),
    (9, 3),
    (32, 1),
    (16, 3),
    (64, 1),
    (12, 16),
];

fn kind(format: &str) -> KvFormat {
    format.parse().expect("a format's name")
}

/// One shape for each kernel that random shapes use.
pub fn shapes() -> Vec<Case> {
    let mut all = Vec::new();
    for (format, head_dim, page_size) in KINDS {
        for (heads_per_kv, q_len) in ROWS {
            for window_left in [None, Some(100)] {
                let mut case = Case::new([heads_per_kv, 1], head_dim, &[1], kind(format));
                case.page_size = page_size;
                case.problem.q_lens = vec![q_len; case.problem.batch()];
                case.problem.scores.window_left = window_left;
                all.push(case);
            }
        }
    }
    all
}

/// A random shape: heads, rows, lengths, pages and modifiers.
pub fn random(seed: u64) -> Case {
    let mut r = Noise::new(seed);
    let (format, head_dim, page_size) = r.pick(&KINDS);
    let (heads_per_kv, q_len) = r.pick(&ROWS);
    let heads = r.pick(&[1, 1, 2, 3]);
    // Few sequences, or more than a warp has lanes, a few of them long: splits of unequal cost, and many partials.
    let lens: Vec<usize> = if r.below(8) == 0 {
        let of_batch =
            |i: usize, r: &mut Noise| r.below(if i.is_multiple_of(8) { 6000 } else { 90 });
        (0..33 + r.below(30)).map(|i| of_batch(i, &mut r)).collect()
    } else {
        let longest = r.pick(&[70, 300, 700, 700, 1500, 5000]);
        (0..1 + r.below(5)).map(|_| r.below(longest)).collect()
    };
    let mut case = Case::new([heads_per_kv * heads, heads], head_dim, &lens, kind(format));
    case.page_size = page_size;
    case.seed = seed;
    case.build = r.pick(&[Build::AtOnce, Build::Shuffled, Build::Chunks, Build::Reused]);
    let p = &mut case.problem;
    p.q_lens = vec![q_len; p.batch()];
    p.scores.causal = r.below(4) > 0;
    if r.below(3) == 0 {
        match r.below(3) {
            0 if seed.is_multiple_of(3) && p.scores.causal => {
                p.scores.chunk = Some(1 + r.below(600))
            }
            0 => p.scores.window_left = Some(r.below(600)),
            1 => p.scores.softcap = Some(r.pick(&[5.0, 30.0, 50.0])),
            _ => {
                let slope = |h: usize| 0.5f32.powi(1 + h as i32 % 8);
                p.scores.alibi_slopes = Some((0..p.num_q_heads).map(slope).collect());
            }
        }
    }
    // Last, so that a seed's other numbers are what they were without sinks.
    if r.below(4) == 0 {
        let sinks = (0..p.num_q_heads).map(|_| r.pick(&[-1e6, -3.5, 0.0, 1.25, 9.0, 40.0]));
        p.scores.sinks = Some(sinks.collect());
    }
    case
}
