//! The trait that every backend implements, and the checked values that reach it.

use crate::{
    arithmetic::LOG2_E,
    cache::{CacheConfig, KvCache},
    error::{Error, Unsupported, check_finite},
    format::KvFormat,
    problem::Problem,
    view::KvView,
};

/// The device that a backend runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the backend: `cpu`, `cuda` or `wgpu`.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// The parts of the device that the backend uses: instruction set, threads, driver.
    pub detail: String,
}

/// A problem prepared for one backend; reusable between steps of the same lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Name of the backend that made the plan.
    pub backend: &'static str,
    /// The checked problem.
    pub problem: Problem,
    /// The schemes of K and V.
    pub format: KvFormat,
    /// Splits per (sequence, KV head). The number changes speed, never bits.
    pub num_splits: usize,
    /// Device memory that one step needs beside its inputs and outputs.
    pub workspace_bytes: usize,
}

/// The source of K and V.
#[derive(Clone, Copy)]
pub enum KvSource<'a> {
    /// A cache created by the same backend.
    Cache(&'a KvCache),
    /// A contiguous cache in host memory, read in place.
    View(&'a KvView<'a>),
}

/// The inputs of a decode step. Only [`DecodeStep::new`] makes them, and it checks them.
#[derive(Clone, Copy)]
pub struct StepInputs<'a> {
    plan: &'a Plan,
    q: &'a [f32],
    kv: KvSource<'a>,
}

impl<'a> StepInputs<'a> {
    /// The plan that the step follows.
    pub fn plan(&self) -> &'a Plan {
        self.plan
    }

    /// The queries, `[batch, q_len, num_q_heads, head_dim]`.
    pub fn q(&self) -> &'a [f32] {
        self.q
    }

    /// The source of K and V.
    pub fn kv(&self) -> KvSource<'a> {
        self.kv
    }
}

/// A decode step whose inputs and outputs have been checked against each other: holding one is the proof.
pub struct DecodeStep<'a> {
    inputs: StepInputs<'a>,
    out: &'a mut [f32],
    lse: &'a mut [f32],
}

impl<'a> DecodeStep<'a> {
    /// Checks a step; sequence b of the cache is sequence b of the problem.
    ///
    /// | argument | shape | |
    /// |---|---|---|
    /// | `q`, `out` | `[batch, q_len, num_q_heads, head_dim]` | |
    /// | `lse` | `[batch, q_len, num_q_heads]` | natural log; −∞ where nothing is seen |
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::NotFinite`], [`Error::QueryRange`]; [`Error::Mismatch`] where plan and cache disagree.
    pub fn new(
        plan: &'a Plan,
        q: &'a [f32],
        kv: KvSource<'a>,
        out: &'a mut [f32],
        lse: &'a mut [f32],
    ) -> Result<Self, Error> {
        let problem = &plan.problem;
        problem.check()?;
        for (what, given, needed) in [
            ("q", q.len(), problem.elements()),
            ("out", out.len(), problem.elements()),
            ("lse", lse.len(), problem.rows()),
        ] {
            if given != needed {
                return Err(Error::Length {
                    what,
                    given,
                    needed,
                });
            }
        }
        let (format, tensor_scales) = match kv {
            KvSource::Cache(cache) => {
                let config = cache.config();
                let lens = &cache.table().lens;
                check_source(problem, config.num_kv_heads, config.head_dim, lens)?;
                (config.format, &config.k_tensor_scales[..])
            }
            KvSource::View(view) => {
                check_source(
                    problem,
                    view.num_kv_heads(),
                    view.head_dim(),
                    view.kv_lens(),
                )?;
                (view.format(), view.k_tensor_scales())
            }
        };
        if format != plan.format {
            return Err(Error::Mismatch {
                what: "format",
                problem: plan.format.to_string(),
                cache: format.to_string(),
            });
        }
        check_queries(problem, q, tensor_scales)?;
        let inputs = StepInputs { plan, q, kv };
        Ok(DecodeStep { inputs, out, lse })
    }

    /// The plan that the step follows.
    pub fn plan(&self) -> &'a Plan {
        self.inputs.plan
    }

    /// The inputs of the step.
    pub fn inputs(&self) -> StepInputs<'a> {
        self.inputs
    }

    /// The outputs and log-sum-exps, which the backend overwrites.
    pub fn outputs(&mut self) -> (&mut [f32], &mut [f32]) {
        (self.out, self.lse)
    }
}

/// Refuses queries that are not finite or exceed the arithmetic's range.
fn check_queries(problem: &Problem, q: &[f32], k_tensor_scales: &[f32]) -> Result<(), Error> {
    let scale =
        problem.softmax_scale * LOG2_E * k_tensor_scales.iter().copied().fold(1.0, f32::max);
    // Valid queries take one pass; NaN and infinity are beyond any range.
    let beyond = |x: &f32| !((x * scale).abs() <= 1.844_674_4e19);
    if q.iter().fold(false, |found, x| found | beyond(x)) {
        check_finite("q", q)?;
        let index = q.iter().position(beyond).unwrap_or(0);
        return Err(Error::QueryRange {
            index,
            value: q[index] * scale,
        });
    }
    Ok(())
}

/// Refuses a problem whose heads or lengths differ from those of the cache's first sequences.
fn check_source(
    problem: &Problem,
    num_kv_heads: usize,
    head_dim: usize,
    lens: &[usize],
) -> Result<(), Error> {
    for (what, problem, cache) in [
        ("head_dim", problem.head_dim, head_dim),
        ("num_kv_heads", problem.num_kv_heads, num_kv_heads),
        ("batch", problem.batch(), problem.batch().min(lens.len())),
    ] {
        if problem != cache {
            return Err(Error::Mismatch {
                what,
                problem: problem.to_string(),
                cache: cache.to_string(),
            });
        }
    }
    let mut pairs = problem.kv_lens.iter().zip(lens).enumerate();
    match pairs.find(|(_, (want, have))| want != have) {
        Some((b, (want, have))) => Err(Error::Mismatch {
            what: "kv_len",
            problem: format!("{want} for sequence {b}"),
            cache: have.to_string(),
        }),
        None => Ok(()),
    }
}

/// Decode attention on one device.
pub trait DecodeAttention: Send + Sync {
    /// The device that the backend runs on.
    fn device(&self) -> &DeviceInfo;

    /// Whether the device is a program on the CPU, such as Mesa's software adapter. Selection takes such a backend only by name.
    fn is_software(&self) -> bool {
        false
    }

    /// Whether there is a kernel for the problem.
    ///
    /// # Errors
    /// [`Unsupported`] with the reason.
    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported>;

    /// Creates an empty cache in the backend's memory.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a bad config, [`Error::Device`] if memory is short.
    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error>;

    /// Prepares a step.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`DecodeAttention::supports`].
    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error>;

    /// Attends: writes every element of the step's outputs, or refuses and writes none.
    ///
    /// # Errors
    /// [`Error::WrongBackend`] for another backend's plan or cache; [`Error::Device`], after which the outputs' contents are undefined.
    fn decode(&self, step: &mut DecodeStep<'_>) -> Result<(), Error>;
}
