//! Decode attention on the CPU: the scalar specification ([`reference`](mod@reference)) and vector kernels with the same bits.
//!
//! Both read native pages and contiguous views through [`reader`]. The kernels: `simd` has the vectors of each instruction set,
//! `query` holds the query rows, `tile` finds 64 tokens (`unpack` converts those that the kernels cannot read in place), `integer` and `float` are the
//! two arithmetics, `softmax` is what they share, `decode` cuts a step into splits for threads.

mod backend;
mod channels;
mod decode;
mod float;
mod integer;
mod merge;
mod query;
pub mod reader;
pub mod reference;
mod scratch;
mod simd;
mod softmax;
mod state;
mod tile;
mod unpack;

pub use backend::{CpuBackend, Reference};
pub use simd::Isa;
