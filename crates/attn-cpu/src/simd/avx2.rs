//! AVX2: two rows a vector.

use std::arch::x86_64::*;

use super::Simd;

/// AVX2 and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2 and F16C.
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
            let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(self.abs(a), _mm256_set1_ps(f32::MIN_POSITIVE));
            // All bits of a number that stays, the sign alone of one that does not.
            _mm256_and_ps(
                a,
                _mm256_or_ps(
                    _mm256_set1_ps(-0.0),
                    _mm256_xor_ps(tiny, _mm256_castsi256_ps(_mm256_set1_epi32(-1))),
                ),
            )
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
    fn f16_to_f(self, a: __m256i) -> __m256 {
        op!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        })
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
