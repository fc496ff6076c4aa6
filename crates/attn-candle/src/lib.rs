//! Attention over a quantized KV cache for [candle](https://docs.rs/candle-core)'s tensors.
//!
//! A [`QuantizedKvCache`] takes the place of the K and V that an attention layer concatenates, and of the products and the softmax over them:
//!
//! ```
//! use attn::{Heads, KvFormat};
//! use attn_candle::QuantizedKvCache;
//! use candle_core::{DType, Device, Tensor};
//!
//! let heads = Heads::new(8, 2, 64);
//! let mut cache = QuantizedKvCache::new(KvFormat::INT8, heads, 1, 4096, &Device::Cpu)?;
//! // A prompt of 10 tokens: [batch, heads, tokens, head_dim].
//! let [q, kv] = [8, 2].map(|heads| Tensor::ones((1, heads, 10, 64), DType::F32, &Device::Cpu));
//! let (q, kv) = (q?, kv?);
//! cache.append(&kv, &kv)?;
//! let out = cache.attend(&q)?;
//! assert_eq!((out.dims(), cache.lens()), (q.dims(), &[10][..]));
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Tensors are `[batch, heads, tokens, head_dim]` in f32, f16 or bf16, on the CPU or, with the feature `cuda`, on an NVIDIA GPU, whose steps are enqueued on the
//! stream of candle's device; row b of the batch is the b-th sequence. Tensors
//! whose last dimension is contiguous are read in place, in any order of the others, such as projections leave them; others are copied once. Results
//! have no gradient.
//!
//! candle 0.9.2 to 0.11: the one that your lock file has, if it has one. Where cargo chose another for this crate, tensors of both do not fit together, and
//! `cargo update candle-core@0.11.1 --precise 0.10.2` (the one that you use) mends it.
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]

mod cache;
#[cfg(feature = "cuda")]
mod device;
mod error;
mod rows;

pub use cache::QuantizedKvCache;
pub use error::Error;
