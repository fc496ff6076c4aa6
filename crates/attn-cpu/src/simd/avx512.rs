//! AVX-512: four rows a vector, and the byte dot product.

use std::arch::x86_64::*;

use super::{Dot, Simd, splat_at};
use crate::grid::powers;

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has AVX2, FMA, F16C and AVX-512 F, BW, DQ, VL.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Avx512(())
    }
}

/// A register operation; the value `self` proves that the machine has it.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: an `Avx512` exists only where its instructions do.
        unsafe { $e }
    }};
}

impl Simd for Avx512 {
    const ROWS: usize = 4;
    type I = __m512i;
    type F = __m512;

    #[inline(always)]
    fn i_splat(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn i_add(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn i_sub(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn i_and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn i_xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn i_shl<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn i_shr<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_srl_epi32(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn i_sar<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_sra_epi32(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn i_sum(self, a: __m512i) -> i32 {
        op!(_mm512_reduce_add_epi32(a))
    }

    #[inline(always)]
    fn i_pairs(self, a: __m512i, b: __m512i) -> __m512i {
        op!({
            // A blend and a shuffle: shuffles have fewer of the core's ports than blends.
            let same = _mm512_mask_blend_epi64(0b1010_1010, a, b);
            let (a, b) = (_mm512_castsi512_pd(a), _mm512_castsi512_pd(b));
            let other = _mm512_castpd_si512(_mm512_shuffle_pd::<0b0101_0101>(a, b));
            _mm512_add_epi32(same, other)
        })
    }

    #[inline(always)]
    fn i_join(self, a: __m512i, b: __m512i) -> __m512i {
        op!({
            let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a, b);
            let sum = _mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd));
            // Lane 4·row + i holds a row of the vector that came i-th.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, sum)
        })
    }

    #[inline(always)]
    fn i_exchange(self, a: __m512i, by: usize) -> __m512i {
        op!(match by {
            1 => _mm512_shuffle_i32x4::<0b10_11_00_01>(a, a),
            _ => _mm512_shuffle_i32x4::<0b01_00_11_10>(a, a),
        })
    }

    #[inline(always)]
    fn h_shl<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_sll_epi16(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn h_shr<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_srl_epi16(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn h_sar<const N: i32>(self, a: __m512i) -> __m512i {
        op!(_mm512_sra_epi16(a, _mm_cvtsi32_si128(N)))
    }

    #[inline(always)]
    fn h_dot(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(acc, _mm512_madd_epi16(a, b)))
    }

    #[inline(always)]
    fn zip_8(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        op!([_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)])
    }

    #[inline(always)]
    fn zip_16(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        op!([_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)])
    }

    #[inline(always)]
    fn zip_32(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        op!([_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)])
    }

    #[inline(always)]
    fn zip_64(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        op!([_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)])
    }

    #[inline(always)]
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> __m512i {
        // SAFETY: 16 bytes are readable at each by the caller's contract.
        unsafe {
            let [a, b, c, d] = [
                _mm_loadu_si128(rows[0].cast()),
                _mm_loadu_si128(rows[1].cast()),
                _mm_loadu_si128(rows[2].cast()),
                _mm_loadu_si128(rows[3].cast()),
            ];
            let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
            let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    #[inline(always)]
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], a: __m512i) {
        // SAFETY: 16 bytes are writable at each by the caller's contract.
        unsafe {
            _mm_storeu_si128(rows[0].cast(), _mm512_castsi512_si128(a));
            _mm_storeu_si128(rows[1].cast(), _mm512_extracti32x4_epi32::<1>(a));
            _mm_storeu_si128(rows[2].cast(), _mm512_extracti32x4_epi32::<2>(a));
            _mm_storeu_si128(rows[3].cast(), _mm512_extracti32x4_epi32::<3>(a));
        }
    }

    #[inline(always)]
    unsafe fn i_load(self, p: *const u8) -> __m512i {
        // SAFETY: 64 bytes are readable by the caller's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn i_store(self, p: *mut u8, a: __m512i) {
        // SAFETY: 64 bytes are writable by the caller's contract.
        unsafe { _mm512_storeu_si512(p.cast(), a) }
    }

    #[inline(always)]
    unsafe fn i_row(self, p: *const u8) -> __m512i {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn i_load_u16(self, p: *const u8) -> __m512i {
        // SAFETY: 32 bytes are readable by the caller's contract.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn i_load_panels(self, p: *const u8, stride: usize) -> __m512i {
        // SAFETY: 16 bytes are readable at each of two panels by the caller's contract.
        unsafe {
            let (a, b) = (
                _mm_loadu_si128(p.cast()),
                _mm_loadu_si128(p.add(stride).cast()),
            );
            _mm512_cvtepu16_epi32(_mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b))
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn mantissas(self, n: __m512i) -> __m512 {
        static SIXTEENTHS: [f32; 16] = powers(4);
        static REST: [f32; 4] = powers(1);
        op!({
            // An index is its lane's lowest four bits, or two.
            let high = _mm512_loadu_ps(SIXTEENTHS.as_ptr());
            let high = _mm512_permutexvar_ps(self.i_shr::<2>(n), high);
            self.mul(high, self.pick(self.load_four(REST.as_ptr()), n))
        })
    }

    #[inline(always)]
    fn pick(self, four: __m512, index: __m512i) -> __m512 {
        op!(_mm512_permutevar_ps(four, index))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        op!(_mm512_abs_ps(a))
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        op!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn ftz(self, a: __m512) -> __m512 {
        op!({
            // Category 0x20 is "subnormal".
            let tiny = _mm512_fpclass_ps_mask::<0x20>(a);
            _mm512_mask_and_ps(a, tiny, a, _mm512_set1_ps(-0.0))
        })
    }

    #[inline(always)]
    fn to_f(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        op!(_mm512_castps_si512(a))
    }

    #[inline(always)]
    fn of_bits(self, a: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    fn any_negative(self, a: __m512i) -> bool {
        op!(_mm512_movepi32_mask(a) != 0)
    }

    #[inline(always)]
    fn to_half(self, a: __m512) -> __m512 {
        op!(_mm512_cvtph_ps(
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)
        ))
    }

    #[inline(always)]
    fn f16_to_f(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))
    }

    #[inline(always)]
    fn keep(self, a: __m512, start: i32, end: i32, other: f32) -> __m512 {
        op!({
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(start))
                & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
            _mm512_mask_blend_ps(inside, _mm512_set1_ps(other), a)
        })
    }

    #[inline(always)]
    fn rows(self, v: [__m512; 4]) -> __m512 {
        op!({
            let [a, b, c, d] = [
                _mm512_castps_pd(v[0]),
                _mm512_castps_pd(v[1]),
                _mm512_castps_pd(v[2]),
                _mm512_castps_pd(v[3]),
            ];
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            let ab = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let (low, high) = (_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
            let cd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let odd = _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd);
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_ps(order, _mm512_add_ps(even, odd))
        })
    }

    #[inline(always)]
    fn row_pairs(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
        ))
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: 16 floats are readable by the caller's contract.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m512) {
        // SAFETY: 16 floats are writable by the caller's contract.
        unsafe { _mm512_storeu_ps(p, a) }
    }

    #[inline(always)]
    unsafe fn load_8(self, p: *const f32) -> __m512 {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { _mm512_broadcast_f32x8(_mm256_loadu_ps(p)) }
    }

    #[inline(always)]
    unsafe fn load_panels(self, a: *const f32, b: *const f32) -> __m512 {
        // SAFETY: 8 floats are readable at each by the caller's contract.
        unsafe {
            let low = _mm512_castps256_ps512(_mm256_loadu_ps(a));
            _mm512_insertf32x8::<1>(low, _mm256_loadu_ps(b))
        }
    }
}

/// The byte dot product: values of a byte, codes as they lie.
///
/// `vpdpbusd` multiplies unsigned by signed bytes. K's int8 codes become unsigned by `^ 0x80`, queries are signed; weights are unsigned,
/// V's codes signed. Int4 codes are both.
#[derive(Clone, Copy)]
pub(crate) struct Vnni(Avx512);

impl Vnni {
    /// # Safety
    /// The machine has what [`Avx512::new`] requires, and AVX-512 VNNI.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: the caller's contract.
        Vnni(unsafe { Avx512::new() })
    }
}

impl Dot for Vnni {
    type S = Avx512;
    const K_BIAS: i32 = 128;
    const OPERAND: usize = 16;
    const AT_ONCE: usize = 4;
    const RUN: usize = 16;
    const WIDENS: bool = false;
    type Codes = __m512i;
    type Operand = __m512i;
    type Nibbles = __m512i;
    type NibbleOperand = __m512i;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn none(self) -> __m512i {
        self.0.i_splat(0)
    }

    #[inline(always)]
    fn k_bytes(self, raw: __m512i) -> __m512i {
        self.0.i_xor(raw, self.0.i_splat(0x8080_8080u32 as i32))
    }

    #[inline(always)]
    fn v_bytes(self, raw: __m512i) -> __m512i {
        raw
    }

    #[inline(always)]
    fn no_nibbles(self) -> __m512i {
        self.none()
    }

    #[inline(always)]
    fn low(self, raw: __m512i) -> __m512i {
        self.0.i_and(raw, self.0.i_splat(0x0f0f_0f0f))
    }

    #[inline(always)]
    fn high(self, raw: __m512i) -> __m512i {
        self.low(self.0.h_shr::<4>(raw))
    }

    #[inline(always)]
    unsafe fn operand(self, p: *const u8) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { self.0.i_row(p) }
    }

    #[inline(always)]
    unsafe fn lane_operand(self, p: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { splat_at(self.0, p.add(4 * i)) }
    }

    #[inline(always)]
    unsafe fn lane_nibble_operand(self, p: *const u8, i: usize) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { self.lane_operand(p, i) }
    }

    #[inline(always)]
    fn k_dot(self, acc: __m512i, codes: __m512i, operand: __m512i) -> __m512i {
        // SAFETY: a `Vnni` exists only where its instructions do.
        unsafe { _mm512_dpbusd_epi32(acc, codes, operand) }
    }

    #[inline(always)]
    fn v_dot(self, acc: __m512i, codes: __m512i, operand: __m512i) -> __m512i {
        // SAFETY: a `Vnni` exists only where its instructions do.
        unsafe { _mm512_dpbusd_epi32(acc, operand, codes) }
    }

    #[inline(always)]
    unsafe fn nibble_operand(self, p: *const u8) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { self.operand(p) }
    }

    #[inline(always)]
    fn k_nibbles(self, run: __m512i, codes: __m512i, operand: __m512i) -> __m512i {
        self.k_dot(run, codes, operand)
    }

    #[inline(always)]
    fn v_nibbles(self, run: __m512i, codes: __m512i, operand: __m512i) -> __m512i {
        self.v_dot(run, codes, operand)
    }

    #[inline(always)]
    fn widen(self, acc: __m512i, run: __m512i) -> __m512i {
        self.0.i_add(acc, run)
    }

    #[inline(always)]
    unsafe fn k_operand(self, q: *const i32, out: *mut u8) {
        // SAFETY: 16 integers are readable at `q`, 16 bytes writable at `out`: the caller's contract.
        unsafe {
            let q = _mm512_loadu_si512(q.cast());
            _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(q));
        }
    }

    #[inline(always)]
    unsafe fn v_operands(self, w: *mut f32, out: *mut u8) -> __m512i {
        // SAFETY: 64 numbers are readable at `w`, 64 bytes writable at `out`: the caller's contract; a `Vnni` exists only where its
        // instructions do.
        unsafe {
            // Of panel i, byte 1 of the four tokens of each row to lane i of the row.
            let (take, mut all) = (_mm512_set1_epi32(0x0d09_0501), _mm512_setzero_si512());
            for panel in 0..4 {
                let lanes = 0x000f_000f_000f_000f << (4 * panel);
                let w = _mm512_loadu_si512(w.add(16 * panel).cast());
                all = _mm512_mask_shuffle_epi8(all, lanes, w, take);
            }
            // Then the pairs of a panel's tokens in the order of the slots, which is 0, 4, 1, 5, 2, 6, 3, 7.
            let order = _mm512_loadu_si512(PAIRS.as_ptr().cast());
            let bytes = _mm512_permutexvar_epi16(order, all);
            _mm512_storeu_si512(out.cast(), bytes);
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, _mm512_set1_epi8(1))
        }
    }
}

/// Where the 32 pairs of a tile's weights come from: pair 2·i + j of row r is that of tokens 4·r + 2·j of panel i.
static PAIRS: [i16; 32] = {
    let (mut order, mut at) = ([0; 32], 0);
    while at < 32 {
        let (panel, slot) = (at / 8, at % 8);
        let pair = slot / 2 + slot % 2 * 4;
        order[at] = (pair / 2 * 8 + 2 * panel + pair % 2) as i16;
        at += 1;
    }
    order
};
