//! Devices by name: `cpu`, `wgpu`, `cuda`, `cuda:1`.

use std::{env, ffi::OsString, fmt, str::FromStr};

use attn_core::grid::GridCheck;
#[cfg(feature = "cuda-unversioned")]
use attn_cuda::{CudaBackend, Options};

use crate::{
    BackendId, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, DeviceSteps, Error, KvCache,
    KvFormat, Plan, Problem, SpanStates, SpansStep, Unsupported, events,
};

const NAMES: &str = "cpu, wgpu, cuda, cuda:1 and so on; none for the best one here";

/// A backend, and which of its devices. Its text is `cpu`, `wgpu`, `cuda:0`; `cuda` is read as `cuda:0`.
///
/// ```
/// use attn::{BackendId, DeviceName};
///
/// let name: DeviceName = "cuda:1".parse()?;
/// assert_eq!((name.id, name.ordinal), (BackendId::Cuda, 1));
/// # Ok::<(), attn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceName {
    /// The backend.
    pub id: BackendId,
    /// The device's index among those that the backend sees; 0 for all but `cuda`.
    pub ordinal: usize,
}

impl DeviceName {
    /// The name in `ATTN_BACKEND`; none if it is unset or empty.
    ///
    /// # Errors
    /// [`Error::Parameter`] if it names no device, or is not UTF-8.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::from_value(env::var_os("ATTN_BACKEND"))
    }

    fn from_value(value: Option<OsString>) -> Result<Option<Self>, Error> {
        let Some(name) = value.filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let parsed = name.to_str().and_then(|name| name.parse().ok());
        let allowed = "cuda, cuda:1 and so on, wgpu, cpu; leave it unset for the best one here";
        let refusal = || Error::parameter("ATTN_BACKEND", format_args!("{name:?}"), allowed);
        parsed.map(Some).ok_or_else(refusal)
    }
}

impl From<BackendId> for DeviceName {
    /// The backend's first device.
    fn from(id: BackendId) -> Self {
        DeviceName { id, ordinal: 0 }
    }
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let refusal = || Error::parameter("device", name, NAMES);
        let (backend, ordinal) = match name.split_once(':') {
            Some((backend, ordinal)) => (backend, ordinal.parse().map_err(|_| refusal())?),
            None => (name, 0),
        };
        let id: BackendId = backend.parse().map_err(|_| refusal())?;
        if name.contains(':') && id != BackendId::Cuda {
            return Err(refusal());
        }
        Ok(DeviceName { id, ordinal })
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id {
            BackendId::Cuda => write!(f, "{}:{}", self.id, self.ordinal),
            id => id.fmt(f),
        }
    }
}

/// An opened device: the common trait, and NVIDIA GPUs' own entry where it is one.
///
/// ```
/// use attn::{BackendId, Device};
///
/// let device = Device::open("cpu".parse()?)?;
/// assert_eq!(device.name().id, BackendId::Cpu);
/// println!("{}", device.backend().device().name);
/// # Ok::<(), attn::Error>(())
/// ```
pub struct Device {
    name: DeviceName,
    backend: Opened,
}

enum Opened {
    Any(Box<dyn DecodeAttention>),
    #[cfg(feature = "cuda-unversioned")]
    Cuda(CudaBackend),
}

impl Device {
    /// Opens a device, with the options that the environment sets.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] with the reason and the next step, also where this build leaves the backend's feature out.
    pub fn open(name: DeviceName) -> Result<Self, Unsupported> {
        let opened = Self::opened(name);
        match &opened {
            Ok(device) => crate::tell_chosen(device.backend()),
            Err(reason) => events::refused(name.id.name(), reason),
        }
        opened
    }

    /// Opens a device and tells nobody.
    fn opened(name: DeviceName) -> Result<Self, Unsupported> {
        let backend = match name.id {
            #[cfg(feature = "cuda-unversioned")]
            BackendId::Cuda => {
                let options = Options::from_env()?.ordinal(name.ordinal);
                Opened::Cuda(CudaBackend::with_options(&options)?)
            }
            id => Opened::Any(crate::open_backend(id)?),
        };
        Ok(Device { name, backend })
    }

    /// Opens the device that `ATTN_BACKEND` names, else the best one present, as [`select`](crate::select) does.
    ///
    /// # Errors
    /// Those of [`DeviceName::from_env`] and [`Device::open`].
    pub fn best() -> Result<Self, Error> {
        Ok(best(DeviceName::from_env()?)?.0)
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> DeviceName {
        self.name
    }

    /// The device as a backend.
    #[must_use]
    pub fn backend(&self) -> &dyn DecodeAttention {
        match &self.backend {
            Opened::Any(backend) => &**backend,
            #[cfg(feature = "cuda-unversioned")]
            Opened::Cuda(gpu) => gpu,
        }
    }

    /// The device as a backend of its own.
    #[must_use]
    pub fn into_backend(self) -> Box<dyn DecodeAttention> {
        match self.backend {
            Opened::Any(backend) => backend,
            #[cfg(feature = "cuda-unversioned")]
            Opened::Cuda(gpu) => Box::new(gpu),
        }
    }

    /// The entry for memory and streams of the GPU's.
    ///
    /// # Errors
    /// [`Error::WrongBackend`] naming `what` if the device is no GPU of NVIDIA's; [`Unsupported::Forked`].
    #[cfg(feature = "cuda-unversioned")]
    pub fn cuda(&self, what: &'static str) -> Result<&CudaBackend, Error> {
        crate::process::check()?;
        match &self.backend {
            Opened::Cuda(gpu) => Ok(gpu),
            Opened::Any(backend) => Err(Error::WrongBackend {
                backend: backend.device().backend,
                what,
            }),
        }
    }
}

/// A device is its backend: it hands on every call, so that no provided method answers in the backend's place.
#[deny(clippy::missing_trait_methods)]
impl DecodeAttention for Device {
    fn device(&self) -> &DeviceInfo {
        self.backend().device()
    }

    fn is_software(&self) -> bool {
        self.backend().is_software()
    }

    fn check_grid(&self) -> Result<Option<GridCheck>, Error> {
        self.backend().check_grid()
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        self.backend().supports(problem, format)
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        self.backend().create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.backend().plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.backend().execute(step)
    }

    fn decode(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.backend().decode(step)
    }

    fn attend_spans(&self, step: &SpansStep<'_>) -> Result<SpanStates, Error> {
        self.backend().attend_spans(step)
    }

    fn device_steps(&self, cache: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        self.backend().device_steps(cache)
    }
}

impl From<Device> for std::sync::Arc<dyn DecodeAttention> {
    fn from(device: Device) -> Self {
        std::sync::Arc::new(device)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.name, self.backend().device().name)
    }
}

/// The named device, else the best one present (an emulated device is not), and why not those tried before it. A device that was named is never
/// replaced by another.
pub(crate) fn best(
    named: Option<DeviceName>,
) -> Result<(Device, Vec<(BackendId, Unsupported)>), Error> {
    let mut refused = Vec::new();
    if let Some(name) = named {
        return Ok((Device::open(name)?, refused));
    }
    let mut refuse = |id: BackendId, reason| {
        events::refused(id.name(), &reason);
        refused.push((id, reason));
    };
    for id in BackendId::ALL {
        match Device::opened(id.into()) {
            Ok(device) if device.backend().is_software() => {
                let info = device.backend().device();
                let reason = Unsupported::Absent {
                    backend: info.backend,
                    reason: format!("{} is a program on the CPU", info.name),
                    next_step: format!("backend \"cpu\" is faster; name \"{id}\" to use it anyway"),
                };
                refuse(id, reason);
            }
            Ok(device) => {
                crate::tell_chosen(device.backend());
                return Ok((device, refused));
            }
            Err(reason) => refuse(id, reason),
        }
    }
    let (_, reason) = refused.pop().expect("there is at least one backend");
    Err(reason.into())
}

#[cfg(test)]
mod tests {
    use attn_conformance::fake::FakeBackend;

    use super::*;

    /// Kills a device that answers by a provided method, which knows nothing of the backend.
    #[test]
    fn a_device_compares_its_own_functions_as_its_backend_does() {
        let checked = GridCheck::of(&[], &[]);
        let backend = FakeBackend::idle("fake").with_grid_check(move || Ok(Some(checked)));
        let device = Device {
            name: BackendId::Cpu.into(),
            backend: Opened::Any(Box::new(backend)),
        };
        assert_eq!(device.check_grid().unwrap(), Some(checked));
    }

    #[test]
    fn names_of_devices_are_read_or_refused_and_never_ignored() {
        for id in BackendId::ALL {
            let name = DeviceName::from(id);
            assert_eq!(id.name().parse::<DeviceName>().unwrap(), name);
            assert_eq!(name.to_string().parse::<DeviceName>().unwrap(), name);
        }
        for wrong in ["", "cpu:0", "wgpu:1", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let refusal = wrong.parse::<DeviceName>().unwrap_err().to_string();
            assert!(
                refusal.starts_with(&format!("device is {wrong:?}; allowed: ")),
                "{refusal}"
            );
        }
    }

    #[test]
    fn the_environments_name_is_read_or_refused_and_never_ignored() {
        let name = DeviceName::from_value(Some("cuda:3".into())).unwrap();
        let third = DeviceName {
            id: BackendId::Cuda,
            ordinal: 3,
        };
        assert_eq!(name, Some(third));
        for unset in [None, Some(OsString::new())] {
            assert_eq!(DeviceName::from_value(unset).unwrap(), None);
        }
        let refusal = |name: OsString| DeviceName::from_value(Some(name)).unwrap_err().to_string();
        let text = refusal("CPU".into());
        assert!(
            text.starts_with("ATTN_BACKEND is \"CPU\"; allowed"),
            "{text}"
        );
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStringExt;
            let text = refusal(OsString::from_vec(b"cpu\xff".to_vec()));
            assert!(text.starts_with("ATTN_BACKEND is \"cpu\\xFF\""), "{text}");
        }
    }
}
