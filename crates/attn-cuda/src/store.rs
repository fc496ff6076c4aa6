//! A pool of pages in device memory.

use std::{any::Any, ops::Range, sync::Arc};

use attn_core::{CacheAccess, CacheConfig, Error, PageLayout, PageStore, TokenWrite, WideRows};
use attn_kernels::cuda::Instance;
use cudarc::driver::{CudaSlice, DevicePtr};

use crate::{
    device::{Device, LoadedKernel},
    error::failed,
    native::{self, AppendArgs, DeviceAddress, Dtype, KvRows, PagedSequences, Pages},
    sizes,
    upload::{Upload, bytes_of},
};

/// The pages of one cache: a pool for each layer.
#[derive(Debug)]
pub struct CudaPages {
    device: Arc<Device>,
    layout: PageLayout,
    layers: usize,
    num_pages: usize,
    /// For each layer the pages, and one of zeros behind them, which stands for pages that were dropped
    /// ([`DeviceTables`](crate::device_tables::DeviceTables)).
    pool: CudaSlice<u8>,
    /// K's static scales of all layers, then V's.
    tensor_scales: CudaSlice<f32>,
    num_scales: [usize; 2],
    /// Slots of a sequence's residual pages.
    residual_slots: usize,
    append: Arc<LoadedKernel>,
}

/// Consecutive tokens of one sequence, which one launch appends.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    /// The first token's index in K and V.
    source: usize,
    tokens: usize,
    /// Where the run's words begin: its pages, the slots of its residual pages, the length behind its last token.
    words: usize,
    pages: usize,
}

/// In the slot of a page that keeps no residuals; `append.cu` knows it.
const NO_PAGE: u32 = u32::MAX;

/// How many writes from the first on one launch can take.
fn first_run(writes: &[TokenWrite], page_size: usize) -> usize {
    let follows = |a: &TokenWrite, b: &TokenWrite| {
        b.source == a.source + 1
            && b.token == (a.token + 1) % page_size
            && (b.token == 0) == (b.page != a.page)
            && (b.token == 0 || b.residual_page == a.residual_page)
    };
    1 + writes
        .windows(2)
        .take_while(|pair| follows(&pair[0], &pair[1]))
        .count()
}

/// The launches of checked writes, and the words that they read on the device.
///
/// The kernel writes residuals of a run's last `slots` pages: writes that ask for others are refused.
fn runs(
    writes: &[TokenWrite],
    [page_size, slots]: [usize; 2],
) -> Result<(Vec<Run>, Vec<u32>), Error> {
    let (mut runs, mut words, mut left) = (Vec::new(), Vec::<u32>::new(), writes);
    while let Some(first) = left.first() {
        let (run, rest) = left.split_at(first_run(left, page_size));
        let at = words.len();
        let mut residuals = Vec::new();
        for write in run {
            if words.len() == at || write.token == 0 {
                words.push(write.page);
                residuals.push(write.residual_page);
            }
        }
        let pages = words.len() - at;
        let mut ring = vec![NO_PAGE; slots];
        for (i, residual) in residuals.iter().enumerate() {
            let has_slot = i + slots >= pages && slots > 0;
            let is_last = i + 1 == pages && slots > 0;
            if residual.is_some() && !has_slot || residual.is_none() && is_last {
                return Err(Error::parameter(
                    "residual page",
                    format_args!("{residual:?} of page {i} of {pages}"),
                    "a page of the pool for those of the last pages that keep residuals, the last one among them; none for others",
                ));
            }
            if let Some(page) = residual {
                ring[i % slots] = *page;
            }
        }
        let len = sizes::int("tokens to append at once", first.token + run.len())?;
        words.extend(ring);
        words.push(len.unsigned_abs());
        runs.push(Run {
            source: first.source,
            tokens: run.len(),
            words: at,
            pages,
        });
        left = rest;
    }
    Ok((runs, words))
}

/// Refuses writes beyond the pool, a page, or K and V: kernels do not check addresses.
pub(crate) fn check_writes(
    layout: &PageLayout,
    num_pages: usize,
    writes: &[TokenWrite],
    k_len: usize,
    v_len: usize,
) -> Result<(), Error> {
    let row = layout.num_kv_heads() * layout.head_dim();
    let length = |what, given, needed| {
        Err(Error::Length {
            what,
            given,
            needed,
        })
    };
    if v_len != k_len {
        return length("v", v_len, k_len);
    }
    let rows = k_len / row;
    for write in writes {
        if write.source >= rows {
            let needed = write.source.saturating_add(1).saturating_mul(row);
            return length("k", k_len, needed);
        }
        check_page(write.page, num_pages)?;
        if write.token >= layout.page_size() {
            return Err(Error::parameter(
                "token of a page",
                write.token,
                "an index below page_size",
            ));
        }
        if let Some(page) = write.residual_page {
            check_page(page, num_pages)?;
        }
    }
    Ok(())
}

fn check_layer(given: usize, count: usize) -> Result<(), Error> {
    if given >= count {
        return Err(Error::Layer { given, count });
    }
    Ok(())
}

fn check_page(page: u32, num_pages: usize) -> Result<(), Error> {
    if page as usize >= num_pages {
        return Err(Error::parameter("page", page, "a page of the pool"));
    }
    Ok(())
}

impl CudaPages {
    pub(crate) fn new(device: Arc<Device>, config: &CacheConfig) -> Result<Self, Error> {
        let (bytes, layout) = (config.pool_bytes()?, config.layout()?);
        native::check_heads(config.num_kv_heads)?;
        let (format, page_size) = (config.format, config.page_size);
        let residual_slots = format.residual_slots(page_size, config.max_q_len);
        let append = device.kernel(
            &Instance::Append {
                format,
                head_dim: config.head_dim,
                page_size,
                rotary: false,
            },
            0,
        )?;
        let pool = device
            .stream
            .alloc_zeros(bytes.saturating_add(config.layers * layout.page_bytes()))
            .map_err(failed("allocating the page pool"))?;
        let mut scales = config.k_tensor_scales.clone();
        scales.extend(&config.v_tensor_scales);
        scales.push(1.0);
        let mut tensor_scales = device
            .stream
            .alloc_zeros(scales.len())
            .map_err(failed("allocating the tensor scales"))?;
        device
            .upload(&scales, &mut tensor_scales)
            .map_err(failed("copying the tensor scales"))?;
        Ok(CudaPages {
            layout,
            layers: config.layers,
            num_pages: config.num_pages,
            pool,
            tensor_scales,
            num_scales: [&config.k_tensor_scales, &config.v_tensor_scales].map(Vec::len),
            residual_slots,
            append,
            device,
        })
    }

    /// Whether `device` holds it.
    pub(crate) fn lies_on(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// Pages that page tables of this pool may name: its own and the page of zeros.
    pub(crate) fn pages_to_read(&self) -> usize {
        self.num_pages + 1
    }

    /// Whether it has the layer.
    pub(crate) fn has_layer(&self, layer: usize) -> bool {
        layer < self.layers
    }

    /// Where a layer's pages begin, in bytes: behind those of the layers before, and their pages of zeros.
    fn layer_start(&self, layer: usize) -> usize {
        layer * self.pages_to_read() * self.layout.page_bytes()
    }

    /// The first `count` pages of a layer's pool, for native callers.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    #[must_use]
    pub fn pages(&self, layer: usize, count: usize) -> Pages {
        assert!(self.has_layer(layer), "layer {layer} of {}", self.layers);
        let at = DeviceAddress::new(self.pool.device_ptr(&self.device.stream).0);
        Pages::new(at.offset(self.layer_start(layer)), &self.layout, count)
    }

    /// Device addresses of a layer's static scales of K and V, null where the scheme has none.
    ///
    /// # Panics
    /// For a layer that the cache does not have.
    #[must_use]
    pub fn tensor_scale_addresses(&self, layer: usize) -> [DeviceAddress; 2] {
        assert!(self.has_layer(layer), "layer {layer} of {}", self.layers);
        let base = DeviceAddress::new(self.tensor_scales.device_ptr(&self.device.stream).0);
        let [k, v] = self.num_scales;
        let first = layer * self.layout.num_kv_heads();
        [
            base.offset(4 * first).given(k > 0),
            base.offset(4 * (k + first)).given(v > 0),
        ]
    }

    /// Where pages lie in a layer's pool: those that follow each other there as one part, which one copy takes. Refuses pages outside, and other
    /// than their `bytes`.
    fn parts(&self, layer: usize, pages: &[u32], bytes: usize) -> Result<Vec<Range<usize>>, Error> {
        check_layer(layer, self.layers)?;
        let (size, start) = (self.layout.page_bytes(), self.layer_start(layer));
        pages
            .iter()
            .try_for_each(|page| check_page(*page, self.num_pages))?;
        let needed = pages.len().saturating_mul(size);
        if bytes != needed {
            return Err(Error::Length {
                what: "page bytes",
                given: bytes,
                needed,
            });
        }
        // Below the pool's bytes, which `new` multiplied.
        let place = |run: &[u32]| {
            let first = start + run[0] as usize * size;
            first..first + run.len() * size
        };
        let runs = pages.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        Ok(runs.map(place).collect())
    }

    /// The launch of one run to a layer; `words` is where the device has its words, `k` and `v` where it has all tokens.
    fn run_args(
        &self,
        layer: usize,
        run: &Run,
        [k, v]: [DeviceAddress; 2],
        words: DeviceAddress,
    ) -> AppendArgs {
        let row = self.layout.num_kv_heads() * self.layout.head_dim();
        let offset = run.source * row * 4;
        let page_table = words.offset(4 * run.words);
        let slots = self.residual_slots;
        AppendArgs {
            rows: KvRows {
                k: k.offset(offset),
                v: v.offset(offset),
                dtype: Dtype::F32,
                k_token_stride: row,
                v_token_stride: row,
            },
            sequences: PagedSequences {
                pool: self.pages(layer, self.num_pages),
                page_table,
                page_table_stride: run.pages,
                residual_pages: page_table.offset(4 * run.pages).given(slots > 0),
                residual_slots: slots,
                kv_lens: page_table.offset(4 * (run.pages + slots)),
                tensor_scales: self.tensor_scale_addresses(layer),
            },
            batch: 1,
            tokens: run.tokens,
            rotary: None,
        }
    }
}

impl PageStore for CudaPages {
    fn layout(&self) -> PageLayout {
        self.layout
    }

    fn num_pages(&self) -> usize {
        self.num_pages
    }

    fn layers(&self) -> usize {
        self.layers
    }

    fn append(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        writes: &[TokenWrite],
        k: WideRows<'_>,
        v: WideRows<'_>,
    ) -> Result<(), Error> {
        check_layer(layer, self.layers)?;
        let [k, v] = [k.packed(0..k.shape()[0])?, v.packed(0..v.shape()[0])?];
        check_writes(&self.layout, self.num_pages, writes, k.len(), v.len())?;
        let (runs, words) = runs(writes, [self.layout.page_size(), self.residual_slots])?;
        if runs.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let doing = "copying tokens to append";
        let mut arena = Upload::default();
        let at = [
            arena.add(bytes_of(&k))?,
            arena.add(bytes_of(&v))?,
            arena.add(bytes_of(&words))?,
        ];
        let allocated = device.arena(arena.bytes());
        let (base, _lock) = allocated.map_err(failed("allocating for an append"))?;
        let wait = device.wait_on_drop().map_err(failed(doing))?;
        // SAFETY: the arena, whose lock is held, has room for the parts; they outlive `wait`, which waits for the copies however this
        // function ends.
        unsafe { arena.copy(base, device.stream.cu_stream()) }.map_err(failed(doing))?;
        let [k, v, words] = at.map(|offset| base.offset(offset));
        for run in &runs {
            let args = self.run_args(layer, run, [k, v], words);
            let stream = device.stream.cu_stream();
            // SAFETY: the addresses are this store's pool and scales, and the arena's parts, which are copied ahead on the same stream.
            // `check_writes` has compared pages, residual pages and tokens with the pool and the page, and sources with K and V.
            unsafe { native::launch_append(&self.append, &self.layout, stream, &args, false) }?;
        }
        wait.finish().map_err(failed("appending"))
    }

    fn read_pages(
        &self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let parts = self.parts(layer, pages, out.len())?;
        let copy = || {
            let wait = self.device.wait_on_drop()?;
            let mut out = out;
            for place in parts {
                let (part, rest) = out.split_at_mut(place.len());
                let from = self.pool.slice(place);
                self.device.stream.memcpy_dtoh(&from, part)?;
                out = rest;
            }
            wait.finish()
        };
        copy().map_err(failed("reading pages"))
    }

    fn write_pages(
        &mut self,
        _: &CacheAccess,
        layer: usize,
        pages: &[u32],
        bytes: &[u8],
    ) -> Result<(), Error> {
        let parts = self.parts(layer, pages, bytes.len())?;
        let copy = || {
            let wait = self.device.wait_on_drop()?;
            let mut bytes = bytes;
            for place in parts {
                let (part, rest) = bytes.split_at(place.len());
                let mut to = self.pool.slice_mut(place);
                self.device.stream.memcpy_htod(part, &mut to)?;
                bytes = rest;
            }
            wait.finish()
        };
        copy().map_err(failed("writing pages"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::{Append, Heads};

    use attn_core::{HostPages, KvCache, KvFormat};

    /// On pages of 32 tokens.
    fn config(format: KvFormat, heads: usize) -> CacheConfig {
        let (q, kv, dim) = (heads, heads, 64);
        let builder = CacheConfig::builder(format, Heads { q, kv, dim });
        builder.sequences(2).page_size(32).pages(32).build()
    }

    /// Where the tokens of some appends go.
    fn writes_of(format: KvFormat, before: usize, appends: &[Append]) -> Vec<TokenWrite> {
        let config = config(format, 1);
        let pages = HostPages::new(&config).unwrap();
        let mut cache = KvCache::new(config, Box::new(pages)).unwrap();
        cache
            .append_with(
                &[Append {
                    sequence: 0,
                    tokens: before,
                }],
                |_, _| Ok(()),
            )
            .unwrap();
        let mut all = Vec::new();
        let write = |_: &dyn PageStore, writes: &[TokenWrite]| {
            all = writes.to_vec();
            Ok(())
        };
        cache.append_with(appends, write).unwrap();
        all
    }

    fn writes(before: usize, appends: &[Append]) -> Vec<TokenWrite> {
        writes_of(KvFormat::INT8, before, appends)
    }

    #[test]
    fn runs_end_where_tokens_do_not_follow() {
        let across = writes(
            30,
            &[
                Append {
                    sequence: 0,
                    tokens: 3,
                },
                Append {
                    sequence: 1,
                    tokens: 2,
                },
            ],
        );
        assert_eq!(first_run(&across, 32), 3);
        assert_eq!(first_run(&across[3..], 32), 2);
        let gap = [across[0], across[2]];
        assert_eq!(first_run(&gap, 32), 1);
        // The second sequence's first token is the first of a page, as the one that follows would be, but of another source.
        assert_eq!(first_run(&[across[1], across[3]], 32), 1);
    }

    #[test]
    fn every_run_has_its_pages_and_its_length() {
        let all = writes(
            30,
            &[
                Append {
                    sequence: 0,
                    tokens: 3,
                },
                Append {
                    sequence: 1,
                    tokens: 2,
                },
            ],
        );
        let (runs, words) = runs(&all, [32, 0]).unwrap();
        let run = |source, tokens, words, pages| Run {
            source,
            tokens,
            words,
            pages,
        };
        assert_eq!(runs, [run(0, 3, 0, 2), run(3, 2, 3, 1)]);
        let [a, b, c] = [0, 2, 3].map(|i| all[i].page);
        assert_eq!(words, [a, b, 33, c, 2]);
    }

    /// One token of a cache of four pages and two heads, spoiled.
    fn check(
        format: KvFormat,
        [k_len, v_len]: [usize; 2],
        spoil: impl FnOnce(&mut TokenWrite),
    ) -> Result<(), Error> {
        let mut write = writes_of(
            format,
            0,
            &[Append {
                sequence: 0,
                tokens: 1,
            }],
        )[0];
        (write.page, write.residual_page) = (0, write.residual_page.map(|_| 1));
        spoil(&mut write);
        let layout = config(format, 2).layout().unwrap();
        check_writes(&layout, 4, &[write], k_len, v_len)
    }

    #[test]
    fn writes_beyond_pool_page_or_rows_are_refused() {
        let row = 2 * 64;
        let int8 = |lens, spoil: &dyn Fn(&mut TokenWrite)| check(KvFormat::INT8, lens, spoil);
        let last = |w: &mut TokenWrite| (w.source, w.page, w.token) = (1, 3, 31);
        int8([2 * row; 2], &last).unwrap();
        for page in [4, 5, u32::MAX] {
            let error = int8([row; 2], &|w| w.page = page).unwrap_err();
            assert!(matches!(error, Error::Parameter { what: "page", .. }));
        }
        for token in [32, 1 << 30, usize::MAX] {
            let error = int8([row; 2], &|w| w.token = token).unwrap_err();
            assert!(error.to_string().contains("token"), "{error}");
        }
        for source in [1, 2, usize::MAX] {
            let error = int8([2 * row - 1; 2], &|w| w.source = source).unwrap_err();
            assert!(matches!(error, Error::Length { what: "k", .. }));
        }
        for v_len in [0, row - 1, row + 1, 2 * row] {
            let error = int8([row, v_len], &|_| ()).unwrap_err();
            assert!(matches!(error, Error::Length { what: "v", .. }));
        }
    }

    #[test]
    fn residual_pages_are_in_the_pool() {
        let int4 = |page| check(KvFormat::INT4, [128; 2], |w| w.residual_page = Some(page));
        int4(3).unwrap();
        for page in [4, u32::MAX] {
            assert!(int4(page).is_err(), "{page}");
        }
    }

    #[test]
    fn a_run_has_residual_pages_of_its_last_pages_alone_in_their_slots() {
        // 10 pages of 32 tokens, of which a window of two tiles keeps 8.
        let appends = [Append {
            sequence: 0,
            tokens: 320,
        }];
        let all = writes_of(KvFormat::INT4, 0, &appends);
        let (runs_made, words) = runs(&all, [32, 8]).unwrap();
        assert_eq!((runs_made.len(), runs_made[0].pages), (1, 10));
        let residual = |page: usize| all[page * 32].residual_page;
        assert_eq!([residual(0), residual(1)], [None; 2]);
        for page in 2..10 {
            assert_eq!(Some(words[10 + page % 8]), residual(page), "{page}");
        }
        let spoils: [fn(&mut [TokenWrite]); 2] = [
            |writes| {
                writes[..32]
                    .iter_mut()
                    .for_each(|w| w.residual_page = Some(0))
            },
            |writes| {
                writes[288..]
                    .iter_mut()
                    .for_each(|w| w.residual_page = None)
            },
        ];
        for spoil in spoils {
            let mut spoilt = all.clone();
            spoil(&mut spoilt);
            assert!(runs(&spoilt, [32, 8]).is_err());
        }
    }
}
