//! Eight numbers in plain arrays: what vectors of an instruction set have no instructions for. The functions are not `inline(always)`: the compiler unrolls their
//! loops once, not at each of the thousands of places that kernels use them.

use attn_core::arithmetic;
use half::f16;

use crate::grid::MANTISSAS;

type I = [i32; 8];
type F = [f32; 8];

/// Interleaves elements of `T` inside each row.
#[inline]
fn zip_elements<T: bytemuck::Pod>(a: I, b: I) -> [I; 2] {
    let (mut out, half) = ([[0; 8]; 2], 8 / size_of::<T>());
    let (a, b): (&[T], &[T]) = (bytemuck::cast_slice(&a), bytemuck::cast_slice(&b));
    for (h, out) in out.iter_mut().enumerate() {
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        for row in 0..2 {
            for i in 0..half {
                let (from, to) = ((2 * row + h) * half + i, 2 * (row * half + i));
                (out[to], out[to + 1]) = (a[from], b[from]);
            }
        }
    }
    out
}

#[inline]
pub(super) fn i_sum(a: I) -> i32 {
    a.iter().fold(0, |s, x| s.wrapping_add(*x))
}

#[inline]
pub(super) fn i_pairs(a: I, b: I) -> I {
    let pair = |x: I, i: usize| x[i].wrapping_add(x[i + 1]);
    [
        pair(a, 0),
        pair(a, 2),
        pair(a, 4),
        pair(a, 6),
        pair(b, 0),
        pair(b, 2),
        pair(b, 4),
        pair(b, 6),
    ]
}

#[inline]
pub(super) fn i_exchange([a, b, c, d, e, f, g, h]: I) -> I {
    [e, f, g, h, a, b, c, d]
}

#[inline]
pub(super) fn zip_8(a: I, b: I) -> [I; 2] {
    zip_elements::<u8>(a, b)
}

#[inline]
pub(super) fn zip_16(a: I, b: I) -> [I; 2] {
    zip_elements::<u16>(a, b)
}

#[inline]
pub(super) fn zip_32(a: I, b: I) -> [I; 2] {
    zip_elements::<u32>(a, b)
}

#[inline]
pub(super) fn zip_64([a, b, c, d, e, f, g, h]: I, [i, j, k, l, m, n, o, p]: I) -> [I; 2] {
    [[a, b, i, j, e, f, m, n], [c, d, k, l, g, h, o, p]]
}

/// # Safety
/// As [`super::Simd::i_load_rows`].
#[inline]
pub(super) unsafe fn i_load_rows(rows: [*const u8; 4]) -> I {
    // SAFETY: 16 bytes are readable at each by the caller's contract.
    let [[a, b, c, d], [e, f, g, h]] = unsafe {
        [
            rows[0].cast::<[i32; 4]>().read_unaligned(),
            rows[1].cast::<[i32; 4]>().read_unaligned(),
        ]
    };
    [a, b, c, d, e, f, g, h]
}

/// # Safety
/// As [`super::Simd::i_store_rows`].
#[inline]
pub(super) unsafe fn i_store_rows(rows: [*mut u8; 4], [a, b, c, d, e, f, g, h]: I) {
    // SAFETY: 16 bytes are writable at the first two by the caller's contract.
    unsafe {
        rows[0].cast::<[i32; 4]>().write_unaligned([a, b, c, d]);
        rows[1].cast::<[i32; 4]>().write_unaligned([e, f, g, h]);
    }
}

/// # Safety
/// As [`super::Simd::i_load`].
#[inline]
pub(super) unsafe fn i_load(p: *const u8) -> I {
    // SAFETY: 32 bytes are readable by the caller's contract.
    unsafe { p.cast::<I>().read_unaligned() }
}

/// # Safety
/// As [`super::Simd::i_store`].
#[inline]
pub(super) unsafe fn i_store(p: *mut u8, a: I) {
    // SAFETY: 32 bytes are writable by the caller's contract.
    unsafe { p.cast::<I>().write_unaligned(a) }
}

/// # Safety
/// As [`super::Simd::i_row`].
#[inline]
pub(super) unsafe fn i_row(p: *const u8) -> I {
    // SAFETY: 16 bytes are readable by the caller's contract.
    let [a, b, c, d] = unsafe { p.cast::<[i32; 4]>().read_unaligned() };
    [a, b, c, d, a, b, c, d]
}

/// # Safety
/// As [`super::Simd::i_load_u16`].
#[inline]
pub(super) unsafe fn i_load_u16(p: *const u8) -> I {
    // SAFETY: 16 bytes are readable by the caller's contract.
    unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(i32::from)
}

#[inline]
pub(super) fn grid_sum(a: F, step: F, base: F) -> F {
    // The step of f64 is 2^-6 here. The product of two f32 is exact in it, and so is the base's sum with GRID, where the base is on the grid, so that
    // this sum is the only rounding.
    const GRID: f64 = 1.5 * (1u64 << 46) as f64;
    let mut sums = [0.0; 8];
    for i in 0..8 {
        let base = f64::from(base[i]);
        let raised = base + GRID;
        sums[i] = match raised - GRID == base {
            true => (f64::from(a[i]) * f64::from(step[i]) + raised - GRID) as f32,
            false => a[i].mul_add(step[i], base as f32),
        };
    }
    sums
}

#[inline]
pub(super) fn mantissas(n: I) -> F {
    n.map(|n| MANTISSAS[(n & 63) as usize])
}

#[inline]
pub(super) fn pick(four: F, mut index: I) -> F {
    for (i, index) in index.iter_mut().enumerate() {
        *index = (*index & 3) + (i & 4) as i32;
    }
    index.map(|i| four[(i & 7) as usize])
}

#[inline]
pub(super) fn largest(a: F) -> f32 {
    a.iter()
        .fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
}

#[inline]
pub(super) fn ftz(a: F) -> F {
    a.map(arithmetic::ftz)
}

#[inline]
pub(super) fn any_negative(a: I) -> bool {
    a.iter().fold(0, |all, x| all | x) < 0
}

#[inline]
pub(super) fn f16_to_f(a: I) -> F {
    a.map(|x| f16::from_bits(x as u16).to_f32())
}

#[inline]
pub(super) fn keep(mut a: F, start: i32, end: i32, other: f32) -> F {
    for (i, x) in a.iter_mut().enumerate() {
        if !(start..end).contains(&(i as i32)) {
            *x = other;
        }
    }
    a
}

#[inline]
pub(super) fn rows(v: [F; 4]) -> F {
    let mut out = [0.0; 8];
    for j in 0..4 {
        for r in 0..2 {
            let x = &v[j][4 * r..4 * r + 4];
            out[2 * j + r] = (x[0] + x[2]) + (x[1] + x[3]);
        }
    }
    out
}

#[inline]
pub(super) fn row_pairs(a: F, b: F) -> F {
    let mut out = [0.0; 8];
    for i in 0..4 {
        (out[i], out[4 + i]) = (a[i] + a[4 + i], b[i] + b[4 + i]);
    }
    out
}

/// # Safety
/// As [`super::Simd::load`].
#[inline]
pub(super) unsafe fn load(p: *const f32) -> F {
    // SAFETY: 8 floats are readable by the caller's contract.
    unsafe { p.cast::<F>().read_unaligned() }
}

/// # Safety
/// As [`super::Simd::store`].
#[inline]
pub(super) unsafe fn store(p: *mut f32, a: F) {
    // SAFETY: 8 floats are writable by the caller's contract.
    unsafe { p.cast::<F>().write_unaligned(a) }
}
