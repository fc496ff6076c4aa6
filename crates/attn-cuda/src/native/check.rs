//! The checking launch of `ATTN_CUDA=check=1`, which looks at the inputs of the launch behind it.

use std::{ffi::c_void, sync::Arc};

use attn_core::Error;
use attn_kernels::cuda::{
    Instance,
    params::{CheckParams, DecodeParams},
};
use cudarc::driver::{DevicePtr, DriverError, result, sys};

use super::grid::COPY_THREADS;
use crate::{
    device::{Device, LoadedKernel, WaitOnDrop},
    error::{CudaError, failed},
};

/// What the checking launch of `ATTN_CUDA=check=1` looks at before another launch.
#[derive(Debug, Clone, Copy)]
pub struct Checked {
    /// What is being checked, as errors say it.
    pub doing: &'static str,
    /// The arrays that it reads.
    pub arrays: DecodeParams,
    /// What their values are compared with.
    pub limits: CheckParams,
}

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
/// Those of the launch that is checked but for the values it checks; the device's context is current.
pub(super) unsafe fn check(
    device: &Device,
    kernel: &LoadedKernel,
    stream: sys::CUstream,
    checked: Checked,
) -> Result<(), Error> {
    let Some(report) = &device.check else {
        return Ok(());
    };
    let report = report.device_ptr(&device.stream).0;
    // SAFETY: this function's contract; `report` is 16 bytes of this device.
    let found = unsafe { found(kernel, stream, report, &checked) };
    let found = found.map_err(failed(checked.doing))?;
    found.map_or(Ok(()), |found| {
        let error = explained(found, &checked.limits);
        Err(failed(checked.doing)(error))
    })
}

/// What the checking kernel reports: kind, index, value and limit. None while a graph is being captured.
///
/// # Safety
/// Those of [`check`]; `report` is 16 bytes of the device.
unsafe fn found(
    kernel: &LoadedKernel,
    stream: sys::CUstream,
    report: u64,
    checked: &Checked,
) -> Result<Option<[i32; 4]>, DriverError> {
    // SAFETY: the stream is alive by contract.
    let status = unsafe { result::stream::is_capturing(stream) }?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(None);
    }
    // SAFETY: `report` is 16 bytes of this device.
    unsafe { result::memset_d8_async(report, 0, 16, stream) }?;
    let mut arrays = checked.arrays;
    let mut limits = CheckParams {
        report,
        ..checked.limits
    };
    let mut arguments = [(&raw mut arrays).cast::<c_void>(), (&raw mut limits).cast()];
    let ctas = [arrays.batch as usize, 1, 1];
    // SAFETY: `attn_check` takes these two blocks, asserted on both sides; it reads only what the contract names.
    unsafe { kernel.launch(stream, ctas, COPY_THREADS, &mut arguments) }?;
    let mut found = [0i32; 4];
    // SAFETY: the stream is alive, and its context current, by contract.
    let wait = unsafe { WaitOnDrop::on(stream) };
    // SAFETY: `report` is 16 bytes of this device; `found` outlives `wait`, which waits for the copy however this function ends.
    unsafe { result::memcpy_dtoh_async(&mut found, report, stream) }?;
    wait.finish()?;
    Ok(Some(found).filter(|found| found[0] != 0))
}

/// A finding as an error: which array has which value where, and what is allowed.
fn explained([kind, index, value, limit]: [i32; 4], limits: &CheckParams) -> CudaError {
    let number = || match value {
        i32::MAX => "2147483647 or more".to_owned(),
        value => value.to_string(),
    };
    let page = || (value as u32).to_string();
    let float = || f32::from_bits(value as u32).to_string();
    let (what, value, allowed) = match kind {
        1 => (
            "kv_lens",
            value.to_string(),
            format!("{} to {limit}", limits.min_kv_len),
        ),
        2 => ("page_table", page(), format!("0 to {}", limit - 1)),
        3 => ("residual_pages", page(), format!("0 to {}", limit - 1)),
        5 => ("sinks", float(), "a magnitude up to 1e6".to_owned()),
        6 => (
            "slots",
            number(),
            format!("below {limit} pages of {}, or negative", limits.page_size),
        ),
        7 => ("positions", number(), format!("0 to {}", limit - 1)),
        8 => (
            "cu_seqlens_q",
            value.to_string(),
            format!("numbers from 0 to {limit} that never fall"),
        ),
        9 => (
            "tokens_after",
            value.to_string(),
            format!("0; positive where the shard's tokens, {limit} here, are whole spans of 1024"),
        ),
        10 => (
            "tokens_before",
            value.to_string(),
            format!("multiples of 1024 up to {limit}: a sequence has 1048576 tokens at most"),
        ),
        11 => ("centre_rows", page(), format!("0 to {}", limit - 1)),
        12 => (
            "centre_positions",
            value.to_string(),
            format!(
                "the token's number in its sequence: {limit}, as the slot says, plus a multiple of {}, below 1048576",
                limits.page_size
            ),
        ),
        _ => (
            "q",
            float(),
            "finite, and at most 2^64 once scaled".to_owned(),
        ),
    };
    CudaError::Check {
        what,
        index: index as usize,
        value,
        allowed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_array_place_value_and_what_is_allowed() {
        let limits = CheckParams {
            min_kv_len: 3,
            page_size: 64,
            ..CheckParams::default()
        };
        let half = 0.5f32.to_bits() as i32;
        for (found, said) in [
            ([1, 4, -1, 700], "kv_lens[4] is -1, allowed 3 to 700"),
            ([2, 5, -2, 9], "page_table[5] is 4294967294, allowed 0 to 8"),
            ([3, 6, 9, 9], "residual_pages[6] is 9, allowed 0 to 8"),
            ([4, 1, half, 0], "q[1] is 0.5, allowed finite"),
            ([5, 2, half, 0], "sinks[2] is 0.5, allowed a magnitude"),
            (
                [6, 7, i32::MAX, 9],
                "slots[7] is 2147483647 or more, allowed below 9 pages of 64",
            ),
            ([7, 8, -5, 9], "positions[8] is -5, allowed 0 to 8"),
            (
                [8, 9, 6, 5],
                "cu_seqlens_q[9] is 6, allowed numbers from 0 to 5",
            ),
            ([9, 0, 1, 100], "tokens_after[0] is 1, allowed 0; positive"),
            (
                [10, 1, 64, 4096],
                "tokens_before[1] is 64, allowed multiples of 1024 up to 4096",
            ),
            (
                [11, 3, -1, 9],
                "centre_rows[3] is 4294967295, allowed 0 to 8",
            ),
            (
                [12, 3, 64, 5],
                "centre_positions[3] is 64, allowed the token's number in its sequence: 5, as the slot says, plus a multiple of 64",
            ),
        ] {
            let text = explained(found, &limits).to_string();
            assert!(text.contains(said), "{text}");
        }
    }
}
