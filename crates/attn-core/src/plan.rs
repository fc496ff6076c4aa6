//! A problem that a backend has prepared.

use std::{any::Any, fmt, sync::Arc};

use crate::{error::Error, events, format::KvFormat, problem::Problem, process};

/// A problem prepared for one backend, by [`DecodeAttention::plan`](crate::DecodeAttention::plan).
///
/// A plan is made once and serves every step of the same batch, heads and modifiers whose sequences are at most as long as the problem's:
/// plan for the longest lengths that will come. Cloning a plan is cheap; the clones share what the backend has prepared.
#[derive(Clone)]
#[must_use]
pub struct Plan {
    backend: &'static str,
    problem: Arc<Problem>,
    format: KvFormat,
    prepared: Arc<dyn Any + Send + Sync>,
}

impl Plan {
    /// For backends: checks a problem, and makes a plan that keeps what the backend has `prepared` for it.
    ///
    /// # Errors
    /// Those of [`Problem::check`], [`KvFormat::check`] and [`process::check`].
    pub fn new<T: Any + Send + Sync>(
        backend: &'static str,
        problem: &Problem,
        format: KvFormat,
        prepared: T,
    ) -> Result<Self, Error> {
        process::check()?;
        problem.check()?;
        format.check(problem.head_dim)?;
        events::prepared(backend, problem, format);
        Ok(Plan {
            backend,
            problem: Arc::new(problem.clone()),
            format,
            prepared: Arc::new(prepared),
        })
    }

    /// The name of the backend that made the plan.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// The problem with the longest lengths that a step may have.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The format of the cache.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// For backends: what [`Plan::new`] was given, if it was a `T`.
    #[must_use]
    pub fn prepared<T: Any>(&self) -> Option<&T> {
        self.prepared.downcast_ref()
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Plan");
        fields.field("backend", &self.backend);
        fields.field("format", &self.format);
        fields.field("problem", &self.problem);
        fields.finish_non_exhaustive()
    }
}
