//! Attention over a quantized cache against candle's own operations on f32 tensors; bits; refusals.

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

/// Numbers `[batch, heads, tokens, 64]`.
fn random(seed: u64, batch: usize, heads: usize, tokens: usize) -> Tensor {
    let all = numbers(seed, batch * heads * tokens * 64);
    Tensor::from_vec(all, (batch, heads, tokens, 64), &CPU).unwrap()
}

/// Attention as candle's models compute it: `softmax(q·kᵀ·scale, capped and masked)·v`, the queries being the last tokens.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, problem: &Problem) -> candle_core::Result<Tensor> {
    let (batch, heads, rows, dim) = q.dims4()?;
    let (_, kv_heads, tokens, _) = k.dims4()?;
    let repeat = |x: &Tensor| {
        let shared = (batch, kv_heads, heads / kv_heads, tokens, dim);
        let repeated = x.unsqueeze(2)?.expand(shared)?;
        repeated.reshape((batch, heads, tokens, dim))
    };
    let (k, v) = (repeat(k)?, repeat(v)?);
    let scores =
        (q.contiguous()?.matmul(&k.t()?.contiguous()?)? * f64::from(problem.score_scale()))?;
    let scores = match problem.scores.softcap {
        Some(cap) => ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?,
        None => scores,
    };
    let mask = (0..rows).flat_map(|i| {
        let position = tokens - rows + i;
        let first = problem
            .scores
            .window_left
            .map_or(0, |w| position.saturating_sub(w));
        let seen = first..=position;
        (0..tokens).map(move |t| {
            if seen.contains(&t) {
                0.0
            } else {
                f32::NEG_INFINITY
            }
        })
    });
    let mask = Tensor::from_iter(mask, &CPU)?.reshape((rows, tokens))?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = scores
        .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
        .exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&v)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let wide = tensor.to_dtype(DType::F32).unwrap();
    wide.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).iter().map(|x| x.to_bits()).collect()
}

/// `|out − exact| / |exact|`, by the square norm.
fn error(out: &Tensor, exact: &Tensor) -> f64 {
    assert_eq!(out.dims(), exact.dims());
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let wide = |x: &Tensor| values(x).into_iter().map(f64::from).collect::<Vec<_>>();
    let (out, exact) = (wide(out), wide(exact));
    let differences: Vec<f64> = out.iter().zip(&exact).map(|(a, b)| a - b).collect();
    norm(&differences) / norm(&exact)
}

fn narrow(x: &Tensor, first: usize, tokens: usize) -> Tensor {
    x.narrow(2, first, tokens).unwrap()
}

#[rstest]
#[case(KvFormat::INT8, 0.02)]
#[case(KvFormat::INT8_INT4, 0.08)]
#[case(KvFormat::INT4, 0.08)]
// The 16-bit formats hold this test's numbers exactly.
#[case("bf16".parse().unwrap(), 1e-6)]
#[case("f16".parse().unwrap(), 1e-6)]
#[case("fp8".parse().unwrap(), 0.03)]
fn a_prompt_and_decoded_tokens_are_candles_attention(
    #[case] format: KvFormat,
    #[case] limit: f64,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    let [k, v] = [1, 2].map(|seed| random(seed, 2, HEADS.kv, 150));
    let q = random(3, 2, HEADS.q, 150);
    let exact = attention(&q, &k, &v, &Problem::new(HEADS, [])).unwrap();
    let builder = CacheConfig::builder(format, HEADS).unit_tensor_scales();
    let config = builder.sequences(2).max_len(256).max_q_len(256).build();
    let problems = [Problem::new(HEADS, [])];
    let mut cache = QuantizedKvCache::shared(&config, problems, &CPU).unwrap();
    // Results are rounded to their type.
    let limit = limit
        + match dtype {
            DType::F16 => 3e-4,
            DType::BF16 => 2e-3,
            _ => 0.0,
        };
    for (first, tokens) in [(0, 146), (146, 1), (147, 3)] {
        let [q, k, v] = [&q, &k, &v].map(|x| narrow(x, first, tokens).to_dtype(dtype).unwrap());
        cache.append(&k, &v).unwrap();
        let out = cache.attend(&q).unwrap();
        assert_eq!(out.dtype(), dtype);
        let error = error(&out, &narrow(&exact, first, tokens));
        assert!(error <= limit, "{format}, {tokens} tokens: {error}");
    }
    assert_eq!(cache.lens(), [150, 150]);
}

#[test]
fn a_format_of_static_scales_needs_them() {
    let fp8 = "fp8".parse().unwrap();
    let refused = QuantizedKvCache::new(fp8, HEADS, 2, 256, &CPU).unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("k_scales is missing: fp8 stores"), "{said}");
}

#[rstest]
fn a_token_has_the_same_bits_decoded_alone_and_in_a_prompt(
    #[values(KvFormat::INT8, KvFormat::INT8_INT4, KvFormat::INT4)] format: KvFormat,
) {
    let [k, v] = [4, 5].map(|seed| random(seed, 1, HEADS.kv, 200));
    let q = random(6, 1, HEADS.q, 200);
    let new = || QuantizedKvCache::new(format, HEADS, 1, 256, &CPU).unwrap();
    let (mut prompted, mut decoded) = (new(), new());
    prompted.append(&k, &v).unwrap();
    let all = prompted.attend(&q).unwrap();
    for t in 0..200 {
        let [q, k, v] = [&q, &k, &v].map(|x| narrow(x, t, 1));
        decoded.append(&k, &v).unwrap();
        let one = decoded.attend(&q).unwrap();
        assert_eq!(bits(&one), bits(&narrow(&all, t, 1)), "token {t}");
    }
}

#[test]
fn sequences_of_unequal_lengths_have_the_bits_that_each_has_alone() {
    let lens = [130, 1, 67];
    let new = |n| QuantizedKvCache::new(KvFormat::INT8, HEADS, n, 256, &CPU).unwrap();
    let mut batch = new(3);
    let mut alone = Vec::new();
    let [k, v] = [7, 8].map(|seed| random(seed, 3, HEADS.kv, 1));
    let q = random(9, 3, HEADS.q, 1);
    for (b, tokens) in lens.into_iter().enumerate() {
        let [prompt_k, prompt_v] =
            [10, 20].map(|seed| random(seed + b as u64, 1, HEADS.kv, tokens));
        batch.append_to(&[b], &prompt_k, &prompt_v).unwrap();
        let mut one = new(1);
        one.append(&prompt_k, &prompt_v).unwrap();
        let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(0, b, 1).unwrap());
        one.append(&k, &v).unwrap();
        alone.push(one.attend(&q).unwrap());
    }
    batch.append(&k, &v).unwrap();
    assert_eq!(batch.lens(), [131, 2, 68]);
    let out = batch.attend(&q).unwrap();
    for (b, alone) in alone.iter().enumerate() {
        assert_eq!(
            bits(&out.narrow(0, b, 1).unwrap()),
            bits(alone),
            "sequence {b}"
        );
    }
    // Any of them, in any order.
    let chosen = Tensor::cat(&[q.narrow(0, 2, 1).unwrap(), q.narrow(0, 0, 1).unwrap()], 0).unwrap();
    let out = batch.attend_to(&[2, 0], &chosen).unwrap();
    assert_eq!(bits(&out.narrow(0, 0, 1).unwrap()), bits(&alone[2]));
    assert_eq!(bits(&out.narrow(0, 1, 1).unwrap()), bits(&alone[0]));
}

#[test]
fn tensors_as_projections_leave_them_have_the_bits_of_contiguous_ones() {
    let [k, v] = [11, 12].map(|seed| random(seed, 2, HEADS.kv, 9));
    let q = random(13, 2, HEADS.q, 9);
    let as_projected = |x: &Tensor| {
        let rows = x.transpose(1, 2).unwrap().contiguous().unwrap();
        rows.transpose(1, 2).unwrap()
    };
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
        let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 2, 64, &CPU).unwrap();
        cache.append(k, v).unwrap();
        cache.attend(q).unwrap()
    };
    let out = attend(&q, &k, &v);
    let projected = [&q, &k, &v].map(as_projected);
    assert!(!projected[0].is_contiguous());
    let [q, k, v] = &projected;
    assert_eq!(bits(&attend(q, k, v)), bits(&out));
    // What follows in a model is no copy.
    assert!(out.transpose(1, 2).unwrap().is_contiguous());
}

#[rstest]
#[case(Problem::new(HEADS, []).window_left(5))]
#[case(Problem::new(HEADS, []).softcap(0.05))]
#[case(Problem::new(HEADS, []).softmax_scale(1.5))]
fn each_layer_has_its_own_modifiers(#[case] problem: Problem) {
    let [k, v] = [14, 15].map(|seed| random(seed, 1, HEADS.kv, 40));
    let q = random(16, 1, HEADS.q, 40);
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(64)
        .build();
    let plain = Problem::new(HEADS, []);
    let mut layers =
        QuantizedKvCache::layers(&config, [plain.clone(), problem.clone()], &CPU).unwrap();
    for (cache, problem) in layers.iter_mut().zip([&plain, &problem]) {
        cache.append(&k, &v).unwrap();
        let out = cache.attend(&q).unwrap();
        let exact = attention(&q, &k, &v, problem).unwrap();
        assert!(error(&out, &exact) <= 0.02, "{}", error(&out, &exact));
    }
    let exact = [&plain, &problem].map(|p| attention(&q, &k, &v, p).unwrap());
    assert!(error(&exact[0], &exact[1]) > 0.1, "the modifier shows");
}

#[test]
fn drafts_are_taken_back_prefixes_shared_and_sequences_emptied() {
    let [k, v] = [17, 18].map(|seed| random(seed, 1, HEADS.kv, 30));
    let q = random(19, 1, HEADS.q, 1);
    let part = |first, tokens| [&k, &v].map(|x| narrow(x, first, tokens));
    let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 2, 64, &CPU).unwrap();
    let [first_k, first_v] = part(0, 20);
    cache.append_to(&[0], &first_k, &first_v).unwrap();
    let before = cache.attend_to(&[0], &q).unwrap();
    cache.fork(0, 1).unwrap();
    let [more_k, more_v] = part(20, 10);
    cache.append_to(&[0], &more_k, &more_v).unwrap();
    assert_eq!(cache.lens(), [30, 20]);
    assert_ne!(bits(&cache.attend_to(&[0], &q).unwrap()), bits(&before));
    assert_eq!(bits(&cache.attend_to(&[1], &q).unwrap()), bits(&before));
    assert_eq!(cache.longest_prefix(0, 20).unwrap(), 20);
    cache.truncate(0, 20).unwrap();
    assert_eq!(bits(&cache.attend_to(&[0], &q).unwrap()), bits(&before));
    cache.free(1).unwrap();
    assert_eq!(cache.lens(), [20, 0]);
    cache.reset().unwrap();
    assert_eq!(cache.lens(), [0, 0]);
    assert_eq!(
        cache.session().free_pages(),
        cache.session().config().num_pages
    );
}

#[rstest]
#[case::heads(
    random(1, 2, 3, 1),
    random(1, 2, 2, 1),
    "k has the shape [2, 3, 1, 64]; allowed: [batch, 2 heads, tokens, 64]"
)]
#[case::rank(random(1, 2, 2, 1).squeeze(2).unwrap(), random(1, 2, 2, 1), "k has the shape [2, 2, 64]; allowed")]
#[case::dims(random(1, 2, 2, 1), random(1, 2, 2, 1).narrow(3, 0, 32).unwrap(), "v has the shape [2, 2, 1, 32]; allowed")]
#[case::batch(
    random(1, 3, 2, 1),
    random(1, 3, 2, 1),
    "k has a batch of 3, but 2 sequences are named"
)]
#[case::tokens(
    random(1, 2, 2, 2),
    random(1, 2, 2, 1),
    "v has rows of the shape [2, 2, 64]; needed: [4, 2, 64]"
)]
#[case::dtype(random(1, 2, 2, 1).to_dtype(DType::F64).unwrap(), random(1, 2, 2, 1), "k has elements of type F64; allowed: f32, f16, bf16")]
#[case::full(
    random(1, 2, 2, 70),
    random(1, 2, 2, 70),
    "the cache needs 4 more pages, but 2 of 2 are free"
)]
#[case::infinite(random(1, 2, 2, 1), (random(1, 2, 2, 1) / 0.0).unwrap(), "v is ")]
fn what_cannot_be_appended_is_refused_and_changes_nothing(
    #[case] k: Tensor,
    #[case] v: Tensor,
    #[case] refusal: &str,
) {
    let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 2, 64, &CPU).unwrap();
    let given = cache.append(&k, &v).unwrap_err().to_string();
    assert!(given.starts_with(refusal), "{given}");
    assert_eq!(cache.lens(), [0, 0]);
    assert_eq!(
        cache.session().free_pages(),
        cache.session().config().num_pages
    );
}

#[test]
fn queries_sequences_and_problems_that_do_not_fit_are_refused() {
    let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 2, 64, &CPU).unwrap();
    let kv = random(1, 2, HEADS.kv, 1);
    cache.append(&kv, &kv).unwrap();
    let refusal = cache.attend(&random(1, 2, 3, 1)).unwrap_err();
    assert!(
        matches!(refusal, Error::Shape { what: "q", .. }),
        "{refusal}"
    );
    let refusal = cache.attend(&random(1, 1, 4, 1)).unwrap_err();
    assert!(
        matches!(
            refusal,
            Error::Batch {
                what: "q",
                given: 1,
                needed: 2
            }
        ),
        "{refusal}"
    );
    let wide = random(1, 2, 4, 1).to_dtype(DType::F64).unwrap();
    let refusal = cache.attend(&wide).unwrap_err();
    assert!(
        matches!(refusal, Error::DType { what: "q", .. }),
        "{refusal}"
    );
    let refusal = cache.attend_to(&[0, 2], &random(1, 2, 4, 1)).unwrap_err();
    assert!(
        matches!(
            refusal,
            Error::Attention(attn::Error::Sequence { given: 2, count: 2 })
        ),
        "{refusal}"
    );
    let refusal = cache.append_to(&[1, 1], &kv, &kv).unwrap_err();
    assert!(
        matches!(
            refusal,
            Error::Attention(attn::Error::Repeated { sequence: 1 })
        ),
        "{refusal}"
    );
    assert_eq!(cache.lens(), [1, 1]);
    // What was refused before leaves the cache as it was.
    cache.attend(&random(1, 2, 4, 1)).unwrap();

    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(64)
        .build();
    let other = Problem::new(Heads { kv: 4, ..HEADS }, []);
    let refusal = QuantizedKvCache::layers(&config, [other], &CPU).unwrap_err();
    assert!(
        matches!(
            refusal,
            Error::Attention(attn::Error::Mismatch {
                what: "num_kv_heads",
                ..
            })
        ),
        "{refusal}"
    );
}

#[test]
fn an_error_becomes_candles_with_its_sentence() {
    let step = || -> candle_core::Result<Tensor> {
        let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 1, 64, &CPU)?;
        Ok(cache.attend(&random(1, 1, 3, 1))?)
    };
    let text = step().unwrap_err().to_string();
    assert!(text.contains("q has the shape [1, 3, 1, 64]"), "{text}");
}

#[test]
fn no_tokens_and_no_sequences_are_allowed_and_sizes_beyond_memory_are_refused() {
    let mut cache = QuantizedKvCache::new(KvFormat::INT4, HEADS, 2, 64, &CPU).unwrap();
    let none = random(1, 2, HEADS.kv, 0);
    cache.append(&none, &none).unwrap();
    let out = cache.attend(&random(1, 2, HEADS.q, 0)).unwrap();
    assert_eq!(out.dims(), [2, HEADS.q, 0, 64]);
    let nobody = random(1, 0, HEADS.kv, 1);
    cache.append_to(&[], &nobody, &nobody).unwrap();
    let out = cache.attend_to(&[], &random(1, 0, HEADS.q, 1)).unwrap();
    assert_eq!(out.dims(), [0, HEADS.q, 1, 64]);
    assert_eq!(cache.lens(), [0, 0]);
    for (sequences, tokens) in [(1, usize::MAX), (usize::MAX, 64), (1 << 20, 1 << 40)] {
        let refusal = QuantizedKvCache::new(KvFormat::INT4, HEADS, sequences, tokens, &CPU);
        assert!(
            matches!(refusal, Err(Error::Attention(_))),
            "{sequences} x {tokens}"
        );
    }
}
