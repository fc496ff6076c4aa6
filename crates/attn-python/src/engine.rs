//! Opened devices, shared by all caches of the process.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use attn::{Device, DeviceName, process};
use pyo3::prelude::*;

use crate::errors;

/// Reads `cpu`, `wgpu`, `cuda`, `cuda:1`.
///
/// # Errors
/// `ParameterError`.
pub fn parse(name: &str) -> PyResult<DeviceName> {
    name.parse().map_err(errors::of)
}

/// The devices of this process.
#[derive(Default)]
struct Opened {
    devices: HashMap<DeviceName, Arc<Device>>,
    /// The one that was best where none was named.
    best: Option<DeviceName>,
}

/// The devices that are open, for this call alone. A process that was forked from another is refused before it waits for a lock, which a thread of
/// the other one may have held.
///
/// # Errors
/// `UnsupportedError`.
fn opened() -> PyResult<MutexGuard<'static, Opened>> {
    static OPENED: LazyLock<Mutex<Opened>> = LazyLock::new(Mutex::default);
    process::check().map_err(errors::unsupported)?;
    Ok(OPENED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The device of this name, opened at its first use.
///
/// # Errors
/// `UnsupportedError` with the reason and the next step, also in a forked process.
pub fn open(name: DeviceName) -> PyResult<Arc<Device>> {
    let mut opened = opened()?;
    if let Some(device) = opened.devices.get(&name) {
        return Ok(device.clone());
    }
    let device = Arc::new(Device::open(name).map_err(errors::unsupported)?);
    opened.devices.insert(name, device.clone());
    Ok(device)
}

/// The device that `ATTN_BACKEND` names, else the best here, as `attn::select` orders them.
///
/// # Errors
/// `ParameterError` for a name of no device; those of [`open`].
pub fn best() -> PyResult<Arc<Device>> {
    if let Some(named) = DeviceName::from_env().map_err(errors::of)? {
        return open(named);
    }
    let mut opened = opened()?;
    if let Some(device) = opened.best.and_then(|name| opened.devices.get(&name)) {
        return Ok(device.clone());
    }
    let device = Arc::new(Device::best().map_err(errors::of)?);
    opened.best = Some(device.name());
    // The device may be open by its name; that one stays.
    let shared = opened.devices.entry(device.name()).or_insert(device);
    Ok(shared.clone())
}

/// Keeps this thread's device, which calls of a cache on another GPU would change, until the value is dropped.
#[cfg(feature = "cuda")]
pub fn keep_context() -> attn::backends::cuda::CallersContext {
    attn::backends::cuda::CallersContext::keep()
}

/// Without CUDA there is none.
#[cfg(not(feature = "cuda"))]
pub fn keep_context() -> Option<()> {
    None
}
