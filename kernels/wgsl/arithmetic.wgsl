// arithmetic.wgsl: the scalar functions of docs/arithmetic.md, by +, -, *, comparisons and bits alone.
//
// No exp, log, division or fma: their results differ between adapters. Powers of two are made of bits.
// WGSL lets a compiler simplify (x + c) - c to x (Mesa's does): exp2f therefore reads its rounding constant twice from the
// parameters, where no compiler can know that both are ROUND, and is_tie hides the sum. Elsewhere the bits of the sum are used at once.
//
// WGSL also lets a compiler contract a product and a sum (NVIDIA's does), which changes a product that rounds: `product` prevents it.
// Products with powers of two, and of small integers, are exact: they stay plain. So do those of the weights on the grid, which have a margin.
// Mesa's compiler adds a constant to the first part of a sum that it sees: `hidden` keeps it to the sum.

const ROUND: f32 = 12582912.0;          // adding it rounds |x| <= 2^22 to an integer, half to even
const ROUND_BITS: i32 = 0x4B400000;
// -2^126 stands for -infinity: an unseen score, the maximum of no score. It is below all others, and differences with them are finite.
const NONE: f32 = -8.507059173023462e37;
const NONE_KEY: u32 = 0x017FFFFFu;

// x itself: the compiler does not know that `params.zero` is 0, so it cannot make one operation of what is before and behind.
fn hidden(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ params.zero);
}

fn hidden4(x: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) ^ vec4<u32>(params.zero));
}

// x * y, rounded, and no part of a sum.
fn product(x: f32, y: f32) -> f32 {
    return hidden(x * y);
}

fn product4(x: vec4<f32>, y: f32) -> vec4<f32> {
    return hidden4(x * y);
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

// A row of queries in 8 bits: sigma, and what its elements are multiplied by to count it.
fn query_step(largest: f32) -> vec2<f32> {
    // Mesa multiplies the reciprocal's last factor by 127 first if it sees both.
    let step = vec2<f32>(largest * bitcast<f32>(0x3C010204u), 127.0 * hidden(rcp(largest)));
    return select(step, vec2<f32>(0.0), largest < bitcast<f32>(0x21800000u));
}

// A row of queries whose two parts have a step each: sigma, what the elements of each part are multiplied by, and rho, the second step in the first one's.
fn query_parts(first: f32, second: f32) -> vec4<f32> {
    let least = bitcast<f32>(0x33800000u);
    let a = vec2<f32>(max(first, product(second, least)), max(second, product(first, least)));
    let step = query_step(a.x);
    let counts = a.x >= bitcast<f32>(0x21800000u);
    return vec4<f32>(step, query_step(a.y).y, select(0.0, product(a.y, hidden(rcp(a.x))), counts));
}

// 1.5 * 2^17: its sum with a score counts the score in 64ths. A row's scores in a tile are on that grid if the largest sum is from 131200 to 262144.
const SCORE_BASE: f32 = 196608.0;
const SCORE_BASE_BITS: u32 = 0x48400000u;
const NEAR_START_BITS: u32 = 0x48002000u;
const NEAR_BITS: u32 = 0x007FE000u;
// 2^17, from where to 2^18 the step of f32 is the grid's.
const GRID_START: f32 = 131072.0;
const GRID_START_BITS: u32 = 0x48000000u;
const GRID_BITS: u32 = 0x00800000u;

// The bits of a score's sum with SCORE_BASE; scores below the grid share its first point.
fn grid_bits(s: f32) -> u32 {
    return bitcast<u32>(max(s, -65536.0) + SCORE_BASE);
}

// Whether s, the rounded product of a score with its row's step, lies in the middle between two points of the grid. Elsewhere the sum of s and
// SCORE_BASE is that of the product itself, which fma would find if WGSL promised that it rounds once.
fn is_tie(s: f32) -> bool {
    return abs(s - (bitcast<f32>(grid_bits(s) ^ params.zero) - SCORE_BASE)) == 0.0078125;
}

// What the bits of s = a * sigma lack for the next number on the product's side, 1 or -1; 0 if the product is s. By the low bits of the product of
// the 24-bit numbers: s is within half a unit of its 24.
fn tie_step(a: f32, sigma: f32, s: f32) -> i32 {
    return sign(product_units(a, sigma, s));
}

// The difference itself, in the last units of the product.
fn product_units(a: f32, sigma: f32, s: f32) -> i32 {
    let bits = vec3<u32>(bitcast<u32>(a), bitcast<u32>(sigma), bitcast<u32>(s));
    let numbers = (bits & vec3<u32>(0x007FFFFFu)) | vec3<u32>(0x00800000u);
    let exponents = (bits >> vec3<u32>(23u)) & vec3<u32>(255u);
    let shift = (exponents.z - exponents.x - exponents.y + 150u) & 31u;
    return bitcast<i32>(numbers.x * numbers.y - (numbers.z << shift));
}

// A score as an integer, of which a row's largest is enough to know: the bits of its sum with SCORE_BASE if the grid has it, else the score's order key,
// below those bits or above them as the score is.
fn score_key(s: f32) -> u32 {
    let y = grid_bits(s);
    return select(key_of(bitcast<u32>(s)), y, y - NEAR_START_BITS < NEAR_BITS);
}

// Whether a row is on the grid, by its largest key; else it counts from its ceiling.
fn is_near(key: u32) -> bool {
    return key - NEAR_START_BITS < NEAR_BITS;
}

fn far_ceil(key: u32) -> f32 {
    return ceil(bitcast<f32>(bits_of_key(key)));
}

// The bits of M, near.
fn grid_ceil(key: u32) -> u32 {
    return (key + 63u) & 0xFFFFFFC0u;
}

// The exponent of a row's tile, by its largest key.
fn tile_exponent(key: u32) -> f32 {
    return select(far_ceil(key), bitcast<f32>(grid_ceil(key)) - SCORE_BASE, is_near(key)) + 6.0;
}

// The point n of a score in a row of this largest key: its weight is 2^(n/64). Weights below 2^-126 count nothing, and share a point. `step` is what
// tie_step has added to the score's bits.
fn weight_point(s: f32, step: i32, key: u32) -> i32 {
    var y = grid_bits(s);
    var top = grid_ceil(key);
    if !is_near(key) {
        y = grid_bits(bitcast<f32>(bitcast<i32>(s) - step) - far_ceil(key));
        top = SCORE_BASE_BITS;
    }
    return point_below(y, top);
}

// The point of a score on the grid, y, in a row whose largest one's ceiling is `top`.
const LEAST_POINT: i32 = -8064;

fn point_below(y: u32, top: u32) -> i32 {
    return max(bitcast<i32>(y - top), -7680) - 384;
}

// Scores of tokens whose keys lack a centre (section 12): `a` is what the row's step multiplies, `base` is G. All of a row's scores in a tile grow with a,
// so that the largest a is enough to know of the row.

// fl(fl(a * sigma) + g).
fn far_score(a: f32, sigma: f32, base: f32) -> f32 {
    return hidden(product(a, sigma) + hidden(base - SCORE_BASE));
}

// The sum of two numbers, and what it lacks.
fn two_sum(x: f32, y: f32) -> vec2<f32> {
    let sum = hidden(x + y);
    let of_y = hidden(sum - x);
    return vec2<f32>(sum, hidden(x - hidden(sum - of_y)) + hidden(y - of_y));
}

// What s = fl(a * sigma) lacks: an integer of 24 bits, as in tie_step, times a power of two.
fn product_rest(a: f32, sigma: f32, s: f32) -> f32 {
    let bits = vec3<u32>(bitcast<u32>(a), bitcast<u32>(sigma), bitcast<u32>(s));
    let exponents = (bits >> vec3<u32>(23u)) & vec3<u32>(255u);
    let rest = f32(product_units(a, sigma, s)) * exp2i(max(i32(exponents.x + exponents.y) - 300, -126));
    return select(select(rest, -rest, s < 0.0), 0.0, s == 0.0);
}

// fma(a, sigma, base) of numbers far above the least normal ones: the parts of the exact sum, of which the last two are added with their lowest bit
// set where they are not exact (Boldo and Melquiond's rounding to odd), so that the last sum rounds as if it were the only one.
fn exact_fma(a: f32, sigma: f32, base: f32) -> f32 {
    let s = product(a, sigma);
    let low = two_sum(base, product_rest(a, sigma, s));
    let high = two_sum(s, low.x);
    let rest = two_sum(low.y, high.y);
    let step = select(-1, 1, (rest.y > 0.0) == (rest.x > 0.0));
    let is_even = (bitcast<u32>(rest.x) & 1u) == 0u;
    return high.x + bitcast<f32>(bitcast<i32>(rest.x) + select(0, step, is_even && rest.y != 0.0));
}

// y as bits; scores below the grid share its first point, and those above it have bits beyond it.
fn based_bits(a: f32, sigma: f32, base: f32) -> u32 {
    // Where base is no point of the grid, whose step is larger or smaller there.
    if bitcast<u32>(base) - GRID_START_BITS > GRID_BITS {
        return bitcast<u32>(max(exact_fma(a, sigma, base), GRID_START));
    }
    // Elsewhere the sum of the rounded product is that of the product, but for a middle between two points.
    var s = product(a, sigma);
    let points = min(abs(s), GRID_START) * 64.0;
    if points - floor(points) == 0.5 {
        s = bitcast<f32>(bitcast<i32>(s) + tie_step(a, sigma, s));
    }
    return bitcast<u32>(max(s, GRID_START - base) + base);
}

// The point of a score in a row whose largest is `top`.
fn based_point(a: f32, sigma: f32, base: f32, top: f32) -> i32 {
    let largest = based_bits(top, sigma, base);
    if is_near(largest) {
        return point_below(based_bits(a, sigma, base), grid_ceil(largest));
    }
    return point_below(grid_bits(far_score(a, sigma, base) - ceil(far_score(top, sigma, base))), SCORE_BASE_BITS);
}

// The exponent of a row's tile, by its largest score.
fn based_exponent(top: f32, sigma: f32, base: f32) -> f32 {
    let largest = based_bits(top, sigma, base);
    return select(ceil(far_score(top, sigma, base)), bitcast<f32>(grid_ceil(largest)) - SCORE_BASE, is_near(largest)) + 6.0;
}

// 2^(point/64) for -8064 <= point < 8192 to 1.3e-7, powers of two exact. The margin of section 5 is larger, so that a product and a sum may contract.
fn point_value(point: i32) -> f32 {
    let n = bitcast<u32>(point);
    let f = bitcast<f32>(((n << 17u) & 0x007E0000u) | 0x3F800000u) - 1.0;
    var y = bitcast<f32>(0x3AF3735Eu);
    y = y * f + bitcast<f32>(0x3C141223u);
    y = y * f + bitcast<f32>(0x3D647F32u);
    y = y * f + bitcast<f32>(0x3E75EEB5u);
    y = y * f + bitcast<f32>(0x3F317258u);
    y = y * f + 1.0;
    return bitcast<f32>(bitcast<u32>(y) + ((n & 0xFFFFFFC0u) << 17u));
}

// f16(p) * 2^24 of the weight p of a point of at most -384: p's sum with 2^23 steps of f16 counts them.
fn f16_units(point: i32, p: f32) -> i32 {
    let e = max(point >> 6u, -14);
    let base = u32(e + 140) << 23u;
    return (bitcast<i32>(p + bitcast<f32>(base)) - bitcast<i32>(base)) << u32(e + 14);
}

// v of a positive scale of V, which is read as 2^(v/64).
fn scale_point(scale: f32) -> i32 {
    let parts = log2_parts(scale);
    return 64 * i32(parts.x) + rhe(64.0 * parts.y);
}

// A scale of V, not negative, as the integer arithmetic reads it.
fn grid_scale(scale: f32) -> f32 {
    return select(0.0, point_value(scale_point(scale)), scale > 0.0);
}

// Bits that a step of weights lacks: of 3 significant bits, and of 2 where V is read fine.
const COARSE_STEP: u32 = 0x1FFFFFu;
const FINE_STEP: u32 = 0x3FFFFFu;

// The step kappa of a tile's weights, by the largest of them.
fn weight_step(largest: f32, low: u32) -> f32 {
    return bitcast<f32>((bitcast<u32>(max(largest, exp2i(-50)) * bitcast<f32>(0x3B808081u)) + low) & ~low);
}

// Nearly 1/kappa: of each mantissa what keeps all weights away from the thresholds.
fn step_inverse(step: f32) -> f32 {
    let bits = bitcast<u32>(step);
    let odd = (bits & 0x00200000u) != 0u;
    let low = select(0x3F7FED7Bu, 0x3F4CC6EEu, odd);
    let high = select(0x3F2A99E5u, 0x3F124980u, odd);
    let of_mantissa = select(low, high, (bits & 0x00400000u) != 0u);
    return bitcast<f32>(of_mantissa + 0x3F800000u - (bits & 0x7F800000u));
}

// The threshold of a token of a tile, for a sum that has a weight in its byte 1.
fn threshold(token: u32) -> f32 {
    return 32768.0 + (f32((29u * token + 32u) & 63u) + 0.25) * 0.015625;
}

// A weight of one byte, in bits 8 to 15.
fn weight_byte(x: f32, inverse: f32, theta: f32) -> u32 {
    return bitcast<u32>(x * inverse + theta) & 0xFF00u;
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

// log2 of x > 0: an integer, and a fraction in -1/2..1/2.
fn log2_parts(x: f32) -> vec2<f32> {
    let i = bitcast<i32>(x) - 0x3F3504F3;
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
    return vec2<f32>(f32(i >> 23u), product(y, u));
}

// ln(l * 2^m) for l > 0.
fn log_sum_exp(m: f32, l: f32) -> f32 {
    let parts = log2_parts(l);
    return ((m + parts.x) + parts.y) * bitcast<f32>(0x3F317218u);
}

// 2^k for an integer k of -64 to 40, and 0 below.
fn pow2(k: f32) -> f32 {
    return select(0.0, exp2i(i32(clamp(k, -64.0, 40.0))), k >= -64.0);
}

// The exponent of a state of exponent m after a tile is folded into it, alpha of the state, beta of the tile.
fn fold_factors(m: f32, tile: f32) -> vec3<f32> {
    let k = tile - m;
    return select(vec3<f32>(m, 1.0, pow2(k)), vec3<f32>(tile, pow2(-k), 1.0), k > 40.0);
}

// The exponent of two states that merge, alpha of the first, beta of the next.
fn merge_factors(m: f32, next: f32) -> vec3<f32> {
    let top = max(m, next);
    return vec3<f32>(top, pow2(m - top), pow2(next - top));
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

// An integer of a float's bits in the same order, above 0; and back.
fn key_of(bits: u32) -> u32 {
    return bits ^ (u32(bitcast<i32>(bits) >> 31u) | 0x80000000u);
}

fn bits_of_key(key: u32) -> u32 {
    return key ^ (~u32(bitcast<i32>(key) >> 31u) | 0x80000000u);
}
