//! The GPU kernels of `attn`: their text, and beside it what chooses, shapes, parametrizes and compiles them.
//!
//! `CUDA`, `HOST` (feature `cuda`) and `WGSL` (feature `wgsl`) hold every file of `cuda/`, `host/` and `wgsl/` as text, so that packages contain
//! them. Both features are on by default.
//! `kernels/README.md` gives the reading order.
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "wgsl")]
pub mod wgsl;

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
