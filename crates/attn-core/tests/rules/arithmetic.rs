//! The scalar functions of the arithmetic at the ends of their ranges and at their ties.

use attn_core::arithmetic::{
    exponent, fold_factors, ftz, lse, merge_factors, pow2, query_code, query_step, shift_sum,
    softcap,
};

#[test]
fn exponents_are_those_of_the_largest_power_below() {
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    for e in -126..=127 {
        assert_eq!(exponent(power(e)), e);
        assert_eq!(exponent(-1.5 * power(e.min(126))), e.min(126));
    }
    assert_eq!(
        (exponent(0.0), exponent(f32::MIN_POSITIVE / 2.0)),
        (-127, -127)
    );
}

#[test]
fn rows_of_zeros_begin_below_2_to_the_minus_60() {
    let power = |e: u32| f32::from_bits((127 - e) << 23);
    let below = |x: f32| f32::from_bits(x.to_bits() - 1);
    assert_eq!(query_step(below(power(60))), [0.0; 2]);
    assert!(query_step(power(60)).iter().all(|x| *x > 0.0));
}

#[test]
fn codes_of_a_query_round_half_to_even_and_end_at_127() {
    for (x, code) in [
        (0.5, 0),
        (1.5, 2),
        (-2.5, -2),
        (126.6, 127),
        (128.0, 127),
        (-1e9, -127),
    ] {
        assert_eq!(query_code(x, 1.0), code, "{x}");
    }
}

#[test]
fn shifts_are_added_in_eight_sums_and_then_in_pairs() {
    let big = 16_777_216.0;
    // Added in order, the ones vanish beside 2^24; in a sum of their own, two of them do not.
    let terms = [big, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -big, 1.0];
    assert_eq!(shift_sum(terms.into_iter()), 2.0);
    // Sums 0 and 1 meet before sums 2 and 3 do.
    assert_eq!(shift_sum([big, 1.0, 1.0, -big].into_iter()), 1.0);
    assert_eq!(shift_sum([big, -big, 1.0, 1.0].into_iter()), 2.0);
    assert_eq!(shift_sum(std::iter::empty()).to_bits(), 0);
}

#[test]
fn powers_of_two_end_below_2_to_the_minus_64() {
    for k in -64..=40 {
        assert_eq!(f64::from(pow2(k as f32)), 2f64.powi(k));
    }
    for k in [-65.0, -127.0, -1e30, f32::NEG_INFINITY] {
        assert_eq!(pow2(k), 0.0);
    }
}

#[test]
fn a_tile_folds_into_its_states_exponent_unless_it_exceeds_it_by_more_than_40() {
    let power = |k: i32| 2f64.powi(k) as f32;
    let m = -7.0;
    for k in -64..=40 {
        let folded = fold_factors(m, m + k as f32);
        assert_eq!(folded, (m, [1.0, power(k)]), "{k}");
    }
    for k in [-65.0, -1e6, -1e30] {
        assert_eq!(fold_factors(m, m + k), (m, [1.0, 0.0]), "{k}");
    }
    for k in 41..=64 {
        let folded = fold_factors(m, m + k as f32);
        assert_eq!(folded, (m + k as f32, [power(-k), 1.0]), "{k}");
    }
    for k in [65.0, 1e6, 1e30] {
        assert_eq!(fold_factors(m, m + k), (m + k, [0.0, 1.0]), "{k}");
    }
    for tile in [-1e30, 0.0, 41.0] {
        assert_eq!(fold_factors(f32::NEG_INFINITY, tile), (tile, [0.0, 1.0]));
    }
}

#[test]
fn states_merge_to_the_larger_exponent() {
    let power = |k: i32| 2f64.powi(k) as f32;
    let m = 5.0;
    for k in 0..=64 {
        let (low, small) = (m - k as f32, power(-k));
        assert_eq!(merge_factors(m, low), (m, [1.0, small]), "{k}");
        assert_eq!(merge_factors(low, m), (m, [small, 1.0]), "{k}");
    }
    for low in [m - 65.0, -1e30, f32::NEG_INFINITY] {
        assert_eq!(merge_factors(m, low), (m, [1.0, 0.0]), "{low}");
        assert_eq!(merge_factors(low, m), (m, [0.0, 1.0]), "{low}");
    }
}

#[test]
fn subnormals_are_zeros_of_their_sign() {
    let least = f32::MIN_POSITIVE;
    for (x, expected) in [
        (least, least),
        (-least, -least),
        (f32::from_bits(0x007f_ffff), 0.0),
        (-f32::from_bits(0x007f_ffff), -0.0),
        (0.0, 0.0),
        (-0.0, -0.0),
        (1.0, 1.0),
    ] {
        assert_eq!(ftz(x).to_bits(), expected.to_bits(), "{x:e}");
    }
}

/// Bits of the arithmetic, from `docs/arithmetic.md` evaluated in f32: a mantissa below √½·2 belongs to the power below.
#[test]
fn the_logarithm_is_cut_at_the_square_root_of_a_half() {
    let root = 0x3F35_04F3u32;
    for (bits, expected) in [
        (root - 1, LSE[0]),
        (root, LSE[1]),
        (root + 1, LSE[2]),
        (root - 1 + (1 << 23), LSE[3]),
        (root + (1 << 23), LSE[4]),
        (1.0f32.to_bits(), LSE[5]),
        (2.0f32.to_bits(), LSE[6]),
        (3.0f32.to_bits(), LSE[7]),
    ] {
        assert_eq!(
            lse(0.0, f32::from_bits(bits)).to_bits(),
            expected,
            "{bits:#x}"
        );
    }
    assert_eq!(
        lse(3.0, 1.0).to_bits(),
        (3.0f32 * std::f32::consts::LN_2).to_bits()
    );
}

const LSE: [u32; 8] = [
    0xbeb1_721b,
    0xbeb1_7219,
    0xbeb1_7216,
    0x3eb1_7215,
    0x3eb1_7217,
    0x0000_0000,
    0x3f31_7218,
    0x3f8c_9f54,
];

#[test]
fn a_capped_score_is_the_caps_tangent() {
    for cap in [1e-3f32, 0.5, 30.0, 1000.0] {
        let (inverse, cap2) = (2.0 / cap, cap * std::f32::consts::LOG2_E);
        for x in [-1e6f32, -3.0, -0.25, 0.0, 0.125, 1.0, 40.0, 1e30] {
            // Scores come in base 2, the cap in base e.
            let exact =
                f64::from(cap) * (f64::from(x) / std::f64::consts::LOG2_E / f64::from(cap)).tanh();
            let exact = exact * std::f64::consts::LOG2_E;
            let got = f64::from(softcap(x, inverse, cap2));
            let slack = 2e-6 * exact.abs() + f64::from(cap) * 2.4e-7;
            assert!(
                (got - exact).abs() <= slack,
                "cap {cap}, {x}: {got}, {exact}"
            );
        }
    }
}

#[test]
fn reciprocals_have_the_bits_of_four_steps() {
    // A fifth step would change the last bits of these.
    for (x, y) in [(0x3fa6_0e44, 0x3f45_54d2), (0x3fa9_807f, 0x3f41_51c0)] {
        let rcp = attn_core::arithmetic::rcp(f32::from_bits(x));
        assert_eq!(rcp.to_bits(), y, "{x:#x}");
    }
}
