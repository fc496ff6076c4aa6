//! How the backends are timed.
//!
//! [`workload`] names what is timed and what a [`Timer`] brings; [`cpu`], [`cuda`] and [`wgpu`] each hold one backend's timer.
//! `attn bench` prints the figures; `cargo bench -p attn-bench` hands the same workloads to criterion.

mod contiguous;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "wgpu")]
pub mod wgpu;
pub mod workload;

pub use contiguous::ContiguousCache;
pub use workload::{CacheLayout, Measured, Operation, Timer, Timing, Workload, noise, workloads};
