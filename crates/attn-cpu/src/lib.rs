//! Decode attention on the CPU: the scalar specification ([`reference`](mod@reference)) and a SIMD path with the same bits ([`fast`]).
//!
//! Both read native pages and contiguous views through [`reader`].
#![forbid(unsafe_code)]

mod backend;
pub mod fast;
pub mod reader;
pub mod reference;
mod state;

pub use backend::{CpuBackend, Reference};
