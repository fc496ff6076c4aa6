//! The trait on top of both paths.

use attn_core::{
    CacheConfig, DecodeAttention, DecodeOutput, DecodeStep, DeviceInfo, Error, HostPages, KvCache,
    KvFormat, Plan, Problem, Unsupported,
};
use rayon::prelude::*;

use crate::{
    fast,
    reader::Reader,
    reference::{self, Row},
};

fn plan(problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
    problem.check()?;
    format.check(problem.head_dim, 64)?;
    Ok(Plan {
        backend: "cpu",
        problem: problem.clone(),
        format,
        num_splits: 1,
        workspace_bytes: 0,
    })
}

fn create_cache(config: &CacheConfig) -> Result<KvCache, Error> {
    KvCache::new(config.clone(), Box::new(HostPages::new(config)?))
}

fn check_plan(step: &DecodeStep<'_>) -> Result<(), Error> {
    if step.plan().backend == "cpu" {
        Ok(())
    } else {
        Err(Error::Foreign {
            backend: "cpu",
            what: "plan",
        })
    }
}

/// The scalar specification, as a backend: what every other one is compared with.
#[derive(Debug)]
pub struct Reference {
    device: DeviceInfo,
}

impl Reference {
    /// Always available.
    #[allow(
        clippy::new_without_default,
        reason = "a backend is opened, not defaulted"
    )]
    pub fn new() -> Self {
        let name = "scalar specification".to_owned();
        Reference {
            device: DeviceInfo {
                backend: "cpu",
                name,
                detail: "one thread".to_owned(),
            },
        }
    }
}

impl DecodeAttention for Reference {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, _: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        Ok(())
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        plan(problem, format)
    }

    fn decode(&self, step: &DecodeStep<'_>, output: &mut DecodeOutput<'_>) -> Result<(), Error> {
        check_plan(step)?;
        let (problem, integer) = (&step.plan().problem, step.plan().format.is_integer());
        let dim = problem.head_dim;
        let (out, lse) = output.slices();
        for (r, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            let (bi, q_head) = (r / problem.num_q_heads, r % problem.num_q_heads);
            let (b, i) = (bi / problem.q_len, bi % problem.q_len);
            let reader = Reader::new(step.kv(), b, q_head / problem.heads_per_kv())?;
            let row = Row::new(
                problem,
                b,
                i,
                q_head,
                &step.q()[r * dim..][..dim],
                reader.tensor_scales[0],
            );
            *lse = reference::attend(&row, &reader, integer, out);
        }
        Ok(())
    }
}

/// The fast CPU path: SIMD over a tile, rayon over (sequence, KV head, segment).
///
/// Runs on the caller's rayon pool; its bits do not depend on the number of threads.
#[derive(Debug)]
pub struct CpuBackend {
    device: DeviceInfo,
}

impl CpuBackend {
    /// Always available.
    #[allow(
        clippy::new_without_default,
        reason = "a backend is opened, not defaulted"
    )]
    pub fn new() -> Self {
        let detail = format!(
            "portable SIMD (wide), {} threads",
            rayon::current_num_threads()
        );
        CpuBackend {
            device: DeviceInfo {
                backend: "cpu",
                name: std::env::consts::ARCH.to_owned(),
                detail,
            },
        }
    }
}

impl DecodeAttention for CpuBackend {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn supports(&self, _: &Problem, _: KvFormat) -> Result<(), Unsupported> {
        Ok(())
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        plan(problem, format)
    }

    fn decode(&self, step: &DecodeStep<'_>, output: &mut DecodeOutput<'_>) -> Result<(), Error> {
        check_plan(step)?;
        let problem = &step.plan().problem;
        let jobs: Vec<(usize, usize)> = (0..problem.batch())
            .flat_map(|b| (0..problem.num_kv_heads).map(move |g| (b, g)))
            .collect();
        let heads = jobs
            .par_iter()
            .map(|&(b, g)| {
                let reader = Reader::new(step.kv(), b, g)?;
                Ok(fast::attend_head(step, &reader, b, g))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let (dim, per) = (problem.head_dim, problem.heads_per_kv());
        let (out, lse) = output.slices();
        for (&(b, g), (head_out, head_lse)) in jobs.iter().zip(&heads) {
            for (r, (row, row_lse)) in head_out.chunks_exact(dim).zip(head_lse).enumerate() {
                let at = (b * problem.q_len + r / per) * problem.num_q_heads + g * per + r % per;
                out[at * dim..][..dim].copy_from_slice(row);
                lse[at] = *row_lse;
            }
        }
        Ok(())
    }
}
