//! The options of the backend, and the environment variables that set them.

use attn_core::{Unsupported, backend::option_from_env};
use attn_kernels::cuda::{Arch, KernelConfig, LowLatency};

use crate::error::BACKEND;

/// Options of a [`CudaBackend`](crate::CudaBackend). No option changes a bit of an integer format; those that choose kernels
/// may change bits of float formats, within their bounds.
///
/// ```
/// use attn_cuda::{LowLatency, Options};
///
/// let options = Options::default().ordinal(1).low_latency(LowLatency::Never);
/// assert_eq!(options.ordinal, 1);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// The GPU's index among those that the driver shows.
    pub ordinal: usize,
    /// Architecture whose kernels are used; `None`: the GPU's. `ATTN_CUDA_ARCH=sm_80`, `sm_90a` or `compute_80`.
    pub arch: Option<Arch>,
    /// Streaming multiprocessors that launches are sized for, 1 to 8192; `None`: the GPU's.
    pub sms: Option<usize>,
    /// When to use `low_latency.cu`. `ATTN_CUDA_LOW_LATENCY=auto`, `always`, `global` or `never`.
    pub low_latency: LowLatency,
    /// Whether to use `many_rows.cu` where it covers a problem; `None`: where it is faster. `ATTN_CUDA_MANY_ROWS=1` or `0`. The bits of float formats
    /// depend on it.
    pub many_rows: Option<bool>,
    /// Whether prompts are attended from pages of 64 tokens that a launch makes in the workspace (up to 1 GiB): in f16 where they may be attended as floats, as they are where pages are small, and
    /// rows of 16 bits where they take many copies; `None`: where it is faster. `ATTN_CUDA_DEQUANTIZE=1` or `0`. Bits that nobody promises depend on it.
    pub dequantize: Option<bool>,
    /// Configuration of `split_kv.cu` in place of the table's. `ATTN_CUDA_SHAPE=row_groups,row_warps,stages,ctas`.
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
            Arch::from_name(name).ok_or_else(|| "sm_80, sm_90a, compute_80".to_owned())
        };
        let flag = |text: &str| match text {
            "1" => Ok(true),
            "0" => Ok(false),
            _ => Err("1, 0".to_owned()),
        };
        Ok(Options {
            ordinal: 0,
            arch: option_from_env(BACKEND, "ATTN_CUDA_ARCH", arch)?,
            sms: None,
            low_latency: option_from_env(BACKEND, "ATTN_CUDA_LOW_LATENCY", str::parse)?
                .unwrap_or_default(),
            many_rows: option_from_env(BACKEND, "ATTN_CUDA_MANY_ROWS", flag)?,
            dequantize: option_from_env(BACKEND, "ATTN_CUDA_DEQUANTIZE", flag)?,
            config: option_from_env(BACKEND, "ATTN_CUDA_SHAPE", str::parse)?,
            check: option_from_env(BACKEND, "ATTN_CHECK", flag)?.unwrap_or_default(),
        })
    }

    /// Chooses the GPU by its index among those that the driver shows (`CUDA_VISIBLE_DEVICES` decides which that is).
    #[must_use]
    pub fn ordinal(mut self, ordinal: usize) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Takes the kernels of this architecture, not those of the GPU's own.
    #[must_use]
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = Some(arch);
        self
    }

    /// Sizes launches for so many streaming multiprocessors, 1 to 8192: an engine that keeps some for other work names the rest.
    #[must_use]
    pub fn sms(mut self, sms: usize) -> Self {
        self.sms = Some(sms);
        self
    }

    /// Says when to use `low_latency.cu`.
    #[must_use]
    pub fn low_latency(mut self, low_latency: LowLatency) -> Self {
        self.low_latency = low_latency;
        self
    }

    /// Says whether to use `many_rows.cu` where it covers a problem.
    #[must_use]
    pub fn many_rows(mut self, many_rows: bool) -> Self {
        self.many_rows = Some(many_rows);
        self
    }

    /// Says whether prompts are attended from pages of 64 tokens in the workspace: those that may be attended as floats, and caches whose tiles take many copies.
    #[must_use]
    pub fn dequantize(mut self, dequantize: bool) -> Self {
        self.dequantize = Some(dequantize);
        self
    }

    /// Configures `split_kv.cu` so, wherever it serves the problem.
    #[must_use]
    pub fn config(mut self, config: KernelConfig) -> Self {
        self.config = Some(config);
        self
    }

    /// Puts a launch that refuses bad inputs before each append and decode, and waits for it.
    #[must_use]
    pub fn check(mut self, check: bool) -> Self {
        self.check = check;
        self
    }

    /// Kernels count CTAs in 31 bits.
    pub(crate) fn clamp_sms(sms: usize) -> usize {
        sms.clamp(1, 8192)
    }
}
