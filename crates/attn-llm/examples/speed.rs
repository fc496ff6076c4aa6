//! Decode and prefill of a model over this library's caches, beside the same model over candle's own attention.
//!
//!     cargo run --release -p attn-llm --example speed -- MODEL [FORMAT,… [CTX,… [TURNS]]]
//!
//! All caches get the same tokens. Steps take turns, one of each cache after another, and a figure is made of minima: of all turns of a
//! decode step, and of a third as many of each chunk of the prompt, which is taken back between them. Other programs on the machine disturb
//! all caches alike. `candle` is the attention of its Llama-type models in f32: K and V in tensors of the full length, as `candle_nn::kv_cache`
//! has them, repeated for each query head, two products and a softmax. `candle, grouped` saves the repetition: query heads of a KV head
//! are rows of one product.

use std::{
    env,
    error::Error as StdError,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use attn::{Append, BackendId, Heads, KvFormat};
use attn_llm::{Around, Error, Kv, Model, ModelConfig, NewRows, PagedKv, Piece, Products, Wanted};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops::softmax_last_dim;

/// Tokens of a prompt that are computed at once: the program's default.
const CHUNK: usize = 128;

/// Attention by candle's operations, for one sequence.
struct CandleKv {
    heads: Heads,
    /// Whether K and V are repeated for each query head.
    repeats: bool,
    len: usize,
    /// Tokens of the latest step.
    latest: usize,
    /// K and V of each layer, `[1, kv heads, tokens, head_dim]`.
    layers: Vec<[Tensor; 2]>,
}

impl CandleKv {
    fn new(model: &ModelConfig, repeats: bool, max_len: usize) -> candle_core::Result<Self> {
        let shape = (1, model.heads.kv, max_len, model.heads.dim.k);
        let zeros = || Tensor::zeros(shape, DType::F32, &Device::Cpu);
        let layers = model.windows.iter().map(|_| Ok([zeros()?, zeros()?]));
        Ok(CandleKv {
            heads: model.heads,
            repeats,
            len: 0,
            latest: 0,
            layers: layers.collect::<candle_core::Result<_>>()?,
        })
    }

    fn output(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> candle_core::Result<Vec<f32>> {
        let (heads, kv, dim) = (self.heads.q, self.heads.kv, self.heads.dim.k);
        let n = q.len() / (heads * dim);
        let group = heads / kv;
        let tensor = |x: &[f32], heads: usize| {
            let x = Tensor::from_slice(x, (1, n, heads, dim), &Device::Cpu)?;
            x.transpose(1, 2)?.contiguous()
        };
        let len = self.len;
        let appended = |all: &Tensor, new: &[f32]| {
            all.slice_set(&tensor(new, kv)?, 2, len - n)?;
            all.narrow(2, 0, len)
        };
        let [all_k, all_v] = &self.layers[layer];
        let (k, v) = (appended(all_k, k)?, appended(all_v, v)?);
        let q = tensor(q, heads)?;
        let (q, k, v) = match self.repeats {
            true => (q, repeat(&k, group)?, repeat(&v, group)?),
            false => (
                q.reshape((1, kv, group * n, dim))?,
                k.contiguous()?,
                v.contiguous()?,
            ),
        };
        let mut scores = (q.matmul(&k.t()?)? / (dim as f64).sqrt())?;
        if n > 1 {
            let hidden = |i: usize| (0..len).map(move |t| t > len - n + i);
            let mask = (0..n).flat_map(hidden);
            let mask: Vec<f32> = mask
                .map(|h| if h { f32::NEG_INFINITY } else { 0.0 })
                .collect();
            let mask = Tensor::from_vec(mask, (1, 1, n, len), &Device::Cpu)?;
            scores = scores
                .reshape((1, heads, n, len))?
                .broadcast_add(&mask)?
                .reshape(scores.shape())?;
        }
        let out = softmax_last_dim(&scores)?.matmul(&v)?;
        let out = out.reshape((heads, n, dim))?.transpose(0, 1)?;
        debug_assert_eq!(out.dim(D::Minus1)?, dim);
        out.flatten_all()?.to_vec1()
    }
}

/// K or V of each KV head as many times as query heads read it.
fn repeat(x: &Tensor, times: usize) -> candle_core::Result<Tensor> {
    let (batch, kv, len, dim) = x.dims4()?;
    Tensor::cat(&vec![x; times], 2)?.reshape((batch, kv * times, len, dim))
}

impl Kv for CandleKv {
    fn lens(&self) -> &[usize] {
        std::slice::from_ref(&self.len)
    }

    fn begin(&mut self, appends: &[Append]) -> Result<(), Error> {
        self.latest = appends[0].tokens;
        self.len += self.latest;
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), Error> {
        self.len -= std::mem::take(&mut self.latest);
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) -> Result<(), Error> {
        out.copy_from_slice(&self.output(layer, q, k, v)?);
        Ok(())
    }
}

/// A cache by its name.
struct Named {
    name: String,
    kv: Box<dyn Kv>,
}

/// Time of a step, and of its attention.
#[derive(Clone, Copy)]
struct Times {
    all: Duration,
    attention: Duration,
}

impl Times {
    const NONE: Times = Times {
        all: Duration::ZERO,
        attention: Duration::ZERO,
    };
    const MOST: Times = Times {
        all: Duration::MAX,
        attention: Duration::MAX,
    };

    fn plus(self, other: Times) -> Times {
        Times {
            all: self.all + other.all,
            attention: self.attention + other.attention,
        }
    }

    fn least(self, other: Times) -> Times {
        Times {
            all: self.all.min(other.all),
            attention: self.attention.min(other.attention),
        }
    }
}

fn step(model: &Model, kv: &mut dyn Kv, tokens: &[u32]) -> Result<Times, Error> {
    let sequence = 0;
    let mut attention = Duration::ZERO;
    let mut timed = |rows: NewRows<'_>, attend: &mut dyn FnMut(&[f32]) -> Result<(), Error>| {
        let start = Instant::now();
        let done = attend(rows.k);
        attention += start.elapsed();
        done
    };
    let around = &mut timed;
    let start = Instant::now();
    model.forward(
        &[Piece { sequence, tokens }],
        &mut Around { kv, around },
        Wanted::Last,
    )?;
    let all = start.elapsed();
    Ok(Times { all, attention })
}

fn caches(
    model: &ModelConfig,
    formats: &[KvFormat],
    max_len: usize,
) -> Result<Vec<Named>, Box<dyn StdError>> {
    let mut caches = Vec::new();
    for (name, repeats) in [("candle", true), ("candle, grouped", false)] {
        caches.push(Named {
            name: name.to_owned(),
            kv: Box::new(CandleKv::new(model, repeats, max_len)?),
        });
    }
    for &format in formats {
        let backend = Arc::from(attn::open(BackendId::Cpu)?);
        let kv = PagedKv::new(backend, model, format, 1, max_len, CHUNK, true)?;
        caches.push(Named {
            name: format.to_string(),
            kv: Box::new(kv),
        });
    }
    Ok(caches)
}

fn list<T: std::str::FromStr>(
    argument: Option<String>,
    default: &str,
) -> Result<Vec<T>, Box<dyn StdError>>
where
    T::Err: StdError + 'static,
{
    let text = argument.unwrap_or_else(|| default.to_owned());
    let items = text.split(',').map(str::parse);
    Ok(items.collect::<Result<_, _>>()?)
}

fn main() -> Result<(), Box<dyn StdError>> {
    let mut arguments = env::args().skip(1);
    let path = arguments
        .next()
        .ok_or("usage: speed MODEL [FORMAT,… [CTX,… [TURNS]]]")?;
    let formats = list(arguments.next(), "bf16,int8,int4")?;
    let mut contexts: Vec<usize> = list(arguments.next(), "64,1024,2048")?;
    let turns: Vec<usize> = list(arguments.next(), "16")?;
    contexts.sort_unstable();
    let room = contexts.iter().max().unwrap_or(&0) + turns[0] + CHUNK;
    let (model, _) = attn_llm::load(Path::new(&path), Products::F32, &mut |_, _| ())?;
    let mut caches = caches(model.config(), &formats, room)?;
    let vocab = model.config().vocab as u32;
    let mut token = (0..).map(|i: u32| i.wrapping_mul(7919) % vocab);
    let mut prefill = vec![Times::NONE; caches.len()];
    let mut computed = 0;
    println!(
        "| ctx | attention | decode tokens/s | attention of it | prefill so far, tokens/s | attention of it |"
    );
    println!("|---|---|---|---|---|---|");
    for ctx in contexts {
        while caches[0].kv.lens()[0] < ctx {
            let n = (ctx - caches[0].kv.lens()[0]).min(CHUNK);
            let tokens: Vec<u32> = token.by_ref().take(n).collect();
            let mut least = vec![Times::MOST; caches.len()];
            for turn in 0..turns[0].div_ceil(3) {
                for (kv, least) in caches.iter_mut().zip(&mut least) {
                    if turn > 0 {
                        kv.kv.cancel()?;
                    }
                    *least = least.least(step(&model, &mut *kv.kv, &tokens)?);
                }
            }
            let sums = prefill.iter_mut().zip(least);
            sums.for_each(|(sum, least)| *sum = sum.plus(least));
            computed += n;
        }
        let mut decode = vec![Times::MOST; caches.len()];
        for tokens in token.by_ref().take(turns[0]).map(|token| [token]) {
            for (kv, times) in caches.iter_mut().zip(&mut decode) {
                *times = times.least(step(&model, &mut *kv.kv, &tokens)?);
            }
        }
        for ((kv, decode), prefill) in caches.iter().zip(&decode).zip(&prefill) {
            println!(
                "| {ctx} | {} | {:.1} | {:.2} ms, {:.1} % | {:.0} | {:.1} % |",
                kv.name,
                1.0 / decode.all.as_secs_f64(),
                decode.attention.as_secs_f64() * 1e3,
                share(*decode),
                computed as f64 / prefill.all.as_secs_f64(),
                share(*prefill),
            );
        }
    }
    Ok(())
}

fn share(times: Times) -> f64 {
    times.attention.as_secs_f64() / times.all.as_secs_f64() * 100.0
}
