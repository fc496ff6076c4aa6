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

/// Pools of pages in host memory, one for each layer.
#[derive(Debug)]
pub struct HostPages {
    config: CacheConfig,
    layout: PageLayout,
    pools: Vec<Pool>,
}

/// The pages of one layer.
#[derive(Debug)]
struct Pool {
    /// The pages, and slack in front of them up to `start`.
    bytes: Vec<u8>,
    start: usize,
}

impl Pool {
    fn new(size: usize) -> Result<Self, Error> {
        // Runs are whole cache lines in most formats; a large pool also starts on a huge page.
        let align = if size < HUGE_PAGE { 64 } else { HUGE_PAGE };
        let bytes = filled("the page pool", size.saturating_add(align), 0)?;
        let start = bytes.as_ptr().align_offset(align).min(align);
        Ok(Pool { bytes, start })
    }

    fn pages(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

impl HostPages {
    /// Allocates zeroed pools.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check`]; [`Error::OutOfMemory`].
    pub fn new(config: &CacheConfig) -> Result<Self, Error> {
        let (size, layout) = (config.pool_bytes()? / config.layers, config.layout()?);
        let pools = (0..config.layers).map(|_| Pool::new(size));
        Ok(HostPages {
            pools: pools.collect::<Result<_, _>>()?,
            layout,
            config: config.clone(),
        })
    }

    /// One layer's whole pool, page after page; `None` for a layer that the cache does not have.
    #[must_use]
    pub fn pool(&self, layer: usize) -> Option<&[u8]> {
        self.pools.get(layer).map(Pool::pages)
    }

    /// For backends that write the pages themselves: one layer's whole pool, page after page.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    pub fn pool_mut(&mut self, _: &CacheAccess, layer: usize) -> &mut [u8] {
        self.pools[layer].pages_mut()
    }

    /// One KV head's run of one page of a layer.
    ///
    /// # Panics
    /// For a layer, a page or a head that the cache does not have.
    #[must_use]
    pub fn run(&self, layer: usize, page: u32, head: usize) -> &[u8] {
        &self.pools[layer].pages()[self.layout.run(page, head)]
    }

    fn write_side(
        &mut self,
        [layer, head]: [usize; 2],
        write: &TokenWrite,
        x: &[f32],
        side: Side,
        scratch: &mut Scratch,
    ) {
        let layout = self.layout;
        let part = layout.part(side);
        let scales = self.config.tensor_scales(layer)[side as usize];
        let pool = self.pools[layer].pages_mut();
        let scale = scales.get(head).copied().unwrap_or(1.0);
        let params = &mut scratch.params[..part.scheme.groups(layout.head_dim())];
        quant::encode(part.scheme, scale, x, &mut scratch.codes, params);
        let run = &mut pool[layout.run(write.page, head)];
        part.store_codes(run, write.token, &scratch.codes);
        part.store_params(run, write.token, params);
        if let (Some(page), Some(part)) = (write.residual_page, layout.residual(side)) {
            let run = &mut pool[layout.run(page, head)];
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

    fn layers(&self) -> usize {
        self.pools.len()
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        layer: usize,
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
                    self.write_side([layer, head], write, x, side, &mut scratch);
                }
            }
        }
        Ok(())
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let (size, pool) = (self.layout.page_bytes(), self.pools[layer].pages());
        for (page, out) in pages.iter().zip(out.chunks_exact_mut(size)) {
            out.copy_from_slice(&pool[*page as usize * size..][..size]);
        }
        Ok(())
    }

    fn write_pages(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let (size, pool) = (self.layout.page_bytes(), self.pools[layer].pages_mut());
        for (page, bytes) in pages.iter().zip(bytes.chunks_exact(size)) {
            pool[*page as usize * size..][..size].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn grow(&mut self, _: &CacheAccess, pages: usize) -> Result<(), Error> {
        let mut config = self.config.clone();
        config.num_pages = config.num_pages.saturating_add(pages);
        let mut grown = HostPages::new(&config)?;
        for (to, from) in grown.pools.iter_mut().zip(&self.pools) {
            let parts = to.pages_mut().chunks_mut(UNTOUCHED);
            for (to, from) in parts.zip(from.pages().chunks(UNTOUCHED)) {
                // Memory that was never written stays without a page of the machine's.
                if from.iter().fold(0, |any, byte| any | byte) != 0 {
                    to[..from.len()].copy_from_slice(from);
                }
            }
        }
        *self = grown;
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A store that is [`HostPages`] but for some calls: what implements it is a [`PageStore`].
///
/// ```
/// use attn_core::{
///     CacheAccess, CacheConfig, Error, Heads, HostPages, HostStore, KvCache, KvFormat, PageStore, TokenWrite, WideRows,
/// };
///
/// /// Pages that count the tokens that are written to them.
/// struct Counting(HostPages, usize);
///
/// impl HostStore for Counting {
///     fn pages(&self) -> &HostPages {
///         &self.0
///     }
///
///     fn pages_mut(&mut self) -> &mut HostPages {
///         &mut self.0
///     }
///
///     fn append(&mut self, access: &CacheAccess, layer: usize, writes: &[TokenWrite], k: WideRows<'_>, v: WideRows<'_>) -> Result<(), Error> {
///         self.1 += writes.len();
///         self.0.append(access, layer, writes, k, v)
///     }
/// }
///
/// let config = CacheConfig::builder(KvFormat::INT8, Heads { q: 1, kv: 1, dim: 64 }).max_len(64).build();
/// let store = Counting(HostPages::new(&config)?, 0);
/// let mut cache = KvCache::new(config, Box::new(store))?;
/// cache.append(0, &[0.5; 64], &[2.0; 64])?;
/// # Ok::<(), Error>(())
/// ```
pub trait HostStore: Send + Sync {
    /// The pages.
    fn pages(&self) -> &HostPages;

    /// The pages, to be written.
    fn pages_mut(&mut self) -> &mut HostPages;

    /// Does what [`PageStore::append`] documents.
    ///
    /// # Errors
    /// Those of [`PageStore::append`].
    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        self.pages_mut().append(access, layer, writes, k, v)
    }

    /// Does what [`PageStore::write_pages`] documents.
    ///
    /// # Errors
    /// Those of [`PageStore::write_pages`].
    fn write_pages(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.pages_mut().write_pages(access, layer, pages, bytes)
    }

    /// Returns the [`HostPages`], which readers of pages in host memory look for; see [`PageStore::as_any`].
    fn as_any(&self) -> &dyn Any {
        self.pages().as_any()
    }
}

impl<T: HostStore> PageStore for T {
    fn layout(&self) -> PageLayout {
        self.pages().layout()
    }

    fn num_pages(&self) -> usize {
        self.pages().num_pages()
    }

    fn layers(&self) -> usize {
        self.pages().layers()
    }

    fn append(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        HostStore::append(self, access, layer, writes, k, v)
    }

    fn read_pages(
        &self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.pages().read_pages(access, layer, pages, out)
    }

    fn write_pages(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        HostStore::write_pages(self, access, layer, pages, bytes)
    }

    fn grow(&mut self, access: &CacheAccess, pages: usize) -> Result<(), Error> {
        self.pages_mut().grow(access, pages)
    }

    fn as_any(&self) -> &dyn Any {
        HostStore::as_any(self)
    }
}
