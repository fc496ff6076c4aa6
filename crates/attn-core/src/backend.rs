//! The trait that every backend implements.

use crate::{
    cache::KvCache,
    cache_config::CacheConfig,
    error::{Error, Unsupported},
    format::KvFormat,
    plan::Plan,
    problem::Problem,
    step::DecodeStep,
};

/// The device that a backend runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The backend's name: that of a [`BackendId`](crate::BackendId), or another one's own.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// The part of the device that is used: instruction set, threads, driver.
    pub detail: String,
}

/// Decode attention on one device.
pub trait DecodeAttention: Send + Sync {
    /// The device that the backend runs on.
    fn device(&self) -> &DeviceInfo;

    /// Whether the device is a program on the CPU, such as Mesa's software adapter. Selection takes such a backend only by name.
    fn is_software(&self) -> bool {
        false
    }

    /// Whether there is a kernel for the problem.
    ///
    /// # Errors
    /// [`Unsupported`] with the reason.
    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported>;

    /// Creates an empty cache in the backend's memory.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a bad config, [`Error::Device`] if memory is short.
    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error>;

    /// Prepares every step of these heads and modifiers, with lengths up to the problem's.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`DecodeAttention::supports`]; [`Error::Device`].
    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error>;

    /// For backends: attends, and writes every element of the step's outputs, or refuses and writes none. Callers use
    /// [`DecodeAttention::decode`].
    ///
    /// # Errors
    /// Those of [`DecodeAttention::decode`].
    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error>;

    /// Attends: writes every element of the step's outputs, or refuses and writes none.
    ///
    /// # Errors
    /// [`Error::WrongBackend`] for another backend's plan or cache; [`Error::Device`], after which the outputs' contents are undefined.
    fn decode(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.execute(step)?;
        step.finish();
        Ok(())
    }
}
