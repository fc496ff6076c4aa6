//! Errors of the device, and their conversion to `attn_core::Error`.

use attn_core::{Error, Unsupported};

/// This backend's name in errors.
pub const BACKEND: &str = "wgpu";

/// An error that the device or wgpu reported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WgpuError {
    /// The device has no memory left.
    #[error("the device is out of memory; create a smaller pool, or free another one")]
    OutOfMemory(#[source] wgpu::Error),
    /// The device refused or failed an operation.
    #[error("the device refused the operation; please report it with the adapter's name")]
    Failed(#[source] wgpu::Error),
    /// The device is gone: reset, unplugged or destroyed.
    #[error(
        "the device is lost ({0}); open the backend again, create its caches anew, and restore them from pages that were read back before"
    )]
    Lost(String),
    /// A buffer could not be mapped.
    #[error("a result could not be read back; open the backend again")]
    Map(#[source] wgpu::BufferAsyncError),
    /// A mapped buffer could not be read.
    #[error("a result could not be read back; open the backend again")]
    Unmapped(#[source] wgpu::MapRangeError),
    /// A call that waits, on a page in a browser, which cannot.
    #[error(
        "a page in a browser cannot wait for the device; await WgpuBackend's method of the same name that ends in _async"
    )]
    Waits,
    /// Waiting for the device failed.
    #[error("waiting for the device failed; open the backend again")]
    Poll(#[source] wgpu::PollError),
    /// wgpu panicked, as it does for handles of another instance.
    #[error("wgpu panicked: {0}; pass buffers and encoders of this backend's own device")]
    Panicked(String),
    /// Tokens or centres of K that a caller's encoder has yet to write.
    #[error(
        "an append that was recorded into an encoder writes what would be read; submit the encoder first"
    )]
    Unsubmitted,
    /// A caller's buffer that a kernel cannot use.
    #[error("buffer {what} {given}; it needs {needed}")]
    Buffer {
        /// The buffer's name.
        what: &'static str,
        /// The buffer's size and usage.
        given: String,
        /// The size and usage that are needed.
        needed: String,
    },
    /// A kernel source could not be specialised.
    #[error(transparent)]
    Kernel(#[from] attn_kernels::wgsl::SpecialiseError),
}

/// [`Error::Device`] of this backend.
#[must_use]
pub fn device(doing: &'static str, source: WgpuError) -> Error {
    Error::Device {
        backend: BACKEND,
        doing,
        source: Box::new(source),
    }
}

/// The error for work that no kernel can take on this device: `what` was asked for, `built` is what there is.
pub(crate) fn no_kernel(what: String, built: String) -> Error {
    Unsupported::NoKernel {
        backend: BACKEND,
        what,
        built,
    }
    .into()
}
