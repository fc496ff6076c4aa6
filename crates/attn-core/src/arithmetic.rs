//! The scalar functions of `docs/arithmetic.md`, each written once.

pub use crate::segments::{SEGMENT, SPAN, TILE};

/// log2 e as f32.
pub const LOG2_E: f32 = f32::from_bits(0x3FB8_AA3B);
/// ln 2 as f32.
pub const LN_2: f32 = f32::from_bits(0x3F31_7218);
/// Lowest argument of [`exp2_float`].
pub const EXP2_MIN: f32 = -125.0;
/// Largest argument of [`exp2_weight`]: a weight of 2^-63 rounds to no unit of a sum.
pub const WEIGHT_MAX: f32 = 64.0;
/// Adding it rounds |x| ≤ 2^22 to an integer, half to even.
pub const ROUND: f32 = 12_582_912.0;
/// [`ROUND`] plus 1, which [`exp2_weight`] starts from.
pub const ROUND_WEIGHT: f32 = 12_582_913.0;
/// Added to a weight p < 2, leaves p·2^22 in the low bits.
pub const WEIGHT_BASE: f32 = 2.0;
/// Coefficients of 2^x, c3…c0 for weights of 16 bits.
pub const EXP2_WEIGHT: [f32; 4] = [
    f32::from_bits(0x3D62_0000),
    f32::from_bits(0x3E78_6F4E),
    f32::from_bits(0x3F31_7982),
    f32::from_bits(0x3F7F_FB48),
];
/// Coefficients of 2^x, c5…c0 for f32 weights.
pub const EXP2_FLOAT: [f32; 6] = [
    f32::from_bits(0x3AAD_FE47),
    f32::from_bits(0x3C1E_7726),
    f32::from_bits(0x3D63_5B15),
    f32::from_bits(0x3E75_FCD9),
    f32::from_bits(0x3F31_7216),
    1.0,
];
const LOG2: [f32; 9] = [
    f32::from_bits(0x3E09_0EF7),
    f32::from_bits(0xBE60_7D7C),
    f32::from_bits(0x3E5F_6D97),
    f32::from_bits(0xBE72_988E),
    f32::from_bits(0x3E93_1B3E),
    f32::from_bits(0xBEB8_BC98),
    f32::from_bits(0x3EF6_3E7D),
    f32::from_bits(0xBF38_AA18),
    f32::from_bits(0x3FB8_AA36),
];

/// 2^k for −126 ≤ k ≤ 127.
#[inline]
#[must_use]
pub fn exp2i(k: i32) -> f32 {
    debug_assert!((-126..=127).contains(&k));
    f32::from_bits(((k + 127) as u32) << 23)
}

/// `E(x)`: 2^E ≤ |x| < 2^(E+1); −127 for zero and subnormals, whose use the callers clamp away.
#[inline]
#[must_use]
pub fn exponent(x: f32) -> i32 {
    ((x.to_bits() >> 23) & 255) as i32 - 127
}

/// A query whose largest element is smaller counts as zeros, 2^-60: what a device flushes in its rotation is then below every rounding.
pub const SMALLEST_QUERY: f32 = f32::from_bits((127 - 60) << 23);
/// Weights whose largest is smaller count as zeros, 2^-100: their step would leave the range of f32. No positive scale gives such weights.
pub const SMALLEST_WEIGHT: f32 = f32::from_bits((127 - 100) << 23);

/// The step of an 8-bit row of queries, and what its elements are multiplied by to count it: `σ` and `127·rcp(a)`.
#[inline]
#[must_use]
pub fn query_step(largest: f32) -> [f32; 2] {
    if largest < SMALLEST_QUERY {
        return [0.0; 2];
    }
    [largest * f32::from_bits(0x3C01_0204), 127.0 * rcp(largest)]
}

/// An element of a query in 8 bits, by the second number of [`query_step`].
#[inline]
#[must_use]
pub fn query_code(x: f32, inverse: f32) -> i32 {
    ((x * inverse).round_ties_even() as i32).clamp(-127, 127)
}

/// A positive normal number rounded up to `bits` significant bits.
#[inline]
#[must_use]
pub fn round_up(x: f32, bits: u32) -> f32 {
    let low = (1 << (24 - bits)) - 1;
    f32::from_bits((x.to_bits() + low) & !low)
}

/// The step κ of a tile's weights of one byte, by the largest of them, with so many significant bits; 0 if they are too small to count.
#[inline]
#[must_use]
pub fn weight_step(largest: f32, bits: u32) -> f32 {
    if largest < SMALLEST_WEIGHT {
        return 0.0;
    }
    round_up(largest * f32::from_bits(0x3B80_8081), bits)
}

/// The threshold θ of token `t`: 64 thresholds form a lattice, so that a sum of weights below one step is right on average.
#[inline]
#[must_use]
pub const fn threshold(t: usize) -> f32 {
    let place = (29 * (t % TILE) + 32) % TILE;
    32768.0 + (place as f32 + 0.5) / TILE as f32
}

/// A weight of one byte: `x` counts as many steps as [`rcp`]\(κ) says, and the [`threshold`] rounds.
#[inline]
#[must_use]
pub fn weight_byte(x: f32, inverse: f32, threshold: f32) -> u8 {
    ((x * inverse + threshold).to_bits() >> 8) as u8
}

/// The sum of 8 partial sums over the tokens of a tile, token t in sum t mod 8: `z` of the (centred) shifts of plain int4 V.
#[inline]
#[must_use]
pub fn shift_sum(terms: impl Iterator<Item = f32>) -> f32 {
    let mut z = [0.0f32; 8];
    for (t, term) in terms.enumerate() {
        z[t % 8] += term;
    }
    ((z[0] + z[1]) + (z[2] + z[3])) + ((z[4] + z[5]) + (z[6] + z[7]))
}

#[inline]
fn exp2<const N: usize>(x: f32, round: f32, coefficients: &[f32; N]) -> f32 {
    let t = x + round;
    let r = x - (t - round);
    let mut y = coefficients[0];
    for c in &coefficients[1..] {
        y = y * r + c;
    }
    f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23))
}

/// 2^(1 − v) for 0 ≤ v ≤ 64 to 7.5e-5, and below 2: `exp2w`.
#[inline]
#[must_use]
pub fn exp2_weight(v: f32) -> f32 {
    exp2(-v, ROUND_WEIGHT, &EXP2_WEIGHT)
}

/// 2^x for −125 ≤ x ≤ 0 to 1.6e-7: `exp2f`.
#[inline]
#[must_use]
pub fn exp2_float(x: f32) -> f32 {
    exp2(x, ROUND, &EXP2_FLOAT)
}

/// p·2^22 of a weight 0 ≤ p < 2: `p22`.
#[inline]
#[must_use]
pub fn weight_units(p: f32) -> i32 {
    ((p + WEIGHT_BASE).to_bits() - WEIGHT_BASE.to_bits()) as i32
}

/// 1/x for positive normal x, to about one unit in the last place.
#[inline]
#[must_use]
pub fn rcp(x: f32) -> f32 {
    let mut y = f32::from_bits(0x7EF3_11C7u32.wrapping_sub(x.to_bits()));
    for _ in 0..4 {
        y *= 2.0 - x * y;
    }
    y
}

/// `ln(l·2^m)` for l > 0.
#[inline]
#[must_use]
pub fn lse(m: f32, l: f32) -> f32 {
    let i = (l.to_bits() as i32).wrapping_sub(0x3F35_04F3);
    let u = f32::from_bits(((i & 0x7F_FFFF) + 0x3F35_04F3) as u32) - 1.0;
    let mut y = LOG2[0];
    for c in &LOG2[1..] {
        y = y * u + c;
    }
    y *= u;
    ((m + (i >> 23) as f32) + y) * LN_2
}

/// 2^−distance for a distance of 0..=64, and 0 beyond: the factor of a state whose maximum is smaller by that distance.
#[inline]
#[must_use]
pub fn pow2(distance: f32) -> f32 {
    if distance <= 64.0 {
        exp2i(-(distance as i32))
    } else {
        0.0
    }
}

/// The state of an attention sink, which has no value: its maximum m and its sum l.
#[inline]
#[must_use]
pub fn sink_state(sink: f32) -> [f32; 2] {
    let s = ftz(ftz(sink) * LOG2_E);
    let m = s.ceil();
    [m, exp2_float(s - m)]
}

/// Merges a sink into the (m, l) of a row that is merged otherwise: the new (m, l), and α, by which the row's O is multiplied.
#[inline]
#[must_use]
pub fn merge_sink([m, l]: [f32; 2], [sink_m, sink_l]: [f32; 2]) -> ([f32; 2], f32) {
    let top = m.max(sink_m);
    let (alpha, beta) = (pow2(top - m), pow2(top - sink_m));
    ([top, l * alpha + sink_l * beta], alpha)
}

/// Flushes a subnormal x to a zero of its sign, as GPUs do.
#[inline]
#[must_use]
pub fn ftz(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0f32.copysign(x)
    } else {
        x
    }
}

/// Soft cap in base 2: `cap·tanh(s/cap)`, `inverse` = 2/softcap, `cap2` = softcap·log2 e.
#[inline]
#[must_use]
pub fn softcap(s: f32, inverse: f32, cap2: f32) -> f32 {
    let e = exp2_float((-(s.abs() * inverse)).max(EXP2_MIN));
    (((1.0 - e) * rcp(1.0 + e)) * cap2).copysign(s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_stay_within_their_written_error() {
        for i in 0..=250_000 {
            let x = -(i as f32) / 2000.0;
            let exact = f64::from(x).exp2();
            assert!(
                (f64::from(exp2_float(x)) / exact - 1.0).abs() < 1.8e-7,
                "{x}"
            );
        }
        let mut worst = 0.0f64;
        for i in 0..=256_000 {
            let v = i as f32 / 4000.0;
            let (p, exact) = (exp2_weight(v), (1.0 - f64::from(v)).exp2());
            assert!(p > 0.0 && p < 2.0, "{v}");
            worst = worst.max((f64::from(p) / exact - 1.0).abs());
        }
        assert!((7.4e-5..7.51e-5).contains(&worst), "{worst:e}");
    }

    #[test]
    fn weights_count_in_units_of_2_to_the_minus_22() {
        for i in 0..=64_000 {
            let p = exp2_weight(i as f32 / 1000.0);
            assert_eq!(
                f64::from(weight_units(p)),
                (f64::from(p) * 4_194_304.0).round_ties_even()
            );
        }
        assert_eq!(weight_units(0.0), 0);
    }

    #[test]
    fn a_sink_is_its_exponential_and_its_merge_a_sum() {
        let exact = |[m, l]: [f32; 2]| f64::from(m) + f64::from(l).log2();
        for i in -20_000..=20_000 {
            let sink = i as f32 / 200.0;
            let [m, l] = sink_state(sink);
            assert!(m == m.ceil() && (0.49..=1.0).contains(&l), "{sink}");
            let s = f64::from(sink) * std::f64::consts::LOG2_E;
            let close = 4e-7 + s.abs() * 1.2e-7;
            assert!((exact([m, l]) - s).abs() < close, "{sink}");
            let row = [3.0, 5.25];
            let (sum, alpha) = merge_sink(row, [m, l]);
            let want = (exact(row).exp2() + s.exp2()).log2();
            assert!((exact(sum) - want).abs() < 1e-6 + close, "{sink}");
            assert_eq!(alpha, pow2(m.max(3.0) - 3.0));
        }
        let empty = [f32::NEG_INFINITY, 0.0];
        for sink in [-1e6, -1.0, 0.0, 1e-40, 1e6] {
            let state = sink_state(sink);
            assert_eq!(merge_sink(empty, state), (state, 0.0), "{sink}");
        }
        // GPUs flush it, so that it is 0 everywhere.
        assert_eq!(sink_state(1e-40), [0.0, 1.0]);
        // No bit of a row shows the least sink.
        let row = [-3.0, 1.75];
        assert_eq!(merge_sink(row, sink_state(-1e6)), (row, 1.0));
    }

    #[test]
    fn reciprocal_and_log_are_float_accurate() {
        for i in 1..100_000u32 {
            let x = i as f32 * 0.37;
            assert!(
                (f64::from(rcp(x)) * f64::from(x) - 1.0).abs() < 2.4e-7,
                "{x}"
            );
            let exact = f64::from(x).ln();
            assert!(
                (f64::from(lse(0.0, x)) - exact).abs() < 1.2e-7 * exact.abs().max(1.0) + 1e-7,
                "{x}"
            );
        }
    }

    #[test]
    fn a_query_of_8_bits_errs_by_half_a_step() {
        for i in 0..100_000u32 {
            let (a, x) = (0.37 + i as f32 * 1e-3, (i % 2001) as f32 / 1000.0 - 1.0);
            let [step, inverse] = query_step(a);
            let error = f64::from(x * a) - f64::from(query_code(x * a, inverse)) * f64::from(step);
            assert!(error.abs() <= f64::from(step) * 0.50002, "{a} {x}");
        }
        assert_eq!(query_code(-1.5, query_step(1.5)[1]), -127);
        assert_eq!(query_step(8e-19), [0.0; 2]);
    }

    #[test]
    fn steps_are_rounded_up_to_few_bits() {
        for (x, bits, up) in [
            (1.0, 3, 1.0),
            (1.0001, 3, 1.25),
            (1.75, 3, 1.75),
            (1.76, 3, 2.0),
            (1.0001, 2, 1.5),
            (1.5001, 2, 2.0),
        ] {
            assert_eq!(round_up(x, bits), up, "{x}");
        }
    }

    #[test]
    fn weights_never_exceed_a_byte_and_round_by_less_than_a_step() {
        for i in 0..200_000u32 {
            let largest = f32::from_bits(0x2000_0000 + i * 7919);
            for bits in [2, 3] {
                let step = weight_step(largest, bits);
                let inverse = rcp(step);
                for t in [0, 1, 31, 63] {
                    let x = largest * (1.0 - (i % 97) as f32 / 97.0);
                    let steps = f64::from(x) / f64::from(step);
                    // A carry out of the byte would come back as 0.
                    let w = f64::from(weight_byte(x, inverse, threshold(t)));
                    assert!((w - steps).abs() < 1.003, "{largest:e} {x:e} {t}: {w}");
                }
            }
        }
    }

    #[test]
    fn thresholds_meet_runs_and_strides_evenly() {
        for stride in [1, 2, 4, 8] {
            // A flat tail of a fraction of a step on every `stride`th token: its weights sum up to it.
            for steps in [0.07f32, 0.25, 0.5, 0.93] {
                let tokens = (0..64).step_by(stride);
                let sum: u32 = tokens
                    .clone()
                    .map(|t| u32::from(weight_byte(steps, 1.0, threshold(t))))
                    .sum();
                let exact = steps * tokens.len() as f32;
                assert!(
                    (sum as f32 - exact).abs() <= 1.0,
                    "{stride} {steps}: {sum} {exact}"
                );
            }
        }
        let mut places: Vec<u32> = (0..64).map(|t| threshold(t).to_bits()).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[1] == pair[0] + 4));
    }
}
