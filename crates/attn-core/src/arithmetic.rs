//! The scalar functions of `docs/arithmetic.md`, each written once.

use crate::groups::Groups;

pub use crate::segments::{SEGMENT, SPAN, TILE};

/// log2 e as f32.
pub const LOG2_E: f32 = f32::from_bits(0x3FB8_AA3B);
/// ln 2 as f32.
pub const LN_2: f32 = f32::from_bits(0x3F31_7218);
/// Lowest argument of [`exp2_float`].
pub const EXP2_MIN: f32 = -125.0;
/// Adding it rounds |x| ≤ 2^22 to an integer, half to even.
pub const ROUND: f32 = 12_582_912.0;
/// Added to a weight p < 2, leaves p·2^22 in the low bits.
pub const WEIGHT_BASE: f32 = 2.0;
/// Coefficients of 2^x, c5…c0.
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
/// The step of an 8-bit row of queries, and what its elements are multiplied by to count it: `σ` and `127·rcp(a)`.
#[inline]
#[must_use]
pub fn query_step(largest: f32) -> [f32; 2] {
    if largest < SMALLEST_QUERY {
        return [0.0; 2];
    }
    [largest * f32::from_bits(0x3C01_0204), 127.0 * rcp(largest)]
}

/// The steps of an 8-bit row of queries whose two parts have one each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryParts {
    /// `σ`: the first part's step.
    pub step: f32,
    /// What the elements of each part are multiplied by to count its step.
    pub inverse: [f32; 2],
    /// `ρ`: the second part's step in the first one's, by which the term of its group is multiplied.
    pub ratio: f32,
}

impl QueryParts {
    /// The steps of a row.
    #[must_use]
    pub fn of(row: &[f32], parts: Groups) -> Self {
        let largest = |part: usize| {
            let part = row[parts.range(part)].iter();
            part.fold(0.0f32, |a, x| a.max(x.abs()))
        };
        match parts.count() {
            2 => query_parts([largest(0), largest(1)]),
            _ => QueryParts::whole(largest(0)),
        }
    }

    /// Of a row that is all of one part.
    #[inline]
    #[must_use]
    pub fn whole(largest: f32) -> Self {
        let [step, inverse] = query_step(largest);
        QueryParts {
            step,
            inverse: [inverse; 2],
            ratio: 1.0,
        }
    }
}

/// The steps of a row's two parts from their largest magnitudes: neither counts as less than 2^-24 of the other, so that `ρ` is a normal number.
#[inline]
#[must_use]
pub fn query_parts(largest: [f32; 2]) -> QueryParts {
    let least = f32::from_bits((127 - 24) << 23);
    let a = [
        largest[0].max(largest[1] * least),
        largest[1].max(largest[0] * least),
    ];
    let [step, inverse] = query_step(a[0]);
    QueryParts {
        step,
        inverse: [inverse, query_step(a[1])[1]],
        ratio: if step == 0.0 { 0.0 } else { a[1] * rcp(a[0]) },
    }
}

/// An element of a query in 8 bits, by the second number of [`query_step`].
#[inline]
#[must_use]
pub fn query_code(x: f32, inverse: f32) -> i32 {
    ((x * inverse).round_ties_even() as i32).clamp(-127, 127)
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

/// 2^x for −125 ≤ x ≤ 0 to 1.6e-7: `exp2f`.
#[inline]
#[must_use]
pub fn exp2_float(x: f32) -> f32 {
    let t = x + ROUND;
    let r = x - (t - ROUND);
    let mut y = EXP2_FLOAT[0];
    for c in &EXP2_FLOAT[1..] {
        y = y * r + c;
    }
    f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23))
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

/// 2^k for an integer −64 ≤ k ≤ 40, and 0 below.
#[inline]
#[must_use]
pub fn pow2(k: f32) -> f32 {
    if k >= -64.0 { exp2i(k as i32) } else { 0.0 }
}

/// By how much the exponent of a tile may exceed that of the state which it is folded into, before the state takes it over.
pub const LARGEST_GROWTH: f32 = 40.0;

/// What folds a tile of the exponent `tile` into a state of the exponent `m`, −∞ if it is empty: the exponent of both, α of the state, β of the tile.
#[inline]
#[must_use]
pub fn fold_factors(m: f32, tile: f32) -> (f32, [f32; 2]) {
    let k = tile - m;
    if k > LARGEST_GROWTH {
        (tile, [pow2(-k), 1.0])
    } else {
        (m, [1.0, pow2(k)])
    }
}

/// What merges states of the exponents `m` and `next`, not both −∞: the larger one, α of the first state, β of the next.
#[inline]
#[must_use]
pub fn merge_factors(m: f32, next: f32) -> (f32, [f32; 2]) {
    let top = m.max(next);
    (top, [pow2(m - top), pow2(next - top)])
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
    let (top, [alpha, beta]) = merge_factors(m, sink_m);
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
    }

    #[test]
    fn weights_count_in_units_of_2_to_the_minus_22() {
        for i in 0..=64_000 {
            let p = exp2_float(-(i as f32) / 1000.0);
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
            assert_eq!(alpha, pow2(3.0 - m.max(3.0)));
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

    /// Kills a step of one part alone, a ratio the other way round, and one that is no normal number where a part is zero.
    #[test]
    fn each_part_of_a_query_errs_by_half_a_step_of_its_own() {
        let parts = Groups::of_dims(6, 4);
        for (first, second) in [
            (1.0, 1.0),
            (1.0, 300.0),
            (250.0, 0.5),
            (0.0, 3.0),
            (2.0, 0.0),
        ] {
            let row = [0.3, -1.0, 0.9, 0.1, 1.0, -0.7].map(|x: f32| x * first);
            let row: Vec<f32> = row[..4]
                .iter()
                .copied()
                .chain([second, -0.7 * second])
                .collect();
            let steps = QueryParts::of(&row, parts);
            assert!(
                (2f32.powi(-25)..=2f32.powi(25)).contains(&steps.ratio),
                "{steps:?}"
            );
            for (d, x) in row.iter().enumerate() {
                let part = parts.of_dim(d);
                let unit = f64::from(steps.step) * [1.0, f64::from(steps.ratio)][part];
                let largest = f64::from([first, second][part]);
                let error =
                    (f64::from(*x) - f64::from(query_code(*x, steps.inverse[part])) * unit).abs();
                assert!(
                    error <= largest / 127.0 * 0.5001,
                    "{first} {second} {d}: {error}"
                );
            }
        }
        let none = query_parts([1e-19, 1e-30]);
        assert_eq!((none.step, none.inverse, none.ratio), (0.0, [0.0; 2], 0.0));
        assert_eq!(
            QueryParts::of(&[2.0, -3.0], Groups::of_dims(2, 2)),
            QueryParts::whole(3.0)
        );
    }
}
