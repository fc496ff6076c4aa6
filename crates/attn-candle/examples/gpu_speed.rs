//! Decode steps of one attention layer on a GPU: a quantized cache beside candle's own operations in bf16, for one sequence with 32 query heads and 8 KV heads of
//! 128 dims. Prints microseconds of a step, append and attention, the median of some runs of 50 steps.

use std::time::Instant;

use attn::{HeadDim, Heads, KvFormat, Scheme};
use attn_candle::QuantizedKvCache;
use candle_core::{D, DType, Device, Result, Tensor};

const HEADS: Heads = Heads {
    q: 32,
    kv: 8,
    dim: HeadDim::same(128),
};
const STEPS: usize = 50;
const RUNS: usize = 9;

fn noise(heads: usize, tokens: usize, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, (1, heads, tokens, HEADS.dim), device)?.to_dtype(DType::BF16)
}

/// Attention of one query token to all of K and V, whose heads are shared: two products and a softmax, none of them over repeated heads.
fn own(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let group = HEADS.q / HEADS.kv;
    let q = q.reshape((1, HEADS.kv, group, HEADS.dim))?;
    let scores = (q.matmul(&k.t()?)? * (HEADS.dim as f64).powf(-0.5))?;
    let weights = scores
        .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
        .exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(v)?.reshape((1, HEADS.q, 1, HEADS.dim))
}

/// Microseconds of a step.
fn median(device: &Device, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut all = Vec::with_capacity(RUNS);
    for _ in 0..=RUNS {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..STEPS {
            step()?;
        }
        device.synchronize()?;
        all.push(start.elapsed().as_secs_f64() * 1e6 / STEPS as f64);
    }
    // The first run compiles and warms up.
    all.remove(0);
    all.sort_by(f64::total_cmp);
    Ok(all[RUNS / 2])
}

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let formats = [KvFormat::same(Scheme::Bf16), KvFormat::INT8, KvFormat::INT4];
    println!("| tokens | candle | bf16 | int8 | int4 |\n|---|---|---|---|---|");
    for ctx in [1024, 8192, 32_768, 131_072] {
        let (k, v) = (
            noise(HEADS.kv, ctx, &device)?,
            noise(HEADS.kv, ctx, &device)?,
        );
        let (new_k, new_v) = (noise(HEADS.kv, 1, &device)?, noise(HEADS.kv, 1, &device)?);
        let q = noise(HEADS.q, 1, &device)?;
        // candle writes the token in its place in a tensor that is long enough.
        let step = || {
            k.slice_set(&new_k, 2, ctx - 1)?;
            v.slice_set(&new_v, 2, ctx - 1)?;
            own(&q, &k, &v).map(|_| ())
        };
        let mut line = format!("| {ctx} | {:.1} |", median(&device, step)?);
        for format in formats {
            let room = ctx + (RUNS + 1) * STEPS;
            let mut cache = QuantizedKvCache::new(format, HEADS, 1, room, &device)?;
            for first in (0..ctx).step_by(8192) {
                let tokens = (ctx - first).min(8192);
                cache.append(&k.narrow(2, first, tokens)?, &v.narrow(2, first, tokens)?)?;
            }
            let step = || {
                cache.append(&new_k, &new_v)?;
                cache.attend(&q)?;
                Ok(())
            };
            line += &format!(" {:.1} |", median(&device, step)?);
        }
        println!("{line}");
    }
    Ok(())
}
