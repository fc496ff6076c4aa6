//! The CUDA context that is current on a thread, which other libraries take for its current device.

use std::{
    fmt,
    ptr::null_mut,
    sync::atomic::{AtomicBool, Ordering},
};

use cudarc::driver::{result, sys};

/// Whether this process has the driver's library, which nothing is asked of before a backend has looked for it.
static HAS_DRIVER: AtomicBool = AtomicBool::new(false);

/// The context that was current on this thread, or that none was: it is so again when the value is dropped.
///
/// Calls of this crate make their device's context current, and leave it so, but for the opening of a device. The CUDA runtime takes the current context for the thread's current device, and with it
/// PyTorch and CuPy: what calls this crate on a thread of theirs keeps their context around the call. It costs two questions to the driver, which take
/// some ten nanoseconds each, and without a driver nothing.
///
/// ```no_run
/// use attn_cuda::{CallersContext, CudaBackend, Options};
///
/// let gpu = CudaBackend::with_options(&Options::default().ordinal(1))?;
/// let callers = CallersContext::keep();
/// // Calls of `gpu`; behind them the thread's device is what it was.
/// drop(callers);
/// # Ok::<(), attn_core::Unsupported>(())
/// ```
#[must_use = "the context is current again when this is dropped"]
pub struct CallersContext(Option<sys::CUcontext>);

impl CallersContext {
    /// Notes this thread's context, where a device has been opened in this process.
    pub fn keep() -> Self {
        let knows = HAS_DRIVER.load(Ordering::Relaxed);
        CallersContext(knows.then(current).flatten())
    }

    /// As [`CallersContext::keep`], where the driver's library is known to be there.
    pub(crate) fn keep_with_driver() -> Self {
        HAS_DRIVER.store(true, Ordering::Relaxed);
        // A driver that is not initialized yet has no context on any thread.
        CallersContext(Some(current().unwrap_or(null_mut())))
    }
}

/// The thread's context, null where it has none.
fn current() -> Option<sys::CUcontext> {
    let context = result::ctx::get_current().ok()?;
    Some(context.unwrap_or(null_mut()))
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if let Some(callers) = self.0
            && current().is_some_and(|now| now != callers)
        {
            // SAFETY: the context was current on this thread, so it was alive, and whoever destroys it meanwhile takes it from all threads; null is none. An error is the
            // driver's, which the caller's next call reports.
            let _ = unsafe { result::ctx::set_current(callers) };
        }
    }
}

impl fmt::Debug for CallersContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallersContext")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where there is none: the bindings panic if they are asked without one.
    #[test]
    fn without_a_driver_nothing_is_asked_of_it() {
        let kept = CallersContext::keep();
        assert!(kept.0.is_none() || HAS_DRIVER.load(Ordering::Relaxed));
        drop(kept);
    }
}
