//! Finished attention over some of a sequence's tokens, and how two such states join.

use crate::{
    arithmetic::{EXP2_MIN, LOG2_E, exp2_float, lse, rcp},
    error::Error,
};

/// Normalized outputs and log-sum-exps of the same rows: what a decode step returns, ready to join with another over other tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct AttnState {
    head_dim: usize,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl AttnState {
    /// `out` is `[rows, head_dim]`, `lse` `[rows]`: natural log, −∞ for a row that saw no token.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(head_dim: usize, out: Vec<f32>, lse: Vec<f32>) -> Result<Self, Error> {
        let needed = lse.len() * head_dim;
        if out.len() != needed {
            return Err(Error::Length {
                what: "out",
                given: out.len(),
                needed,
            });
        }
        Ok(AttnState { head_dim, out, lse })
    }

    /// No token seen: outputs 0, log-sum-exps −∞. Merging it changes nothing.
    pub fn empty(rows: usize, head_dim: usize) -> Self {
        AttnState {
            head_dim,
            out: vec![0.0; rows * head_dim],
            lse: vec![f32::NEG_INFINITY; rows],
        }
    }

    /// Outputs `[rows, head_dim]`.
    pub fn out(&self) -> &[f32] {
        &self.out
    }

    /// Log-sum-exps `[rows]`.
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// Joins `other`, over disjoint tokens, into this state: weights `exp(lse − max)`, by the law's exp2 and reciprocal, so that every
    /// machine gives the same bits.
    ///
    /// # Errors
    /// [`Error::Length`] if the rows or head_dims differ; nothing is changed then.
    pub fn merge_state(&mut self, other: &AttnState) -> Result<(), Error> {
        for (what, given, needed) in [
            ("other head_dim", other.head_dim, self.head_dim),
            ("other lse", other.lse.len(), self.lse.len()),
        ] {
            if given != needed {
                return Err(Error::Length {
                    what,
                    given,
                    needed,
                });
            }
        }
        let rows = self.out.chunks_exact_mut(self.head_dim.max(1));
        let other_rows = other.out.chunks_exact(self.head_dim.max(1));
        let sums = self.lse.iter_mut().zip(&other.lse);
        for ((row, other_row), (a, b)) in rows.zip(other_rows).zip(sums) {
            if *b == f32::NEG_INFINITY {
                continue;
            }
            if *a == f32::NEG_INFINITY {
                *a = *b;
                row.copy_from_slice(other_row);
                continue;
            }
            let max = a.max(*b);
            let weight = |x: f32| exp2_float(((x - max) * LOG2_E).max(EXP2_MIN));
            let (wa, wb) = (weight(*a), weight(*b));
            let sum = wa + wb;
            let scale = rcp(sum);
            for (x, y) in row.iter_mut().zip(other_row) {
                *x = (*x * wa + y * wb) * scale;
            }
            *a = max + lse(0.0, sum);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_weighs_by_the_log_sum_exps() {
        let mut state = AttnState::empty(1, 2);
        let first = AttnState::new(2, vec![1.5, -2.0], vec![0.25]).unwrap();
        state.merge_state(&first).unwrap();
        state.merge_state(&AttnState::empty(1, 2)).unwrap();
        assert_eq!(state, first);
        let second = AttnState::new(2, vec![0.5, 2.0], vec![0.25]).unwrap();
        state.merge_state(&second).unwrap();
        let close = |x: f32, y: f32| (x - y).abs() < 1e-6;
        assert!(close(state.out()[0], 1.0) && close(state.out()[1], 0.0));
        assert!(close(state.lse()[0], 0.25 + 2f32.ln()));
    }

    #[test]
    fn other_shapes_are_refused() {
        assert!(AttnState::new(2, vec![0.0; 3], vec![0.0]).is_err());
        let mut state = AttnState::empty(2, 2);
        let before = state.clone();
        for other in [AttnState::empty(1, 2), AttnState::empty(2, 4)] {
            assert!(state.merge_state(&other).is_err());
            assert_eq!(state, before);
        }
    }
}
