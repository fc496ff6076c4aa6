//! What goes wrong on a GPU, as the errors of the common trait.

use attn_core::{Error, Unsupported};
use cudarc::driver::DriverError;

use crate::images::ImageError;

/// This backend's name in errors.
pub(crate) const BACKEND: &str = "cuda";

/// The refusal of another backend's cache.
pub(crate) const FOREIGN_CACHE: Error = Error::WrongBackend {
    backend: BACKEND,
    what: "cache",
};

/// An error of the driver, the compiler or the checking launch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's own error.
    #[error("the driver said {text}")]
    Driver {
        /// The number of the `CUresult`.
        code: u32,
        /// Its name and its description.
        text: String,
    },
    /// No image of a kernel.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A kernel asks for more shared memory than there is.
    #[error(
        "a kernel needs {kernel} bytes of shared memory, and {limit} may be used; kernels/cuda and smem.rs are of different versions"
    )]
    SharedBytes {
        /// Bytes that the image asks for.
        kernel: usize,
        /// Bytes that the device allows.
        limit: usize,
    },
    /// Neither the GPU's instructions nor IEEE operations give what the integer arithmetic needs.
    #[error(
        "the GPU's numbers are not those of docs/arithmetic.md, section 5: {0}; use backend \"cpu\", and report the GPU and its driver"
    )]
    Exponential(attn_core::grid::GridCheck),
    /// `ATTN_CUDA=check=1` found inputs that decode cannot survive.
    #[error(
        "ATTN_CUDA=check=1: {what}[{index}] is {value}, allowed {allowed}; correct the caller's device buffer"
    )]
    Check {
        /// Name of the buffer.
        what: &'static str,
        /// Flat index into it.
        index: usize,
        /// Value at the index.
        value: String,
        /// Values that are allowed.
        allowed: String,
    },
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        CudaError::Driver {
            code: error.0 as u32,
            text: error.to_string(),
        }
    }
}

/// Names what was being done when the device failed.
pub fn failed<E: Into<CudaError>>(doing: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::Device {
        backend: BACKEND,
        doing,
        source: Box::new(error.into()),
    }
}

/// The refusal of a backend that is not here.
pub(crate) fn absent(reason: String, next_step: &str) -> Unsupported {
    Unsupported::Absent {
        backend: BACKEND,
        reason,
        next_step: next_step.to_owned(),
    }
}

/// The refusal of a GPU that the driver does not open.
pub(crate) fn refused_by_driver(error: DriverError) -> Unsupported {
    absent(
        format!("the NVIDIA driver refuses: {error}"),
        "see `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use backend \"cpu\"",
    )
}
