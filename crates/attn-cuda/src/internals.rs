//! What the project's own timing code and tests need; not for other users, and it may change in any release.

use std::sync::Arc;

use attn_core::Error;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, sys};

pub use crate::{
    device::WaitOnDrop,
    error::failed,
    images::image,
    native::{
        centre::{CentreArgs, CentredLaunch, centred_launches, tiles_list},
        decode_args::CentresArgs,
        launch_plan::LaunchPlan,
        query_blocks::PlanKind,
        read::{ReadArgs, check_native, prepare_read},
    },
    sizes::product,
};
use crate::{
    gpu::CudaBackend,
    handles::{DeviceAddress, Stream},
};

/// The context that a backend works in: the device's primary one. Its event tracking is off: a caller that uses its slices on several
/// streams orders them.
#[must_use]
pub fn context(gpu: &CudaBackend) -> &Arc<CudaContext> {
    &gpu.device.context
}

/// The native entry's handle of a stream, which the caller keeps alive.
#[must_use]
pub fn stream_of(stream: &CudaStream) -> Stream {
    Stream::of(stream.cu_stream())
}

/// Where a slice lies; the caller keeps it alive, and orders its uses.
#[must_use]
pub fn address_of<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> DeviceAddress {
    DeviceAddress::new(slice.device_ptr(stream).0)
}

/// Enqueues the driver's copy of bytes, between addresses of the device or of pinned host memory.
///
/// # Safety
/// The stream is a live one of the current context; `from` and `to` name so many bytes, which nothing else writes, nor reads at `to`, until the
/// copy has ended.
///
/// # Errors
/// [`Error::Device`] with the driver's refusal.
pub unsafe fn copy_on(
    stream: Stream,
    from: DeviceAddress,
    to: DeviceAddress,
    bytes: usize,
) -> Result<(), Error> {
    // SAFETY: this function's contract.
    unsafe { sys::cuMemcpyAsync(to.get(), from.get(), bytes, stream.raw()) }
        .result()
        .map_err(failed("copying"))
}
