//! Which kernel attends a problem, what it was selected among, and what its launch needs.

use attn_core::{Error, KvFormat, Problem};
use attn_kernels::cuda::{Arch, DeviceLimits, KernelConfig, KvLayout, Preferences};

use crate::{
    gpu::CudaBackend,
    native::{LaunchPlan, PlanKind},
};

/// The multiprocessors of an H100 and of an H200.
const HOPPER_SMS: usize = 132;

/// A kernel that covers a problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExplainedKernel {
    /// The kernel as it is configured.
    pub config: KernelConfig,
    /// Estimated microseconds for the longest sequences; `None` for rows of `many_rows.cu` that are not wide, which is chosen by rows and spans, and where no estimate holds.
    pub us: Option<f64>,
    /// Whether it attends the problem.
    pub is_chosen: bool,
}

/// The choice of a kernel.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// Every kernel that covers the problem.
    pub kernels: Vec<ExplainedKernel>,
    /// CTAs of the launch.
    pub ctas: usize,
    /// Bytes of the launch's workspace.
    pub workspace_bytes: usize,
    /// Whether another launch writes the cache again before, as pages of 64 tokens in the workspace.
    pub is_dequantized: bool,
}

impl Explanation {
    /// The choice for an H200, with no GPU here.
    ///
    /// # Errors
    /// Those of [`CudaBackend::prepare`], but for the device's.
    ///
    /// ```
    /// use attn_core::{Heads, KvFormat, Problem};
    /// use attn_cuda::{Explanation, native::KvLayout};
    ///
    /// let problem = Problem::new(Heads::new(32, 8, 128), [8192]);
    /// let explained = Explanation::on_h200(&problem, KvFormat::INT8, KvLayout::Pages(64))?;
    /// assert_eq!(explained.kernels.iter().filter(|kernel| kernel.is_chosen).count(), 1);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn on_h200(problem: &Problem, format: KvFormat, layout: KvLayout) -> Result<Self, Error> {
        let limits = DeviceLimits::new(Arch::Sm90a.shared_limit(), HOPPER_SMS);
        Self::of(limits, &Preferences::default(), problem, format, layout)
    }

    fn of(
        limits: DeviceLimits,
        preferences: &Preferences,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
    ) -> Result<Self, Error> {
        let plan = LaunchPlan::new(
            PlanKind::Known,
            limits,
            preferences,
            problem,
            format,
            layout,
        )?;
        let kernels = plan.candidates.iter().map(|candidate| ExplainedKernel {
            config: candidate.config,
            us: candidate.us,
            is_chosen: candidate.config == plan.config,
        });
        Ok(Explanation {
            kernels: kernels.collect(),
            ctas: plan.launch.grid.iter().product(),
            workspace_bytes: plan.workspace_bytes(),
            is_dequantized: plan.dequantized.is_some(),
        })
    }
}

impl CudaBackend {
    /// The choice for this GPU and its options.
    ///
    /// # Errors
    /// Those of [`CudaBackend::prepare`], but for the device's.
    pub fn explain(
        &self,
        problem: &Problem,
        format: KvFormat,
        layout: KvLayout,
    ) -> Result<Explanation, Error> {
        let (limits, preferences) = (self.device.limits(), &self.device.preferences);
        Explanation::of(limits, preferences, problem, format, layout)
    }
}
