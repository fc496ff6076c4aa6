//! Opened devices, shared by all caches of the process.

use std::{
    collections::HashMap,
    env,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

#[cfg(feature = "cuda")]
use attn::backends::cuda::{CudaBackend, Options};
use attn::{BackendId, CacheConfig, DecodeAttention, Error, KvCache, Unsupported};
use pyo3::prelude::*;

use crate::errors;

/// An opened device.
pub enum Engine {
    /// Rows in host memory.
    Host(Box<dyn DecodeAttention>),
    /// Rows in host memory or on the GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaBackend),
}

impl Engine {
    pub fn backend(&self) -> &dyn DecodeAttention {
        match self {
            Engine::Host(backend) => &**backend,
            #[cfg(feature = "cuda")]
            Engine::Cuda(gpu) => gpu,
        }
    }

    pub fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        self.backend().create_cache(config)
    }
}

/// What a device is asked for by: a backend, and which of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceName {
    pub id: BackendId,
    pub ordinal: usize,
}

impl DeviceName {
    /// `cpu`, `wgpu`, `cuda`, `cuda:1`.
    ///
    /// # Errors
    /// `ParameterError`.
    pub fn parse(name: &str) -> PyResult<Self> {
        let refuse = || {
            errors::parameter(format!(
                "device is {name:?}; allowed: \"cpu\", \"cuda\", \"cuda:1\" and so on, \"wgpu\", or None for the best one here"
            ))
        };
        let (backend, ordinal) = match name.split_once(':') {
            Some((backend, ordinal)) => (backend, ordinal.parse().map_err(|_| refuse())?),
            None => (name, 0),
        };
        let id: BackendId = backend.parse().map_err(|_| refuse())?;
        if ordinal > 0 && id != BackendId::Cuda {
            return Err(refuse());
        }
        Ok(DeviceName { id, ordinal })
    }
}

/// The process that opened the devices: their threads and contexts do not survive a fork.
struct Opened {
    process: u32,
    engines: HashMap<DeviceName, Arc<Engine>>,
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
            engines: HashMap::new(),
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
pub fn open(name: DeviceName) -> PyResult<Arc<Engine>> {
    let opened = opened()?;
    let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(engine) = opened.engines.get(&name) {
        return Ok(engine.clone());
    }
    let engine = Arc::new(open_new(name).map_err(errors::unsupported)?);
    opened.engines.insert(name, engine.clone());
    Ok(engine)
}

fn open_new(name: DeviceName) -> Result<Engine, Unsupported> {
    match name.id {
        #[cfg(feature = "cuda")]
        BackendId::Cuda => {
            let options = Options::from_env()?.ordinal(name.ordinal);
            Ok(Engine::Cuda(CudaBackend::with_options(&options)?))
        }
        id => Ok(Engine::Host(attn::open(id)?)),
    }
}

/// The device that `ATTN_BACKEND` names, else the best here, as `attn::select` orders them.
///
/// # Errors
/// Those of [`DeviceName::parse`]; those of [`open`], of the last one tried.
pub fn best() -> PyResult<(DeviceName, Arc<Engine>)> {
    if let Some(named) = env::var_os("ATTN_BACKEND").filter(|name| !name.is_empty()) {
        let name = DeviceName::parse(&named.to_string_lossy())?;
        return Ok((name, open(name)?));
    }
    let mut last = None;
    for id in BackendId::ALL {
        let name = DeviceName { id, ordinal: 0 };
        match open(name) {
            Ok(engine) if id == BackendId::Cpu || !engine.backend().is_software() => {
                return Ok((name, engine));
            }
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| errors::device("there is no backend")))
}
