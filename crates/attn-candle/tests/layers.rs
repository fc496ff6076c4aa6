//! Caches of several layers, and tokens that no window sees any more.

mod common;

use attn::{CacheConfig, HeadDim, Heads, KvFormat, Problem};
use attn_candle::{Error, QuantizedKvCache};
use candle_core::{Device, Tensor};
use common::numbers;
use rstest::rstest;

const CPU: Device = Device::Cpu;
const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};

fn rows(seed: usize, batch: usize, heads: usize, tokens: usize) -> Tensor {
    let all = numbers(seed as u64, batch * heads * tokens * HEADS.dim.k);
    Tensor::from_vec(all, (batch, heads, tokens, HEADS.dim.k), &CPU).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    values.iter().map(|x| x.to_bits()).collect()
}

fn config(format: KvFormat, layers: usize) -> CacheConfig {
    let builder = CacheConfig::builder(format, HEADS).sequences(2);
    builder.layers(layers).max_len(512).build()
}

#[rstest]
fn layers_of_one_cache_have_the_bits_of_a_cache_for_each(
    #[values(KvFormat::INT8, KvFormat::INT4)] format: KvFormat,
) {
    // Each layer has its own modifiers.
    let problems = [
        Problem::new(HEADS, []),
        Problem::new(HEADS, []).softcap(0.5),
    ];
    let mut shared = QuantizedKvCache::shared(&config(format, 2), problems.clone(), &CPU).unwrap();
    let mut own = QuantizedKvCache::layers(&config(format, 1), problems, &CPU).unwrap();
    for (step, tokens) in [40, 1, 3].into_iter().enumerate() {
        shared.reserve(&[1, 0], tokens).unwrap();
        for layer in [1, 0] {
            let [k, v] = [0, 1].map(|part| rows(10 * step + 2 * layer + part, 2, HEADS.kv, tokens));
            let q = rows(90 + step, 2, HEADS.q, tokens);
            shared.write(layer, &k, &v).unwrap();
            own[layer].append_to(&[1, 0], &k, &v).unwrap();
            let out = shared.attend_layer(layer, &[1, 0], &q).unwrap();
            assert_eq!(
                bits(&out),
                bits(&own[layer].attend_to(&[1, 0], &q).unwrap())
            );
        }
    }
    assert_eq!(shared.lens(), [44, 44]);
}

#[test]
fn a_step_that_fails_in_a_layer_is_taken_back_whole() {
    let problems = vec![Problem::new(HEADS, []); 2];
    let mut cache = QuantizedKvCache::shared(&config(KvFormat::INT8, 2), problems, &CPU).unwrap();
    let (kv, q) = (rows(1, 1, HEADS.kv, 3), rows(2, 1, HEADS.q, 1));
    let mut refused = |call: &dyn Fn(&mut QuantizedKvCache) -> Result<(), Error>,
                       sentence: &str| {
        let error = call(&mut cache).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error:?} lacks {sentence:?}");
    };
    refused(
        &|cache| cache.write(0, &kv, &kv),
        "reserve its tokens first",
    );
    refused(
        &|cache| cache.append_to(&[0], &kv, &kv),
        "`reserve` the step's tokens",
    );
    refused(&|cache| cache.reserve(&[2], 1), "sequence 2 does not exist");
    refused(&|cache| cache.attend_to(&[0], &q).map(drop), "attend_layer");
    refused(
        &|cache| {
            cache.reserve(&[0], 3)?;
            cache.write(0, &kv, &kv)?;
            cache.attend_layer(1, &[0], &q).map(drop)
        },
        "layer 1 lacks the tokens of the open step",
    );
    refused(&|cache| cache.write(0, &kv, &kv), "has written layer 0");
    refused(&|cache| cache.write(2, &kv, &kv), "layer 2");
    refused(
        &|cache| cache.write(1, &rows(1, 2, HEADS.kv, 3), &kv),
        "k has a batch of 2, but 1",
    );
    refused(
        &|cache| cache.write(1, &rows(1, 1, HEADS.kv, 2), &kv),
        "[3, 2, 64]",
    );
    refused(
        &|cache| cache.attend_layer(2, &[0], &q).map(drop),
        "layer 2",
    );
    refused(&|cache| cache.truncate(0, 0), "an open step has the newest");
    assert_eq!(cache.lens(), [3, 0]);
    cache.cancel_step().unwrap();
    assert_eq!(cache.lens(), [0, 0]);
    assert_eq!(
        cache.session().free_pages(),
        cache.session().config().num_pages
    );
    cache.reserve(&[0], 3).unwrap();
    cache.reset().unwrap();
    assert_eq!(cache.lens(), [0, 0]);
    let refusal = QuantizedKvCache::shared(&config(KvFormat::INT8, 3), [], &CPU).unwrap_err();
    assert!(refusal.to_string().contains("0 for 3 layers"), "{refusal}");
}

#[test]
fn a_window_keeps_its_bits_when_the_tokens_before_it_are_dropped() {
    let problem = Problem::new(HEADS, []).window_left(99);
    let layers = QuantizedKvCache::layers(&config(KvFormat::INT8, 1), [problem], &CPU);
    let mut cache = layers.unwrap().remove(0);
    let [k, v] = [1, 2].map(|seed| rows(seed, 1, HEADS.kv, 300));
    let q = rows(3, 1, HEADS.q, 1);
    cache.append_to(&[0], &k, &v).unwrap();
    let before = cache.attend_to(&[0], &q).unwrap();
    let free = cache.session().free_pages();
    assert!(cache.drop_before(0, 301).is_err());
    cache.drop_before(0, 300 - 99).unwrap();
    assert_eq!(cache.session().free_pages(), free + 3);
    assert_eq!(bits(&cache.attend_to(&[0], &q).unwrap()), bits(&before));
    assert_eq!(cache.lens(), [300, 0]);
    // Ten more queries would see tokens that are gone.
    let refusal = cache.attend_to(&[0], &rows(3, 1, HEADS.q, 30)).unwrap_err();
    assert!(
        matches!(refusal, Error::Attention(attn::Error::Dropped { .. })),
        "{refusal}"
    );
}
