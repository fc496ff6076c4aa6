//! Contiguous caches of others (BNSH, BSNH), read in place through strides.

use crate::{
    error::Error,
    format::{KvFormat, Scheme},
    problem::Problem,
};

/// Rows of one of K, V: `head_dim` codes side by side per (sequence, KV head, token), and their f16 scales.
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

/// A whole contiguous cache.
#[derive(Debug, Clone, Copy)]
pub struct KvView<'a> {
    /// What is stored: f16, bf16, fp8 or an int8 scheme, row by row.
    pub format: KvFormat,
    /// K's rows.
    pub k: StridedRows<'a>,
    /// V's rows.
    pub v: StridedRows<'a>,
    /// Static scales per KV head; empty for schemes without.
    pub k_tensor_scales: &'a [f32],
    /// As for K.
    pub v_tensor_scales: &'a [f32],
}

impl<'a> StridedRows<'a> {
    /// BNSH, also called HND: `[batch, num_kv_heads, capacity, head_dim]`.
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
                heads * capacity * row_bytes,
                capacity * row_bytes,
                row_bytes,
            ],
            scales,
            scale_strides: [heads * capacity * groups, capacity * groups, groups],
        }
    }

    /// BSNH, also called NHD: `[batch, capacity, num_kv_heads, head_dim]`.
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
            code_strides: [heads * capacity * row_bytes, row_bytes, heads * row_bytes],
            scales,
            scale_strides: [heads * capacity * groups, groups, heads * groups],
        }
    }

    /// Code `d` of the row at (sequence, head, token).
    pub fn code(&self, bits: usize, at: [usize; 3], d: usize) -> u16 {
        let row: usize = at.iter().zip(self.code_strides).map(|(i, s)| i * s).sum();
        match bits {
            16 => u16::from_le_bytes([self.codes[row + 2 * d], self.codes[row + 2 * d + 1]]),
            _ => u16::from(self.codes[row + d]),
        }
    }

    /// Bits of the f16 scale of `group` at (sequence, head, token).
    pub fn scale(&self, at: [usize; 3], group: usize) -> u16 {
        let row: usize = at.iter().zip(self.scale_strides).map(|(i, s)| i * s).sum();
        self.scales[row + group]
    }

    fn check(&self, what: &'static str, scheme: Scheme, problem: &Problem) -> Result<(), Error> {
        if matches!(scheme, Scheme::Int4(_)) {
            return Err(Error::Parameter {
                what: "view scheme",
                given: scheme.to_string(),
                allowed: "f16, bf16, fp8, int8, int8-g32, int8-tensor; import int4 rows into pages",
            });
        }
        scheme.check(problem.head_dim, 64)?;
        let reach = |strides: [usize; 3], row: usize| {
            let longest = problem
                .kv_lens
                .iter()
                .enumerate()
                .filter(|(_, len)| **len > 0);
            longest
                .map(|(b, len)| {
                    b * strides[0]
                        + (problem.num_kv_heads - 1) * strides[1]
                        + (len - 1) * strides[2]
                        + row
                })
                .max()
                .unwrap_or(0)
        };
        let needed = reach(self.code_strides, problem.head_dim * scheme.code_bits() / 8);
        if needed > self.codes.len() {
            return Err(Error::Length {
                what,
                given: self.codes.len(),
                needed,
            });
        }
        let has_scales = scheme.is_integer() && !scheme.has_tensor_scale();
        let needed = if has_scales {
            reach(self.scale_strides, scheme.groups(problem.head_dim))
        } else {
            0
        };
        if needed > self.scales.len() {
            return Err(Error::Length {
                what: "scales",
                given: self.scales.len(),
                needed,
            });
        }
        Ok(())
    }
}

impl KvView<'_> {
    /// Refuses a view that does not reach every cached token.
    ///
    /// # Errors
    /// [`Error::Length`] for short slices, [`Error::Parameter`] for schemes that have no row form.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        self.k.check("k codes", self.format.k, problem)?;
        self.v.check("v codes", self.format.v, problem)?;
        for (scheme, scales) in [
            (self.format.k, self.k_tensor_scales),
            (self.format.v, self.v_tensor_scales),
        ] {
            check_tensor_scales(scheme, scales, problem.num_kv_heads)?;
        }
        Ok(())
    }
}

/// Static scales: one positive normal number per KV head for the schemes that have them, none for the others.
pub(crate) fn check_tensor_scales(
    scheme: Scheme,
    scales: &[f32],
    num_kv_heads: usize,
) -> Result<(), Error> {
    let needed = if scheme.has_tensor_scale() {
        num_kv_heads
    } else {
        0
    };
    if scales.len() != needed {
        return Err(Error::Length {
            what: "tensor scales",
            given: scales.len(),
            needed,
        });
    }
    match scales.iter().find(|s| !(1e-20..=1e20).contains(*s)) {
        Some(s) => Err(Error::Parameter {
            what: "tensor scale",
            given: s.to_string(),
            allowed: "1e-20 to 1e20",
        }),
        None => Ok(()),
    }
}
