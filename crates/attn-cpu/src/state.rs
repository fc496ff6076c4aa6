//! The state of one query row over some tokens, and the two ways to combine states: fold and merge.

use attn_core::{
    arithmetic::{SPAN, exp2i, ftz, lse, merge_sink, pow2, rcp, sink_state},
    rotation::rotate_output,
};

/// `(m, l, O)` of `docs/arithmetic.md`, section 5.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub m: f32,
    pub l: f32,
    pub o: Vec<f32>,
}

impl State {
    pub fn empty(head_dim: usize) -> Self {
        State {
            m: f32::NEG_INFINITY,
            l: 0.0,
            o: vec![0.0; head_dim],
        }
    }

    /// Adds one tile's value: `l_tile` is in units of 2^-22.
    pub fn fold(&mut self, m_tile: f32, l_tile: i32, t: &[f32]) {
        let m = self.m.max(m_tile);
        let (alpha, beta) = (pow2(m - self.m), pow2(m - m_tile));
        self.l = self.l * alpha + l_tile as f32 * exp2i(-22) * beta;
        if alpha == 1.0 {
            for (o, t) in self.o.iter_mut().zip(t) {
                *o = ftz(*o) + t * beta;
            }
        } else {
            for (o, t) in self.o.iter_mut().zip(t) {
                *o = ftz(*o * alpha) + t * beta;
            }
        }
        self.m = m;
    }

    /// Merges the state of the tokens that follow.
    pub fn merge(&mut self, right: State) {
        if right.m == f32::NEG_INFINITY {
            return;
        }
        if self.m == f32::NEG_INFINITY {
            *self = right;
            return;
        }
        let m = self.m.max(right.m);
        let (alpha, beta) = (pow2(m - self.m), pow2(m - right.m));
        self.l = self.l * alpha + right.l * beta;
        for (a, b) in self.o.iter_mut().zip(&right.o) {
            *a = ftz(*a * alpha) + ftz(b * beta);
        }
        self.m = m;
    }

    /// Merges the row's sink, writes the normalized row, turned back where V is rotated, and returns its log-sum-exp.
    pub fn epilogue(&self, end: Epilogue, out: &mut [f32]) -> f32 {
        let ([m, l], alpha) = match end.sink {
            Some(sink) => merge_sink([self.m, self.l], sink_state(sink)),
            None => ([self.m, self.l], 1.0),
        };
        if m == f32::NEG_INFINITY {
            out.fill(0.0);
            return f32::NEG_INFINITY;
        }
        let scale = rcp(l) * alpha;
        for (out, o) in out.iter_mut().zip(&self.o) {
            *out = ftz(ftz(ftz(*o) * scale) * end.v_tensor_scale);
        }
        if end.rotated {
            rotate_output(out);
        }
        lse(m, l)
    }
}

/// What ends a row beside its state.
pub(crate) struct Epilogue {
    pub sink: Option<f32>,
    pub v_tensor_scale: f32,
    /// Whether V is rotated.
    pub rotated: bool,
}

/// Merges segments left to right inside each span, and the spans left to right.
pub(crate) fn merge_spans(segments: Vec<State>) -> Option<State> {
    let merge = |mut left: State, right: State| {
        left.merge(right);
        left
    };
    let mut segments = segments.into_iter().peekable();
    let mut spans = Vec::new();
    while segments.peek().is_some() {
        spans.extend(segments.by_ref().take(SPAN).reduce(merge));
    }
    spans.into_iter().reduce(merge)
}
