//! Pages in host memory, written by the scalar quantizers: the bytes that every backend reproduces.

use std::any::Any;

use half::f16;

use crate::{
    cache::{CacheAccess, CacheConfig, PageStore, TokenWrite},
    error::{Error, filled},
    format::{Int4Scale, Scheme},
    layout::{self, CodeAddr, PageLayout},
    quant::{self, Param},
};

const HUGE_PAGE: usize = 2 << 20;

/// A pool in host memory.
#[derive(Debug)]
pub struct HostPages {
    config: CacheConfig,
    layout: PageLayout,
    /// The pool, and slack in front of it up to `start`.
    bytes: Vec<u8>,
    start: usize,
}

/// Reads one stored code.
pub fn load_code(codes: &[u8], bits: usize, at: CodeAddr) -> u16 {
    match bits {
        16 => u16::from_le_bytes([codes[at.byte], codes[at.byte + 1]]),
        8 => u16::from(codes[at.byte]),
        _ => u16::from(codes[at.byte] >> at.shift & 15),
    }
}

/// Writes one code; a low nibble clears the high one, which is written later: of K by a later token, of V by a later dim.
pub fn store_code(codes: &mut [u8], bits: usize, at: CodeAddr, code: u16) {
    match bits {
        16 => codes[at.byte..at.byte + 2].copy_from_slice(&code.to_le_bytes()),
        8 => codes[at.byte] = code as u8,
        _ if at.shift == 0 => codes[at.byte] = code as u8,
        _ => codes[at.byte] = codes[at.byte] & 15 | (code as u8) << 4,
    }
}

fn load_f16(params: &[u8], index: usize) -> f16 {
    f16::from_le_bytes([params[2 * index], params[2 * index + 1]])
}

fn store_f16(params: &mut [u8], index: usize, x: f16) {
    params[2 * index..2 * index + 2].copy_from_slice(&x.to_le_bytes());
}

/// Reads the parameters of group `g` of token `t` (or of dim `g`, for `Int4 Channel`).
pub fn load_param(params: &[u8], scheme: Scheme, page_size: usize, t: usize, g: usize) -> Param {
    match scheme {
        Scheme::Int4(Int4Scale::Channel) => Param {
            scale: load_f16(params, 2 * g),
            shift: load_f16(params, 2 * g + 1),
        },
        Scheme::Int4(_) => {
            let i = 2 * (g * page_size + t);
            Param {
                scale: load_f16(params, i),
                shift: load_f16(params, i + 1),
            }
        }
        Scheme::Int8(_) if !scheme.has_tensor_scale() => Param {
            scale: load_f16(params, g * page_size + t),
            shift: f16::ZERO,
        },
        _ => Param {
            scale: f16::ONE,
            shift: f16::ZERO,
        },
    }
}

/// Writes the parameters of group `g` of token `t`, where the scheme has any per token.
pub fn store_param(
    params: &mut [u8],
    scheme: Scheme,
    page_size: usize,
    t: usize,
    g: usize,
    p: Param,
) {
    let i = g * page_size + t;
    if matches!(scheme, Scheme::Int4(_)) {
        store_f16(params, 2 * i, p.scale);
        store_f16(params, 2 * i + 1, p.shift);
    } else {
        store_f16(params, i, p.scale);
    }
}

impl HostPages {
    /// A zeroed pool.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`]; [`Error::OutOfMemory`].
    pub fn new(config: &CacheConfig) -> Result<Self, Error> {
        let (size, layout) = (config.pool_bytes()?, config.layout()?);
        // Runs are whole cache lines in most formats; a large pool also starts on a huge page.
        let align = if size < HUGE_PAGE { 64 } else { HUGE_PAGE };
        let bytes = filled("the page pool", size.saturating_add(align), 0)?;
        let start = bytes.as_ptr().align_offset(align).min(align);
        Ok(HostPages {
            bytes,
            start,
            layout,
            config: config.clone(),
        })
    }

    /// The whole pool, page after page.
    pub fn pool(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn pool_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    /// One KV head's run of one page.
    pub fn run(&self, page: u32, head: usize) -> &[u8] {
        &self.pool()[self.layout.run(page, head)]
    }

    fn write_side(
        &mut self,
        write: &TokenWrite,
        head: usize,
        x: &[f32],
        is_k: bool,
        scratch: &mut Scratch,
    ) {
        let (layout, page_size, head_dim) =
            (self.layout, self.layout.page_size(), self.layout.head_dim());
        let open_channel = is_k && layout.has_tail_page();
        let stored = if open_channel {
            layout.tail_k()
        } else {
            layout
        };
        let (scheme, codes_at, params_at, scales) = if is_k {
            (
                stored.format().k,
                stored.k_codes(),
                stored.k_params(),
                &self.config.k_tensor_scales,
            )
        } else {
            (
                stored.format().v,
                stored.v_codes(),
                stored.v_params(),
                &self.config.v_tensor_scales,
            )
        };
        let params = &mut scratch.params[..scheme.groups(head_dim)];
        quant::encode(
            scheme,
            scales.get(head).copied().unwrap_or(1.0),
            x,
            &mut scratch.codes,
            params,
        );
        let page = if open_channel {
            write
                .tail_page
                .expect("KvCache gives Int4 Channel a tail page")
        } else {
            write.page
        };
        let run = &mut self.pool_mut()[layout.run(page, head)];
        let address = if is_k { layout::k_code } else { layout::v_code };
        let bits = scheme.code_bits();
        for (d, &code) in scratch.codes.iter().enumerate() {
            store_code(
                &mut run[codes_at.clone()],
                bits,
                address(bits, head_dim, page_size, write.token, d),
                code,
            );
        }
        if params_at.is_empty() {
            return;
        }
        for (g, p) in params.iter().enumerate() {
            store_param(
                &mut run[params_at.clone()],
                scheme,
                page_size,
                write.token,
                g,
                *p,
            );
        }
    }

    /// Re-codes a full page's K per channel, from the `Int8 Token` values in the tail page.
    fn seal(&mut self, page: u32, tail_page: u32, head: usize) {
        let (layout, page_size, head_dim) =
            (self.layout, self.layout.page_size(), self.layout.head_dim());
        let tail = layout.tail_k();
        let open = self.pool()[layout.run(tail_page, head)][..tail.k_params().end].to_vec();
        let (open_codes, open_params) = open.split_at(tail.k_codes().end);
        let run = &mut self.pool_mut()[layout.run(page, head)];
        let (mut x, mut codes) = (vec![0.0; page_size], vec![0; page_size]);
        run[layout.k_codes()].fill(0);
        for d in 0..head_dim {
            for (t, x) in x.iter_mut().enumerate() {
                let code = load_code(open_codes, 8, layout::k_code(8, head_dim, page_size, t, d));
                let param = load_param(open_params, tail.format().k, page_size, t, 0);
                *x = quant::decode(tail.format().k, code, param, 1.0);
            }
            let param = quant::int4_group(&x, &mut codes);
            for (t, &code) in codes.iter().enumerate() {
                let at = layout::k_code(4, head_dim, page_size, t, d);
                run[layout.k_codes()][at.byte] |= (code as u8) << at.shift;
            }
            store_f16(&mut run[layout.k_params()], 2 * d, param.scale);
            store_f16(&mut run[layout.k_params()], 2 * d + 1, param.shift);
        }
    }
}

struct Scratch {
    codes: Vec<u16>,
    params: Vec<Param>,
}

impl PageStore for HostPages {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.config.num_pages
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        writes: &[TokenWrite],
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error> {
        let head_dim = self.layout.head_dim();
        let heads = self.layout.num_kv_heads();
        let mut scratch = Scratch {
            codes: vec![0; head_dim],
            params: vec![Param::default(); head_dim / 16],
        };
        for write in writes {
            for head in 0..heads {
                let at = (write.source * heads + head) * head_dim;
                self.write_side(write, head, &k[at..at + head_dim], true, &mut scratch);
                self.write_side(write, head, &v[at..at + head_dim], false, &mut scratch);
                if let (Some(tail), true) = (write.tail_page, write.fills(self.layout.page_size()))
                {
                    self.seal(write.page, tail, head);
                }
            }
        }
        Ok(())
    }

    fn read_page(&self, _: &CacheAccess, page: u32) -> Result<Vec<u8>, Error> {
        let size = self.layout.page_bytes();
        Ok(self.pool()[page as usize * size..][..size].to_vec())
    }

    fn write_page(&mut self, _: &CacheAccess, page: u32, bytes: &[u8]) -> Result<(), Error> {
        let size = self.layout.page_bytes();
        self.pool_mut()[page as usize * size..][..size].copy_from_slice(bytes);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
