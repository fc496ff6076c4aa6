//! Sections 5 and 6 over vectors: the merge of a row's states, and the epilogue.

use attn_core::{
    MAX_HEAD_DIM,
    row_state::{MergedO, RowEnd, close, merge_max_sums},
};

use crate::{rotation::rotate, simd::Simd};

/// A row's states in the order of their tokens: `[O, m, l]` each, `step` floats apart.
pub(crate) struct States<'a> {
    pub all: &'a [f32],
    pub first: usize,
    pub step: usize,
    pub count: usize,
}

/// Merges (m, l) and O into the left side.
#[inline(always)]
pub(crate) fn merge<S: Simd>(
    s: S,
    left: &mut [f32; 2],
    left_o: &mut [f32],
    right: [f32; 2],
    right_o: &[f32],
) {
    let [alpha, beta] = match merge_max_sums(left, right) {
        MergedO::Left => return,
        MergedO::Right => return left_o.copy_from_slice(right_o),
        MergedO::Sum(factors) => factors.map(|factor| s.splat(factor)),
    };
    let pairs = left_o
        .chunks_exact_mut(S::LANES)
        .zip(right_o.chunks_exact(S::LANES));
    for (a, b) in pairs {
        // SAFETY: LANES floats each.
        unsafe {
            let x = s.ftz(s.mul(s.load(a.as_ptr()), alpha));
            let y = s.ftz(s.mul(s.load(b.as_ptr()), beta));
            s.store(a.as_mut_ptr(), s.add(x, y));
        }
    }
}

/// Merges states left to right in groups of `span`, then the groups left to right, then the sink; normalizes, turns the row back where V is rotated, and
/// returns the log-sum-exp.
#[inline(always)]
pub(crate) fn epilogue<S: Simd>(
    s: S,
    states: &States<'_>,
    span: usize,
    end: RowEnd,
    out: &mut [f32],
) -> f32 {
    let dim = out.len();
    let mut total = [f32::NEG_INFINITY, 0.0];
    let mut group = [f32::NEG_INFINITY, 0.0];
    let mut group_o = [0.0; MAX_HEAD_DIM];
    for i in 0..states.count {
        let (o, ml) = states.all[states.first + i * states.step..][..dim + 2].split_at(dim);
        if span == 1 {
            merge(s, &mut total, out, [ml[0], ml[1]], o);
            continue;
        }
        if i % span == 0 {
            merge(s, &mut total, out, group, &group_o[..dim]);
            group[0] = f32::NEG_INFINITY;
        }
        merge(s, &mut group, &mut group_o[..dim], [ml[0], ml[1]], o);
    }
    merge(s, &mut total, out, group, &group_o[..dim]);
    let (factor, lse) = close(total, out, end.sink);
    let Some(factor) = factor else {
        return lse;
    };
    let (scale, v_scale) = (s.splat(factor), s.splat(end.v_tensor_scale));
    for x in out.chunks_exact_mut(S::LANES) {
        // SAFETY: LANES floats.
        unsafe {
            let y = s.ftz(s.mul(s.ftz(s.load(x.as_ptr())), scale));
            s.store(x.as_mut_ptr(), s.ftz(s.mul(y, v_scale)));
        }
    }
    if let Some(block) = end.rotated {
        rotate::<S, true>(s, out, block);
    }
    lse
}
