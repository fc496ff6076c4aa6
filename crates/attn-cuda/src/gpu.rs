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
    /// Opens the first GPU that the driver shows, with the options that the environment sets; never panics.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] that names what is missing and the next step.
    ///
    /// ```no_run
    /// use attn_core::DecodeAttention;
    ///
    /// let gpu = attn_cuda::CudaBackend::open()?;
    /// println!("{}", gpu.device().name);
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn open() -> Result<Self, Unsupported> {
        Self::with_options(&Options::from_env()?)
    }

    /// Opens a GPU with these options, and reads none of their environment variables; never panics.
    ///
    /// Where compiled kernels and their compiler lie belongs to the process, not to a backend: `ATTN_CACHE_DIR`, `ATTN_NVRTC` and
    /// `ATTN_KERNELS` are read in any case.
    ///
    /// # Errors
    /// Those of [`CudaBackend::open`].
    ///
    /// ```no_run
    /// use attn_cuda::{CudaBackend, Options};
    ///
    /// // The second GPU, with launches for 100 of its multiprocessors.
    /// let gpu = CudaBackend::with_options(&Options::default().ordinal(1).sms(100))?;
    /// # Ok::<(), attn_core::Unsupported>(())
    /// ```
    pub fn with_options(options: &Options) -> Result<Self, Unsupported> {
        Ok(CudaBackend {
            device: Arc::new(Device::open(options)?),
        })
    }
}
