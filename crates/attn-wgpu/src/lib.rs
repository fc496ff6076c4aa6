//! The wgpu backend of `attn`: so far it only looks for its device, and says what it found.
//!
//! Kernels are not part of this version; [`open`] therefore always refuses, and names the reason.

use attn_core::{DecodeAttention, Unsupported};

/// The library whose absence means that there is no device.
const LOADER: &str = "libvulkan.so.1";

/// Looks for the device; never panics.
///
/// # Errors
/// [`Unsupported::Absent`]: without the Vulkan loader that is the reason, with it that this version has no kernels.
pub fn open() -> Result<Box<dyn DecodeAttention>, Unsupported> {
    // SAFETY: loading runs the library's initializers; libvulkan.so.1 is the system's own, made to be loaded by any process.
    let reason = match unsafe { libloading::Library::new(LOADER) } {
        Err(error) => format!("no Vulkan loader: {error}"),
        Ok(_) => {
            format!("found the Vulkan loader ({LOADER}), but this version has no wgpu kernels yet")
        }
    };
    Err(Unsupported::Absent { backend: "wgpu", reason, next_step: "install libvulkan1 (and mesa-vulkan-drivers for a software adapter), or use backend \"cpu\"".into() })
}
