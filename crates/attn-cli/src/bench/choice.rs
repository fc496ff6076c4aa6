//! Which workloads `attn bench` measures: named ones, those of a backend's targets, or a shape from the command line.

use anyhow::{Result, ensure};
use attn::{Arithmetic, BackendId, HeadDim, Heads, KvFormat, Problem};
use attn_bench::{Workload, workloads};

/// A decode step of any shape, in place of named workloads.
#[derive(clap::Args)]
pub struct CustomArgs {
    /// A shape of your own: query heads and KV heads, as in 28/4.
    #[arg(long, value_name = "Q/KV", value_parser = heads)]
    heads: Option<[usize; 2]>,
    /// Dims of a head, or of a key and a value, as in 192/128.
    #[arg(
        long,
        value_name = "DIM[/V]",
        default_value = "128",
        requires = "heads"
    )]
    dim: HeadDim,
    /// Tokens in each sequence's cache.
    #[arg(long, default_value_t = 8192, requires = "heads")]
    ctx: usize,
    /// Sequences.
    #[arg(long, default_value_t = 1, requires = "heads")]
    batch: usize,
    /// Query tokens of each sequence.
    #[arg(long, default_value_t = 1, requires = "heads")]
    q_len: usize,
    /// Let every query token see the whole cache.
    #[arg(long, requires = "heads")]
    not_causal: bool,
    /// Let more than 16 query tokens be computed by floats where a backend has them, without promised bits.
    #[arg(long, requires = "heads")]
    fast: bool,
    /// Tokens per page: 16, 32, 64 or 128.
    #[arg(long, default_value_t = 64, requires = "heads")]
    page_size: usize,
    /// Formats, as for `run`.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "bf16,int8,int8/int4,int4",
        requires = "heads"
    )]
    kv: Vec<KvFormat>,
}

/// Query heads and KV heads from `28/4`.
fn heads(text: &str) -> Result<[usize; 2], String> {
    let parts = text.split_once('/');
    let parsed = parts.and_then(|(q, kv)| Some([q.parse().ok()?, kv.parse().ok()?]));
    parsed.ok_or_else(|| "write query heads and KV heads as in 28/4".to_owned())
}

impl CustomArgs {
    /// One workload per format; none if no shape was given.
    pub(crate) fn workloads(&self) -> Result<Vec<Workload>> {
        let Some([q, kv]) = self.heads else {
            return Ok(Vec::new());
        };
        let one = |&format: &KvFormat| {
            // More sequences than any cache has are refused before a list of their lengths is made.
            ensure!(
                self.batch <= MOST_SEQUENCES,
                "--batch is {}; allowed: up to {MOST_SEQUENCES} sequences",
                self.batch
            );
            let mut problem = Problem::new(Heads::new(q, kv, self.dim), vec![self.ctx; self.batch]);
            problem.q_lens = vec![self.q_len; problem.batch()];
            problem.scores.causal = !self.not_causal;
            if self.fast {
                problem.scores.arithmetic = Arithmetic::Fast;
            }
            Ok(Workload::custom(problem, format, self.page_size)?)
        };
        self.kv.iter().map(one).collect()
    }
}

/// The most sequences of a workload of one's own.
const MOST_SEQUENCES: usize = 1 << 16;

/// The names that a backend's targets use.
pub(super) fn default_names(backend: BackendId) -> Vec<String> {
    let names: &[&str] = match backend {
        BackendId::Cuda => &[""],
        BackendId::Cpu => &["single/"],
        _ => &["gqa8/batch32/", "gqa8/batch512/", "single/32-8-ctx8192/"],
    };
    names.iter().map(|&name| name.to_owned()).collect()
}

/// The workloads with one of these names, or else with one of these in their names.
pub(crate) fn chosen(names: &[String]) -> Result<Vec<Workload>> {
    let all = workloads();
    let mut wanted = vec![false; all.len()];
    for name in names {
        let whole = all.iter().any(|workload| workload.to_string() == *name);
        let mut found = false;
        for (workload, wanted) in all.iter().zip(&mut wanted) {
            let text = workload.to_string();
            if if whole {
                text == *name
            } else {
                text.contains(name.as_str())
            } {
                (*wanted, found) = (true, true);
            }
        }
        ensure!(
            found,
            "no workload is called {name}; `attn bench --list` prints the names"
        );
    }
    Ok(all
        .into_iter()
        .zip(wanted)
        .filter(|pair| pair.1)
        .map(|pair| pair.0)
        .collect())
}
