//! Decode attention on the CPU: the scalar specification ([`Reference`], `reference.rs`) and vector kernels with the same bits.
//!
//! Both read native pages and contiguous views through `reader`. The kernels: `simd` has the vectors of each instruction set,
//! `query` holds the query rows, `tile` finds 64 tokens (`unpack` converts those that the kernels cannot read in place), `integer` and `float` are the
//! two arithmetics (`lanes` unpacks a tile for the integer one where there are many query rows), `grid` and `weights` are the integer one's softmax, `softmax` is what they share, `decode` cuts a step into splits for threads, `pool` has the threads.
//! `peak` is their dot product alone. Appends go through `store` to `quantize`. `float_modes` keeps a caller's flush-to-zero and rounding out of all of it.

mod affinity;
mod backend;
mod blocks;
mod decode;
mod fetch;
mod float;
mod float_modes;
mod grid;
mod integer;
mod lanes;
mod merge;
mod options;
mod peak;
mod pool;
mod quantize;
mod query;
mod reader;
mod reference;
mod rotation;
mod scratch;
mod shared;
mod simd;
mod softmax;
mod split;
mod state;
mod store;
mod stored;
mod tile;
mod unpack;
mod weights;
mod wide;
mod widen;

/// What the project's own tests need; not for other users, and it may change in any release.
#[doc(hidden)]
pub mod internals {
    pub use crate::{
        affinity::{allowed, confine, shares},
        decode::grid_operations,
        grid::Operations,
        reader::{Reader, Side},
    };
}

pub use backend::{CpuBackend, Reference};
pub use options::{MOST_THREADS, Options};
pub use simd::Isa;

use attn_core::{DecodeAttention, Unsupported};

/// This backend's name in errors, plans and devices.
const BACKEND: &str = "cpu";

/// Opens the vector kernels behind the common trait, with the options that the environment sets.
///
/// # Errors
/// [`Unsupported::Absent`] if `ATTN_CPU` names an instruction set that is unknown or not here.
///
/// ```
/// let backend = attn_cpu::open()?;
/// assert_eq!(backend.device().backend, "cpu");
/// # Ok::<(), attn_core::Unsupported>(())
/// ```
pub fn open() -> Result<Box<dyn DecodeAttention>, Unsupported> {
    Ok(Box::new(CpuBackend::open()?))
}
