//! Where each code and each parameter of a page lies: the address formulas of `FORMATS.md`.

use std::ops::Range;

use crate::{
    convert::rows::check_values,
    error::{Error, refuse},
    format::{Int4Scale, Int8Scale, KvFormat, Scheme},
    host_pages::{load_code, load_param},
    problem::check_head_dim,
    quant::Param,
};

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

/// Slot of token `t` (0..16) in a panel of V: the order in which a tensor core's first product comes out.
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

/// `k_code` or `v_code`.
type Address = fn(usize, usize, usize, usize, usize) -> CodeAddr;

/// A page's parts and sizes for one format; holding one proves that the format has such pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLayout {
    format: KvFormat,
    head_dim: usize,
    page_size: usize,
    num_kv_heads: usize,
}

/// Page sizes that the library defines, in tokens.
pub const PAGE_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Most KV heads of a problem or a cache.
pub const MAX_KV_HEADS: usize = 65536;

/// Bytes of the parameters of one side of a run of `page_size` tokens.
pub fn params_bytes(scheme: Scheme, head_dim: usize, page_size: usize) -> usize {
    match scheme {
        Scheme::F16 | Scheme::Bf16 | Scheme::Fp8E4m3 | Scheme::Int8(Int8Scale::Tensor) => 0,
        Scheme::Int8(_) => scheme.groups(head_dim) * page_size * 2,
        Scheme::Int4(Int4Scale::Groups(g)) => g as usize * page_size * 4,
        Scheme::Int4(Int4Scale::Channel) => head_dim * 4,
    }
}

/// Bytes of one KV head's run of a page: codes and parameters of K and of V.
pub fn run_bytes(format: KvFormat, head_dim: usize, page_size: usize) -> usize {
    let part = |scheme: Scheme| {
        page_size * head_dim * scheme.code_bits() / 8 + params_bytes(scheme, head_dim, page_size)
    };
    part(format.k) + part(format.v)
}

/// Refuses numbers of KV heads that no cache and no problem has.
pub(crate) fn check_kv_heads(num_kv_heads: usize) -> Result<(), Error> {
    if (1..=MAX_KV_HEADS).contains(&num_kv_heads) {
        Ok(())
    } else {
        refuse("num_kv_heads", num_kv_heads, "1 to 65536")
    }
}

impl PageLayout {
    /// Pages of `page_size` tokens of `num_kv_heads` KV heads.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a head_dim, page size, number of heads or scheme that the library does not define, and for pages of
    /// more than `i32::MAX` bytes, which kernels cannot address.
    pub fn new(
        format: KvFormat,
        head_dim: usize,
        page_size: usize,
        num_kv_heads: usize,
    ) -> Result<Self, Error> {
        check_head_dim(head_dim)?;
        if !PAGE_SIZES.contains(&page_size) {
            return refuse("page_size", page_size, "16, 32, 64, 128");
        }
        check_kv_heads(num_kv_heads)?;
        format.check(head_dim, page_size)?;
        let layout = PageLayout {
            format,
            head_dim,
            page_size,
            num_kv_heads,
        };
        let bytes = num_kv_heads.checked_mul(layout.run_bytes());
        if bytes.is_none_or(|bytes| bytes > i32::MAX as usize) {
            return refuse(
                "page bytes",
                format!("{num_kv_heads} heads of {} bytes", layout.run_bytes()),
                "at most 2^31 - 1 bytes a page; use smaller pages",
            );
        }
        Ok(layout)
    }

    /// What is stored.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Elements per token and KV head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Tokens per page: 16, 32, 64 or 128.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// KV heads, each with a run of its own.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Bytes of one part's codes.
    fn codes_bytes(&self, scheme: Scheme) -> usize {
        self.page_size * self.head_dim * scheme.code_bits() / 8
    }

    /// K codes inside a run.
    pub fn k_codes(&self) -> Range<usize> {
        0..self.codes_bytes(self.format.k)
    }

    /// K parameters inside a run.
    pub fn k_params(&self) -> Range<usize> {
        let start = self.k_codes().end;
        start..start + params_bytes(self.format.k, self.head_dim, self.page_size)
    }

    /// V codes inside a run.
    pub fn v_codes(&self) -> Range<usize> {
        let start = self.k_params().end;
        start..start + self.codes_bytes(self.format.v)
    }

    /// V parameters inside a run.
    pub fn v_params(&self) -> Range<usize> {
        let start = self.v_codes().end;
        start..start + params_bytes(self.format.v, self.head_dim, self.page_size)
    }

    /// Bytes of one KV head's run.
    pub fn run_bytes(&self) -> usize {
        self.v_params().end
    }

    /// Bytes of one page: all runs.
    pub fn page_bytes(&self) -> usize {
        self.num_kv_heads * self.run_bytes()
    }

    /// Where `head`'s run of `page` lies in the pool.
    pub fn run(&self, page: u32, head: usize) -> Range<usize> {
        let start = page as usize * self.page_bytes() + head * self.run_bytes();
        start..start + self.run_bytes()
    }

    /// Whether sequences own a tail page (`Int4 Channel` K).
    pub fn has_tail_page(&self) -> bool {
        self.format.has_tail_page()
    }

    /// The layout by which a tail page holds K: `Int8 Token` at offset 0.
    pub fn tail_k(&self) -> PageLayout {
        PageLayout {
            format: KvFormat {
                k: Scheme::Int8(Int8Scale::Token),
                v: self.format.v,
            },
            ..*self
        }
    }

    /// Mean bytes per token and KV head of full pages, scales included.
    pub fn bytes_per_token(&self) -> f64 {
        self.run_bytes() as f64 / self.page_size as f64
    }

    /// Zeroes what a page with `tokens` written tokens leaves unwritten, so that pages can be compared.
    ///
    /// `page` is one page's bytes; `k_open` says that K lies in the tail page instead.
    ///
    /// # Errors
    /// [`Error::Length`] if `page` is not one page long; [`Error::Parameter`] for more tokens than a page holds.
    pub fn canonical(&self, page: &mut [u8], tokens: usize, k_open: bool) -> Result<(), Error> {
        if tokens > self.page_size {
            return refuse("tokens of a page", tokens, "at most the page size");
        }
        if page.len() != self.page_bytes() {
            return Err(Error::Length {
                what: "page",
                given: page.len(),
                needed: self.page_bytes(),
            });
        }
        for run in page.chunks_exact_mut(self.run_bytes()) {
            let mut kept = vec![0u8; run.len()];
            let mut keep = |at: usize, mask: u8| kept[at] |= mask;
            if !k_open {
                self.mark(
                    self.format.k,
                    self.k_codes().start,
                    self.k_params().start,
                    tokens,
                    k_code,
                    &mut keep,
                );
            }
            self.mark(
                self.format.v,
                self.v_codes().start,
                self.v_params().start,
                tokens,
                v_code,
                &mut keep,
            );
            run.iter_mut()
                .zip(&kept)
                .for_each(|(byte, mask)| *byte &= mask);
        }
        Ok(())
    }

    /// Pages that [`KvCache::read_back`](crate::KvCache::read_back) gives for a sequence of `tokens`: home pages, and the tail page while one is open.
    pub fn pages_of(&self, tokens: usize) -> usize {
        let tail = self.has_tail_page() && !tokens.is_multiple_of(self.page_size);
        tokens.div_ceil(self.page_size) + usize::from(tail)
    }

    /// Refuses pages of a sequence of `tokens` that no quantizer can have written: NaN or infinite values, negative scales.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::BadBytes`].
    pub fn check_pages(&self, pages: &[Vec<u8>], tokens: usize) -> Result<(), Error> {
        let length = |what, given, needed| {
            if given == needed {
                Ok(())
            } else {
                Err(Error::Length {
                    what,
                    given,
                    needed,
                })
            }
        };
        length("pages", pages.len(), self.pages_of(tokens))?;
        let home = tokens.div_ceil(self.page_size);
        for (i, page) in pages.iter().enumerate() {
            let stored = if i < home { *self } else { self.tail_k() };
            length("page", page.len(), stored.page_bytes())?;
            let used = tokens - i.min(home - 1) * self.page_size;
            let used = used.min(self.page_size);
            let k_open = self.has_tail_page() && used < self.page_size;
            let parts = [
                (
                    stored.format.k,
                    stored.k_codes(),
                    stored.k_params(),
                    k_code as Address,
                ),
                (
                    stored.format.v,
                    stored.v_codes(),
                    stored.v_params(),
                    v_code as Address,
                ),
            ];
            for head in 0..self.num_kv_heads {
                let run = stored.run(0, head);
                for (side, (scheme, codes, params, address)) in parts.iter().enumerate() {
                    // While the last page is open, K lies in the tail page, and only K does.
                    let is_k = side == 0;
                    let here = if i < home { !(is_k && k_open) } else { is_k };
                    if !here {
                        continue;
                    }
                    let bytes = &page[run.clone()];
                    stored
                        .check_part(
                            *scheme,
                            &bytes[codes.clone()],
                            &bytes[params.clone()],
                            *address,
                            used,
                        )
                        .map_err(|what| Error::BadBytes {
                            what,
                            offset: run.start,
                            scheme: *scheme,
                        })?;
                }
            }
        }
        Ok(())
    }

    fn check_part(
        &self,
        scheme: Scheme,
        codes: &[u8],
        params: &[u8],
        address: Address,
        tokens: usize,
    ) -> Result<(), &'static str> {
        let bits = scheme.code_bits();
        let groups = match scheme {
            Scheme::Int4(Int4Scale::Channel) => self.head_dim,
            _ => scheme.groups(self.head_dim),
        };
        for t in 0..tokens {
            let row: Vec<u16> = (0..self.head_dim)
                .map(|d| {
                    load_code(
                        codes,
                        bits,
                        address(bits, self.head_dim, self.page_size, t, d),
                    )
                })
                .collect();
            let params: Vec<Param> = (0..groups)
                .map(|g| load_param(params, scheme, self.page_size, t, g))
                .collect();
            check_values(scheme, &row, &params)?;
        }
        Ok(())
    }

    /// Marks the written bytes of one part.
    fn mark(
        &self,
        scheme: Scheme,
        codes: usize,
        params: usize,
        tokens: usize,
        addr: Address,
        keep: &mut impl FnMut(usize, u8),
    ) {
        let bits = scheme.code_bits();
        for t in 0..tokens {
            for d in 0..self.head_dim {
                let at = addr(bits, self.head_dim, self.page_size, t, d);
                match bits {
                    16 => (0..2).for_each(|i| keep(codes + at.byte + i, 0xff)),
                    8 => keep(codes + at.byte, 0xff),
                    _ => keep(codes + at.byte, 0xf << at.shift),
                }
            }
        }
        let bytes = params_bytes(scheme, self.head_dim, self.page_size);
        if scheme == Scheme::Int4(Int4Scale::Channel) {
            (0..bytes).for_each(|i| keep(params + i, 0xff));
        } else if bytes > 0 {
            let groups = scheme.groups(self.head_dim);
            let each = bytes / groups / self.page_size;
            for g in 0..groups {
                for i in 0..tokens * each {
                    keep(params + g * self.page_size * each + i, 0xff);
                }
            }
        }
    }
}
