//! The targets of kernel images.

/// The target of a kernel image.
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
