//! One token of one head as other engines store it, and their quantizers to the byte.
//!
//! **FBGEMM int4** (`4·G + D/2` bytes): `G × {f16 scale, f16 shift}`, then codes, element 2i in the low nibble of byte i.
//! Per group, in f32 unless said otherwise: `scale = fl(fl(max − min) / 15)`, `shift = min`; the inverse in f64,
//! `inv = 15 / (15·scale + 1e-8)`; `code = rhe(f32(fl(x − min)·inv)) & 15`. Scale and shift are rounded to f16 only when stored, so codes belong
//! to values slightly off the stored ones, and our own quantizer ([`crate::quant::int4_group`]) gives other codes where that matters.
//! FBGEMM clamps nothing: numbers beyond f16 become ±∞ there and are refused here.
//!
//! **llama.cpp `q8_0`** (34 bytes per 32): f16 `d`, then 32 int8. `d = fl(amax / 127)`, `code = x·fl(1/d)` rounded half away from zero.
//!
//! **llama.cpp `q4_0`** (18 bytes per 32): f16 `d`, then 16 bytes, element j in the low nibble of byte j, j + 16 in the high one; `x = d·(u − 8)`.
//! `d = fl(m / −8)` for the element m of largest magnitude (the first of equals), so that d is negative where m is positive;
//! `u = min(15, trunc(fl(fl(x·fl(1/d)) + 8.5)))`. Our scales are never negative. For d ≥ 0: `scale = d`, `shift = −8·d`, which f16 holds exactly.
//! For d < 0 the codes flip, `15 − u`, with `scale = −d` and `shift = f16(−7·scale)`, rounded to nearest even: off by at most 2^-11 of itself, so
//! every value of the group moves by at most 0.0035·scale.

use half::f16;

use crate::{
    error::{Error, check_finite, refuse},
    format::{Int8Scale, Scheme},
    head_dim::HeadDim,
    quant::{Param, check_stored, to_f16},
};

/// How another engine codes one token of one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFormat {
    /// Codes of any scheme but int4 side by side, little-endian, with scales outside the row.
    Plain(Scheme),
    /// Rows of FBGEMM's int4 cache with 1, 2, 4 or 8 groups.
    FbgemmInt4(u8),
    /// Rows of llama.cpp's `q8_0`.
    Q8_0,
    /// Rows of llama.cpp's `q4_0`.
    Q4_0,
}

/// Elements per scale in llama.cpp's formats.
const GROUP: usize = 32;

impl RowFormat {
    /// The page scheme that holds the same values.
    ///
    /// # Errors
    /// [`Error::Parameter`] if there is none for this head_dim.
    pub fn scheme(self, head_dim: usize) -> Result<Scheme, Error> {
        let refuse = |allowed| {
            let given = format_args!("{self:?} with head_dim {head_dim}");
            refuse("row format", given, allowed)
        };
        let scheme = match self {
            RowFormat::Plain(Scheme::Int4(_)) => {
                return refuse("plain rows of f16, bf16, fp8 or int8; int4 rows as FbgemmInt4");
            }
            RowFormat::Plain(scheme) if scheme.is_rotated() => {
                return refuse("rows that are not rotated, such as int8-plain");
            }
            RowFormat::Plain(scheme) => scheme,
            RowFormat::FbgemmInt4(groups) => Scheme::Int4(groups),
            RowFormat::Q8_0 => Scheme::Int8(Int8Scale::Group32),
            RowFormat::Q4_0 if matches!(head_dim, 64 | 128 | 256) => {
                Scheme::Int4((head_dim / GROUP) as u8)
            }
            RowFormat::Q4_0 => return refuse("q4_0 with head_dim 64, 128 or 256"),
        };
        scheme.check(head_dim)?;
        Ok(scheme)
    }

    /// Size of one row in bytes; of a head_dim that no page has it may saturate.
    #[must_use]
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            RowFormat::Plain(scheme) => head_dim.saturating_mul(scheme.code_bits()) / 8,
            RowFormat::FbgemmInt4(groups) => 4 * groups as usize + head_dim / 2,
            RowFormat::Q8_0 => (head_dim / GROUP).saturating_mul(2 + GROUP),
            RowFormat::Q4_0 => head_dim / GROUP * (2 + GROUP / 2),
        }
    }

    /// Whether f16 scales lie beside the rows.
    #[must_use]
    pub fn scales_outside(self) -> bool {
        matches!(
            self,
            RowFormat::Plain(Scheme::Int8(Int8Scale::Token | Int8Scale::Group32))
        )
    }

    /// Reads a row as the page scheme's codes and parameters, or returns the kind of the first bad value.
    pub(crate) fn unpack(
        self,
        row: &[u8],
        scales: &[u16],
        codes: &mut [u16],
        params: &mut [Param],
    ) -> Result<(), &'static str> {
        match self {
            RowFormat::Plain(scheme) => {
                let width = scheme.code_bits() / 8;
                for (code, bytes) in codes.iter_mut().zip(row.chunks_exact(width)) {
                    *code = u16::from_le_bytes([bytes[0], bytes.get(1).copied().unwrap_or(0)]);
                }
                for (param, bits) in params.iter_mut().zip(scales) {
                    param.scale = f16::from_bits(*bits);
                }
            }
            RowFormat::FbgemmInt4(_) => {
                let (head, body) = row.split_at(4 * params.len());
                for (param, bytes) in params.iter_mut().zip(head.chunks_exact(4)) {
                    param.scale = f16::from_le_bytes([bytes[0], bytes[1]]);
                    param.shift = f16::from_le_bytes([bytes[2], bytes[3]]);
                }
                for (pair, byte) in codes.chunks_exact_mut(2).zip(body) {
                    (pair[0], pair[1]) = (u16::from(byte & 15), u16::from(byte >> 4));
                }
            }
            RowFormat::Q8_0 => {
                let groups = codes.chunks_exact_mut(GROUP).zip(params.iter_mut());
                for ((codes, param), row) in groups.zip(row.chunks_exact(2 + GROUP)) {
                    param.scale = f16::from_le_bytes([row[0], row[1]]);
                    for (code, byte) in codes.iter_mut().zip(&row[2..]) {
                        *code = u16::from(*byte);
                    }
                }
            }
            RowFormat::Q4_0 => {
                let groups = codes.chunks_exact_mut(GROUP).zip(params.iter_mut());
                for ((codes, param), row) in groups.zip(row.chunks_exact(2 + GROUP / 2)) {
                    let d = f16::from_le_bytes([row[0], row[1]]);
                    let flip = d.is_sign_negative() && d != f16::ZERO;
                    *param = q4_0_param(d).ok_or("d")?;
                    for (j, byte) in row[2..].iter().enumerate() {
                        let pair = [byte & 15, byte >> 4].map(|u| if flip { 15 - u } else { u });
                        codes[j] = u16::from(pair[0]);
                        codes[j + GROUP / 2] = u16::from(pair[1]);
                    }
                }
            }
        }
        let scheme = self.scheme(codes.len()).map_err(|_| "row")?;
        check_stored(scheme, codes, params)
    }

    /// Writes a row of the page scheme's codes and parameters.
    ///
    /// # Errors
    /// [`Error::Parameter`] for an int4 group that is no `q4_0`.
    pub(crate) fn pack(
        self,
        codes: &[u16],
        params: &[Param],
        row: &mut [u8],
        scales: &mut [u16],
    ) -> Result<(), Error> {
        match self {
            RowFormat::Plain(scheme) => {
                let width = scheme.code_bits() / 8;
                for (bytes, code) in row.chunks_exact_mut(width).zip(codes) {
                    bytes.copy_from_slice(&code.to_le_bytes()[..width]);
                }
                for (bits, param) in scales.iter_mut().zip(params) {
                    *bits = param.scale.to_bits();
                }
            }
            RowFormat::FbgemmInt4(_) => pack_fbgemm(codes, params, row),
            RowFormat::Q8_0 => {
                let groups = codes.chunks_exact(GROUP).zip(params);
                for ((codes, param), row) in groups.zip(row.chunks_exact_mut(2 + GROUP)) {
                    row[..2].copy_from_slice(&param.scale.to_le_bytes());
                    for (byte, code) in row[2..].iter_mut().zip(codes) {
                        *byte = *code as u8;
                    }
                }
            }
            RowFormat::Q4_0 => {
                let groups = codes.chunks_exact(GROUP).zip(params);
                for ((codes, param), row) in groups.zip(row.chunks_exact_mut(2 + GROUP / 2)) {
                    let d = [param.scale, -param.scale].into_iter().find(|d| {
                        q4_0_param(*d).is_some_and(|p| p.shift.to_bits() == param.shift.to_bits())
                    });
                    let Some(d) = d else {
                        return refuse(
                            "int4 group",
                            format_args!("scale {}, shift {}", param.scale, param.shift),
                            "shift = -8·scale or f16(-7·scale) in q4_0; dequantize and quantize again with q4_0_row",
                        );
                    };
                    row[..2].copy_from_slice(&d.to_le_bytes());
                    let flip = d.is_sign_negative() && d != f16::ZERO;
                    for (j, byte) in row[2..].iter_mut().enumerate() {
                        let pair = [codes[j], codes[j + GROUP / 2]]
                            .map(|u| if flip { 15 - u as u8 } else { u as u8 });
                        *byte = pair[0] | pair[1] << 4;
                    }
                }
            }
        }
        Ok(())
    }
}

fn pack_fbgemm(codes: &[u16], params: &[Param], row: &mut [u8]) {
    let (head, body) = row.split_at_mut(4 * params.len());
    for (bytes, param) in head.chunks_exact_mut(4).zip(params) {
        bytes[..2].copy_from_slice(&param.scale.to_le_bytes());
        bytes[2..].copy_from_slice(&param.shift.to_le_bytes());
    }
    for (byte, pair) in body.iter_mut().zip(codes.chunks_exact(2)) {
        *byte = pair[0] as u8 | (pair[1] as u8) << 4;
    }
}

/// Our scale and shift for a group of `q4_0`; none where f16 cannot hold the shift.
fn q4_0_param(d: f16) -> Option<Param> {
    let scale = f16::from_bits(d.to_bits() & 0x7fff);
    if scale == f16::ZERO {
        // Their all-zero group has d = 0 / -8 = -0: the sign survives in the shift, where it changes no value.
        return Some(Param { scale, shift: d });
    }
    let factor = if d.is_sign_negative() { -7.0 } else { -8.0 };
    let shift = factor * scale.to_f64();
    (shift >= -65504.0).then(|| Param {
        scale,
        shift: to_f16(shift),
    })
}

/// Refuses values that are not finite and a row of another length.
fn check_row(x: &[f32], row: &[u8], needed: usize) -> Result<(), Error> {
    check_finite("x", x)?;
    if row.len() == needed {
        Ok(())
    } else {
        Err(Error::Length {
            what: "row",
            given: row.len(),
            needed,
        })
    }
}

/// Refuses rows that are not whole groups of llama.cpp's formats.
fn check_groups(x: &[f32]) -> Result<(), Error> {
    if x.is_empty() || !x.len().is_multiple_of(GROUP) {
        return refuse(
            "the length of a row",
            x.len(),
            "a multiple of 32, at least 32",
        );
    }
    Ok(())
}

/// A stored f16 that must be finite.
fn finite(what: &'static str, x: f32) -> Result<f16, Error> {
    let h = f16::from_f32(x);
    if h.is_finite() {
        Ok(h)
    } else {
        refuse(what, x, "a magnitude that f16 holds, up to 65504")
    }
}

/// Refuses a row before any of it is written if f16 does not hold the step of some group.
fn check_steps(x: &[f32], step: impl Fn(&[f32]) -> f32) -> Result<(), Error> {
    x.chunks_exact(GROUP)
        .try_for_each(|x| finite("d", step(x)).map(drop))
}

/// Quantizes one row of `x.len()` dims in `groups` groups as FBGEMM does.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Length`]; [`Error::Parameter`] for group counts and magnitudes outside the format. Nothing is written then.
pub fn fbgemm_int4_row(x: &[f32], groups: u8, row: &mut [u8]) -> Result<(), Error> {
    HeadDim::same(x.len()).check()?;
    let format = RowFormat::FbgemmInt4(groups);
    format.scheme(x.len())?;
    check_row(x, row, format.row_bytes(x.len()))?;
    let (mut codes, mut params) = (vec![0u16; x.len()], vec![Param::default(); groups.into()]);
    let len = x.len() / params.len();
    for ((x, codes), param) in x
        .chunks_exact(len)
        .zip(codes.chunks_exact_mut(len))
        .zip(&mut params)
    {
        let min = x.iter().copied().fold(f32::INFINITY, f32::min);
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = (max - min) / 15.0;
        let inverse = 15.0 / (f64::from(scale) * 15.0 + 1e-8);
        *param = Param {
            scale: finite("scale", scale)?,
            shift: finite("shift", min)?,
        };
        for (code, x) in codes.iter_mut().zip(x) {
            let scaled = (f64::from(x - min) * inverse) as f32;
            *code = (scaled.round_ties_even() as i32 & 15) as u16;
        }
    }
    pack_fbgemm(&codes, &params, row);
    Ok(())
}

/// Quantizes one row as llama.cpp's `q8_0` reference does; where its `1/d` overflows, codes saturate here.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Length`]; [`Error::Parameter`] for magnitudes beyond the format. Nothing is written then.
pub fn q8_0_row(x: &[f32], row: &mut [u8]) -> Result<(), Error> {
    check_groups(x)?;
    check_row(x, row, RowFormat::Q8_0.row_bytes(x.len()))?;
    let step = |x: &[f32]| x.iter().fold(0.0f32, |a, v| a.max(v.abs())) / 127.0;
    check_steps(x, step)?;
    for (x, row) in x.chunks_exact(GROUP).zip(row.chunks_exact_mut(2 + GROUP)) {
        let d = step(x);
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        row[..2].copy_from_slice(&finite("d", d)?.to_le_bytes());
        for (byte, x) in row[2..].iter_mut().zip(x) {
            *byte = (x * inverse).round() as i8 as u8;
        }
    }
    Ok(())
}

/// Quantizes one row as llama.cpp's `q4_0` reference does.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::Length`]; [`Error::Parameter`] for magnitudes beyond the format. Nothing is written then.
pub fn q4_0_row(x: &[f32], row: &mut [u8]) -> Result<(), Error> {
    check_groups(x)?;
    check_row(x, row, RowFormat::Q4_0.row_bytes(x.len()))?;
    let largest = |m: f32, v: &f32| if v.abs() > m.abs() { *v } else { m };
    let step = |x: &[f32]| x.iter().fold(0.0f32, largest) / -8.0;
    check_steps(x, step)?;
    for (x, row) in x
        .chunks_exact(GROUP)
        .zip(row.chunks_exact_mut(2 + GROUP / 2))
    {
        let d = step(x);
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        row[..2].copy_from_slice(&finite("d", d)?.to_le_bytes());
        let code = |x: f32| ((x * inverse + 8.5) as i8).clamp(0, 15) as u8;
        for (j, byte) in row[2..].iter_mut().enumerate() {
            *byte = code(x[j]) | code(x[j + GROUP / 2]) << 4;
        }
    }
    Ok(())
}
