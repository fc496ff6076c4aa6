//! Caches with centres of K: pages, centres and answers have the reference's bits, however the tokens come.

use attn_conformance::{noise, trials::Trials};
use attn_core::{
    Append, CacheConfig, DecodeAttention, DecodeStep, Heads, KvCache, KvFormat, KvSource, Problem,
};
use attn_cpu::Reference;
use attn_wgpu::{Tuning, WgpuBackend, wgpu};

use super::native::{buffer, download, upload};

/// The same tokens in a cache of the reference, and in one of the device.
struct Caches<'a> {
    backend: &'a WgpuBackend,
    theirs: KvCache,
    ours: KvCache,
    seed: u64,
    /// What all keys have in common, beside numbers in -1..1.
    common: f32,
}

impl<'a> Caches<'a> {
    fn new(backend: &'a WgpuBackend, config: &CacheConfig) -> Self {
        Caches {
            backend,
            theirs: Reference::new().create_cache(config).unwrap(),
            ours: backend.create_cache(config).unwrap(),
            seed: 1,
            common: 4.0,
        }
    }

    fn row(&self) -> usize {
        let config = self.theirs.config();
        config.num_kv_heads * config.head_dim.k
    }

    /// K and V of so many tokens: keys that have much in common, each head's own, and a few that have nothing of it.
    fn tokens(&mut self, count: usize) -> [Vec<f32>; 2] {
        self.seed += 2;
        let (row, seed) = (self.row(), self.seed);
        let key = |i: usize| {
            let shared = match noise::at(seed ^ 99, i / row) > 0.8 {
                true => -0.5,
                false => self.common,
            };
            shared * noise::at(7, i % row) + noise::at(seed, i)
        };
        let k = (0..count * row).map(key).collect();
        [k, noise::uniform(seed + 1, 0..count * row)]
    }

    /// Appends to both caches: to the device's from the host, or from its own buffers into an encoder.
    fn append(&mut self, counts: &[(usize, usize)], recorded: bool) {
        let appends: Vec<Append> = counts
            .iter()
            .map(|&(sequence, tokens)| Append { sequence, tokens })
            .collect();
        let [k, v] = self.tokens(Append::total(&appends));
        self.theirs.append_batch(&appends, &k, &v).unwrap();
        if !recorded {
            return self.ours.append_batch(&appends, &k, &v).unwrap();
        }
        let backend = self.backend;
        let [k, v] = [&k, &v].map(|x| upload(backend, x));
        let mut encoder = backend
            .wgpu_device()
            .create_command_encoder(&Default::default());
        backend
            .record_append(&mut encoder, &mut self.ours, &appends, &k, &v)
            .unwrap();
        backend.wgpu_queue().submit([encoder.finish()]);
    }

    /// Does the same to both caches.
    fn both(&mut self, change: impl Fn(&mut KvCache)) {
        change(&mut self.theirs);
        change(&mut self.ours);
    }

    /// Queries along what the keys have in common, against it, and across it.
    fn queries(&self, problem: &Problem, strength: f32) -> Vec<f32> {
        let (dim, group) = (problem.head_dim.k, problem.heads_per_kv());
        let query = |i: usize| {
            let head = i / dim % problem.num_q_heads;
            let along = noise::at(7, head / group * dim + i % dim);
            let sign = [1.0, -1.0, 0.0][i / dim % 3];
            strength * sign * along + noise::at(self.seed + 5, i)
        };
        (0..problem.out_elements()).map(query).collect()
    }

    /// Attends some sequences, in their order, on a backend: all bits of out and lse.
    fn answer(
        backend: &dyn DecodeAttention,
        cache: &KvCache,
        (problem, sequences): (&Problem, &[usize]),
        q: &[f32],
    ) -> Vec<u32> {
        let plan = backend.plan(problem, cache.config().format).unwrap();
        let chosen = cache.sequences(sequences).unwrap();
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; problem.rows()]);
        let mut step = DecodeStep::new(&plan, q, KvSource::Sequences(&chosen), &mut out)
            .and_then(|step| step.with_lse(&mut lse))
            .unwrap();
        backend.decode(&mut step).unwrap();
        out.iter().chain(&lse).map(|x| x.to_bits()).collect()
    }

    /// Attends some sequences on both backends.
    fn check_step(
        &self,
        sequences: &[usize],
        strength: f32,
        change: impl Fn(Problem) -> Problem,
        what: &str,
    ) {
        let config = self.theirs.config();
        let heads = Heads::new(config.num_q_heads, config.num_kv_heads, config.head_dim);
        let lens = sequences.iter().map(|s| self.theirs.table().lens[*s]);
        let problem = change(Problem::new(heads, lens.collect::<Vec<_>>()));
        let q = self.queries(&problem, strength);
        let want = Self::answer(&Reference::new(), &self.theirs, (&problem, sequences), &q);
        let got = Self::answer(self.backend, &self.ours, (&problem, sequences), &q);
        let differing = want.iter().zip(&got).filter(|(a, b)| a != b).count();
        assert!(
            differing == 0,
            "{}, {what}: {differing} of {} numbers differ",
            config.format,
            want.len()
        );
    }

    fn check_images(&self, what: &str) {
        for sequence in 0..self.theirs.config().num_sequences {
            let [want, got] = [&self.theirs, &self.ours].map(|cache| cache.image(sequence));
            let (want, got) = (want.unwrap(), got.unwrap());
            assert!(
                want.centres() == got.centres(),
                "{what}: centres of {sequence}"
            );
            assert!(want.pages() == got.pages(), "{what}: pages of {sequence}");
        }
    }
}

/// Heads, dims and tokens of a page; the formats whose K may have centres.
const SHAPES: [(&str, usize, usize); 7] = [
    ("int8", 64, 64),
    ("int8/int4", 80, 16),
    ("int4", 128, 64),
    ("int4", 80, 16),
    ("int4-r2", 64, 32),
    ("int4-w4/int8-plain", 96, 128),
    ("int8/int4-g1", 256, 128),
];

fn config(format: &str, dim: usize, page_size: usize, q_heads: usize) -> CacheConfig {
    let format: KvFormat = format.parse().unwrap();
    let heads = Heads::new(q_heads, 2, dim);
    CacheConfig::builder(format, heads)
        .page_size(page_size)
        .sequences(4)
        .max_len(600)
        .centres(true)
        .build()
}

/// Kills centres of another sequence or head, a first centre of another token, a second one of other tokens, codes or residuals, one that is made before its tile is whole or
/// after the tokens that lack it, and rows that keep their centre.
fn pages_and_centres_have_the_references_bytes(backend: &WgpuBackend) {
    for (i, (format, dim, page_size)) in SHAPES.into_iter().enumerate() {
        for recorded in [false, true] {
            let mut caches = Caches::new(backend, &config(format, dim, page_size, 2));
            caches.seed = 1000 * i as u64;
            let mut check = |counts: &[(usize, usize)]| {
                caches.append(counts, recorded);
                caches.check_images(&format!("{format}, {dim} dims, {counts:?}"));
            };
            // One token; parts of a first tile; whole first tiles at once; later tokens in the same call and alone.
            check(&[(0, 1), (1, 70), (2, 5)]);
            check(&[(2, 58), (0, 62)]);
            check(&[(0, 1), (2, 1), (1, 3)]);
            check(&[(3, 200), (0, 130), (2, 1)]);
            if page_size == 64 {
                caches.both(|cache| cache.free_sequence(1).unwrap());
                caches.both(|cache| cache.fork(3, 1).unwrap());
                caches.append(&[(1, 2), (3, 1)], recorded);
                caches.check_images("forks");
            }
        }
    }
}

/// Kills centres that outlive the tokens that they are made of.
fn sequences_that_are_cut_make_their_centres_anew(backend: &WgpuBackend) {
    for cut in [0, 1, 63, 64, 65] {
        let mut caches = Caches::new(backend, &config("int8/int4", 64, 64, 2));
        caches.append(&[(0, 66), (2, 1)], false);
        caches.both(|cache| cache.truncate(0, cut).unwrap());
        caches.append(&[(0, 80)], false);
        caches.check_images(&format!("cut to {cut}"));
    }
}

/// Each layer has centres of its own, also where an encoder takes its tokens, and images carry them.
fn layers_have_centres_of_their_own(backend: &WgpuBackend) {
    let mut two = config("int4", 64, 64, 2);
    two.layers = 2;
    let mut caches = Caches::new(backend, &two);
    for count in [63, 1, 40] {
        let appends = [Append {
            sequence: 1,
            tokens: count,
        }];
        caches.both(|cache| cache.reserve(&appends).unwrap());
        for layer in [1, 0] {
            let [k, v] = caches.tokens(count);
            caches.theirs.write(layer, &k, &v).unwrap();
            if count == 40 {
                caches.ours.write(layer, &k, &v).unwrap();
                continue;
            }
            let [k, v] = [&k, &v].map(|x| upload(backend, x));
            let mut encoder = backend
                .wgpu_device()
                .create_command_encoder(&Default::default());
            backend
                .record_write(&mut encoder, &mut caches.ours, layer, &k, &v)
                .unwrap();
            backend.wgpu_queue().submit([encoder.finish()]);
        }
        caches.check_images("two layers");
    }
    let image = caches.ours.image(1).unwrap();
    caches.ours.restore(3, &image).unwrap();
    assert!(caches.ours.image(3).unwrap().as_bytes() == image.as_bytes());
}

/// Kills G of another centre, sequence, head or row, queries that are not rounded or not rotated, sums in another order of large terms, and G in place of g.
fn answers_have_the_references_bits(backend: &WgpuBackend) {
    for (i, (format, dim, page_size)) in SHAPES.into_iter().enumerate() {
        let mut config = config(format, dim, page_size, 4);
        config.max_q_len = 80;
        let mut caches = Caches::new(backend, &config);
        caches.seed = 500 + 1000 * i as u64;
        caches.append(&[(0, 1), (1, 64), (2, 65), (3, 333)], false);
        // Another order than the cache's, and one sequence twice.
        caches.check_step(&[3, 0, 2, 1, 3], 1.0, |p| p, "decode");
        let modified = |p: Problem| p.softcap(30.0).alibi_slopes([0.5, 0.1, 0.02, 1.0]);
        caches.check_step(&[2, 3], 2.0, modified, "modifiers");
        caches.append(&[(0, 70), (2, 80)], false);
        let prompt = |p: Problem| p.q_len(70).sinks([0.5, -3.0, 8.0, 0.0]);
        caches.check_step(&[2, 0], 1.0, prompt, "a prompt across token 64");
        let windowed = |p: Problem| p.q_len(3).window_left(50);
        caches.check_step(&[0, 2], 1.0, windowed, "a window without the first tile");
    }
}

/// Scores of centres beyond the grid, of either sign: rows whose tokens are as far, and rows among whose tokens are some that lack nothing of the centre, so that
/// their scores are on the grid and its base is not.
///
/// Kills a far path from 196608 in place of g, sums that contract there, and sums on the grid of a rounded product.
fn centres_beyond_the_grid_have_the_references_bits(backend: &WgpuBackend) {
    for (format, dim, page_size) in [SHAPES[0], SHAPES[2], SHAPES[5]] {
        let mut caches = Caches::new(backend, &config(format, dim, page_size, 6));
        caches.common = 3000.0 / (dim as f32 / 3.0).sqrt();
        caches.append(&[(0, 300), (1, 64), (2, 130)], false);
        for strength in [20.0, 25.0, 60.0, 3e4, 1e9] {
            let what = format!("strength {strength}");
            caches.check_step(&[2, 0, 1], strength, |p| p.q_len(2), &what);
        }
        let modified = |p: Problem| p.softcap(1000.0);
        caches.check_step(&[2, 0], 60.0, modified, "far, with a soft cap");
        let sloped = |p: Problem| p.alibi_slopes([1.0, 0.5, 0.25, 2.0, 4.0, 100.0]);
        caches.check_step(&[2, 0], 60.0, sloped, "far, with slopes");
    }
}

/// Kills centres that a fork lacks, or has of the sequence that it was.
fn forks_and_cut_sequences_are_attended_with_their_centres(backend: &WgpuBackend) {
    for format in ["int8", "int4"] {
        let mut caches = Caches::new(backend, &config(format, 64, 64, 4));
        caches.append(&[(0, 150), (1, 40), (2, 9)], false);
        caches.both(|cache| cache.fork(0, 3).unwrap());
        caches.both(|cache| cache.truncate(1, 20).unwrap());
        caches.append(&[(3, 1), (1, 90)], false);
        caches.check_step(&[3, 1, 0], 2.0, |p| p, "after a fork and a cut");
        caches.both(|cache| cache.free_sequence(0).unwrap());
        caches.append(&[(0, 70)], false);
        caches.check_step(&[0, 1, 2, 3], 2.0, |p| p, "a sequence in place of another");
    }
}

fn tunings_change_no_bits_of_rows_with_centres(backend: &WgpuBackend) {
    let mut config = config("int8/int4", 64, 64, 8);
    config.max_q_len = 8;
    let mut tuning = Tuning::default();
    for (by_tiles, rows) in [(true, 8), (false, 4), (false, 1)] {
        (tuning.by_tiles, tuning.rows) = (Some(by_tiles), Some(rows));
        let tuned = backend.tuned(tuning);
        let mut caches = Caches::new(&tuned, &config);
        caches.append(&[(0, 30), (1, 300), (2, 64)], false);
        let what = format!("{rows} rows");
        caches.check_step(&[1, 2, 0], 3.0, |p| p.q_len(3), &what);
    }
}

/// Tokens, centres and a step in one encoder: the step sees centres that the encoder makes.
fn a_recorded_step_sees_recorded_centres(backend: &WgpuBackend) {
    let config = config("int4", 64, 64, 4);
    let mut caches = Caches::new(backend, &config);
    caches.append(&[(0, 60), (1, 3), (2, 1), (3, 1)], false);
    let appends = [Append {
        sequence: 0,
        tokens: 30,
    }];
    let [k, v] = caches.tokens(30);
    caches.theirs.append_batch(&appends, &k, &v).unwrap();
    let heads = Heads::new(4, 2, 64);
    let problem = Problem::new(heads, caches.theirs.table().lens.clone());
    let q = caches.queries(&problem, 2.0);
    let [k, v, queries] = [&k, &v, &q].map(|x| upload(backend, x));
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let out = buffer(backend, 4 * q.len() as u64, usage);
    let lse = buffer(backend, 4 * problem.rows() as u64, usage);
    let mut encoder = backend
        .wgpu_device()
        .create_command_encoder(&Default::default());
    backend
        .record_append(&mut encoder, &mut caches.ours, &appends, &k, &v)
        .unwrap();
    let prepared = backend.prepare(&problem, &caches.ours).unwrap();
    backend
        .record(&mut encoder, &prepared, &queries, &out, &lse)
        .unwrap();
    backend.wgpu_queue().submit([encoder.finish()]);
    let of_theirs = (&problem, &[0, 1, 2, 3][..]);
    let want = Caches::answer(&Reference::new(), &caches.theirs, of_theirs, &q);
    let got = [download(backend, &out), download(backend, &lse)].concat();
    assert!(want == got);
}

/// Centres that no kernel could bind are refused before anything is allocated, and sequences cannot be added to a cache that keeps some.
fn centres_beyond_a_binding_are_refused(backend: &WgpuBackend) {
    let mut many = config("int8", 256, 64, 2);
    (many.num_sequences, many.num_pages) = (1 << 24, 1);
    let refused = backend.create_cache(&many).err().unwrap().to_string();
    assert!(
        refused.contains("centres of K of 16777216 sequences"),
        "{refused}"
    );
    assert!(refused.contains("fewer sequences"), "{refused}");
    let mut cache = backend.create_cache(&config("int8", 64, 64, 2)).unwrap();
    let refused = cache.add_sequences(1).unwrap_err().to_string();
    assert!(refused.contains("sequences to add"), "{refused}");
    assert_eq!(cache.table().lens.len(), 4);
}

/// Adds the tests of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials
        .test(
            "centres: pages and centres have the references bytes",
            pages_and_centres_have_the_references_bytes,
        )
        .test(
            "centres: sequences that are cut make their centres anew",
            sequences_that_are_cut_make_their_centres_anew,
        )
        .test(
            "centres: layers have centres of their own",
            layers_have_centres_of_their_own,
        )
        .test(
            "centres: answers have the references bits",
            answers_have_the_references_bits,
        )
        .test(
            "centres: centres beyond the grid have the references bits",
            centres_beyond_the_grid_have_the_references_bits,
        )
        .test(
            "centres: forks and cut sequences are attended with their centres",
            forks_and_cut_sequences_are_attended_with_their_centres,
        )
        .test(
            "centres: tunings change no bits of rows with centres",
            tunings_change_no_bits_of_rows_with_centres,
        )
        .test(
            "centres: centres beyond a binding are refused",
            centres_beyond_a_binding_are_refused,
        )
        .test(
            "centres: a recorded step sees recorded centres",
            a_recorded_step_sees_recorded_centres,
        )
}
