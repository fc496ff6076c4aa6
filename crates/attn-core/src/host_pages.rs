//! Pages in host memory, written by the scalar quantizers: the bytes that every backend reproduces. `attn-cpu` writes them by vectors.

use std::any::Any;

use crate::{
    cache::{CacheAccess, PageStore, TokenWrite},
    cache_config::CacheConfig,
    error::{Error, filled},
    layout::{PageLayout, Side},
    quant::{self, Param},
    wide_rows::WideRows,
};

const HUGE_PAGE: usize = 2 << 20;

/// Bytes that are copied at once, or left alone if all are zero, when the pool grows.
const UNTOUCHED: usize = 4 << 10;

/// A pool of pages in host memory.
#[derive(Debug)]
pub struct HostPages {
    config: CacheConfig,
    layout: PageLayout,
    /// The pool, and slack in front of it up to `start`.
    bytes: Vec<u8>,
    start: usize,
}

impl HostPages {
    /// Allocates a zeroed pool.
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
    #[must_use]
    pub fn pool(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// For backends that write the pages themselves: the whole pool, page after page.
    pub fn pool_mut(&mut self, _: &CacheAccess) -> &mut [u8] {
        self.bytes_mut()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }

    /// One KV head's run of one page.
    #[must_use]
    pub fn run(&self, page: u32, head: usize) -> &[u8] {
        &self.pool()[self.layout.run(page, head)]
    }

    fn write_side(
        &mut self,
        write: &TokenWrite,
        head: usize,
        x: &[f32],
        side: Side,
        scratch: &mut Scratch,
    ) {
        let layout = self.layout;
        let part = layout.part(side);
        let scales = match side {
            Side::K => &self.config.k_tensor_scales,
            Side::V => &self.config.v_tensor_scales,
        };
        let scale = scales.get(head).copied().unwrap_or(1.0);
        let params = &mut scratch.params[..part.scheme.groups(layout.head_dim())];
        quant::encode(part.scheme, scale, x, &mut scratch.codes, params);
        let run = &mut self.bytes_mut()[layout.run(write.page, head)];
        part.store_codes(run, write.token, &scratch.codes);
        part.store_params(run, write.token, params);
        if let (Some(page), Some(part)) = (write.residual_page, layout.residual(side)) {
            let run = &mut self.bytes_mut()[layout.run(page, head)];
            part.store_codes(run, write.token, &scratch.codes);
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
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        let head_dim = self.layout.head_dim();
        let heads = self.layout.num_kv_heads();
        let mut scratch = Scratch {
            codes: vec![0; head_dim],
            params: vec![Param::default(); head_dim / 16],
        };
        for write in writes {
            for head in 0..heads {
                for (rows, side) in [(k, Side::K), (v, Side::V)] {
                    let x = rows.row(write.source, head);
                    self.write_side(write, head, x, side, &mut scratch);
                }
            }
        }
        Ok(())
    }

    fn read_pages(&self, _: &CacheAccess, pages: &[u32], out: &mut [u8]) -> Result<(), Error> {
        let (size, pool) = (self.layout.page_bytes(), self.pool());
        for (page, out) in pages.iter().zip(out.chunks_exact_mut(size)) {
            out.copy_from_slice(&pool[*page as usize * size..][..size]);
        }
        Ok(())
    }

    fn write_pages(&mut self, _: &CacheAccess, pages: &[u32], bytes: &[u8]) -> Result<(), Error> {
        let (size, pool) = (self.layout.page_bytes(), self.bytes_mut());
        for (page, bytes) in pages.iter().zip(bytes.chunks_exact(size)) {
            pool[*page as usize * size..][..size].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn grow(&mut self, _: &CacheAccess, pages: usize) -> Result<(), Error> {
        let mut config = self.config.clone();
        config.num_pages = config.num_pages.saturating_add(pages);
        let mut grown = HostPages::new(&config)?;
        let parts = grown.bytes_mut().chunks_mut(UNTOUCHED);
        for (to, from) in parts.zip(self.pool().chunks(UNTOUCHED)) {
            // Memory that was never written stays without a page of the machine's.
            if from.iter().fold(0, |any, byte| any | byte) != 0 {
                to[..from.len()].copy_from_slice(from);
            }
        }
        *self = grown;
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
