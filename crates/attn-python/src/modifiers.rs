//! What changes scores, attribute by attribute of Python's `attn._options.Modifiers`.

use attn::{Arithmetic, ScoreModifiers};
use pyo3::prelude::*;

/// The modifiers of a call or a plan.
#[derive(FromPyObject)]
pub struct Modifiers {
    scale: Option<f32>,
    causal: bool,
    softcap: Option<f32>,
    window_left: Option<usize>,
    chunk: Option<usize>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    fast: bool,
}

impl From<Modifiers> for ScoreModifiers {
    fn from(given: Modifiers) -> Self {
        ScoreModifiers {
            softmax_scale: given.scale,
            causal: given.causal,
            softcap: given.softcap,
            window_left: given.window_left,
            chunk: given.chunk,
            alibi_slopes: given.alibi_slopes,
            sinks: given.sinks,
            arithmetic: match given.fast {
                true => Arithmetic::Fast,
                false => Arithmetic::Exact,
            },
        }
    }
}
