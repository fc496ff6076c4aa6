//! Llama-type models whose attention and KV cache are this library's.
//!
//! A [`Model`] is read from a GGUF file, or from a folder with safetensors, `config.json` and `tokenizer.json`. Its forward pass appends
//! tokens to a [`Kv`], which attends: [`PagedKv`] in pages of any format on any backend, [`ExactKv`] in plain f32. On top of it are
//! [`generate()`], text of many prompts in one batch, and [`perplexity()`], what a format does to the model's predictions.
//!
//! A token's logits have the same bits alone, in a batch and in a chunk of a prompt, since attention has, and matrix products have
//! (`linear.rs`).
#![forbid(unsafe_code)]

mod config;
mod error;
mod files;
pub mod generate;
#[cfg(feature = "hub")]
pub mod hub;
mod kv;
mod linear;
mod load;
mod model;
pub mod perplexity;
mod tokenizer;

pub use config::{ModelConfig, Rope};
pub use error::Error;
pub use generate::{Event, Generation, Options, generate};
pub use kv::{Around, AroundAttend, ExactKv, Kv, PagedKv};
pub use linear::Products;
pub use load::load;
pub use model::{Model, Piece, Wanted};
pub use perplexity::{Comparison, Fidelity, perplexity};
pub use tokenizer::Tokenizer;
