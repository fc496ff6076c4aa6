//! Loads of stored floats as f32.

use crate::simd::Simd;

/// The number of `Float::F16` as a const parameter.
pub(crate) const F16: u8 = 0;
pub(crate) const BF16: u8 = 1;
pub(crate) const F32: u8 = 2;
/// Rows of f32 whose panels are neighbours.
pub(crate) const WIDE: u8 = 3;

/// # Safety
/// `LANES` stored values at `p`.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd, const KIND: u8>(s: S, p: *const u8) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        match KIND {
            F16 => s.load_f16(p),
            BF16 => s.of_bits(s.i_shl::<16>(s.i_load_u16(p))),
            _ => s.load(p.cast()),
        }
    }
}

/// `ROWS/2` panels of one token.
///
/// # Safety
/// One panel row each at `p` and, for four rows, at `p + stride`.
#[inline(always)]
pub(crate) unsafe fn widen_panels<S: Simd, const KIND: u8>(
    s: S,
    p: *const u8,
    stride: usize,
) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        match KIND {
            F16 if S::ROWS == 2 => s.load_f16(p),
            F16 => s.f16_to_f(s.i_load_panels(p, stride)),
            BF16 => s.of_bits(s.i_shl::<16>(s.i_load_panels(p, stride))),
            WIDE => s.load(p.cast()),
            _ => s.load_panels(p.cast(), p.add(stride * (S::ROWS / 2 - 1)).cast()),
        }
    }
}
