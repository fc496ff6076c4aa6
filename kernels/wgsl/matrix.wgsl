// matrix.wgsl: what matrix_split.wgsl keeps in workgroup memory, and how bytes get into it and sums out of it.
//
// A matrix is loaded from and stored to memory and nothing else. Rows 0..7 of the first operand are the high plane of 8 query rows,
// 8..15 the low one. Codes (biased to 0..255) and weights are f16 subnormals, whose bits are the integer: a byte widened to 16 bits is
// u * 2^-24. Sums stay below 2^22 of that unit, so f32 holds them.
// PLAIN spells matrices and subgroups out (matrix_plain.wgsl), so that any adapter can test where everything lies.
#let A_STRIDE = D / 4 + 2
// Rows an odd number of 8 bytes apart: 40 (as good as 168) is loaded at 1.3 times the rate of 48, and twice that of 32 (H200, `units`).
#let S_STRIDE = 4 * PU + 5
#let W_STRIDE = 18
// Of one subgroup: 16 rows of sums, 20 apart; regions 8 banks apart.
#let SUMS = 328
#let STAGED = 64 * S_STRIDE > 16 * A_STRIDE ? 64 * S_STRIDE : 16 * A_STRIDE
#if PLAIN
alias Bytes = u32;
#include "matrix_plain.wgsl"
#else
alias Bytes = vec4<f16>;

fn lanes_max(x: u32) -> u32 {
    return subgroupMax(x);
}

fn lanes_sum(x: i32) -> i32 {
    return subgroupAdd(x);
}

// The neighbour's.
fn lanes_swap(x: u32) -> u32 {
    return subgroupShuffleXor(x, 1u);
}

// Four bytes as f16 subnormals.
fn bytes_of(word: u32) -> Bytes {
    return bitcast<vec4<f16>>(vec4<u16>(vec4<u32>(word & 0xFFu, (word >> 8u) & 0xFFu, (word >> 16u) & 0xFFu, word >> 24u)));
}

// Four integers of -128..127 as they are.
fn small(x: vec4<i32>) -> Bytes {
    return vec4<f16>(vec4<f32>(x));
}
#end
var<workgroup> stage: array<Bytes, $(STAGED)>;          // q: (plane, row, 4 dims); codes: (subgroup, token or dim, 4 dims or tokens)
var<workgroup> weights: array<Bytes, $(16 * W_STRIDE)>; // (plane, row, 4 tokens in slot order)
var<workgroup> sums: array<f32, $(4 * SUMS)>;           // (subgroup, plane, row, token or dim)

// 16 codes of `row` of a subgroup's stage, from column 16 `at`.
fn stage_codes(part: u32, row: u32, at: u32, codes: vec4<u32>) {
    let to = (part * 16u + row) * $(S_STRIDE)u + at * 4u;
#for w in 0..4
    stage[to + $(w)u] = bytes_of(codes[$(w)]);
#end
}

// Both planes' sum of row r for token `index` of the tile, codes biased.
fn score_total(r: u32, index: u32) -> i32 {
    let at = (index >> 4u) * $(SUMS)u + r * 20u + (index & 15u);
    return (score_sum(sums[at]) << 7u) + score_sum(sums[at + 160u]);
}

// The integer that a sum is, in units of 2^-24 (scores) or 2^-48 (values).
fn score_sum(x: f32) -> i32 {
    return bitcast<i32>(x * bitcast<f32>(0x4B800000u) + ROUND) - ROUND_BITS;
}

fn value_sum(x: f32) -> i32 {
    return bitcast<i32>(x * bitcast<f32>(0x57800000u) + ROUND) - ROUND_BITS;
}

// Stores 16 dims of a row's planes; returns the sum of q15.
fn store_plane(at: u32, x: array<vec4<f32>, 4>, scale: f32) -> i32 {
    let row = at / $(2 * UNITS)u;
    let to = row * $(A_STRIDE)u + (at / 2u) % $(UNITS)u * 4u;
#for w in 0..4
    let q$(w) = rhe4(x[$(w)] * scale);
    stage[to + $(w)u] = small(q$(w) >> vec4<u32>(7u));
    stage[to + $(8 * A_STRIDE + w)u] = small(q$(w) & vec4<i32>(127));
#end
    let sum = (q0 + q1) + (q2 + q3);
    return (sum.x + sum.y) + (sum.z + sum.w);
}
