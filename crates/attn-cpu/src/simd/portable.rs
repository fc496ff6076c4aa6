//! `wide`: two rows in whatever vectors the build targets.

use wide::{f32x8, i16x16, i32x8};

use super::{Simd, arrays};

/// Two rows in `wide`'s vectors; moves between lanes go through arrays.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn h(a: i32x8) -> i16x16 {
    bytemuck::cast(a)
}

#[inline(always)]
fn u(a: i16x16) -> i32x8 {
    bytemuck::cast(a)
}

impl Simd for Portable {
    const ROWS: usize = 2;
    type I = i32x8;
    type F = f32x8;

    #[inline(always)]
    fn i_splat(self, x: i32) -> i32x8 {
        i32x8::splat(x)
    }

    #[inline(always)]
    fn i_add(self, a: i32x8, b: i32x8) -> i32x8 {
        a + b
    }

    #[inline(always)]
    fn i_sub(self, a: i32x8, b: i32x8) -> i32x8 {
        a - b
    }

    #[inline(always)]
    fn i_and(self, a: i32x8, b: i32x8) -> i32x8 {
        a & b
    }

    #[inline(always)]
    fn i_xor(self, a: i32x8, b: i32x8) -> i32x8 {
        a ^ b
    }

    #[inline(always)]
    fn i_shl<const N: i32>(self, a: i32x8) -> i32x8 {
        a << N
    }

    #[inline(always)]
    fn i_shr<const N: i32>(self, a: i32x8) -> i32x8 {
        let a: wide::u32x8 = bytemuck::cast(a);
        bytemuck::cast(a >> N)
    }

    #[inline(always)]
    fn i_sar<const N: i32>(self, a: i32x8) -> i32x8 {
        a >> N
    }

    #[inline(always)]
    fn i_sum(self, a: i32x8) -> i32 {
        arrays::i_sum(a.to_array())
    }

    #[inline(always)]
    fn i_pairs(self, a: i32x8, b: i32x8) -> i32x8 {
        arrays::i_pairs(a.to_array(), b.to_array()).into()
    }

    #[inline(always)]
    fn i_join(self, a: i32x8, b: i32x8) -> i32x8 {
        arrays::i_pairs(a.to_array(), b.to_array()).into()
    }

    #[inline(always)]
    fn i_exchange(self, a: i32x8, _: usize) -> i32x8 {
        arrays::i_exchange(a.to_array()).into()
    }

    #[inline(always)]
    fn h_shl<const N: i32>(self, a: i32x8) -> i32x8 {
        u(h(a) << N)
    }

    #[inline(always)]
    fn h_shr<const N: i32>(self, a: i32x8) -> i32x8 {
        let a: wide::u16x16 = bytemuck::cast(a);
        bytemuck::cast(a >> N)
    }

    #[inline(always)]
    fn h_sar<const N: i32>(self, a: i32x8) -> i32x8 {
        u(h(a) >> N)
    }

    #[inline(always)]
    fn h_dot(self, acc: i32x8, a: i32x8, b: i32x8) -> i32x8 {
        acc + h(a).dot(h(b))
    }

    #[inline(always)]
    fn zip_8(self, a: i32x8, b: i32x8) -> [i32x8; 2] {
        arrays::zip_8(a.to_array(), b.to_array()).map(i32x8::new)
    }

    #[inline(always)]
    fn zip_16(self, a: i32x8, b: i32x8) -> [i32x8; 2] {
        arrays::zip_16(a.to_array(), b.to_array()).map(i32x8::new)
    }

    #[inline(always)]
    fn zip_32(self, a: i32x8, b: i32x8) -> [i32x8; 2] {
        arrays::zip_32(a.to_array(), b.to_array()).map(i32x8::new)
    }

    #[inline(always)]
    fn zip_64(self, a: i32x8, b: i32x8) -> [i32x8; 2] {
        arrays::zip_64(a.to_array(), b.to_array()).map(i32x8::new)
    }

    #[inline(always)]
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> i32x8 {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_load_rows(rows) }.into()
    }

    #[inline(always)]
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], a: i32x8) {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_store_rows(rows, a.to_array()) }
    }

    #[inline(always)]
    unsafe fn i_load(self, p: *const u8) -> i32x8 {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_load(p) }.into()
    }

    #[inline(always)]
    unsafe fn i_store(self, p: *mut u8, a: i32x8) {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_store(p, a.to_array()) }
    }

    #[inline(always)]
    unsafe fn i_row(self, p: *const u8) -> i32x8 {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_row(p) }.into()
    }

    #[inline(always)]
    unsafe fn i_load_u16(self, p: *const u8) -> i32x8 {
        // SAFETY: the caller's contract.
        unsafe { arrays::i_load_u16(p) }.into()
    }

    #[inline(always)]
    unsafe fn i_load_panels(self, p: *const u8, _: usize) -> i32x8 {
        // SAFETY: the caller's contract.
        unsafe { self.i_load_u16(p) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> f32x8 {
        f32x8::splat(x)
    }

    #[inline(always)]
    fn add(self, a: f32x8, b: f32x8) -> f32x8 {
        a + b
    }

    #[inline(always)]
    fn sub(self, a: f32x8, b: f32x8) -> f32x8 {
        a - b
    }

    #[inline(always)]
    fn mul(self, a: f32x8, b: f32x8) -> f32x8 {
        a * b
    }

    #[inline(always)]
    fn mul_add(self, a: f32x8, b: f32x8, c: f32x8) -> f32x8 {
        a * b + c
    }

    #[inline(always)]
    fn grid_sum(self, a: f32x8, step: f32x8, base: f32x8) -> f32x8 {
        let [a, step, base] = [a, step, base].map(f32x8::to_array);
        arrays::grid_sum(a, step, base).into()
    }

    #[inline(always)]
    fn mantissas(self, n: i32x8) -> f32x8 {
        arrays::mantissas(n.to_array()).into()
    }

    #[inline(always)]
    fn pick(self, four: f32x8, index: i32x8) -> f32x8 {
        arrays::pick(four.to_array(), index.to_array()).into()
    }

    #[inline(always)]
    fn max(self, a: f32x8, b: f32x8) -> f32x8 {
        a.fast_max(b)
    }

    #[inline(always)]
    fn abs(self, a: f32x8) -> f32x8 {
        a.abs()
    }

    #[inline(always)]
    fn largest(self, a: f32x8) -> f32 {
        arrays::largest(a.to_array())
    }

    #[inline(always)]
    fn ftz(self, a: f32x8) -> f32x8 {
        arrays::ftz(a.to_array()).into()
    }

    #[inline(always)]
    fn to_f(self, a: i32x8) -> f32x8 {
        f32x8::from_i32x8(a)
    }

    #[inline(always)]
    fn bits(self, a: f32x8) -> i32x8 {
        bytemuck::cast(a)
    }

    #[inline(always)]
    fn of_bits(self, a: i32x8) -> f32x8 {
        bytemuck::cast(a)
    }

    #[inline(always)]
    fn any_negative(self, a: i32x8) -> bool {
        arrays::any_negative(a.to_array())
    }

    #[inline(always)]
    fn f16_to_f(self, a: i32x8) -> f32x8 {
        arrays::f16_to_f(a.to_array()).into()
    }

    #[inline(always)]
    fn keep(self, a: f32x8, start: i32, end: i32, other: f32) -> f32x8 {
        arrays::keep(a.to_array(), start, end, other).into()
    }

    #[inline(always)]
    fn rows(self, v: [f32x8; 4]) -> f32x8 {
        arrays::rows(v.map(f32x8::to_array)).into()
    }

    #[inline(always)]
    fn row_pairs(self, a: f32x8, b: f32x8) -> f32x8 {
        arrays::row_pairs(a.to_array(), b.to_array()).into()
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> f32x8 {
        // SAFETY: the caller's contract.
        unsafe { arrays::load(p) }.into()
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: f32x8) {
        // SAFETY: the caller's contract.
        unsafe { arrays::store(p, a.to_array()) }
    }

    #[inline(always)]
    unsafe fn load_8(self, p: *const f32) -> f32x8 {
        // SAFETY: the caller's contract.
        unsafe { self.load(p) }
    }

    #[inline(always)]
    unsafe fn load_panels(self, a: *const f32, _: *const f32) -> f32x8 {
        // SAFETY: the caller's contract.
        unsafe { self.load(a) }
    }
}
