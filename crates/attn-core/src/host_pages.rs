//! Pages in host memory, written by the scalar quantizers: the bytes that every backend reproduces. `attn-cpu` writes them by vectors.

use std::{any::Any, ops::Range};

use half::bf16;

use crate::{
    cache::{CacheAccess, FirstTile, PageStore, TokenWrite},
    cache_config::CacheConfig,
    centres::{CENTRES, centre_of, mean, sum_of_tile, to_centre},
    error::{Error, filled, reserve},
    layout::{PageLayout, Side},
    quant::{self, Param},
    rotation::rotate_stored,
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
    /// Centres of K of each layer, `[num_sequences, num_kv_heads, 2, head_dim]`; nothing in a cache without.
    centres: Vec<Vec<bf16>>,
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
            centres: (0..config.layers)
                .map(|_| centres(config))
                .collect::<Result<_, _>>()?,
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

    /// The centres of K of one KV head of a sequence of a layer, first and second; `None` where there are none.
    #[must_use]
    pub fn centres(
        &self,
        layer: usize,
        sequence: usize,
        head: usize,
    ) -> Option<[&[bf16]; CENTRES]> {
        let dim = self.layout.head_dim().k;
        let first = (sequence * self.layout.num_kv_heads() + head) * CENTRES * dim;
        let both = self.centres.get(layer)?.get(first..first + CENTRES * dim)?;
        let (first, second) = both.split_at(dim);
        Some([first, second])
    }

    /// For backends that write pages and centres themselves: one layer's pool, and its centres, `[num_sequences, num_kv_heads, 2, head_dim]`.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    pub fn parts_mut(&mut self, _: &CacheAccess, layer: usize) -> (&mut [u8], &mut [bf16]) {
        (self.pools[layer].pages_mut(), &mut self.centres[layer])
    }

    /// The place of a centre of K in a layer.
    fn centre_at(&self, sequence: usize, head: usize, centre: usize) -> Range<usize> {
        let dim = self.layout.head_dim().k;
        let heads = self.layout.num_kv_heads();
        let first = ((sequence * heads + head) * CENTRES + centre) * dim;
        first..first + dim
    }

    /// The row of K to store: rotated, and without its centre, which it is itself at position 0.
    fn centred(&mut self, [layer, head]: [usize; 2], write: &TokenWrite, x: &[f32]) -> Vec<f32> {
        let mut row = x.to_vec();
        rotate_stored(&mut row);
        let at = self.centre_at(write.sequence, head, centre_of(write.position));
        let centre = &mut self.centres[layer][at];
        if write.position == 0 {
            let elements = centre.iter_mut().zip(&row);
            elements.for_each(|(c, x)| *c = to_centre(*x));
        }
        let elements = row.iter_mut().zip(&*centre);
        elements.for_each(|(x, c)| *x -= c.to_f32());
        row
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
        let scale = scales.get(head).copied().unwrap_or(1.0);
        let codes = &mut scratch.codes[..part.dim()];
        let groups = part.groups();
        let params = &mut scratch.params[..groups.count()];
        match side == Side::K && self.config.centres {
            true => {
                let row = self.centred([layer, head], write, x);
                quant::encode_stored(part.scheme, scale, &row, groups, codes, params);
            }
            false => quant::encode(part.scheme, scale, x, groups, codes, params),
        }
        let pool = self.pools[layer].pages_mut();
        let run = &mut pool[layout.run(write.page, head)];
        part.store_codes(run, write.token, codes);
        part.store_params(run, write.token, params);
        if let (Some(page), Some(part)) = (write.residual_page, layout.residual(side)) {
            let run = &mut pool[layout.run(page, head)];
            part.store_codes(run, write.token, codes);
        }
    }
}

/// Elements of the centres of one layer.
fn centres_len(config: &CacheConfig) -> usize {
    config.num_sequences.saturating_mul(config.centres_bytes()) / size_of::<bf16>()
}

/// The centres of one layer, zeros.
fn centres(config: &CacheConfig) -> Result<Vec<bf16>, Error> {
    filled("centres of K", centres_len(config), bf16::ZERO)
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
        let head_dim = self.layout.head_dim().max();
        let heads = self.layout.num_kv_heads();
        let mut scratch = Scratch {
            codes: vec![0; head_dim],
            params: vec![Param::default(); head_dim / 16],
        };
        for write in writes {
            for head in 0..heads {
                for &side in self.layout.format().stored_sides() {
                    let rows = if side == Side::K { k } else { v };
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

    fn tensor_scales(&self) -> Option<[&[f32]; 2]> {
        Some([&self.config.k_tensor_scales, &self.config.v_tensor_scales])
    }

    fn num_sequences(&self) -> Option<usize> {
        Some(self.config.num_sequences)
    }

    fn has_centres(&self) -> bool {
        self.config.centres
    }

    fn centre(&mut self, _: &CacheAccess, layer: usize, tiles: &[FirstTile]) -> Result<(), Error> {
        for tile in tiles {
            for head in 0..self.layout.num_kv_heads() {
                let sum = sum_of_tile(&self.layout, |page| {
                    let fine = tile.residual_pages[page];
                    let fine = fine.map(|page| self.run(layer, page, head));
                    (self.run(layer, tile.pages[page], head), fine)
                });
                let [first, second] = [0, 1].map(|c| self.centre_at(tile.sequence, head, c));
                let (before, second) = self.centres[layer].split_at_mut(second.start);
                let elements = second.iter_mut().zip(&before[first]).zip(sum);
                elements.for_each(|((second, first), sum)| *second = mean(*first, sum));
            }
        }
        Ok(())
    }

    fn read_centres(
        &self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let first = self.centre_at(sequence, 0, 0).start;
        let centres = &self.centres[layer][first..];
        let places = out.chunks_exact_mut(2).zip(centres);
        places.for_each(|(out, c)| out.copy_from_slice(&c.to_le_bytes()));
        Ok(())
    }

    fn write_centres(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let first = self.centre_at(sequence, 0, 0).start;
        let (elements, _) = bytes.as_chunks();
        let places = self.centres[layer][first..].iter_mut().zip(elements);
        places.for_each(|(c, bytes)| *c = bf16::from_le_bytes(*bytes));
        Ok(())
    }

    fn grow_centres(&mut self, _: &CacheAccess, sequences: usize) -> Result<(), Error> {
        let mut config = self.config.clone();
        config.num_sequences = config.num_sequences.saturating_add(sequences);
        let len = centres_len(&config);
        for centres in &mut self.centres {
            reserve("centres of K", centres, len - centres.len())?;
        }
        for centres in &mut self.centres {
            centres.resize(len, bf16::ZERO);
        }
        self.config = config;
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
        grown.centres = std::mem::take(&mut self.centres);
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
/// let config = CacheConfig::builder(KvFormat::INT8, Heads::new(1, 1, 64)).max_len(64).build();
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

    /// Does what [`PageStore::centre`] documents.
    ///
    /// # Errors
    /// Those of [`PageStore::centre`].
    fn centre(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        self.pages_mut().centre(access, layer, tiles)
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

    fn tensor_scales(&self) -> Option<[&[f32]; 2]> {
        self.pages().tensor_scales()
    }

    fn num_sequences(&self) -> Option<usize> {
        self.pages().num_sequences()
    }

    fn has_centres(&self) -> bool {
        self.pages().has_centres()
    }

    fn centre(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        tiles: &[FirstTile],
    ) -> Result<(), Error> {
        HostStore::centre(self, access, layer, tiles)
    }

    fn read_centres(
        &self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        self.pages().read_centres(access, layer, sequence, out)
    }

    fn write_centres(
        &mut self,
        access: &CacheAccess,
        layer: usize,
        sequence: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.pages_mut()
            .write_centres(access, layer, sequence, bytes)
    }

    fn grow_centres(&mut self, access: &CacheAccess, sequences: usize) -> Result<(), Error> {
        self.pages_mut().grow_centres(access, sequences)
    }

    fn grow(&mut self, access: &CacheAccess, pages: usize) -> Result<(), Error> {
        self.pages_mut().grow(access, pages)
    }

    fn as_any(&self) -> &dyn Any {
        HostStore::as_any(self)
    }
}
