//! Where each code and each parameter of a page lies: the address formulas of `FORMATS.md`.
//!
//! Not here: which bytes of a page are written and which values they may hold (`page_bytes.rs`).

use std::ops::Range;

use half::f16;

use crate::{
    error::{Error, refuse},
    format::{KvFormat, Scheme},
    groups::Groups,
    head_dim::HeadDim,
    quant::Param,
};

pub use crate::head_dim::Side;

/// Bytes of a panel row; head_dims and tokens are cut into panels of this width.
const PANEL: usize = 16;

/// The position of one code inside a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeAddr {
    /// Byte offset from the part's start.
    pub byte: usize,
    /// Bits to shift right: 4 for a high nibble, else 0.
    pub shift: u32,
}

impl CodeAddr {
    /// The code of `bits` bits at this address of a part.
    #[must_use]
    pub fn load(self, codes: &[u8], bits: usize) -> u16 {
        match bits {
            16 => u16::from_le_bytes([codes[self.byte], codes[self.byte + 1]]),
            8 => u16::from(codes[self.byte]),
            _ => u16::from(codes[self.byte] >> self.shift & 15),
        }
    }

    /// Writes a code of `bits` bits to this address of a part.
    ///
    /// A low nibble clears the high one, which is written later: in K by a later token, in V by a later dim.
    pub fn store(self, codes: &mut [u8], bits: usize, code: u16) {
        match bits {
            16 => codes[self.byte..self.byte + 2].copy_from_slice(&code.to_le_bytes()),
            8 => codes[self.byte] = code as u8,
            _ if self.shift == 0 => codes[self.byte] = code as u8,
            _ => codes[self.byte] = codes[self.byte] & 15 | (code as u8) << 4,
        }
    }
}

/// Index of the first f16 of group `g` of token `t` among a part's parameters.
fn param_index(scheme: Scheme, page_size: usize, t: usize, g: usize) -> usize {
    (g * page_size + t) * if scheme.has_shifts() { 2 } else { 1 }
}

/// Reads the parameters of group `g` of token `t`.
///
/// A scheme without parameters in the page has scale 1 and shift 0.
#[must_use]
pub fn load_param(params: &[u8], scheme: Scheme, page_size: usize, t: usize, g: usize) -> Param {
    let load = |i: usize| f16::from_le_bytes([params[2 * i], params[2 * i + 1]]);
    if !scheme.has_row_scales() {
        return Param {
            scale: f16::ONE,
            shift: f16::ZERO,
        };
    }
    let i = param_index(scheme, page_size, t, g);
    Param {
        scale: load(i),
        shift: if scheme.has_shifts() {
            load(i + 1)
        } else {
            f16::ZERO
        },
    }
}

/// Writes the parameters of group `g` of token `t`; the scheme has some.
pub fn store_param(
    params: &mut [u8],
    scheme: Scheme,
    page_size: usize,
    t: usize,
    g: usize,
    p: Param,
) {
    let mut store = |i: usize, x: f16| params[2 * i..2 * i + 2].copy_from_slice(&x.to_le_bytes());
    let i = param_index(scheme, page_size, t, g);
    store(i, p.scale);
    if scheme.has_shifts() {
        store(i + 1, p.shift);
    }
}

/// Slot of token `t` (0..16) in a panel of V: the order in which a tensor core's first product comes out.
#[must_use]
pub fn slot(t: usize) -> usize {
    let (h, c, e) = (t / 8, (t % 8) / 2, t % 2);
    4 * c + 2 * h + e
}

/// A 4-bit code's row among those of its panel, for token (of K) or dim (of V) `i`: a row holds `i` and `i + 8` of each 16.
fn nibble_row(i: usize) -> (usize, u32) {
    (i / PANEL * 8 + i % 8, if i % PANEL < 8 { 0 } else { 4 })
}

/// Address of K's code `(t, d)` under `bits` per code, from the start of the K codes.
///
/// The head_dim is there for the likeness to [`v_code`]: K's panels are as long as the page.
#[must_use]
pub fn k_code(bits: usize, _head_dim: usize, page_size: usize, t: usize, d: usize) -> CodeAddr {
    match bits {
        16 => CodeAddr {
            byte: (d / 8 * page_size + t) * PANEL + d % 8 * 2,
            shift: 0,
        },
        8 => CodeAddr {
            byte: (d / PANEL * page_size + t) * PANEL + d % PANEL,
            shift: 0,
        },
        _ => {
            let (row, shift) = nibble_row(t);
            CodeAddr {
                byte: (d / PANEL * (page_size / 2) + row) * PANEL + d % PANEL,
                shift,
            }
        }
    }
}

/// Address of V's code `(t, d)` under `bits` per code, from the start of the V codes.
#[must_use]
pub fn v_code(bits: usize, head_dim: usize, page_size: usize, t: usize, d: usize) -> CodeAddr {
    match bits {
        16 => k_code(16, head_dim, page_size, t, d),
        8 => CodeAddr {
            byte: (t / PANEL * head_dim + d) * PANEL + slot(t % PANEL),
            shift: 0,
        },
        _ => {
            let (row, shift) = nibble_row(d);
            CodeAddr {
                byte: (t / PANEL * (head_dim / 2) + row) * PANEL + slot(t % PANEL),
                shift,
            }
        }
    }
}

/// The codes and parameters of K or of V inside a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// How they are stored.
    pub scheme: Scheme,
    /// Where the codes lie in the run.
    pub codes: Range<usize>,
    /// Where the parameters lie in the run.
    pub params: Range<usize>,
    order: Side,
    is_residual: bool,
    groups: Groups,
    page_size: usize,
}

impl Part {
    /// Address of the code `(t, d)` from the start of the codes.
    #[must_use]
    pub fn code_addr(&self, t: usize, d: usize) -> CodeAddr {
        let bits = self.scheme.code_bits();
        match self.order {
            Side::K => k_code(bits, self.dim(), self.page_size, t, d),
            Side::V => v_code(bits, self.dim(), self.page_size, t, d),
        }
    }

    /// Elements per token.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.groups.dim()
    }

    /// The code `(t, d)` of a run.
    #[must_use]
    pub fn load_code(&self, run: &[u8], t: usize, d: usize) -> u16 {
        let bits = self.scheme.code_bits();
        self.code_addr(t, d).load(&run[self.codes.clone()], bits)
    }

    /// Writes the codes of token `t` into a run, dim after dim: of the 8 bits of rotated int4 the high four, or the low four as residuals.
    pub fn store_codes(&self, run: &mut [u8], t: usize, codes: &[u16]) {
        let bits = self.scheme.code_bits();
        let part = &mut run[self.codes.clone()];
        let stored = |code: u16| match (self.scheme, self.is_residual) {
            (Scheme::RotatedInt4 { .. }, false) => code >> 4,
            (Scheme::RotatedInt4 { .. }, true) => code & 15,
            _ => code,
        };
        for (d, &code) in codes.iter().enumerate() {
            self.code_addr(t, d).store(part, bits, stored(code));
        }
    }

    /// The groups of a token's elements, each with parameters of its own.
    #[must_use]
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// The parameters of group `g` of token `t` of a run.
    #[must_use]
    pub fn load_param(&self, run: &[u8], t: usize, g: usize) -> Param {
        load_param(&run[self.params.clone()], self.scheme, self.page_size, t, g)
    }

    /// Writes the parameters of token `t` into a run, group after group, if the scheme keeps any there.
    pub fn store_params(&self, run: &mut [u8], t: usize, params: &[Param]) {
        if self.params.is_empty() {
            return;
        }
        let part = &mut run[self.params.clone()];
        for (g, param) in params.iter().enumerate() {
            store_param(part, self.scheme, self.page_size, t, g, *param);
        }
    }
}

/// A page's parts and sizes for one format; holding one proves that the format has such pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLayout {
    format: KvFormat,
    head_dim: HeadDim,
    page_size: usize,
    num_kv_heads: usize,
}

/// Page sizes that the library defines, in tokens.
pub const PAGE_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Most KV heads of a problem or a cache.
pub const MAX_KV_HEADS: usize = 65536;

/// Bytes of the parameters of one side of a run of `page_size` tokens; of sizes that no page has they may saturate.
#[must_use]
pub fn params_bytes(scheme: Scheme, groups: Groups, page_size: usize) -> usize {
    if !scheme.has_row_scales() {
        return 0;
    }
    let each = if scheme.has_shifts() { 4 } else { 2 };
    let params = groups.count().saturating_mul(page_size);
    params.saturating_mul(each)
}

/// Bytes of one KV head's run of a page: codes and parameters of K and of V; of sizes that no page has they may saturate.
#[must_use]
pub fn run_bytes(format: KvFormat, head_dim: impl Into<HeadDim>, page_size: usize) -> usize {
    let part = |scheme: Scheme, groups: Groups| {
        let codes = page_size.saturating_mul(groups.dim());
        let codes = codes.saturating_mul(scheme.code_bits()) / 8;
        codes.saturating_add(params_bytes(scheme, groups, page_size))
    };
    let [k, v] = format.groups(head_dim.into());
    let v = if format.latents { 0 } else { part(format.v, v) };
    part(format.k, k).saturating_add(v)
}

/// Refuses a number of KV heads that no cache and no problem has.
pub(crate) fn check_kv_heads(num_kv_heads: usize) -> Result<(), Error> {
    if (1..=MAX_KV_HEADS).contains(&num_kv_heads) {
        Ok(())
    } else {
        refuse("num_kv_heads", num_kv_heads, "1 to 65536")
    }
}

impl PageLayout {
    /// The layout of a run as a page of its own, of one KV head.
    pub(crate) fn of_run(self) -> Self {
        PageLayout {
            num_kv_heads: 1,
            ..self
        }
    }

    /// Lays out pages of `page_size` tokens of `num_kv_heads` KV heads.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a head_dim, page size, number of heads or scheme that the library does not define, and for pages of
    /// more than `i32::MAX` bytes, which kernels cannot address.
    pub fn new(
        format: KvFormat,
        head_dim: impl Into<HeadDim>,
        page_size: usize,
        num_kv_heads: usize,
    ) -> Result<Self, Error> {
        let head_dim = head_dim.into();
        head_dim.check()?;
        if !PAGE_SIZES.contains(&page_size) {
            return refuse("page_size", page_size, "16, 32, 64, 128");
        }
        check_kv_heads(num_kv_heads)?;
        format.check(head_dim)?;
        let layout = PageLayout {
            format,
            head_dim,
            page_size,
            num_kv_heads,
        };
        let bytes = num_kv_heads.checked_mul(layout.run_bytes());
        if bytes.is_none_or(|bytes| bytes > i32::MAX as usize) {
            return refuse(
                "the size of a page",
                format_args!("{num_kv_heads} heads of {} bytes", layout.run_bytes()),
                "at most 2^31 - 1 bytes a page; use smaller pages",
            );
        }
        Ok(layout)
    }

    /// The schemes of K and V.
    #[must_use]
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Elements per token and KV head.
    #[must_use]
    pub fn head_dim(&self) -> HeadDim {
        self.head_dim
    }

    /// Tokens per page: 16, 32, 64 or 128.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number of KV heads, each with a run of its own.
    #[must_use]
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// The shapes of K and of V of so many tokens to append, `[tokens, num_kv_heads, head_dim]`. Latents are given as K alone: of V there are no tokens.
    #[must_use]
    pub fn shapes(&self, tokens: usize) -> [[usize; 3]; 2] {
        let tokens = [tokens, if self.format.latents { 0 } else { tokens }];
        [Side::K, Side::V].map(|side| {
            [
                tokens[side as usize],
                self.num_kv_heads,
                self.head_dim.of(side),
            ]
        })
    }

    /// Bytes of one part's codes.
    fn codes_bytes(&self, scheme: Scheme, dim: usize) -> usize {
        self.page_size * dim * scheme.code_bits() / 8
    }

    /// The quantization groups of one side.
    #[must_use]
    pub fn groups(&self, side: Side) -> Groups {
        self.format.groups(self.head_dim)[side as usize]
    }

    /// Range of K's codes inside a run.
    #[must_use]
    pub fn k_codes(&self) -> Range<usize> {
        0..self.codes_bytes(self.format.k, self.head_dim.k)
    }

    /// Range of K's parameters inside a run.
    #[must_use]
    pub fn k_params(&self) -> Range<usize> {
        let start = self.k_codes().end;
        start..start + params_bytes(self.format.k, self.groups(Side::K), self.page_size)
    }

    /// Range of V's codes inside a run; of latents that of K's.
    #[must_use]
    pub fn v_codes(&self) -> Range<usize> {
        if self.format.latents {
            return self.k_codes();
        }
        let start = self.k_params().end;
        start..start + self.codes_bytes(self.format.v, self.head_dim.v)
    }

    /// Range of V's parameters inside a run; of latents those of K's first group.
    #[must_use]
    pub fn v_params(&self) -> Range<usize> {
        let start = match self.format.latents {
            true => self.k_params().start,
            false => self.v_codes().end,
        };
        start..start + params_bytes(self.format.v, self.groups(Side::V), self.page_size)
    }

    /// The side in whose order the codes of a side lie: K's, of latents.
    #[must_use]
    pub fn order(&self, side: Side) -> Side {
        match self.format.latents {
            true => Side::K,
            false => side,
        }
    }

    /// K or V inside a run.
    #[must_use]
    pub fn part(&self, side: Side) -> Part {
        let (scheme, codes, params) = match side {
            Side::K => (self.format.k, self.k_codes(), self.k_params()),
            Side::V => (self.format.v, self.v_codes(), self.v_params()),
        };
        Part {
            scheme,
            codes,
            params,
            order: self.order(side),
            is_residual: false,
            groups: self.groups(side),
            page_size: self.page_size,
        }
    }

    /// Bytes of one KV head's run.
    #[must_use]
    pub fn run_bytes(&self) -> usize {
        self.k_params().end.max(self.v_params().end)
    }

    /// Bytes of one page: all runs.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.num_kv_heads * self.run_bytes()
    }

    /// Range of `head`'s run of `page` inside the pool.
    ///
    /// # Panics
    /// If there is no such KV head.
    #[must_use]
    pub fn run(&self, page: u32, head: usize) -> Range<usize> {
        assert!(head < self.num_kv_heads, "KV head {head}");
        let start = page as usize * self.page_bytes() + head * self.run_bytes();
        start..start + self.run_bytes()
    }

    /// The residuals of K or V inside a residual page's run, if the scheme keeps any: K's first, then V's, each as 4-bit codes of a page.
    #[must_use]
    pub fn residual(&self, side: Side) -> Option<Part> {
        let bytes = |scheme: Scheme, dim: usize| match scheme.window().tiles() {
            0 => 0,
            _ => self.codes_bytes(scheme, dim),
        };
        let k = bytes(self.format.k, self.head_dim.k);
        let codes = match side {
            Side::K => 0..k,
            Side::V => k..k + bytes(self.format.v, self.head_dim.v),
        };
        let part = self.part(side);
        (!codes.is_empty()).then_some(Part {
            codes,
            params: 0..0,
            is_residual: true,
            ..part
        })
    }

    /// Mean bytes per token and KV head of full pages, scales included, residual pages not.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        self.run_bytes() as f64 / self.page_size as f64
    }

    /// Number of pages that [`KvCache::read_back`](crate::KvCache::read_back) gives for a sequence of `tokens`: home pages, then residual pages.
    #[must_use]
    pub fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size) + self.format.saved_residual_pages(self.page_size, tokens)
    }
}
