//! The checking launch of `ATTN_CUDA=check=1`, which looks at the inputs of the launch behind it.

use std::{ffi::c_void, sync::Arc};

use attn_core::Error;
use attn_kernels::cuda::{
    Instance,
    params::{CheckParams, DecodeParams},
};
use cudarc::driver::{DevicePtr, result, sys};

use super::COPY_THREADS;
use crate::{
    device::{Device, LoadedKernel, WaitOnDrop},
    error::CudaError,
};

/// `check.cu`, if `ATTN_CUDA=check=1` asked for it.
pub(super) fn check_kernel(device: &Device) -> Result<Option<Arc<LoadedKernel>>, Error> {
    let wanted = device.check.is_some();
    wanted
        .then(|| device.kernel(&Instance::Check, 0))
        .transpose()
}

/// Looks at the inputs on the device, and waits for the answer; passes while a graph is being captured.
///
/// # Safety
/// Those of [`decode_on`](super::CudaBackend::decode_on) but for the values it checks.
pub(super) unsafe fn check(
    device: &Device,
    kernel: &LoadedKernel,
    stream: sys::CUstream,
    params: &mut DecodeParams,
    mut limits: CheckParams,
) -> Result<(), CudaError> {
    // SAFETY: the stream is alive by contract.
    let status = unsafe { result::stream::is_capturing(stream) }?;
    let Some(report) = device
        .check
        .as_ref()
        .filter(|_| status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    else {
        return Ok(());
    };
    let report = report.device_ptr(&device.stream).0;
    limits.report = report;
    // SAFETY: `report` is 16 bytes of this device.
    unsafe { result::memset_d8_async(report, 0, 16, stream) }?;
    let mut arguments = [
        std::ptr::from_mut(params).cast::<c_void>(),
        (&raw mut limits).cast(),
    ];
    // SAFETY: `attn_check` takes these two blocks, asserted on both sides; it reads only what the contract names.
    unsafe {
        kernel.launch(
            stream,
            [params.batch as usize, 1, 1],
            COPY_THREADS,
            &mut arguments,
        )
    }?;
    let mut found = [0i32; 4];
    // SAFETY: the stream is alive, and its context current, by contract.
    let wait = unsafe { WaitOnDrop::on(stream) };
    // SAFETY: `report` is 16 bytes of this device; `found` outlives `wait`, which waits for the copy however this function ends.
    unsafe { result::memcpy_dtoh_async(&mut found, report, stream) }?;
    wait.finish()?;
    let [kind, index, value, limit] = found;
    let error = |what, value: String, allowed: String| {
        Err(CudaError::Check {
            what,
            index: index as usize,
            value,
            allowed,
        })
    };
    match kind {
        0 => Ok(()),
        1 => error(
            "kv_lens",
            value.to_string(),
            format!("{} to {limit}", limits.min_kv_len),
        ),
        2 => error(
            "page_table",
            (value as u32).to_string(),
            format!("0 to {}", limit - 1),
        ),
        3 => error(
            "residual_pages",
            (value as u32).to_string(),
            format!("0 to {}", limit - 1),
        ),
        6 => error(
            "slots",
            match value {
                i32::MAX => "2147483647 or more".into(),
                value => value.to_string(),
            },
            format!("below {limit} pages of {}, or negative", limits.page_size),
        ),
        7 => error(
            "positions",
            match value {
                i32::MAX => "2147483647 or more".into(),
                value => value.to_string(),
            },
            format!("0 to {}", limit - 1),
        ),
        9 => error(
            "tokens_after",
            value.to_string(),
            format!("0; positive where the shard's tokens, {limit} here, are whole spans of 1024"),
        ),
        8 => error(
            "cu_seqlens_q",
            value.to_string(),
            format!("numbers from 0 to {limit} that never fall"),
        ),
        5 => error(
            "sinks",
            f32::from_bits(value as u32).to_string(),
            "a magnitude up to 1e6".into(),
        ),
        _ => error(
            "q",
            f32::from_bits(value as u32).to_string(),
            "finite, and at most 2^64 once scaled".into(),
        ),
    }
}
