//! The grid of the integer arithmetic (section 5 of docs/arithmetic.md) over vectors: powers of two, V's scales, and the inverses of steps.
//!
//! `attn_core::grid` defines them in f64. A number on the grid is held as its sum with [`SCORE_BASE`], whose bits count 64ths.

use attn_core::grid::{INVERSES, SCORE_BASE};

use crate::simd::Simd;

/// 2^(n/64), to the nearest.
pub(crate) static MANTISSAS: [f32; 64] = {
    const BITS: [u32; 64] = [
        0x3F80_0000,
        0x3F81_64D2,
        0x3F82_CD87,
        0x3F84_3A29,
        0x3F85_AAC3,
        0x3F87_1F62,
        0x3F88_980F,
        0x3F8A_14D5,
        0x3F8B_95C2,
        0x3F8D_1ADF,
        0x3F8E_A43A,
        0x3F90_31DC,
        0x3F91_C3D3,
        0x3F93_5A2B,
        0x3F94_F4F0,
        0x3F96_942D,
        0x3F98_37F0,
        0x3F99_E046,
        0x3F9B_8D3A,
        0x3F9D_3EDA,
        0x3F9E_F532,
        0x3FA0_B051,
        0x3FA2_7043,
        0x3FA4_3516,
        0x3FA5_FED7,
        0x3FA7_CD94,
        0x3FA9_A15B,
        0x3FAB_7A3A,
        0x3FAD_583F,
        0x3FAF_3B79,
        0x3FB1_23F6,
        0x3FB3_11C4,
        0x3FB5_04F3,
        0x3FB6_FD92,
        0x3FB8_FBAF,
        0x3FBA_FF5B,
        0x3FBD_08A4,
        0x3FBF_179A,
        0x3FC1_2C4D,
        0x3FC3_46CD,
        0x3FC5_672A,
        0x3FC7_8D75,
        0x3FC9_B9BE,
        0x3FCB_EC15,
        0x3FCE_248C,
        0x3FD0_6334,
        0x3FD2_A81E,
        0x3FD4_F35B,
        0x3FD7_44FD,
        0x3FD9_9D16,
        0x3FDB_FBB8,
        0x3FDE_60F5,
        0x3FE0_CCDF,
        0x3FE3_3F89,
        0x3FE5_B907,
        0x3FE8_396A,
        0x3FEA_C0C7,
        0x3FED_4F30,
        0x3FEF_E4BA,
        0x3FF2_8177,
        0x3FF5_257D,
        0x3FF7_D0DF,
        0x3FFA_83B3,
        0x3FFD_3E0C,
    ];
    let (mut all, mut n) = ([0.0; 64], 0);
    while n < 64 {
        all[n] = f32::from_bits(BITS[n]);
        n += 1;
    }
    all
};

/// 2^(n·`step`/64) for n = 0 … N − 1: the tables whose products are the mantissas, where an instruction reads N entries.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const fn powers<const N: usize>(step: usize) -> [f32; N] {
    let (mut all, mut n) = ([0.0; N], 0);
    while n < N {
        all[n] = MANTISSAS[n * step];
        n += 1;
    }
    all
}

/// Coefficients c5…c1 of log2(1 + u) for √½ − 1 ≤ u < √2 − 1. The polynomial errs by 1.5e-5, and turns no rounding to a 64th of any of the 1024
/// mantissas of f16: where one is near a boundary, its error has the other sign.
const LOG2: [f32; 5] = [
    f32::from_bits(0x3E81_3E5B),
    f32::from_bits(0xBEC9_F5A5),
    f32::from_bits(0x3EF9_2FE5),
    f32::from_bits(0xBF38_6240),
    f32::from_bits(0x3FB8_A666),
];

/// √½ as f32: mantissas are taken from here to its double.
const ROOT: i32 = 0x3F35_04F3;

/// 2^(y − [`SCORE_BASE`]) of a y on the grid, to 3·2^-24; powers of two exactly.
#[inline(always)]
pub(crate) fn power<S: Simd>(s: S, y: S::F) -> S::F {
    let points = s.bits(y);
    // The base counts a multiple of 512 units, which shifts out.
    let exponent = s.i_shl::<23>(s.i_shr::<6>(points));
    s.of_bits(s.i_add(s.bits(s.mantissas(points)), exponent))
}

/// Scales of V, floats of f16 numbers, as they are read: the nearest power 2^(n/64), or 0.
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, x: S::F) -> S::F {
    let bits = s.i_sub(s.bits(x), s.i_splat(ROOT));
    let mantissa = s.i_add(s.i_and(bits, s.i_splat(0x7F_FFFF)), s.i_splat(ROOT));
    let u = s.sub(s.of_bits(mantissa), s.splat(1.0));
    let mut y = s.splat(LOG2[0]);
    for c in &LOG2[1..] {
        y = s.mul_add(y, u, s.splat(*c));
    }
    let nearest = power(s, s.mul_add(y, u, s.splat(SCORE_BASE)));
    let exponent = s.i_and(bits, s.i_splat(!0x7F_FFFF));
    // All bits of a positive number, none of 0.
    let is_positive = s.i_sar::<31>(s.i_sub(s.i_splat(0), s.bits(x)));
    let scale = s.i_add(s.bits(nearest), exponent);
    s.of_bits(s.i_and(scale, is_positive))
}

/// [`step_inverse`](attn_core::grid::step_inverse) of steps.
#[inline(always)]
pub(crate) fn step_inverse<S: Simd>(s: S, step: S::F) -> S::F {
    let bits = s.bits(step);
    // SAFETY: four floats.
    let inverses = unsafe { s.load_four(INVERSES.as_ptr()) };
    let of_mantissa = s.bits(s.pick(inverses, s.i_shr::<21>(bits)));
    let exponent = s.i_and(bits, s.i_splat(0x7F80_0000));
    let one = s.i_splat(1.0f32.to_bits() as i32);
    s.of_bits(s.i_add(of_mantissa, s.i_sub(one, exponent)))
}

/// The operations of the grid on 16 lanes, for the tests of each instruction set.
pub struct Operations {
    /// `a·step + base`, rounded once.
    pub sums: [f32; 16],
    /// 2^(`base` − [`SCORE_BASE`]).
    pub powers: [f32; 16],
    /// The powers, rounded to f16.
    pub halves: [f32; 16],
    /// `a`, an f16 number, as a scale of V.
    pub scales: [f32; 16],
    /// What weights are multiplied by to count steps of `step`.
    pub inverses: [f32; 16],
}

/// Computes the operations of `a`, `step` and `base`.
#[inline(always)]
pub(crate) fn operations<S: Simd>(s: S, [a, step, base]: &[[f32; 16]; 3]) -> Operations {
    let none = [0.0; 16];
    let mut all = Operations {
        sums: none,
        powers: none,
        halves: none,
        scales: none,
        inverses: none,
    };
    for lane in (0..16).step_by(S::LANES) {
        // SAFETY: LANES divides 16.
        unsafe {
            let [a, step, base] = [a, step, base].map(|x| s.load(x.as_ptr().add(lane)));
            let put = |to: &mut [f32; 16], x: S::F| s.store(to.as_mut_ptr().add(lane), x);
            put(&mut all.sums, s.grid_sum(a, step, base));
            let p = power(s, base);
            put(&mut all.powers, p);
            put(&mut all.halves, s.to_half(p));
            put(&mut all.scales, scale(s, a));
            put(&mut all.inverses, step_inverse(s, step));
        }
    }
    all
}
