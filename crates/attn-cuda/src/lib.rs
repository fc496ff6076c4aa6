//! Decode attention on NVIDIA GPUs (compute capability 8.0 and newer).
//!
//! [`open`] gives the backend behind the common trait; [`CudaBackend`] adds the [`native`] entry for engines: the caller's
//! stream and buffers, nothing allocated or synchronized. Reading order: `attn_kernels::cuda` (which kernel, and how it is configured
//! and launched), `images` and `image_cache` (where its image comes from), [`native`], `attention` and `store` (one attention, one append), which `backend` calls with rows that
//! it copies from the host, and `device_steps` with rows on the device; the kernels lie in `kernels/cuda`.
//!
//! Integer formats give the reference's bits (`docs/arithmetic.md`); `docs/cuda.md` says what each machine needs.

mod attention;
mod backend;
mod call_memory;
mod callers_context;
mod centres;
mod device;
mod device_steps;
mod device_tables;
mod error;
mod explain;
mod gpu;
mod grid_functions;
mod handles;
mod image_cache;
mod images;
mod memory;
pub mod native;
mod options;
mod sizes;
mod slots;
mod staged_view;
mod staging;
mod store;

/// What the project's own timing code and tests need; not for other users, and it may change in any release.
#[doc(hidden)]
pub mod internals;

use attn_core::{DecodeAttention, Unsupported};

pub use attn_kernels::cuda::{Arch, Exponential, KernelChoice, KernelConfig};
pub use callers_context::CallersContext;
pub use error::CudaError;
pub use explain::{ExplainedKernel, Explanation};
pub use gpu::CudaBackend;
pub use image_cache::CacheError;
pub use images::ImageError;
pub use memory::CudaMemory;
pub use options::Options;
pub use store::CudaPages;

/// Opens the first GPU behind the common trait, with the options that the environment sets; never panics.
///
/// # Errors
/// [`Unsupported::Absent`] that names what is missing and the next step.
///
/// ```
/// match attn_cuda::open() {
///     Ok(backend) => println!("{}", backend.device().name),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn open() -> Result<Box<dyn DecodeAttention>, Unsupported> {
    Ok(Box::new(CudaBackend::open()?))
}
