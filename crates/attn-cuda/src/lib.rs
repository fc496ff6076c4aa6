//! The cuda backend of `attn`: so far it only looks for its device, and says what it found.
//!
//! Kernels are not part of this version; [`open`] therefore always refuses, and names the reason.

use attn_core::{DecodeAttention, Unsupported};

/// The library whose absence means that there is no device.
const LOADER: &str = "libcuda.so.1";

/// Looks for the device; never panics.
///
/// # Errors
/// [`Unsupported::Absent`]: without the NVIDIA driver that is the reason, with it that this version has no kernels.
pub fn open() -> Result<Box<dyn DecodeAttention>, Unsupported> {
    // SAFETY: loading runs the library's initializers; libcuda.so.1 is the system's own, made to be loaded by any process.
    let reason = match unsafe { libloading::Library::new(LOADER) } {
        Err(error) => format!("no NVIDIA driver: {error}"),
        Ok(_) => {
            format!("found the NVIDIA driver ({LOADER}), but this version has no cuda kernels yet")
        }
    };
    Err(Unsupported::Absent {
        backend: "cuda",
        reason,
        next_step: "install the NVIDIA driver, or use backend \"cpu\"".into(),
    })
}
