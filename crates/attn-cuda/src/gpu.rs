//! One GPU: how it is opened.

use std::sync::Arc;

use attn_core::Unsupported;

use crate::{device::Device, options::Options};

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) device: Arc<Device>,
}

impl CudaBackend {
    /// Opens the first GPU that the driver shows; never panics.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] that names what is missing and the next step.
    pub fn open() -> Result<Self, Unsupported> {
        Self::open_ordinal(0)
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// As [`CudaBackend::open`].
    pub fn open_ordinal(ordinal: usize) -> Result<Self, Unsupported> {
        Self::with_options(ordinal, &Options::from_env()?)
    }

    /// Opens GPU `ordinal` with these options; reads none of their environment variables.
    ///
    /// # Errors
    /// As [`CudaBackend::open`].
    pub fn with_options(ordinal: usize, options: &Options) -> Result<Self, Unsupported> {
        Ok(CudaBackend {
            device: Arc::new(Device::open(ordinal, options)?),
        })
    }

    /// The context that the backend works in: the device's primary one. Its event tracking is off: a caller that uses its slices on several
    /// streams orders them.
    pub fn context(&self) -> &Arc<cudarc::driver::CudaContext> {
        &self.device.context
    }
}
