//! One GPU: how it is opened.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use attn_core::{Error, Unsupported};

use crate::{
    call_memory::HostCalls, callers_context::CallersContext, device::Device,
    error::refused_by_driver, options::Options,
};

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) device: Arc<Device>,
    host_calls: Arc<Mutex<HostCalls>>,
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
        let device = Device::open(options)?;
        let _callers = CallersContext::keep();
        let host_calls = HostCalls::new(&device).map_err(refused_by_driver)?;
        Ok(CudaBackend {
            device: Arc::new(device),
            host_calls: Arc::new(Mutex::new(host_calls)),
        })
    }

    /// Makes the device's context current on this thread, as launches on a caller's stream need it, until the value is dropped.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Unsupported::Forked`].
    pub fn make_current(&self) -> Result<CallersContext, Error> {
        let callers = CallersContext::keep();
        self.device.bind()?;
        Ok(callers)
    }

    /// Another handle of the same GPU.
    pub(crate) fn share(&self) -> Self {
        CudaBackend {
            device: self.device.clone(),
            host_calls: self.host_calls.clone(),
        }
    }

    /// The memory of calls with rows in host memory, for one that waits for its work before it lets go of it.
    pub(crate) fn host_calls(&self) -> MutexGuard<'_, HostCalls> {
        let calls = self.host_calls.lock();
        calls.unwrap_or_else(PoisonError::into_inner)
    }
}
