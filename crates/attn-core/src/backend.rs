//! The trait that every backend implements, and the checked values that reach it.

use crate::{
    arithmetic::LOG2_E,
    cache::{CacheConfig, KvCache, check_finite},
    error::{Error, Unsupported},
    format::KvFormat,
    problem::Problem,
    view::KvView,
};

/// What a backend runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu`, `cuda` or `wgpu`.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// What it uses of it: instruction set, threads, driver.
    pub detail: String,
}

/// A problem prepared for one backend; reusable between steps of the same lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The backend that made it.
    pub backend: &'static str,
    /// The checked problem.
    pub problem: Problem,
    /// What is stored.
    pub format: KvFormat,
    /// Splits per (sequence, KV head): changes speed, never bits.
    pub num_splits: usize,
    /// Device memory that one step needs beside its inputs and outputs.
    pub workspace_bytes: usize,
}

/// Where K and V come from.
#[derive(Clone, Copy)]
pub enum KvSource<'a> {
    /// A cache created by the same backend.
    Cache(&'a KvCache),
    /// A contiguous cache in host memory, read in place.
    View(&'a KvView<'a>),
}

/// A decode step whose inputs have been checked: holding one is the proof.
#[derive(Clone, Copy)]
pub struct DecodeStep<'a> {
    plan: &'a Plan,
    q: &'a [f32],
    kv: KvSource<'a>,
}

/// Where the results go; lengths checked.
pub struct DecodeOutput<'a> {
    out: &'a mut [f32],
    lse: &'a mut [f32],
}

impl<'a> DecodeStep<'a> {
    /// Checks a step: `q` is `[batch, q_len, num_q_heads, head_dim]`, sequence b of the cache is sequence b of the problem.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::NotFinite`], [`Error::QueryRange`]; [`Error::Mismatch`] where plan and cache disagree.
    pub fn new(plan: &'a Plan, q: &'a [f32], kv: KvSource<'a>) -> Result<Self, Error> {
        let problem = &plan.problem;
        problem.check()?;
        let needed = problem.rows() * problem.head_dim;
        if q.len() != needed {
            return Err(Error::Length {
                what: "q",
                given: q.len(),
                needed,
            });
        }
        let (format, tensor_scales) = match kv {
            KvSource::Cache(cache) => {
                check_cache(problem, cache)?;
                (cache.config().format, &cache.config().k_tensor_scales[..])
            }
            KvSource::View(view) => {
                view.check(problem)?;
                (view.format, view.k_tensor_scales)
            }
        };
        if format != plan.format {
            return Err(Error::Mismatch {
                what: "format",
                problem: plan.format.to_string(),
                cache: format.to_string(),
            });
        }
        let scale =
            problem.softmax_scale * LOG2_E * tensor_scales.iter().copied().fold(1.0, f32::max);
        // One pass for a query as it should be; NaN and infinity are beyond any range.
        let beyond = |x: &f32| !((x * scale).abs() <= 1.844_674_4e19);
        if q.iter().fold(false, |found, x| found | beyond(x)) {
            check_finite("q", q)?;
            let index = q.iter().position(beyond).unwrap_or(0);
            return Err(Error::QueryRange {
                index,
                value: q[index] * scale,
            });
        }
        Ok(DecodeStep { plan, q, kv })
    }

    /// The plan.
    pub fn plan(&self) -> &'a Plan {
        self.plan
    }

    /// The queries.
    pub fn q(&self) -> &'a [f32] {
        self.q
    }

    /// K and V.
    pub fn kv(&self) -> KvSource<'a> {
        self.kv
    }
}

fn check_cache(problem: &Problem, cache: &KvCache) -> Result<(), Error> {
    let config = cache.config();
    let differ = |what, problem: String, cache: String| {
        Err(Error::Mismatch {
            what,
            problem,
            cache,
        })
    };
    if config.head_dim != problem.head_dim {
        return differ(
            "head_dim",
            problem.head_dim.to_string(),
            config.head_dim.to_string(),
        );
    }
    if config.num_kv_heads != problem.num_kv_heads {
        return differ(
            "num_kv_heads",
            problem.num_kv_heads.to_string(),
            config.num_kv_heads.to_string(),
        );
    }
    if cache.table().lens.len() < problem.batch() {
        return differ(
            "batch",
            problem.batch().to_string(),
            cache.table().lens.len().to_string(),
        );
    }
    for (b, (want, have)) in problem.kv_lens.iter().zip(&cache.table().lens).enumerate() {
        if want != have {
            return differ(
                "kv_len",
                format!("{want} for sequence {b}"),
                have.to_string(),
            );
        }
    }
    Ok(())
}

impl<'a> DecodeOutput<'a> {
    /// `out` is `[batch, q_len, num_q_heads, head_dim]`, `lse` `[batch, q_len, num_q_heads]` (natural log, −∞ where nothing is seen).
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(problem: &Problem, out: &'a mut [f32], lse: &'a mut [f32]) -> Result<Self, Error> {
        let needed = problem.rows() * problem.head_dim;
        if out.len() != needed {
            return Err(Error::Length {
                what: "out",
                given: out.len(),
                needed,
            });
        }
        if lse.len() != problem.rows() {
            return Err(Error::Length {
                what: "lse",
                given: lse.len(),
                needed: problem.rows(),
            });
        }
        Ok(DecodeOutput { out, lse })
    }

    /// Outputs and log-sum-exps, to be overwritten.
    pub fn slices(&mut self) -> (&mut [f32], &mut [f32]) {
        (self.out, self.lse)
    }
}

/// Decode attention on one device.
pub trait DecodeAttention: Send + Sync {
    /// What it runs on.
    fn device(&self) -> &DeviceInfo;

    /// Whether the device is a program on the CPU, such as Mesa's software adapter: chosen only by name.
    fn is_emulated(&self) -> bool {
        false
    }

    /// Whether there is a kernel for the problem.
    ///
    /// # Errors
    /// [`Unsupported`] with the reason.
    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported>;

    /// Creates an empty cache where the backend is.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a bad config, [`Error::Device`] if memory is short.
    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error>;

    /// Prepares a step.
    ///
    /// # Errors
    /// Those of [`Problem::check`] and [`DecodeAttention::supports`].
    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error>;

    /// Attends: writes every element of the output, or refuses and writes none.
    ///
    /// # Errors
    /// [`Error::Foreign`] for another backend's plan or cache, [`Error::Device`].
    fn decode(&self, step: &DecodeStep<'_>, output: &mut DecodeOutput<'_>) -> Result<(), Error>;
}
