//! The GPU kernels of `attn`: their text, and beside it what chooses, shapes, parametrizes and compiles them.
//!
//! [`CUDA`], [`HOST`] and [`WGSL`] hold every file of `cuda/`, `host/` and `wgsl/` as text, so that packages contain them.
//! `kernels/README.md` gives the reading order.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod cuda;
pub mod wgsl;

include!(concat!(env!("OUT_DIR"), "/sources.rs"));
