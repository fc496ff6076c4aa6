//! The instruction sets that the kernels are compiled for, and which of them this machine has.

use std::{fmt, str::FromStr};

use attn_core::{Error, Unsupported};

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// The crate `wide`: 128-bit vectors of the build's target.
    Portable,
    /// AVX2, FMA and F16C with vectors of 256 bits.
    Avx2,
    /// AVX-512 with the extensions F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with the byte dot product.
    Avx512Vnni,
    /// NEON with two 128-bit registers at a time.
    Neon,
}

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Isa; 5] = [
        Isa::Portable,
        Isa::Neon,
        Isa::Avx2,
        Isa::Avx512,
        Isa::Avx512Vnni,
    ];

    /// The names of all instruction sets, for errors.
    pub(crate) const NAMES: &str = "portable, neon, avx2, avx512, avx512vnni";

    /// Whether this machine has the instruction set.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns, reason = "the target decides which sets exist")]
            _ => false,
        }
    }

    /// The instruction sets that this machine has, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The fastest instruction set that this machine has.
    #[must_use]
    pub fn best() -> Isa {
        Isa::available().last().unwrap_or(Isa::Portable)
    }

    /// Returns the instruction set if this machine has it.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] with the instruction sets that exist instead.
    pub fn require(self) -> Result<Isa, Unsupported> {
        if self.is_available() {
            return Ok(self);
        }
        let have: Vec<_> = Isa::available().map(|isa| isa.to_string()).collect();
        Err(Unsupported::Absent {
            backend: crate::BACKEND,
            reason: format!("this machine has no {self}"),
            next_step: format!(
                "it has {}; set Options::isa or ATTN_CPU=isa=NAME to one of them, or neither",
                have.join(", ")
            ),
        })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Neon => "neon",
        })
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.to_string() == s)
            .ok_or_else(|| Error::parameter("instruction set", s, Isa::NAMES))
    }
}
