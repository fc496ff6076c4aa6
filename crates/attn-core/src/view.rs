//! Contiguous caches of other engines (BNSH, BSNH), read in place through strides.

use half::{bf16, f16};

use crate::{
    error::{Error, refuse},
    format::{BF16_MAX, KvFormat, Scheme},
    head_dim::HeadDim,
    problem::Problem,
    quant::Param,
};

/// The rows of K or V: `head_dim` codes side by side per (sequence, KV head, token), and their f16 scales.
///
/// Int8 and fp8 codes are bytes, 16-bit floats little-endian. Scales are f16 `[…][group]`, empty for schemes without.
#[derive(Debug, Clone, Copy)]
pub struct StridedRows<'a> {
    /// The codes.
    pub codes: &'a [u8],
    /// Bytes from one sequence, KV head, token to the next.
    pub code_strides: [usize; 3],
    /// The f16 scales' bits.
    pub scales: &'a [u16],
    /// Scales from one sequence, KV head, token to the next.
    pub scale_strides: [usize; 3],
}

/// A contiguous cache that has been checked: every cached token of a problem lies inside its slices, and its scales and codes are finite.
#[derive(Debug, Clone, Copy)]
pub struct KvView<'a> {
    format: KvFormat,
    rows: [StridedRows<'a>; 2],
    tensor_scales: [&'a [f32]; 2],
    num_kv_heads: usize,
    head_dim: HeadDim,
    kv_lens: &'a [usize],
}

impl<'a> StridedRows<'a> {
    /// Rows in the order BNSH, also called HND: `[batch, num_kv_heads, capacity, head_dim]`.
    #[must_use]
    pub fn bnsh(
        codes: &'a [u8],
        scales: &'a [u16],
        heads: usize,
        capacity: usize,
        row_bytes: usize,
        groups: usize,
    ) -> Self {
        StridedRows {
            codes,
            code_strides: [
                product([heads, capacity, row_bytes]),
                product([1, capacity, row_bytes]),
                row_bytes,
            ],
            scales,
            scale_strides: [
                product([heads, capacity, groups]),
                product([1, capacity, groups]),
                groups,
            ],
        }
    }

    /// Rows in the order BSNH, also called NHD: `[batch, capacity, num_kv_heads, head_dim]`.
    #[must_use]
    pub fn bsnh(
        codes: &'a [u8],
        scales: &'a [u16],
        heads: usize,
        capacity: usize,
        row_bytes: usize,
        groups: usize,
    ) -> Self {
        StridedRows {
            codes,
            code_strides: [
                product([heads, capacity, row_bytes]),
                row_bytes,
                product([1, heads, row_bytes]),
            ],
            scales,
            scale_strides: [
                product([heads, capacity, groups]),
                groups,
                product([1, heads, groups]),
            ],
        }
    }

    /// Code `d` of the row at (sequence, head, token).
    ///
    /// # Panics
    /// If the row does not lie inside the codes; those of a [`KvView`]'s tokens do.
    #[must_use]
    pub fn code(&self, bits: usize, at: [usize; 3], d: usize) -> u16 {
        let row = &self.codes[offset(at, self.code_strides)..];
        match bits {
            16 => {
                let code = &row[d.saturating_mul(2)..][..2];
                u16::from_le_bytes([code[0], code[1]])
            }
            _ => u16::from(row[d]),
        }
    }

    /// Bits of the f16 scale of `group` at (sequence, head, token).
    ///
    /// # Panics
    /// If the row does not lie inside the scales; those of a [`KvView`]'s tokens do.
    #[must_use]
    pub fn scale(&self, at: [usize; 3], group: usize) -> u16 {
        self.scales[offset(at, self.scale_strides)..][group]
    }

    /// The parameters of `group` at (sequence, head, token), of a scheme with f16 scales per row.
    ///
    /// # Panics
    /// If the row does not lie inside the scales; those of a [`KvView`]'s tokens do.
    #[must_use]
    pub fn param(&self, at: [usize; 3], group: usize) -> Param {
        Param {
            scale: f16::from_bits(self.scale(at, group)),
            shift: f16::ZERO,
        }
    }

    /// Refuses rows that do not lie inside the slices. The scheme has been checked.
    fn check(
        &self,
        what: &'static str,
        (scheme, dim): (Scheme, usize),
        problem: &Problem,
    ) -> Result<(), Error> {
        let row = dim * scheme.code_bits() / 8;
        check_reach(what, self.code_strides, row, self.codes.len(), problem)?;
        if scheme.has_row_scales() {
            let groups = scheme.groups(dim).count();
            let given = self.scales.len();
            check_reach("scales", self.scale_strides, groups, given, problem)?;
        }
        Ok(())
    }

    /// Refuses scales that are negative, infinite or NaN, and codes of floats that are infinite, NaN or beyond the scheme's magnitude.
    ///
    /// The rows must lie inside the slices.
    fn check_values(&self, (scheme, dim): (Scheme, usize), problem: &Problem) -> Result<(), Error> {
        let row = dim * scheme.code_bits() / 8;
        let groups = scheme.groups(dim).count();
        for (b, &len) in problem.kv_lens.iter().enumerate() {
            for head in 0..problem.num_kv_heads {
                let bad = |what, offset| {
                    Err(Error::BadBytes {
                        what,
                        offset,
                        scheme,
                    })
                };
                let codes = Lines::of(self.codes, self.code_strides, [b, head], row, len);
                if let Some(at) = codes.find(|bytes| has_bad_code(scheme, bytes)) {
                    return bad("view code", at);
                }
                if scheme.has_row_scales() {
                    let scales = Lines::of(self.scales, self.scale_strides, [b, head], groups, len);
                    if let Some(at) = scales.find(|bits| bits.iter().any(|b| *b > F16_MAX)) {
                        return bad("view scale", at);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Bits of the largest finite f16; those of negative, infinite and NaN values are larger.
const F16_MAX: u16 = 0x7bff;

/// Whether any code of the scheme is infinite, NaN, or beyond [`Scheme::max_magnitude`].
fn has_bad_code(scheme: Scheme, bytes: &[u8]) -> bool {
    let any16 = |most: u16| {
        let codes = bytes.chunks_exact(2);
        codes.fold(false, |bad, c| {
            bad | (u16::from_le_bytes([c[0], c[1]]) & 0x7fff > most)
        })
    };
    match scheme {
        Scheme::F16 => any16(F16_MAX),
        Scheme::Bf16 => any16(bf16::from_f32(BF16_MAX).to_bits()),
        Scheme::Fp8E4m3 => bytes.iter().fold(false, |bad, c| bad | (c & 0x7f == 0x7f)),
        // Every integer is a code.
        _ => false,
    }
}

/// The rows of one (sequence, KV head): `len` of them, `step` elements apart.
struct Lines<'a, T> {
    elements: &'a [T],
    first: usize,
    step: usize,
    row: usize,
    len: usize,
}

impl<'a, T> Lines<'a, T> {
    fn of(
        elements: &'a [T],
        strides: [usize; 3],
        [b, head]: [usize; 2],
        row: usize,
        len: usize,
    ) -> Self {
        Lines {
            elements,
            // Sequences without tokens may have strides that no slice reaches.
            first: offset([b, head, 0], strides),
            step: strides[2],
            row,
            len,
        }
    }

    /// Where the first run begins that `is_bad`; rows that lie side by side are one run.
    fn find(&self, is_bad: impl Fn(&[T]) -> bool) -> Option<usize> {
        if self.len > 0 && self.step == self.row {
            let run = &self.elements[self.first..][..self.len * self.row];
            if !is_bad(run) {
                return None;
            }
        }
        (0..self.len)
            .map(|t| self.first + t * self.step)
            .find(|&at| is_bad(&self.elements[at..at + self.row]))
    }
}

/// Where the row of (sequence, head, token) begins; beyond every slice where the sum exceeds 64 bits.
pub(crate) fn offset(at: [usize; 3], strides: [usize; 3]) -> usize {
    let terms = at.iter().zip(strides);
    terms.fold(0usize, |sum, (i, stride)| {
        sum.saturating_add(i.saturating_mul(stride))
    })
}

/// A product that saturates: strides that no slice can have are refused with their view.
fn product(factors: [usize; 3]) -> usize {
    factors.into_iter().fold(1, usize::saturating_mul)
}

impl KvFormat {
    /// Refuses formats whose K and V are not both rows of their own, which views hold: latents, 4-bit and rotated codes.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming what is allowed.
    pub fn check_rows(self, head_dim: HeadDim) -> Result<(), Error> {
        self.check_not_latents("format of someone else's rows")?;
        for (scheme, dim) in self.sides(head_dim) {
            if scheme.code_bits() == 4 || scheme.is_rotated() {
                return refuse(
                    "view scheme",
                    format_args!("{scheme}"),
                    "f16, bf16, fp8, int8-plain, int8-g32, int8-tensor; import int4 rows into pages",
                );
            }
            scheme.check(dim)?;
        }
        Ok(())
    }
}

/// Where the last row ends that the problem reads, of rows of `row` elements of which the first begins at `first`; 0 if it reads none, and beyond every
/// slice and buffer where the sum exceeds 64 bits.
#[must_use]
pub fn reach(problem: &Problem, first: usize, strides: [usize; 3], row: usize) -> usize {
    let mut end = 0;
    for (b, &len) in problem.kv_lens.iter().enumerate() {
        if len > 0 {
            let last = offset([b, problem.num_kv_heads - 1, len - 1], strides);
            end = end.max(first.saturating_add(last).saturating_add(row));
        }
    }
    end
}

/// Refuses a slice of `given` elements that ends before the last row of `row` elements which the problem reads.
fn check_reach(
    what: &'static str,
    strides: [usize; 3],
    row: usize,
    given: usize,
    problem: &Problem,
) -> Result<(), Error> {
    let needed = reach(problem, 0, strides, row);
    if needed > given {
        return Err(Error::Length {
            what,
            given,
            needed,
        });
    }
    Ok(())
}

impl<'a> KvView<'a> {
    /// Views the cache that `problem` attends to, with the problem's lengths, heads and head_dim. `tensor_scales` are K's and V's static scales per KV
    /// head, empty for schemes without.
    ///
    /// Reads every scale, and every code of a float scheme: about the time of one read of those bytes (bf16 codes at 5 GB/s on one thread of a
    /// Zen 3). int8 codes are not read, since every one is a value.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a problem or a scheme that has no row form; [`Error::Length`] for slices that do not reach every cached
    /// token; [`Error::BadBytes`] for a scale that is negative or not finite, and for a code that is not finite or too large.
    ///
    /// ```
    /// use attn_core::{Heads, KvFormat, KvView, Problem, Scheme, StridedRows};
    ///
    /// // [2 sequences, 2 KV heads, 32 tokens of room, 64 dims] of bf16 ones; 5 and 32 tokens are cached.
    /// let cache = [0x80, 0x3f].repeat(2 * 2 * 32 * 64);
    /// let problem = Problem::new(Heads::new(4, 2, 64), [5, 32]);
    /// let rows = StridedRows::bnsh(&cache, &[], 2, 32, 64 * 2, 0);
    /// let view = KvView::new(&problem, KvFormat::same(Scheme::Bf16), rows, rows, [&[], &[]])?;
    /// assert_eq!(view.kv_lens(), [5, 32]);
    /// # Ok::<(), attn_core::Error>(())
    /// ```
    pub fn new(
        problem: &'a Problem,
        format: KvFormat,
        k: StridedRows<'a>,
        v: StridedRows<'a>,
        tensor_scales: [&'a [f32]; 2],
    ) -> Result<Self, Error> {
        let view = Self::with_trusted_values(problem, format, k, v, tensor_scales)?;
        let HeadDim { k: of_k, v: of_v } = problem.head_dim;
        view.rows[0].check_values((format.k, of_k), problem)?;
        view.rows[1].check_values((format.v, of_v), problem)?;
        Ok(view)
    }

    /// Views a cache as [`KvView::new`] does, but without reading its scales and codes.
    ///
    /// For caches whose writer checks every value. A scale or code that `new` would refuse gives an answer without meaning, which may differ
    /// between backends; memory is safe all the same.
    ///
    /// # Errors
    /// Those of [`KvView::new`] but [`Error::BadBytes`].
    pub fn with_trusted_values(
        problem: &'a Problem,
        format: KvFormat,
        k: StridedRows<'a>,
        v: StridedRows<'a>,
        tensor_scales: [&'a [f32]; 2],
    ) -> Result<Self, Error> {
        problem.check()?;
        format.check_rows(problem.head_dim)?;
        k.check("k codes", (format.k, problem.head_dim.k), problem)?;
        v.check("v codes", (format.v, problem.head_dim.v), problem)?;
        format.check_scales(tensor_scales, problem.num_kv_heads)?;
        Ok(KvView {
            format,
            rows: [k, v],
            tensor_scales,
            num_kv_heads: problem.num_kv_heads,
            head_dim: problem.head_dim,
            kv_lens: &problem.kv_lens,
        })
    }

    /// The schemes of K and V: f16, bf16, fp8 or an int8 scheme.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// The rows of K.
    #[must_use]
    pub fn k(&self) -> &StridedRows<'a> {
        &self.rows[0]
    }

    /// The rows of V.
    #[must_use]
    pub fn v(&self) -> &StridedRows<'a> {
        &self.rows[1]
    }

    /// K's static scales per KV head; empty for schemes without.
    #[must_use]
    pub fn k_tensor_scales(&self) -> &'a [f32] {
        self.tensor_scales[0]
    }

    /// V's static scales per KV head; empty for schemes without.
    #[must_use]
    pub fn v_tensor_scales(&self) -> &'a [f32] {
        self.tensor_scales[1]
    }

    /// Number of KV heads.
    #[must_use]
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Elements per head.
    #[must_use]
    pub fn head_dim(&self) -> HeadDim {
        self.head_dim
    }

    /// Cached tokens of each sequence.
    #[must_use]
    pub fn kv_lens(&self) -> &'a [usize] {
        self.kv_lens
    }
}
