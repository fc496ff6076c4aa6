//! Decode attention on the CPU: the scalar specification ([`reference`](mod@reference)) and vector kernels with the same bits.
//!
//! Both read native pages and contiguous views through [`reader`]. The kernels: `simd` has the vectors of each instruction set,
//! `tile` finds 64 tokens or has `stage` bring them into shape, `integer` and `float` are the two arithmetics, `softmax` what they share, `decode`
//! cuts a step into work for threads.

mod backend;
mod channels;
mod decode;
mod float;
mod integer;
mod merge;
pub mod reader;
pub mod reference;
mod scratch;
mod simd;
mod softmax;
mod stage;
mod state;
mod tile;

pub use backend::{CpuBackend, Reference};
pub use simd::Isa;
