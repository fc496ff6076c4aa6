//! The layers of one cache are the caches of the layers: the same bytes, the same bits of every output, on every backend.

use attn_conformance::{
    Case,
    case::noise,
    check::{decode_rows, first_difference},
    trials::Trials,
};
use attn_core::{
    Append, CacheConfig, DecodeAttention, Error, KvCache, KvFormat, KvSource, SequenceImage,
};

const LAYERS: usize = 3;

const HEADS: [usize; 2] = [4, 2];

const DIM: usize = 64;

const ROW: usize = HEADS[1] * DIM;

/// Adds the tests of this file.
pub fn add(mut trials: Trials<Box<dyn DecodeAttention>>) -> Trials<Box<dyn DecodeAttention>> {
    for (format, page_size) in [
        ("int8", 64),
        ("int8", 16),
        ("int4", 64),
        ("int8/int4", 32),
        ("bf16", 64),
        ("fp8", 64),
    ] {
        let name = format!(
            "{format}: layers of one cache are caches of one layer, on pages of {page_size}"
        );
        trials = trials.test(name, move |backend| layers(&**backend, format, page_size));
    }
    trials
}

/// One cache of all layers, and one for each.
struct Both<'a> {
    backend: &'a dyn DecodeAttention,
    case: Case,
    together: KvCache,
    apart: Vec<KvCache>,
}

impl<'a> Both<'a> {
    fn new(backend: &'a dyn DecodeAttention, format: &str, page_size: usize) -> Self {
        let format: KvFormat = format.parse().expect("a format's name");
        let mut case = Case::new(HEADS, DIM, &[400; 4], format);
        case.page_size = page_size;
        let mut config = case.config();
        config.layers = LAYERS;
        // Static scales of each layer and head.
        for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
            let count = scales.len() * LAYERS;
            *scales = (0..count).map(|i| 0.19 + 0.02 * i as f32).collect();
        }
        let alone = |layer| {
            let [k, v] = config.tensor_scales(layer).map(<[f32]>::to_vec);
            let mut one = CacheConfig::clone(&config);
            (one.layers, one.k_tensor_scales, one.v_tensor_scales) = (1, k, v);
            backend.create_cache(&one).unwrap()
        };
        Both {
            apart: (0..LAYERS).map(alone).collect(),
            together: backend.create_cache(&config).unwrap(),
            case,
            backend,
        }
    }

    fn each(&mut self, change: impl Fn(&mut KvCache) -> Result<(), Error>) {
        let all = self.apart.iter_mut().chain([&mut self.together]);
        all.for_each(|cache| change(cache).unwrap());
    }

    /// Appends tokens to every layer, and attends each as soon as it is written.
    fn step(&mut self, seed: u64, appends: &[Append]) {
        let tokens: usize = appends.iter().map(|a| a.tokens).sum();
        let kv = |layer: usize| {
            [0, 50].map(|side| noise(seed + side + 1000 * layer as u64, tokens * ROW))
        };
        // A step that another layer than the first fails is taken back.
        self.together.reserve(appends).unwrap();
        let [k, v] = kv(2);
        self.together.write(1, &v, &k).unwrap();
        assert!(matches!(self.read(0, appends), Err(Error::Step { .. })));
        self.together.cancel_step().unwrap();

        self.together.reserve(appends).unwrap();
        for layer in 0..LAYERS {
            let [k, v] = kv(layer);
            self.together.write(layer, &k, &v).unwrap();
            self.apart[layer].append_batch(appends, &k, &v).unwrap();
            let (out, lse) = self.read(layer, appends).unwrap();
            let chosen: Vec<usize> = appends.iter().map(|a| a.sequence).collect();
            let alone = self.apart[layer].sequences(&chosen).unwrap();
            let want = self.decode(appends, KvSource::Sequences(&alone)).unwrap();
            let found = first_difference("out", &out, &want.0)
                .or_else(|| first_difference("lse", &lse, &want.1));
            assert_eq!(found, None, "step {seed}, layer {layer}");
        }
        self.check(seed);
    }

    /// Attends the tokens of a step in one layer of the common cache.
    fn read(&self, layer: usize, appends: &[Append]) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let chosen: Vec<usize> = appends.iter().map(|a| a.sequence).collect();
        let chosen = self.together.layer(layer)?.sequences(&chosen)?;
        self.decode(appends, KvSource::Sequences(&chosen))
    }

    /// Decodes the newest tokens of each append, up to 5 of them.
    fn decode(&self, appends: &[Append], kv: KvSource<'_>) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let mut case = self.case.clone();
        case.problem.kv_lens = kv.kv_lens()[..appends.len()].to_vec();
        case.problem.q_lens = appends.iter().map(|a| a.tokens.min(5)).collect();
        let queries: usize = case.problem.q_lens.iter().sum();
        let q = noise(7, queries * HEADS[0] * DIM);
        decode_rows(self.backend, &case, &q, kv)
    }

    /// Compares tables, and the bytes of every layer.
    fn check(&self, step: u64) {
        for (layer, alone) in self.apart.iter().enumerate() {
            assert_eq!(alone.table(), self.together.table(), "step {step}");
            assert_eq!(alone.free_pages(), self.together.free_pages());
            for sequence in 0..4 {
                let of_layer = self.together.layer(layer).unwrap();
                match (of_layer.read_back(sequence), alone.read_back(sequence)) {
                    (Ok(got), Ok(want)) => assert!(
                        got == want,
                        "step {step}, layer {layer}: bytes of sequence {sequence}"
                    ),
                    (Err(Error::Dropped { .. }), Err(Error::Dropped { .. })) => {}
                    (got, want) => panic!("{:?} and {:?}", got.err(), want.err()),
                }
            }
        }
    }
}

fn layers(backend: &dyn DecodeAttention, format: &str, page_size: usize) {
    let append = |(sequence, tokens)| Append { sequence, tokens };
    let mut both = Both::new(backend, format, page_size);
    both.step(1, &[(0, 70), (2, 5)].map(append));
    both.step(2, &[(2, 3), (0, 130)].map(append));
    both.each(|cache| cache.fork(0, 1));
    both.step(3, &[(0, 1), (1, 2), (2, 1)].map(append));
    both.each(|cache| cache.truncate(1, 201));
    both.step(4, &[(1, 30)].map(append));
    both.each(|cache| cache.free_sequence(2));

    // A sequence of all layers as one block.
    let image = both.together.image(1).unwrap().into_bytes();
    let image = SequenceImage::from_bytes(image).unwrap();
    both.together.restore(3, &image).unwrap();
    for alone in &mut both.apart {
        let image = alone.image(1).unwrap();
        alone.restore(3, &image).unwrap();
    }
    both.step(5, &[(3, 1), (1, 1)].map(append));

    // Pages before the window are gone in every layer.
    both.case.problem.scores.window_left = Some(90);
    both.each(|cache| cache.drop_before(3, 232 - 90));
    assert_eq!(both.together.table().first_tokens[3], 128);
    both.step(6, &[(3, 1), (0, 1)].map(append));

    // The layer's first sequences, without a choice.
    for layer in 0..LAYERS {
        let appends = [(0, 1), (1, 1)].map(append);
        let of_layer = both.together.layer(layer).unwrap();
        let got = both.decode(&appends, KvSource::Layer(of_layer)).unwrap();
        let alone = KvSource::Cache(&both.apart[layer]);
        let want = both.decode(&appends, alone).unwrap();
        assert_eq!(first_difference("out", &got.0, &want.0), None, "{layer}");
    }
}
