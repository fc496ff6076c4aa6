//! An attention layer with a quantized cache in place of concatenated K and V: a prompt, then tokens one by one.

use attn::{HeadDim, Heads, KvFormat};
use attn_candle::QuantizedKvCache;
use candle_core::{DType, Device, Result, Tensor};

const HEADS: Heads = Heads {
    q: 8,
    kv: 2,
    dim: HeadDim::same(64),
};

/// The part of a layer between its projections: `[batch, tokens, heads · dim]` in and out.
fn attention(cache: &mut QuantizedKvCache, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    let (batch, tokens, _) = q.dims3()?;
    let split = |x: &Tensor, heads| {
        let rows = x.reshape((batch, tokens, heads, HEADS.dim.k))?;
        rows.transpose(1, 2)
    };
    // A model rotates q and k here.
    cache.append(&split(k, HEADS.kv)?, &split(v, HEADS.kv)?)?;
    let out = cache.attend(&split(q, HEADS.q)?)?;
    out.transpose(1, 2)?.reshape((batch, tokens, ()))
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let mut cache = QuantizedKvCache::new(KvFormat::INT8, HEADS, 2, 1024, &device)?;
    for tokens in [100, 1, 1, 1] {
        let projected = |heads: usize| {
            let rows = Tensor::randn(0f32, 1.0, (2, tokens, heads * HEADS.dim.k), &device)?;
            rows.to_dtype(DType::BF16)
        };
        let (q, k, v) = (
            projected(HEADS.q)?,
            projected(HEADS.kv)?,
            projected(HEADS.kv)?,
        );
        let out = attention(&mut cache, [&q, &k, &v])?;
        println!(
            "{:?} tokens are cached; the result is {:?} {:?}",
            cache.lens(),
            out.dims(),
            out.dtype()
        );
    }
    Ok(())
}
