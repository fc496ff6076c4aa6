//! The formats of a cache: a scheme for K and a scheme for V.

use std::{fmt, str::FromStr};

use crate::error::Error;

/// Most quantization groups of a token's dims in any scheme; `Int4 Channel`, whose groups lie across tokens, apart.
pub const MAX_GROUPS: usize = 8;

/// Where the scales of an int8 scheme lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int8Scale {
    /// One f16 per token and KV head.
    Token,
    /// One f16 per 32 dims of a token.
    Group32,
    /// One static f32 per KV head.
    Tensor,
}

/// Where the scales and shifts of an int4 scheme lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int4Scale {
    /// f16 scale and shift for each of 1, 2, 4 or 8 groups of a token's dims.
    Groups(u8),
    /// f16 scale and shift per dim over one page of tokens; K only.
    Channel,
}

/// The largest magnitude of a bf16 cache, 2^50: with queries of at most 2^64, scores stay below 2^122 and sums over 2^20 tokens below 2^70.
pub const BF16_MAX: f32 = 1_125_899_906_842_624.0;

/// How one of K, V is stored; `FORMATS.md` has the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, one static f32 scale per KV head.
    Fp8E4m3,
    /// Symmetric 8-bit integers.
    Int8(Int8Scale),
    /// Asymmetric 4-bit integers, `x = scale·u + shift`.
    Int4(Int4Scale),
}

impl Scheme {
    /// Every scheme, in the order of `FORMATS.md`.
    pub const ALL: [Scheme; 11] = [
        Scheme::F16,
        Scheme::Bf16,
        Scheme::Fp8E4m3,
        Scheme::Int8(Int8Scale::Token),
        Scheme::Int8(Int8Scale::Group32),
        Scheme::Int8(Int8Scale::Tensor),
        Scheme::Int4(Int4Scale::Groups(1)),
        Scheme::Int4(Int4Scale::Groups(2)),
        Scheme::Int4(Int4Scale::Groups(4)),
        Scheme::Int4(Int4Scale::Groups(8)),
        Scheme::Int4(Int4Scale::Channel),
    ];

    /// Bits of one stored element, without scales.
    #[must_use]
    pub fn code_bits(self) -> usize {
        match self {
            Scheme::F16 | Scheme::Bf16 => 16,
            Scheme::Fp8E4m3 | Scheme::Int8(_) => 8,
            Scheme::Int4(_) => 4,
        }
    }

    /// Whether products with it are sums of integers (`docs/arithmetic.md`).
    #[must_use]
    pub fn is_integer(self) -> bool {
        matches!(self, Scheme::Int8(_) | Scheme::Int4(_))
    }

    /// Whether a static f32 scale per KV head belongs to it.
    #[must_use]
    pub fn has_tensor_scale(self) -> bool {
        matches!(self, Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor))
    }

    /// Whether f16 scales belong to each token's row.
    #[must_use]
    pub fn has_row_scales(self) -> bool {
        self.is_integer() && !self.has_tensor_scale()
    }

    /// Quantization groups along `head_dim` (1 where there is a single scale, or none).
    #[must_use]
    pub fn groups(self, head_dim: usize) -> usize {
        match self {
            Scheme::Int8(Int8Scale::Group32) => head_dim / 32,
            Scheme::Int4(Int4Scale::Groups(groups)) => groups as usize,
            _ => 1,
        }
    }

    /// The largest magnitude that the scheme takes: larger ones are refused, since scores and sums of them would overflow f32.
    ///
    /// The other schemes saturate or scale, so they take every finite f32.
    #[must_use]
    pub fn max_magnitude(self) -> f32 {
        match self {
            Scheme::Bf16 => BF16_MAX,
            _ => f32::MAX,
        }
    }

    /// Refuses head_dims and page sizes that the scheme does not define.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming what is allowed.
    pub fn check(self, head_dim: usize, page_size: usize) -> Result<(), Error> {
        let refuse = |allowed| {
            Err(Error::Parameter {
                what: "scheme",
                given: format!("{self} with head_dim {head_dim}, page_size {page_size}"),
                allowed,
            })
        };
        match self {
            Scheme::Int8(Int8Scale::Group32) if !head_dim.is_multiple_of(32) => {
                refuse("int8-g32 needs a head_dim that is a multiple of 32; use int8")
            }
            Scheme::Int4(Int4Scale::Groups(g)) if !matches!(g, 1 | 2 | 4 | 8) => {
                refuse("int4 with 1, 2, 4 or 8 groups")
            }
            Scheme::Int4(Int4Scale::Groups(g)) if !head_dim.is_multiple_of(g as usize * 16) => {
                refuse("int4 groups of a multiple of 16 dims; use fewer groups")
            }
            Scheme::Int4(Int4Scale::Channel) if page_size < 64 => {
                refuse("int4-channel needs page_size 64 or 128")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::F16 => f.write_str("f16"),
            Scheme::Bf16 => f.write_str("bf16"),
            Scheme::Fp8E4m3 => f.write_str("fp8"),
            Scheme::Int8(Int8Scale::Token) => f.write_str("int8"),
            Scheme::Int8(Int8Scale::Group32) => f.write_str("int8-g32"),
            Scheme::Int8(Int8Scale::Tensor) => f.write_str("int8-tensor"),
            Scheme::Int4(Int4Scale::Groups(g)) => write!(f, "int4-g{g}"),
            Scheme::Int4(Int4Scale::Channel) => f.write_str("int4-channel"),
        }
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Scheme::ALL
            .into_iter()
            .find(|scheme| scheme.to_string() == s)
            .ok_or_else(|| Error::Parameter {
                what: "scheme",
                given: s.to_owned(),
                allowed: "f16, bf16, fp8, int8, int8-g32, int8-tensor, int4-g1, int4-g2, int4-g4, int4-g8, int4-channel",
            })
    }
}

/// A scheme for K and a scheme for V, chosen independently.
///
/// Written `k/v`, or by one name: `bf16` means both; `int8` and `int4` are the presets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvFormat {
    /// K's scheme.
    pub k: Scheme,
    /// V's scheme.
    pub v: Scheme,
}

impl KvFormat {
    /// int8 K and V with a scale per token: about fp8's bytes, and a tenth of its divergence in a whole model (`docs/log/2026-11-accuracy.md`).
    pub const INT8: KvFormat = KvFormat::same(Scheme::Int8(Int8Scale::Token));
    /// 4-bit K with a scale per channel and page, 4-bit V with a scale per token: 56 % of fp8's bytes, and nearly twice its divergence.
    pub const INT4: KvFormat = KvFormat {
        k: Scheme::Int4(Int4Scale::Channel),
        v: Scheme::Int4(Int4Scale::Groups(1)),
    };

    /// The same scheme for K and V.
    #[must_use]
    pub const fn same(scheme: Scheme) -> Self {
        KvFormat {
            k: scheme,
            v: scheme,
        }
    }

    /// Whether decode runs in the integer arithmetic, whose bits are equal on every backend.
    #[must_use]
    pub fn is_integer(self) -> bool {
        self.k.is_integer() && self.v.is_integer()
    }

    /// Whether a sequence owns a tail page, which holds the K of its open page (`Int4 Channel`).
    #[must_use]
    pub fn has_tail_page(self) -> bool {
        self.k == Scheme::Int4(Int4Scale::Channel)
    }

    /// Refuses pairs, head_dims and page sizes that no page can hold.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming what is allowed.
    pub fn check(self, head_dim: usize, page_size: usize) -> Result<(), Error> {
        if self.v == Scheme::Int4(Int4Scale::Channel) {
            return Err(Error::Parameter {
                what: "V scheme",
                given: self.v.to_string(),
                allowed: "any scheme but int4-channel, which is for K only; use int4-g1",
            });
        }
        self.k.check(head_dim, page_size)?;
        self.v.check(head_dim, page_size)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            KvFormat::INT4 => f.write_str("int4"),
            KvFormat { k, v } if k == v => k.fmt(f),
            KvFormat { k, v } => write!(f, "{k}/{v}"),
        }
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        match s.split_once('/') {
            _ if s == "int4" => Ok(KvFormat::INT4),
            Some((k, v)) => Ok(KvFormat {
                k: k.parse()?,
                v: v.parse()?,
            }),
            None => Ok(KvFormat::same(s.parse()?)),
        }
    }
}
