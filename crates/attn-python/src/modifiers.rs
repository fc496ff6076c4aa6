//! What changes scores, attribute by attribute of Python's `attn._options.Modifiers`.

use attn::{Arithmetic, Problem};
use pyo3::prelude::*;

/// The modifiers of a problem.
#[derive(FromPyObject)]
pub struct Modifiers {
    scale: Option<f32>,
    causal: bool,
    softcap: Option<f32>,
    window_left: Option<usize>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    fast: bool,
}

impl Modifiers {
    /// The problem with these modifiers.
    pub fn of(self, problem: Problem) -> Problem {
        let mut problem = problem.causal(self.causal);
        if let Some(scale) = self.scale {
            problem = problem.softmax_scale(scale);
        }
        problem.softcap = self.softcap;
        problem.window_left = self.window_left;
        problem.alibi_slopes = self.alibi_slopes;
        problem.sinks = self.sinks;
        if self.fast {
            problem.arithmetic = Arithmetic::Fast;
        }
        problem
    }
}
