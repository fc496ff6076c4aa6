//! Plain arrays of eight numbers. Its functions need no target feature and are not `inline(always)`: the compiler unrolls their loops once, not at
//! each of the thousands of places that kernels use them.

use attn_core::arithmetic::ftz;
use half::f16;

use super::Simd;
use crate::grid::MANTISSAS;

/// Two rows in arrays.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type I = [i32; 8];
type F = [f32; 8];

#[inline]
fn zip<T: Copy, U: Copy, R: Copy + Default>(a: [T; 8], b: [U; 8], f: impl Fn(T, U) -> R) -> [R; 8] {
    let mut out = [R::default(); 8];
    for i in 0..8 {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Applies `f` to both 16-bit halves of each lane.
#[inline]
fn halves(a: I, f: impl Fn(u16) -> u16) -> I {
    a.map(|x| (u32::from(f(x as u16)) | u32::from(f((x >> 16) as u16)) << 16) as i32)
}

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

impl Simd for Scalar {
    const ROWS: usize = 2;
    type I = I;
    type F = F;

    #[inline]
    fn i_splat(self, x: i32) -> I {
        [x; 8]
    }

    #[inline]
    fn i_add(self, a: I, b: I) -> I {
        zip(a, b, i32::wrapping_add)
    }

    #[inline]
    fn i_sub(self, a: I, b: I) -> I {
        zip(a, b, i32::wrapping_sub)
    }

    #[inline]
    fn i_and(self, a: I, b: I) -> I {
        zip(a, b, |a, b| a & b)
    }

    #[inline]
    fn i_xor(self, a: I, b: I) -> I {
        zip(a, b, |a, b| a ^ b)
    }

    #[inline]
    fn i_shl<const N: i32>(self, a: I) -> I {
        a.map(|x| x << N)
    }

    #[inline]
    fn i_shr<const N: i32>(self, a: I) -> I {
        a.map(|x| (x as u32 >> N) as i32)
    }

    #[inline]
    fn i_sar<const N: i32>(self, a: I) -> I {
        a.map(|x| x >> N)
    }

    #[inline]
    fn i_sum(self, a: I) -> i32 {
        a.iter().fold(0, |s, x| s.wrapping_add(*x))
    }

    #[inline]
    fn i_pairs(self, a: I, b: I) -> I {
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
    fn i_join(self, a: I, b: I) -> I {
        self.i_pairs(a, b)
    }

    #[inline]
    fn i_exchange(self, [a, b, c, d, e, f, g, h]: I, _: usize) -> I {
        [e, f, g, h, a, b, c, d]
    }

    #[inline]
    fn h_shl<const N: i32>(self, a: I) -> I {
        halves(a, |x| x << N)
    }

    #[inline]
    fn h_shr<const N: i32>(self, a: I) -> I {
        halves(a, |x| x >> N)
    }

    #[inline]
    fn h_sar<const N: i32>(self, a: I) -> I {
        halves(a, |x| (x as i16 >> N) as u16)
    }

    #[inline]
    fn h_dot(self, acc: I, a: I, b: I) -> I {
        let dot = zip(a, b, |a, b| {
            let (low, high) = (
                i32::from(a as i16) * i32::from(b as i16),
                (a >> 16) * (b >> 16),
            );
            low.wrapping_add(high)
        });
        self.i_add(acc, dot)
    }

    #[inline]
    fn zip_8(self, a: I, b: I) -> [I; 2] {
        zip_elements::<u8>(a, b)
    }

    #[inline]
    fn zip_16(self, a: I, b: I) -> [I; 2] {
        zip_elements::<u16>(a, b)
    }

    #[inline]
    fn zip_32(self, a: I, b: I) -> [I; 2] {
        zip_elements::<u32>(a, b)
    }

    #[inline]
    fn zip_64(self, [a, b, c, d, e, f, g, h]: I, [i, j, k, l, m, n, o, p]: I) -> [I; 2] {
        [[a, b, i, j, e, f, m, n], [c, d, k, l, g, h, o, p]]
    }

    #[inline]
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> I {
        // SAFETY: 16 bytes are readable at each by the caller's contract.
        let [[a, b, c, d], [e, f, g, h]] = unsafe {
            [
                rows[0].cast::<[i32; 4]>().read_unaligned(),
                rows[1].cast::<[i32; 4]>().read_unaligned(),
            ]
        };
        [a, b, c, d, e, f, g, h]
    }

    #[inline]
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], [a, b, c, d, e, f, g, h]: I) {
        // SAFETY: 16 bytes are writable at the first two by the caller's contract.
        unsafe {
            rows[0].cast::<[i32; 4]>().write_unaligned([a, b, c, d]);
            rows[1].cast::<[i32; 4]>().write_unaligned([e, f, g, h]);
        }
    }

    #[inline]
    unsafe fn i_load(self, p: *const u8) -> I {
        // SAFETY: 32 bytes are readable by the caller's contract.
        unsafe { p.cast::<I>().read_unaligned() }
    }

    #[inline]
    unsafe fn i_store(self, p: *mut u8, a: I) {
        // SAFETY: 32 bytes are writable by the caller's contract.
        unsafe { p.cast::<I>().write_unaligned(a) }
    }

    #[inline]
    unsafe fn i_row(self, p: *const u8) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        let [a, b, c, d] = unsafe { p.cast::<[i32; 4]>().read_unaligned() };
        [a, b, c, d, a, b, c, d]
    }

    #[inline]
    unsafe fn i_load_u16(self, p: *const u8) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(i32::from)
    }

    #[inline]
    unsafe fn i_load_panels(self, p: *const u8, _: usize) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { self.i_load_u16(p) }
    }

    #[inline]
    fn splat(self, x: f32) -> F {
        [x; 8]
    }

    #[inline]
    fn add(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a + b)
    }

    #[inline]
    fn sub(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a - b)
    }

    #[inline]
    fn mul(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a * b)
    }

    #[inline]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        self.add(self.mul(a, b), c)
    }

    #[inline]
    fn grid_sum(self, a: F, step: F, base: F) -> F {
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
    fn mantissas(self, n: I) -> F {
        n.map(|n| MANTISSAS[(n & 63) as usize])
    }

    #[inline]
    fn pick(self, four: F, mut index: I) -> F {
        for (i, index) in index.iter_mut().enumerate() {
            *index = (*index & 3) + (i & 4) as i32;
        }
        index.map(|i| four[(i & 7) as usize])
    }

    #[inline]
    fn max(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline]
    fn abs(self, a: F) -> F {
        a.map(f32::abs)
    }

    #[inline]
    fn largest(self, a: F) -> f32 {
        a.iter()
            .fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
    }

    #[inline]
    fn ftz(self, a: F) -> F {
        a.map(ftz)
    }

    #[inline]
    fn to_f(self, a: I) -> F {
        a.map(|x| x as f32)
    }

    #[inline]
    fn bits(self, a: F) -> I {
        a.map(|x| x.to_bits() as i32)
    }

    #[inline]
    fn of_bits(self, a: I) -> F {
        a.map(|x| f32::from_bits(x as u32))
    }

    #[inline]
    fn any_negative(self, a: I) -> bool {
        a.iter().fold(0, |all, x| all | x) < 0
    }

    #[inline]
    fn f16_to_f(self, a: I) -> F {
        a.map(|x| f16::from_bits(x as u16).to_f32())
    }

    #[inline]
    fn keep(self, mut a: F, start: i32, end: i32, other: f32) -> F {
        for (i, x) in a.iter_mut().enumerate() {
            if !(start..end).contains(&(i as i32)) {
                *x = other;
            }
        }
        a
    }

    #[inline]
    fn rows(self, v: [F; 4]) -> F {
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
    fn row_pairs(self, a: F, b: F) -> F {
        let mut out = [0.0; 8];
        for i in 0..4 {
            (out[i], out[4 + i]) = (a[i] + a[4 + i], b[i] + b[4 + i]);
        }
        out
    }

    #[inline]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { p.cast::<F>().read_unaligned() }
    }

    #[inline]
    unsafe fn store(self, p: *mut f32, a: F) {
        // SAFETY: 8 floats are writable by the caller's contract.
        unsafe { p.cast::<F>().write_unaligned(a) }
    }

    #[inline]
    unsafe fn load_8(self, p: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { self.load(p) }
    }

    #[inline]
    unsafe fn load_panels(self, a: *const f32, _: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { self.load(a) }
    }
}
