//! Caches of several layers: one table and a pool for each layer, steps that are reserved once and written layer by layer, and taken back whole.

mod taken_back;

use attn_conformance::noise::uniform;
use attn_core::{
    Append, CacheConfig, DecodeStep, ElementIndex, Error, HeadDim, Heads, HostPages, KvCache,
    KvSource, PageTable, Plan, Problem, SequenceImage,
};
use rstest::rstest;

const LAYERS: usize = 3;

const HEADS: Heads = Heads {
    q: 2,
    kv: 2,
    dim: HeadDim::same(64),
};

const ROW: usize = HEADS.kv * HEADS.dim.k;

fn config(format: &str, layers: usize, page_size: usize, pages: usize) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .centres(false)
        .unit_tensor_scales()
        .layers(layers)
        .sequences(4)
        .page_size(page_size)
        .pages(pages)
        .build()
}

fn cache_of(config: CacheConfig) -> KvCache {
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

fn cache(format: &str) -> KvCache {
    cache_of(config(format, LAYERS, 32, 64))
}

/// K or V of a layer: tokens `from..to` of text `seed`; none is like another's, nor like another layer's.
fn values(layer: usize, seed: usize, from: usize, to: usize) -> Vec<f32> {
    let place = |token: usize| (1000 * layer + token) * ROW;
    let numbers = uniform(seed as u64, place(from)..place(to));
    numbers.into_iter().map(|x| 4.0 * x).collect()
}

/// K and V of a layer for a step: sequence s goes on with text s from its length in `lens` on.
fn rows(layer: usize, lens: &[usize], appends: &[Append]) -> [Vec<f32>; 2] {
    [0, 100].map(|side| {
        let of = |a: &Append| {
            let len = lens[a.sequence];
            values(layer, a.sequence + side, len, len + a.tokens)
        };
        appends.iter().flat_map(of).collect()
    })
}

fn appends(of: &[[usize; 2]]) -> Vec<Append> {
    let append = |&[sequence, tokens]: &[usize; 2]| Append { sequence, tokens };
    of.iter().map(append).collect()
}

/// Reserves a step, and writes its first `layers` layers.
fn begin(cache: &mut KvCache, of: &[[usize; 2]], layers: usize) -> Result<(), Error> {
    let (appends, lens) = (appends(of), cache.table().lens.clone());
    cache.reserve(&appends)?;
    for layer in 0..layers {
        let [k, v] = rows(layer, &lens, &appends);
        cache.write(layer, &k, &v)?;
    }
    Ok(())
}

/// A whole step.
fn step(cache: &mut KvCache, of: &[[usize; 2]]) -> Result<(), Error> {
    begin(cache, of, cache.config().layers)
}

/// All that a call which is refused or taken back must leave as it was.
fn books(cache: &KvCache) -> (PageTable, usize, Vec<Vec<Vec<u8>>>) {
    let sequences = 0..cache.table().lens.len();
    let bytes = sequences.map(|s| cache.read_back(s).unwrap()).collect();
    (cache.table().clone(), cache.free_pages(), bytes)
}

/// The plan's and the step's checks, without a backend.
fn attends(kv: KvSource<'_>) -> Result<(), Error> {
    let cache = match kv {
        KvSource::Cache(cache) => cache,
        KvSource::Layer(layer) => layer.cache(),
        KvSource::Sequences(sequences) => sequences.cache(),
        KvSource::View(_) | KvSource::Pool(_) => unreachable!("tests attend caches"),
    };
    let problem = Problem::new(HEADS, [4096]);
    let plan = Plan::new("test", &problem, cache.config().format, ())?;
    let (q, mut out) = ([0.5; ROW], [0.0; ROW]);
    DecodeStep::new(&plan, &q, kv, &mut out).map(drop)
}

#[rstest]
fn a_layer_holds_the_bytes_of_a_cache_of_its_own(
    #[values("int8", "int4", "int8/int4", "int4-g4", "bf16", "fp8/int8-tensor")] format: &str,
    #[values(16, 64)] page_size: usize,
) {
    let mut config = config(format, LAYERS, page_size, 96);
    // Every layer and head has static scales of its own.
    for scales in [&mut config.k_tensor_scales, &mut config.v_tensor_scales] {
        let own = scales.iter_mut().enumerate();
        own.for_each(|(i, scale)| *scale = 0.5 + i as f32 / 8.0);
    }
    let mut all = cache_of(config.clone());
    let alone = |layer: usize| {
        let [k, v] = config.tensor_scales(layer).map(<[f32]>::to_vec);
        let mut one = config.clone();
        (one.layers, one.k_tensor_scales, one.v_tensor_scales) = (1, k, v);
        cache_of(one)
    };
    let mut each: Vec<KvCache> = (0..LAYERS).map(alone).collect();
    let steps: [&[[usize; 2]]; 6] = [
        &[[0, 70], [2, 5]],
        &[[0, 1], [2, 64]],
        &[[3, 10], [0, 30], [2, 1]],
        &[[2, 140]],
        &[[1, 3], [0, 3]],
        &[[0, 1], [1, 1], [2, 1], [3, 1]],
    ];
    for (i, of) in steps.into_iter().enumerate() {
        let lens = all.table().lens.clone();
        step(&mut all, of).unwrap();
        for (layer, one) in each.iter_mut().enumerate() {
            let [k, v] = rows(layer, &lens, &appends(of));
            one.append_batch(&appends(of), &k, &v).unwrap();
        }
        match i {
            1 => {
                all.truncate(2, 66).unwrap();
                each.iter_mut().for_each(|one| one.truncate(2, 66).unwrap());
            }
            3 => {
                all.fork(0, 1).unwrap();
                each.iter_mut().for_each(|one| one.fork(0, 1).unwrap());
            }
            _ => {}
        }
        for (layer, one) in each.iter().enumerate() {
            assert_eq!(one.table(), all.table(), "step {i}");
            assert_eq!(one.free_pages(), all.free_pages(), "step {i}");
            for sequence in 0..4 {
                let got = all.layer(layer).unwrap().read_back(sequence).unwrap();
                assert!(
                    got == one.read_back(sequence).unwrap(),
                    "step {i}, layer {layer}, sequence {sequence}"
                );
            }
        }
    }
}

fn is_step<T>(result: Result<T, Error>, names: &str) {
    match result {
        Err(error @ Error::Step { .. }) => {
            assert!(error.to_string().contains(names), "{error}");
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused: {names}"),
    }
}

#[test]
fn writes_out_of_turn_are_typed_errors() {
    let mut cache = cache("int8");
    let (k, v) = (vec![1.0; 2 * ROW], vec![2.0; 2 * ROW]);
    is_step(cache.write(0, &k, &v), "no step is open");
    is_step(cache.write_with(0, |_, _| Ok(())), "no step is open");
    cache.reserve(&appends(&[[0, 1], [2, 1]])).unwrap();
    is_step(cache.reserve(&appends(&[[1, 1]])), "a step of 2 tokens");
    is_step(cache.reserve(&[]), "a step of 2 tokens");
    let layer = |given, error: Error| {
        let count = LAYERS;
        assert!(
            matches!(error, Error::Layer { given: g, count: c } if (g, c) == (given, count)),
            "{error}"
        );
    };
    for given in [LAYERS, usize::MAX] {
        layer(given, cache.write(given, &k, &v).unwrap_err());
        layer(given, cache.write_with(given, |_, _| Ok(())).unwrap_err());
        layer(given, cache.layer(given).map(drop).unwrap_err());
    }
    for (k, v, name) in [(&k[1..], &v[..], "k"), (&k, &v[..ROW], "v"), (&[], &v, "k")] {
        let error = cache.write(1, k, v).unwrap_err();
        assert!(
            matches!(error, Error::Length { what, needed, .. } if what == name && needed == 2 * ROW),
            "{error}"
        );
    }
    let mut bad = k.clone();
    bad[ROW + 3] = f32::INFINITY;
    let bad_place = ElementIndex::Row {
        token: 1,
        head: 0,
        dim: 3,
    };
    let error = cache.write(1, &bad, &v).unwrap_err();
    assert!(
        matches!(error, Error::NotFinite { what: "k", at, .. } if at == bad_place),
        "{error}"
    );
    let error = cache.write(1, &k, &bad).unwrap_err();
    assert!(
        matches!(error, Error::NotFinite { what: "v", at, .. } if at == bad_place),
        "{error}"
    );
    // What was refused is not written; layers come in any order, each once.
    cache.write(1, &k, &v).unwrap();
    is_step(cache.write(1, &k, &v), "has written layer 1");
    cache.write(2, &k, &v).unwrap();
    cache.write(0, &k, &v).unwrap();
    is_step(cache.write(0, &k, &v), "no step is open");
    assert_eq!(cache.table().lens, [1, 0, 1, 0]);
    // Nothing is open: nothing is taken back.
    cache.cancel_step().unwrap();
    assert_eq!(cache.table().lens, [1, 0, 1, 0]);
}

#[test]
fn a_layer_is_attended_once_it_is_written() {
    let mut cache = cache("int4");
    let attend = |cache: &KvCache, layer| {
        let layer = cache.layer(layer).unwrap();
        let results = [
            attends(KvSource::Layer(layer)),
            attends(KvSource::Sequences(&layer.sequences(&[0]).unwrap())),
            layer.check_queries(&Problem::new(HEADS, [4096])),
        ];
        assert!(
            results
                .windows(2)
                .all(|two| two[0].is_ok() == two[1].is_ok())
        );
        let [first, ..] = results;
        first
    };
    step(&mut cache, &[[0, 3]]).unwrap();
    attend(&cache, 2).unwrap();
    cache.reserve(&appends(&[[0, 1]])).unwrap();
    let row = vec![1.0; ROW];
    for layer in [1, 0] {
        is_step(attend(&cache, layer), "lacks the tokens");
        cache.write(layer, &row, &row).unwrap();
        attend(&cache, layer).unwrap();
    }
    is_step(attend(&cache, 2), "layer 2 lacks the tokens");
    cache.cancel_step().unwrap();
    (0..LAYERS).for_each(|layer| attend(&cache, layer).unwrap());

    // Which of the layers is meant must be said.
    for refused in [
        attends(KvSource::Cache(&cache)),
        cache.sequences(&[0]).map(drop),
        cache.check_queries(&Problem::new(HEADS, [3])),
        cache.append(0, &row, &row),
        cache.append_with(&appends(&[[0, 1]]), |_, _| Ok(())),
    ] {
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, Error::SeveralLayers { layers: 3, .. }),
            "{error}"
        );
    }
    assert_eq!(cache.table().lens[0], 3);
}

#[test]
fn sequences_of_an_open_step_stay_as_they_are_and_others_do_not() {
    let mut cache = cache("int8");
    step(&mut cache, &[[0, 70], [1, 70]]).unwrap();
    let image = cache.image(1).unwrap();
    begin(&mut cache, &[[0, 1]], 1).unwrap();
    let (table, free) = (cache.table().clone(), cache.free_pages());
    is_step(cache.fork(0, 3), "sequence 0");
    is_step(cache.truncate(0, 70), "sequence 0");
    is_step(cache.truncate(0, 71), "sequence 0");
    is_step(cache.drop_before(0, 64), "sequence 0");
    is_step(cache.free_sequence(0), "sequence 0");
    is_step(cache.image(0), "sequence 0");
    is_step(cache.image_bytes(0), "sequence 0");
    is_step(cache.read_back(0), "sequence 0");
    is_step(cache.layer(0).unwrap().read_back(0), "sequence 0");
    assert_eq!((cache.table(), cache.free_pages()), (&table, free));

    cache.fork(1, 3).unwrap();
    cache.truncate(3, 66).unwrap();
    cache.drop_before(1, 64).unwrap();
    cache.restore(2, &image).unwrap();
    cache.free_sequence(1).unwrap();
    cache.add_pages(1).unwrap();
    cache.add_sequences(1).unwrap();
    cache.cancel_step().unwrap();
    assert_eq!(cache.table().lens, [70, 0, 70, 66, 0]);
    let mut other = self::cache("int8");
    step(&mut other, &[[0, 70], [1, 70]]).unwrap();
    assert!(cache.read_back(0).unwrap() == other.read_back(0).unwrap());
    assert!(cache.read_back(2).unwrap() == other.read_back(1).unwrap());
    // Nothing is lost: all pages come back.
    (0..5).for_each(|s| cache.free_sequence(s).unwrap());
    assert_eq!(cache.free_pages(), 65);
}

#[rstest]
fn forks_share_the_pages_of_all_layers_until_one_appends(#[values("int8", "int4")] format: &str) {
    let mut cache = cache(format);
    step(&mut cache, &[[0, 40]]).unwrap();
    let (before, free) = (cache.read_back(0).unwrap(), cache.free_pages());
    cache.fork(0, 1).unwrap();
    assert_eq!(cache.free_pages(), free);
    step(&mut cache, &[[1, 1]]).unwrap();
    let copies = if format == "int4" { 2 } else { 1 };
    assert_eq!(cache.free_pages(), free - copies);
    assert!(cache.read_back(0).unwrap() == before);
    // The copy has the tokens of the open page in every layer.
    let back = |cache: &KvCache, layer: usize, s| cache.layer(layer).unwrap().read_back(s).unwrap();
    let mut alone = self::cache(format);
    step(&mut alone, &[[0, 40]]).unwrap();
    alone.reserve(&appends(&[[0, 1]])).unwrap();
    for layer in 0..LAYERS {
        let [k, v] = [1, 101].map(|seed| values(layer, seed, 40, 41));
        alone.write(layer, &k, &v).unwrap();
    }
    for layer in 0..LAYERS {
        assert!(back(&cache, layer, 1) == back(&alone, layer, 0), "{layer}");
    }
}

#[rstest]
fn an_image_has_all_layers(
    #[values("int8", "int4", "fp8/int8-tensor")] format: &str,
    #[values(0, 1, 70, 200)] tokens: usize,
) {
    let mut cache = cache(format);
    step(&mut cache, &[[0, tokens]]).unwrap();
    let pages = cache.read_back(0).unwrap();
    let each: Vec<_> = (0..LAYERS)
        .flat_map(|layer| cache.layer(layer).unwrap().read_back(0).unwrap())
        .collect();
    assert!(each == pages);
    let bytes = cache.image(0).unwrap().into_bytes();
    assert_eq!(bytes.len(), cache.image_bytes(0).unwrap());
    let image = SequenceImage::from_bytes(&bytes[..]).unwrap();
    assert_eq!((image.layers(), image.tokens()), (LAYERS, tokens));
    assert!(image.pages() == pages.concat());
    cache.restore(1, &image).unwrap();
    cache.restore_pages(2, tokens, &pages).unwrap();
    assert!(cache.read_back(1).unwrap() == pages && cache.read_back(2).unwrap() == pages);

    for layers in [1, 2, 4] {
        let mut other = cache_of(config(format, layers, 32, 64));
        let before = books(&other);
        let error = other.restore(0, &image).unwrap_err();
        assert!(
            matches!(error, Error::ImageMismatch { what: "layers", .. }),
            "{error}"
        );
        if tokens > 0 {
            assert!(other.restore_pages(0, tokens, &pages).is_err(), "{layers}");
        }
        assert!(books(&other) == before);
    }
    if tokens > 0 {
        let cut = &bytes[..bytes.len() - 1];
        assert!(SequenceImage::from_bytes(cut).is_err());
        // A value that no quantizer writes is found in the last layer, too.
        let mut bad = pages.clone();
        let last = pages.len() - pages.len() / LAYERS;
        bad[last].fill(0xff);
        cache.free_sequence(1).unwrap();
        let error = cache.restore_pages(1, tokens, &bad).unwrap_err();
        assert!(matches!(error, Error::BadBytes { .. }), "{error}");
        assert_eq!(cache.table().lens[1], 0);
    }
}

#[test]
fn a_cache_of_layers_grows_drops_and_takes_pages() {
    let mut cache = cache_of(config("int8", LAYERS, 64, 4));
    step(&mut cache, &[[0, 250]]).unwrap();
    let before = cache.read_back(0).unwrap();
    cache.add_pages(3).unwrap();
    assert!(cache.read_back(0).unwrap() == before);
    assert_eq!(
        (
            cache.free_pages(),
            cache.store().num_pages(),
            cache.store().layers()
        ),
        (3, 7, LAYERS)
    );
    step(&mut cache, &[[3, 100]]).unwrap();
    assert_eq!(cache.free_pages(), 1);
    cache.drop_before(0, 150).unwrap();
    assert_eq!(cache.free_pages(), 3);
    // One page of every layer, the layers behind each other.
    let size = cache.layout().page_bytes();
    let mut page: Vec<u8> = (0..LAYERS * size).map(|i| (i / size) as u8 + 1).collect();
    cache
        .layout()
        .canonical(&mut page[..size], 64, false)
        .unwrap();
    let at = cache.table().pages[3][0];
    assert!(cache.write_page(at, &page[size..]).is_err());
    cache.write_page(at, &page).unwrap();
    for layer in 0..LAYERS {
        let back = cache.layer(layer).unwrap().read_back(3).unwrap();
        assert!(back[0] == page[layer * size..][..size], "{layer}");
    }
}

#[test]
fn a_cache_of_one_layer_takes_steps_as_it_takes_appends() {
    let mut by_steps = cache_of(config("int4", 1, 32, 64));
    let mut by_appends = cache_of(config("int4", 1, 32, 64));
    for of in [&[[0, 70], [1, 3]][..], &[[1, 200]], &[[0, 1], [1, 1]]] {
        let [k, v] = rows(0, &by_appends.table().lens, &appends(of));
        step(&mut by_steps, of).unwrap();
        by_appends.append_batch(&appends(of), &k, &v).unwrap();
        assert!(books(&by_steps) == books(&by_appends));
    }
    by_steps.reserve(&appends(&[[0, 1]])).unwrap();
    is_step(attends(KvSource::Cache(&by_steps)), "lacks the tokens");
    let row = vec![1.0; ROW];
    is_step(by_steps.append(1, &row, &row), "a step of 1 token is open");
    is_step(
        by_steps.append_with(&appends(&[[1, 1]]), |_, _| Ok(())),
        "a step of 1 token is open",
    );
    by_steps.write(0, &row, &row).unwrap();
    attends(KvSource::Cache(&by_steps)).unwrap();
}

#[test]
fn a_description_says_how_many_layers_share_the_table() {
    let of = |layers| config("fp8", layers, 32, 10);
    assert_eq!(of(1).pool_bytes().unwrap() * 5, of(5).pool_bytes().unwrap());
    for layers in [0, 1025, usize::MAX] {
        let mut config = of(1);
        config.layers = layers;
        let error = config.check().unwrap_err();
        assert!(
            matches!(error, Error::Parameter { what: "layers", .. }),
            "{error}"
        );
        assert!(HostPages::new(&config).is_err());
    }
    let mut huge = of(1024);
    huge.num_pages = u32::MAX as usize;
    huge.num_q_heads = 65536;
    (
        huge.num_kv_heads,
        huge.k_tensor_scales,
        huge.v_tensor_scales,
    ) = (65536, vec![1.0; 1024 * 65536], vec![1.0; 1024 * 65536]);
    let error = huge.check().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Parameter {
                what: "the size of the pool",
                ..
            }
        ),
        "{error}"
    );

    // Scales of one layer are those of all; more are of each.
    let scaled = |k: Vec<f32>| {
        let builder = CacheConfig::builder("fp8".parse().unwrap(), HEADS).centres(false);
        builder.layers(2).tensor_scales(k, [1.0; 2]).build()
    };
    let config = scaled(vec![0.5, 0.25]);
    assert_eq!(config.k_tensor_scales, [0.5, 0.25, 0.5, 0.25]);
    let config = scaled(vec![0.5, 0.25, 1.0, 2.0]);
    config.check().unwrap();
    let [k, v] = config.tensor_scales(1);
    assert_eq!((k, v), (&[1.0, 2.0][..], &[1.0; 2][..]));
    assert_eq!(config.tensor_scales(2), [&[]; 2]);
    let error = scaled(vec![1.0; 3]).check().unwrap_err();
    assert!(matches!(
        error,
        Error::ScaleCount {
            what: "k_scales",
            given: 3,
            needed: 4,
            ..
        }
    ));
}

/// Kills looks at keys of layers that are not there.
#[test]
fn a_layer_that_the_cache_lacks_has_no_keys_to_look_at() {
    let mut cache = cache("int8");
    step(&mut cache, &[[0, 200]]).unwrap();
    for layer in [LAYERS, usize::MAX] {
        assert!(!cache.keys_are_due(layer));
        let error = cache.look_at_keys(layer).unwrap_err();
        let found = matches!(error, Error::Layer { given, count: LAYERS } if given == layer);
        assert!(found, "{error}");
    }
    cache.look_at_keys(LAYERS - 1).unwrap();
}

#[test]
fn a_store_of_other_layers_is_refused() {
    let store = HostPages::new(&config("int8", 2, 32, 4)).unwrap();
    let refused = KvCache::new(config("int8", 3, 32, 4), Box::new(store));
    assert!(matches!(
        refused,
        Err(Error::StoreMismatch { what: "layers", .. })
    ));
}
