//! AVX2: two rows a vector.

use std::arch::x86_64::*;

use super::{Dot, Dot16, Simd, splat_at, weight_integers};
use crate::grid::powers;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Avx2(())
    }
}

/// A register operation; the value `self` proves that the machine has it.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: an `Avx2` exists only where its instructions do.
        unsafe { $e }
    }};
}

/// Lane 4·row + j goes to j·2 + row.
macro_rules! order {
    () => {
        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)
    };
}

impl Simd for Avx2 {
    const ROWS: usize = 2;
    type I = __m256i;
    type F = __m256;

    #[inline(always)]
    fn i_splat(self, x: i32) -> __m256i {
        op!(_mm256_set1_epi32(x))
    }

    #[inline(always)]
    fn i_add(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn i_sub(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn i_and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn i_xor(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn i_shl<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_slli_epi32::<N>(a))
    }

    #[inline(always)]
    fn i_shr<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srli_epi32::<N>(a))
    }

    #[inline(always)]
    fn i_sar<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srai_epi32::<N>(a))
    }

    #[inline(always)]
    fn i_sum(self, a: __m256i) -> i32 {
        op!({
            let x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }

    #[inline(always)]
    fn i_pairs(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(
            _mm256_unpacklo_epi64(a, b),
            _mm256_unpackhi_epi64(a, b)
        ))
    }

    #[inline(always)]
    fn i_join(self, a: __m256i, b: __m256i) -> __m256i {
        op!({
            let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
            let sum = _mm256_add_epi32(_mm256_castps_si256(even), _mm256_castps_si256(odd));
            _mm256_permutevar8x32_epi32(sum, order!())
        })
    }

    #[inline(always)]
    fn i_exchange(self, a: __m256i, _: usize) -> __m256i {
        op!(_mm256_permute2x128_si256::<0x01>(a, a))
    }

    #[inline(always)]
    fn h_shl<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_slli_epi16::<N>(a))
    }

    #[inline(always)]
    fn h_shr<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srli_epi16::<N>(a))
    }

    #[inline(always)]
    fn h_sar<const N: i32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srai_epi16::<N>(a))
    }

    #[inline(always)]
    fn h_dot(self, acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(acc, _mm256_madd_epi16(a, b)))
    }

    #[inline(always)]
    fn zip_8(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        op!([_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)])
    }

    #[inline(always)]
    fn zip_16(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        op!([_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)])
    }

    #[inline(always)]
    fn zip_32(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        op!([_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)])
    }

    #[inline(always)]
    fn zip_64(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        op!([_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)])
    }

    #[inline(always)]
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> __m256i {
        // SAFETY: 16 bytes are readable at each by the caller's contract.
        unsafe {
            let low = _mm256_castsi128_si256(_mm_loadu_si128(rows[0].cast()));
            _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(rows[1].cast()))
        }
    }

    #[inline(always)]
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], a: __m256i) {
        // SAFETY: 16 bytes are writable at the first two by the caller's contract.
        unsafe {
            _mm_storeu_si128(rows[0].cast(), _mm256_castsi256_si128(a));
            _mm_storeu_si128(rows[1].cast(), _mm256_extracti128_si256::<1>(a));
        }
    }

    #[inline(always)]
    unsafe fn i_load(self, p: *const u8) -> __m256i {
        // SAFETY: 32 bytes are readable by the caller's contract.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn i_store(self, p: *mut u8, a: __m256i) {
        // SAFETY: 32 bytes are writable by the caller's contract.
        unsafe { _mm256_storeu_si256(p.cast(), a) }
    }

    #[inline(always)]
    unsafe fn i_row(self, p: *const u8) -> __m256i {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn i_load_u16(self, p: *const u8) -> __m256i {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn i_load_panels(self, p: *const u8, _: usize) -> __m256i {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { self.i_load_u16(p) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn mantissas(self, n: __m256i) -> __m256 {
        static EIGHTHS: [f32; 8] = powers(8);
        static REST: [f32; 8] = powers(1);
        op!({
            // An index is its lane's lowest three bits.
            let high = _mm256_loadu_ps(EIGHTHS.as_ptr());
            let high = _mm256_permutevar8x32_ps(high, self.i_shr::<3>(n));
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(REST.as_ptr()), n);
            self.mul(high, low)
        })
    }

    #[inline(always)]
    fn pick(self, four: __m256, index: __m256i) -> __m256 {
        op!(_mm256_permutevar_ps(four, index))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        op!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }

    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        op!({
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }

    #[inline(always)]
    fn ftz(self, a: __m256) -> __m256 {
        op!({
            let least = _mm256_set1_ps(f32::MIN_POSITIVE);
            let stays = _mm256_cmp_ps::<_CMP_NLT_UQ>(self.abs(a), least);
            // All bits of a number that stays, the sign alone of one that does not.
            _mm256_and_ps(a, _mm256_or_ps(_mm256_set1_ps(-0.0), stays))
        })
    }

    #[inline(always)]
    fn to_f(self, a: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn bits(self, a: __m256) -> __m256i {
        op!(_mm256_castps_si256(a))
    }

    #[inline(always)]
    fn of_bits(self, a: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn any_negative(self, a: __m256i) -> bool {
        op!(_mm256_movemask_ps(_mm256_castsi256_ps(a)) != 0)
    }

    #[inline(always)]
    fn to_half(self, a: __m256) -> __m256 {
        op!(_mm256_cvtph_ps(
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)
        ))
    }

    #[inline(always)]
    fn f16_to_f(self, a: __m256i) -> __m256 {
        op!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m256 {
        // SAFETY: 16 bytes are readable by the caller's contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    fn keep(self, a: __m256, start: i32, end: i32, other: f32) -> __m256 {
        op!({
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(start), lane);
            let inside =
                _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
            _mm256_blendv_ps(_mm256_set1_ps(other), a, _mm256_castsi256_ps(inside))
        })
    }

    #[inline(always)]
    fn rows(self, v: [__m256; 4]) -> __m256 {
        op!({
            let [a, b, c, d] = [
                _mm256_castps_pd(v[0]),
                _mm256_castps_pd(v[1]),
                _mm256_castps_pd(v[2]),
                _mm256_castps_pd(v[3]),
            ];
            let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            let ab = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
            let (low, high) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
            let cd = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(ab, cd);
            let odd = _mm256_shuffle_ps::<0b11_01_11_01>(ab, cd);
            _mm256_permutevar8x32_ps(_mm256_add_ps(even, odd), order!())
        })
    }

    #[inline(always)]
    fn row_pairs(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(
            _mm256_permute2f128_ps::<0x20>(a, b),
            _mm256_permute2f128_ps::<0x31>(a, b),
        ))
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m256) {
        // SAFETY: 8 floats are writable by the caller's contract.
        unsafe { _mm256_storeu_ps(p, a) }
    }

    #[inline(always)]
    unsafe fn load_8(self, p: *const f32) -> __m256 {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_panels(self, a: *const f32, _: *const f32) -> __m256 {
        // SAFETY: 8 floats are readable by the caller's contract.
        unsafe { _mm256_loadu_ps(a) }
    }
}

/// Products by bytes where codes have 4 bits, whose sums over a tile or 128 dims fit 16 bits; by 16 bits where they have 8.
///
/// An operand is that of [`Dot16`], then its 16 values as bytes.
#[derive(Clone, Copy)]
pub(crate) struct Dot8(Dot16<Avx2>);

impl Dot8 {
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: the caller's contract.
        Dot8(Dot16(unsafe { Avx2::new() }))
    }
}

/// Where the bytes of an operand begin.
const BYTES: usize = 32;

impl Dot for Dot8 {
    type S = Avx2;
    const K_BIAS: i32 = 0;
    const OPERAND: usize = 48;
    const AT_ONCE: usize = 1;
    // 8 pairs of a query's values and nibbles: at most 8·2·127·15. A tile's 4 of weights: 4·2·255·15.
    const RUN: usize = 8;
    const WIDENS: bool = true;
    type Codes = [__m256i; 2];
    type Operand = [__m256i; 2];
    type Nibbles = __m256i;
    type NibbleOperand = __m256i;

    #[inline(always)]
    fn simd(self) -> Avx2 {
        self.0.0
    }

    #[inline(always)]
    fn none(self) -> [__m256i; 2] {
        self.0.none()
    }

    #[inline(always)]
    fn k_bytes(self, raw: __m256i) -> [__m256i; 2] {
        self.0.k_bytes(raw)
    }

    #[inline(always)]
    fn v_bytes(self, raw: __m256i) -> [__m256i; 2] {
        self.0.v_bytes(raw)
    }

    #[inline(always)]
    fn no_nibbles(self) -> __m256i {
        self.simd().i_splat(0)
    }

    #[inline(always)]
    fn low(self, raw: __m256i) -> __m256i {
        self.simd().i_and(raw, self.simd().i_splat(0x0f0f_0f0f))
    }

    #[inline(always)]
    fn high(self, raw: __m256i) -> __m256i {
        self.low(self.simd().h_shr::<4>(raw))
    }

    #[inline(always)]
    unsafe fn operand(self, p: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe { self.0.operand(p) }
    }

    #[inline(always)]
    unsafe fn nibble_operand(self, p: *const u8) -> __m256i {
        // SAFETY: the caller's contract.
        unsafe { self.simd().i_row(p.add(BYTES)) }
    }

    #[inline(always)]
    unsafe fn lane_operand(self, p: *const u8, i: usize) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe { self.0.lane_operand(p, i) }
    }

    #[inline(always)]
    unsafe fn lane_nibble_operand(self, p: *const u8, i: usize) -> __m256i {
        // SAFETY: the caller's contract.
        unsafe { splat_at(self.simd(), p.add(BYTES + 4 * i)) }
    }

    #[inline(always)]
    fn k_dot(self, acc: __m256i, codes: [__m256i; 2], operand: [__m256i; 2]) -> __m256i {
        self.0.k_dot(acc, codes, operand)
    }

    #[inline(always)]
    fn v_dot(self, acc: __m256i, codes: [__m256i; 2], operand: [__m256i; 2]) -> __m256i {
        self.0.v_dot(acc, codes, operand)
    }

    #[inline(always)]
    fn k_nibbles(self, run: __m256i, codes: __m256i, operand: __m256i) -> __m256i {
        op!(_mm256_add_epi16(run, _mm256_maddubs_epi16(codes, operand)))
    }

    #[inline(always)]
    fn v_nibbles(self, run: __m256i, codes: __m256i, operand: __m256i) -> __m256i {
        op!(_mm256_add_epi16(run, _mm256_maddubs_epi16(operand, codes)))
    }

    #[inline(always)]
    fn widen(self, acc: __m256i, run: __m256i) -> __m256i {
        self.simd()
            .h_dot(acc, run, self.simd().i_splat(0x0001_0001))
    }

    #[inline(always)]
    unsafe fn k_operand(self, q: *const i32, out: *mut u8) {
        // SAFETY: 16 integers are readable at `q`, 48 bytes writable at `out`: the caller's contract.
        unsafe {
            self.0.k_operand(q, out);
            for i in 0..16 {
                *out.add(BYTES + i) = *q.add(i) as u8;
            }
        }
    }

    #[inline(always)]
    unsafe fn v_operands(self, w: *mut f32, out: *mut u8) -> __m256i {
        // SAFETY: the caller's contract.
        let sum = unsafe { weight_integers(self.simd(), w) };
        let w = w.cast::<i32>();
        for panel in 0..4 {
            // SAFETY: 64 integers are readable at `w`, four operands writable at `out`: the caller's contract; a `Dot8` exists only
            // where its instructions do.
            unsafe {
                let (from, to) = (w.add(16 * panel), out.add(Self::OPERAND * panel));
                let (a, b) = (
                    _mm256_loadu_si256(from.cast()),
                    _mm256_loadu_si256(from.add(8).cast()),
                );
                // Tokens i and i + 8 to a lane; even tokens to the first half, odd ones to the second.
                let pairs = _mm256_or_si256(a, _mm256_slli_epi32::<16>(b));
                let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
                let pairs = _mm256_permutevar8x32_epi32(pairs, order);
                _mm256_storeu_si256(to.cast(), pairs);
                let (even, odd) = (
                    _mm256_castsi256_si128(pairs),
                    _mm256_extracti128_si256::<1>(pairs),
                );
                let bytes = _mm_or_si128(even, _mm_slli_epi32::<8>(odd));
                _mm_storeu_si128(to.add(BYTES).cast(), bytes);
            }
        }
        sum
    }
}
