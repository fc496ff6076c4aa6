//! Figures that more than one command prints. NaN is kept: no comparison here drops it.

use serde_json::{Value, json};

/// A figure in JSON: a number; or the string `NaN`, `inf` or `-inf`, for which JSON has no number.
pub fn number(x: f64) -> Value {
    if x.is_finite() {
        json!(x)
    } else {
        json!(x.to_string())
    }
}

/// Gigabytes per second, from microseconds.
pub fn gb_per_s(bytes: f64, us: f64) -> f64 {
    bytes / us / 1e3
}

/// The greater one; NaN if either is.
pub fn greater(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// A difference in the L2 norm, gathered over several tensors.
#[derive(Debug, Default, Clone, Copy)]
pub struct Difference {
    error: f64,
    norm: f64,
}

impl Difference {
    /// The difference of one tensor.
    pub fn of(got: &[f32], want: &[f32]) -> Self {
        let mut difference = Difference::default();
        difference.add(got, want);
        difference
    }

    /// Adds a tensor.
    pub fn add(&mut self, got: &[f32], want: &[f32]) {
        for (a, b) in got.iter().zip(want) {
            self.error += (f64::from(*a) - f64::from(*b)).powi(2);
            self.norm += f64::from(*b).powi(2);
        }
    }

    /// Adds what another one gathered.
    pub fn merge(&mut self, other: &Difference) {
        self.error += other.error;
        self.norm += other.norm;
    }

    /// Relative to what was wanted; where that is zero everywhere, the difference itself.
    pub fn relative(&self) -> f64 {
        if self.norm == 0.0 {
            self.error.sqrt()
        } else {
            (self.error / self.norm).sqrt()
        }
    }
}

/// The largest difference of two rows of log-sum-exps; −∞ on both sides, where a query sees no token, is none.
pub fn lse_difference(got: &[f32], want: &[f32]) -> f64 {
    let both_empty = |a: f32, b: f32| a == f32::NEG_INFINITY && b == f32::NEG_INFINITY;
    got.iter()
        .zip(want)
        .filter(|(a, b)| !both_empty(**a, **b))
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs())
        .fold(0.0, greater)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;

    #[test]
    fn json_says_nan_and_infinity_as_strings() {
        assert_eq!(number(1.5).to_string(), "1.5");
        assert_eq!(number(f64::NAN).to_string(), "\"NaN\"");
        assert_eq!(number(f64::INFINITY).to_string(), "\"inf\"");
        assert_eq!(number(f64::NEG_INFINITY).to_string(), "\"-inf\"");
    }

    #[test]
    fn a_megabyte_in_a_millisecond_is_a_gigabyte_per_second() {
        assert_eq!(gb_per_s(1e6, 1e3), 1.0);
    }

    #[test]
    fn relative_errors_are_of_all_tensors_together() {
        // Differences of 3 and 4 beside values of 6 and 8.
        let mut difference = Difference::of(&[9.0], &[6.0]);
        assert_eq!(difference.relative(), 0.5);
        difference.add(&[4.0], &[8.0]);
        assert_eq!(difference.relative(), 0.5);
        difference.add(&[0.0], &[0.0]);
        assert_eq!(difference.relative(), 0.5);
        assert_eq!(Difference::of(&[3.0, 4.0], &[0.0, 0.0]).relative(), 5.0);
        assert_eq!(Difference::of(&[0.0], &[0.0]).relative(), 0.0);
    }

    #[test]
    fn nan_and_infinity_stay_in_every_error() {
        for (got, want) in [(NAN, 1.0), (1.0, NAN), (INF, INF)] {
            let rows = ([0.0, got, 0.0], [0.0, want, 5.0]);
            assert!(Difference::of(&rows.0, &rows.1).relative().is_nan());
            assert!(lse_difference(&rows.0, &rows.1).is_nan());
        }
        assert_eq!(lse_difference(&[-INF], &[1.0]), f64::INFINITY);
        assert!(greater(f64::NAN, 1.0).is_nan() && greater(1.0, f64::NAN).is_nan());
    }

    #[test]
    fn lse_errors_are_the_largest_difference() {
        assert_eq!(lse_difference(&[1.0, 2.0, 3.0], &[1.5, 0.0, 2.75]), 2.0);
        assert_eq!(lse_difference(&[-INF, 1.0], &[-INF, 1.25]), 0.25);
        assert_eq!((greater(1.0, 2.0), greater(2.0, 1.0)), (2.0, 2.0));
    }
}
