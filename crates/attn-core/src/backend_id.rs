//! The backends of this project, by name.

use std::{fmt, str::FromStr};

use crate::error::Error;

/// A backend of this project.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendId {
    /// NVIDIA GPUs, through CUDA.
    Cuda,
    /// Any GPU, through Vulkan, Metal or DX12.
    Wgpu,
    /// The CPU, which every machine has.
    Cpu,
}

impl BackendId {
    /// All backends, in the order of preference.
    pub const ALL: [BackendId; 3] = [BackendId::Cuda, BackendId::Wgpu, BackendId::Cpu];

    /// The name that the command line, `ATTN_BACKEND` and errors use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            BackendId::Cuda => "cuda",
            BackendId::Wgpu => "wgpu",
            BackendId::Cpu => "cpu",
        }
    }
}

impl fmt::Display for BackendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BackendId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let named = BackendId::ALL.into_iter().find(|id| id.name() == s);
        named.ok_or_else(|| Error::parameter("backend", s, "cuda, wgpu, cpu"))
    }
}
