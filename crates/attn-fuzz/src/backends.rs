//! The backends that every decode is tried on: the reference, and each instruction set of this machine.

use std::sync::LazyLock;

use attn_core::{DecodeAttention, DecodeStep, Error, HeadDim, Heads, KvFormat, KvSource, Problem};
use attn_cpu::{CpuBackend, Isa, Options, Reference};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{draw::Draw, hold};

/// A reference and those that must have its bits.
pub struct Backends {
    /// Makes caches, and says what the bits are.
    pub reference: Box<dyn DecodeAttention>,
    /// Each by name.
    pub others: Vec<(String, Box<dyn DecodeAttention>)>,
}

/// The CPU's.
pub static CPU: LazyLock<Backends> = LazyLock::new(|| {
    let of = |isa: Isa| -> Option<(String, Box<dyn DecodeAttention>)> {
        Some((
            isa.to_string(),
            Box::new(CpuBackend::with_options(&Options::default().isa(isa)).ok()?),
        ))
    };
    Backends {
        reference: Box::new(Reference::new()),
        others: Isa::available().filter_map(of).collect(),
    }
});

/// Pools of 1, 2 and 3 threads.
static POOLS: LazyLock<Vec<ThreadPool>> = LazyLock::new(|| {
    let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build();
    (1..=3).filter_map(|threads| pool(threads).ok()).collect()
});

/// Outputs and log-sum-exps.
pub type Rows = [Vec<f32>; 2];

/// Decodes into outputs filled with NaN.
///
/// # Errors
/// The backend's.
pub fn decode(
    backend: &dyn DecodeAttention,
    problem: &Problem,
    format: KvFormat,
    q: &[f32],
    kv: KvSource<'_>,
) -> Result<Rows, Error> {
    let plan = backend.plan(problem, format)?;
    let [mut out, mut lse] = [problem.out_elements(), problem.rows()].map(|n| vec![f32::NAN; n]);
    let mut step = DecodeStep::new(&plan, q, kv, &mut out)?.with_lse(&mut lse)?;
    backend.decode(&mut step)?;
    Ok([out, lse])
}

impl Backends {
    /// Decodes on every backend, each in a pool of 1 to 3 threads, and compares bits. None if the reference refuses, as all
    /// others then must.
    ///
    /// # Errors
    /// What differs, or is not finite.
    pub fn decode(
        &self,
        draw: &mut Draw<'_, '_>,
        problem: &Problem,
        format: KvFormat,
        q: &[f32],
        kv: KvSource<'_>,
    ) -> Result<Option<Rows>, String> {
        let want = decode(&*self.reference, problem, format, q, kv);
        for (name, backend) in &self.others {
            let pool = draw.range(0..=POOLS.len() - 1);
            let got = POOLS[pool].install(|| decode(&**backend, problem, format, q, kv));
            match (&want, &got) {
                (Ok(want), Ok(got)) => same(name, pool + 1, want, got)
                    .map_err(|text| format!("{text}; {format}, {problem:?}"))?,
                (Err(want), Err(got)) if want.to_string() == got.to_string() => {}
                _ => {
                    return Err(format!(
                        "{name} gives {:?}, the reference {:?}; {format}, {problem:?}",
                        got.as_ref().map(|_| "an answer"),
                        want.as_ref().map(|_| "an answer")
                    ));
                }
            }
        }
        let Ok([out, lse]) = want else {
            return Ok(None);
        };
        hold!(
            out.iter().all(|x| x.is_finite()) && lse.iter().all(|x| *x < f32::INFINITY),
            "an answer is not finite: {format}, {problem:?}"
        );
        Ok(Some([out, lse]))
    }
}

fn same(name: &str, threads: usize, want: &Rows, got: &Rows) -> Result<(), String> {
    for (what, want, got) in [("out", &want[0], &got[0]), ("lse", &want[1], &got[1])] {
        for (i, (want, got)) in want.iter().zip(got).enumerate() {
            hold!(
                want.to_bits() == got.to_bits(),
                "{name} on {threads} threads: {what}[{i}] is {got:e} ({:#010x}), the reference's {want:e} ({:#010x})",
                got.to_bits(),
                want.to_bits()
            );
        }
    }
    Ok(())
}

/// A problem over sequences of these lengths, with drawn heads and modifiers.
pub fn problem(draw: &mut Draw<'_, '_>, heads: usize, dim: HeadDim, lens: &[usize]) -> Problem {
    // The many rows of large groups take their time: one query token of each sequence.
    let is_wide = draw.once_in(40);
    let per_kv = match draw.range(0..=9) {
        _ if is_wide => draw.pick(&[64, 65, 127, 128]),
        0 => draw.range(1..=17),
        n => 1 + n % 4,
    };
    let mut problem = Problem::new(Heads::new(heads * per_kv, heads, dim), lens.to_vec());
    if draw.once_in(2) && !is_wide {
        problem = problem.q_len(draw.range(1..=4));
    }
    if draw.once_in(12) && !is_wide {
        problem = problem.q_len(16);
    }
    if draw.once_in(8) && !is_wide {
        problem.q_lens = lens.iter().map(|_| draw.range(0..=40)).collect();
    }
    problem.scores.causal = !draw.once_in(4);
    if draw.once_in(4) {
        problem.scores.softcap = Some(draw.pick(&[1e-3, 0.5, 30.0, 1000.0]));
    }
    if draw.once_in(3) {
        let window = [
            0,
            1,
            5,
            70,
            300,
            1 << 30,
            isize::MAX as usize,
            usize::MAX - 1,
            usize::MAX,
        ];
        problem.scores.window_left = Some(draw.pick(&window));
    }
    if problem.scores.causal && draw.once_in(6) {
        let chunk = [1, 2, 64, 100, 1 << 30, usize::MAX];
        problem.scores.chunk = Some(draw.pick(&chunk));
    }
    if draw.once_in(4) {
        let slopes = [0.0, -0.5, 0.01, 1.0, 1e-20, 1000.0, -1000.0];
        let slopes = (0..problem.num_q_heads).map(|_| draw.pick(&slopes));
        problem.scores.alibi_slopes = Some(slopes.collect());
    }
    if draw.once_in(4) {
        let sinks = [0.0, -1e6, -2.5, 1e-40, 0.5, 7.0, 1e4, 1e6];
        let sinks = (0..problem.num_q_heads).map(|_| draw.pick(&sinks));
        problem.scores.sinks = Some(sinks.collect());
    }
    if draw.once_in(8) {
        problem.scores.softmax_scale = Some(draw.pick(&[1e-15, 1e-6, 1.0, 1e6, 1e15]));
    }
    problem
}
