//! Quantizers against exact arithmetic: every code is the nearest, ties go to even, and what is out of range saturates.

use attn_core::quant::{self, Param, int4_group, int8_group, to_f16, to_fp8};
use attn_core::{Int8Scale, Scheme};
use half::{bf16, f16};

/// Numbers of every magnitude and both signs.
fn numbers() -> impl Iterator<Item = f32> {
    (0..400_000u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761)))
}

#[test]
fn f16_and_bf16_codes_are_the_nearest_saturated() {
    for x in numbers().filter(|x| x.is_finite()) {
        let expected = f16::from_f32(x);
        let expected = if expected.is_infinite() {
            f16::MAX.copysign(expected)
        } else {
            expected
        };
        let plus_zero = if x == 0.0 { 0.0 } else { f64::from(x) };
        if expected != f16::ZERO {
            assert_eq!(to_f16(plus_zero).to_bits(), expected.to_bits(), "{x:e}");
        } else {
            // Zero is stored without a sign where it is a parameter.
            assert_eq!(to_f16(plus_zero).to_bits(), 0, "{x:e}");
        }
        let mut code = [0u16];
        quant::encode(
            Scheme::F16,
            1.0,
            &[x],
            Scheme::F16.groups(1),
            &mut code,
            &mut [],
        );
        assert_eq!(code[0], expected.to_bits(), "{x:e}");
        assert_eq!(
            quant::decode(Scheme::F16, code[0], Param::default(), 1.0),
            expected.to_f32()
        );
        quant::encode(
            Scheme::Bf16,
            1.0,
            &[x],
            Scheme::Bf16.groups(1),
            &mut code,
            &mut [],
        );
        let max = bf16::MAX.to_f32();
        let expected = bf16::from_f32(x.clamp(-max, max));
        assert_eq!(code[0], expected.to_bits(), "{x:e}");
        assert_eq!(
            quant::decode(Scheme::Bf16, code[0], Param::default(), 1.0),
            expected.to_f32()
        );
    }
}

/// The e4m3 code whose value is nearest to x, the even one of two.
fn nearest_fp8(x: f64) -> u8 {
    let distance = |code: &u8| (f64::from(quant::from_fp8(*code)) - x.abs()).abs();
    let least = (0..0x7f)
        .map(|code| distance(&code))
        .fold(f64::INFINITY, f64::min);
    let mut nearest = (0..0x7fu8).filter(|code| distance(code) == least);
    let first = nearest.next().unwrap();
    match nearest.next() {
        Some(second) if first % 2 == 1 => second,
        _ => first,
    }
}

#[test]
fn fp8_codes_are_the_nearest_saturated() {
    for i in 0..4000 {
        // Down to subnormals and up beyond 448, with ties among them.
        let x = f64::from(i % 500) / 8.0 * 2f64.powi(i / 500 * 2 - 10);
        for sign in [1.0f64, -1.0] {
            let bits = if sign < 0.0 && x > 0.0 { 0x80 } else { 0 };
            let code = to_fp8((sign * x + 0.0) as f32, 1.0);
            assert_eq!(code, nearest_fp8(x) | bits, "{x}");
            assert_eq!(to_fp8((sign * x + 0.0) as f32 * 4.0, 4.0), code);
        }
    }
    assert_eq!(to_fp8(-0.0, 1.0), 0x80);
    for (code, value) in [
        (0x01, 0.001953125),
        (0x07, 0.013671875),
        (0x08, 0.015625),
        (0x38, 1.0),
        (0xb9, -1.125),
        (0x7e, 448.0),
    ] {
        assert_eq!(quant::from_fp8(code), value);
        assert_eq!(
            quant::decode(Scheme::Fp8E4m3, code.into(), Param::default(), 2.0),
            2.0 * value
        );
    }
    assert!(quant::from_fp8(0x7f).is_nan() && quant::from_fp8(0xff).is_nan());
}

#[test]
fn groups_of_int8_use_their_whole_range() {
    let x = [0.5f32, -254.0, 3.0, 1.0, 127.0];
    let mut codes = [0u16; 5];
    let param = int8_group(&x, &mut codes);
    // The scale is 2; quotients of ¼, −127, 1½, ½, 63½.
    assert_eq!((param.scale.to_f32(), param.shift), (2.0, f16::ZERO));
    assert_eq!(codes.map(|c| c as u8 as i8), [0, -127, 2, 0, 64]);
    // A scale that f16 has not: every code is 0.
    let mut codes = [7u16; 3];
    let param = int8_group(&[1e-8, -1e-8, 0.0], &mut codes);
    assert_eq!((param.scale, codes), (f16::ZERO, [0; 3]));
    // A scale beyond f16: quotients beyond 127 stay there.
    let mut codes = [0u16; 2];
    let param = int8_group(&[1.0e9, -1.0e9], &mut codes);
    assert_eq!(param.scale.to_f32(), 65504.0);
    assert_eq!(codes.map(|c| c as u8 as i8), [127, -127]);
}

#[test]
fn groups_of_int4_span_from_their_least_to_their_largest() {
    let x = [-3.0f32, 27.0, 0.0, 12.0, 1.0];
    let mut codes = [0u16; 5];
    let param = int4_group(&x, &mut codes);
    assert_eq!((param.scale.to_f32(), param.shift.to_f32()), (2.0, -3.0));
    // Quotients of 0, 15, 1½, 7½, 2.
    assert_eq!(codes, [0, 15, 2, 8, 2]);
    assert_eq!(param.centred_shift(), 13.0);
    let mut flat = [7u16; 2];
    let same = int4_group(&[5.0, 5.0], &mut flat);
    assert_eq!(
        (same.scale, same.shift.to_f32(), flat),
        (f16::ZERO, 5.0, [0; 2])
    );
    let near = int4_group(&[1e-8, -1e-8], &mut flat);
    assert_eq!((near.scale, flat), (f16::ZERO, [0; 2]));
    let value = |code| quant::decode(Scheme::Int4(1), code, param, 1.0);
    assert_eq!([value(0), value(15)], [-3.0, 27.0]);
}

#[test]
fn rows_are_cut_into_groups_with_parameters_of_their_own() {
    let x: Vec<f32> = (0..64)
        .map(|d| if d < 32 { 127.0 } else { 254.0 })
        .collect();
    let mut codes = [0u16; 64];
    for (scheme, scales) in [
        (Scheme::Int8(Int8Scale::Group32), &[1.0, 2.0][..]),
        (Scheme::Int8(Int8Scale::Token), &[2.0]),
    ] {
        let mut params = vec![Param::default(); scales.len()];
        quant::encode(scheme, 1.0, &x, scheme.groups(64), &mut codes, &mut params);
        let found: Vec<f32> = params.iter().map(|p| p.scale.to_f32()).collect();
        assert_eq!(found, scales);
        for (d, x) in x.iter().enumerate() {
            let param = params[d * params.len() / 64];
            let value = quant::decode(scheme, codes[d], param, 1.0);
            assert!((value - x).abs() <= 1.0, "{d}: {value}");
        }
    }
    let x: Vec<f32> = (0..64).map(|d| (d / 16 * 100 + d % 16) as f32).collect();
    let mut params = [Param::default(); 4];
    let scheme = Scheme::Int4(4);
    quant::encode(scheme, 1.0, &x, scheme.groups(64), &mut codes, &mut params);
    for (d, x) in x.iter().enumerate() {
        assert_eq!(quant::decode(scheme, codes[d], params[d / 16], 1.0), *x);
    }
}

#[test]
fn one_scale_for_all_saturates_on_both_sides() {
    let scheme = Scheme::Int8(Int8Scale::Tensor);
    let mut codes = [0u16; 6];
    let x = [0.0, 0.25, 0.75, -63.5, 64.0, -1e30];
    quant::encode(scheme, 0.5, &x, scheme.groups(6), &mut codes, &mut []);
    assert_eq!(codes.map(|c| c as u8 as i8), [0, 0, 2, -127, 127, -127]);
    let values = codes.map(|c| quant::decode(scheme, c, Param::default(), 0.5));
    assert_eq!(values, [0.0, 0.0, 1.0, -63.5, 63.5, -63.5]);
}
