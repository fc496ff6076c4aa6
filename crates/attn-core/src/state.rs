//! Finished attention over some of a sequence's tokens, and the merge of two such states.

use crate::{
    arithmetic::{EXP2_MIN, LOG2_E, exp2_float, lse, rcp},
    error::{ElementIndex, Error, check_finite, filled, refuse},
};

/// Normalized outputs and log-sum-exps of the same rows: the result of a decode step, which merges with another result over other tokens.
///
/// ```
/// use attn_core::AttnState;
///
/// // One row over two parts of a sequence, which weigh alike.
/// let mut state = AttnState::new(2, vec![1.0, 2.0], vec![0.0])?;
/// state.merge_state(&AttnState::new(2, vec![3.0, 4.0], vec![0.0])?)?;
/// assert!((state.out()[0] - 2.0).abs() < 1e-6 && (state.lse()[0] - 2f32.ln()).abs() < 1e-6);
/// # Ok::<(), attn_core::Error>(())
/// ```
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
    /// [`Error::Length`]; [`Error::Parameter`] for a head_dim of 0 and for outputs beyond 2^126; [`Error::NotFinite`] for an output that is not finite, and for a
    /// log-sum-exp of NaN or +∞, which no decode step gives and which no merge could weigh.
    pub fn new(head_dim: usize, out: Vec<f32>, lse: Vec<f32>) -> Result<Self, Error> {
        let needed = elements(lse.len(), head_dim)?;
        if out.len() != needed {
            return Err(Error::Length {
                what: "out",
                given: out.len(),
                needed,
            });
        }
        check_finite("out", &out)?;
        if let Some(x) = out.iter().find(|x| x.abs() > MAX_OUT) {
            return refuse(
                "out",
                *x,
                "magnitudes up to 2^126, so that two of them add up",
            );
        }
        if let Some(index) = lse.iter().position(|x| !(*x < f32::INFINITY)) {
            return Err(Error::NotFinite {
                what: "lse",
                at: ElementIndex::Flat(index),
                value: lse[index],
            });
        }
        Ok(AttnState { head_dim, out, lse })
    }

    /// The state of rows that saw no token: outputs 0, log-sum-exps −∞. Merging it changes nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a head_dim of 0; [`Error::OutOfMemory`].
    pub fn empty(rows: usize, head_dim: usize) -> Result<Self, Error> {
        Ok(AttnState {
            head_dim,
            out: filled("outputs", elements(rows, head_dim)?, 0.0)?,
            lse: filled("log-sum-exps", rows, f32::NEG_INFINITY)?,
        })
    }

    /// The outputs, `[rows, head_dim]`.
    #[must_use]
    pub fn out(&self) -> &[f32] {
        &self.out
    }

    /// The log-sum-exps, `[rows]`.
    #[must_use]
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }

    /// Merges `other`, over disjoint tokens, into this state with weights `exp(lse − max)`. The functions are those of the arithmetic, so every
    /// machine gives the same bits.
    ///
    /// A log-sum-exp includes the sink of its row ([`Problem::sinks`](crate::Problem::sinks)), so only one of the states that are merged may have been
    /// computed with sinks: each further one would count them again.
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
        let rows = self.out.chunks_exact_mut(self.head_dim);
        let other_rows = other.out.chunks_exact(self.head_dim);
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

/// 2^126.
const MAX_OUT: f32 = f32::from_bits(0x7e80_0000);

/// Elements of an output.
fn elements(rows: usize, head_dim: usize) -> Result<usize, Error> {
    if head_dim == 0 {
        return refuse("head_dim", 0, "1 or more");
    }
    Ok(rows.saturating_mul(head_dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_weighs_by_the_log_sum_exps() {
        let mut state = AttnState::empty(1, 2).unwrap();
        let first = AttnState::new(2, vec![1.5, -2.0], vec![0.25]).unwrap();
        state.merge_state(&first).unwrap();
        state.merge_state(&AttnState::empty(1, 2).unwrap()).unwrap();
        assert_eq!(state, first);
        // Unequal weights: e^0.25 and e^1.75, so that no two of them could be exchanged unnoticed.
        let second = AttnState::new(2, vec![0.5, 2.0], vec![1.75]).unwrap();
        state.merge_state(&second).unwrap();
        let (a, b) = (0.25f64.exp(), 1.75f64.exp());
        let close = |x: f32, y: f64| (f64::from(x) - y).abs() < 1e-6;
        assert!(close(state.out()[0], (1.5 * a + 0.5 * b) / (a + b)));
        assert!(close(state.out()[1], (-2.0 * a + 2.0 * b) / (a + b)));
        assert!(close(state.lse()[0], (a + b).ln()));
    }

    #[test]
    fn rows_merge_on_their_own() {
        let rows = |x: [f32; 2], lse: [f32; 2]| AttnState::new(1, x.to_vec(), lse.to_vec());
        let none = f32::NEG_INFINITY;
        let mut state = rows([1.0, 0.0], [0.5, none]).unwrap();
        state
            .merge_state(&rows([0.0, 3.0], [none, -700.0]).unwrap())
            .unwrap();
        assert_eq!(state, rows([1.0, 3.0], [0.5, -700.0]).unwrap());
    }

    #[test]
    fn what_no_step_gives_is_refused() {
        for lse in [f32::NAN, f32::INFINITY] {
            let error = AttnState::new(1, vec![1.0, 1.0], vec![0.0, lse]).unwrap_err();
            assert!(matches!(
                error,
                Error::NotFinite {
                    what: "lse",
                    at: ElementIndex::Flat(1),
                    ..
                }
            ));
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = AttnState::new(1, vec![x], vec![0.0]).unwrap_err();
            assert!(matches!(
                error,
                Error::NotFinite {
                    what: "out",
                    at: ElementIndex::Flat(0),
                    ..
                }
            ));
        }
        assert!(AttnState::new(1, vec![f32::MAX], vec![0.0]).is_err());
        assert!(AttnState::new(0, vec![], vec![0.0]).is_err());
        assert!(AttnState::empty(1, 0).is_err());
        for rows in [1 << 58, usize::MAX] {
            assert!(matches!(
                AttnState::empty(rows, 64),
                Err(Error::OutOfMemory { .. })
            ));
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        assert!(AttnState::new(2, vec![0.0; 3], vec![0.0]).is_err());
        let mut state = AttnState::empty(2, 2).unwrap();
        let before = state.clone();
        for (rows, dim) in [(1, 2), (2, 4)] {
            assert!(
                state
                    .merge_state(&AttnState::empty(rows, dim).unwrap())
                    .is_err()
            );
            assert_eq!(state, before);
        }
    }
}
