// quantize.wgsl: the scalar quantizers of FORMATS.md: every quotient is rounded once, as in attn-core/src/quant.rs.
//
// x/y is not exact in WGSL, and f64 does not exist. So the mantissas are divided as integers, and the remainder decides the rounding. Values are passed as the bits of an f32, finite and perhaps subnormal.

// mantissa * 2^exponent (and a little more if `more`, less than a unit) as an f16: nearest even, saturated at 65504.
// mantissa is 0 or 2^20 to 2^28.
fn round_to_f16(mantissa: u32, exponent: i32, more: bool) -> u32 {
    if mantissa == 0u {
        return 0u;
    }
    let top = exponent + i32(firstLeadingBit(mantissa));
    if top > 15 {
        return 0x7BFFu;
    }
    let least = max(top, -14);
    let drop = u32(least - 10 - exponent);
    if drop > 29u {
        return 0u;
    }
    let kept = mantissa >> drop;
    let rest = mantissa & ((1u << drop) - 1u);
    let half = 1u << (drop - 1u);
    let up = rest > half || (rest == half && (more || (kept & 1u) == 1u));
    return min(kept + select(0u, 1u, up) + (u32(least + 14) << 10u), 0x7BFFu);
}

// |x| as an f16.
fn f16_of_magnitude(x: u32) -> u32 {
    let e = (x >> 23u) & 255u;
    // A subnormal f32 is far below half of f16's least.
    return select(round_to_f16((x & 0x7FFFFFu) | 0x800000u, i32(e) - 150, false), 0u, e == 0u);
}

// x as an f16 whose zero is +0.
fn f16_of(x: u32) -> u32 {
    let magnitude = f16_of_magnitude(x);
    return select(magnitude | ((x >> 16u) & 0x8000u), 0u, magnitude == 0u);
}

// |x| / divisor, for 15 and 127, as an f16.
fn f16_of_part(x: u32, divisor: u32) -> u32 {
    let e = (x >> 23u) & 255u;
    if e == 0u {
        return 0u;
    }
    let dividend = ((x & 0x7FFFFFu) | 0x800000u) << 7u;
    let quotient = dividend / divisor;
    return round_to_f16(quotient, i32(e) - 157, quotient * divisor != dividend);
}

// |x| / 16 as an f16.
fn f16_of_sixteenth(x: u32) -> u32 {
    let e = (x >> 23u) & 255u;
    return select(round_to_f16((x & 0x7FFFFFu) | 0x800000u, i32(e) - 154, false), 0u, e == 0u);
}

// |x| / scale, rounded half to even and at most `most` (up to 127); scale is positive and normal.
fn rounded_quotient(x: u32, scale: u32, most: u32) -> u32 {
    let e = (x >> 23u) & 255u;
    // The quotient is a/b * 2^k with a/b between 1/2 and 2.
    let k = i32(e) - i32((scale >> 23u) & 255u);
    if e == 0u || k < -2 {
        return 0u;
    }
    if k > 7 {
        return most;
    }
    let a = ((x & 0x7FFFFFu) | 0x800000u) << u32(max(k, 0));
    let b = ((scale & 0x7FFFFFu) | 0x800000u) << u32(max(-k, 0));
    let n = a / b;
    let twice = 2u * (a - n * b);
    let up = twice > b || (twice == b && (n & 1u) == 1u);
    return min(n + select(0u, 1u, up), most);
}

// The code of a symmetric int8 scheme, as a byte; 0 if the scale is 0.
fn int8_code(x: u32, scale: u32) -> u32 {
    if scale == 0u {
        return 0u;
    }
    let n = rounded_quotient(x & 0x7FFFFFFFu, scale, 127u);
    return select(n, (256u - n) & 255u, (x & 0x80000000u) != 0u);
}

// An int4 group's f16 scale (low half) and shift, of its extremes.
fn int4_param(low: f32, high: f32) -> u32 {
    // A span of 2^126 is as saturated as one that overflows.
    var a = high;
    var b = low;
    if low < 0.0 && high > 0.0 {
        a = min(high, 8.507059e37);
        b = max(low, -8.507059e37);
    }
    return f16_of_part(bitcast<u32>(a - b), 15u) | (f16_of(bitcast<u32>(low)) << 16u);
}

fn int4_code(x: f32, param: u32) -> u32 {
    let scale = bitcast<u32>(f16_value(param & 0xFFFFu));
    let y = x - f16_value(param >> 16u);
    if scale == 0u || y <= 0.0 {
        return 0u;
    }
    return rounded_quotient(bitcast<u32>(y), scale, 15u);
}

// The half steps of 8 bits: floor(8x / scale) + 128, saturated, and 128 if the scale is 0.
fn half_step_code(x: u32, scale: u32) -> u32 {
    let magnitude = x & 0x7FFFFFFFu;
    if scale == 0u || magnitude == 0u {
        return 128u;
    }
    let e = magnitude >> 23u;
    // 8|x| / scale is a/b * 2^k with a/b between 1/2 and 2.
    let k = i32(e) - i32((scale >> 23u) & 255u) + 3;
    var steps = 0u;
    var more = true;
    if k > 7 {
        steps = 128u;
    } else if e != 0u && k >= 0 {
        let a = ((x & 0x7FFFFFu) | 0x800000u) << u32(k);
        let b = (scale & 0x7FFFFFu) | 0x800000u;
        steps = min(a / b, 128u);
        more = steps * b != a;
    }
    if (x & 0x80000000u) == 0u {
        return min(128u + steps, 255u);
    }
    return 128u - min(steps + select(0u, 1u, more), 128u);
}

// The e4m3 code of x / scale: nearest even, saturated at 448.
fn fp8_code(x: u32, scale: u32) -> u32 {
    let sign = (x >> 24u) & 0x80u;
    let e = (x >> 23u) & 255u;
    let k = i32(e) - i32((scale >> 23u) & 255u);
    if e == 0u || k < -11 {
        return sign;
    }
    if k > 9 {
        return sign | 0x7Eu;
    }
    let a = (x & 0x7FFFFFu) | 0x800000u;
    let b = (scale & 0x7FFFFFu) | 0x800000u;
    // The quotient's exponent, and how many of its bits lie above the last one kept.
    let least = max(select(k - 1, k, a >= b), -6);
    let above = k - least + 3;
    let dividend = a << u32(max(above, 0));
    let divisor = b << u32(max(-above, 0));
    let n = dividend / divisor;
    let twice = 2u * (dividend - n * divisor);
    let up = twice > divisor || (twice == divisor && (n & 1u) == 1u);
    return sign | min(n + select(0u, 1u, up) + (u32(least + 6) << 3u), 0x7Eu);
}

fn bf16_of(x: u32) -> u32 {
    let rounded = ((x & 0x7FFFFFFFu) + 0x7FFFu + ((x >> 16u) & 1u)) >> 16u;
    return min(rounded, 0x7F7Fu) | ((x >> 16u) & 0x8000u);
}

// An element of a centre of K: bf16 of at most 2^50.
fn centre_of(x: u32) -> u32 {
    return bf16_of((x & 0x80000000u) | min(x & 0x7FFFFFFFu, 0x58800000u));
}
