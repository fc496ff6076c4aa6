//! The weights of the integer arithmetic, which are functions of integers: section 5 of `docs/arithmetic.md`, each written once.
//!
//! Scores lie on a grid of 64ths, and so do the logarithms of V's scales. A softmax weight is therefore one of 64 mantissas times a power of two,
//! and everything that is rounded from it has been chosen so that no rounding boundary is near: any exponential that errs by at most
//! [`MARGIN`] gives the integers of this module. A kernel computes in f32 what stands here in f64.

use std::{fmt, ops::RangeInclusive};

use half::f16;

use crate::arithmetic::TILE;

/// Points of the grid in a unit of the exponent.
pub const GRID: i32 = 64;
/// 1.5·2^17: its f32 sum with a score counts the score in 64ths.
pub const SCORE_BASE: f32 = 196_608.0;
/// Sums of a score and [`SCORE_BASE`] from here on, below [`NEAR_END`], are on the grid, and so is every other that has a weight beside it.
pub const NEAR_START: f32 = 131_200.0;
/// See [`NEAR_START`].
pub const NEAR_END: f32 = 262_144.0;
/// The largest weight of a tile counts at most 2^-6, so that its sum of 64 f16 numbers is exact in f32.
pub const WEIGHT_SHIFT: f32 = 6.0;
/// The largest scaled weight that a step follows down to is 2^-50.
pub const SMALLEST_POINT: i32 = -50 * GRID;
/// 4/m for the mantissas m/4 of a step, m = 4 to 7, or nearly: so that no weight of the grid is near a threshold.
pub const INVERSES: [f32; 4] = [
    f32::from_bits(0x3F7F_ED7B),
    f32::from_bits(0x3F4C_C6EE),
    f32::from_bits(0x3F2A_99E5),
    f32::from_bits(0x3F12_4980),
];
/// 1/255 as f32: a step is the largest scaled weight times it, rounded up.
pub const TO_STEP: f32 = f32::from_bits(0x3B80_8081);
/// The relative error of 2^x times V's scale times the inverse of the step that no weight shows.
pub const MARGIN: f64 = 6.7 / 4_194_304.0;

/// A score on the grid, plus [`SCORE_BASE`]: `y = fma(a, σ, base)`. `base` is [`SCORE_BASE`] where K has no centre, else
/// [`score_base`](crate::centres::score_base).
#[inline]
#[must_use]
pub fn grid_score(a: f32, step: f32, base: f32) -> f32 {
    a.mul_add(step, base)
}

/// Whether the largest score of a row in a tile is in the range of the grid, ±2^16.
#[inline]
#[must_use]
pub fn is_near(top: f32) -> bool {
    (NEAR_START..NEAR_END).contains(&top)
}

/// The exponent M of a tile, plus [`SCORE_BASE`]: the largest score rounded up to an integer.
#[inline]
#[must_use]
pub fn grid_ceil(top: f32) -> f32 {
    f32::from_bits((top.to_bits() + 63) & !63)
}

/// The point of a score: its weight is 2^(point/64). Weights below 2^-126 count nothing anywhere, and share a point.
#[inline]
#[must_use]
pub fn weight_point(y: f32, ceil: f32) -> i32 {
    let below = (y - ceil).max(-120.0);
    (below * GRID as f32) as i32 - WEIGHT_SHIFT as i32 * GRID
}

/// 2^(point/64).
#[inline]
#[must_use]
pub fn weight(point: i32) -> f64 {
    (f64::from(point) / f64::from(GRID)).exp2()
}

/// The weight of a point as f16, in units of 2^-24: what it adds to the denominator.
#[inline]
#[must_use]
pub fn weight_units(point: i32) -> i32 {
    (f16::from_f64(weight(point)).to_f64() * 16_777_216.0) as i32
}

/// The point of a scale of V: it is read as 2^(point/64), the nearest. A scale of 0 has none.
#[inline]
#[must_use]
pub fn scale_point(scale: f16) -> Option<i32> {
    let scale = scale.to_f64();
    (scale > 0.0).then(|| (scale.log2() * f64::from(GRID)).round_ties_even() as i32)
}

/// A scale of V as the integer arithmetic reads it: the nearest 2^(n/64), or 0.
#[inline]
#[must_use]
pub fn grid_scale(scale: f16) -> f32 {
    scale_point(scale).map_or(0.0, |point| weight(point) as f32)
}

/// A positive normal number rounded up to `bits` significant bits.
#[inline]
#[must_use]
pub fn round_up(x: f32, bits: u32) -> f32 {
    let low = (1 << (24 - bits)) - 1;
    f32::from_bits((x.to_bits() + low) & !low)
}

/// The step κ of a tile's weights of one byte, by the point of the largest scaled weight, with so many significant bits; and nearly 1/κ.
#[inline]
#[must_use]
pub fn weight_step(largest: i32, bits: u32) -> [f32; 2] {
    let largest = weight(largest.max(SMALLEST_POINT)) as f32;
    let step = round_up(largest * TO_STEP, bits);
    [step, step_inverse(step)]
}

/// What scaled weights are multiplied by to count steps: nearly 1/step. Any number for an infinite step, which scales of trusted views may give.
#[inline]
#[must_use]
pub fn step_inverse(step: f32) -> f32 {
    let bits = step.to_bits();
    let of_mantissa = INVERSES[(bits >> 21 & 3) as usize].to_bits();
    f32::from_bits((of_mantissa + 0x3F80_0000).wrapping_sub(bits & 0x7F80_0000))
}

/// The place of token `t` in the lattice of thresholds: 64 of them, so that a sum of weights below one step is right on average.
const fn place(t: usize) -> usize {
    (29 * (t % TILE) + 32) % TILE
}

/// A weight of one byte of token `t`: as many steps as the scaled weight of a point counts, rounded by the token's threshold.
#[inline]
#[must_use]
pub fn weight_byte(point: i32, inverse: f32, t: usize) -> u8 {
    let threshold = (place(t) as f64 + 0.375) / TILE as f64;
    (weight(point) * f64::from(inverse) + threshold).floor() as u8
}

/// Added in f32 to a count of steps, leaves the weight of token `t` in byte 1. The sum's step is 2^-8, and its rounding adds the half of it that the
/// number lacks to the token's threshold.
#[inline]
#[must_use]
pub const fn threshold(t: usize) -> f32 {
    32768.0 + (place(t) as f32 + 0.25) / TILE as f32
}

/// Mantissas of the grid, each 2^(n/64) rounded to f32.
#[must_use]
pub fn mantissas() -> [f32; GRID as usize] {
    std::array::from_fn(|n| weight(n as i32) as f32)
}

/// Points of [`GridCheck`]: from where nothing counts to the largest scale of V.
pub const CHECKED_POINTS: RangeInclusive<i32> = -160 * GRID..=16 * GRID;
/// Scales of [`GridCheck`]: the finite f16 numbers from +0 on, in the order of their bits.
pub const CHECKED_SCALES: u16 = 0x7C00;
/// The smallest point whose weight a device that flushes subnormals keeps.
const SMALLEST_NORMAL: i32 = -126 * GRID;

/// What a device gives for the inputs of its own exponential and logarithm, which IEEE 754 does not define, beside what section 5 allows: all of their inputs that
/// the integer arithmetic has.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GridCheck {
    /// Points that were compared.
    pub points: usize,
    /// The largest relative error of 2^(n/64), in units of 2^-22; 1 is allowed.
    pub largest_error: f64,
    /// Powers of two that are not exact, and weights below 2^-126 that are not 0.
    pub inexact: usize,
    /// Scales of V that were compared.
    pub scales: usize,
    /// Scales that are read as another point of the grid.
    pub misread: usize,
}

impl GridCheck {
    /// Compares what a device gives: 2^(n/64) for each of [`CHECKED_POINTS`], and the first [`CHECKED_SCALES`] f16 numbers as V's scales are read.
    #[must_use]
    pub fn of(points: &[f32], scales: &[f32]) -> Self {
        let mut check = GridCheck {
            points: points.len(),
            largest_error: 0.0,
            inexact: 0,
            scales: scales.len(),
            misread: 0,
        };
        for (point, found) in CHECKED_POINTS.zip(points) {
            let is_exact = point < SMALLEST_NORMAL || point % GRID == 0;
            if is_exact {
                check.inexact += usize::from(*found != normal_weight(point));
            } else {
                let error = error_of(*found, weight(point));
                check.largest_error = check.largest_error.max(error);
            }
        }
        for (bits, found) in (0..CHECKED_SCALES).zip(scales) {
            let is_read = match scale_point(f16::from_bits(bits)) {
                None => *found == 0.0,
                Some(point) => error_of(*found, weight(point)) <= 1.0,
            };
            check.misread += usize::from(!is_read);
        }
        check
    }

    /// Whether the device has every point and every scale, as closely as the arithmetic needs them.
    #[must_use]
    pub fn is_right(&self) -> bool {
        let is_whole =
            self.points == CHECKED_POINTS.count() && self.scales == usize::from(CHECKED_SCALES);
        is_whole && self.largest_error <= 1.0 && self.inexact == 0 && self.misread == 0
    }
}

impl fmt::Display for GridCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GridCheck {
            points,
            largest_error,
            inexact,
            scales,
            misread,
        } = self;
        write!(
            f,
            "{points} powers of 2 within {largest_error:.2}·2^-22 (1 is allowed), {inexact} inexact; {scales} scales, {misread} misread"
        )
    }
}

/// A weight as a device that flushes subnormals has it.
fn normal_weight(point: i32) -> f32 {
    if point < SMALLEST_NORMAL {
        0.0
    } else {
        weight(point) as f32
    }
}

/// The relative error of a number, in units of 2^-22; infinite for what is no number.
fn error_of(found: f32, exact: f64) -> f64 {
    let error = (f64::from(found) / exact - 1.0).abs() * 4_194_304.0;
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right() -> (Vec<f32>, Vec<f32>) {
        let points = CHECKED_POINTS.map(normal_weight).collect();
        let scales = (0..CHECKED_SCALES).map(|bits| grid_scale(f16::from_bits(bits)));
        (points, scales.collect())
    }

    #[test]
    fn a_device_is_right_where_every_point_and_scale_is() {
        let (points, scales) = right();
        let check = GridCheck::of(&points, &scales);
        assert!(check.is_right() && check.largest_error < 0.26, "{check}");
        assert_eq!((check.points, check.scales), (11_265, 31_744));
        assert!(
            !GridCheck::of(&points[1..], &scales).is_right(),
            "a point less"
        );
        assert!(
            !GridCheck::of(&points, &scales[1..]).is_right(),
            "a scale less"
        );
    }

    #[test]
    fn one_wrong_number_is_found_wherever_it_is() {
        let (points, scales) = right();
        let place = |point: i32| (point - CHECKED_POINTS.start()) as usize;
        let is_right = |i: usize, spoil: fn(f32) -> f32| {
            let mut spoilt = points.clone();
            spoilt[i] = spoil(spoilt[i]);
            GridCheck::of(&spoilt, &scales).is_right()
        };
        for point in [-8063, -385, -1, 1, 63, 1023] {
            assert!(is_right(place(point), |x| f32::from_bits(x.to_bits() + 1)));
            assert!(
                !is_right(place(point), |x| f32::from_bits(x.to_bits() + 9)),
                "{point}"
            );
            assert!(!is_right(place(point), |_| f32::NAN), "{point}");
        }
        for point in [-8064, -384, 0, 64, 1024] {
            assert!(!is_right(place(point), |x| x.next_up()), "{point}");
        }
        // Below 2^-126 nothing counts.
        assert!(!is_right(place(-8065), |_| 1e-38));
        for bits in [0, 1, 0x3C00, 0x7BFF] {
            let mut spoilt = scales.clone();
            spoilt[bits] = (spoilt[bits] * 1.0109).max(1e-30);
            assert!(!GridCheck::of(&points, &spoilt).is_right(), "{bits:#x}");
        }
    }
}
