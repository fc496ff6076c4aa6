//! NEON: two rows in two 128-bit registers.

use std::arch::aarch64::*;

use super::{Simd, arrays};
use crate::grid::powers;

/// NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// # Safety
    /// The machine has NEON.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Neon(())
    }
}

/// Two rows.
#[derive(Clone, Copy)]
pub(crate) struct I(int32x4_t, int32x4_t);

/// Two rows.
#[derive(Clone, Copy)]
pub(crate) struct F(float32x4_t, float32x4_t);

/// A register operation; the value `self` proves that the machine has it.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a `Neon` exists only where its instructions do.
        unsafe { $e }
    }};
}

/// The places of the bytes of the floats that each lane counts, below 16.
#[inline(always)]
fn bytes_of(index: int32x4_t) -> uint8x16_t {
    op!({
        // Four bytes 4·index, and 0 to 3 with them.
        let first = vmulq_n_s32(index, 0x0404_0404);
        vreinterpretq_u8_s32(vaddq_s32(first, vdupq_n_s32(0x0302_0100)))
    })
}

impl Neon {
    #[inline(always)]
    fn i_array(self, a: I) -> [i32; 8] {
        let mut out = [0; 8];
        op!({
            vst1q_s32(out.as_mut_ptr(), a.0);
            vst1q_s32(out.as_mut_ptr().add(4), a.1);
        });
        out
    }

    #[inline(always)]
    fn f_array(self, a: F) -> [f32; 8] {
        let mut out = [0.0; 8];
        op!({
            vst1q_f32(out.as_mut_ptr(), a.0);
            vst1q_f32(out.as_mut_ptr().add(4), a.1);
        });
        out
    }

    #[inline(always)]
    fn f_from(self, a: [f32; 8]) -> F {
        op!(F(vld1q_f32(a.as_ptr()), vld1q_f32(a.as_ptr().add(4))))
    }
}

impl Simd for Neon {
    const ROWS: usize = 2;
    type I = I;
    type F = F;

    #[inline(always)]
    fn i_splat(self, x: i32) -> I {
        op!(I(vdupq_n_s32(x), vdupq_n_s32(x)))
    }

    #[inline(always)]
    fn i_add(self, a: I, b: I) -> I {
        op!(I(vaddq_s32(a.0, b.0), vaddq_s32(a.1, b.1)))
    }

    #[inline(always)]
    fn i_sub(self, a: I, b: I) -> I {
        op!(I(vsubq_s32(a.0, b.0), vsubq_s32(a.1, b.1)))
    }

    #[inline(always)]
    fn i_and(self, a: I, b: I) -> I {
        op!(I(vandq_s32(a.0, b.0), vandq_s32(a.1, b.1)))
    }

    #[inline(always)]
    fn i_xor(self, a: I, b: I) -> I {
        op!(I(veorq_s32(a.0, b.0), veorq_s32(a.1, b.1)))
    }

    #[inline(always)]
    fn i_shl<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s32(N);
            I(vshlq_s32(a.0, n), vshlq_s32(a.1, n))
        })
    }

    #[inline(always)]
    fn i_shr<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s32(-N);
            let f = |x| vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), n));
            I(f(a.0), f(a.1))
        })
    }

    #[inline(always)]
    fn i_sar<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s32(-N);
            I(vshlq_s32(a.0, n), vshlq_s32(a.1, n))
        })
    }

    #[inline(always)]
    fn i_sum(self, a: I) -> i32 {
        op!(vaddvq_s32(vaddq_s32(a.0, a.1)))
    }

    #[inline(always)]
    fn i_pairs(self, a: I, b: I) -> I {
        op!(I(vpaddq_s32(a.0, a.1), vpaddq_s32(b.0, b.1)))
    }

    #[inline(always)]
    fn i_join(self, a: I, b: I) -> I {
        op!(I(vpaddq_s32(a.0, a.1), vpaddq_s32(b.0, b.1)))
    }

    #[inline(always)]
    fn i_exchange(self, a: I, _: usize) -> I {
        I(a.1, a.0)
    }

    #[inline(always)]
    fn h_shl<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s16(N as i16);
            let f = |x| vreinterpretq_s32_s16(vshlq_s16(vreinterpretq_s16_s32(x), n));
            I(f(a.0), f(a.1))
        })
    }

    #[inline(always)]
    fn h_shr<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s16(-N as i16);
            let f = |x| vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(x), n));
            I(f(a.0), f(a.1))
        })
    }

    #[inline(always)]
    fn h_sar<const N: i32>(self, a: I) -> I {
        op!({
            let n = vdupq_n_s16(-N as i16);
            let f = |x| vreinterpretq_s32_s16(vshlq_s16(vreinterpretq_s16_s32(x), n));
            I(f(a.0), f(a.1))
        })
    }

    #[inline(always)]
    fn h_dot(self, acc: I, a: I, b: I) -> I {
        op!({
            // Pairs of neighbours, as on x86.
            let f = |acc, a, b| {
                let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
                let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
                let high = vmull_high_s16(a, b);
                vaddq_s32(acc, vpaddq_s32(low, high))
            };
            I(f(acc.0, a.0, b.0), f(acc.1, a.1, b.1))
        })
    }

    #[inline(always)]
    fn zip_8(self, a: I, b: I) -> [I; 2] {
        op!({
            let low = |a, b| {
                let (a, b) = (vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b));
                vreinterpretq_s32_u8(vzip1q_u8(a, b))
            };
            let high = |a, b| {
                let (a, b) = (vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b));
                vreinterpretq_s32_u8(vzip2q_u8(a, b))
            };
            [
                I(low(a.0, b.0), low(a.1, b.1)),
                I(high(a.0, b.0), high(a.1, b.1)),
            ]
        })
    }

    #[inline(always)]
    fn zip_16(self, a: I, b: I) -> [I; 2] {
        op!({
            let low = |a, b| {
                let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
                vreinterpretq_s32_s16(vzip1q_s16(a, b))
            };
            let high = |a, b| {
                let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
                vreinterpretq_s32_s16(vzip2q_s16(a, b))
            };
            [
                I(low(a.0, b.0), low(a.1, b.1)),
                I(high(a.0, b.0), high(a.1, b.1)),
            ]
        })
    }

    #[inline(always)]
    fn zip_32(self, a: I, b: I) -> [I; 2] {
        op!([
            I(vzip1q_s32(a.0, b.0), vzip1q_s32(a.1, b.1)),
            I(vzip2q_s32(a.0, b.0), vzip2q_s32(a.1, b.1)),
        ])
    }

    #[inline(always)]
    fn zip_64(self, a: I, b: I) -> [I; 2] {
        op!({
            let low = |a, b| {
                let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
                vreinterpretq_s32_s64(vzip1q_s64(a, b))
            };
            let high = |a, b| {
                let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
                vreinterpretq_s32_s64(vzip2q_s64(a, b))
            };
            [
                I(low(a.0, b.0), low(a.1, b.1)),
                I(high(a.0, b.0), high(a.1, b.1)),
            ]
        })
    }

    #[inline(always)]
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> I {
        // SAFETY: 16 bytes are readable at each by the caller's contract.
        unsafe {
            I(
                vreinterpretq_s32_u8(vld1q_u8(rows[0])),
                vreinterpretq_s32_u8(vld1q_u8(rows[1])),
            )
        }
    }

    #[inline(always)]
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], a: I) {
        // SAFETY: 16 bytes are writable at the first two by the caller's contract.
        unsafe {
            vst1q_u8(rows[0], vreinterpretq_u8_s32(a.0));
            vst1q_u8(rows[1], vreinterpretq_u8_s32(a.1));
        }
    }

    #[inline(always)]
    unsafe fn i_load(self, p: *const u8) -> I {
        // SAFETY: 32 bytes are readable by the caller's contract.
        unsafe {
            I(
                vreinterpretq_s32_u8(vld1q_u8(p)),
                vreinterpretq_s32_u8(vld1q_u8(p.add(16))),
            )
        }
    }

    #[inline(always)]
    unsafe fn i_store(self, p: *mut u8, a: I) {
        // SAFETY: 32 bytes are writable by the caller's contract.
        unsafe {
            vst1q_u8(p, vreinterpretq_u8_s32(a.0));
            vst1q_u8(p.add(16), vreinterpretq_u8_s32(a.1));
        }
    }

    #[inline(always)]
    unsafe fn i_row(self, p: *const u8) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe {
            let row = vreinterpretq_s32_u8(vld1q_u8(p));
            I(row, row)
        }
    }

    #[inline(always)]
    unsafe fn i_load_u16(self, p: *const u8) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe {
            let x = vreinterpretq_u16_u8(vld1q_u8(p));
            I(
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))),
                vreinterpretq_s32_u32(vmovl_high_u16(x)),
            )
        }
    }

    #[inline(always)]
    unsafe fn i_load_panels(self, p: *const u8, _: usize) -> I {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { self.i_load_u16(p) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        op!(F(vdupq_n_f32(x), vdupq_n_f32(x)))
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        op!(F(vaddq_f32(a.0, b.0), vaddq_f32(a.1, b.1)))
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        op!(F(vsubq_f32(a.0, b.0), vsubq_f32(a.1, b.1)))
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        op!(F(vmulq_f32(a.0, b.0), vmulq_f32(a.1, b.1)))
    }

    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        op!(F(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1)))
    }

    #[inline(always)]
    fn mantissas(self, n: I) -> F {
        static SIXTEENTHS: [f32; 16] = powers(4);
        static REST: [f32; 4] = powers(1);
        op!({
            let table = vld1q_u8_x4(SIXTEENTHS.as_ptr().cast());
            let bytes = |x: int32x4_t| {
                let index = vandq_s32(vshrq_n_s32::<2>(x), vdupq_n_s32(15));
                vreinterpretq_f32_u8(vqtbl4q_u8(table, bytes_of(index)))
            };
            let high = F(bytes(n.0), bytes(n.1));
            let rest = vld1q_f32(REST.as_ptr());
            self.mul(high, self.pick(F(rest, rest), n))
        })
    }

    #[inline(always)]
    fn pick(self, four: F, index: I) -> F {
        op!({
            let pick = |four, index| {
                let index = vandq_s32(index, vdupq_n_s32(3));
                let bytes = vqtbl1q_u8(vreinterpretq_u8_f32(four), bytes_of(index));
                vreinterpretq_f32_u8(bytes)
            };
            F(pick(four.0, index.0), pick(four.1, index.1))
        })
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        op!(F(vmaxq_f32(a.0, b.0), vmaxq_f32(a.1, b.1)))
    }

    #[inline(always)]
    fn abs(self, a: F) -> F {
        op!(F(vabsq_f32(a.0), vabsq_f32(a.1)))
    }

    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        op!(vmaxvq_f32(vmaxq_f32(a.0, a.1)))
    }

    #[inline(always)]
    fn ftz(self, a: F) -> F {
        op!({
            let f = |x| {
                // All bits of a number that stays, the sign alone of one that does not.
                let tiny = vcaltq_f32(x, vdupq_n_f32(f32::MIN_POSITIVE));
                let keep = vorrq_u32(vmvnq_u32(tiny), vdupq_n_u32(1 << 31));
                vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), keep))
            };
            F(f(a.0), f(a.1))
        })
    }

    #[inline(always)]
    fn to_f(self, a: I) -> F {
        op!(F(vcvtq_f32_s32(a.0), vcvtq_f32_s32(a.1)))
    }

    #[inline(always)]
    fn bits(self, a: F) -> I {
        op!(I(vreinterpretq_s32_f32(a.0), vreinterpretq_s32_f32(a.1)))
    }

    #[inline(always)]
    fn of_bits(self, a: I) -> F {
        op!(F(vreinterpretq_f32_s32(a.0), vreinterpretq_f32_s32(a.1)))
    }

    #[inline(always)]
    fn any_negative(self, a: I) -> bool {
        op!(vminvq_s32(vminq_s32(a.0, a.1)) < 0)
    }

    #[inline(always)]
    fn f16_to_f(self, a: I) -> F {
        // The f16 vector types are not stable; `half` converts exactly.
        self.f_from(arrays::f16_to_f(self.i_array(a)))
    }

    #[inline(always)]
    fn keep(self, a: F, start: i32, end: i32, other: f32) -> F {
        self.f_from(arrays::keep(self.f_array(a), start, end, other))
    }

    #[inline(always)]
    fn rows(self, v: [F; 4]) -> F {
        op!({
            // Lanes 0 + 2 and 1 + 3 first.
            let halves = |a, b| {
                let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
                vaddq_f32(
                    vreinterpretq_f32_f64(vzip1q_f64(a, b)),
                    vreinterpretq_f32_f64(vzip2q_f64(a, b)),
                )
            };
            let two = |a: F, b: F| vpaddq_f32(halves(a.0, a.1), halves(b.0, b.1));
            F(two(v[0], v[1]), two(v[2], v[3]))
        })
    }

    #[inline(always)]
    fn row_pairs(self, a: F, b: F) -> F {
        op!(F(vaddq_f32(a.0, a.1), vaddq_f32(b.0, b.1)))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { F(vld1q_f32(p), vld1q_f32(p.add(4))) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: F) {
        // SAFETY: 8 floats are writable by the caller's contract.
        unsafe {
            vst1q_f32(p, a.0);
            vst1q_f32(p.add(4), a.1);
        }
    }

    #[inline(always)]
    unsafe fn load_8(self, p: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { self.load(p) }
    }

    #[inline(always)]
    unsafe fn load_panels(self, a: *const f32, _: *const f32) -> F {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { self.load(a) }
    }
}
