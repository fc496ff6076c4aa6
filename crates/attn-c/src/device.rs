//! Devices: opened by name, shared by caches and plans.

use std::{
    ffi::{CString, c_char},
    sync::Arc,
};

use crate::{
    arguments::{destroy, handle, place, text},
    status::{Status, call},
};

/// An opened device. Caches and plans keep what they need of it, so it can be closed before them.
pub struct Device {
    pub(crate) device: Arc<attn::Device>,
    /// What [`attn_device_name`] returns.
    name: CString,
}

/// Opens a device: "cpu", "cuda" or "cuda:0", "cuda:1" and so on, "wgpu" where the library was built with it. NULL: the one that the environment
/// variable ATTN_BACKEND names, else the best one here.
///
/// # Safety
/// `name` is NULL or text that ends with a zero byte; `device` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_device_open(name: *const c_char, device: *mut *mut Device) -> Status {
    call(|| {
        // SAFETY: this function's contract.
        let out = unsafe { place("device", device) }?;
        let opened = if name.is_null() {
            attn::Device::best()?
        } else {
            // SAFETY: this function's contract.
            let name = unsafe { text("name", name) }?;
            attn::Device::open(name.parse()?)?
        };
        let info = opened.backend().device();
        let name = format!("{}: {} ({})", opened.name(), info.name, info.detail);
        let handle = Device {
            name: CString::new(name.replace('\0', " ")).unwrap_or_default(),
            device: Arc::new(opened),
        };
        *out = Box::into_raw(Box::new(handle));
        Ok(())
    })
}

/// A device's name and what is used of it, for people; valid until it is closed. NULL for NULL.
///
/// # Safety
/// `device` is NULL or was opened and has not been closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_device_name(device: *const Device) -> *const c_char {
    // SAFETY: this function's contract.
    match unsafe { handle("device", device) } {
        Ok(device) => device.name.as_ptr(),
        Err(_) => std::ptr::null(),
    }
}

/// Closes a device; NULL is none.
///
/// # Safety
/// `device` is NULL or was opened and has not been closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attn_device_close(device: *mut Device) {
    // SAFETY: a handle of `attn_device_open`'s by contract, used for the last time.
    unsafe { destroy(device) }
}
