//! The law's scalar functions at the ends of their ranges and at their ties.

use attn_core::arithmetic::{
    exponent, ftz, lse, plane_exponent, pow2, round_13, shift_exponent, softcap,
};

#[test]
fn exponents_of_planes_end_at_60_and_minus_70() {
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    for e in -126..=127 {
        let x = power(e);
        assert_eq!(exponent(x), e);
        assert_eq!(exponent(-1.5 * x.min(power(126))), e.min(126));
        assert_eq!(plane_exponent(x), (13 - e).clamp(-70, 60), "{e}");
        assert_eq!(shift_exponent(x), 14 - e, "{e}");
    }
    assert_eq!(plane_exponent(f32::MIN_POSITIVE / 2.0), 60);
    assert_eq!((plane_exponent(0.0), shift_exponent(0.0)), (0, 0));
}

#[test]
fn the_13_bits_of_a_query_are_the_nearest_and_ties_go_away_from_zero() {
    for low in 0..0x1000u32 {
        for bits in [0x3f80_0000 + low, 0x3fff_f000 + low, 0x0100_0000 + low] {
            // 11 of the 24 bits go.
            let (below, above) = (bits & !0x7ff, (bits & !0x7ff) + 0x800);
            let nearest = if bits - below < 0x400 { below } else { above };
            let x = f32::from_bits(bits);
            assert_eq!(round_13(x).to_bits(), nearest, "{bits:#x}");
            assert_eq!(round_13(-x), -round_13(x));
        }
    }
}

#[test]
fn weights_are_powers_of_two_up_to_a_distance_of_64() {
    for distance in 0..=64 {
        assert_eq!(f64::from(pow2(distance as f32)), 2f64.powi(-distance));
    }
    for distance in [65.0, 127.0, 1e30, f32::INFINITY] {
        assert_eq!(pow2(distance), 0.0);
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
