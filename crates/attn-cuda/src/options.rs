//! The options of the backend, and the environment variables that set them.

use std::env;

use attn_core::Unsupported;
use attn_kernels::cuda::{Arch, KernelConfig, LowLatency};

use crate::device::absent;

/// Options of a [`CudaBackend`](crate::CudaBackend). All but `check` change speed, never bits.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Architecture whose kernels are used; `None`: the GPU's. `ATTN_CUDA_ARCH=sm_80`, `sm_90a` or `compute_80`.
    pub arch: Option<Arch>,
    /// Streaming multiprocessors that launches are sized for, 1 to 8192; `None`: the GPU's.
    pub sms: Option<usize>,
    /// When to use `low_latency.cu`. `ATTN_CUDA_LOW_LATENCY=auto`, `always`, `global` or `never`.
    pub low_latency: LowLatency,
    /// Configuration of `split_kv.cu` or `many_rows.cu` in place of the table's. `ATTN_CUDA_SHAPE=row_groups,row_warps,stages,ctas`.
    pub config: Option<KernelConfig>,
    /// Whether a launch that refuses bad inputs goes before each append and decode. `ATTN_CHECK=1`.
    pub check: bool,
}

impl Options {
    /// Reads the environment. Variables that are unset or empty leave the defaults.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that is not allowed.
    pub fn from_env() -> Result<Self, Unsupported> {
        let arch = |name: &str| {
            Arch::from_name(name)
                .ok_or_else(|| format!("{name}; allowed: sm_80, sm_90a, compute_80"))
        };
        Ok(Options {
            arch: read("ATTN_CUDA_ARCH", arch)?,
            sms: None,
            low_latency: read("ATTN_CUDA_LOW_LATENCY", str::parse)?.unwrap_or_default(),
            config: read("ATTN_CUDA_SHAPE", str::parse)?,
            check: env::var("ATTN_CHECK").is_ok_and(|value| value == "1"),
        })
    }

    /// Kernels count CTAs in 31 bits.
    pub(crate) fn clamp_sms(sms: usize) -> usize {
        sms.clamp(1, 8192)
    }
}

fn read<T>(
    name: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Unsupported> {
    let value = env::var(name).unwrap_or_default();
    if value.is_empty() {
        return Ok(None);
    }
    let refuse = |reason| absent(format!("{name} is {reason}"), "then try again");
    parse(&value).map(Some).map_err(refuse)
}
