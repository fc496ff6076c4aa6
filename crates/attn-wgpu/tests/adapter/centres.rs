//! Caches with centres of K: pages, centres and answers have the reference's bits, however the tokens come.

use attn_conformance::{noise, trials::Trials};
use attn_core::{Append, CacheConfig, DecodeAttention, Heads, KvCache, KvFormat};
use attn_cpu::Reference;
use attn_wgpu::WgpuBackend;

use super::native::upload;

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
        config.num_kv_heads * config.head_dim
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
    let heads = Heads {
        q: q_heads,
        kv: 2,
        dim,
    };
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
}
