//! The options of the backend, and the environment variables that set them.

use attn_core::{Settings, Unsupported};
use attn_kernels::cuda::{Arch, Exponential, KernelChoice};

use crate::error::BACKEND;

/// Options of a [`CudaBackend`](crate::CudaBackend). No option changes a bit of an integer format; those that choose kernels
/// may change bits of float formats, within their bounds.
///
/// ```
/// use attn_cuda::{KernelChoice, Options};
///
/// let options = Options::default().ordinal(1).kernel(KernelChoice::ManyRows);
/// assert_eq!(options.ordinal, 1);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// The GPU's index among those that the driver shows.
    pub ordinal: usize,
    /// Architecture whose kernels are used; `None`: the GPU's. `ATTN_CUDA=arch=sm_80`, `sm_90a` or `compute_80`.
    pub arch: Option<Arch>,
    /// Streaming multiprocessors that launches are sized for, 1 to 8192; `None`: the GPU's.
    pub sms: Option<usize>,
    /// The kernel that serves what it covers. `ATTN_CUDA=kernel=auto`, `split_kv`, `split_kv:1x3x4x2`, `low_latency`, `low_latency_global` or `many_rows`. The bits of
    /// float formats depend on it.
    pub kernel: KernelChoice,
    /// Whether prompts are attended from pages of 64 tokens that a launch makes in the workspace (up to 1 GiB): in f16 where they may be attended as floats, as they are where pages are small, and
    /// rows of 16 bits where they take many copies; `None`: where it is faster. `ATTN_CUDA=dequantize=1` or `0`. Bits that nobody promises depend on it.
    pub dequantize: Option<bool>,
    /// Where integer kernels take powers of two from; `None`: from the GPU's instructions once these have been found right, else from polynomials, which take longer.
    /// `ATTN_CUDA=exponential=instruction` or `polynomial`.
    pub exponential: Option<Exponential>,
    /// Whether a launch that refuses bad inputs goes before each append and decode. `ATTN_CUDA=check=1`.
    pub check: bool,
}

impl Options {
    /// Reads the settings of `ATTN_CUDA`: `arch`, `kernel`, `dequantize`, `exponential` and `check`. Those that it does not give keep their defaults.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that is not allowed.
    pub fn from_env() -> Result<Self, Unsupported> {
        let arch = |name: &str| {
            Arch::from_name(name).ok_or_else(|| "sm_80, sm_90a, compute_80".to_owned())
        };
        let exponential = |name: &str| {
            let named = Exponential::from_name(name);
            named.ok_or_else(|| "instruction, polynomial".to_owned())
        };
        let keys = ["arch", "kernel", "dequantize", "exponential", "check"];
        let settings = Settings::from_env(BACKEND, "ATTN_CUDA", &keys)?;
        Ok(Options {
            ordinal: 0,
            arch: settings.get("arch", arch)?,
            sms: None,
            kernel: settings.get("kernel", str::parse)?.unwrap_or_default(),
            dequantize: settings.flag("dequantize")?,
            exponential: settings.get("exponential", exponential)?,
            check: settings.flag("check")?.unwrap_or_default(),
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

    /// Chooses the kernel that serves what it covers.
    #[must_use]
    pub fn kernel(mut self, kernel: KernelChoice) -> Self {
        self.kernel = kernel;
        self
    }

    /// Says whether prompts are attended from pages of 64 tokens in the workspace: those that may be attended as floats, and caches whose tiles take many copies.
    #[must_use]
    pub fn dequantize(mut self, dequantize: bool) -> Self {
        self.dequantize = Some(dequantize);
        self
    }

    /// Takes powers of two of integer kernels from there, checked or not.
    #[must_use]
    pub fn exponential(mut self, exponential: Exponential) -> Self {
        self.exponential = Some(exponential);
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
