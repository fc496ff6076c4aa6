//! What the project's own timing code needs; not for other users, and it may change in any release.

use attn_core::Error;
use attn_kernels::wgsl;

pub use crate::error::{BACKEND, device};
use crate::{backend::WgpuBackend, launch::Prepared, pipeline};

/// The kernel of `read.wgsl`, which only reads its first binding: a ceiling for benchmarks.
///
/// # Errors
/// [`Error::Device`].
pub fn read_kernel(backend: &WgpuBackend) -> Result<wgpu::ComputePipeline, Error> {
    let pipeline = pipeline::compile(&backend.gpu, "read_all", wgsl::read_text())?;
    Ok(wgpu::ComputePipeline::clone(&pipeline))
}

/// The kernel of `products.wgsl`, which multiplies what its first binding holds and writes to its second one: a ceiling for benchmarks.
///
/// # Errors
/// [`Error::Device`].
pub fn products_kernel(backend: &WgpuBackend) -> Result<wgpu::ComputePipeline, Error> {
    let pipeline = pipeline::compile(&backend.gpu, "products", wgsl::products_text())?;
    Ok(wgpu::ComputePipeline::clone(&pipeline))
}

/// Records a step without its merge, for benchmarks; `buffers` are q, out and lse.
///
/// # Errors
/// Those of [`WgpuBackend::record`].
pub fn record_split(
    backend: &WgpuBackend,
    encoder: &mut wgpu::CommandEncoder,
    step: &Prepared,
    buffers: [&wgpu::Buffer; 3],
) -> Result<(), Error> {
    step.record(&backend.gpu, encoder, buffers, false)
}
