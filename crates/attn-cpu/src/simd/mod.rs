//! Vectors of one instruction set, and the dot products of codes with queries or weights.
//!
//! The kernels (`crate::integer`, `crate::float`) are written once over [`Simd`] and [`Dot`] and compiled once per [`Isa`]
//! inside a function that enables its features. A vector is [`Simd::ROWS`] rows of 16 bytes: that many tokens of a panel of K,
//! or dims of a panel of V. A value of a `Simd` type exists only where the machine has its instructions, so its methods on
//! registers are safe. None has an estimate, and those whose roundings may differ ([`Simd::mul_add`], [`Simd::mantissas`]) serve where no bit of the answer
//! shows it: the bits are equal everywhere.

use attn_core::arithmetic::{TILE, exp2i};

mod arrays;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod isa;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

pub use isa::Isa;

/// The vector operations that the kernels need; `LANES` = 4·`ROWS` lanes of 32 bits.
pub(crate) trait Simd: Copy {
    /// 16-byte rows in a vector: 2 or 4.
    const ROWS: usize;
    /// Lanes of 32 bits.
    const LANES: usize = 4 * Self::ROWS;
    /// Integers.
    type I: Copy;
    /// Floats.
    type F: Copy;

    fn i_splat(self, x: i32) -> Self::I;
    fn i_add(self, a: Self::I, b: Self::I) -> Self::I;
    fn i_sub(self, a: Self::I, b: Self::I) -> Self::I;
    fn i_and(self, a: Self::I, b: Self::I) -> Self::I;
    fn i_xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn i_shl<const N: i32>(self, a: Self::I) -> Self::I;
    /// Logical.
    fn i_shr<const N: i32>(self, a: Self::I) -> Self::I;
    /// Arithmetic.
    fn i_sar<const N: i32>(self, a: Self::I) -> Self::I;
    fn i_sum(self, a: Self::I) -> i32;
    /// The first step of [`i_rows`](Simd::i_rows), for two of its vectors: rows half summed.
    fn i_pairs(self, a: Self::I, b: Self::I) -> Self::I;
    /// The second step: the first two vectors, then the others.
    fn i_join(self, a: Self::I, b: Self::I) -> Self::I;
    /// Sums each row of four lanes: that of row r of `v[j]` comes to lane `j·ROWS + r`.
    #[inline(always)]
    fn i_rows(self, [a, b, c, d]: [Self::I; 4]) -> Self::I {
        self.i_join(self.i_pairs(a, b), self.i_pairs(c, d))
    }
    /// Rows exchanged: row r comes from row `r ^ by`, `by` a power of two below `ROWS`.
    fn i_exchange(self, a: Self::I, by: usize) -> Self::I;
    /// Lanes of 16 bits.
    fn h_shl<const N: i32>(self, a: Self::I) -> Self::I;
    /// Logical.
    fn h_shr<const N: i32>(self, a: Self::I) -> Self::I;
    /// Arithmetic.
    fn h_sar<const N: i32>(self, a: Self::I) -> Self::I;
    /// `acc` + products of pairs of signed 16-bit lanes.
    fn h_dot(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;

    /// Interleaves bytes inside each row: of the first halves of `a`'s and `b`'s rows, then of the second.
    fn zip_8(self, a: Self::I, b: Self::I) -> [Self::I; 2];
    /// Interleaves two vectors by 16 bits.
    fn zip_16(self, a: Self::I, b: Self::I) -> [Self::I; 2];
    /// Interleaves two vectors by 32 bits.
    fn zip_32(self, a: Self::I, b: Self::I) -> [Self::I; 2];
    /// Interleaves two vectors by 64 bits: first halves together, second halves together.
    fn zip_64(self, a: Self::I, b: Self::I) -> [Self::I; 2];

    /// # Safety
    /// `4·LANES` bytes are readable at `p`.
    unsafe fn i_load(self, p: *const u8) -> Self::I;
    /// Rows from different places, of which the first `ROWS` count.
    ///
    /// # Safety
    /// 16 bytes are readable at each.
    unsafe fn i_load_rows(self, rows: [*const u8; 4]) -> Self::I;
    /// # Safety
    /// 16 bytes are writable at each of the first `ROWS`.
    unsafe fn i_store_rows(self, rows: [*mut u8; 4], a: Self::I);
    /// # Safety
    /// `4·LANES` bytes are writable at `p`.
    unsafe fn i_store(self, p: *mut u8, a: Self::I);
    /// Loads 16 bytes into every row.
    ///
    /// # Safety
    /// 16 bytes are readable at `p`.
    unsafe fn i_row(self, p: *const u8) -> Self::I;
    /// 16-bit lanes, zero-extended.
    ///
    /// # Safety
    /// `2·LANES` bytes are readable at `p`.
    unsafe fn i_load_u16(self, p: *const u8) -> Self::I;
    /// Rows of 8 values of 16 bits from as many panels as fit, zero-extended: `ROWS/2` panels `stride` apart.
    ///
    /// # Safety
    /// 16 bytes are readable at each panel.
    unsafe fn i_load_panels(self, p: *const u8, stride: usize) -> Self::I;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a·b + c`, rounded once or twice: where the product is exact, or where either answer serves.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a·step + base`, rounded once: a score on the grid of `attn_core::grid`, for bases on it. Sums outside of the grid's range may be rounded otherwise, but
    /// stay outside, on their side.
    #[inline(always)]
    fn grid_sum(self, a: Self::F, step: Self::F, base: Self::F) -> Self::F {
        self.mul_add(a, step, base)
    }
    /// 2^(n/64) of the low six bits n of each lane, to 3·2^-24; exactly 1 for 0.
    fn mantissas(self, n: Self::I) -> Self::F;
    /// In each lane, number `index` mod 4 of the four in the lane's row.
    fn pick(self, four: Self::F, index: Self::I) -> Self::F;
    /// The larger of two finite numbers; which zero comes out of two is free.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// Largest lane.
    fn largest(self, a: Self::F) -> f32;
    /// A zero of its sign for a subnormal.
    fn ftz(self, a: Self::F) -> Self::F;
    fn to_f(self, a: Self::I) -> Self::F;
    fn bits(self, a: Self::F) -> Self::I;
    fn of_bits(self, a: Self::I) -> Self::F;
    /// Whether some lane is negative.
    fn any_negative(self, a: Self::I) -> bool;
    /// Rounded to f16, its subnormals kept; for 0 ≤ a ≤ 1.
    #[inline(always)]
    fn to_half(self, a: Self::F) -> Self::F {
        // 2^13 above the exponent, the step of f32 is that of f16; below 2^-14, that of f16 is 2^-24.
        let exponent = self.of_bits(self.i_and(self.bits(a), self.i_splat(0x7F80_0000)));
        let normal = self.max(exponent, self.splat(exp2i(-14)));
        let large = self.of_bits(self.i_add(self.bits(normal), self.i_splat(13 << 23)));
        self.sub(self.add(a, large), large)
    }
    /// The f16 in the low half of each lane.
    fn f16_to_f(self, a: Self::I) -> Self::F;
    /// Floats of 16 bits from memory.
    ///
    /// # Safety
    /// `2·LANES` bytes are readable at `p`.
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> Self::F {
        // SAFETY: the caller's contract.
        unsafe { self.f16_to_f(self.i_load_u16(p)) }
    }
    /// Lanes `start..end`, and `other` in the rest.
    fn keep(self, a: Self::F, start: i32, end: i32, other: f32) -> Self::F;
    /// Sums of rows as `i_rows` gives them, each row summed by halves: lanes 0 + 2, 1 + 3, then both.
    fn rows(self, v: [Self::F; 4]) -> Self::F;
    /// Sums neighbouring rows 2i and 2i + 1 lane by lane: those of `a`, then those of `b`.
    fn row_pairs(self, a: Self::F, b: Self::F) -> Self::F;

    /// # Safety
    /// `LANES` floats are readable at `p`.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// # Safety
    /// `LANES` floats are writable at `p`.
    unsafe fn store(self, p: *mut f32, a: Self::F);
    /// Loads 8 floats into every pair of rows.
    ///
    /// # Safety
    /// 8 floats are readable at `p`.
    unsafe fn load_8(self, p: *const f32) -> Self::F;

    /// Loads floats of `ROWS/2` panels at `a` and `b`; two rows read `a` alone.
    ///
    /// # Safety
    /// 8 floats are readable at each.
    unsafe fn load_panels(self, a: *const f32, b: *const f32) -> Self::F;

    /// Lane `lane`, 0..4, of each row in all of the row's lanes.
    #[inline(always)]
    fn lane(self, a: Self::F, lane: usize) -> Self::F {
        let twice = self.zip_32(self.bits(a), self.bits(a))[lane / 2];
        self.of_bits(self.zip_64(twice, twice)[lane % 2])
    }

    /// Turns the four lanes of each row: lane j of a row of `out[i]` is lane i of that row of `v[j]`.
    #[inline(always)]
    fn i_turn(self, v: [Self::I; 4]) -> [Self::I; 4] {
        let ([a, b], [c, e]) = (self.zip_32(v[0], v[1]), self.zip_32(v[2], v[3]));
        let ([x, y], [z, w]) = (self.zip_64(a, c), self.zip_64(b, e));
        [x, y, z, w]
    }

    /// The sums of all lanes of four vectors: that of `v[j]` comes to lane j of every row.
    #[inline(always)]
    fn i_sums(self, v: [Self::I; 4]) -> Self::I {
        let [x, y, z, w] = self.i_turn(v);
        let mut sum = self.i_add(self.i_add(x, y), self.i_add(z, w));
        let mut by = 1;
        while by < Self::ROWS {
            sum = self.i_add(sum, self.i_exchange(sum, by));
            by *= 2;
        }
        sum
    }

    /// Joins all lanes of each of four vectors by `both`, in an order of its own: those of `v[j]` come to lane j of every row.
    #[inline(always)]
    fn joined(self, v: [Self::F; 4], both: impl Fn(Self::F, Self::F) -> Self::F) -> Self::F {
        let v = [
            self.bits(v[0]),
            self.bits(v[1]),
            self.bits(v[2]),
            self.bits(v[3]),
        ];
        let [x, y, z, w] = self.i_turn(v);
        let xy = both(self.of_bits(x), self.of_bits(y));
        let mut all = both(xy, both(self.of_bits(z), self.of_bits(w)));
        let mut by = 1;
        while by < Self::ROWS {
            let other = self.of_bits(self.i_exchange(self.bits(all), by));
            all = both(all, other);
            by *= 2;
        }
        all
    }

    /// The largest lanes of four vectors.
    #[inline(always)]
    fn maxima(self, v: [Self::F; 4]) -> Self::F {
        self.joined(v, |a, b| self.max(a, b))
    }

    /// The sums of the lanes of four vectors, where they are exact in any order.
    #[inline(always)]
    fn exact_sums(self, v: [Self::F; 4]) -> Self::F {
        self.joined(v, |a, b| self.add(a, b))
    }

    /// Four numbers in every row.
    ///
    /// # Safety
    /// Four floats are readable at `p`.
    #[inline(always)]
    unsafe fn load_four(self, p: *const f32) -> Self::F {
        // SAFETY: the caller's contract.
        self.of_bits(unsafe { self.i_row(p.cast()) })
    }

    /// The first `N` lanes.
    ///
    /// # Safety
    /// `N` floats are writable at `p`, 16 at most.
    #[inline(always)]
    unsafe fn store_first<const N: usize>(self, p: *mut f32, a: Self::F) {
        let mut all = [0.0f32; 16];
        // SAFETY: `all` has room for any vector; the caller's contract.
        unsafe {
            self.store(all.as_mut_ptr(), a);
            p.copy_from_nonoverlapping(all.as_ptr(), N);
        }
    }

    /// Asks for the cache line at `p`, which may be any address.
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        let _ = p;
    }

    /// Rounds half to even, |a| ≤ 2^22.
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::I {
        let magic = self.splat(attn_core::arithmetic::ROUND);
        self.i_sub(
            self.bits(self.add(a, magic)),
            self.i_splat(attn_core::arithmetic::ROUND.to_bits() as i32),
        )
    }
}

/// Scales and shifts, for codes less `centre`, from `{scale, shift}` pairs of f16.
///
/// # Safety
/// `4·LANES` bytes are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn scale_and_shift<S: Simd>(s: S, p: *const u8, centre: f32) -> (S::F, S::F) {
    // SAFETY: the caller's contract.
    let raw = unsafe { s.i_load(p) };
    let scale = s.f16_to_f(s.i_and(raw, s.i_splat(0xffff)));
    let shift = s.f16_to_f(s.i_shr::<16>(raw));
    (scale, s.add(shift, s.mul(scale, s.splat(centre))))
}

/// Loads four bytes into every lane.
///
/// # Safety
/// They are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn splat_at<S: Simd>(s: S, p: *const u8) -> S::I {
    // SAFETY: the caller's contract.
    s.i_splat(unsafe { p.cast::<i32>().read_unaligned() })
}

/// Exact dot products of 16 codes of up to 8 bits with 16 values of a byte: a query's, −127..=127, or weights, 0..=255.
///
/// An int8 code of K enters the product as `code + K_BIAS`; the kernels take that out of the sums again.
pub(crate) trait Dot: Copy {
    type S: Simd;
    /// Added to int8 codes of K.
    const K_BIAS: i32;
    /// Bytes of an operand.
    const OPERAND: usize;
    /// Most rows that take the four vectors of a step at once: as many as the registers hold. More take them two by two, so that
    /// what a vector of codes costs before its products is still shared by all of the block.
    const AT_ONCE: usize;
    /// Panels of 16 products with nibbles that [`widen`](Dot::widen) takes in at once.
    const RUN: usize;
    /// Whether sums of a run need [`widen`](Dot::widen): if not, they are sums of four neighbours to a lane already.
    const WIDENS: bool;
    type Codes: Copy;
    type Operand: Copy;
    type Nibbles: Copy;
    type NibbleOperand: Copy;

    fn simd(self) -> Self::S;
    /// Codes to begin an array with.
    fn none(self) -> Self::Codes;
    /// Int8 codes of K.
    fn k_bytes(self, raw: <Self::S as Simd>::I) -> Self::Codes;
    /// Int8 codes of V.
    fn v_bytes(self, raw: <Self::S as Simd>::I) -> Self::Codes;
    /// Nibbles to begin an array with.
    fn no_nibbles(self) -> Self::Nibbles;
    /// Low nibbles.
    fn low(self, raw: <Self::S as Simd>::I) -> Self::Nibbles;
    /// High nibbles.
    fn high(self, raw: <Self::S as Simd>::I) -> Self::Nibbles;
    /// One operand in every row.
    ///
    /// # Safety
    /// `Self::OPERAND` bytes are readable at `p`.
    unsafe fn operand(self, p: *const u8) -> Self::Operand;
    /// Loads the operand of products with nibbles.
    ///
    /// # Safety
    /// Those of [`operand`](Dot::operand).
    unsafe fn nibble_operand(self, p: *const u8) -> Self::NibbleOperand;
    /// Values `4·i..4·i + 4` of an operand in every lane, for codes of [`LaneCodes`](crate::lanes::LaneCodes).
    ///
    /// # Safety
    /// Those of [`operand`](Dot::operand); `i < 4`.
    unsafe fn lane_operand(self, p: *const u8, i: usize) -> Self::Operand;
    /// Loads a lane's operand of products with nibbles.
    ///
    /// # Safety
    /// Those of [`lane_operand`](Dot::lane_operand).
    unsafe fn lane_nibble_operand(self, p: *const u8, i: usize) -> Self::NibbleOperand;
    /// Adds products of codes with values of a query: four neighbours to a lane.
    fn k_dot(
        self,
        acc: <Self::S as Simd>::I,
        codes: Self::Codes,
        operand: Self::Operand,
    ) -> <Self::S as Simd>::I;
    /// Adds products of V's codes with weights.
    fn v_dot(
        self,
        acc: <Self::S as Simd>::I,
        codes: Self::Codes,
        operand: Self::Operand,
    ) -> <Self::S as Simd>::I;
    /// Adds products of nibbles with values of a query to the sums of a run.
    fn k_nibbles(
        self,
        run: <Self::S as Simd>::I,
        codes: Self::Nibbles,
        operand: Self::NibbleOperand,
    ) -> <Self::S as Simd>::I;
    /// Adds products of V's nibbles with weights.
    fn v_nibbles(
        self,
        run: <Self::S as Simd>::I,
        codes: Self::Nibbles,
        operand: Self::NibbleOperand,
    ) -> <Self::S as Simd>::I;
    /// Adds the sums of a run, of up to [`RUN`](Dot::RUN) products, to sums of four neighbours to a lane.
    fn widen(self, acc: <Self::S as Simd>::I, run: <Self::S as Simd>::I) -> <Self::S as Simd>::I;
    /// 16 values of a query in the order of the dims.
    ///
    /// # Safety
    /// 16 integers are readable at `q`, `Self::OPERAND` bytes writable at `out`.
    unsafe fn k_operand(self, q: *const i32, out: *mut u8);
    /// The operands of a tile's 64 weights in the order of the tokens, and a vector whose lanes add up to the sum of the weights. A weight is
    /// byte 1 of its number.
    ///
    /// # Safety
    /// 64 numbers are readable and writable at `w`, four operands writable at `out`.
    unsafe fn v_operands(self, w: *mut f32, out: *mut u8) -> <Self::S as Simd>::I;
}

/// Replaces a tile's 64 numbers by their bytes 1, as integers; the lanes of the vector that comes back add up to their sum.
///
/// # Safety
/// 64 numbers are readable and writable at `w`.
#[inline(always)]
unsafe fn weight_integers<S: Simd>(s: S, w: *mut f32) -> S::I {
    let mut sum = s.i_splat(0);
    for t in (0..TILE).step_by(S::LANES) {
        // SAFETY: t + LANES ≤ TILE; the caller's contract.
        unsafe {
            let at = w.add(t);
            let byte = s.i_and(s.i_shr::<8>(s.bits(s.load(at))), s.i_splat(255));
            s.i_store(at.cast(), byte);
            sum = s.i_add(sum, byte);
        }
    }
    sum
}

/// The dot product of 16-bit lanes: even and odd bytes apart, so that a lane of 32 bits still sums four neighbouring codes.
#[derive(Clone, Copy)]
pub(crate) struct Dot16<S>(pub S);

impl<S: Simd> Dot for Dot16<S> {
    type S = S;
    const K_BIAS: i32 = 0;
    const OPERAND: usize = 32;
    const AT_ONCE: usize = if S::ROWS == 4 { 4 } else { 1 };
    const RUN: usize = 16;
    const WIDENS: bool = false;
    type Codes = [S::I; 2];
    type Operand = [S::I; 2];
    type Nibbles = [S::I; 2];
    type NibbleOperand = [S::I; 2];

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn none(self) -> [S::I; 2] {
        [self.0.i_splat(0); 2]
    }

    #[inline(always)]
    fn k_bytes(self, raw: S::I) -> [S::I; 2] {
        let s = self.0;
        [s.h_sar::<8>(s.h_shl::<8>(raw)), s.h_sar::<8>(raw)]
    }

    #[inline(always)]
    fn v_bytes(self, raw: S::I) -> [S::I; 2] {
        self.k_bytes(raw)
    }

    #[inline(always)]
    fn no_nibbles(self) -> [S::I; 2] {
        self.none()
    }

    #[inline(always)]
    fn low(self, raw: S::I) -> [S::I; 2] {
        let (s, mask) = (self.0, self.0.i_splat(0x000f_000f));
        [s.i_and(raw, mask), s.i_and(s.h_shr::<8>(raw), mask)]
    }

    #[inline(always)]
    fn high(self, raw: S::I) -> [S::I; 2] {
        let (s, mask) = (self.0, self.0.i_splat(0x000f_000f));
        [s.i_and(s.h_shr::<4>(raw), mask), s.h_shr::<12>(raw)]
    }

    #[inline(always)]
    unsafe fn operand(self, p: *const u8) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        unsafe { [self.0.i_row(p), self.0.i_row(p.add(16))] }
    }

    #[inline(always)]
    fn k_dot(self, acc: S::I, codes: [S::I; 2], operand: [S::I; 2]) -> S::I {
        let even = self.0.h_dot(acc, codes[0], operand[0]);
        self.0.h_dot(even, codes[1], operand[1])
    }

    #[inline(always)]
    fn v_dot(self, acc: S::I, codes: [S::I; 2], operand: [S::I; 2]) -> S::I {
        self.k_dot(acc, codes, operand)
    }

    #[inline(always)]
    unsafe fn nibble_operand(self, p: *const u8) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        unsafe { self.operand(p) }
    }

    #[inline(always)]
    unsafe fn lane_operand(self, p: *const u8, i: usize) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            [
                splat_at(self.0, p.add(4 * i)),
                splat_at(self.0, p.add(16 + 4 * i)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn lane_nibble_operand(self, p: *const u8, i: usize) -> [S::I; 2] {
        // SAFETY: the caller's contract.
        unsafe { self.lane_operand(p, i) }
    }

    #[inline(always)]
    fn k_nibbles(self, run: S::I, codes: [S::I; 2], operand: [S::I; 2]) -> S::I {
        self.k_dot(run, codes, operand)
    }

    #[inline(always)]
    fn v_nibbles(self, run: S::I, codes: [S::I; 2], operand: [S::I; 2]) -> S::I {
        self.k_dot(run, codes, operand)
    }

    #[inline(always)]
    fn widen(self, acc: S::I, run: S::I) -> S::I {
        self.0.i_add(acc, run)
    }

    #[inline(always)]
    unsafe fn k_operand(self, q: *const i32, out: *mut u8) {
        for j in 0..4 {
            // SAFETY: j < 4, so the indices stay below 16 and the offsets below OPERAND: the caller's contract.
            unsafe {
                let at = |i: usize| *q.add(4 * j + i) as u16 as u32;
                let (even, odd) = (at(0) | at(2) << 16, at(1) | at(3) << 16);
                out.add(4 * j).cast::<u32>().write_unaligned(even);
                out.add(16 + 4 * j).cast::<u32>().write_unaligned(odd);
            }
        }
    }

    #[inline(always)]
    unsafe fn v_operands(self, w: *mut f32, out: *mut u8) -> S::I {
        // SAFETY: the caller's contract.
        let sum = unsafe { weight_integers(self.0, w) };
        let w = w.cast::<i32>();
        // Slots 4j..4j + 4 of a panel hold tokens 2j, 2j + 1, 8 + 2j, 9 + 2j.
        for j in 0..16 {
            let (panel, j) = (j / 4, j % 4);
            // SAFETY: panel < 4 and j < 4, so that indices stay below 64 and offsets below four operands.
            unsafe {
                let at = |t: usize| *w.add(16 * panel + 2 * j + t) as u16 as u32;
                let (even, odd) = (at(0) | at(8) << 16, at(1) | at(9) << 16);
                let out = out.add(Self::OPERAND * panel + 4 * j);
                out.cast::<u32>().write_unaligned(even);
                out.add(16).cast::<u32>().write_unaligned(odd);
            }
        }
        sum
    }
}
