//! Scalar quantizers: the rounding rules of `FORMATS.md`, each quotient rounded once.
//!
//! Quotients are formed in f64. With an f16 or f32 divisor and an f32 dividend, a tie or a midpoint differs from the
//! quotient by at least 2^-34 relative or not at all, so the f64 quotient (2^-53) decides every rounding as exact
//! rationals would.

use half::{bf16, f16};

use crate::{
    format::{Int8Scale, Scheme},
    groups::Groups,
    head_dim::MAX_HEAD_DIM,
    rotation::rotate_stored,
};

/// f16 scale and shift of one group; `shift` is 0 for symmetric schemes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Param {
    /// The factor of a code.
    pub scale: f16,
    /// The number added to a code times its scale.
    pub shift: f16,
}

impl Param {
    /// The shift that goes with codes centred on 0: `x = (u − 8)·scale + centred_shift`, rounded to f32 (`docs/arithmetic.md`, section 4).
    #[must_use]
    pub fn centred_shift(self) -> f32 {
        self.shift.to_f32() + 8.0 * self.scale.to_f32()
    }
}

/// Rounds to a binary float of `mantissa_bits` and least normal exponent `min_exp`, half to even, saturated at `max`.
#[inline]
fn round_to(x: f64, mantissa_bits: i32, min_exp: i32, max: f64) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    // `max` is such a number, so saturating first changes nothing; it keeps the sum below finite.
    let x = x.clamp(-max, max);
    let exponent = (((x.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(min_exp);
    // 1.5 · 2^52 quanta: the sum's last place is a quantum.
    let places = (exponent - mantissa_bits + 52 + 1023) as u64;
    let round = f64::from_bits(places << 52 | 1 << 51);
    (x + round) - round
}

/// `x` as f16: nearest even, saturated at ±65504, zero always +0.
#[must_use]
#[inline]
pub fn to_f16(x: f64) -> f16 {
    let v = round_to(x, 10, -14, 65504.0) + 0.0;
    let magnitude = v.abs();
    // `v` is an f16 number, so its bits need no more rounding: 10 of the mantissa, the exponent with another bias.
    let bits = if magnitude < f64::from_bits((1023 - 14) << 52) {
        (magnitude * f64::from_bits((1023 + 24) << 52)) as u16
    } else {
        ((magnitude.to_bits() >> 42) - ((1023 - 15) << 10)) as u16
    };
    f16::from_bits(bits | u16::from(v.is_sign_negative()) << 15)
}

/// The e4m3 code of `x / scale`: nearest even, saturated at ±448.
#[must_use]
pub fn to_fp8(x: f32, scale: f32) -> u8 {
    let v = round_to(f64::from(x) / f64::from(scale), 3, -6, 448.0);
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let v = v.abs();
    if v < f64::powi(2.0, -6) {
        return sign | (v * 512.0) as u8;
    }
    let exponent = ((v.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let mantissa = (v.to_bits() >> 49) & 7;
    sign | (((exponent + 7) as u8) << 3) | mantissa as u8
}

/// The value of an e4m3 code (without its scale); NaN for 0x7f and 0xff.
#[must_use]
pub fn from_fp8(code: u8) -> f32 {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match (exponent, code & 0x7f) {
        (_, 0x7f) => f32::NAN,
        (0, _) => sign * mantissa / 512.0,
        _ => sign * (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 7),
    }
}

/// `rhe(x / scale)` clamped to `lo..=hi`; 0 if the scale is 0.
fn code(x: f32, scale: f16, lo: f64, hi: f64) -> i32 {
    if scale == f16::ZERO {
        return 0;
    }
    (f64::from(x) / scale.to_f64())
        .round_ties_even()
        .clamp(lo, hi) as i32
}

/// The parameters of a group of symmetric int8 whose largest magnitude is `amax`.
#[must_use]
#[inline]
pub fn int8_param(amax: f32) -> Param {
    Param {
        scale: to_f16(f64::from(amax) / 127.0),
        shift: f16::ZERO,
    }
}

/// The parameters of a group of asymmetric int4 whose least and largest numbers are `lo` and `hi`.
#[must_use]
#[inline]
pub fn int4_param(lo: f32, hi: f32) -> Param {
    let span = (hi - lo).min(f32::MAX);
    Param {
        scale: to_f16(f64::from(span) / 15.0),
        shift: to_f16(f64::from(lo)),
    }
}

/// The parameters of a group of half steps whose largest magnitude is `amax`.
#[must_use]
#[inline]
pub fn half_step_param(amax: f32) -> Param {
    Param {
        scale: to_f16(f64::from(amax) / 16.0),
        shift: f16::ZERO,
    }
}

/// Quantizes one group to symmetric int8.
pub fn int8_group(x: &[f32], codes: &mut [u16]) -> Param {
    let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let param = int8_param(amax);
    for (c, &v) in codes.iter_mut().zip(x) {
        *c = code(v, param.scale, -127.0, 127.0) as i8 as u8 as u16;
    }
    param
}

/// Quantizes one group to asymmetric int4.
pub fn int4_group(x: &[f32], codes: &mut [u16]) -> Param {
    let (lo, hi) = x
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
            (lo.min(v), hi.max(v))
        });
    let param = int4_param(lo, hi);
    for (c, &v) in codes.iter_mut().zip(x) {
        *c = code(v - param.shift.to_f32(), param.scale, 0.0, 15.0) as u16;
    }
    param
}

/// Quantizes one group of a rotated row to symmetric half steps of 8 bits: `x ≈ (2c − 255)·scale/16`.
///
/// The high four bits of a code are the row's int4 code u, read alone as `(2u − 15)·scale`; the low four are its residual.
pub fn half_step_group(x: &[f32], codes: &mut [u16]) -> Param {
    let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let param = half_step_param(amax);
    let scale = param.scale;
    for (c, &v) in codes.iter_mut().zip(x) {
        *c = if scale == f16::ZERO {
            128
        } else {
            ((f64::from(v) * 8.0 / scale.to_f64()).floor() + 128.0).clamp(0.0, 255.0) as u16
        };
    }
    param
}

/// Quantizes one token of one KV head: `x` and `codes` hold head_dim elements, `params` one entry per group.
///
/// Codes are the stored bits in the low end of each u16; those of rotated int4 have 8 bits, of which the low four are the residual.
pub fn encode(
    scheme: Scheme,
    tensor_scale: f32,
    x: &[f32],
    groups: Groups,
    codes: &mut [u16],
    params: &mut [Param],
) {
    if !scheme.is_rotated() {
        return encode_stored(scheme, tensor_scale, x, groups, codes, params);
    }
    let mut rotated = [0.0; MAX_HEAD_DIM];
    let row = &mut rotated[..x.len()];
    row.copy_from_slice(x);
    rotate_stored(row);
    encode_stored(scheme, tensor_scale, row, groups, codes, params);
}

/// Quantizes one token of one KV head as [`encode`] does, from the row that is stored: rotated already, where the scheme rotates.
pub fn encode_stored(
    scheme: Scheme,
    tensor_scale: f32,
    x: &[f32],
    groups: Groups,
    codes: &mut [u16],
    params: &mut [Param],
) {
    let each = |codes: &mut [u16], f: &dyn Fn(f32) -> u16| {
        codes.iter_mut().zip(x).for_each(|(c, &v)| *c = f(v))
    };
    let by_group = |codes: &mut [u16], params: &mut [Param], f: fn(&[f32], &mut [u16]) -> Param| {
        for (param, dims) in params.iter_mut().zip(groups.ranges()) {
            *param = f(&x[dims.clone()], &mut codes[dims]);
        }
    };
    match scheme {
        Scheme::F16 => each(codes, &|v| to_f16_signed(v).to_bits()),
        Scheme::Bf16 => each(codes, &|v| {
            let max = bf16::MAX.to_f32();
            bf16::from_f32(v.clamp(-max, max)).to_bits()
        }),
        Scheme::Fp8E4m3 => each(codes, &|v| u16::from(to_fp8(v, tensor_scale))),
        Scheme::Int8(Int8Scale::Tensor) => each(codes, &|v| {
            let q = f64::from(v) / f64::from(tensor_scale);
            q.round_ties_even().clamp(-127.0, 127.0) as i8 as u8 as u16
        }),
        Scheme::Int8(_) | Scheme::RotatedInt8 => by_group(codes, params, int8_group),
        Scheme::Int4(_) => by_group(codes, params, int4_group),
        Scheme::RotatedInt4 { .. } => by_group(codes, params, half_step_group),
    }
}

/// f16 of a value to store: nearest even, saturated; keeps the sign of zero.
fn to_f16_signed(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65504.0, 65504.0))
}

/// The value of a page's code, in the rotated row where the scheme rotates; `tensor_scale` is 1 for schemes without one.
///
/// Rotated int4 is read without its residual; [`half_step_value`] has it with.
#[must_use]
pub fn decode(scheme: Scheme, code: u16, param: Param, tensor_scale: f32) -> f32 {
    let scale = param.scale.to_f32();
    match scheme {
        Scheme::F16 => f16::from_bits(code).to_f32(),
        Scheme::Bf16 => bf16::from_bits(code).to_f32(),
        Scheme::Fp8E4m3 => from_fp8(code as u8) * tensor_scale,
        Scheme::Int8(Int8Scale::Tensor) => f32::from(code as u8 as i8) * tensor_scale,
        Scheme::Int8(_) | Scheme::RotatedInt8 => f32::from(code as u8 as i8) * scale,
        Scheme::Int4(_) => f32::from(code) * scale + param.shift.to_f32(),
        Scheme::RotatedInt4 { .. } => (2.0 * f32::from(code) - 15.0) * scale,
    }
}

/// The value of a rotated int4 code `u` with its residual, in the rotated row.
#[must_use]
pub fn half_step_value(u: u16, residual: u16, scale: f16) -> f32 {
    (2.0 * f32::from(16 * u + residual) - 255.0) * (scale.to_f32() / 16.0)
}

/// Refuses codes and parameters that no quantizer of the scheme writes; the error names the kind of the first one.
pub(crate) fn check_stored(
    scheme: Scheme,
    codes: &[u16],
    params: &[Param],
) -> Result<(), &'static str> {
    if codes.iter().any(|c| is_bad(*c, code_rule(scheme))) {
        return Err("code");
    }
    if params.iter().any(|p| is_bad_scale(p.scale.to_bits())) {
        return Err("scale");
    }
    if params.iter().any(|p| is_bad_shift(p.shift.to_bits())) {
        return Err("shift");
    }
    Ok(())
}

/// Refuses what [`check_stored`] does, in all codes and all parameters of a part as they lie in a page.
pub(crate) fn check_stored_bytes(
    scheme: Scheme,
    codes: &[u8],
    params: &[u8],
) -> Result<(), &'static str> {
    let rule = code_rule(scheme);
    let has_bad_code = match scheme.code_bits() {
        16 => any_of(codes, |code| is_bad(u16::from_le_bytes(*code), rule)),
        8 => {
            let [flip, mask, least] = rule.map(|bits| bits as u8);
            any_of(codes, |&[code]| (code ^ flip) & mask >= least)
        }
        // Every nibble is a code.
        _ => false,
    };
    if has_bad_code {
        return Err("code");
    }
    let has_bad_scale = match scheme.has_shifts() {
        true => any_of(params, |&[a, b, _, _]| {
            is_bad_scale(u16::from_le_bytes([a, b]))
        }),
        false => any_of(params, |scale| is_bad_scale(u16::from_le_bytes(*scale))),
    };
    if has_bad_scale {
        return Err("scale");
    }
    let is_bad = |&[_, _, a, b]: &[u8; 4]| is_bad_shift(u16::from_le_bytes([a, b]));
    if scheme.has_shifts() && any_of(params, is_bad) {
        return Err("shift");
    }
    Ok(())
}

/// Whether any item `is_bad`. Whole blocks are tested without an early exit, which lets the compiler use vectors.
fn any_of<const N: usize>(items: &[u8], is_bad: impl Fn(&[u8; N]) -> bool) -> bool {
    const BLOCK: usize = 4096;
    items.chunks(BLOCK).any(|block| {
        let (items, _) = block.as_chunks();
        items.iter().fold(false, |bad, item| bad | is_bad(item))
    })
}

/// A scheme's codes that no quantizer writes: those with `(code ^ flip) & mask >= least`, as `[flip, mask, least]`.
fn code_rule(scheme: Scheme) -> [u16; 3] {
    match scheme {
        // NaN and infinity.
        Scheme::F16 => [0, 0x7fff, 0x7c00],
        // Beyond 2^50, `format::BF16_MAX`; NaN and infinity are, too.
        Scheme::Bf16 => [0, 0x7fff, 0x5881],
        // NaN.
        Scheme::Fp8E4m3 => [0, 0x7f, 0x7f],
        // -128.
        Scheme::Int8(_) | Scheme::RotatedInt8 => [0x7f, 0xff, 0xff],
        // None.
        Scheme::Int4(_) | Scheme::RotatedInt4 { .. } => [0, 0, 1],
    }
}

fn is_bad(code: u16, [flip, mask, least]: [u16; 3]) -> bool {
    (code ^ flip) & mask >= least
}

/// Negative, infinite and NaN scales have larger bits than the largest finite one.
fn is_bad_scale(bits: u16) -> bool {
    bits > f16::MAX.to_bits()
}

fn is_bad_shift(bits: u16) -> bool {
    !f16::from_bits(bits).is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fp8_codes_round_trip() {
        for c in 0..=255u8 {
            let v = from_fp8(c);
            if !v.is_nan() {
                assert_eq!(to_fp8(v, 1.0), c, "{v}");
            }
        }
        assert_eq!((to_fp8(1e30, 1.0), to_fp8(-1e30, 1.0)), (0x7e, 0xfe));
        assert_eq!(to_fp8(f32::from_bits(1), 1.0), 0);
    }

    #[test]
    fn ties_go_to_even_and_outliers_saturate() {
        let mut codes = [0u16; 3];
        let p = int8_group(&[127.0, 0.5, 1.5], &mut codes);
        assert_eq!((p.scale.to_f32(), codes), (1.0, [127, 0, 2]));
        let p = int8_group(&[f32::MAX, -f32::MAX, 1.0], &mut codes);
        assert_eq!((p.scale.to_f32(), codes), (65504.0, [127, 129, 0]));
        assert_eq!(int8_group(&[0.0; 3], &mut codes).scale, f16::ZERO);
        assert_eq!(codes, [0; 3]);
        let p = int4_group(&[-f32::MAX, f32::MAX, 0.0], &mut codes);
        assert_eq!(
            (p.scale.to_f32(), p.shift.to_f32(), codes[1]),
            (65504.0, -65504.0, 15)
        );
        let tiny = f32::from_bits(3);
        assert_eq!(
            int8_group(&[tiny, -tiny, tiny], &mut codes).scale,
            f16::ZERO
        );
    }

    #[test]
    fn half_steps_are_halves_of_each_other() {
        let mut codes = [0; 4];
        // A step of 1/8: floor(8x) + 128, the largest saturated.
        let param = half_step_group(&[16.0, -16.0, 0.1, -0.1], &mut codes);
        assert_eq!((param.scale.to_f32(), codes), (1.0, [255, 0, 128, 127]));
        assert_eq!(half_step_group(&[0.0; 4], &mut codes), Param::default());
        assert_eq!(codes, [128; 4]);
    }

    proptest! {
        #[test]
        fn f16_scales_are_nearest(x in 0.0f64..70000.0) {
            let h = to_f16(x);
            let near = [h.to_bits().saturating_sub(1), (h.to_bits() + 1).min(0x7bff)].map(|b| f16::from_bits(b).to_f64());
            prop_assert!(near.iter().all(|n| (h.to_f64() - x).abs() <= (n - x).abs()));
        }

        #[test]
        fn f16_bits_are_those_of_the_crate_half(bits in 0..0x7c00u16, is_negative: bool) {
            let h = f16::from_bits(bits | u16::from(is_negative && bits > 0) << 15);
            prop_assert_eq!(to_f16(h.to_f64()).to_bits(), h.to_bits());
        }

        #[test]
        fn int8_error_is_half_a_step(x in prop::collection::vec(-1e4f32..1e4, 1..64)) {
            let mut codes = vec![0; x.len()];
            let p = int8_group(&x, &mut codes);
            for (c, v) in codes.iter().zip(&x) {
                let back = decode(Scheme::Int8(Int8Scale::Token), *c, p, 1.0);
                // Half a step, and the rounding of the scale to f16 on 127 steps.
                prop_assert!((back - v).abs() <= p.scale.to_f32() * (0.5 + 127.0 / 2048.0) + 1e-30);
            }
        }

        #[test]
        fn half_step_errors_are_half_a_step(x in prop::collection::vec(-1e4f32..1e4, 1..64)) {
            let mut codes = vec![0; x.len()];
            let scale = f64::from(half_step_group(&x, &mut codes).scale.to_f32());
            // The rounding of the scale to f16 moves the ends of the range by 16/2048 of it.
            let slack = scale * 16.0 / 2048.0 + 1e-30;
            for (c, v) in codes.iter().zip(&x) {
                let scale_f16 = f16::from_f64(scale);
                let fine = f64::from(half_step_value(c >> 4, c & 15, scale_f16));
                let scheme = Scheme::RotatedInt4 { groups: 1, window: crate::format::Window::Two };
                let param = Param { scale: scale_f16, shift: f16::ZERO };
                let coarse = f64::from(decode(scheme, c >> 4, param, 1.0));
                prop_assert!((fine - f64::from(*v)).abs() <= scale / 16.0 + slack);
                prop_assert!((coarse - f64::from(*v)).abs() <= scale + slack);
            }
        }

        #[test]
        fn int4_error_is_half_a_step(x in prop::collection::vec(-1e3f32..1e3, 2..64)) {
            let mut codes = vec![0; x.len()];
            let p = int4_group(&x, &mut codes);
            let slack = p.shift.to_f32().abs() / 1024.0 + p.scale.to_f32() * 15.0 / 1024.0;
            for (c, v) in codes.iter().zip(&x) {
                let back = decode(Scheme::Int4(1), *c, p, 1.0);
                prop_assert!(*c <= 15 && (back - v).abs() <= p.scale.to_f32() * 0.5 + slack);
            }
        }
    }
}
