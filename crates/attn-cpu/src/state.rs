//! The state of one query row over some tokens, and the two ways to combine states: fold and merge.

use attn_core::{
    arithmetic::{SPAN, fold_factors, ftz},
    row_state,
};

/// `(m, l, O)` of `docs/arithmetic.md`, section 5.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub m: f32,
    pub l: f32,
    pub o: Vec<f32>,
}

impl State {
    pub fn empty(dim: usize) -> Self {
        State {
            m: f32::NEG_INFINITY,
            l: 0.0,
            o: vec![0.0; dim],
        }
    }

    /// Adds one tile's value.
    pub fn fold(&mut self, m_tile: f32, l_tile: f32, t: &[f32]) {
        let (m, [alpha, beta]) = fold_factors(self.m, m_tile);
        self.l = self.l * alpha + l_tile * beta;
        for (o, t) in self.o.iter_mut().zip(t) {
            *o = ftz(*o * alpha) + t * beta;
        }
        self.m = m;
    }

    /// Merges the state of the tokens that follow.
    pub fn merge(&mut self, right: &State) {
        let mut ml = [self.m, self.l];
        row_state::merge(&mut ml, &mut self.o, [right.m, right.l], &right.o);
        [self.m, self.l] = ml;
    }
}

/// The states of spans from those of their segments, merged left to right.
pub(crate) fn spans(segments: Vec<State>) -> impl Iterator<Item = State> {
    let mut segments = segments.into_iter().peekable();
    std::iter::from_fn(move || {
        segments.peek()?;
        segments.by_ref().take(SPAN).reduce(merged)
    })
}

/// The left state with the right one merged into it.
pub(crate) fn merged(mut left: State, right: State) -> State {
    left.merge(&right);
    left
}
