//! The kernels' dot product of 8-bit integers and nothing else: what bounds steps of many query rows.

use std::hint::black_box;

use crate::{
    scratch::Aligned,
    simd::{Dot, Simd},
};

/// Rows and vectors of codes that a round keeps in registers, as the kernels do.
const ROWS: usize = 4;
const VECTORS: usize = 2;

/// Operands of a round: they stay in the first-level cache.
const OPERANDS: usize = 64;

/// Computes `rounds` rounds of products of codes in registers with operands in memory, and returns the products of a round.
#[inline(always)]
pub(crate) fn products<D: Dot>(d: D, rounds: usize) -> usize {
    let s = d.simd();
    let mut memory = Aligned::<u8>::new();
    memory.reserve(OPERANDS * D::OPERAND);
    for (i, byte) in memory.as_mut_slice().iter_mut().enumerate() {
        *byte = i as u8 % 3;
    }
    let codes = [1, 2].map(|x| d.k_bytes(s.i_splat(black_box(x))));
    let mut acc = [[s.i_splat(0); VECTORS]; ROWS];
    for _ in 0..rounds {
        let operands = black_box(memory.as_slice()).as_ptr();
        for i in 0..OPERANDS {
            for r in 0..ROWS {
                // SAFETY: (i + r) % OPERANDS lies in `memory`.
                let operand = unsafe { d.operand(operands.add((i + r) % OPERANDS * D::OPERAND)) };
                for j in 0..VECTORS {
                    acc[r][j] = d.k_dot(acc[r][j], codes[j], operand);
                }
            }
        }
    }
    for row in acc {
        for sums in row {
            black_box(s.i_sum(sums));
        }
    }
    OPERANDS * ROWS * VECTORS * 16 * D::S::ROWS
}
