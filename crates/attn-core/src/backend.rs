//! The trait that every backend implements.

use std::ffi::OsString;

use crate::{
    cache::KvCache,
    cache_config::CacheConfig,
    device_steps::DeviceSteps,
    error::{Error, Unsupported},
    events,
    format::KvFormat,
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
///     let heads = Heads { q: 4, kv: 1, dim: 64 };
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
            built: "whole sequences; the CPU backend and CUDA's prepare_spans take shards".into(),
        }))
    }
}

/// For backends: the option that an environment variable sets, read by `parse`; `None` where it is unset or empty.
///
/// `parse` says of a value that it refuses what is allowed, such as `auto, never`.
///
/// # Errors
/// [`Unsupported::Absent`] of `backend` for a value that `parse` refuses, and for one that is not UTF-8.
pub fn option_from_env<T>(
    backend: &'static str,
    name: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, Unsupported> {
    option_from(backend, name, std::env::var_os(name), parse)
}

fn option_from<T>(
    backend: &'static str,
    name: &str,
    value: Option<OsString>,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, Unsupported> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let refuse = |allowed: String| Unsupported::Absent {
        backend,
        reason: format!("{name} is {value:?}; allowed: {allowed}"),
        next_step: "set it to one of these, or leave it unset".to_owned(),
    };
    let text = value.to_str();
    let text = text.ok_or_else(|| refuse("UTF-8".to_owned()))?;
    parse(text).map(Some).map_err(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: Option<OsString>) -> Result<Option<u8>, Unsupported> {
        let parse = |text: &str| {
            let parsed = text.parse();
            parsed.map_err(|_| "0 to 255".to_owned())
        };
        option_from("cpu", "NUMBER", value, parse)
    }

    #[test]
    fn a_variable_is_read_or_refused_and_never_ignored() {
        for unset in [None, Some(OsString::new())] {
            assert_eq!(number(unset), Ok(None));
        }
        assert_eq!(number(Some("7".into())), Ok(Some(7)));
        let said = number(Some("x ".into())).unwrap_err().to_string();
        assert!(
            said.starts_with("cpu: NUMBER is \"x \"; allowed: 0 to 255; "),
            "{said}"
        );
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStringExt;
            let said = number(Some(OsString::from_vec(vec![b'7', 0xff])));
            let said = said.unwrap_err().to_string();
            assert!(
                said.contains("NUMBER is \"7\\xFF\"; allowed: UTF-8"),
                "{said}"
            );
        }
    }
}
