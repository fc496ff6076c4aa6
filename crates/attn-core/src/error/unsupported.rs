//! Why a backend is absent, or cannot run a problem.

/// Why a backend is absent, or cannot run a problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// No device, driver or adapter.
    #[error("{backend}: {reason}; {next_step}")]
    Absent {
        /// The backend.
        backend: &'static str,
        /// The missing part.
        reason: String,
        /// How to repair it.
        next_step: String,
    },
    /// A backend that this build of the library leaves out.
    #[error(
        "{backend}: this build of attn-kv leaves it out; add \"{backend}\" to the features of attn-kv in Cargo.toml"
    )]
    NotBuilt {
        /// The backend, whose feature has the same name.
        backend: &'static str,
    },
    /// A device without a kernel for the problem.
    #[error("{backend}: no kernel for {what}; built: {built}. Use backend \"cpu\"")]
    NoKernel {
        /// The backend.
        backend: &'static str,
        /// The thing asked for.
        what: String,
        /// The kernels that exist.
        built: String,
    },
    /// A problem that no backend runs, since the library does not define it.
    #[error("{backend}: {reason}")]
    Undefined {
        /// The backend that was asked.
        backend: &'static str,
        /// The sentence of [`Problem::check`](crate::Problem::check) or of [`KvFormat::check`](crate::KvFormat::check).
        reason: String,
    },
    /// A process that lacks the threads and contexts of its parent's devices ([`process`](crate::process)).
    #[error(
        "this process was forked from one that had opened attn's devices, whose threads it lacks; start it anew by exec (in Python: multiprocessing's \"spawn\")"
    )]
    Forked,
}
