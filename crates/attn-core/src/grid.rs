//! The weights of the integer arithmetic, which are functions of integers: section 5 of `docs/arithmetic.md`, each written once.
//!
//! Scores lie on a grid of 64ths, and so do the logarithms of V's scales. A softmax weight is therefore one of 64 mantissas times a power of two,
//! and everything that is rounded from it has been chosen so that no rounding boundary is near: any exponential that errs by at most
//! [`MARGIN`] gives the integers of this module. A kernel computes in f32 what stands here in f64.

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

/// A score on the grid, plus [`SCORE_BASE`]: `y = fma(a, σ, 196608)`.
#[inline]
#[must_use]
pub fn grid_score(a: f32, step: f32) -> f32 {
    a.mul_add(step, SCORE_BASE)
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

/// What scaled weights are multiplied by to count steps: nearly 1/step.
#[inline]
#[must_use]
pub fn step_inverse(step: f32) -> f32 {
    let bits = step.to_bits();
    let of_mantissa = INVERSES[(bits >> 21 & 3) as usize].to_bits();
    f32::from_bits(of_mantissa + 0x3F80_0000 - (bits & 0x7F80_0000))
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
