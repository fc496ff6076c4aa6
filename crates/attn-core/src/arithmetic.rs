//! The scalar functions of `docs/arithmetic.md`, each written once.

pub use crate::segments::{SPAN, TILE, segment_tiles};

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
/// Added to a weight p < 2, leaves p·2^22 in the low bits, and p·2^14 in bytes 1 and 2: 2 + 2^-15.
pub const WEIGHT_BASE: f32 = f32::from_bits(0x4000_0080);
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

/// The exponent e of a row whose largest magnitude is `amax`: every |x|·2^e rounds to less than 2^14.
#[inline]
#[must_use]
pub fn plane_exponent(amax: f32) -> i32 {
    if amax == 0.0 {
        return 0;
    }
    (13 - exponent(amax * BELOW)).clamp(-70, 60)
}

/// The exponent h of shifts up to `largest` in magnitude: every |shift|·2^h rounds to less than 2^15.
#[inline]
#[must_use]
pub fn shift_exponent(largest: f32) -> i32 {
    if largest == 0.0 {
        return 0;
    }
    14 - exponent(largest * BELOW)
}

/// Moves a number that would round up to the next power of two past it before its exponent is taken.
const BELOW: f32 = 1.0 + 1.0 / 16384.0;

/// x rounded to 13 significant bits, half away from zero: its product with an f16 is exact.
#[inline]
#[must_use]
pub fn round_13(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x400) & !0x7ff)
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
            let p14 = (p + WEIGHT_BASE).to_bits() >> 8 & 0xffff;
            assert_eq!(p14 as i32, (weight_units(p) + 128) >> 8);
        }
        assert_eq!(weight_units(0.0), 0);
    }

    #[test]
    fn numbers_just_below_a_power_of_two_do_not_round_up_to_it() {
        for below in 0..100_000u32 {
            let x = f32::from_bits(2.0f32.to_bits() - below);
            let at = |e: i32| (x * exp2i(e)).round_ties_even();
            let (q15, sh) = (at(plane_exponent(x)), at(shift_exponent(x)));
            assert!((4096.0..16384.0).contains(&q15), "{x}");
            assert!((8192.0..32768.0).contains(&sh), "{x}");
        }
        assert_eq!((plane_exponent(0.0), shift_exponent(0.0)), (0, 0));
    }

    #[test]
    fn queries_of_13_bits_times_f16_are_exact() {
        for i in 0..100_000u32 {
            let (x, scale) = (
                f32::from_bits(0x3f00_0000 + i * 997),
                (i % 2048 + 1) as f32 / 4096.0,
            );
            let q = round_13(x);
            assert_eq!(f64::from(q * scale), f64::from(q) * f64::from(scale));
            assert!((q / x - 1.0).abs() <= 1.0 / 8192.0, "{x}");
        }
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
}
