//! The rotation of section 2 of docs/arithmetic.md over vectors: the sums of `attn_core::rotation`, in its order.

use attn_core::rotation::{rotate_back, rotate_output};

use crate::simd::Simd;

/// Sign bits of the lanes whose row has the bit 1, and of those whose row has the bit 2.
static SIGNS: [[i32; 16]; 2] = {
    let (mut signs, mut lane) = ([[0; 16]; 2], 0);
    while lane < 16 {
        signs[0][lane] = if lane / 4 % 2 == 1 { i32::MIN } else { 0 };
        signs[1][lane] = if lane / 8 == 1 { i32::MIN } else { 0 };
        lane += 1;
    }
    signs
};

/// `rotate_output` if `FLUSH`, else `rotate_back`.
#[inline(always)]
pub(crate) fn rotate<S: Simd, const FLUSH: bool>(s: S, row: &mut [f32], block: usize) {
    if !block.is_multiple_of(4 * S::LANES) {
        match FLUSH {
            true => rotate_output(row, block),
            false => rotate_back(row, block),
        }
        return;
    }
    for quarter in row.chunks_exact_mut(4 * S::LANES) {
        // SAFETY: four vectors.
        unsafe { rotate_four::<S, FLUSH>(s, quarter.as_mut_ptr()) };
    }
    let factor = s.splat(f32::from_bits(
        (127 - block.trailing_zeros().div_ceil(2)) << 23,
    ));
    for block in row.chunks_exact_mut(block) {
        let mut stride = S::LANES;
        while stride < block.len() {
            for pair in block.chunks_exact_mut(2 * stride) {
                let (low, high) = pair.split_at_mut(stride);
                let pairs = low.chunks_exact_mut(S::LANES);
                for (a, b) in pairs.zip(high.chunks_exact_mut(S::LANES)) {
                    // SAFETY: LANES floats each.
                    unsafe {
                        let [x, y] = pair_of::<S, FLUSH>(s, s.load(a.as_ptr()), s.load(b.as_ptr()));
                        s.store(a.as_mut_ptr(), x);
                        s.store(b.as_mut_ptr(), y);
                    }
                }
            }
            stride *= 2;
        }
        for x in block.chunks_exact_mut(S::LANES) {
            // SAFETY: LANES floats.
            unsafe {
                let y = flush::<S, FLUSH>(s, s.mul(s.load(x.as_ptr()), factor));
                s.store(x.as_mut_ptr(), y);
            }
        }
    }
}

#[inline(always)]
fn flush<S: Simd, const FLUSH: bool>(s: S, x: S::F) -> S::F {
    if FLUSH { s.ftz(x) } else { x }
}

/// A butterfly.
#[inline(always)]
fn pair_of<S: Simd, const FLUSH: bool>(s: S, a: S::F, b: S::F) -> [S::F; 2] {
    [
        flush::<S, FLUSH>(s, s.add(a, b)),
        flush::<S, FLUSH>(s, s.sub(a, b)),
    ]
}

/// The butterflies inside each of four vectors.
///
/// # Safety
/// Four vectors are readable and writable at `p`.
#[inline(always)]
unsafe fn rotate_four<S: Simd, const FLUSH: bool>(s: S, p: *mut f32) {
    let mut v = [s.i_splat(0); 4];
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: the caller's contract.
        *v = unsafe { s.i_load(p.add(i * S::LANES).cast()) };
    }
    // Strides 1 and 2, between the lanes of a row.
    let [a, b, c, e] = s.i_turn(v);
    let [a, b] = pair_of::<S, FLUSH>(s, s.of_bits(a), s.of_bits(b));
    let [c, e] = pair_of::<S, FLUSH>(s, s.of_bits(c), s.of_bits(e));
    let [a, c] = pair_of::<S, FLUSH>(s, a, c);
    let [b, e] = pair_of::<S, FLUSH>(s, b, e);
    let v = s.i_turn([s.bits(a), s.bits(b), s.bits(c), s.bits(e)]);
    for (i, v) in v.into_iter().enumerate() {
        // Strides 4 and 8, between rows: the second of a pair is the first less itself.
        let (mut x, mut by) = (v, 1);
        while by < S::ROWS {
            // SAFETY: 16 integers.
            let signs = unsafe { s.i_load(SIGNS[by / 2].as_ptr().cast()) };
            let own = s.of_bits(s.i_xor(x, signs));
            let sum = s.add(s.of_bits(s.i_exchange(x, by)), own);
            x = s.bits(flush::<S, FLUSH>(s, sum));
            by *= 2;
        }
        // SAFETY: the caller's contract.
        unsafe { s.i_store(p.add(i * S::LANES).cast(), x) };
    }
}
