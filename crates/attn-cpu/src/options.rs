//! The options of the backend, and the environment variable that sets them.

use attn_core::{Unsupported, backend::option_from_env};

use crate::{BACKEND, simd::Isa};

/// Options of a [`CpuBackend`](crate::CpuBackend). They change speed, never bits.
///
/// ```
/// use attn_cpu::{Isa, Options};
///
/// let options = Options::default().isa(Isa::Portable);
/// assert_eq!(options.isa, Some(Isa::Portable));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// The instruction set; `None`: the fastest of this machine. `ATTN_CPU_ISA` names one, such as `portable`.
    pub isa: Option<Isa>,
}

impl Options {
    /// Reads the environment. A variable that is unset or empty leaves the default.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that is not allowed.
    pub fn from_env() -> Result<Self, Unsupported> {
        let isa = |name: &str| {
            name.parse()
                .map_err(|_| format!("{name}; allowed: {}", Isa::NAMES))
        };
        Ok(Options {
            isa: option_from_env(BACKEND, "ATTN_CPU_ISA", isa)?,
        })
    }

    /// Takes the kernels of this instruction set, which the machine must have.
    #[must_use]
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }
}
