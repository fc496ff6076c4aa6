//! The rotation of K, V and queries (`docs/arithmetic.md`, section 2): Sylvester's Hadamard matrix over blocks of a row.

use crate::arithmetic::ftz;

/// Elements of one block: the largest power of two that divides the head_dim, which is a multiple of 16.
#[must_use]
pub fn block(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// Multiplies each block of a row by the Hadamard matrix and by 2^-`halvings`; `flush` follows every operation.
///
/// Every sum is rounded to f32 in the order of the butterflies, strides 1, 2, 4, …; the matrix is symmetric, and its square is the block's length.
#[inline(always)]
fn rotate(row: &mut [f32], block: usize, halvings: u32, flush: impl Fn(f32) -> f32) {
    let factor = f32::from_bits((127 - halvings) << 23);
    for block in row.chunks_exact_mut(block) {
        let mut stride = 1;
        while stride < block.len() {
            for pair in block.chunks_exact_mut(2 * stride) {
                let (low, high) = pair.split_at_mut(stride);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (flush(*a + *b), flush(*a - *b));
                }
            }
            stride *= 2;
        }
        block.iter_mut().for_each(|x| *x = flush(*x * factor));
    }
}

/// Rotates a row of K or V to the one that is stored.
#[inline(always)]
pub fn rotate_stored(row: &mut [f32]) {
    let block = block(row.len());
    rotate(row, block, block.trailing_zeros() / 2, |x| x);
}

/// Rotates a query, or turns a stored row back, by blocks: with [`rotate_stored`], of the same blocks, it multiplies to the identity.
#[inline(always)]
pub fn rotate_back(row: &mut [f32], block: usize) {
    rotate(row, block, block.trailing_zeros().div_ceil(2), |x| x);
}

/// Turns a row of outputs back, by blocks; every sum and product that is subnormal is flushed.
#[inline(always)]
pub fn rotate_output(row: &mut [f32], block: usize) {
    rotate(row, block, block.trailing_zeros().div_ceil(2), ftz);
}

#[cfg(test)]
mod tests {
    use attn_conformance::noise::uniform;

    use super::*;
    use crate::head_dim::HEAD_DIMS;

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    }

    #[test]
    fn blocks_are_the_largest_powers_of_two() {
        let blocks = [64, 16, 32, 128, 32, 64, 256, 64, 512, 64];
        assert_eq!(HEAD_DIMS.map(block), blocks);
    }

    #[test]
    fn a_unit_row_becomes_a_row_of_the_matrix() {
        // Row 5 of Sylvester's matrix: the sign is the parity of 5 & i.
        let mut row = [0.0; 64];
        row[5] = 8.0;
        rotate_stored(&mut row);
        for (i, x) in row.iter().enumerate() {
            let sign = if (5 & i).count_ones() % 2 == 0 {
                1.0
            } else {
                -1.0
            };
            assert_eq!(*x, sign, "{i}");
        }
    }

    #[test]
    fn there_and_back_is_the_row_and_scores_are_kept() {
        for dim in HEAD_DIMS {
            let (q, k) = (uniform(1, 0..dim), uniform(2, 0..dim));
            let (mut q_rotated, mut k_rotated) = (q.clone(), k.clone());
            rotate_back(&mut q_rotated, block(dim));
            rotate_stored(&mut k_rotated);
            let (score, rotated) = (dot(&q, &k), dot(&q_rotated, &k_rotated));
            assert!((score - rotated).abs() < 1e-5, "{dim}: {score} {rotated}");
            rotate_back(&mut k_rotated, block(dim));
            let worst = k.iter().zip(&k_rotated).map(|(a, b)| (a - b).abs());
            assert!(worst.fold(0.0, f32::max) < 1e-6, "{dim}");
        }
    }
}
