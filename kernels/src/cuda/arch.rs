//! The targets of kernel images.

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The GPU's architecture.
    pub arch: Arch,
    /// Where kernels of the integer arithmetic take powers of two from.
    pub exponential: Exponential,
}

impl From<Arch> for Target {
    fn from(arch: Arch) -> Self {
        Target {
            arch,
            exponential: Exponential::Instruction,
        }
    }
}

/// How kernels of the integer arithmetic find 2^(n/64) and the logarithms of V's scales (`docs/arithmetic.md`, section 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exponential {
    /// By the GPU's own instructions, whose errors are measured before they are trusted (`grid_functions.cu`).
    Instruction,
    /// By polynomials, whose operations are IEEE's.
    Polynomial,
}

impl Exponential {
    /// In the order in which they are tried.
    pub const ALL: [Self; 2] = [Exponential::Instruction, Exponential::Polynomial];

    /// The name in settings and caches.
    pub fn name(self) -> &'static str {
        match self {
            Exponential::Instruction => "instruction",
            Exponential::Polynomial => "polynomial",
        }
    }

    /// The exponential of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.name() == name)
    }
}

/// The architecture of a kernel image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// A100: machine code.
    Sm80,
    /// H100, H200: machine code.
    Sm90a,
    /// PTX that the driver compiles for every newer GPU.
    Compute80,
}

impl Arch {
    /// NVRTC's name.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
            Arch::Compute80 => "compute_80",
        }
    }

    /// The architecture of NVRTC's name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Arch::Sm80, Arch::Sm90a, Arch::Compute80]
            .into_iter()
            .find(|arch| arch.name() == name)
    }

    /// The architecture whose images a GPU of this compute capability runs; `None` below 8.0.
    pub fn of(major: i32, minor: i32) -> Option<Self> {
        match (major, minor) {
            (..=7, _) => None,
            (8, 0) => Some(Arch::Sm80),
            (9, 0) => Some(Arch::Sm90a),
            _ => Some(Arch::Compute80),
        }
    }

    /// Shared memory that the kernels of embedded images may use.
    pub fn shared_limit(self) -> usize {
        match self {
            Arch::Sm90a => 227 * 1024,
            Arch::Sm80 | Arch::Compute80 => 163 * 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_choose_their_images() {
        let names: Vec<_> = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
            .map(|(a, b)| Arch::of(a, b).map(Arch::name))
            .into();
        let ptx = Some("compute_80");
        assert_eq!(
            names,
            [None, Some("sm_80"), ptx, ptx, Some("sm_90a"), ptx, ptx]
        );
    }
}
