//! The wgpu backend of `attn`: the same answers on any GPU with Vulkan, Metal or DX12, without a vendor's toolkit.
//!
//! int8 and int4 caches give the bits of `docs/arithmetic.md` where the adapter rounds each f32 operation (as Mesa's llvmpipe and NVIDIA's
//! Vulkan driver do; [`WgpuBackend::check_arithmetic`] checks an adapter). Other formats stay within the suite's bound.
//!
//! Reading order: `gpu` (the device), `pipeline` (kernels), `pool` and `append` (pages), `store` (a cache), `launch` (a step), `arithmetic` (the check
//! of the adapter), then `kernels/wgsl/decode_split.wgsl`; `attn_kernels::wgsl` chooses the constants of the kernels. With a device of your own: [`WgpuBackend::with_device`], [`WgpuBackend::prepare`], [`WgpuBackend::record`].

mod append;
mod arithmetic;
mod backend;
mod error;
mod gpu;
mod import;
mod launch;
mod options;
mod pipeline;
mod pool;
mod store;
mod unsubmitted;
#[cfg(test)]
mod valid;
mod view;

#[doc(hidden)]
pub mod internals;

use attn_core::{DecodeAttention, Unsupported};

pub use arithmetic::ArithmeticCheck;
pub use attn_kernels::wgsl::decode::Tuning;
pub use backend::WgpuBackend;
pub use error::WgpuError;
pub use launch::Prepared;
pub use options::{AdapterFeatures, Options};
pub use store::DevicePages;
pub use view::{DeviceView, SideRows};
pub use wgpu;

/// Opens the best adapter behind the common trait, or the one that the environment names, with the options that it sets; never panics.
///
/// # Errors
/// [`Unsupported::Absent`] with the reason and the repair.
///
/// ```no_run
/// match attn_wgpu::open() {
///     Ok(backend) => println!("{}", backend.device().name),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn open() -> Result<Box<dyn DecodeAttention>, Unsupported> {
    Ok(Box::new(WgpuBackend::open()?))
}
