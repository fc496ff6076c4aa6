//! How the backends are timed.
//!
//! [`workload`] describes what is timed, [`presets`] names it, [`timer`] says what a backend brings; [`cpu`], [`cuda`] and [`wgpu`] each hold one
//! backend's timer. `attn bench` prints the figures; `cargo bench -p attn-bench` hands the same workloads to criterion.

mod contiguous;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod noise;
pub mod presets;
pub mod timer;
#[cfg(feature = "wgpu")]
pub mod wgpu;
pub mod workload;

pub use contiguous::ContiguousCache;
pub use noise::noise;
pub use presets::workloads;
pub use timer::{Measured, Timer, Timing};
pub use workload::{CacheLayout, Operation, Workload};
