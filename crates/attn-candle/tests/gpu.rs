//! Caches on a GPU: the bits of those on the CPU, candle's own attention there, refusals.
#![cfg(feature = "cuda")]

mod common;

use attn::{CacheConfig, HeadDim, Heads, KvFormat, Problem};
use attn_candle::{Error, QuantizedKvCache};
use candle_core::{D, DType, Device, Tensor};
use rstest::rstest;

use common::numbers;

const HEADS: Heads = Heads {
    q: 4,
    kv: 2,
    dim: HeadDim::same(64),
};
const CPU: Device = Device::Cpu;

/// The first GPU; none where there is none and `ATTN_REQUIRE` does not name `cuda`, which is told.
fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(reason) => {
            let required = std::env::var("ATTN_REQUIRE").unwrap_or_default();
            assert!(
                !required.split(',').any(|name| name == "cuda"),
                "ATTN_REQUIRE names cuda, which is absent: {reason}"
            );
            eprintln!("cuda: absent, nothing tested: {reason}");
            None
        }
    }
}

/// Numbers `[batch, tokens, heads, 64]` in memory, seen as `[batch, heads, tokens, 64]`.
fn projected(seed: u64, [batch, heads, tokens]: [usize; 3], dtype: DType) -> Tensor {
    let all = numbers(seed, batch * heads * tokens * 64);
    let rows = Tensor::from_vec(all, (batch, tokens, heads, 64), &CPU).unwrap();
    rows.to_dtype(dtype).unwrap().transpose(1, 2).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let wide = tensor
        .to_device(&CPU)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    let all: Vec<f32> = wide.flatten_all().unwrap().to_vec1().unwrap();
    all.iter().map(|x| x.to_bits()).collect()
}

/// Copies a tensor to a GPU, in the same order of dimensions in memory.
fn there(tensor: &Tensor, gpu: &Device) -> Tensor {
    let rows = tensor.transpose(1, 2).unwrap().contiguous().unwrap();
    rows.to_device(gpu).unwrap().transpose(1, 2).unwrap()
}

/// How K and V lie on the GPU.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Projected,
    HeadsFirst,
    Fused,
}

impl Lie {
    fn of(self, tensor: &Tensor, gpu: &Device) -> Tensor {
        let tensor = there(tensor, gpu);
        match self {
            Lie::Projected => tensor,
            Lie::HeadsFirst => tensor.contiguous().unwrap(),
            Lie::Fused => {
                let rows = tensor.transpose(1, 2).unwrap();
                let heads = rows.dims()[2];
                let fused = Tensor::cat(&[&rows.zeros_like().unwrap(), &rows], 2).unwrap();
                let part = fused.narrow(2, heads, heads).unwrap();
                part.transpose(1, 2).unwrap()
            }
        }
    }
}

#[rstest]
#[case("int8", DType::BF16, Lie::Projected)]
#[case("int8", DType::F32, Lie::HeadsFirst)]
#[case("int4", DType::F16, Lie::Fused)]
#[case("int8/int4", DType::BF16, Lie::Fused)]
#[case("int4-g4", DType::F32, Lie::Projected)]
fn a_gpu_has_the_cpus_bits(#[case] format: &str, #[case] dtype: DType, #[case] lie: Lie) {
    let Some(gpu) = gpu() else { return };
    let format: KvFormat = format.parse().unwrap();
    let mut caches =
        [&CPU, &gpu].map(|device| QuantizedKvCache::new(format, HEADS, 2, 512, device).unwrap());
    let mut seed = 1;
    let mut next = |heads, tokens| {
        seed += 1;
        projected(seed, [2, heads, tokens], dtype)
    };
    // A prompt, a draft of which three tokens are rejected, and decoding.
    for tokens in [100, 5, 1, 1, 70] {
        let [k, v, q] = [next(2, tokens), next(2, tokens), next(4, tokens)];
        let [here, other] = &mut caches;
        here.append(&k, &v).unwrap();
        other.append(&lie.of(&k, &gpu), &lie.of(&v, &gpu)).unwrap();
        let found = other.attend(&lie.of(&q, &gpu)).unwrap();
        let wanted = here.attend(&q).unwrap();
        assert_eq!(
            (found.dims(), found.dtype()),
            (wanted.dims(), wanted.dtype())
        );
        assert!(found.device().is_cuda());
        assert_eq!(bits(&found), bits(&wanted), "{tokens} tokens");
        if tokens == 5 {
            for cache in &mut caches {
                cache.truncate(0, 102).unwrap();
                cache.truncate(1, 102).unwrap();
            }
        }
    }
    // A fork goes its own way.
    let [k, v, q] = [2, 2, 4].map(|heads| projected(99, [1, heads, 1], dtype));
    let [wanted, found] = [&CPU, &gpu].map(|device| {
        let cache = &mut caches[usize::from(device.is_cuda())];
        cache.free(1).unwrap();
        cache.fork(0, 1).unwrap();
        let [k, v, q] = [&k, &v, &q].map(|x| x.to_device(device).unwrap());
        cache.append_to(&[1], &k, &v).unwrap();
        let both = [0, 1].map(|sequence| bits(&cache.attend_to(&[sequence], &q).unwrap()));
        assert_ne!(both[0], both[1]);
        both
    });
    assert_eq!(found, wanted);
}

#[test]
fn layers_of_one_cache_have_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .layers(2)
        .max_len(256)
        .max_q_len(256)
        .build();
    let problems = || {
        [
            Problem::new(HEADS, []).window_left(40),
            Problem::new(HEADS, []),
        ]
    };
    let outputs = [&CPU, &gpu].map(|device| {
        let mut cache = QuantizedKvCache::shared(&config, problems(), device).unwrap();
        let mut all = Vec::new();
        for (step, tokens) in [90, 1, 3].into_iter().enumerate() {
            cache.reserve(&[0], tokens).unwrap();
            for layer in 0..2 {
                let seed = (10 * step + layer) as u64;
                let [k, v, q] = [(1, 2), (2, 2), (3, 4)]
                    .map(|(n, heads)| projected(100 * n + seed, [1, heads, tokens], DType::BF16))
                    .map(|x| x.to_device(device).unwrap());
                cache.write(layer, &k, &v).unwrap();
                all.push(bits(&cache.attend_layer(layer, &[0], &q).unwrap()));
            }
        }
        // A step that is taken back leaves no trace.
        cache.reserve(&[0], 2).unwrap();
        let rows = projected(7, [1, 2, 2], DType::BF16)
            .to_device(device)
            .unwrap();
        cache.write(0, &rows, &rows).unwrap();
        cache.cancel_step().unwrap();
        assert_eq!(cache.lens(), [94]);
        let q = projected(8, [1, 4, 1], DType::BF16)
            .to_device(device)
            .unwrap();
        all.push(bits(&cache.attend_layer(1, &[0], &q).unwrap()));
        all
    });
    assert_eq!(outputs[0], outputs[1]);
}

#[rstest]
#[case("int8", 0.02)]
#[case("bf16", 0.01)]
fn it_is_candles_attention_on_the_gpu(#[case] format: &str, #[case] bound: f64) {
    let Some(gpu) = gpu() else { return };
    let format: KvFormat = format.parse().unwrap();
    let mut cache = QuantizedKvCache::new(format, HEADS, 1, 256, &gpu).unwrap();
    let [k, v, q] = [(1, 2, 200), (2, 2, 200), (3, 4, 1)]
        .map(|(seed, heads, tokens)| there(&projected(seed, [1, heads, tokens], DType::F32), &gpu));
    cache.append(&k, &v).unwrap();
    let found = cache.attend(&q).unwrap();
    let repeat = |x: &Tensor| {
        let repeated = x.unsqueeze(2).unwrap().expand((1, 2, 2, 200, 64)).unwrap();
        repeated.reshape((1, 4, 200, 64)).unwrap()
    };
    let keys = repeat(&k).t().unwrap().contiguous().unwrap();
    let scores = (q.contiguous().unwrap().matmul(&keys).unwrap() * 0.125).unwrap();
    let largest = scores.max_keepdim(D::Minus1).unwrap();
    let weights = scores.broadcast_sub(&largest).unwrap().exp().unwrap();
    let sum = weights.sum_keepdim(D::Minus1).unwrap();
    let exact = weights
        .broadcast_div(&sum)
        .unwrap()
        .matmul(&repeat(&v))
        .unwrap();
    let norm = |x: &Tensor| {
        let squares = x.sqr().unwrap().sum_all().unwrap();
        f64::from(squares.to_scalar::<f32>().unwrap()).sqrt()
    };
    let error = norm(&(&found - &exact).unwrap()) / norm(&exact);
    assert!(error < bound, "{error} is the error, {bound} the bound");
}

#[test]
fn what_a_gpu_refuses_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 1, 256, &gpu).unwrap();
    let rows = |tokens, dtype| projected(1, [1, 2, tokens], dtype).to_device(&gpu).unwrap();
    let (three, two) = (rows(3, DType::F32), rows(2, DType::F32));
    let error = cache
        .append(&three, &three.to_device(&CPU).unwrap())
        .unwrap_err();
    assert!(matches!(error, Error::Device { what: "v", .. }), "{error}");
    let error = cache.append(&three, &two).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Attention(attn::Error::Shape {
                what: "v",
                given: [2, 2, 64],
                needed: [3, 2, 64]
            })
        ),
        "{error}"
    );
    let error = cache.append(&three, &rows(3, DType::BF16)).unwrap_err();
    assert!(
        matches!(error, Error::Attention(attn::Error::Rows { what: "v", .. })),
        "{error}"
    );
    let mut here = QuantizedKvCache::new(KvFormat::INT8, HEADS, 1, 256, &CPU).unwrap();
    let error = here.append(&three, &three).unwrap_err();
    assert!(matches!(error, Error::Device { what: "k", .. }), "{error}");
    cache.reserve(&[0], 2).unwrap();
    let error = cache.write(0, &three, &three).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Attention(attn::Error::Shape {
                what: "k",
                given: [3, 2, 64],
                needed: [2, 2, 64]
            })
        ),
        "{error}"
    );
    cache.cancel_step().unwrap();
    assert_eq!(cache.lens(), [0]);
}
