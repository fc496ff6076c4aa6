//! Llama-type models whose attention and KV cache are this library's.
//!
//! A [`Model`] is read from a GGUF file, or from a folder with safetensors, `config.json` and `tokenizer.json`. Its forward pass appends
//! tokens to a [`Kv`], which attends: [`PagedKv`] in pages of any format on any backend, [`ExactKv`] in plain f32. On top of it are
//! [`generate()`], text of many prompts in one batch; [`perplexity()`] and [`recall()`], what a format does to the model's predictions and to what it
//! finds in a long text; [`rows()`], the Q, K and V of its layers.
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
pub mod layers;
mod linear;
mod load;
mod model;
pub mod needle;
pub mod perplexity;
mod tokenizer;

pub use config::{ModelConfig, Rope};
pub use error::Error;
pub use generate::{Event, Generation, Options, generate};
pub use kv::{Around, AroundAttend, ExactKv, Kv, NewRows, PagedKv};
pub use layers::{LayerRows, rows};
pub use linear::Products;
pub use load::load;
pub use model::{Model, Piece, Wanted};
pub use needle::{Haystack, Probe, Recall, recall};
pub use perplexity::{Comparison, Fidelity, perplexity};
pub use tokenizer::Tokenizer;
