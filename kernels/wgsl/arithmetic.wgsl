// arithmetic.wgsl: the scalar functions of docs/arithmetic.md, by +, -, *, comparisons and bits alone.
//
// No exp, log, division or fma: their results differ between adapters. Powers of two are made of bits.
// WGSL lets a compiler simplify (x + c) - c to x (Mesa's does): exp2 therefore reads its rounding constant twice from the
// parameters, where no compiler can know that both are ROUND. Elsewhere the bits of x + ROUND are used at once.
//
// WGSL also lets a compiler contract a product and a sum (NVIDIA's does), which changes a product that rounds: `product` prevents it.
// Products with powers of two, and of small integers, are exact: they stay plain.

const ROUND: f32 = 12582912.0;          // adding it rounds |x| <= 2^22 to an integer, half to even
const ROUND_BITS: i32 = 0x4B400000;
const NONE: f32 = -3.4028234663852886e38;        // stands for -infinity, kept finite: an unseen score, the maximum of no score

// x itself: the compiler does not know that `params.zero` is 0, so it cannot make one operation of what is before and behind.
fn hidden(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ params.zero);
}

// x * y, rounded, and no part of a sum.
fn product(x: f32, y: f32) -> f32 {
    return hidden(x * y);
}

fn product4(x: vec4<f32>, y: f32) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(x * y) ^ vec4<u32>(params.zero));
}

// 2^k for -126 <= k <= 127.
fn exp2i(k: i32) -> f32 {
    return bitcast<f32>(u32(k + 127) << 23u);
}

// Round half to even of |x| < 2^22, as an integer.
fn rhe(x: f32) -> i32 {
    return bitcast<i32>(x + ROUND) - ROUND_BITS;
}

fn rhe4(x: vec4<f32>) -> vec4<i32> {
    return bitcast<vec4<i32>>(x + vec4<f32>(ROUND)) - vec4<i32>(ROUND_BITS);
}

// 2^(1-v) for 0 <= v <= 64 to 7.5e-5, and below 2: the weights of the integer arithmetic.
fn exp2w(v: f32) -> f32 {
    let t = params.weight_up - v;
    let r = -v - (t - params.weight_down);
    var y = bitcast<f32>(0x3D620000u);
    y = product(y, r) + bitcast<f32>(0x3E786F4Eu);
    y = product(y, r) + bitcast<f32>(0x3F317982u);
    y = product(y, r) + bitcast<f32>(0x3F7FFB48u);
    return bitcast<f32>(bitcast<u32>(y) + (bitcast<u32>(t) << 23u));
}

// A row of queries in 8 bits: sigma, and what its elements are multiplied by to count it.
fn query_step(largest: f32) -> vec2<f32> {
    // Mesa multiplies the reciprocal's last factor by 127 first if it sees both.
    let step = vec2<f32>(largest * bitcast<f32>(0x3C010204u), 127.0 * hidden(rcp(largest)));
    return select(step, vec2<f32>(0.0), largest < bitcast<f32>(0x21800000u));
}

// Bits that a step of weights lacks: of 3 significant bits, and of 2 where V is read fine.
const COARSE_STEP: u32 = 0x1FFFFFu;
const FINE_STEP: u32 = 0x3FFFFFu;

// The step kappa of a tile's weights, by the largest of them; 0 if they are too small to count.
fn weight_step(largest: f32, low: u32) -> f32 {
    let up = (bitcast<u32>(largest * bitcast<f32>(0x3B808081u)) + low) & ~low;
    return select(bitcast<f32>(up), 0.0, largest < bitcast<f32>(0x0D800000u));
}

// The threshold theta of a token of a tile.
fn threshold(token: u32) -> f32 {
    return 32768.0 + (f32((29u * token + 32u) & 63u) + 0.5) * 0.015625;
}

// A weight of one byte, in bits 8 to 15.
fn weight_byte(x: f32, inverse: f32, theta: f32) -> u32 {
    return bitcast<u32>(product(x, inverse) + theta) & 0xFF00u;
}

// p * 2^22 of a weight 0 <= p < 2: p22.
fn weight_units(p: f32) -> i32 {
    return bitcast<i32>(p + bitcast<f32>(0x40000080u)) - 0x40000080;
}

// 2^x for -125 <= x <= 0 to 1.6e-7.
fn exp2f(x: f32) -> f32 {
    let t = x + params.round_up;
    let r = x - (t - params.round_down);
    var y = bitcast<f32>(0x3AADFE47u);
    y = product(y, r) + bitcast<f32>(0x3C1E7726u);
    y = product(y, r) + bitcast<f32>(0x3D635B15u);
    y = product(y, r) + bitcast<f32>(0x3E75FCD9u);
    y = product(y, r) + bitcast<f32>(0x3F317216u);
    y = product(y, r) + 1.0;
    return bitcast<f32>(bitcast<u32>(y) + (bitcast<u32>(t) << 23u));
}

// 1/x for positive normal x.
fn rcp(x: f32) -> f32 {
    var y = bitcast<f32>(0x7EF311C7u - bitcast<u32>(x));
    y = y * (2.0 - product(x, y));
    y = y * (2.0 - product(x, y));
    y = y * (2.0 - product(x, y));
    return y * (2.0 - product(x, y));
}

// ln(l * 2^m) for l > 0.
fn log_sum_exp(m: f32, l: f32) -> f32 {
    let i = bitcast<i32>(l) - 0x3F3504F3;
    let u = bitcast<f32>((i & 0x7FFFFF) + 0x3F3504F3) - 1.0;
    var y = bitcast<f32>(0x3E090EF7u);
    y = product(y, u) + bitcast<f32>(0xBE607D7Cu);
    y = product(y, u) + bitcast<f32>(0x3E5F6D97u);
    y = product(y, u) + bitcast<f32>(0xBE72988Eu);
    y = product(y, u) + bitcast<f32>(0x3E931B3Eu);
    y = product(y, u) + bitcast<f32>(0xBEB8BC98u);
    y = product(y, u) + bitcast<f32>(0x3EF63E7Du);
    y = product(y, u) + bitcast<f32>(0xBF38AA18u);
    y = product(y, u) + bitcast<f32>(0x3FB8AA36u);
    y = product(y, u);
    return ((m + f32(i >> 23u)) + y) * bitcast<f32>(0x3F317218u);
}

// 2^-distance for distances of 0 to 64, and 0 beyond.
fn pow2(distance: f32) -> f32 {
    let bits = u32(127 - i32(min(distance, 64.0))) << 23u;
    return select(0.0, bitcast<f32>(bits), distance <= 64.0);
}

// x, or a zero of its sign where a GPU may flush it.
fn ftz(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>(select(bits, bits & 0x80000000u, (bits & 0x7F800000u) == 0u));
}

// The soft cap on a base-2 score; inner = 2/softcap, outer = softcap * log2 e.
fn softcap(s: f32, inner: f32, outer: f32) -> f32 {
    let e = exp2f(max(-(abs(s) * inner), -125.0));
    let y = ((1.0 - e) * rcp(1.0 + e)) * outer;
    return bitcast<f32>((bitcast<u32>(y) & 0x7FFFFFFFu) | (bitcast<u32>(s) & 0x80000000u));
}

// An f16's low 16 bits as f32, subnormals included, whatever the adapter does with them.
fn f16_value(h: u32) -> f32 {
    let sign = (h & 0x8000u) << 16u;
    let magnitude = h & 0x7FFFu;
    let normal = bitcast<f32>((magnitude << 13u) + 0x38000000u);
    let value = select(normal, f32(magnitude) * exp2i(-24), magnitude < 0x400u);
    return bitcast<f32>(bitcast<u32>(value) | sign);
}

// An integer of a float in the same order, above 0; and back.
fn order_key(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return bits ^ (u32(bitcast<i32>(bits) >> 31u) | 0x80000000u);
}

fn from_order_key(key: u32) -> f32 {
    return bitcast<f32>(key ^ (~u32(bitcast<i32>(key) >> 31u) | 0x80000000u));
}
