//! The options of the backend, and the environment variables that set them.

use std::sync::Arc;

use attn_core::{Settings, Unsupported};
use rayon::ThreadPool;

use crate::{
    BACKEND,
    pool::{self, Threads},
    simd::Isa,
};

/// Options of a [`CpuBackend`](crate::CpuBackend). They change speed, never bits.
///
/// ```
/// use attn_cpu::{Isa, Options};
///
/// let options = Options::default().isa(Isa::Portable);
/// assert_eq!(options.isa, Some(Isa::Portable));
/// ```
///
/// By default a step that is called inside a rayon pool runs in that pool. Other steps share one pool of the process, which has as many
/// workers as rayon's global pool (`RAYON_NUM_THREADS`) and, on Linux, gives each of them CPUs of its own.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The instruction set; `None`: the fastest of this machine. `ATTN_CPU=isa=portable` names one.
    pub isa: Option<Isa>,
    /// The pool that all work runs in, wherever it is called; `None`: one that the backend chooses.
    pub pool: Option<Arc<ThreadPool>>,
    /// The number of threads of a pool that is this backend's alone; `None`: no such pool. [`Options::pool`] comes before it.
    pub threads: Option<usize>,
    /// Whether pools that this crate makes give each worker CPUs of its own; without, the process's pool is rayon's global one.
    /// `ATTN_CPU=pin=0` is without.
    pub pin: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            isa: None,
            pool: None,
            threads: None,
            pin: true,
        }
    }
}

impl Options {
    /// Reads the settings of `ATTN_CPU`: `isa` and `pin`. Those that it does not give keep their defaults.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that is not allowed.
    pub fn from_env() -> Result<Self, Unsupported> {
        let isa = |name: &str| {
            let isa = name.parse();
            isa.map_err(|_| Isa::NAMES.to_owned())
        };
        let settings = Settings::from_env(BACKEND, "ATTN_CPU", &["isa", "pin"])?;
        let default = Options::default();
        Ok(Options {
            isa: settings.get("isa", isa)?,
            pin: settings.flag("pin")?.unwrap_or(default.pin),
            ..default
        })
    }

    /// Takes the kernels of this instruction set, which the machine must have.
    #[must_use]
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Runs work in this pool, wherever it is called. Its workers are the caller's: they are not pinned.
    ///
    /// What one thread does alone stays on the caller's thread: work too small for several, and all work where the pool has one worker.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build()?;
    /// let options = attn_cpu::Options::default().pool(Arc::new(pool));
    /// let backend = attn_cpu::CpuBackend::with_options(&options)?;
    /// assert_eq!(backend.threads(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn pool(mut self, pool: Arc<ThreadPool>) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Runs all work in a pool of so many threads that is this backend's alone.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Whether pools that this crate makes give each worker CPUs of its own.
    #[must_use]
    pub fn pin(mut self, pin: bool) -> Self {
        self.pin = pin;
        self
    }

    /// The threads that these options ask for.
    pub(crate) fn start(&self) -> Result<Threads, Unsupported> {
        if let Some(pool) = &self.pool {
            return Ok(Threads::Own(Arc::clone(pool)));
        }
        let refuse = |reason: String| Unsupported::Absent {
            backend: BACKEND,
            reason,
            next_step: "set Options::threads to fewer, or leave it unset".to_owned(),
        };
        match self.threads {
            Some(count) if !(1..=MOST_THREADS).contains(&count) => Err(refuse(format!(
                "Options::threads is {count}; allowed: 1 to {MOST_THREADS}"
            ))),
            Some(count) => pool::own(count, self.pin)
                .map(|pool| Threads::Own(Arc::new(pool)))
                .map_err(|error| refuse(format!("{count} threads do not start: {error}"))),
            None if self.pin => Ok(Threads::Shared),
            None => Ok(Threads::Callers),
        }
    }
}

/// The most threads that are started: more than any machine has, and few enough for every system to start.
pub const MOST_THREADS: usize = 1024;
