//! The trait that every backend implements.

use crate::{
    cache::KvCache,
    cache_config::CacheConfig,
    device_steps::DeviceSteps,
    error::{Error, Unsupported},
    events,
    format::KvFormat,
    grid::GridCheck,
    plan::Plan,
    problem::Problem,
    span_states::SpanStates,
    step::{DecodeStep, SpansStep},
};

/// The device that a backend runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The backend's name: that of a [`BackendId`](crate::BackendId), or another one's own.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// The part of the device that is used: instruction set, threads, driver.
    pub detail: String,
}

impl DeviceInfo {
    /// For backends: describes a device.
    #[must_use]
    pub fn new(backend: &'static str, name: impl Into<String>, detail: impl Into<String>) -> Self {
        DeviceInfo {
            backend,
            name: name.into(),
            detail: detail.into(),
        }
    }
}

/// Decode attention on one device.
///
/// ```
/// use attn_core::{CacheConfig, DecodeAttention, DecodeStep, Error, Heads, KvFormat, KvSource, Problem};
///
/// /// One token of 1 KV head and 4 query heads, on any backend.
/// fn attend(backend: &dyn DecodeAttention, q: &[f32; 4 * 64]) -> Result<Vec<f32>, Error> {
///     let heads = Heads::new(4, 1, 64);
///     let config = CacheConfig::builder(KvFormat::INT8, heads).max_len(1024).build();
///     let mut cache = backend.create_cache(&config)?;
///     let plan = backend.plan(&Problem::new(heads, [1024]), KvFormat::INT8)?;
///     cache.append(0, &[0.5; 64], &[2.0; 64])?;
///     let mut out = vec![0.0; q.len()];
///     backend.decode(&mut DecodeStep::new(&plan, &q[..], KvSource::Cache(&cache), &mut out[..])?)?;
///     Ok(out)
/// }
/// ```
pub trait DecodeAttention: Send + Sync {
    /// The device that the backend runs on.
    fn device(&self) -> &DeviceInfo;

    /// Whether the device is a program on the CPU, such as Mesa's software adapter. Selection takes such a backend only by name.
    fn is_software(&self) -> bool {
        false
    }

    /// Compares the device's own exponential and logarithm with what the integer arithmetic needs of them, where the backend has kernels that use them; `None` from a
    /// backend whose integer arithmetic has IEEE operations alone. Backends that use them do this by themselves before they answer, and then do without what is not right.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn check_grid(&self) -> Result<Option<GridCheck>, Error> {
        Ok(None)
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
        let _step = events::attend(self.device().backend, step.problem());
        self.execute(step)?;
        step.finish();
        Ok(())
    }

    /// Prepares the calls over a cache of this backend whose rows lie in the device's memory.
    ///
    /// # Errors
    /// [`Error::Rows`] from a backend that takes rows in host memory alone, as every one does that does not say otherwise; [`Error::WrongBackend`] for another
    /// backend's cache; [`Error::Device`].
    fn device_steps(&self, _: &KvCache) -> Result<Box<dyn DeviceSteps>, Error> {
        Err(Error::Rows {
            what: "a row of the call",
            given: "lies on a device".to_owned(),
            needed: format!(
                "rows in host memory, as backend {} takes them",
                self.device().backend
            ),
        })
    }

    /// Attends a shard of its sequences' tokens, and leaves the states of its spans as they are: what [`SpanStates::finish`] makes the bits of one step
    /// over all tokens of.
    ///
    /// # Errors
    /// [`Unsupported::NoKernel`] from a backend that takes whole sequences alone, as every one does that does not say otherwise;
    /// [`Error::WrongBackend`] for another backend's plan or cache; [`Error::OutOfMemory`].
    fn attend_spans(&self, _: &SpansStep<'_>) -> Result<SpanStates, Error> {
        Err(Error::Unsupported(Unsupported::NoKernel {
            backend: self.device().backend,
            what: "a shard's step".into(),
            built: "whole sequences; backends cpu and cuda take shards".into(),
        }))
    }
}
