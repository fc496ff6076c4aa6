//! A launch that only reads, and whether a decode launch exists: for the project's own timings.

use std::{ffi::c_void, sync::Arc};

use attn_core::{Error, KvFormat, Problem};
use attn_kernels::cuda::{Instance, KvLayout, params::ReadParams};

use super::{COPY_THREADS, DeviceAddress, LaunchPlan, PlanKind, Stream};
use crate::{device::LoadedKernel, error::failed, gpu::CudaBackend};

/// A prepared read launch.
#[derive(Debug, Clone)]
pub struct NativeRead(Arc<LoadedKernel>);

/// Stages of `read.cu`, and its barriers.
const READ_SHARED: usize = 6 * 16384 + 128;

/// Loads the kernel of [`read_on`].
///
/// # Errors
/// [`Error::Device`].
pub fn prepare_read(gpu: &CudaBackend) -> Result<NativeRead, Error> {
    Ok(NativeRead(gpu.device.kernel(&Instance::Read, READ_SHARED)?))
}

/// Enqueues a kernel that reads `bytes` (a multiple of 16) and does nothing with them: the ceiling of decode's speed.
///
/// # Safety
/// `from` holds `bytes` bytes of device memory and `sink` 4, until the work has run on `stream`; the stream as for [`CudaBackend::decode_on`].
///
/// # Errors
/// [`Error::Parameter`] for other than a multiple of 16; [`Error::Device`] with the driver's refusal.
pub unsafe fn read_on(
    gpu: &CudaBackend,
    read: &NativeRead,
    stream: Stream,
    from: DeviceAddress,
    bytes: usize,
    sink: DeviceAddress,
) -> Result<(), Error> {
    if !bytes.is_multiple_of(16) {
        return Err(Error::parameter("bytes to read", bytes, "a multiple of 16"));
    }
    let mut params = ReadParams {
        from: from.get(),
        bytes: bytes as u64,
        sink: sink.get(),
    };
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    let grid = [2 * gpu.device.sms, 1, 1];
    let kernel = &read.0;
    // SAFETY: `attn_read` takes one ReadParams, asserted on both sides; the rest is this function's contract.
    unsafe { kernel.launch(stream.raw(), grid, COPY_THREADS, &mut arguments) }
        .map_err(failed("reading"))
}

/// Whether [`CudaBackend::prepare`] has a kernel for these arguments; loads none.
///
/// # Errors
/// Those of [`CudaBackend::prepare`], but for the device's.
pub fn check_native(
    gpu: &CudaBackend,
    problem: &Problem,
    format: KvFormat,
    layout: KvLayout,
) -> Result<(), Error> {
    let (limits, preferences) = (gpu.device.limits(), &gpu.device.preferences);
    let kind = PlanKind::Known;
    LaunchPlan::new(kind, limits, preferences, problem, format, layout).map(drop)
}
