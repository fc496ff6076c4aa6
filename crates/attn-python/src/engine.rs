//! Opened devices, shared by all caches of the process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use attn::{Device, DeviceName};
use pyo3::prelude::*;

use crate::errors;

/// Reads `cpu`, `wgpu`, `cuda`, `cuda:1`.
///
/// # Errors
/// `ParameterError`.
pub fn parse(name: &str) -> PyResult<DeviceName> {
    name.parse().map_err(errors::of)
}

/// The process that opened the devices: their threads and contexts do not survive a fork.
struct Opened {
    process: u32,
    devices: HashMap<DeviceName, Arc<Device>>,
    /// The one that was best where none was named.
    best: Option<DeviceName>,
}

/// Refuses a process that was forked from the one that opened a device.
///
/// # Errors
/// `DeviceError`.
fn opened() -> PyResult<&'static Mutex<Opened>> {
    static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| {
        Mutex::new(Opened {
            process: std::process::id(),
            devices: HashMap::new(),
            best: None,
        })
    });
    let owner = opened
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .process;
    if owner != std::process::id() {
        return Err(errors::device(
            "this process was forked from one that had opened attn's devices, whose threads it lacks; start it with multiprocessing's \"spawn\"",
        ));
    }
    Ok(opened)
}

/// The device of this name, opened at its first use.
///
/// # Errors
/// `UnsupportedError` with the reason and the next step; `DeviceError` in a forked process.
pub fn open(name: DeviceName) -> PyResult<Arc<Device>> {
    let mut opened = opened()?.lock().unwrap_or_else(PoisonError::into_inner);
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
    let mut opened = opened()?.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = opened.best.and_then(|name| opened.devices.get(&name)) {
        return Ok(device.clone());
    }
    let device = Arc::new(Device::best().map_err(errors::of)?);
    opened.best = Some(device.name());
    // The device may be open by its name; that one stays.
    let shared = opened.devices.entry(device.name()).or_insert(device);
    Ok(shared.clone())
}
