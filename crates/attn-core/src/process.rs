//! The process that backends run in. A process that is forked from it inherits neither their threads nor their devices' contexts: a call there would
//! wait for ever for a worker that does not exist.
//!
//! A backend calls [`open`] as it opens its device. From then on every call that leads to a device or to threads passes [`check`]: making a plan, a step
//! or a cache, and each access of a cache to its pages.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Unsupported;

/// No process has this number.
const NONE: u32 = 0;

/// The process that opened the first device. Not behind a lock: a fork can come while another thread holds it.
static OWNER: AtomicU32 = AtomicU32::new(NONE);

/// The number of this process. A page in a browser is no process and never forks.
fn own() -> u32 {
    match cfg!(target_family = "wasm") {
        true => 1,
        false => std::process::id(),
    }
}

/// For backends: says that this process opens a device.
///
/// # Errors
/// Those of [`check`].
pub fn open() -> Result<(), Unsupported> {
    let (own, order) = (own(), Ordering::Relaxed);
    match OWNER.compare_exchange(NONE, own, order, order) {
        Err(owner) if owner != own => Err(Unsupported::Forked),
        _ => Ok(()),
    }
}

/// Refuses a process that was forked from the one that opened a device.
///
/// # Errors
/// [`Unsupported::Forked`].
pub fn check() -> Result<(), Unsupported> {
    match OWNER.load(Ordering::Relaxed) {
        NONE => Ok(()),
        owner if owner == own() => Ok(()),
        _ => Err(Unsupported::Forked),
    }
}
