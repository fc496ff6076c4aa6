// matrix.wgsl: both products on cooperative matrices (f16 16x16x16, f32 sums). Included by decode_split.wgsl.
//
// Rows 0..7 of the first operand are the high plane of 8 query rows, 8..15 the low one. Codes (biased to 0..255) and weights are f16
// subnormals, whose bits are the integer: a byte widened to 16 bits is u * 2^-24. Sums stay below 2^22 of that unit, so f32 holds them.
#let A_STRIDE = D / 4 + 2
#let B_STRIDE = 6
#let W_STRIDE = 18
var<workgroup> stage: array<vec4<f16>, $(64 * B_STRIDE > 16 * A_STRIDE ? 64 * B_STRIDE : 16 * A_STRIDE)>;   // (row, 4 dims) of q; (token or dim, 4 dims or tokens) of codes
var<workgroup> weights: array<vec4<f16>, $(16 * W_STRIDE)>;                     // (plane, row, 4 tokens in slot order)
var<workgroup> sums: array<f32, 1024>;                                          // (plane, row, token or dim)

// Four bytes as f16 subnormals.
fn halves(word: u32) -> vec4<f16> {
    return bitcast<vec4<f16>>(vec4<u16>(vec4<u32>(word & 0xFFu, (word >> 8u) & 0xFFu, (word >> 16u) & 0xFFu, word >> 24u)));
}

// The integer that a sum is, in units of 2^-24 (scores) or 2^-48 (values).
fn score_sum(at: u32) -> i32 {
    return bitcast<i32>(sums[at] * bitcast<f32>(0x4B800000u) + ROUND) - ROUND_BITS;
}

fn value_sum(at: u32) -> i32 {
    return bitcast<i32>(sums[at] * bitcast<f32>(0x57800000u) + ROUND) - ROUND_BITS;
}

// Stores 16 dims of a row's planes; returns the sum of q15.
fn store_plane(at: u32, x: array<vec4<f32>, 4>, scale: f32) -> i32 {
    let row = at / $(2 * UNITS)u;
    let to = row * $(A_STRIDE)u + (at / 2u) % $(UNITS)u * 4u;
#for w in 0..4
    let q$(w) = rhe4(x[$(w)] * scale);
    stage[to + $(w)u] = vec4<f16>(vec4<f32>(q$(w) >> vec4<u32>(7u)));
    stage[to + $(8 * A_STRIDE + w)u] = vec4<f16>(vec4<f32>(q$(w) & vec4<i32>(127)));
#end
    let sum = (q0 + q1) + (q2 + q3);
    return (sum.x + sum.y) + (sum.z + sum.w);
}
