//! How a backend is timed: the trait, and the times that it gives.
//!
//! A backend takes part by a [`Timer`], which knows its own clock and how to find its bytes outside every cache.

use attn_core::Error;

use crate::workload::Workload;

/// Microseconds of a run, over several.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// The fastest.
    pub min: f64,
    /// The middle one; of an even number, the slower of the middle two.
    pub median: f64,
}

impl Timing {
    /// From microseconds.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        Timing {
            min: us[0],
            median: us[us.len() / 2],
        }
    }
}

/// What one workload took, and the pure read of [`Workload::bytes`] bytes in the same run.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// The work.
    pub step: Timing,
    /// The read.
    pub ceiling: Timing,
}

/// How one backend is timed.
pub trait Timer {
    /// Backend, device and what else the figures depend on.
    fn device(&self) -> String;

    /// Timed repetitions per workload where the caller names no number.
    fn runs(&self) -> usize;

    /// Whether rates are those of the medians: so on GPUs, whose clock is quiet. Else of the fastest.
    fn by_median(&self) -> bool {
        true
    }

    /// Cache bytes beyond which a workload is left out unless large ones are asked for.
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    /// Operations a second, two for a product and its sum, of the backend's dot product of 8-bit integers alone, on all of its threads; the best so far.
    /// `None` where nobody measures it.
    fn peak(&self) -> Option<f64> {
        None
    }

    /// Times one workload, at most `runs` times: an append's caches have room for some tokens, and clocks for some stamps.
    ///
    /// # Errors
    /// What the backend refuses, or its device's failure.
    fn measure(&mut self, workload: &Workload, runs: usize) -> Result<Measured, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_are_the_fastest_and_the_middle_one() {
        let timing = Timing::of(vec![7.0, 1.0, 100.0, 3.0, 2.0]);
        assert_eq!((timing.min, timing.median), (1.0, 3.0));
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((timing.min, timing.median), (1.0, 3.0));
    }
}
