//! The end of a row, from its spans' states to its result: sections 6 and 7 of `docs/arithmetic.md`.

use crate::{
    arithmetic::{ftz, lse, merge_factors, merge_sink, rcp, sink_state},
    rotation::rotate_output,
};

/// What ends a row beside its state.
#[derive(Debug, Clone, Copy)]
pub struct RowEnd {
    /// The sink of its query head.
    pub sink: Option<f32>,
    /// V's static scale; 1 without.
    pub v_tensor_scale: f32,
    /// Elements of the blocks by which V is rotated, if it is.
    pub rotated: Option<usize>,
}

/// Where the O of two merged states comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MergedO {
    /// It is that of the tokens before.
    Left,
    /// It is that of the tokens that follow.
    Right,
    /// The sum of both, each times its factor: first that of the tokens before.
    Sum([f32; 2]),
}

/// Merges the `[m, l]` of the tokens that follow into that of the tokens before them.
#[must_use]
#[inline(always)]
pub fn merge_max_sums(left: &mut [f32; 2], right: [f32; 2]) -> MergedO {
    if right[0] == f32::NEG_INFINITY {
        return MergedO::Left;
    }
    if left[0] == f32::NEG_INFINITY {
        *left = right;
        return MergedO::Right;
    }
    let (m, factors) = merge_factors(left[0], right[0]);
    *left = [m, left[1] * factors[0] + right[1] * factors[1]];
    MergedO::Sum(factors)
}

/// Merges the state of the tokens that follow, `[m, l]` and O, into that of the tokens before them.
pub fn merge(left: &mut [f32; 2], left_o: &mut [f32], right: [f32; 2], right_o: &[f32]) {
    match merge_max_sums(left, right) {
        MergedO::Left => {}
        MergedO::Right => left_o.copy_from_slice(right_o),
        MergedO::Sum([alpha, beta]) => {
            for (a, b) in left_o.iter_mut().zip(right_o) {
                *a = ftz(*a * alpha) + ftz(b * beta);
            }
        }
    }
}

/// Closes a row's state: merges the sink into `[m, l]`, and gives the factor that normalizes O, and the log-sum-exp.
///
/// A row that saw no token has no factor: its O is set to 0 here. No merge has written it, so it holds what the caller's memory held, and no factor turns
/// NaN into 0. Every path from states to outputs on the host closes its rows by this function.
#[must_use]
#[inline(always)]
pub fn close(state: [f32; 2], o: &mut [f32], sink: Option<f32>) -> (Option<f32>, f32) {
    let is_seen = state[0] != f32::NEG_INFINITY;
    if !is_seen {
        o.fill(0.0);
    }
    let ([m, l], alpha) = match sink {
        Some(sink) => merge_sink(state, sink_state(sink)),
        None => (state, 1.0),
    };
    if m == f32::NEG_INFINITY {
        return (None, m);
    }
    (is_seen.then(|| rcp(l) * alpha), lse(m, l))
}

/// Closes the row, turns O into the normalized row, turned back where V is rotated, and returns its log-sum-exp.
#[must_use]
pub fn finish(state: [f32; 2], o: &mut [f32], end: RowEnd) -> f32 {
    let (factor, lse) = close(state, o, end.sink);
    if let Some(factor) = factor {
        for x in o.iter_mut() {
            *x = ftz(ftz(ftz(*x) * factor) * end.v_tensor_scale);
        }
        if let Some(block) = end.rotated {
            rotate_output(o, block);
        }
    }
    lse
}
